"""The cost of a deployed controller itself: the time of a decision for one request, as training
expects it and as it is measured.

In front of a model a decision is never repeated at once: the model has run in between, and the
caches hold its weights and its code. A decision then takes several times as long as in a loop of
decisions. So a transformer runs before each that is timed, and the features are pooled, whose time
`ProfileTable.features_ms` is. Where a guard falls back to static, features are neither pooled nor
charged. Baselines and teachers decide for free.

A machine that is busy for a second makes what is timed in that second look slow. So all controllers
are timed in turn, in several rounds, and the quickest round counts, as in Python's timeit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import MS

if TYPE_CHECKING:
    from knobwise.agents.deployed.controller import NumpyController

EXPECTED_US = 30.0
"""The time of a decision, by rule of thumb. Validation and calibration charge this, so that
they are repeatable; results are charged what was measured."""
TEXT_US = 70.0
"""What a text adds to that."""
CHARACTER_US = 0.1
"""What each character of a text adds."""
clock_ns = perf_counter_ns
"""What decisions are timed by."""
ROUNDS = 3
CALLS = 20
"""Number of decisions that are timed for each budget in a round."""
WARM_UP = 5
"""Number of decisions before these."""
# the transformer has 3 MB of weights, as the elastic model; behind larger models, which take
# longer, decisions cost next to nothing
WIDTH = 128
LAYERS = 4
TOKENS = 32


class Decider(Protocol):
    """What can be timed: a controller, or another form of it."""

    def decide_index(self, features: Any, budget_ms: float, /) -> Any:
        """Decide for one request."""
        ...


class OwnCost(NamedTuple):
    """The costs of a controller's decisions under B budgets, float64 [B] each."""

    decision_us: Tensor
    """Median time of a decision in µs, in the quickest round, with the features at hand."""
    charged_ms: Tensor
    """The time that it is charged: its decision and its features; 0 where budgets are no times."""


def expected_cost_ms(table: ProfileTable) -> float:
    """Return the expected cost of a decision with its features, in ms."""
    if table.unit != MS:
        return 0.0
    cost_us = EXPECTED_US
    for values in table.texts.values():
        # most tables have no text, and need nothing that reads one
        from knobwise.agents.deployed.text import LONGEST

        # of a long one both ends
        read = [min(len(value), 2 * LONGEST) for value in values]
        cost_us += TEXT_US + CHARACTER_US * sum(read) / len(read)
    return cost_us / 1e3 + table.features_ms


def own_costs(
    controllers: Sequence[NumpyController], table: ProfileTable, rows: Tensor, budgets_ms: Tensor
) -> list[OwnCost]:
    """Time the decisions of controllers on samples `rows` [n] under budgets [B] in ms."""
    costs = []
    took = decision_us(controllers, table, rows, budgets_ms)
    for controller, micros in zip(controllers, took, strict=True):
        # features are charged only where the guard lets the policy read them
        reads = torch.from_numpy(controller.reads_features(budgets_ms.double().numpy()))
        charged = (micros / 1e3 + table.features_ms * reads) * (table.unit == MS)
        costs.append(OwnCost(micros, charged))
    return costs


def decision_us(
    deciders: Sequence[Decider], table: ProfileTable, rows: Tensor, budgets_ms: Tensor
) -> list[Tensor]:
    """Return for each decider the median time of a decision in µs, in the quickest round, float64
    [B], on samples `rows` [n] under budgets [B] in ms, right after a transformer has run. With
    texts it is the mean over samples of the quickest time of each, since times differ with
    lengths."""
    # all of them in turn, so that a busy second meets all of them alike
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([_round(decider, table, rows, budgets_ms) for decider in deciders])
    quickest = [torch.stack(of_decider).amin(0) for of_decider in zip(*rounds, strict=True)]
    return [micros.mean(0) if micros.ndim > 1 else micros for micros in quickest]


def _round(decider: Decider, table: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> Tensor:
    """Return the median of each budget in µs, [B], or with texts the time of each sample, [n, B].
    The budgets take turns in random order."""
    limits = budgets_ms.tolist()
    rng = np.random.default_rng(0)
    texts = table.texts
    samples = []
    for row in _timed_rows(texts, rows).tolist():
        samples.append({name: block[row].numpy() for name, block in table.features.items()})
        samples[-1] |= {name: values[row] for name, values in texts.items()}
    # µs of each decision, by call and budget
    micros = np.zeros((WARM_UP + CALLS, len(limits)))
    with torch.inference_mode():
        for call in range(len(micros)):
            for b in rng.permutation(len(limits)):
                _transformer()(torch.zeros(1, TOKENS, WIDTH))
                sample = samples[call % len(samples)]
                # the mean of two equal tokens is the token
                pooled = {
                    name: np.stack([x, x]).mean(0)
                    for name, x in sample.items()
                    if name not in texts
                }
                blocks = sample | pooled
                start = clock_ns()
                decider.decide_index(blocks, limits[b])
                micros[call, b] = (clock_ns() - start) / 1e3
    if texts:
        return torch.from_numpy(micros[WARM_UP:])
    return torch.from_numpy(np.median(micros[WARM_UP:], 0))


def _timed_rows(texts: Mapping[str, Sequence[str]], rows: Tensor) -> Tensor:
    """Return the samples that decisions are timed on: the first `CALLS` of `rows` [n], or with
    texts those whose lengths are quantiles of the lengths of all."""
    if not texts:
        return rows[:CALLS]
    # several texts of a sample are read one after the other
    lengths = [sum(len(values[row]) for values in texts.values()) for row in rows.tolist()]
    by_length = rows[torch.tensor(lengths).argsort(stable=True)]
    shares = (torch.arange(CALLS) + 0.5) / CALLS
    return by_length[(shares * len(rows)).long()]


@cache
def _transformer() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()

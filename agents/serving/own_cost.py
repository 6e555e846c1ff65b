"""What a policy itself costs where it is deployed: the time of a decision, by NumPy and for one request.

In front of a model a decision is never repeated at once: the model has run in between, and the caches hold its weights
and its code. A decision then takes several times as long as in a loop of decisions. So a transformer runs before each
that is timed, and the features are pooled, whose time `ProfileTable.features_ms` is. Where a guard falls back to
static, features are neither pooled nor charged.

A machine that is busy for a second makes what is timed in that second look slow. So all policies are timed in turn, in
several rounds, and the quickest round counts, as in Python's timeit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from knobwise.agents.judging.baselines import PredictThenChoose
from knobwise.agents.serving.export import Arrays, arrays_of, mean_arrays
from knobwise.agents.serving.numpy_controller import FORMAT, NumpyController
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.envs.tables.profile_table import ProfileTable

ROUNDS, CALLS, WARM_UP = 3, 20, 5
"""Rounds; decisions timed for each budget in a round, and before these."""
WIDTH, LAYERS, TOKENS = 128, 4, 32
"""Of the transformer: 3 MB of weights, as the elastic model has. Larger models take so long that decisions cost next to
nothing."""
EXPECTED_US = {"network": 60.0, "experts": 1500.0}
"""What a decision takes, by rule of thumb: of one network, with experts. The guard is calibrated by these, so that
training is repeatable; results are charged what was measured."""


class OwnCost(NamedTuple):
    """Under B budgets, float64 [B] each."""

    decision_us: Tensor
    """Median time of a decision in µs, in the quickest round, with the features at hand; 0 for a look-up."""
    charged_ms: Tensor
    """What it is charged: its decision and its features; 0 where budgets are no times."""


def deployed_form(policy: Any, table: ProfileTable) -> NumpyController | None:
    """A policy in the form that decides for single requests; None for one that reads nothing but the budget, which is a
    look-up in a sorted list."""
    chooser = policy.chooser if isinstance(policy, PricedChooser) else policy
    if isinstance(chooser, PredictThenChoose):
        return NumpyController(_arrays_of_baseline(policy, chooser, table))
    if hasattr(chooser, "normaliser"):
        return NumpyController(arrays_of(policy))
    return None


def own_costs(policies: Sequence[Any], table: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> list[OwnCost]:
    """Time the decisions of these policies on samples `rows` [n] under budgets [B] in ms."""
    forms = [deployed_form(policy, table) for policy in policies]
    rounds = [[_round(form, table, rows, budgets_ms) for form in forms] for _ in range(ROUNDS)]
    return [OwnCost(*torch.stack(of_policy).amin(0)) for of_policy in zip(*rounds, strict=True)]


def _round(deployed: NumpyController | None, table: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> Tensor:
    """`OwnCost` as one tensor [2, B]. The budgets take turns in random order."""
    limits = budgets_ms.tolist()
    if deployed is None:
        return torch.zeros(2, len(limits), dtype=torch.float64)
    rng = np.random.default_rng(0)
    samples = [{name: block[row].numpy() for name, block in table.features.items()} for row in rows[:CALLS].tolist()]
    micros = np.zeros((WARM_UP + CALLS, len(limits)))
    with torch.inference_mode():
        for call, place in ((call, place) for call in range(len(micros)) for place in rng.permutation(len(limits))):
            _transformer()(torch.zeros(1, TOKENS, WIDTH))
            # the mean of two equal tokens is the token
            blocks = {name: np.stack([block, block]).mean(0) for name, block in samples[call % len(samples)].items()}
            start = time.perf_counter_ns()
            deployed.decide_index(blocks, limits[place])
            micros[call, place] = (time.perf_counter_ns() - start) / 1e3
    took = torch.from_numpy(np.median(micros[WARM_UP:], 0))
    reads = torch.tensor([deployed.fall_back(limit) is None for limit in limits])
    return torch.stack([took, (took / 1e3 + table.features_ms * reads) * (table.unit == "ms")])


@cache
def _transformer() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def expected_cost_ms(table: ProfileTable, experts: bool) -> float:
    """What decisions by a network, or with experts, are expected to cost with their features, in ms."""
    micros = EXPECTED_US["experts" if experts else "network"]
    return micros / 1e3 + table.features_ms if table.unit == "ms" else 0.0


def _arrays_of_baseline(policy: Any, chooser: PredictThenChoose, table: ProfileTable) -> Arrays:
    """A predictor in the form of a stack that has no other member."""
    normaliser, expert, priced = chooser.normaliser, chooser.expert, isinstance(policy, PricedChooser)
    header = {
        "format": FORMAT,
        "knobs": [[knob.name, list(knob.values)] for knob in table.knobs],
        "features": normaliser.sizes,
        "clip": normaliser.clip,
        "structure": "none",
        "priced": priced,
        "stacked": True,
        "weights": [0.0, 1.0],
        "experts": [[type(regressor).__name__ for _, regressor in expert.named_children()]],
        "guard": False,
        "mean_budgets": priced,
    }
    tensors = {f"normaliser.{name}": buffer for name, buffer in normaliser.state_dict().items()}
    tensors |= {f"experts.0.{name}": buffer for name, buffer in expert.state_dict().items()}
    arrays = {name: values.numpy() for name, values in (tensors | {"configurations": table.configurations}).items()}
    if priced:
        arrays |= {f"mean.{name}": values for name, values in mean_arrays(policy).items()}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return arrays

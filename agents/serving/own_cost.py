"""What a policy itself costs where it is deployed: the time of a decision, by NumPy and for one request.

In front of a model a decision is never repeated at once: the model has run in between, and the caches hold its weights
and its code. A decision then takes several times as long as in a loop of decisions, so a transformer runs before each
that is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from knobwise.agents.judging.baselines import PredictThenChoose
from knobwise.agents.serving.export import Arrays, arrays_of, mean_arrays
from knobwise.agents.serving.numpy_controller import FORMAT, NumpyController
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.envs.tables.profile_table import ProfileTable

CALLS, WARM_UP = 40, 5
"""Decisions timed for each budget, and before these."""
WIDTH, LAYERS, TOKENS = 256, 4, 8
"""Of the transformer: 12 MB of weights, some milliseconds."""
Decide = Callable[[Mapping[str, NDArray[Any]], float], int]
"""Blocks [d] and a budget in ms → a configuration, as `NumpyController.decide_index`."""


def deployed_form(policy: Any, table: ProfileTable) -> Decide | None:
    """A policy in the form that decides for single requests; None for one that reads nothing but the budget, which is a
    look-up in a sorted list."""
    chooser = policy.chooser if isinstance(policy, PricedChooser) else policy
    if isinstance(chooser, PredictThenChoose):
        return NumpyController(_arrays_of_baseline(policy, chooser, table)).decide_index
    if hasattr(chooser, "normaliser"):
        return NumpyController(arrays_of(policy)).decide_index
    return None


def decision_us(policy: Any, table: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> Tensor:
    """Median time of a decision in µs under each budget, float64 [B], on samples `rows` [n] with the features at hand;
    0 for a look-up, under budgets [B] in ms."""
    decide = deployed_form(policy, table)
    if decide is None:
        return torch.zeros(len(budgets_ms), dtype=torch.float64)
    samples = [{name: block[row].numpy() for name, block in table.features.items()} for row in rows[:CALLS].tolist()]
    micros = np.zeros((WARM_UP + CALLS, len(budgets_ms)))
    with torch.inference_mode():
        for call, place in np.ndindex(*micros.shape):
            blocks, limit = samples[call % len(samples)], float(budgets_ms[place])
            _transformer()(_tokens())
            start = time.perf_counter_ns()
            decide(blocks, limit)
            micros[call, place] = (time.perf_counter_ns() - start) / 1e3
    return torch.from_numpy(np.median(micros[WARM_UP:], 0))


@cache
def _transformer() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def _tokens() -> Tensor:
    return torch.zeros(1, TOKENS, WIDTH)


def own_cost_ms(table: ProfileTable, decision_us: Tensor) -> Tensor:
    """What decisions of so many µs are charged, in ms, of the same shape. They are charged the features too, unless
    they are look-ups (0 µs), which read none. Nothing is charged where budgets are no times."""
    if table.unit != "ms":
        return torch.zeros_like(decision_us)
    return decision_us / 1e3 + table.features_ms * (decision_us > 0)


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
        arrays |= {f"mean.{name}": values for name, values in mean_arrays(policy, normaliser).items()}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return arrays

"""What a policy itself costs where it is deployed: the time of a decision, by NumPy and for one request."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.judging.baselines import PredictThenChoose
from knobwise.agents.serving.export import Arrays, arrays_of, mean_arrays
from knobwise.agents.serving.numpy_controller import FORMAT, NumpyController
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.envs.tables.profile_table import ProfileTable

CALLS, WARM_UP = 200, 10
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


def decision_us(policy: Any, table: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> float:
    """Median time of a decision in µs, on samples `rows` [n] under budgets [B] in ms, with the features at hand."""
    decide = deployed_form(policy, table)
    if decide is None:
        return 0.0
    samples = [{name: block[row].numpy() for name, block in table.features.items()} for row in rows[:CALLS].tolist()]
    limits, micros = budgets_ms.tolist(), []
    for call in range(WARM_UP + CALLS):
        blocks, limit = samples[call % len(samples)], limits[call % len(limits)]
        start = time.perf_counter_ns()
        decide(blocks, limit)
        micros.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(micros[WARM_UP:])


def own_cost_ms(table: ProfileTable, decision_us: float) -> float:
    """What a decision of so many µs is charged, in ms. It is charged the features too, unless it is a look-up (0 µs),
    which reads none. Nothing is charged where budgets are no times."""
    if table.unit != "ms":
        return 0.0
    return decision_us / 1e3 + (table.features_ms if decision_us else 0.0)


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

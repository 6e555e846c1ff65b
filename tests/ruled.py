"""Controllers that decide by a rule, where it is judging that is tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.stack.prices import MeanBudgetPolicy

Array = NDArray[Any]
Features = Mapping[str, Array]


class Ruled:
    """A controller without a teacher whose decisions are those of another policy, or of a function
    of features, limits and mask.

    Args:
        rule: has `choose`, or is one.
        mean: what it is under mean budgets, see `DeployedController.under_mean_budgets`.
    """

    teacher = None

    def __init__(self, rule: Any, mean: MeanBudgetPolicy | None = None) -> None:
        self.decider = self
        self.if_free = self
        self.sense = "deadline" if mean is None else "mean"
        self._choose: Callable[..., Array] = getattr(rule, "choose", rule)
        self._mean = mean

    def choose(self, features: Features, limits: Array, mask: Array | None = None) -> Array:
        return self._choose(features, limits, mask)

    def reads_features(self, limits: Array) -> Array:
        return np.ones(len(limits), bool)

    def decide_index(self, features: Features, budget_ms: float) -> int:
        """Only how long it takes is asked."""
        return 0

    def under_mean_budgets(self) -> MeanBudgetPolicy:
        assert self._mean is not None
        return self._mean


def ruled_at_means(rule: Any, budgets_ms: Tensor, worths: Tensor, **guard: Any) -> Ruled:
    """A controller for mean budgets whose rule gets the worth that is calibrated for a budget;
    `guard` as in `MeanBudgetPolicy`."""
    choose = getattr(rule, "choose", rule)

    def decide(features: Features, group: int, mask: Array) -> Array:
        return choose(features, np.full(len(mask), float(worths[group])), mask)

    return Ruled(rule, MeanBudgetPolicy("controller", decide, budgets_ms, worths, **guard))

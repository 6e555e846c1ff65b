"""What differs between kinds of budget where decisions are deployed: the twin, in NumPy, of the
rule of training. A controller chooses its own once, when it is loaded; nothing else asks which one
it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import Array
from .calibrated import CalibratedMeanBudgets


class RequestBudgets:
    """Every request has a budget of its own.

    Args:
        allows_drift: whether decisions allow for the drift of a machine.
    """

    of_request = True
    """Whether a single request has a budget that it may miss."""
    static_words = "budget-aware static"
    """What decides where the guard falls back, in words."""
    refusal = "budget_ms must be positive and finite"
    """Why a budget is not known, for a column of budgets."""

    def __init__(self, allows_drift: bool = True) -> None:
        self.allows_drift = allows_drift

    def drift(self, drift: Any) -> Any:
        """Return what decisions are to allow for, of the drift that a tracker sees."""
        return drift

    def check(self, budget_ms: float) -> None:
        """Raise a ValueError for a budget, positive and finite, that is not decided for."""

    def known(self, budgets_ms: Array) -> Array:
        """Return which of these budgets [n], positive and finite, are decided for: bool [n]."""
        return np.ones(len(budgets_ms), bool)

    def met(self, total_ms: float, budget_ms: float) -> bool:
        """Tell whether an answer kept its budget; not if its time is NaN."""
        return total_ms <= budget_ms

    def between(self, low: float, high: float, step: float) -> Array:
        """Return the budgets from one to another at which decisions may differ, [n], each at most
        by this factor's logarithm above the one before."""
        count = math.ceil(math.log(high / low) / step)
        return np.geomspace(low, high, count + 2)

    def limits(self, budgets_ms: Array) -> Array:
        """Return the limits that scores are for, [n], of budgets [n]: these."""
        return budgets_ms

    def turn(self, budget_ms: float, mask: Array | None = None) -> int | None:
        """Return the configuration of a static mix whose turn it is, inside the mask bool [C]; None
        where there is none."""
        return None

    def start_over(self, first: int | None = None) -> None:
        """Forget the turns of a static mix that were used up, and begin with this one, from 1 on;
        None for any."""


class SharedBudgets(RequestBudgets):
    """The average over all requests must not exceed the budget, which is one of those that were
    calibrated.

    Args:
        mean: what was calibrated.
    """

    of_request = False
    static_words = "the static mix"

    def __init__(self, mean: CalibratedMeanBudgets) -> None:
        super().__init__(allows_drift=False)
        self.mean = mean
        listed = ", ".join(f"{budget:.4g}" for budget in mean.budgets_ms)
        self.refusal = (
            f"budget_ms must be one of the mean budgets that were calibrated, {listed}; train with "
            "the budgets_ms that you need"
        )

    def drift(self, drift: Any) -> Any:
        """See `RequestBudgets`: none, as prices were calibrated without."""
        return None

    def check(self, budget_ms: float) -> None:
        self.mean.groups(np.array([budget_ms]))

    def known(self, budgets_ms: Array) -> Array:
        is_close = np.isclose(budgets_ms[:, None], self.mean.budgets_ms, 1e-3, 0)
        kept: Array = np.any(is_close, axis=1, keepdims=True)[:, 0]
        return kept

    def met(self, total_ms: float, budget_ms: float) -> bool:
        """See `RequestBudgets`: no single request misses the budget of all."""
        return True

    def between(self, low: float, high: float, step: float) -> Array:
        """See `RequestBudgets`: no other budget has a price."""
        return np.sort(self.mean.budgets_ms)

    def limits(self, budgets_ms: Array) -> Array:
        """See `RequestBudgets`: the values of a right answer."""
        return self.mean.values_ms[self.mean.groups(budgets_ms)]

    def turn(self, budget_ms: float, mask: Array | None = None) -> int | None:
        return self.mean.mixed(budget_ms, mask) if self.mean.mix else None

    def start_over(self, first: int | None = None) -> None:
        self.mean.start_over(first)

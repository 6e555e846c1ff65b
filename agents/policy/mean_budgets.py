"""Mean budgets: for each, the worth of a right answer at which a policy keeps to it."""

from __future__ import annotations

import itertools

import numpy as np

from .arrays import Array, Arrays, below, pick

GOLDEN = 0.6180339887498949
"""(√5 − 1)/2, the golden ratio minus 1. Its multiples modulo 1 decide which side of a static mix
takes a request. They are spread evenly, so that any stretch of requests keeps the shares
(Niederreiter 1992, "Random Number Generation and Quasi-Monte Carlo Methods", chapter 3)."""


class MeanBudgets:
    """The worth for each calibrated mean budget, and the static mix that a policy may fall back to.

    Attributes:
        budgets_ms: float64 [B].
        worths: float64 [B], the worth of a right answer in ms, 1/λ.
        deployed: bool [B], False where the static mix decides.
        mix: `first` and `second` int64 [B], the two configurations; `share` [B], how often the
            second is taken; `mean_accuracy` and `mean_cost` [C]. {} without a mix.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self.worths = arrays["worths"].astype(np.float64)
        self.deployed = arrays["deployed"].astype(bool)
        self.mix = below(arrays, "mix.")
        self._group_of = {budget: i for i, budget in enumerate(self.budgets_ms.tolist())}
        self.turns = itertools.count(1)

    def groups(self, budgets_ms: Array) -> Array:
        """Return the index of the calibrated budget that equals each of these [n], int64 [n].

        Equal ones differ by at most 0.1 %. Raises a ValueError for any that was not calibrated.
        """
        group = np.abs(budgets_ms[:, None] - self.budgets_ms).argmin(1)
        far = np.abs(budgets_ms - self.budgets_ms[group]) > 1e-3 * self.budgets_ms[group]
        if far.any():
            known = ", ".join(f"{budget:.4g}" for budget in self._group_of)
            raise ValueError(
                f"a mean budget of {budgets_ms[far][0]:.4g}: the policy was calibrated for {known} "
                "only; train with the budgets_ms you need"
            )
        return group

    def single(self, budget_ms: float) -> tuple[int | None, float]:
        """Return the configuration of the static mix where it decides, else None; and the worth."""
        group = self._group_of.get(budget_ms)
        if group is None:
            group = int(self.groups(np.array([budget_ms]))[0])
        worth = float(self.worths[group])
        if not self.mix or self.deployed[group]:
            return None, worth
        turn = next(self.turns) * GOLDEN % 1
        side = "second" if turn < self.mix["share"][group] else "first"
        return int(self.mix[side][group]), worth

    def planned(self, limits: Array) -> Array:
        """Return the worths of a right answer under budgets [n]."""
        return self.worths[self.groups(limits)]

    def settled(self, chosen: Array, limits: Array, mask: Array | None) -> Array:
        """Replace choices [n] where the static mix decides; its two sides take turns.

        If the mask forbids a side, the other takes its turns. If it forbids both, the best single
        configuration that the budget affords does.
        """
        group = self.groups(limits)
        mixed = ~self.deployed[group]
        if not self.mix or not mixed.any():
            return chosen
        # only requests that the mix decides use up turns
        turn = np.ones(len(group))
        drawn = itertools.islice(self.turns, int(mixed.sum()))
        turn[mixed] = np.fromiter(drawn, np.float64) * GOLDEN % 1
        first = self.mix["first"][group]
        second = self.mix["second"][group]
        if mask is not None:
            rows = np.arange(len(group))
            # `instead` is the best configuration that is affordable and not forbidden
            affordable = self.mix["mean_cost"] <= self.budgets_ms[group][:, None]
            accuracy = np.where(affordable, self.mix["mean_accuracy"], -np.inf)
            instead = pick(accuracy, self.mix["mean_cost"], mask)
            has_second = mask[rows, second]
            first = np.where(mask[rows, first], first, np.where(has_second, second, instead))
            second = np.where(has_second, second, first)
        either = np.where(turn < self.mix["share"][group], second, first)
        return np.where(mixed, either, chosen)

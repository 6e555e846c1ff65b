"""Mean budgets: the worth of a right answer at which a policy keeps each of them."""

from __future__ import annotations

import itertools

import numpy as np

from .arrays import Array, Arrays, below, pick

GOLDEN = 0.6180339887498949
"""(√5 − 1)/2, the golden ratio without its 1. Requests take turns between the sides of a static mix
by its multiples, modulo 1: the shares are kept as evenly as can be (Niederreiter 1992, "Random
Number Generation and Quasi-Monte Carlo Methods", chapter 3)."""


class MeanBudgets:
    """The worth for each calibrated mean budget, and the static mix that it may fall back to.

    Attributes:
        budgets_ms: float64 [B].
        worths: float64 [B], the worth of a right answer in ms, 1/λ.
        deployed: bool [B], False where the static mix decides.
        mix: `first`, `second` int64 [B] and `share` [B], how often the second is taken;
            `mean_accuracy`, `mean_cost` [C]. {} without a mix.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self.worths = arrays["worths"].astype(np.float64)
        self.deployed = arrays["deployed"].astype(bool)
        self.mix = below(arrays, "mix.")
        self._group_of = {budget: i for i, budget in enumerate(self.budgets_ms.tolist())}
        self.turns = itertools.count(1)

    def groups(self, budgets_ms: Array) -> Array:
        """Return the index of each of these budgets [n] among the calibrated ones, int64 [n].

        Raises:
            ValueError: one is none of them; its worth cannot be guessed.
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

    def single(self, budget_ms: float) -> int:
        """Return the index of one budget; a ValueError as in `groups`."""
        group = self._group_of.get(budget_ms)
        if group is None:
            return int(self.groups(np.array([budget_ms]))[0])
        return group

    def fall_back(self, budget_ms: float) -> int | None:
        """Return the static mix's configuration where it decides, else None."""
        group = self.single(budget_ms)
        if not self.mix or self.deployed[group]:
            return None
        turn = next(self.turns) * GOLDEN % 1
        side = "second" if turn < self.mix["share"][group] else "first"
        return int(self.mix[side][group])

    def or_mix(self, chosen: Array, group: Array, mask: Array | None) -> Array:
        """Replace choices [n] where the static mix decides; requests take turns between its sides.

        A side that the mask forbids is replaced by the other, both by the best single configuration
        that the budget affords.
        """
        if not self.mix or self.deployed[group].all():
            return chosen
        # only requests that the mix decides take turns
        mixed = ~self.deployed[group]
        turn = np.ones(len(group))
        drawn = itertools.islice(self.turns, int(mixed.sum()))
        turn[mixed] = np.fromiter(drawn, np.float64) * GOLDEN % 1
        first = self.mix["first"][group]
        second = self.mix["second"][group]
        if mask is not None:
            rows = np.arange(len(group))
            # a forbidden side gives way to the other, or else to the best that is affordable
            affordable = self.mix["mean_cost"] <= self.budgets_ms[group][:, None]
            accuracy = np.where(affordable, self.mix["mean_accuracy"], -np.inf)
            instead = pick(accuracy, self.mix["mean_cost"], mask)
            has_second = mask[rows, second]
            first = np.where(mask[rows, first], first, np.where(has_second, second, instead))
            second = np.where(has_second, second, first)
        either = np.where(turn < self.mix["share"][group], second, first)
        return np.where(mixed, either, chosen)

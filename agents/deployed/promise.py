"""A promise on the share of requests that are answered in time: what decides at each budget."""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple

import numpy as np

from .arrays import MIN_MS, Array, Arrays, log_ms, pick
from .calibrated import Static

POLICY = -1
"""In the place of a configuration: the policy decides."""
ROUNDING = 1e-6
"""By how much, as a share, a budget may fall short of a calibrated one: these have been rounded to
float32."""


class LatencyModel:
    """What answers are expected to take, ln ms, by normalised features: bias + x·weight, with a
    standard deviation for each configuration.

    Attributes:
        bias, spread: [C]; `spread` is that of a single measurement.
        slopes: [C, width]; None if nothing depends on the features.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.bias = arrays["bias"]
        self.spread = arrays["spread"]
        self.slopes = np.ascontiguousarray(arrays["weight"].T) if "weight" in arrays else None

    def expected(self, index: int, x: Array) -> tuple[int, float, float]:
        """Return a configuration with mean and standard deviation of its ln ms for x [width]."""
        mean = self.bias.item(index)
        if self.slopes is not None:
            mean += float(self.slopes[index].dot(x))
        return index, mean, self.spread.item(index)

    def fits(
        self,
        index: int,
        x: Array,
        limit: float,
        quantile: float,
        drift: tuple[Any, float] | None = None,
    ) -> bool:
        """Tell whether one configuration is among those that `within` returns first, for a single
        request: quicker than to ask for all."""
        _, mean, spread = self.expected(index, x)
        if drift is not None:
            offset, scale = drift
            spread *= scale
            if getattr(offset, "ndim", 0):
                mean += float(offset[index] - offset.mean())
        return mean + quantile * spread <= math.log(max(limit, MIN_MS))

    def within(
        self,
        x: Array,
        limits: Any,
        quantiles: Any,
        mask: Array | None = None,
        drift: tuple[Any, float] | None = None,
    ) -> Array:
        """Return which configurations are expected within limits in ms for normalised features
        [*, width], inside the mask bool [*, C]: bool [*, C].

        These are all whose mean ln ms is at least `quantiles` standard deviations below the limit;
        where there are none, the one that is nearest to that. Both are numbers or [*]. The mean
        offset of a `drift` is in the limits already.
        """
        mean = self.bias if self.slopes is None else self.bias + x @ self.slopes.T
        spread = self.spread
        if drift is not None:
            offset, scale = drift
            spread = spread * scale
            if getattr(offset, "ndim", 0):
                mean = mean + (offset - offset.mean())
        logs = log_ms(np.asarray(limits, np.float64))[..., None]
        excess = mean + np.asarray(quantiles)[..., None] * spread - logs
        excess = np.broadcast_to(excess, (*np.shape(x)[:-1], len(self.bias)))
        if mask is not None:
            excess = np.where(mask, excess, np.inf)
        least = np.expand_dims(excess.argmin(-1), -1)
        allowed: Array = excess <= 0
        np.put_along_axis(allowed, least, True, -1)
        return allowed


class Promised(NamedTuple):
    """What is promised of a request."""

    budget_ms: float
    """The calibrated budget whose rule decides; 0 below all of them."""
    share: float
    """Of such requests at least this share is on time; 0 for no promise."""


class Promise:
    """What decides at each calibrated budget so that a promised share of requests is on time.

    A request uses the rule of the largest calibrated budget that what is left of its own covers.
    Below the smallest nothing is promised, and the configuration decides that was most often on
    time. Budgets at which no rule passed, and that of a smaller one goes on, are not among them.
    Where none goes on, nothing is promised, and the rule was only the safest at its budget: with
    more than that left, a single configuration gives way to one that is more often on time.
    Each budget that was asked for has brought smaller ones below it, with promises of their own.

    Attributes:
        static: knows how often each configuration was on time.
        trained_ms: ascending, all budgets that were asked for; files of earlier versions hold only
            `budgets_ms`.
        budgets_ms: [B], ascending, those with a rule.
        planned_ms: [B], what is left of each budget for the answer. That much was promised for.
        fixed: int64 [B], the configuration that decides for all requests, or `POLICY`.
        quantiles: [B], how far below the limit the policy's choice must be expected, in standard
            deviations; −∞ for anywhere.
        shares: [B], what is promised; 0 where no rule could be promised.
    """

    def __init__(self, arrays: Arrays, static: Static) -> None:
        self.static = static
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self.trained_ms = arrays.get("trained_ms", self.budgets_ms).astype(np.float64)
        self.planned_ms = arrays["planned_ms"].astype(np.float64)
        self.fixed = arrays["fixed"].astype(np.int64)
        self.quantiles = arrays["quantiles"].astype(np.float64)
        self.shares = arrays["shares"].astype(np.float64)
        # up to where what nothing is promised of is the safest
        self._until_ms = np.where(self.shares > 0, np.inf, (1 + ROUNDING) * self.budgets_ms)
        # from where on each rule decides
        self._from_ms = (1 - ROUNDING) * self.planned_ms
        self._starts = self._from_ms.tolist()
        self._few = list(zip(self.planned_ms.tolist(), self.fixed.tolist(), strict=True))

    def groups(self, limits: Array) -> Array:
        """Return the calibrated budget whose rule decides under each limit [n] in ms, int64 [n]; −1
        below all of them."""
        return np.searchsorted(self._from_ms, limits, side="right") - 1

    def single(self, limit: float, mask: Array | None = None) -> tuple[int | None, float]:
        """Return the configuration that decides for all requests, inside the mask bool [C], else
        None; and the ms to plan with."""
        group = bisect.bisect_right(self._starts, limit) - 1
        if group < 0:
            return self.safest(limit, mask), limit
        planned_ms, fixed = self._few[group]
        if fixed == POLICY:
            return None, planned_ms
        if limit > self._until_ms[group]:
            planned_ms = limit
            fixed = self.safest(limit, rather=fixed)
        if mask is not None and not mask[fixed]:
            fixed = self.safest(planned_ms, mask)
        return fixed, planned_ms

    def promised(self, limit: float) -> Promised:
        """Return what is promised under a limit in ms."""
        group = bisect.bisect_right(self._starts, limit) - 1
        if group < 0:
            return Promised(0.0, 0.0)
        return Promised(self.budgets_ms.item(group), self.shares.item(group))

    def shares_at(self, budgets_ms: Array) -> Array:
        """Return the shares that are promised at whole budgets [n], 0 for none: [n].

        Features and the decision are still to be taken off them. So nothing is promised where the
        budget that the deciding rule was calibrated for is larger, though its `planned_ms` are
        less.
        """
        group = self.groups(budgets_ms)
        covered = budgets_ms >= (1 - ROUNDING) * self.budgets_ms[group]
        return np.where((group >= 0) & covered, self.shares[group], 0.0)

    def planned(self, limits: Array) -> Array:
        """Return the ms that are planned with under limits [n]."""
        group = self.groups(limits)
        return np.where(group < 0, limits, self.planned_ms[group])

    def needed_single(self, limit: float) -> float:
        """Return `needed` for one limit."""
        group = bisect.bisect_right(self._starts, limit) - 1
        if group < 0 or self._few[group][1] != POLICY:
            return -math.inf
        return self.quantiles.item(group)

    def needed(self, limits: Array) -> Array:
        """Return by how many standard deviations choices under limits [n] must be expected below
        them, [n]; −∞ where the policy does not decide."""
        return np.where(self.reads_features(limits), self.quantiles[self.groups(limits)], -np.inf)

    def reads_features(self, limits: Array) -> Array:
        """Tell under which limits [n] the policy decides, bool [n]."""
        group = self.groups(limits)
        return (group >= 0) & (self.fixed[group] == POLICY)

    def with_fallback(self, chosen: Array, limits: Array, mask: Array | None) -> Array:
        """Replace choices [n] where a single configuration decides, inside the mask bool [n, C]."""
        group = self.groups(limits)
        fixed = np.where(group < 0, POLICY, self.fixed[group])
        chosen = np.where(self.reads_features(limits), chosen, fixed)
        # below all budgets, beyond one that nothing is promised at, and where the mask forbids it
        unknown = (chosen < 0) | ((fixed != POLICY) & (limits > self._until_ms[group]))
        if mask is not None:
            unknown |= (chosen == fixed) & ~mask[np.arange(len(mask)), fixed]
        for row in np.flatnonzero(unknown):
            allowed = None if mask is None else mask[row]
            chosen[row], _ = self.single(float(limits[row]), allowed)
        return chosen

    def safest(self, limit: float, mask: Array | None = None, rather: int | None = None) -> int:
        """Return the configuration inside the mask bool [C] that was most often within a limit in
        ms; among equals `rather`, which must be inside it, and else the fastest."""
        share = self.static.on_time(limit)
        mask = None if mask is None else mask[None]
        index = int(pick(share[None], self.static.latency_ms, mask)[0])
        return index if rather is None or share[rather] < share[index] else rather

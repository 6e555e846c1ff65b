"""What decides beside the network, as it was calibrated on held-out samples: budget-aware
static, the guard that falls back to it, and the values of a right answer under mean budgets."""

from __future__ import annotations

import bisect
import copy
import itertools
import os
from collections.abc import Iterator

import numpy as np

from .arrays import (
    MAX_FLOAT32,
    Array,
    Arrays,
    as_measured,
    below,
    log_measured,
    log_ms,
    pick,
    pick_by_group,
)

GOLDEN = 0.6180339887498949
"""(√5 − 1)/2. Its multiples modulo 1 decide which side of a static mix takes a request. They are
spread evenly, so that any stretch of requests keeps the shares (Niederreiter 1992, "Random Number
Generation and Quasi-Monte Carlo Methods", chapter 3)."""


class Static:
    """Takes, for each budget, the configuration with the best mean utility: accuracy·1[latency ≤
    budget], or that of a rule of one's own.

    If no configuration ever met the budget, it takes the one with the lowest mean latency. It never
    reads features. Limits are rounded to float32, which measurements are in: a price of 0.0011 is
    within a budget of 0.0011.

    Attributes:
        latency_ms: [C], the mean latency of each configuration.
        sorted_ms: [C, n], all measurements of each configuration in order, ∞ for none; or under a
            rule of one's own budgets, between which the mean utility is taken for constant.
        running: [C, n + 1], the mean utility under a budget between two of these.
        starts, choices: [s] each: from `starts[i]` ms on, `choices[i]` is best of all.
        log_latency, spread: [C], mean and standard deviation of ln ms; 0 without measurements.
        has_moments: whether these two are among the arrays, as they are where `sorted_ms` are no
            measurements.
    """

    name = "budget_aware_static"

    def __init__(self, arrays: Arrays) -> None:
        self.latency_ms = arrays["latency_ms"]
        self.sorted_ms = arrays["sorted_ms"].astype(np.float64)
        self.running = arrays["running"]
        self.has_moments = "log_latency" in arrays
        if self.has_moments:
            self.log_latency, self.spread = arrays["log_latency"], arrays["spread"]
        else:
            # np.ma would do this, and takes longer to import than all decisions of a short process
            logs = log_measured(self.sorted_ms)
            known = np.isfinite(logs)
            count = np.maximum(known.sum(1), 1)
            self.log_latency = np.where(known, logs, 0.0).sum(1) / count
            off = np.where(known, logs - self.log_latency[:, None], 0.0)
            self.spread = np.sqrt((off * off).sum(1) / count)
        self.starts, self.choices = self._steps()
        self._few = self.starts.tolist()

    def mean_utility(self, limits: Array, mask: Array | None = None) -> Array:
        """Return every configuration's mean utility under limits [n] in ms, float64 [n, C]; −∞
        outside the mask bool [C]."""
        limits = as_measured(limits)
        # each configuration by a search among its own measurements
        columns = []
        for latencies, utility in zip(self.sorted_ms, self.running, strict=True):
            columns.append(utility[np.searchsorted(latencies, limits, side="right")])
        utility = np.stack(columns, 1)
        return utility if mask is None else np.where(mask, utility, -np.inf)

    def on_time(self, limit: float) -> Array:
        """Return how often each configuration was within a limit in ms, as a share of what was
        measured: float64 [C]."""
        limit = _as_measured(limit)
        hits = [np.searchsorted(ms, limit, side="right") for ms in self.sorted_ms]
        count = np.isfinite(self.sorted_ms).sum(1)
        share: Array = np.array(hits) / np.maximum(count, 1)
        return share

    def single(self, limit: float, mask: Array | None = None) -> int:
        """Return the configuration for one limit in ms, inside the mask bool [C]."""
        if mask is not None:
            return int(self.choose({}, np.array([limit]), mask[None])[0])
        return int(self.choices[bisect.bisect_right(self._few, _as_measured(limit)) - 1])

    def expected(self, index: int) -> tuple[int, float, float]:
        """Return a configuration with mean and standard deviation of its ln ms."""
        return index, float(self.log_latency[index]), float(self.spread[index])

    def choose(self, features: Arrays, limits: Array, mask: Array | None = None) -> Array:
        """Return configurations int64 [n] for limits [n] in ms, inside the mask bool [n, C]."""
        if mask is None:
            steps = np.searchsorted(self.starts, as_measured(limits), side="right")
            return self.choices[steps - 1]
        distinct, which = np.unique(limits, return_inverse=True)
        return pick_by_group(self.mean_utility(distinct), self.latency_ms, which.reshape(-1), mask)

    def _steps(self) -> tuple[Array, Array]:
        """Find where the best of all configurations changes as the budget grows. Mean utilities
        never fall as it grows, so the best one is the running maximum over all cells in order of
        latency; among equals the one with the lower mean latency."""
        count, samples = self.sorted_ms.shape
        # configurations from the fastest to the slowest on average; all cells of one after another
        order = np.argsort(self.latency_ms, kind="stable")
        configuration = np.concatenate([[0], np.repeat(np.arange(count), samples)])
        time = np.concatenate([[-np.inf], self.sorted_ms[order].ravel()])
        utility = np.concatenate([[0.0], self.running[order, 1:].ravel()])
        # cells from the worst to the best, among equals the slower first, and the rank of each
        ranked = np.lexsort((-configuration, utility))
        rank = np.argsort(ranked)
        # cells by time, but those that were not measured, which take forever
        by_time = np.argsort(time, kind="stable")
        by_time = by_time[time[by_time] < np.inf]
        chosen = order[configuration[ranked[np.maximum.accumulate(rank[by_time])]]]
        time = time[by_time]
        # the last cell of each latency, which includes the others
        last = np.append(time[1:] != time[:-1], True)
        time = time[last]
        chosen = chosen[last]
        new = np.append(True, chosen[1:] != chosen[:-1])
        return time[new], chosen[new]


def _as_measured(limit: float) -> float:
    """Return what `as_measured` does for a single limit, which is quicker."""
    return float(np.float32(min(limit, MAX_FLOAT32)))


class Guard:
    """Fall-backs for the calibrated budgets; a request uses the one nearest in log-ms.

    Attributes:
        static: decides where the policy does not.
        budgets_ms: [B].
        deployed: bool [B], False where budget-aware static decides.
    """

    def __init__(self, arrays: Arrays, static: Static) -> None:
        self.static = static
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self.deployed = arrays["deploy"].astype(bool)
        # budgets in order, and the geometric means between neighbours
        self._order = np.argsort(self.budgets_ms, kind="stable")
        logs = log_ms(self.budgets_ms[self._order])
        self._between = np.exp((logs[1:] + logs[:-1]) / 2).tolist()
        self._few = self.deployed[self._order].tolist()

    def single(self, limit: float, mask: Array | None = None) -> tuple[int | None, float]:
        """Return the choice of static where it decides, inside the mask bool [C], else None; and
        the ms to plan with, all of them."""
        if self._few[bisect.bisect_left(self._between, limit)]:
            return None, limit
        return self.static.single(limit, mask), limit

    def always(self, deployed: bool) -> Guard:
        """Return the guard that lets the policy decide at every budget, or static at every one."""
        arrays = {"budgets_ms": self.budgets_ms, "deploy": np.full_like(self.deployed, deployed)}
        return Guard(arrays, self.static)

    def groups(self, limits: Array) -> Array:
        """Return the calibrated budget nearest to each limit [n] in ms, int64 [n]."""
        return self._order[np.searchsorted(self._between, limits)]

    def reads_features(self, limits: Array) -> Array:
        """Tell under which limits [n] the policy decides, bool [n]."""
        return self.deployed[self.groups(limits)]

    def planned(self, limits: Array) -> Array:
        """Return the ms that the policy plans with under limits [n]: all of them."""
        return limits

    def with_fallback(self, chosen: Array, limits: Array, mask: Array | None) -> Array:
        """Replace choices [n] where static decides, inside the mask bool [n, C]."""
        deployed = self.deployed[self.groups(limits)]
        return np.where(deployed, chosen, self.static.choose({}, limits, mask))


class CalibratedMeanBudgets:
    """The price of time for each calibrated mean budget, and the static mix to fall back to.

    Args:
        unit: of budgets, for messages.

    Attributes:
        turns: counts the requests that the mix decides.
        budgets_ms: float64 [B].
        values_ms: float64 [B], 1/price: the ms that a right answer may cost.
        deployed: bool [B], False where the static mix decides.
        mix: `first` and `second` int64 [B], the two configurations; `share` [B], how often the
            second is taken; `mean_accuracy` and `mean_cost` [C]. {} without a mix.
    """

    def __init__(self, arrays: Arrays, unit: str = "ms") -> None:
        self.unit = unit
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self.values_ms = arrays["worths"].astype(np.float64)
        self.deployed = arrays["deployed"].astype(bool)
        self.mix = below(arrays, "mix.")
        self._group_of = {budget: i for i, budget in enumerate(self.budgets_ms.tolist())}
        self.turns: Iterator[float]
        self.start_over()

    def groups(self, budgets_ms: Array) -> Array:
        """Return the index of the calibrated budget that equals each of these [n] to 0.1 %, int64
        [n]. Raises a ValueError for any that was not calibrated."""
        group = np.abs(budgets_ms[:, None] - self.budgets_ms).argmin(1)
        far = np.abs(budgets_ms - self.budgets_ms[group]) > 1e-3 * self.budgets_ms[group]
        if far.any():
            known = ", ".join(f"{budget:.4g}" for budget in self._group_of)
            raise ValueError(
                f"a mean budget of {budgets_ms[far][0]:.4g}: the policy was calibrated for {known} "
                f"{self.unit} only; take one of these, or train for others"
            )
        return group

    def single(self, budget_ms: float, mask: Array | None = None) -> tuple[int | None, float]:
        """Return the configuration of the static mix where it decides, inside the mask bool [C],
        else None; and 1/price."""
        group = self._group(budget_ms)
        value_ms = float(self.values_ms[group])
        if not self.mix or self.deployed[group]:
            return None, value_ms
        return self.mixed(budget_ms, mask), value_ms

    def mixed(self, budget_ms: float, mask: Array | None = None) -> int:
        """Return the configuration of the static mix whose turn it is, inside the mask bool [C] as
        in `with_fallback`."""
        group = self._group(budget_ms)
        turn = next(self.turns) * GOLDEN % 1
        side = "second" if turn < self.mix["share"][group] else "first"
        if mask is None:
            return int(self.mix[side][group])
        first, second = self._sides(np.array([group]), mask[None])
        return int(second[0] if side == "second" else first[0])

    def start_over(self, first: int | None = None) -> None:
        """Begin the turns at `first`, from 1 on; for None anywhere, so that many processes that
        decide for one request each keep the shares, too."""
        if first is None:
            first = 1 + int.from_bytes(os.urandom(3), "big")
        self.turns = itertools.count(first)

    def usual(self) -> CalibratedMeanBudgets:
        """Return a copy whose mix takes no turns: the side that more requests get decides."""
        usual = copy.copy(self)
        # in the middle of all turns, see `mixed`
        usual.turns = itertools.repeat(0.5 / GOLDEN)
        return usual

    def share_of(self, budget_ms: float, choice: int) -> float:
        """Return how often the static mix takes a configuration."""
        group = self._group(budget_ms)
        share = float(self.mix["share"][group])
        sides = (("first", 1 - share), ("second", share))
        return sum(part for side, part in sides if self.mix[side][group] == choice)

    def _group(self, budget_ms: float) -> int:
        """Return the index of a calibrated budget."""
        group = self._group_of.get(budget_ms)
        return int(self.groups(np.array([budget_ms]))[0]) if group is None else group

    def reads_features(self, limits: Array) -> Array:
        """Tell under which mean budgets [n] the policy decides, bool [n]."""
        return self.deployed[self.groups(limits)]

    def planned(self, limits: Array) -> Array:
        """Return 1/price, the ms that a right answer may cost, for mean budgets [n]: [n]."""
        return self.values_ms[self.groups(limits)]

    def with_fallback(self, chosen: Array, limits: Array, mask: Array | None) -> Array:
        """Replace choices [n] where the static mix decides; its two sides take turns. If the mask
        forbids a side, the other takes its turns; if both, the best that the budget affords."""
        group = self.groups(limits)
        mixed = ~self.deployed[group]
        if not self.mix or not mixed.any():
            return chosen
        # only requests that the mix decides use up turns
        turn = np.ones(len(group))
        drawn = itertools.islice(self.turns, int(mixed.sum()))
        turn[mixed] = np.fromiter(drawn, np.float64) * GOLDEN % 1
        first, second = self._sides(group, mask)
        either = np.where(turn < self.mix["share"][group], second, first)
        return np.where(mixed, either, chosen)

    def _sides(self, group: Array, mask: Array | None) -> tuple[Array, Array]:
        """Return the two configurations of the static mix for the indices of calibrated budgets
        [n], inside the mask bool [n, C]: int64 [n] each."""
        first = self.mix["first"][group]
        second = self.mix["second"][group]
        if mask is None:
            return first, second
        rows = np.arange(len(group))
        # `instead` is the best configuration that is affordable and not forbidden
        affordable = self.mix["mean_cost"] <= self.budgets_ms[group][:, None]
        accuracy = np.where(affordable, self.mix["mean_accuracy"], -np.inf)
        instead = pick(accuracy, self.mix["mean_cost"], mask)
        has_second = mask[rows, second]
        first = np.where(mask[rows, first], first, np.where(has_second, second, instead))
        return first, np.where(has_second, second, first)

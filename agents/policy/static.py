"""Budget-aware static: for each budget the one configuration that was best on average."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Self

import numpy as np

from .arrays import Array, Arrays, log_ms, pick


class Static:
    """Takes, for each budget, the configuration with the best mean of accuracy·1[latency ≤ budget].

    Where nothing ever met the budget all means are 0, and the one with the lowest mean latency is
    taken. It never reads features.

    Attributes:
        latency_ms: [C], the mean latency of each configuration.
        sorted_ms: [C, n], all measurements of each configuration in order, ∞ for none.
        running: [C, n + 1], the mean utility under a budget between two of these.
        starts, choices: [s] each: from `starts[i]` ms on, `choices[i]` is best of all.
        log_latency, spread: float64 [C], mean and standard deviation of ln ms; 0 without any
            measurement.
    """

    name = "budget_aware_static"

    def __init__(self, latency_ms: Array, sorted_ms: Array, running: Array) -> None:
        self.latency_ms = latency_ms
        self.sorted_ms = sorted_ms
        self.running = running
        logs = np.ma.masked_invalid(log_ms(sorted_ms))
        self.log_latency = logs.mean(1).filled(0.0)
        self.spread = logs.std(1).filled(0.0)
        self.starts, self.choices = self._steps()
        self._few = self.starts.tolist()

    @classmethod
    def restored(cls, arrays: Arrays) -> Self:
        """Return static from the arrays of a file, see `FittedStatic.arrays`."""
        return cls(arrays["latency_ms"], arrays["sorted_ms"].astype(np.float64), arrays["running"])

    def mean_utility(self, limits: Array) -> Array:
        """Return every configuration's mean utility under limits [n] in ms, float64 [n, C]."""
        limits = limits.astype(np.float64)
        # each configuration by a search among its own measurements
        columns = []
        for latencies, worth in zip(self.sorted_ms, self.running, strict=True):
            columns.append(worth[np.searchsorted(latencies, limits, side="right")])
        return np.stack(columns, 1)

    def single(self, limit: float) -> int:
        """Return the configuration for one limit in ms."""
        return int(self.choices[bisect.bisect_right(self._few, limit) - 1])

    def expected(self, index: int) -> tuple[int, float, float]:
        """Return a configuration with mean and standard deviation of its ln ms."""
        return index, float(self.log_latency[index]), float(self.spread[index])

    def choose(
        self, features: Mapping[str, Array], limits: Array, mask: Array | None = None
    ) -> Array:
        """Return configurations int64 [n] for limits [n] in ms, inside the mask bool [n, C]."""
        if mask is None:
            return self.choices[np.searchsorted(self.starts, limits, side="right") - 1]
        distinct, which = np.unique(limits, return_inverse=True)
        return pick(self.mean_utility(distinct)[which.reshape(-1)], self.latency_ms, mask)

    def _steps(self) -> tuple[Array, Array]:
        """Find where the best of all configurations changes as the budget grows. Mean utilities
        never fall as it grows, so the best one is the running maximum over all cells in order of
        latency; among equals the one with the lower mean latency."""
        count, samples = self.sorted_ms.shape
        # configurations from the fastest to the slowest on average, and all cells by time
        order = np.argsort(self.latency_ms, kind="stable")
        ranks = np.concatenate([[0], np.repeat(np.argsort(order), samples)])
        time = np.concatenate([[-np.inf], self.sorted_ms.reshape(-1)])
        worth = np.concatenate([[0.0], self.running[:, 1:].reshape(-1)])
        # cells that were not measured take forever
        measured = time < np.inf
        time = time[measured]
        rank_of_worth = np.unique(worth[measured], return_inverse=True)[1].reshape(-1)
        by_time = np.argsort(time, kind="stable")
        # one number that sorts by worth, then by mean latency
        key = rank_of_worth * count + (count - 1 - ranks[measured])
        # what is best so far, decoded into a configuration
        best = np.maximum.accumulate(key[by_time])
        time = time[by_time]
        chosen = order[count - 1 - best % count]
        # the last cell of each latency, which includes the others
        last = np.append(time[1:] != time[:-1], True)
        time = time[last]
        chosen = chosen[last]
        new = np.append(True, chosen[1:] != chosen[:-1])
        return time[new], chosen[new]

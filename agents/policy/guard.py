"""The guard of a deployed policy: what it does at each budget was settled on held-out samples."""

from __future__ import annotations

import bisect

import numpy as np

from .arrays import Array, Arrays, log_ms
from .static import Static


class Guard:
    """Margins and fall-backs for the calibrated budgets; a request uses the one nearest in log-ms.

    Attributes:
        static: decides where the policy does not.
        budgets_ms: [B].
        margin: [B], the share of its budget that the policy may plan with.
        deployed: bool [B], False where budget-aware static decides.
    """

    def __init__(self, arrays: Arrays, static: Static) -> None:
        self.static = static
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self.margin = arrays["margin"].astype(np.float64)
        self.deployed = arrays["deploy"].astype(bool)
        # budgets in order, and the geometric means between neighbours
        self._order = np.argsort(self.budgets_ms, kind="stable")
        logs = log_ms(self.budgets_ms[self._order])
        self._between = np.exp((logs[1:] + logs[:-1]) / 2).tolist()
        columns = self.margin[self._order].tolist(), self.deployed[self._order].tolist()
        self._few = list(zip(*columns, strict=True))

    def single(self, limit: float) -> tuple[int | None, float]:
        """Return the choice of static where it decides, else None; and the ms to plan with."""
        margin, deployed = self._few[bisect.bisect_left(self._between, limit)]
        if deployed:
            return None, limit * margin
        return self.static.single(limit), limit

    def groups(self, limits: Array) -> Array:
        """Return the calibrated budget nearest to each limit [n] in ms, int64 [n]."""
        return self._order[np.searchsorted(self._between, limits)]

    def planned(self, limits: Array) -> Array:
        """Return the ms that the policy plans with under limits [n]."""
        return limits * self.margin[self.groups(limits)]

    def settled(self, chosen: Array, limits: Array, mask: Array | None) -> Array:
        """Replace choices [n] where static decides, inside the mask bool [n, C]."""
        deployed = self.deployed[self.groups(limits)]
        return np.where(deployed, chosen, self.static.choose({}, limits, mask))

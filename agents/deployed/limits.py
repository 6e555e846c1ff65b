"""Limits on further costs of a request, such as a price, in a deployed controller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .arrays import Array, Arrays, as_limit

ROUNDING = 1e-9
"""Tolerance for logarithms of costs, far below the precision of float32."""
CostLimits = Mapping[str, Any] | None
"""Limits that a request brings, by the names of costs, such as {"usd": 0.002}; each takes the place
of the declared limit on this cost."""


class CostBounds:
    """What further costs, such as a price, stay below with the probability set in training.

    The logarithm of a bound is linear in normalised features: bias + margin + x·weight.

    Attributes:
        names: of the K costs.
        constant: [K, C], the logarithm of the bound at x = 0.
        floor: [K], the logarithm of what counts as no cost.
        weight: [width, K·C]; None if no bound depends on the features.
    """

    def __init__(self, arrays: Arrays, names: list[str]) -> None:
        self.names = names
        self.constant = arrays["bias"].astype(np.float64) + arrays["margin"]
        self.floor = arrays["floor"].astype(np.float64)
        self.weight: Array | None = None
        if "weight" in arrays:
            columns = arrays["weight"].astype(np.float64).transpose(1, 0, 2)
            self.weight = np.ascontiguousarray(columns.reshape(len(columns), -1))

    def log_limits(self, limits: Mapping[str, Any]) -> Array:
        """Return ln of the limit on each cost, [K], ∞ for none. Raises a ValueError for a cost that
        is not known, or a limit that is no positive number."""
        logs = np.full(len(self.names), np.inf)
        for name, value in limits.items():
            # costs are measured in float32
            limit = float(np.float32(as_limit(value, name)))
            if name not in self.names:
                raise ValueError(
                    f"limits: {name}: the controller predicts {', '.join(self.names)} only"
                )
            if not 0 < limit < math.inf:
                raise ValueError(f"limits: {name}={value}: must be positive and finite")
            k = self.names.index(name)
            # rounding of logarithms must not matter; no cost is within any limit
            logs[k] = max(math.log(limit), self.floor[k]) + ROUNDING
        return logs

    def allowed(
        self, x: Array, log_limits: Array, mask: Array | None = None
    ) -> tuple[Array, Array]:
        """Return which configurations may be chosen for normalised features [n, width], inside the
        mask bool [n, C]: bool [n, C].

        These are all whose costs stay within the limits [K]; where there are none, the one that
        exceeds them by the smallest factor. Also returns where there are any, bool [n].
        """
        excess = np.repeat(self._excess(0.0, log_limits), len(x), 0)
        if self.weight is not None:
            bounds = x.astype(np.float64) @ self.weight
            excess = self._excess(bounds.reshape(len(x), *self.constant.shape), log_limits)
        if mask is not None:
            excess = np.where(mask, excess, np.inf)
        allowed = excess <= 0
        fits = np.asarray(allowed.any(1))
        allowed[np.arange(len(x)), excess.argmin(1)] |= ~fits
        return allowed, fits

    def allowed_single(self, x: Array, log_limits: Array, mask: Array | None = None) -> Array:
        """Return which configurations may be chosen for normalised features [width], inside the
        mask bool [C]: bool [C]."""
        bounds: Any = 0.0
        if self.weight is not None:
            bounds = x.dot(self.weight).reshape(self.constant.shape)
        excess = self._excess(bounds, log_limits)[0]
        if mask is not None:
            excess = np.where(mask, excess, np.inf)
        allowed: Array = excess <= 0
        if not allowed.any():
            allowed[excess.argmin()] = True
        return allowed

    def _excess(self, bounds: Any, log_limits: Array) -> Array:
        """Return by how much bounds, of which [n, K, C] depends on features, exceed the limits [K]
        at most: the logarithm of a factor, [n, C]."""
        above = bounds + (self.constant - log_limits[:, None])
        excess: Array = above.reshape(-1, *self.constant.shape).max(1)
        return excess


class Limits:
    """The limits that hold for a request: those that were declared in training, and those that it
    brings (the argument `limits` everywhere).

    Attributes:
        declared: by the names of costs; {} for none.

    Args:
        bounds: what costs stay below; None where nothing is known of them.
    """

    def __init__(self, declared: dict[str, float], bounds: CostBounds | None) -> None:
        self.declared = declared
        self._bounds = bounds
        self._of_declared = self.bounds.log_limits(declared) if declared else None

    @property
    def bounds(self) -> CostBounds:
        """What costs stay below. Raises a ValueError if that is not known."""
        if self._bounds is None:
            raise ValueError(
                "limits: need a controller for deadlines that predicts further costs; train it "
                "with profile.costs=[…]"
            )
        return self._bounds

    @property
    def read_features(self) -> bool:
        """Whether what limits allow depends on features."""
        return self._bounds is not None and self._bounds.weight is not None

    def logs(self, limits: CostLimits = None) -> Array | None:
        """Return the limits that hold, as `CostBounds` takes them; None if there are none. Raises a
        ValueError as it does, and where nothing is known of costs."""
        return self.bounds.log_limits(self.holding(limits)) if limits else self._of_declared

    def holding(self, limits: CostLimits = None) -> dict[str, Any]:
        """Return the limits that hold, by the names of costs."""
        return {**self.declared, **(limits or {})}

    def words(self, limits: CostLimits = None) -> str:
        """Return the limits that hold as they are typed, such as usd=0.002, by name."""
        holding = sorted(self.holding(limits).items())
        return ", ".join(f"{name}={float(limit):g}" for name, limit in holding)

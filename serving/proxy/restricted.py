"""A controller that may choose some of its configurations only, for one request.

On a request's walk it stands in for the controller that it is made from: guard, static and
exploration stay within what is allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.agents.deployed.arrays import Array, Arrays
from knobwise.agents.deployed.calibrated import Static
from knobwise.agents.deployed.controller import CostLimits, Drift, Expected, NumpyController

Allowed = NDArray[np.bool_]
"""[C], True for the configurations that may be chosen."""


class RestrictedStatic(Static):
    """Budget-aware static among the configurations that are allowed."""

    def __init__(self, static: Static, allowed: Allowed) -> None:
        # the arrays are shared: this is made for each request
        vars(self).update(vars(static))
        self._allowed = allowed

    def single(self, limit: float) -> int:
        """Return the configuration for one limit in ms."""
        return int(self.choose({}, np.array([limit]), self._allowed[None])[0])

    def mean_utility(self, limits: Array) -> Array:
        """Return mean utilities [n, C] under limits [n] in ms, −∞ for what is not allowed."""
        return np.where(self._allowed, super().mean_utility(limits), -np.inf)


class RestrictedController(NumpyController):
    """A controller under deadlines, among the configurations that are allowed, at least one."""

    def __init__(self, controller: NumpyController, allowed: Allowed) -> None:
        # its digest too, since its rows in the log are those of the controller
        vars(self).update(vars(controller))
        self._allowed = allowed
        if controller.static is not None:
            self.static = RestrictedStatic(controller.static, allowed)

    def fall_back(
        self, budget_ms: float, drift: Drift = None, limits: CostLimits = None
    ) -> Expected | None:
        """Return the decision where the guard falls back, see `NumpyController`."""
        if self.static is None or super().fall_back(budget_ms, drift, limits) is None:
            return None
        mask: Any = self._allowed[None]
        if limits or self.limits:
            # these bounds depend on no features, or the guard would not have decided
            x = np.zeros((1, self._heads.width))
            mask, _ = self._bounds.allowed(x, self.log_limits(limits), mask)
        limit = np.array([budget_ms * self.factor(drift)])
        return self.static.expected(int(self.static.choose({}, limit, mask)[0]))

    def decide_expected(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
    ) -> Expected:
        """Decide for one request, see `NumpyController`."""
        fixed = self.fall_back(budget_ms, drift, limits)
        if fixed is not None:
            return fixed
        # the way for a single request knows no mask
        many = {name: np.asarray(block)[None] for name, block in features.items()}
        mask: Any = self._allowed[None]
        chosen = self.choose(many, np.array([budget_ms]), mask, drift, cost_limits=limits)
        return self.expected_of(features, budget_ms, drift, int(chosen[0]))

    def static_expected(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
    ) -> Expected:
        """Return what static chooses, see `NumpyController`."""
        if self.static is None:
            return self.decide_expected(features, budget_ms, drift, limits)
        mask: Any = self._allowed[None]
        if limits or self.limits:
            raw = self._joined(features)[None]
            mask, _ = self._bounds.allowed(self._normaliser(raw), self.log_limits(limits), mask)
        limit = np.array([budget_ms * self.factor(drift)])
        return self.static.expected(int(self.static.choose({}, limit, mask)[0]))

    def log_probs(
        self, features: Arrays, limits: Array, mask: Array | None = None, drift: Drift = None
    ) -> Array:
        """Return log-probabilities [n, C], −∞ for what is not allowed."""
        allowed: Any = np.tile(self._allowed, (len(limits), 1))
        return super().log_probs(
            features, limits, allowed if mask is None else mask & allowed, drift
        )

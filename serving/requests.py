"""What is passed on a request's walk: the request that begins, the decision on it, the result; and
its row in the log. This file needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from knobwise.agents.deployed.arrays import Array, Arrays
from knobwise.agents.deployed.controller import Drift, Expected, NumpyController
from knobwise.agents.deployed.promise import Promised
from knobwise.agents.learning.request_log import pack_floats
from knobwise.envs.tables.units import MS

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import KnobValue


class PendingRequest(NamedTuple):
    """A request that has begun."""

    budget_ms: float
    limits: Mapping[str, float] | None
    """Limits on further costs, such as a price, in place of those that were declared in training;
    None for these."""
    controller: NumpyController
    """The controller that decides."""
    drift: Drift
    """The drift that the decision allows for: offsets of ln ms [C] and the factor on their spread;
    None for no drift."""
    explored: bool
    """True if the configuration is drawn."""
    begun: float
    """The clock's reading when it began, in s."""
    waited_ms: float
    """The time from its arrival until then."""
    limit_ms: float
    """What was left of the budget for the answer then, if the guard was asked."""
    static: Expected | None
    """The decision where the guard falls back, which needs no features; else None."""
    log_fields: Mapping[str, Any] | None = None
    """What else its row in the log says, such as the `id` that it is to have."""
    mask: Array | None = None
    """The configurations that may be chosen, bool [C]; None for all."""

    @property
    def needs_features(self) -> bool:
        """True if `decide` reads features."""
        return self.static is None or self.explored


class Decision(NamedTuple):
    """A configuration for a request, and what it was chosen from."""

    choice: int
    """The controller's index of the configuration."""
    log_latency: float
    """The mean of ln ms that is expected of the answer, without drift."""
    spread: float
    """The standard deviation of ln ms."""
    request: PendingRequest
    configuration: dict[str, KnobValue]
    """The knobs by name."""
    best: int
    """The choice of the controller, before anything is drawn."""
    fell_back: bool
    """True if it was made without features, by static."""
    features: Arrays | None
    """Blocks [d]; {} where none were needed, None where they failed."""
    limit_ms: float
    """What was left of the budget for the answer."""
    spent_ms: float
    """What was taken off the budget before the decision began."""
    took_ms: float
    made: float
    """The clock's reading when it was made, in s."""
    limits_note: str = ""
    """What is to be said of limits on further costs, see `NumpyController.limits_note`: that no
    configuration was expected to keep them, or that guard and static were calibrated at others."""

    @property
    def promised(self) -> Promised | None:
        """What is promised of such requests, see `NumpyController.promised`: a share of 0 where
        anything but the rule that the promise is about chose among all configurations."""
        request = self.request
        promised = request.controller.promised(self.limit_ms, request.drift)
        if promised is None or (self._by_rule and not self.unlike):
            return promised
        return promised._replace(share=0.0)

    @property
    def _by_rule(self) -> bool:
        """True if the controller chose, by all that it reads, among all configurations."""
        request = self.request
        free = request.mask is None and request.limits is None
        # also where the draw fell on what the controller had chosen
        replaced = request.explored or "shadow" in (request.log_fields or {})
        replaced |= self.choice != self.best
        return free and not replaced and self.features is not None

    @property
    def unlike(self) -> bool:
        """True if it is unlike those of training, see `NumpyController.is_unlike`."""
        return self.request.controller.is_unlike(self.features or {})


class Result(NamedTuple):
    """A request that was answered, with its times."""

    decision: Decision
    answer: Any
    """The `Answer` of a model, or whatever a callable returned."""
    answer_ms: float
    """The time of the answer itself, as the tracker and the log have it."""
    total_ms: float
    """waited_ms + overhead_ms − prepared_ms + the time of the answer; NaN if the model gave a time
    that is not possible."""
    overhead_ms: float
    """The time that the controller adds: features, decision, setting knobs, tracking, and the calls
    between them; also a first look that the answer does not continue from."""
    decision_us: float
    """The time in which the whole batch was decided, a part of the overhead."""
    waited_ms: float = 0.0
    """The time from its arrival to its end that was not spent on it; 0 if the arrival is
    unknown."""
    prepared_ms: float = 0.0
    """The time of the first stage that passed before the answer was asked for, see
    `AdaptiveModel.prefetch`."""
    request_id: str | None = None
    """The id of its row in the log; None without a log."""
    fault: str = ""
    """Why there is no answer; "" for one."""
    abandoned: bool = False
    """True if nobody waited for the answer any longer, so that its times are those until then."""
    costs: Mapping[str, float] | None = None
    """What is known of the answer's further costs, such as {"usd": 0.002}; None for nothing."""

    @property
    def request(self) -> PendingRequest:
        """The request."""
        return self.decision.request

    @property
    def budget_ms(self) -> float:
        """The budget."""
        return self.request.budget_ms

    @property
    def controller(self) -> NumpyController:
        """The controller that decided."""
        return self.request.controller

    @property
    def drift(self) -> Drift:
        """See `PendingRequest.drift`."""
        return self.request.drift

    @property
    def explored(self) -> bool:
        """True if the configuration was drawn."""
        return self.request.explored and self.decision.features is not None

    @property
    def features(self) -> Arrays:
        """Blocks [d]; {} where there were none."""
        return self.decision.features or {}

    @property
    def best(self) -> int:
        """The choice of the controller, before anything was drawn."""
        return self.decision.best

    @property
    def choice(self) -> int:
        """The controller's index of the configuration."""
        return self.decision.choice

    @property
    def configuration(self) -> dict[str, KnobValue]:
        """The knobs of the answer."""
        return self.decision.configuration

    @property
    def limit_ms(self) -> float:
        """What was left of the budget for the answer, when the decision was made."""
        return self.decision.limit_ms

    @property
    def expected(self) -> Expected:
        """The choice, and the mean and standard deviation of its ln ms, without drift."""
        return self.decision[:3]

    @property
    def unlike(self) -> bool:
        """True if the request is unlike those of training, so that static decided, where there is
        one."""
        return self.decision.unlike

    @property
    def met(self) -> bool:
        """True if the request was answered on time, or within its budget. A mean budget is one of
        all requests, so none of them misses it."""
        if self.fault or self.abandoned:
            return False
        return self.controller.budgets.met(self.total_ms, self.budget_ms)

    @property
    def over_limit(self) -> bool | None:
        """True if the answer cost more than a limit on further costs, so that it counts as late;
        None if no limit holds, or no cost that has one is known."""
        limits = self.controller.limits.holding(self.request.limits)
        costs = {name: cost for name, cost in (self.costs or {}).items() if name in limits}
        if not costs:
            return None
        # as in training, where costs are float32
        return any(np.float32(cost) > np.float32(limits[name]) for name, cost in costs.items())


def row_of(result: Result, chances: Mapping[int, float]) -> dict[str, object]:
    """Return a row of the log in plain values.

    `beside_ms` is the time of all but the answer, by which a reader sees whether the other two
    times of a row still belong together. It is negative where a first stage that the answer counts
    was prepared before the request came.

    All that is called …_ms is in the unit of the controller, which a row names if it is not ms.

    Args:
        result: the request and its answer.
        chances: configuration → probability, for all that could have been drawn.
    """
    decision = result.decision
    request = decision.request
    features = decision.features
    row = {
        "controller": request.controller.digest,
        "choice": decision.choice,
        "knobs": decision.configuration,
        "probability": chances[decision.choice],
        "among": list(chances),
        "chances": list(chances.values()),
        "best": decision.best,
        "explored": result.explored,
        "budget_ms": request.budget_ms,
        "guard_ms": float(request.limit_ms),
        "limit_ms": float(decision.limit_ms),
        "features": {name: pack_floats(block) for name, block in (features or {}).items()} or None,
        "log_latency": _known(decision.log_latency),
        "drift": None,
        "answer_ms": _known(result.answer_ms),
        "beside_ms": _known(result.total_ms - result.answer_ms),
        "total_ms": _known(result.total_ms),
        "met": bool(result.met),
    }
    if request.controller.unit != MS:
        row["unit"] = request.controller.unit
    if request.drift is not None:
        row["drift"] = [pack_floats(request.drift[0]), float(request.drift[1])]
    if request.limits is not None:
        row["limits"] = dict(request.limits)
    if decision.limits_note:
        row["limits_note"] = decision.limits_note
    if features is None or result.fault:
        row["failed"] = True
    if result.fault:
        row["fault"] = result.fault
    if result.abandoned:
        row["abandoned"] = True
    if result.over_limit is not None:
        row["over_limit"] = result.over_limit
    if result.unlike:
        row["unlike"] = True
    return {**row, **(request.log_fields or {})}


def _known(value: float) -> float | None:
    """Return a number as JSON has it: null if it is not known."""
    return None if math.isnan(value) else value

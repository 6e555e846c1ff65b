"""The way of one request past the controller: decided, decided again after a fault, logged."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from knobwise.agents.deployed.arrays import Array
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.deployed.promise import ROUNDING
from knobwise.common.errors import InputError
from knobwise.profiling.endpoint.prices import Price, answer_usd
from knobwise.serving.inputs import limit_in_request
from knobwise.serving.proxy.chat import (
    ChatRequest,
    MissingFeatures,
    RequestFeatures,
    budget_field,
    last_question,
)
from knobwise.serving.proxy.knob_fields import Freedom, KnobFields
from knobwise.serving.proxy.metrics import ServerMetrics
from knobwise.serving.requests import Decision, PendingRequest, Result
from knobwise.serving.runtime import Runtime

LOG = logging.getLogger(__name__)
USD = "usd"
"""The name of what answers cost in US dollars, in a row and in limits."""


class Choice(NamedTuple):
    """What was decided for a request."""

    decision: Decision
    knobs: dict[str, object]
    """The knobs that are sent."""
    body: dict[str, Any]
    """The client's, as a chat and without the fields that are ours."""
    allowed: Array | None
    """The configurations that may still be chosen, bool [C]; None for all."""
    learns: bool
    """False if the answer is not made with exactly these knobs."""
    reason: str = "policy"
    """How it was decided, in a word: `policy`; `explored`, drawn at random; by static, since the
    `guard` falls back, since `features` failed, or since they are `unlike` those of training;
    `retry`, the best other model after a fault; `shadow`, the setting that is always sent."""
    attempts: int = 1
    """How many settings were tried, this one included."""

    def unlearned(self) -> Choice:
        """Return the choice for an answer that tells neither tracker nor updates anything, as that
        of a whole answer where the time until its first chunk counts."""
        decision = self.decision
        # marked in the log as nothing to learn from, so that nothing counts as drawn
        decision = decision._replace(features=None, best=decision.choice)
        return self._replace(decision=decision, learns=False)


class Walk:
    """Decides for requests and finishes them.

    Args:
        runtime: tracker, log, exploration and hot swap.
        fields: how knobs are set.
        features: what the controller reads of a request.
        metrics: counts what fell back.
        budget: of requests without one, in the unit of the controller.
        prices: by model; None for unknown.
        log_prompts: True to log the user's last message.
        shadow: None; or for a deadline the configuration that is sent instead of the choice, −1 for
            that of static.
    """

    def __init__(
        self,
        runtime: Runtime,
        fields: KnobFields,
        features: RequestFeatures,
        metrics: ServerMetrics,
        *,
        budget: float,
        log_prompts: bool = False,
        shadow: int | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self.runtime = runtime
        self.fields = fields
        self._features = features
        self._metrics = metrics
        self._budget = budget
        self.prices = prices
        self._log_prompts = log_prompts
        self._shadow = shadow
        self._kinds: set[str] = set()

    async def decide(self, chat: ChatRequest, arrived: float) -> Choice | None:
        """Decide for a request that has arrived at this reading of the runtime's clock.

        Returns None where nothing is decided, and the request is to be sent as it is: the client
        has given a knob a value that is not in the profile, or the policy fails.

        Raises:
            InputError: a deadline or a limit that is no number, or not positive and finite; see
                also `KnobFields.freedom`.
        """
        freedom = self.fields.freedom(chat.chat)
        if "background" in chat.lost:
            # what is answered later has no time of its own
            self.fields.refuse_open(chat.chat, "background")
            freedom = None
        budget = self._budget
        if chat.budget is not None:
            controller = self.runtime.controller
            budget = checked_budget(chat.budget, controller, budget_field(controller.unit))
        request = self.runtime.begin(
            budget,
            chat.limits,
            arrived=arrived,
            ask_guard=freedom is not None,
            mask=None if freedom is None else freedom.allowed,
        )
        if freedom is None:
            return None
        # whatever is wrong here, the request can still be answered as the client wrote it
        try:
            request = request._replace(log_fields=self._log_fields(chat))
            return await self._decided(chat, request, freedom)
        except Exception as error:
            self.fell_back("policy", error)
            return None

    async def _decided(
        self, chat: ChatRequest, request: PendingRequest, freedom: Freedom
    ) -> Choice:
        # what is cut shorter than any profiled answer says nothing of a setting that was drawn
        if self._shadow is not None or freedom.capped:
            request = request._replace(explored=False)
        decision = None
        if request.needs_features:
            reason = "explored" if request.explored else "policy"
            try:
                decision = self.runtime.decide(request, await self._features.computed(chat))
                if decision.unlike and not request.explored:
                    reason = "unlike"
            except Exception as error:
                reason = "features"
                self.fell_back(reason, error)
                decision = self.runtime.fail(request)
        else:
            decision = self.runtime.decide(request)
            reason = "guard" if decision.promised is None else "promise"
            self._metrics.fallbacks.labels(reason).inc()
        if reason == "explored":
            self._metrics.explored.inc()
        if self._shadow is not None:
            reason = "shadow"
            decision = self._shadowed(decision, self._shadow, freedom.allowed)
        elif freedom.capped:
            # marked in the log as nothing to learn from
            decision = decision._replace(features=None)
        learns = not freedom.capped
        knobs = self.fields.sent(chat.chat, decision.configuration)
        return Choice(
            decision, knobs, chat.chat, allowed=freedom.allowed, learns=learns, reason=reason
        )

    def again(self, choice: Choice) -> Choice | None:
        """Return another setting after a fault of the endpoint, the one that is now best; None if
        none is left, or none is expected to answer before the deadline."""
        decision = choice.decision
        request = decision.request
        controller = request.controller
        left = self._left_ms(request)
        if left <= 0 or self._shadow is not None:
            return None
        configurations = self.runtime.configurations
        allowed = np.ones(len(configurations), bool)
        if choice.allowed is not None:
            allowed &= choice.allowed
        # another model, where there are several: a fault is seldom one of the length of an answer
        for index, values in enumerate(configurations):
            if values.get("model", index) == decision.configuration.get("model", decision.choice):
                allowed[index] = False
        # expectations are those of whoever decides: of the policy with features, or of static
        seen = decision.features is not None and not decision.fell_back
        offset = np.broadcast_to(0.0 if request.drift is None else request.drift[0], len(allowed))
        # where all requests share a budget a single answer may cost anything
        limited = np.flatnonzero(allowed).tolist() if controller.budgets.of_request else []
        for index in limited:
            if seen:
                mean = controller.expected_of(decision.features or {}, left, None, index)[1]
            elif controller.static is not None:
                mean = controller.static.expected(index)[1]
            else:
                mean = math.nan
            # what is not known to keep the budget is not tried
            allowed[index] = mean + offset[index] <= math.log(left)
        if not allowed.any():
            return None
        self._metrics.retries.inc()
        attempts = choice.attempts + 1
        log_fields = dict(request.log_fields or {})
        # an update cannot learn from the row, but says how often a setting failed
        log_fields["attempts"] = attempts
        log_fields["tried"] = [*log_fields.get("tried", []), decision.configuration]
        request = request._replace(log_fields=log_fields, static=None, explored=False, mask=allowed)
        if seen:
            decision = self.runtime.decide(request, decision.features)
        else:
            decision = self.runtime.fail(request)
        # drawn by no policy, so no update learns from the row
        decision = decision._replace(features=None)
        knobs = self.fields.sent(choice.body, decision.configuration)
        return Choice(
            decision,
            knobs,
            choice.body,
            allowed=allowed,
            learns=choice.learns,
            reason="retry",
            attempts=attempts,
        )

    def finish(
        self,
        choice: Choice,
        ended: float | None = None,
        usd: float = math.nan,
        answer_id: str = "",
    ) -> Result:
        """Learn from an answer that is whole, and log it; see `Runtime.finish`.

        Args:
            usd: what it cost, as `price_of` has it.
            answer_id: the answer's own id; "" for none.
        """
        decision = choice.decision
        if answer_id:
            log_fields = {**(decision.request.log_fields or {}), "answer": answer_id}
            decision = decision._replace(request=decision.request._replace(log_fields=log_fields))
        if self.prices is not None:
            known = not math.isnan(usd)
            log_fields = {**(decision.request.log_fields or {}), USD: usd if known else None}
            decision = decision._replace(request=decision.request._replace(log_fields=log_fields))
        self.count_usd(usd)
        costs = None if math.isnan(usd) else {USD: usd}
        with self._counting_lost():
            result = self.runtime.finish(
                decision, ended=ended, learns=choice.learns, cost=usd, costs=costs
            )
        self._metrics.over_limit.inc(bool(result.over_limit))
        if not (result.met or math.isnan(result.total_ms)):
            self._metrics.late.inc()
        self._metrics.level.set(math.exp(self.runtime.tracker.level))
        if (promised := decision.promised) is not None:
            self._metrics.promised.labels("yes" if promised.share else "no").inc()
        # other knobs than were decided, or a cost that is not known, say nothing of a promise
        if choice.learns and not math.isnan(result.total_ms):
            self._watch_promise(decision, result.met)
        return result

    def count_usd(self, usd: float) -> None:
        """Count what an answer cost, or that nobody knows it."""
        if self.prices is not None:
            known = not math.isnan(usd)
            self._metrics.usd.inc(usd if known else 0.0)
            self._metrics.unpriced.inc(not known)

    def _watch_promise(self, decision: Decision, met: bool) -> None:
        """Count whether a request was on time, if that was promised."""
        promised = decision.promised
        if promised is not None and promised.share:
            slower = math.exp(self.runtime.tracker.level)
            self._metrics.watch_promise(_budget_asked_for(decision), promised.share, met, slower)

    def abandon(self, choice: Choice | None, what: str, fault: str, overdue: bool) -> None:
        """Count a setting that gave no answer; see `Runtime.abandon`.

        Args:
            choice: the setting; None for a request that was sent as it is.
            what: who ended it.
            fault: what happened, in words.
            overdue: True if the answer was still to come.
        """
        if choice is None or not (overdue and choice.learns):
            self.runtime.abandon(what, fault)
            return
        decision = choice.decision
        self.runtime.abandon(what, fault, decision)
        self._metrics.level.set(math.exp(self.runtime.tracker.level))
        # what might still have come in time breaks no promise
        if self._left_ms(decision.request) < 0:
            self._watch_promise(decision, False)

    def _left_ms(self, request: PendingRequest) -> float:
        """Return what is left of a budget now: all of it, unless it is a deadline."""
        if not self.runtime.timed:
            return request.budget_ms
        spent_ms = request.waited_ms + (self.runtime.now() - request.begun) * 1e3
        return request.budget_ms - spent_ms

    def lose(self, choice: Choice, fault: str) -> None:
        """Log a request whose answer came to nothing; see `Runtime.lose`."""
        with self._counting_lost():
            self.runtime.lose(choice.decision, fault)

    def give_up(self, choice: Choice) -> None:
        """Log a request whose client has left; see `Runtime.give_up`."""
        with self._counting_lost():
            self.runtime.give_up(choice.decision)

    @contextmanager
    def _counting_lost(self) -> Iterator[None]:
        """Count the rows that cannot be written within the block."""
        log = self.runtime.log
        before = log.lost if log is not None else 0
        yield
        if log is not None and log.lost > before:
            self._metrics.lost.inc(log.lost - before)

    def price_of(
        self,
        model: object,
        usage: Mapping[str, Any] | None,
        service_tier: object = None,
        has_text: bool = True,
    ) -> float:
        """Return what an answer cost in US dollars, by what it says of itself; NaN if that is not
        known. See `answer_usd`."""
        price = (self.prices or {}).get(str(model))
        return answer_usd(price, usage, service_tier, has_text)

    def _log_fields(self, chat: ChatRequest) -> dict[str, str]:
        """Return what the row of a request says beside the decision."""
        log = self.runtime.log
        if log is not None:
            log_fields = {"id": log.new_id()}
        else:
            log_fields = {"id": os.urandom(12).hex()}
        if self._log_prompts:
            log_fields["prompt"] = last_question(chat.chat)[1]
        return log_fields

    def _shadowed(self, decision: Decision, index: int, allowed: Array | None) -> Decision:
        """Return the decision that is sent in place of one that is only logged."""
        request = decision.request
        controller = request.controller
        if index >= 0 and (allowed is None or allowed[index]):
            expected = controller.expected_of(
                decision.features or {}, decision.limit_ms, request.drift, index
            )
        else:
            assert controller.static is not None
            limit_ms = decision.limit_ms * controller.factor(request.drift)
            expected = controller.static.expected(controller.static.single(limit_ms, allowed))
        log_fields = {**(request.log_fields or {}), "shadow": decision.configuration}
        choice, log_latency, spread = expected
        return decision._replace(
            choice=choice,
            log_latency=log_latency,
            spread=spread,
            best=choice,
            configuration=controller.configuration(choice),
            request=request._replace(log_fields=log_fields),
        )

    def fell_back(self, reason: str, error: Exception) -> None:
        """Count a failure of ours; the first of its kind is said, without what was in the
        request."""
        self._metrics.fallbacks.labels(reason).inc()
        kind = f"{reason}: {type(error).__name__}"
        if isinstance(error, MissingFeatures):
            kind = f"features: {error}"
        if kind not in self._kinds:
            self._kinds.add(kind)
            LOG.warning("%s; this is counted, and such requests are answered without", kind)


def checked_budget(value: object, controller: NumpyController, name: str) -> float:
    """Return the budget of a request, in the controller's unit. Raises InputError, with the name of
    its field, for what is none, or for a mean that was not calibrated."""
    budget = limit_in_request(value, controller.unit, name)
    try:
        controller.budgets.check(budget)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error
    return budget


def checked_default(
    fields: KnobFields, runtime: Runtime, shadow: bool, default: Mapping[str, object] | None
) -> int | None:
    """Return the configuration that is sent with `shadow`, see `Walk`. Raises InputError if there
    is none."""
    if not shadow:
        return None
    if default:
        return fields.index_of(default)
    if runtime.controller.static is None:
        raise InputError("shadow=true: the controller has no static choice; give default={…}")
    return -1


def _budget_asked_for(decision: Decision) -> str:
    """Return the trained budget whose promise a request asks for, for a label: the largest that its
    own covers, whichever rule decides; below all of them that of the rule. So there are few labels,
    whatever clients write."""
    request = decision.request
    trained_ms = request.controller.trained_ms
    assert trained_ms is not None
    covered = trained_ms[trained_ms <= (1 + ROUNDING) * request.budget_ms]
    if len(covered):
        return f"{covered.max():.6g}"
    promised = decision.promised
    assert promised is not None
    return f"{promised.budget_ms:.6g}"

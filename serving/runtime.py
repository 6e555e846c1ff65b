"""The walk of a request past a controller, the same in front of any model.

    begin ─▶ features, if they are needed ─▶ decide, or fail ─▶ the model answers ─▶ finish

Whoever serves computes the features and the answer between these calls, in threads or coroutines;
many requests may be under way. No lock is held in between. This file needs no torch.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from knobwise.agents.deployed.arrays import MIN_MS, Array, Arrays, configurations_of
from knobwise.agents.deployed.controller import Expected, NumpyController
from knobwise.agents.learning.request_log import RequestLog
from knobwise.common.errors import InputError
from knobwise.common.forks import FORKED
from knobwise.envs.tables.units import MS, check_time
from knobwise.serving.exploration import Exploration, near_best, second_best
from knobwise.serving.inputs import blocks_of, limit_in_request, limits_in_request
from knobwise.serving.requests import Decision, PendingRequest, Result, row_of
from knobwise.serving.tracker import LatencyTracker
from knobwise.serving.versions import Watched

if TYPE_CHECKING:
    from knobwise.agents.calibration.deployed_controller import DeployedController
    from knobwise.serving.knob_policy import KnobPolicy

ServedPolicy = Union["KnobPolicy", "DeployedController", NumpyController]
"""What can decide for requests."""
DECISIONS_KEPT = 64
"""Number of the latest decisions whose median time, knobs included, the next one is charged."""


class Overhead:
    """The median times of the latest decisions, and of the calls around them, in ms.

    They are 0 before the first decision.
    """

    def __init__(self) -> None:
        self._latest: deque[tuple[float, float]] = deque(maxlen=DECISIONS_KEPT)
        self._count = 0
        self.decision_ms = 0.0
        self.beyond_ms = 0.0

    def add(self, decision_ms: float, beyond_ms: float) -> None:
        self._latest.append((decision_ms, beyond_ms))
        self._count += 1
        # the medians take time too
        if self._count < 8 or self._count % DECISIONS_KEPT == 0:
            columns = zip(*self._latest, strict=True)
            self.decision_ms, self.beyond_ms = map(statistics.median, columns)

    def left_of(self, budget_ms: float) -> float:
        """Return the budget left for the answer, in ms, if this decision takes as long as the
        previous one."""
        return max(MIN_MS, budget_ms - self.decision_ms - self.beyond_ms)


class Runtime:
    """The serving runtime: a controller with latency tracker, request log, exploration and reload.

    Attributes:
        controller: the one that decides on the next request.
        configurations: the knob values of each configuration.
        now: the clock of all times, in s.
        decided, fallen_back: the `Overhead` of decisions with and without features.
        unlike: how many requests were answered that are unlike those of training: a text is, or a
            block lacks what no training sample lacked.
        timed: True if budgets are deadlines, so that waiting and deciding use them up; False if
            they are means, or costs such as USD.

    Args:
        policy: from `knobwise.load` or `knobwise.fit`, a controller that a run deploys, or one from
            `NumpyController.load`.
        tracker: True for a new one, or one for this controller to go on with. False: nothing is
            learned from the times of answers.
        log: a folder, or the log in it, that gets a row for each request once it is answered.
        explore, explore_loss, seed: see `Exploration`.

    Raises:
        InputError: what is no policy; exploration under mean budgets; the tracker of another
            controller; a log that cannot be written.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        tracker: bool | LatencyTracker = True,
        log: RequestLog | str | Path | None = None,
        explore: float = 0.0,
        explore_loss: float = 0.05,
        seed: int | None = None,
    ) -> None:
        self.controller = controller_of(policy)
        self.configurations = configurations_of(self.controller)
        self.tracker = fresh = LatencyTracker(self.configurations, self.controller.digest)
        if isinstance(tracker, LatencyTracker):
            self.tracker = tracker
        if (self.tracker.digest, self.tracker.names) != (fresh.digest, fresh.names):
            raise InputError(
                "runtime: the tracker belongs to another controller; start with tracker=True"
            )
        budgets = self.controller.budgets
        self.timed = self.controller.unit == MS and budgets.of_request
        self._tracks = tracker is not False and budgets.of_request
        if explore and not budgets.of_request:
            raise InputError(
                "explore: needs a budget for each request, but the controller is for mean budgets; "
                "leave it out, or train with budget=quantiles"
            )
        self.now: Callable[[], float] = time.perf_counter
        self._exploration = Exploration(explore, explore_loss, seed)
        self._watched: Watched | None = None
        self.decided = Overhead()
        self.fallen_back = Overhead()
        self.unlike = 0
        self.after_fork()
        FORKED.add(self)
        # the last thing to do, so that nothing is written where something else is refused
        self.log = log if isinstance(log, RequestLog | None) else RequestLog(log)

    def after_fork(self) -> None:
        """Begin with a lock that is free."""
        self._lock = threading.Lock()

    def watch(self, path: str | Path) -> None:
        """Replace the controller between two requests whenever there is a new file.

        The tracker's state is kept: an update learns only what the tracker did not capture. An
        invalid file is logged and ignored.

        Args:
            path: an exported `.npz`, or the folder of controller.npz, such as `current` of
                `knobwise update`.

        Raises:
            InputError: there is no such file.
        """
        watched = Watched(Path(path), self.controller)
        with self._lock:
            self._watched = watched
            self._follow(watched)

    def _follow(self, watched: Watched) -> None:
        """Replace the controller if there is a new one."""
        watched.refresh()
        self.controller = watched.controller
        self.tracker.digest = self.controller.digest

    def followed(self) -> NumpyController:
        """Return the controller that decides now, which is a new one if the watched file is."""
        with self._lock:
            return self._followed()

    def _followed(self) -> NumpyController:
        """Return it while the lock is held."""
        if self._watched is not None:
            self._follow(self._watched)
        return self.controller

    def begin(
        self,
        budget_ms: float,
        limits: Mapping[str, float] | None = None,
        *,
        arrived: float | None = None,
        ask_guard: bool = True,
        mask: Array | None = None,
    ) -> PendingRequest:
        """Take a request in, and ask the guard whether features are needed at all.

        Args:
            budget_ms: a deadline in ms after arrival, or after now.
            limits: on further costs by name, such as {"usd": 0.002}, in place of those that the
                policy was trained with.
            arrived: a reading of `now` from which on waiting counts.
            ask_guard: False for a request whose features are computed in any case.
            mask: bool [C], the configurations that may be chosen, at least one; None for all.

        Raises:
            InputError: a budget or limit that is no number, or not positive and finite; a limit on
                a cost that the policy does not predict.
        """
        begun = self.now()
        budget_ms = limit_in_request(budget_ms, self.controller.unit)
        limits = limits_in_request(limits)
        waited_ms = 0.0
        if arrived is not None:
            waited_ms = (begun - arrived) * 1e3
        with self._lock:
            controller = self._followed()
            drift = controller.budgets.drift(self.tracker.drift)
            explored = self._exploration.should_explore()
        static = None
        limit_ms = budget_ms
        if ask_guard:
            limit_ms = self.left_of(self.fallen_back, budget_ms, waited_ms)
        try:
            controller.limits.logs(limits)  # refuses what cannot be
            controller = controller.settled(limit_ms, drift)
            if ask_guard:
                static = controller.fall_back(limit_ms, drift, limits, mask)
        except ValueError as error:
            raise InputError(f"runtime: {error}") from error
        return PendingRequest(
            budget_ms=budget_ms,
            limits=limits,
            controller=controller,
            drift=drift,
            explored=explored,
            begun=begun,
            waited_ms=waited_ms,
            limit_ms=limit_ms,
            static=static,
            mask=mask,
        )

    def left_of(self, overhead: Overhead, budget_ms: float, spent_ms: float) -> float:
        """Return what is left of a budget for the answer: all of it, unless it is a deadline."""
        return overhead.left_of(budget_ms - spent_ms) if self.timed else budget_ms

    def decide(
        self,
        request: PendingRequest,
        features: Any = None,
        spent_ms: float | None = None,
        choose: Callable[[Arrays, float], Expected] | None = None,
    ) -> Decision:
        """Decide with what is left of the budget.

        Args:
            request: from `begin`.
            features: as `KnobPolicy.decide` takes them; ignored where they are not needed.
            spent_ms: what is taken off the budget; None for the time since it arrived or began.
            choose: decides for features and what is left in ms, such as from a cache, instead of
                the controller.

        Raises:
            InputError: a feature is missing, no number, infinite or of another shape.
        """
        controller = request.controller
        expected = request.static
        limit_ms = request.limit_ms
        reads = request.needs_features
        blocks: Arrays = {}
        try:
            if reads:
                blocks = blocks_of(features, controller)
            start = self.now()
            if spent_ms is None:
                spent_ms = request.waited_ms + (start - request.begun) * 1e3
            if reads:
                limit_ms = self.left_of(self.decided, request.budget_ms, spent_ms)
                if choose is None:
                    expected = controller.decide_expected(
                        blocks, limit_ms, request.drift, request.limits, request.mask
                    )
                else:
                    expected = choose(blocks, limit_ms)
            note = controller.limits_note(blocks if reads else None, request.limits)
        except ValueError as error:
            raise InputError(f"runtime: {error}") from error
        # without features it is what the guard's static chose
        assert expected is not None
        best = expected[0]
        if request.explored:
            close, share = self._close(request, blocks, limit_ms, best)
            choice = self._exploration.draw(best, close, share)
            expected = controller.expected_of(blocks, limit_ms, request.drift, choice)
        choice, log_latency, spread = expected
        knobs = controller.configuration(choice)
        made = self.now()
        took_ms = (made - start) * 1e3
        return Decision(
            choice=choice,
            log_latency=log_latency,
            spread=spread,
            request=request,
            configuration=knobs,
            best=best,
            fell_back=not reads,
            features=blocks,
            limit_ms=limit_ms,
            spent_ms=spent_ms,
            took_ms=took_ms,
            made=made,
            limits_note=note,
        )

    def fail(self, request: PendingRequest) -> Decision:
        """Fall back to static for a request whose features could not be computed.

        A controller without a static policy decides as if each feature were missing, and so are
        further costs predicted. Nothing is drawn, and no update learns from the row in the log.
        """
        controller = request.controller

        def choose(features: Arrays, limit_ms: float) -> Expected:
            return controller.static_expected(
                features, limit_ms, request.drift, request.limits, request.mask
            )

        missing = {}
        for name, width in controller.feature_sizes.items():
            missing[name] = np.full(width, np.nan, np.float32)
        request = request._replace(static=None, explored=False)
        decision = self.decide(request, missing, choose=choose)
        return decision._replace(features=None, fell_back=True)

    def _close(
        self, request: PendingRequest, features: Arrays, limit_ms: float, best: int
    ) -> tuple[list[int], float]:
        """Return the configurations that exploration may draw, among those that limits allow, and
        the share of the explored requests in which it draws; `best` is the controller's choice."""
        controller = request.controller
        about = limit_ms, request.drift
        loss = self._exploration.loss
        # what limits forbid may be the best by far, and is no measure of what is close
        blocks = {name: np.asarray(block)[None] for name, block in features.items()}
        within = None if request.mask is None else request.mask[None]
        allowed, _ = controller.allowed(blocks, 1, request.limits, within)
        mask = None if allowed is None else allowed[0]
        close = near_best(controller, features, *about, loss=loss, mask=mask)
        if close == [best] and controller.decides_by_static(features, *about):
            second = second_best(controller, best, *about, loss=loss, mask=mask)
            if second is not None:
                return [second[0]], second[1]
        return close, 1.0

    def finish(
        self,
        decision: Decision,
        answer: object = None,
        ended: float | None = None,
        learns: bool = True,
        cost: float = math.nan,
        costs: Mapping[str, float] | None = None,
    ) -> Result:
        """Learn from the time of an answer since its decision, or from its cost, and log the
        request.

        Args:
            decision: from `decide` or `fail`.
            answer: anything, which the result holds.
            ended: the reading of `now` at which the time that counts ended, such as at the first
                token of an answer that comes in parts; None for now.
            learns: False for an answer with other knobs than were decided.
            cost: of the answer, in the controller's unit if that is none of time; NaN for unknown.
            costs: further ones by name, such as {"usd": 0.002}, as far as they are known; an answer
                above a limit on them counts as late.
        """
        request = decision.request
        if request.controller.unit != MS:
            if learns and not math.isnan(cost):
                self.learn(decision, cost)
            # only the answer costs something
            result = Result(
                decision=decision,
                answer=answer,
                answer_ms=cost,
                total_ms=cost,
                overhead_ms=0.0,
                decision_us=decision.took_ms * 1e3,
                costs=costs,
            )
            return self.record(result)
        answered = self.now() if ended is None else ended
        answer_ms = (answered - decision.made) * 1e3
        if learns:
            self.learn(decision, answer_ms)
        done = self.now() if ended is None else ended
        total_ms = request.waited_ms + (done - request.begun) * 1e3
        overhead_ms = total_ms - request.waited_ms - answer_ms
        beyond_ms = overhead_ms + request.waited_ms - decision.spent_ms - decision.took_ms
        self.charge(decision, decision.took_ms, beyond_ms)
        result = Result(
            decision=decision,
            answer=answer,
            answer_ms=answer_ms,
            total_ms=total_ms,
            overhead_ms=overhead_ms,
            decision_us=decision.took_ms * 1e3,
            waited_ms=request.waited_ms,
            costs=costs,
        )
        return self.record(result)

    def lose(self, decision: Decision, fault: str) -> Result:
        """Log a request whose answer never came, or came to nothing; no time is learned from it.

        Args:
            fault: what happened, in words.
        """
        request = decision.request
        total_ms = math.nan
        if request.controller.unit == MS:
            total_ms = request.waited_ms + (self.now() - request.begun) * 1e3
        result = Result(
            decision=decision,
            answer=None,
            answer_ms=math.nan,
            total_ms=total_ms,
            overhead_ms=math.nan,
            decision_us=decision.took_ms * 1e3,
            fault=fault,
        )
        return self.record(result)

    def give_up(self, decision: Decision) -> Result | None:
        """Log a request whose answer nobody waits for any longer; the row has the times until now,
        which are less than those of the answer. None where budgets are no times.

        Whoever leaves at the deadline would otherwise leave a log of fast answers only, from which
        an update learns that slow settings are always on time."""
        request = decision.request
        if request.controller.unit != MS:
            return None
        now = self.now()
        answer_ms = (now - decision.made) * 1e3
        total_ms = request.waited_ms + (now - request.begun) * 1e3
        result = Result(
            decision=decision,
            answer=None,
            answer_ms=answer_ms,
            total_ms=total_ms,
            overhead_ms=total_ms - request.waited_ms - answer_ms,
            decision_us=decision.took_ms * 1e3,
            waited_ms=request.waited_ms,
            abandoned=True,
        )
        return self.record(result)

    def learn(self, decision: Decision, answer_ms: float) -> None:
        """Update the tracker with an answer's latency in ms. NaN, an invalid one, is counted and
        not learned from."""
        if self._tracks or math.isnan(answer_ms):
            with self._lock:
                self.tracker.update(
                    decision.choice, decision.log_latency, decision.spread, answer_ms
                )

    def charge(self, decision: Decision, took_ms: float, beyond_ms: float) -> None:
        """Charge the next decisions of this kind what this one took, and the calls around it."""
        overhead = self.fallen_back if decision.fell_back else self.decided
        with self._lock:
            overhead.add(took_ms, beyond_ms)

    def record(self, result: Result) -> Result:
        """Log a request, and return it with its id; one that took no possible time is not logged.
        One of unknown cost is.
        Its chances are computed only now, so that no answer waits for them."""
        if result.unlike:
            with self._lock:
                self.unlike += 1
        impossible = math.isnan(result.total_ms) and result.controller.unit == MS
        if self.log is None or impossible:
            return result
        decision = result.decision
        # what stands in for features that failed is not drawn
        chances = {decision.best: 1.0}
        if decision.features is not None and self._exploration.share:
            close, share = self._close(
                decision.request, decision.features, decision.limit_ms, decision.best
            )
            chances = self._exploration.chances(decision.best, close, share)
        return result._replace(request_id=self.log.add(row_of(result, chances)))

    def abandon(
        self, what: str, error: BaseException | str, overdue: Decision | None = None
    ) -> None:
        """Count a request without an answer, because `what` raised an error, or did what a text
        says; nothing can be learned from it, unless its answer was overdue.

        Args:
            overdue: the decision whose answer was still to come, so that it takes longer than until
                now. Where that is more ms than are expected, they are learned as its time: whoever
                leaves at the deadline would otherwise hide that answers have become slower.
        """
        problem = error if isinstance(error, str) else f"raised {type(error).__name__}"
        now = self.now()
        with self._lock:
            if overdue is None or not self._learned(overdue, (now - overdue.made) * 1e3):
                self.tracker.ignore(f"{what} {problem}")

    def _learned(self, decision: Decision, least_ms: float) -> bool:
        """Learn from an answer that takes at least so many ms, if that is more than is expected;
        return whether it was."""
        if not self._tracks or decision.request.controller.unit != MS or least_ms <= 0:
            return False
        # with the drift of now, so that it never speaks for faster answers
        drift = self.tracker.drift
        offset = 0.0 if drift is None else float(drift[0][decision.choice])
        if not math.log(least_ms) > decision.log_latency + offset:
            return False
        self.tracker.update(decision.choice, decision.log_latency, decision.spread, least_ms)
        return True


def controller_of(policy: ServedPolicy) -> NumpyController:
    """Return the controller of a policy. Raises InputError for what is no policy."""
    controller: Any = getattr(policy, "decider", policy)  # it may be exported
    if not hasattr(controller, "header"):
        raise InputError(
            f"runtime: {type(policy).__name__} is no policy; give one from knobwise.load, "
            "knobwise.fit or NumpyController.load"
        )
    return controller


def deadline_controller_of(policy: ServedPolicy) -> NumpyController:
    """Return the controller of a policy that decides under deadlines. Raises InputError for one
    under mean budgets, or whose budgets are no times."""
    controller = controller_of(policy)
    if controller.header["limit"] != "budget_ms":
        raise InputError(
            "runtime: the controller is for a mean over requests (budget=mean), but every "
            "request here has a deadline; train one with budget=quantiles"
        )
    check_time("runtime", controller.unit)
    return controller

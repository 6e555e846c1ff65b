"""A controller in front of any callable: `serve = wrap(call, policy, features=…)`.

    features ─▶ rest of the budget ─▶ decision ─▶ call(request, **knobs) ─▶ tracker, log

Several requests may be in flight, in threads or in coroutines. No lock is held while features are
computed or the callable runs. This file needs no torch.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knobwise.agents.deployed.arrays import LEAST_MS, configurations_of
from knobwise.agents.deployed.controller import Drift, NumpyController
from knobwise.agents.serving.exploration import Exploration
from knobwise.agents.serving.first_stages import Overhead
from knobwise.agents.serving.inputs import blocks_of, limit_of
from knobwise.agents.serving.request_log import RequestLog, Result, row_of
from knobwise.agents.serving.tracker import LatencyTracker
from knobwise.agents.serving.versions import Watched
from knobwise.common.errors import InputError
from knobwise.common.forks import FORKED
from knobwise.envs.tables.units import check_time


class Front:
    """A controller with what goes with it in front of a model: tracker, log, exploration, versions.

    Args:
        policy: from `knobwise.load` or `knobwise.fit`, a controller that a run deploys, or one from
            `NumpyController.load`.
        tracker: True for a new one, or one for this controller to go on with. False: nothing is
            learned from the times of answers.
        explore, explore_loss, seed: see `Exploration`.

    Raises:
        InputError: a policy of another kind, for mean budgets or for a cost that is no time; the
            tracker of another controller.
    """

    _lock: threading.Lock
    log: RequestLog | None = None

    def __init__(
        self,
        policy: Any,
        tracker: bool | LatencyTracker,
        explore: float,
        explore_loss: float,
        seed: int | None,
    ) -> None:
        controller = getattr(policy, "agent", policy)  # of a KnobPolicy
        controller = getattr(controller, "decider", controller)
        if not hasattr(controller, "header"):
            raise InputError(
                f"runtime: {type(policy).__name__} is no policy; give one from knobwise.load, "
                "knobwise.fit or NumpyController.load"
            )
        if controller.header["limit"] != "budget_ms":
            raise InputError(
                "runtime: the controller is for a mean over requests (budget=mean), but every "
                "request here has a deadline; train one with budget=quantiles"
            )
        check_time("runtime", controller.unit)
        self.controller: NumpyController = controller
        self.configurations = configurations_of(controller)
        self.tracker = fresh = LatencyTracker(self.configurations, controller.digest)
        if isinstance(tracker, LatencyTracker):
            self.tracker = tracker
        if (self.tracker.digest, self.tracker.names) != (fresh.digest, fresh.names):
            raise InputError(
                "runtime: the tracker belongs to another controller; start with tracker=True"
            )
        self._tracks = tracker is not False
        # the clock of all times, in s
        self._now: Callable[[], float] = time.perf_counter
        self._exploration = Exploration(explore, explore_loss, seed)
        self._watched: Watched | None = None
        self._decided = Overhead()
        self._fallen_back = Overhead()

    def _open(self, log: RequestLog | str | Path | None) -> None:
        """Begin the log, the last thing to do, so that nothing is written where something else is
        refused. Raises InputError if it cannot be written."""
        self.log = log if isinstance(log, RequestLog | None) else RequestLog(log)

    def watch(self, path: str | Path) -> None:
        """Replace the controller between two requests whenever there is a new file.

        What the tracker learned is kept, since an update learns what it did not follow. A file that
        cannot be used is refused in a line, and nothing changes.

        Args:
            path: an exported `.npz`, or the folder of controller.npz, such as `current` of
                `knobwise update`.

        Raises:
            InputError: there is no such file.
        """
        watched = Watched(Path(path), self.controller)
        with self._lock:
            self._watched = watched
            self._follow()

    def _follow(self) -> None:
        """Replace the controller if there is a new one."""
        if self._watched is not None:
            self._watched.refresh()
            self.controller = self._watched.controller
            self.tracker.digest = self.controller.digest

    def _state(self) -> tuple[NumpyController, Drift, bool, Overhead]:
        """Return the facts that a `Result` begins with beside its budget; the lock must be held."""
        drift = self.tracker.drift
        return self.controller, drift, self._exploration.turn(), self._fallen_back

    def _settle(self, flight: Result) -> None:
        """Draw the configuration of a decided request if it is explored."""
        flight.best = flight.choice
        if flight.explored:
            flight.expected = self._exploration.draw(flight)

    def _note(self, flight: Result) -> None:
        """Log an answered request, see `row_of`. Its chances are computed only now, so that no
        answer waits for them."""
        if self.log is not None:
            flight.request_id = self.log.add(row_of(flight, self._exploration.chances(flight)))


@dataclass(slots=True)
class Timed(Result):
    """A request with its moments, which are readings of the clock."""

    begun: float = 0.0
    before_ms: float = 0.0
    """The time until the decision began."""
    call_began: float = 0.0
    """When the call began."""


class Steps(Front):
    """What a request goes through in front of a callable, step by step; see `wrap`."""

    def __init__(
        self,
        call: Callable[..., Any],
        features: Callable[[Any], Any] | None,
        log: RequestLog | str | Path | None,
        *front: Any,
    ) -> None:
        """Begin; `front` are the arguments of `Front`."""
        super().__init__(*front)
        self._call = call
        # a policy that sees the budget only needs none
        self._features = features or (lambda request: None)
        if features is None and self.controller.feature_sizes:
            raise InputError(
                f"wrap: the policy reads {self.controller.feature_sizes}; give features=FUNCTION, "
                "which computes them from a request"
            )
        _check_knobs(call, self.configurations[0])
        self.after_fork()
        FORKED.add(self)
        self._open(log)

    def after_fork(self) -> None:
        """Begin with a lock that is free."""
        self._lock = threading.Lock()

    def _begin(self, budget_ms: float) -> Timed:
        """Take a request in; decide where the guard falls back, which needs no features."""
        begun = self._now()
        budget_ms = limit_of(budget_ms)
        with self._lock:
            self._follow()
            flight = Timed(budget_ms, *self._state(), begun=begun)
        flight.limit_ms = left_of(budget_ms, flight.overhead)
        flight.expected = flight.controller.fall_back(flight.limit_ms, flight.drift)
        return flight

    def _decide(self, flight: Timed, features: Any) -> dict[str, Any]:
        """Decide with what is left of the budget; return the values of the knobs."""
        controller = flight.controller
        looks = flight.looks
        try:
            if looks:
                flight.features = blocks_of(features, controller.feature_sizes, controller.columns)
            start = self._now()
            flight.before_ms = (start - flight.begun) * 1e3
            if looks:
                flight.overhead = self._decided
                flight.limit_ms = left_of(flight.budget_ms - flight.before_ms, flight.overhead)
                flight.expected = controller.decide_expected(
                    flight.features, flight.limit_ms, flight.drift
                )
        except ValueError as error:
            raise InputError(f"wrap: {error}") from error
        self._settle(flight)
        knobs = flight.configuration
        flight.call_began = self._now()
        flight.decision_us = (flight.call_began - start) * 1e6
        return knobs

    def _fail(self, error: BaseException) -> None:
        """Count a request without an answer, from which nothing can be learned."""
        with self._lock:
            self.tracker.ignore(f"the call raised {type(error).__name__}")

    def _finish(self, flight: Timed, answer: Any) -> Result:
        """Learn from the time of an answer, and log the request."""
        flight.answer_ms = (self._now() - flight.call_began) * 1e3
        _check_answer(answer)
        flight.answer = answer
        decision_ms = flight.decision_us / 1e3
        with self._lock:
            if self._tracks:
                choice, log_latency, spread = flight.expected
                self.tracker.update(choice, log_latency, spread, flight.answer_ms)
            flight.total_ms = (self._now() - flight.begun) * 1e3
            flight.overhead_ms = flight.total_ms - flight.answer_ms
            beyond_ms = flight.overhead_ms - flight.before_ms - decision_ms
            flight.overhead.add(decision_ms, beyond_ms)
        self._note(flight)
        return flight


class Served(Steps):
    """A callable whose knobs are set for each request, see `wrap`."""

    def __call__(self, request: Any, budget_ms: float) -> Any:
        """Answer a request under its budget in ms, and return what the callable returned."""
        return self.result(request, budget_ms).answer

    def result(self, request: Any, budget_ms: float) -> Result:
        """Answer a request, and return the answer with its knobs, its times and its `request_id` in
        the log, by which it can be labelled."""
        flight = self._begin(budget_ms)
        features = self._features(request) if flight.looks else None
        knobs = self._decide(flight, features)
        try:
            answer = self._call(request, **knobs)
        except BaseException as error:
            self._fail(error)
            raise
        return self._finish(flight, answer)


class AsyncServed(Steps):
    """An async callable whose knobs are set for each request, see `wrap`."""

    async def __call__(self, request: Any, budget_ms: float) -> Any:
        """Answer a request under its budget in ms, and return what the callable returned."""
        return (await self.result(request, budget_ms)).answer

    async def result(self, request: Any, budget_ms: float) -> Result:
        """Answer a request, see `Served.result`. Its time is the time that passes until the answer
        is there, also while other requests run."""
        flight = self._begin(budget_ms)
        features = self._features(request) if flight.looks else None
        if inspect.isawaitable(features):
            features = await features
        knobs = self._decide(flight, features)
        try:
            answer = await self._call(request, **knobs)
        except BaseException as error:
            self._fail(error)
            raise
        return self._finish(flight, answer)


def wrap(
    call: Callable[..., Any],
    policy: Any,
    *,
    features: Callable[[Any], Any] | None = None,
    tracker: bool | LatencyTracker = True,
    log: RequestLog | str | Path | None = None,
    explore: float = 0.0,
    explore_loss: float = 0.05,
    seed: int | None = None,
) -> Any:
    """Put a policy in front of a callable, which then gets the best knobs for each request.

    The time of the features and of the decision is taken off the budget. The time of the answer
    teaches a `LatencyTracker` how fast this machine is. Errors of `features` and `call` pass
    through. Threads and coroutines may share what is returned.

    Args:
        call: `call(request, **knobs)` answers a request; a function or a coroutine function.
        policy: from `knobwise.load` or `knobwise.fit`, or from `NumpyController.load`.
        features: computes what the policy reads from a request, as `KnobPolicy.decide` takes it;
            may be a coroutine function if `call` is. None for a policy that sees the budget only.
            Where the guard falls back to static, it is not called.
        tracker: True for a new one, or one for this policy to go on with; False for none.
        log: a folder, or the log in it, that gets a row for each request once it is answered.
        explore: the share of the requests that get a random configuration instead of the best.
        explore_loss: the utility that these are expected to lose at most, in units of accuracy.
        seed: of the draws.

    Returns:
        `serve(request, budget_ms=…)` returns what `call` returned. `serve.result(request,
        budget_ms=…)` returns a `Result`, with the answer, the knobs, the times and the `request_id`
        that `serve.log.label(request_id, accuracy)` takes. Both are coroutine functions if `call`
        is. `serve.watch(path)` follows `knobwise update`; `serve.tracker` is the tracker.

    Raises:
        InputError: a policy of another kind, for mean budgets or for a cost that is no time, as
            what is measured here is time; one that reads features that nothing computes, a `call`
            that does not take its knobs, the tracker of another policy, a log that cannot be
            written.

    >>> policy = knobwise.fit("measured.csv", "features.npz")
    >>> serve = knobwise.wrap(call, policy, features=embed, log="requests")
    >>> answer = serve(request, budget_ms=60)
    """
    awaits = any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))
    if not awaits and inspect.iscoroutinefunction(features):
        raise InputError("wrap: features is a coroutine function, but call is not; make both async")
    kind = AsyncServed if awaits else Served
    return kind(call, features, log, policy, tracker, explore, explore_loss, seed)


def left_of(budget_ms: float, overhead: Overhead) -> float:
    """Return what is left for an answer after a decision that takes as long as the latest ones."""
    return max(LEAST_MS, budget_ms - overhead.decision_ms - overhead.beyond_ms)


def _check_knobs(call: Callable[..., Any], knobs: Mapping[str, Any]) -> None:
    """Refuse a callable that does not take the knobs."""
    try:
        inspect.signature(call).bind(None, **knobs)
    except ValueError:
        # a builtin may not say what it takes
        return
    except TypeError as error:
        words = ", ".join(knobs)
        raise InputError(f"wrap: call must be a function of (request, {words}): {error}") from error


def _check_answer(answer: Any) -> None:
    """Refuse what is no answer yet, so that its time is not known."""
    unfinished = inspect.isgenerator(answer) or inspect.isasyncgen(answer)
    if inspect.iscoroutine(answer):
        answer.close()
    if unfinished or inspect.isawaitable(answer):
        raise InputError(
            f"wrap: call returned {type(answer).__name__}, which is no answer yet; give a function "
            "that returns the whole answer, or an `async def` that awaits it"
        )

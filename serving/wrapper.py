"""A controller in front of any callable: `serve = wrap(call, policy, features=…)`.

    features ─▶ rest of the budget ─▶ decision ─▶ call(request, **knobs) ─▶ tracker, log

Several requests may be in flight, in threads or in coroutines. No lock is held while features are
computed or the callable runs. This file needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.learning.request_log import RequestLog
from knobwise.common.errors import InputError
from knobwise.serving.requests import Decision, Result
from knobwise.serving.runtime import Runtime, deadline_controller_of
from knobwise.serving.tracker import LatencyTracker

if TYPE_CHECKING:
    from knobwise.serving.runtime import ServedPolicy

CANCELLED = ("CancelledError", "Cancelled")
"""The errors by which asyncio and Trio cancel a coroutine."""
UNFINISHED = (Iterator, AsyncIterator, Future)
"""What stands for an answer that is still to come, beside awaitables: generators, the streams of
clients such as openai's, and what a pool of threads returns."""


class Wrapped(Runtime):
    """A callable whose knobs are set for each request, see `wrap`."""

    def __init__(
        self,
        call: Callable[..., Any],
        features: Callable[[Any], Any] | None,
        policy: ServedPolicy,
        **options: Any,
    ) -> None:
        """Begin; `options` are those of `Runtime`."""
        _check_call(call, features, policy)
        self._call = call
        super().__init__(policy, **options)
        # a text is its own feature, and a policy that sees the budget only needs none
        texts = bool(self.controller.texts)
        self._features = features or (lambda request: request if texts else None)

    def __call__(
        self, request: Any, budget_ms: float, limits: Mapping[str, float] | None = None
    ) -> Any:
        """Answer a request under its budget in ms, and perhaps limits on further costs, and return
        what the callable returned."""
        return self.result(request, budget_ms, limits).answer

    def result(
        self, request: Any, budget_ms: float, limits: Mapping[str, float] | None = None
    ) -> Any:
        """Answer a request, and return the answer with its knobs, its times and its `request_id` in
        the log, by which it can be labelled."""
        pending = self.begin(budget_ms, limits)
        features = self._features(request) if pending.needs_features else None
        decision = self.decide(pending, features)
        try:
            answer = self._call(request, **decision.configuration)
        except BaseException as error:
            self._fails(decision, error)
            raise
        _check_answer(answer)
        return self.finish(decision, answer)

    def _fails(self, decision: Decision, error: BaseException) -> None:
        """Count and log a call that raised an error; one that ran out of time, or that was
        cancelled, would have taken longer, and is logged as such."""
        # whoever cancels has imported what the error is of
        if isinstance(error, TimeoutError) or type(error).__name__ in CANCELLED:
            self.abandon("the call", error, decision)
            self.give_up(decision)
        else:
            self.abandon("the call", error)
            # an interrupt says nothing about the setting
            if isinstance(error, Exception):
                self.lose(decision, f"the call raised {type(error).__name__}")


class AsyncWrapped(Wrapped):
    """An async callable whose knobs are set for each request, see `wrap`."""

    async def __call__(
        self, request: Any, budget_ms: float, limits: Mapping[str, float] | None = None
    ) -> Any:
        """Answer a request, see `Wrapped.__call__`."""
        return (await self.result(request, budget_ms, limits)).answer

    async def result(
        self, request: Any, budget_ms: float, limits: Mapping[str, float] | None = None
    ) -> Result:
        """Answer a request, see `Wrapped.result`. Its time is the time that passes until the answer
        is there, also while other requests run."""
        pending = self.begin(budget_ms, limits)
        features = self._features(request) if pending.needs_features else None
        if inspect.isawaitable(features):
            features = await features
        decision = self.decide(pending, features)
        try:
            answer = await self._call(request, **decision.configuration)
        except BaseException as error:
            self._fails(decision, error)
            raise
        _check_answer(answer)
        return self.finish(decision, answer)


def wrap(
    call: Callable[..., Any],
    policy: ServedPolicy,
    *,
    features: Callable[[Any], Any] | None = None,
    tracker: bool | LatencyTracker = True,
    log: RequestLog | str | Path | None = None,
    explore: float = 0.0,
    explore_loss: float = 0.05,
    seed: int | None = None,
) -> Wrapped:
    """Put a policy in front of a callable, which then gets the best knobs for each request.

    The time of the features and of the decision is taken off the budget. The time of the answer
    teaches a `LatencyTracker` how fast this machine is. Errors of `features` and `call` pass
    through; those of `call` are logged, by their names. Threads and coroutines may share what is
    returned.

    Args:
        call: `call(request, **knobs)` answers a request; a function or a coroutine function.
        policy: from `knobwise.load` or `knobwise.fit`, or from `NumpyController.load`.
        features: computes what the policy reads from a request, as `KnobPolicy.decide` takes it;
            may be a coroutine function if `call` is. None for a policy that sees the budget only,
            or one that reads texts alone: a request is then the text, or the texts by name.
            Where the guard falls back to static, it is not called.
        tracker: True for a new one, or one for this policy to go on with; False for none.
        log: a folder, or the log in it, that gets a row for each request once it is answered, or
            `call` has raised an error.
        explore: the share of the requests that get a random configuration instead of the best.
        explore_loss: the utility that these are expected to lose at most, in units of accuracy.
        seed: of the draws.

    Returns:
        `serve(request, budget_ms=…)` returns what `call` returned; with `limits={"usd": 0.002}`
        within these limits on further costs, in place of those of the training.
        `serve.result(request, budget_ms=…)` returns a `Result`, with the answer, the knobs, the
        times and the `request_id` that `serve.log.label(request_id, accuracy)` takes. Both are
        coroutine functions if `call` is. `serve.watch(path)` follows `knobwise update`;
        `serve.tracker` is the tracker.

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
    options = {"tracker": tracker, "log": log, "explore": explore, "explore_loss": explore_loss}
    kind = AsyncWrapped if awaits else Wrapped
    return kind(call, features, policy, seed=seed, **options)


def _check_call(
    call: Callable[..., Any], features: Callable[[Any], Any] | None, policy: ServedPolicy
) -> None:
    """Refuse a callable that does not take the knobs, and a policy whose features nothing
    computes."""
    controller = deadline_controller_of(policy)
    if features is None and controller.feature_sizes.keys() - controller.texts.keys():
        raise InputError(
            f"wrap: the policy reads {controller.feature_sizes}; give features=FUNCTION, "
            "which computes them from a request"
        )
    knobs = configurations_of(controller)[0]
    try:
        inspect.signature(call).bind(None, **knobs)
    except ValueError:
        # a builtin may not say what it takes
        return
    except TypeError as error:
        words = ", ".join(knobs)
        raise InputError(f"wrap: call must be a function of (request, {words}): {error}") from error


def _check_answer(answer: Any) -> None:
    """Refuse what is no answer yet, such as a stream, so that its time is not known."""
    if inspect.iscoroutine(answer):
        answer.close()
    # a whole answer, such as a list, is iterable, but is no iterator itself
    if inspect.isawaitable(answer) or isinstance(answer, UNFINISHED):
        raise InputError(
            f"wrap: call returned {type(answer).__name__}, which is no answer yet; give a function "
            "that returns the whole answer, or an `async def` that awaits it"
        )

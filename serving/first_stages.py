"""The first stages of an `AdaptiveModel`: features and decisions of equal requests are kept, and
the stage of a request to come is prepared in the background."""

from __future__ import annotations

import hashlib
import pickle
import statistics
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

from knobwise.agents.deployed.arrays import Arrays
from knobwise.agents.deployed.controller import Expected
from knobwise.common.errors import InputError
from knobwise.common.forks import FORKED
from knobwise.profiling.measuring.adaptive_model import AdaptiveVLM, FirstStage, Request
from knobwise.serving.requests import PendingRequest
from knobwise.serving.runtime import DECISIONS_KEPT, Runtime

CLOSE = 0.01
"""A decision is reused if the rest of the budget differs by at most this share from the one it was
made under."""


class Prepared(NamedTuple):
    """A request that has gone through the first stage."""

    stage: FirstStage
    content: bytes | None
    """What equal requests have in common; None where nothing is kept."""
    before_ms: float = 0.0
    """The time of the stage if it was prepared in the background, else 0."""
    ahead_ms: float = 0.0
    """The part of it that had passed before anyone waited for it."""


class LRUCache(OrderedDict[Hashable, Any]):
    """A cache of values by key that counts hits and misses; the least recently used leave first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.lock = threading.Lock()
        self._counts = Counter[bool]()
        self._micros = {hit: deque[float]((), DECISIONS_KEPT) for hit in (True, False)}

    def put(self, key: Hashable, value: object, hit: bool, took_ms: float) -> None:
        """Store a value as most recently used, count the hit or miss, and record its time `took_ms`
        (look-up included). Thread-safe."""
        with self.lock:
            self[key] = value
            self.move_to_end(key)
            if len(self) > self.size:
                self.popitem(last=False)
            self._counts[hit] += 1
            self._micros[hit].append(took_ms * 1e3)

    def summary(self) -> dict[str, float]:
        """Return the numbers of hits and misses, and the median times of the latest in µs.

        The times are 0 before the first.
        """
        hit_us, miss_us = (statistics.median(took or [0.0]) for took in self._micros.values())
        counts = {"hits": self._counts[True], "misses": self._counts[False]}
        return {**counts, "hit_us": hit_us, "miss_us": miss_us}


class FirstStages:
    """Takes requests through a model's first stage, with a cache and in the background.

    Attributes:
        cached_features, cached_decisions: what is kept of the latest `cache` requests; `summary`
            says what that brings.
    """

    def __init__(self, model: AdaptiveVLM, runtime: Runtime, cache: int, clock: str) -> None:
        self.model = model
        self.runtime = runtime
        self.clock = clock
        self.cached_features = LRUCache(cache)
        self.cached_decisions = LRUCache(cache)
        self.after_fork()
        FORKED.add(self)

    def after_fork(self) -> None:
        """Begin with nothing under way: free locks, and a thread of this process."""
        self._lock = threading.Lock()
        """Held while the model answers."""
        self._worker = ThreadPoolExecutor(1)  # begins its thread with the first request
        self._pending: dict[int, tuple[Request, Future[Prepared]]] = {}
        for cache in (self.cached_features, self.cached_decisions):
            cache.lock = threading.Lock()

    def _first_stage(self, request: Request, features: bool) -> FirstStage:
        """Run the model's first stage. Raises InputError if it returns anything else."""
        stage = self.model.first_stage(request, features)
        if not isinstance(stage, FirstStage):
            raise InputError(
                f"runtime: first_stage of the model must return a FirstStage, not {stage!r:.80}"
            )
        return stage

    def _take(self, request: Request, features: bool = True) -> Prepared:
        """Run the first stage; the model leaves out features that are kept of an equal request."""
        if not (self.cached_features.size and features):
            return Prepared(self._first_stage(request, features), None)
        start = self.runtime.now()
        content = digest_of_request(request)
        kept = self.cached_features.get(content)
        took_ms = (self.runtime.now() - start) * 1e3
        stage = self._first_stage(request, kept is None)
        # the look-up is charged like the features that it stands for
        stage.extra_ms += took_ms
        stage.total_ms += took_ms
        stage.features = kept or stage.features
        self.cached_features.put(content, stage.features, kept is not None, stage.extra_ms)
        return Prepared(stage, content)

    def _choose(
        self, request: PendingRequest, content: bytes, features: Arrays, limit_ms: float
    ) -> Expected:
        """Decide, or return the decision for an equal request whose budget, controller and drift
        were the same."""
        start = self.runtime.now()
        controller = request.controller
        # everything that the decision follows from
        key = content, request.budget_ms, controller.digest
        before, old_drift, expected = self.cached_decisions.get(key, (0.0, None, None))
        # a tracker replaces its drift with each answer that it learns from
        same = expected is not None and old_drift is request.drift
        hit = same and abs(before - limit_ms) <= CLOSE * before
        if not hit:
            before = limit_ms
            expected = controller.decide_expected(features, limit_ms, request.drift)
        kept = before, request.drift, expected
        took_ms = (self.runtime.now() - start) * 1e3
        self.cached_decisions.put(key, kept, hit, took_ms)
        return expected

    def prefetch(self, request: Request) -> None:
        """Begin the first stage of a request in the background, in one thread.

        `answer` goes on from it when it gets this very object. The stage runs beside the answer in
        progress if the model says so (`first_stage_overlaps = True`), else between answers. An
        error in it is raised by `answer`. `close`, or leaving a `with`, ends the thread.

        Raises:
            InputError: with the CPU clock, which does not count another thread.
        """
        if self.clock == "cpu":
            raise InputError(
                "runtime: prefetch needs clock=wall; clock=cpu does not count other threads"
            )
        self._pending[id(request)] = request, self._worker.submit(self._in_background, request)

    def _in_background(self, request: Request) -> Prepared:
        # most models set knobs in the first stage too, so that it waits for the answer in progress
        with nullcontext() if getattr(self.model, "first_stage_overlaps", False) else self._lock:
            return self._take(request)

    def _prepared(self, request: Request) -> Prepared | None:
        """Return the stage prepared in the background, or None if the background has not begun it.

        If it has begun, wait for it. Errors of the model there are raised here. The lock must be
        free, since the background may need it.
        """
        # a stage that has not begun is cancelled, since the caller is faster
        _, future = self._pending.pop(id(request), (None, None))
        if future is None or future.cancel():
            return None
        start = self.runtime.now()
        prepared = future.result()
        waited_ms = (self.runtime.now() - start) * 1e3
        total_ms = prepared.stage.total_ms
        return prepared._replace(before_ms=total_ms, ahead_ms=max(total_ms - waited_ms, 0.0))

    def close(self) -> None:
        """End the thread of `prefetch`."""
        self._worker.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def digest_of_request(request: Request) -> bytes:
    """Return a SHA-256 digest that is equal for equal images (or arrays) and questions.

    Raises:
        InputError: an image or a question that cannot be pickled, or a tensor on a GPU.
    """
    try:
        parts = []
        for part in (request.image, request.question):
            parts.append(part.numpy() if hasattr(part, "numpy") else part)
        return hashlib.sha256(pickle.dumps(parts)).digest()
    except Exception as error:
        raise InputError(
            f"cache: requests of this kind cannot be compared ({error}); leave cache out"
        ) from error

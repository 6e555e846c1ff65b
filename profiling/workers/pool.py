"""Workers that do jobs: each gets the next one when it has done one, so that a slow worker does
fewer. A worker that dies is replaced, and its jobs are done by others."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from knobwise.common.errors import InputError
from knobwise.common.imports import in_a_line
from knobwise.common.progress import duration, say
from knobwise.profiling.workers.cluster import WorkerOptions, cluster
from knobwise.profiling.workers.machines import number_of
from knobwise.profiling.workers.worker import ModelWorker

J = TypeVar("J")
R = TypeVar("R")
DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises for a call to a worker that is gone."""
MOST_DEATHS = 3
"""So many workers may die of one job, or in a row while they load the model, before it is given
up."""
AHEAD = 2
"""Jobs that a worker has, so that it need not wait for the next one."""
CHECK_S = 1.0
"""Seconds between two looks at what takes long."""
LOADING = "loading the model"
"""What a new worker does."""
LONG_S = 60.0
LONG = 10
"""A job is reported when it has taken so many seconds, and so many times as long as half of the
jobs take."""
LOADING_S = 300.0
"""Seconds after which a worker is reported that is not ready."""


@dataclass(eq=False)
class Work(Generic[J, R]):
    """What workers do."""

    begin: Callable[[Any, Any, int], Callable[[J], R]]
    """Called in each worker with what it loaded, `content`, and its number; returns what does a
    job."""
    content: Any
    """What every worker needs to know."""
    name: Callable[[J], str]
    """The name of a job in messages."""
    notes: Path
    """The file of the notes about workers."""
    private: Callable[[int], Sequence[J]] = lambda number: ()
    """The jobs that the worker with this number does beside the others."""
    keep: Callable[[R], object] = lambda result: None
    """Called with the result of each of these."""


@dataclass(eq=False)
class _Call:
    """A call to a worker that has not come back."""

    replica: _Replica
    does: str
    """What it is about, for messages."""
    job: Any = None
    private: bool = False


@dataclass(eq=False)
class _Replica:
    """A worker, as it is known here."""

    actor: Any
    calls: deque[_Call] = field(default_factory=deque)
    """In the order in which it does them; the first is at work."""
    since: float = field(default_factory=time.monotonic)
    """When that began."""
    reported: bool = False
    """Whether somebody was told that it takes long."""
    note: dict[str, object] = field(default_factory=dict)
    """What times on it depend on; empty before it has loaded its model."""
    number: int = -1
    work: Work[Any, Any] | None = None
    """What it has begun."""
    private: deque[Any] = field(default_factory=deque)
    """What is left of its private jobs."""
    turn: int = 0

    def __str__(self) -> str:
        if self.number < 0:
            return "a new worker"
        return f"worker {self.number} on {self.note['host']}"

    def next(self) -> None:
        """Note that what is first in its calls begins now."""
        self.since = time.monotonic()
        self.reported = False


class WorkerPool:
    """Workers with a replica of a model each. The first that is ready begins, the others join.

    Args:
        load: makes a replica, in the worker.
        options: how many there are.
        share: the options of an actor, see `cluster`.
    """

    def __init__(
        self, load: Callable[[], Any], options: WorkerOptions, share: Mapping[str, object]
    ) -> None:
        self._load = load
        self._options = options
        self._actor = ray.remote(ModelWorker).options(**share)
        self._calls: dict[Any, _Call] = {}
        self._times_s: deque[float] = deque(maxlen=999)
        self._deaths: Counter[str] = Counter()
        self._replicas = [self._new() for _ in range(options.workers)]

    def _new(self) -> _Replica:
        """Start a worker."""
        replica = _Replica(self._actor.remote())
        loading = _Call(replica, LOADING)
        self._call(loading, "load", os.getcwd(), self._options.gpus, self._load)
        return replica

    def _call(self, call: _Call, method: str, *arguments: Any) -> None:
        """Have a worker do something after all that it was given before."""
        if not call.replica.calls:
            call.replica.next()
        call.replica.calls.append(call)
        self._calls[getattr(call.replica.actor, method).remote(*arguments)] = call

    def ask(self, question: Callable[[Any], R]) -> tuple[R, dict[str, object]]:
        """Return what a function makes of a replica, and what is noted of its worker.

        Raises:
            InputError: the model cannot be loaded; see also `question`.
        """
        while True:
            for replica in filter(lambda each: each.note, self._replicas):
                try:
                    return ray.get(replica.actor.ask.remote(question)), replica.note
                except RayTaskError as error:
                    raise _cause(error) from None
                except DEATHS:
                    # the same question to the next one
                    self._replace(replica, "answering")
            self._step()

    def as_they_end(self, work: Work[J, R], jobs: Iterable[J]) -> Iterator[tuple[J, R]]:
        """Yield each job with its result, as they end.

        A job is taken from `jobs` right before a worker gets it. When one fails, no further one
        begins; those at work are yielded, and then the first error is raised.

        Raises:
            InputError: several workers died of a job, or while they loaded the model; the content
                cannot be sent to them; see also `Work.begin`.
        """
        try:
            content = ray.put(work.content)
        except Exception as error:  # pickling raises many kinds
            raise InputError(
                f"workers={self._options.workers}: the questions cannot be sent to other "
                f"processes ({in_a_line(error)}); take workers=1"
            ) from error
        again: deque[J] = deque()
        waiting = iter(jobs)
        failed: Exception | None = None
        while True:
            for replica in self._replicas:
                if failed is None and replica.note:
                    self._fill(replica, work, content, again, waiting)
            busy = any(call.does != LOADING for call in self._calls.values())
            # a worker that has loaded its model and got nothing says that nothing is left
            if not busy and (failed or any(replica.note for replica in self._replicas)):
                break
            ended = self._step()
            if ended is None:
                continue
            call, result, problem = ended
            if isinstance(problem, DEATHS):
                # a worker that takes its place has the same private jobs
                if call.job is not None and not call.private:
                    again.append(call.job)
            elif problem is not None:
                failed = failed or problem
            elif call.private:
                work.keep(result)
            elif call.job is not None:
                yield call.job, result
        if failed is not None:
            raise failed

    def _fill(
        self,
        replica: _Replica,
        work: Work[J, R],
        content: Any,
        again: deque[J],
        waiting: Iterator[J],
    ) -> None:
        """Give a worker what it may have ahead: jobs in turn with its private ones."""
        if replica.work is not work:
            replica.private.clear()
        while len(replica.calls) < AHEAD:
            if any(call.does in self._deaths for call in replica.calls):
                return
            replica.turn += 1
            private = bool(replica.private) and replica.turn % 2 == 0
            job: J | None = None
            if not private:
                job = again.popleft() if again else next(waiting, None)
                private = job is None and bool(replica.private)
            if private:
                job = replica.private.popleft()
            if job is None:
                return
            new = replica.work is not work
            # what a worker may have died of is done alone, so that no other job is blamed
            if work.name(job) in self._deaths and (new or replica.calls):
                (replica.private if private else again).appendleft(job)
                if new:
                    self._begin(replica, work, content)
                return
            if new:
                self._begin(replica, work, content)
            self._call(_Call(replica, work.name(job), job, private), "do", job)

    def _begin(self, replica: _Replica, work: Work[J, R], content: Any) -> None:
        """Have a worker prepare for jobs; it has a number from then on."""
        if replica.number < 0:
            taken = {each.number for each in self._replicas}
            replica.number = number_of(work.notes, replica.note, taken)
        replica.work = work
        replica.private.extend(work.private(replica.number))
        warming_up = _Call(replica, "warming up")
        self._call(warming_up, "begin", work.begin, content, replica.number)

    def _step(self) -> tuple[_Call, Any, Exception | None] | None:
        """Wait a moment for a call to come back; return it with its result or its error.

        Raises:
            InputError: the model cannot be loaded.
        """
        ready, _ = ray.wait(list(self._calls), timeout=CHECK_S)
        self._report()
        if not ready:
            return None
        call = self._calls.pop(ready[0])
        replica = call.replica
        replica.calls.remove(call)
        result = None
        try:
            result = ray.get(ready[0])
        except RayTaskError as error:
            if call.does == LOADING:
                raise _cause(error) from None
            return call, None, _cause(error)
        except DEATHS as error:
            return call, None, self._lost(call, error)
        self._deaths.pop(call.does, None)
        if call.does == LOADING:
            replica.note = result
        elif call.job is not None:
            self._times_s.append(time.monotonic() - replica.since)
        replica.next()
        return call, result, None

    def _lost(self, call: _Call, error: Exception) -> Exception:
        """Replace a worker that died; return the error of a call that it had.

        Raises:
            InputError: several died in a row while they loaded the model.
        """
        if call.replica in self._replicas:
            self._replace(call.replica, call.does)
        # the answer to an earlier call may be lost too, so any that it had may be to blame
        self._deaths[call.does] += 1
        if self._deaths[call.does] < MOST_DEATHS:
            return error
        given_up = InputError(
            f"{call.does}: {MOST_DEATHS} workers died of it ({in_a_line(error)}), perhaps for lack "
            "of memory. What was measured is on disk: repeat the command to continue, if need be "
            "with fewer workers, or without some values or samples"
        )
        if call.does == LOADING:
            raise given_up
        return given_up

    def _replace(self, replica: _Replica, does: str) -> None:
        """Put a new worker in the place of one that died."""
        say(f"{replica} died ({does}); another one takes its place")
        # it may only be out of reach
        ray.kill(replica.actor)
        self._replicas[self._replicas.index(replica)] = self._new()

    def close(self) -> None:
        """End all workers."""
        for replica in self._replicas:
            ray.kill(replica.actor)

    def _report(self) -> None:
        """Tell which workers take long, each once."""
        now = time.monotonic()
        usual_s = statistics.median(self._times_s or [0.0])
        for replica in self._replicas:
            if not replica.calls or replica.reported:
                continue
            call = replica.calls[0]
            spent_s = now - replica.since
            limit_s = LOADING_S if call.job is None else max(LONG_S, LONG * usual_s)
            if spent_s > limit_s:
                replica.reported = True
                usual = f"; half of the jobs take less than {usual_s:.3g} s" if usual_s else ""
                say(f"{replica} has been at it for {duration(spent_s)}: {call.does}{usual}")


def _cause(error: RayTaskError) -> Exception:
    """Return what was raised in a worker; what nobody expects comes with its traceback there."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ValueError | OSError) else error


@contextmanager
def worker_pool(load: Callable[[], Any], options: WorkerOptions) -> Iterator[WorkerPool]:
    """Start workers, which end with the block; see `WorkerPool` and `cluster`."""
    with cluster(options) as share:
        pool = WorkerPool(load, options, share)
        try:
            yield pool
        finally:
            pool.close()

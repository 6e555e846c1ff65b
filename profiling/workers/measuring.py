"""Measure a model with knobs by workers, into the log that one process writes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import AdaptiveVLM, clocked_by
from knobwise.profiling.measuring.local_runner import LocalRunner
from knobwise.profiling.measuring.machine import read_note
from knobwise.profiling.measuring.measuring import (
    COLLECT_EVERY,
    WORKER,
    Job,
    MeasurementPlan,
    Taken,
    open_log,
    read_measurements,
)
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.workers.machines import NOTES, SHARED, shared_cells
from knobwise.profiling.workers.pool import Work, WorkerPool

DESCRIBED = ("name", "knobs", "identity", "measured", "repeats", "columns", "dataset")
"""What is asked of a model beside its answers."""
Loaded = tuple[AdaptiveVLM, Sequence[VQAItem]]


def describe_model(loaded: Loaded) -> tuple[SimpleNamespace, Sequence[VQAItem]]:
    """Return what tells a model from others, in the place of the model, and its questions.

    Raises InputError for a model that answers several requests at once, or that counts money.
    """
    model, items = loaded
    if getattr(model, "concurrency", 1) > 1 or hasattr(model, "affords"):
        raise InputError(f"workers: model={model.name} answers several requests at once itself")
    known = {name: getattr(model, name) for name in DESCRIBED if hasattr(model, name)}
    if hasattr(model, "answer_all"):
        # only whether it has one counts here
        known["answer_all"] = True
    return SimpleNamespace(**known), items


def machine_of(out: Path, note: dict[str, object]) -> dict[str, object]:
    """Return the machine that the profile in a folder claims: that of its first worker, which
    `note` is about if it has none."""
    path = out / "state" / NOTES
    if path.exists():
        note = read_note(path, list)[0]
    return {name: value for name, value in note.items() if name not in ("host", "gpus")}


class PoolRunner:
    """A `Runner` whose jobs are done by workers; each measures shared cells, too.

    Args:
        pool: the workers, which have loaded the model and its questions.
        model: what is known of it, see `described`.
        plan: the measurements to take.
        state: the state folder.
    """

    progress = ""

    def __init__(self, pool: WorkerPool, model: object, plan: MeasurementPlan, state: Path) -> None:
        self._pool = pool
        self._plan = plan
        self._state = state
        self.together = hasattr(model, "answer_all")
        self._work: Work[Job, Taken] | None = None

    def affords(self, job: Job) -> bool:
        return True

    def saving_for(self, job: Job) -> AbstractContextManager[None]:
        return nullcontext()

    def blocks(self, columns: Sequence[int]) -> list[list[int]]:
        return [[*columns]]

    def warm_up(self, columns: Sequence[int]) -> None:
        """Have each worker warm up before its first job."""
        self._work = Work(
            begin=_begin,
            content=(self._plan, [*columns]),
            name=self._name,
            notes=self._state / NOTES,
            private=self._shared,
        )

    def as_they_end(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Taken]]:
        """Have workers do jobs, and keep the shared cells apart."""
        assert self._work is not None, "warmed up before"
        with open_log(self._state / SHARED) as file:
            self._work.keep = lambda taken: file.write(b"".join(taken.lines))
            yield from self._pool.as_they_end(self._work, jobs)

    def _name(self, job: Job) -> str:
        _, i, columns = job
        settings = [self._plan.configurations[j] for j in columns[:1]]
        return f"sample {self._plan.items[i].id!r} with {settings}"

    def _shared(self, number: int) -> list[Job]:
        """Return the shared cells that a worker has not measured yet."""
        plan = self._plan
        cells = shared_cells(len(plan.items), len(plan.configurations))
        measured = read_measurements(self._state / SHARED)
        if WORKER not in measured.columns:
            return cells
        names = ["content", *plan.knobs]
        known = {*measured.filter(measured[WORKER] == number).select(names).iter_rows()}
        left = []
        for job in cells:
            _, i, (j,) = job
            if (plan.contents[i], *plan.configurations[j].values()) not in known:
                left.append(job)
        return left


def _begin(
    loaded: Loaded, content: tuple[MeasurementPlan, list[int]], number: int
) -> Callable[[Job], Taken]:
    """Warm up, in a worker; return what measures a job."""
    plan, columns = content
    run = LocalRunner(loaded[0], plan, number)
    with clocked_by(plan.config.clock):
        run.warm_up(columns)
    # as in `collected_between`, to the end of the process, which does nothing but measure
    gc.freeze()
    gc.disable()
    count = 0

    def take(job: Job) -> Taken:
        nonlocal count
        with clocked_by(plan.config.clock):
            taken = run(job)
        count += len(taken.lines)
        if count % COLLECT_EVERY < len(taken.lines):
            gc.collect()
        return taken

    return take

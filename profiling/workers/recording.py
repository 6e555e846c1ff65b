"""Record demonstrations by workers, into the chunks that one process writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.profiling.demonstrations.profile import Find
from knobwise.profiling.demonstrations.scorers import Fields
from knobwise.profiling.demonstrations.tasks import BeamTask
from knobwise.profiling.workers.machines import NOTES
from knobwise.profiling.workers.pool import Work, WorkerPool


def without_scorer(task: BeamTask) -> BeamTask:
    """Return a task without its model. Raises InputError for one behind an endpoint."""
    if hasattr(task.scorer, "keep"):
        raise InputError(
            "workers: with an endpoint take workers=1, and concurrency=… for more requests at once"
        )
    nothing: Any = None
    return task._replace(scorer=nothing)


def find_by(
    pool: WorkerPool, state: Path, find: Find, chunks: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Fields]]:
    """Find the sequences of chunks of queries, as `profile_beams` has it done.

    Args:
        pool: the workers, which have loaded the task.
        state: the state folder.
    """
    work: Work[Tensor, Fields] = Work(
        begin=_begin,
        content=find,
        name=lambda rows: f"queries {int(rows[0])} to {int(rows[-1])}",
        notes=state / NOTES,
    )
    return pool.as_they_end(work, chunks)


def _begin(task: BeamTask, find: Find, number: int) -> Callable[[Tensor], Fields]:
    return partial(find, task)

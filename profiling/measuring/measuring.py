"""Measure a model sample by sample and configuration by configuration.

A kill loses no measurement that was taken: each is a line appended to a file before the next one
begins, or before the next sample begins where a model answers all configurations of one together.
It names the sample, its content (see `knobwise.profiling.measuring.feature_store`) and the
configuration, so a later call may want more or less: what is on disk is never measured again, and a
sample whose image or question changed is.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.common.files import lock_handle
from knobwise.common.progress import progress
from knobwise.envs.readers.column_roles import MEASURES
from knobwise.envs.readers.frames import KEYS
from knobwise.profiling.design.cell_design import CellDesign
from knobwise.profiling.measuring.adaptive_model import (
    Configuration,
    clocked_by,
)
from knobwise.profiling.measuring.feature_store import FeatureStore
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import Questions
from knobwise.profiling.measuring.settings import REPEATS, VLMProfileConfig

J = TypeVar("J")
R = TypeVar("R")
Bools = NDArray[np.bool_]
SEED = 0
"""Seed of the samples, the configurations and the order of measuring."""
LOG = "measured.jsonl"
"""The file of the measurements."""
TIMES = ("total_ms", "prefill_ms", "vision_ms")
STAGE_TIMES = ("features_ms", "first_look_ms")
"""Times of the first stage that are not part of an answer's."""
TOKENS = ("vision_tokens", "language_tokens", "output_tokens")
EXTRA = "extra."
"""Prefix of the columns that a model adds to its answers."""
WORKER = "measured_by"
"""The column of the log with the number of the worker, where there were several."""
CELL = ("sample", "configuration")
"""The columns that number a cell."""
INDEX = pl.UInt32
"""Their type."""
_SCHEMA = {
    "sample_id": pl.String,
    "content": pl.String,
    "repeat": pl.Int64,
    "text": pl.String,
    **dict.fromkeys((*TIMES, *STAGE_TIMES), pl.Float64),
    **dict.fromkeys(TOKENS, pl.Int64),
}
COLUMNS = {
    *KEYS,
    *MEASURES,
    *_SCHEMA,
    *CELL,
    "sampling_probability",
    "sampling_weight",
    "changed",
    WORKER,
    "latency_ms",
    "decode_ms",
    *(f"num_{name}" for name in (*TOKENS, "total_tokens")),
}
"""Columns of the log and of the tables made from it; neither a knob nor a number that a model adds
may have such a name."""
_BLOCK = 1 << 16  # jobs that exist at a time
COLLECT_EVERY = 64
"""Measurements between two garbage collections."""


@dataclass(frozen=True)
class MeasurementPlan:
    """The measurements that make a profile, and how to take them (see `VLMProfileConfig`)."""

    items: tuple[VQAItem, ...]
    requests: Questions  # of the items
    contents: tuple[str, ...]  # each item's content key
    configurations: tuple[Configuration, ...]  # each has a value for every knob
    config: VLMProfileConfig
    design: CellDesign  # the cells to measure, and how likely each was drawn
    parts: tuple[str, ...] = ()  # each item's part, train, validation or test; empty: not fixed

    @property
    def repeats(self) -> int:
        """How often each cell is measured."""
        return self.config.repeats or REPEATS

    @property
    def knobs(self) -> tuple[str, ...]:
        """The names of the knobs."""
        return tuple(self.configurations[0])

    @property
    def settings(self) -> pl.DataFrame:
        """The configurations as a table, with a column for each knob."""
        return pl.DataFrame(list(self.configurations))

    def select(self, log: pl.DataFrame) -> pl.DataFrame:
        """Return the measurements of a log that belong to the plan, each once.

        Two columns are added: `sample` and `configuration`, by number in the plan.
        """
        samples = pl.DataFrame(
            {"sample_id": [item.id for item in self.items], "content": list(self.contents)},
            schema_overrides=_SCHEMA,
        )
        settings = self.settings
        rows, columns = self.design.cells.nonzero()
        cells = pl.DataFrame({"sample": rows, "configuration": columns}, dict.fromkeys(CELL, INDEX))
        absent = [pl.lit(None).alias(knob) for knob in self.knobs if knob not in log.columns]
        return (
            log.with_columns(absent)
            .filter(pl.col("repeat") < self.repeats)
            .join(samples.with_row_index("sample"), on=samples.columns)
            .with_columns(
                pl.col(knob).cast(kind, strict=False) for knob, kind in settings.schema.items()
            )
            .join(settings.with_row_index("configuration"), on=self.knobs)
            .join(cells, on=CELL)
            .unique([*CELL, "repeat"], keep="first", maintain_order=True)
        )

    def done(self, log: pl.DataFrame) -> Bools:
        """Mark the measurements that a log contains or that nobody wants: bool [R, N, C], by
        repeat, sample and configuration."""
        # one row of indices for each measurement
        cells = self.select(log).select("repeat", "sample", "configuration").to_numpy()
        done = np.repeat(~self.design.cells[None], self.repeats, axis=0)
        done[tuple(cells.astype(np.int64).T)] = True
        return done


def read_measurements(path: str | Path) -> pl.DataFrame:
    """Read what has been measured so far, one row for each measurement.

    Raises InputError for a file that is not such a log.
    """
    log = pl.DataFrame(schema=_SCHEMA)
    if not (content := Path(path).read_bytes()):
        return log
    try:
        frame = pl.read_ndjson(content, infer_schema_length=None, schema_overrides=_SCHEMA)
        frame = frame.with_columns(pl.selectors.starts_with(EXTRA).cast(pl.Float64))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise InputError(f"{path}: is damaged ({error}); move it away to measure again") from error
    return pl.concat([log, frame], how="diagonal_relaxed")


@contextmanager
def open_log(path: str | Path) -> Iterator[BinaryIO]:
    """Open a log at the end of its last whole line; what a kill left half written is cut off.

    Raises InputError if another process has it open.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        # the lock goes with the process, even with a killed one
        if not lock_handle(file.fileno(), blocking=False):
            raise InputError(
                f"{path}: another process is measuring into it; choose another out folder"
            )
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        yield file


Job = tuple[int, int, list[int]]
"""Measurements to take: repeat, sample and configurations; features alone without any."""


class Taken(NamedTuple):
    """What a job gave."""

    features: Mapping[str, NDArray[np.float32]]
    """Of the sample, [d] by name."""
    lines: list[bytes]
    """A line of the log for each configuration."""


class Runner(Protocol):
    """Takes the measurements of a plan with a model: here, or elsewhere in several processes."""

    together: bool
    """Whether all configurations of a sample are one job."""

    @property
    def progress(self) -> str:
        """A text beside the progress."""
        ...

    def affords(self, job: Job) -> bool:
        """Tell whether a job may begin; False ends the measuring."""
        ...

    def saving_for(self, job: Job) -> AbstractContextManager[None]:
        """Return a context in which nothing is spent that this job may need."""
        ...

    def blocks(self, columns: Sequence[int]) -> list[list[int]]:
        """Divide the configurations `columns` into those that are measured one after the other,
        each after a warm-up; most models have a single block."""
        ...

    def warm_up(self, columns: Sequence[int]) -> None:
        """Answer untimed with each of the configurations `columns`, `knobs.warm_up` times."""
        ...

    def as_they_end(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Taken]]:
        """Do jobs, each taken from `jobs` right before it begins; see `as_they_end`."""
        ...


def measure(
    run: Runner,
    plan: MeasurementPlan,
    log: BinaryIO,
    done: Bools,
    store: FeatureStore,
    out_of_time: Callable[[], bool] = lambda: False,
) -> bool:
    """Measure what is not `done`, and keep the features of each sample.

    It is one request at a time, or as many as the model has `concurrency`. The first stage runs
    anew for each measurement, since its time is part of what is measured, or once for all
    configurations of a sample where the model has `answer_all`. Samples without a measurement to
    take get their features at the end.

    Args:
        run: measures the model.
        plan: the measurements to take.
        log: an open file that gets a line for each measurement.
        done: bool [R, N, C], what was measured before.
        store: the features that are known. Under `force` all are computed again.
        out_of_time: asked before each request; True ends the measuring, and features follow. So
            does a request that the model does not afford (`affords`).

    Returns:
        Whether all was measured.

    Raises:
        InputError: the model failed, or gave an impossible answer; the message names sample and
            configuration.
    """
    # cells that are not of the design count as done, but not in what is shown
    left_out = len(done) * int((~plan.design.cells).sum())
    count = int(done.sum()) - left_out
    total = done.size - left_out
    keys = enumerate(plan.contents)
    lacking = {i for i, key in keys if plan.config.force or key not in store}

    def keep(i: int, taken: Taken) -> None:
        if i in lacking:
            store.add(plan.contents[i], taken.features, plan.items[i].id)
            lacking.discard(i)

    with clocked_by(plan.config.clock):
        # what is not measured in the end, because all is spent, needs no warm-up
        with _saving_for_next(run, done):
            blocks = run.blocks(np.flatnonzero(~done.all((0, 1))).tolist())
        for block in blocks:
            known = done.copy()
            known[..., np.setdiff1d(np.arange(done.shape[-1]), block)] = True
            wanted = count + int((~known).sum())
            with _saving_for_next(run, known):
                run.warm_up(block)
            # asked right before each
            jobs = itertools.takewhile(
                lambda job: not out_of_time() and run.affords(job), missing(known, run.together)
            )
            with progress("measuring", total, count) as tick, collected_between() as collect:
                for (_, i, columns), taken in run.as_they_end(jobs):
                    keep(i, taken)
                    log.write(b"".join(taken.lines))
                    count += len(columns)
                    tick(count, run.progress)
                    if count % COLLECT_EVERY < len(columns):
                        collect()
            if count < wanted:
                break
        rest = sorted(lacking)
        with progress("features", len(rest), quiet_s=5) as tick:
            without: Iterator[Job] = ((0, i, []) for i in rest)
            for number, ((_, i, _), taken) in enumerate(run.as_they_end(without), 1):
                keep(i, taken)
                tick(number)
    return count == total


def _saving_for_next(run: Runner, done: Bools) -> AbstractContextManager[None]:
    """Return a context in which nothing is spent that the next missing measurement may need."""
    job = next(missing(done, run.together), None)
    return nullcontext() if job is None else run.saving_for(job)


def missing(done: Bools, together: bool) -> Iterator[Job]:
    """Yield repeat, sample and configurations of the missing measurements, in measuring order:
    one configuration at a time, or all of a sample `together`.

    The order is random over samples and configurations, so that drift of the machine falls on all
    alike. A change of the knobs costs the models here next to nothing, and it is not in their
    times; where it does, configurations are measured in blocks (`Runner.blocks`).
    """
    repeats, samples, configurations = done.shape
    for repeat in range(repeats):
        drawn = np.random.default_rng((SEED, repeat)).permutation(samples * configurations)
        left = drawn[~done[repeat].reshape(-1)[drawn]]
        if not together:
            # as numbers a few at a time: there may be tens of millions
            for places in np.array_split(left, math.ceil(len(left) / _BLOCK) or 1):
                for i, j in np.stack(np.divmod(places, configurations), 1).tolist():
                    yield repeat, i, [j]
            continue
        # in the order of the first missing configuration
        groups: dict[int, list[int]] = {}
        for i, j in np.stack(np.divmod(left, configurations), 1).tolist():
            groups.setdefault(i, []).append(j)
        for i, columns in groups.items():
            yield repeat, i, columns


def as_they_end(
    work: Callable[[J], R], jobs: Iterable[J], at_once: int = 1
) -> Iterator[tuple[J, R]]:
    """Yield each job with its result, as they end.

    A job is taken from `jobs` right before it begins. When one fails, no further one begins; those
    at work are yielded, and then the first error is raised. One at a time runs in this thread.

    Args:
        at_once: how many jobs run at the same time, at most.
    """
    if at_once == 1:
        for job in jobs:
            yield job, work(job)
        return
    pool = ThreadPoolExecutor(at_once)
    # job by what it will give
    running: dict[Future[R], J] = {}
    failed: BaseException | None = None
    waiting = iter(jobs)
    try:
        while True:
            # fill up
            while failed is None and len(running) < at_once:
                try:
                    job = next(waiting)
                except StopIteration:
                    break
                running[pool.submit(work, job)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if error := future.exception():
                    failed = failed or error
                else:
                    yield job, future.result()
        if failed is not None:
            raise failed
    finally:
        # after Ctrl-C nobody waits for what is at work
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def collected_between() -> Iterator[Callable[[], object]]:
    """Stop the garbage collector, which would interrupt random measurements.

    Yield a function that collects between two measurements.
    """
    # what exists now is skipped by later collections, which are then short
    collecting = gc.isenabled()
    gc.freeze()  # collections skip what exists now
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()

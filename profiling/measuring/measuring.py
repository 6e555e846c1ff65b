"""Measure a model whose knobs are set, sample by sample and configuration by configuration; a kill costs nothing.

Each measurement is a line that is appended to a file before the next one begins. It names the sample, its content (see
`knobwise.profiling.measuring.feature_store`) and the configuration, so what is asked for may grow or shrink between
two calls: what is on disk is never measured again, and a sample whose image or question changed is.

Order. Repeat by repeat, all pairs of sample and configuration in random order: the machine's drift then falls on all
alike and looks like an effect of none. A change of the knobs costs the models here next to nothing, and it is not in
their times. For a model where the first answer after a change is slow (compiled graphs, say) `block` samples are asked
in a row, after one that is not timed; blocks come in random order, so drift is still spread, but more coarsely.
"""

from __future__ import annotations

import fcntl
import gc
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import polars as pl
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.profiling.measuring.adaptive_model import KNOBS, AdaptiveVLM, Answer, FirstStage, Request
from knobwise.profiling.measuring.feature_store import FeatureStore
from knobwise.profiling.measuring.questions import VQAItem

TIMES = ("total_ms", "prefill_ms", "vision_ms")
TOKENS = ("vision_tokens", "language_tokens", "output_tokens")
EXTRA = "extra."
"""Columns of what a model adds to its answers begin with this."""
COLUMNS = {
    *("sample", "sample_id", "question_id", "image_id", "dataset", *KNOBS, "answers", "pred", "accuracy", "changed"),
    *("latency_ms", "decode_ms", *TIMES, "num_total_tokens", *(f"num_{name}" for name in TOKENS), "configuration"),
}
"""Of the table that is made of the measurements."""
_SCHEMA = {
    "sample_id": pl.String,
    "content": pl.String,
    **dict.fromkeys(KNOBS, pl.Int64),
    "repeat": pl.Int64,
    "text": pl.String,
    **dict.fromkeys(TIMES, pl.Float64),
    **dict.fromkeys(TOKENS, pl.Int64),
}
_COLLECT_EVERY = 64


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    items: tuple[VQAItem, ...]
    """The samples."""
    questions: tuple[str, ...]
    """How each is asked."""
    contents: tuple[str, ...]
    """The content key of each."""
    configurations: tuple[Mapping[str, int], ...]
    """All knobs of each."""
    repeats: int
    """Measurements of each pair."""

    @property
    def total(self) -> int:
        """Number of measurements."""
        return self.repeats * len(self.items) * len(self.configurations)

    def of(self, log: pl.DataFrame) -> pl.DataFrame:
        """The measurements in a log that are asked for, each once, with their `sample` and `configuration` numbers."""
        samples = pl.DataFrame(
            {"sample_id": [item.id for item in self.items], "content": list(self.contents)}, schema_overrides=_SCHEMA
        )
        columns = {knob: [configuration[knob] for configuration in self.configurations] for knob in KNOBS}
        configurations = pl.DataFrame(columns, schema_overrides=_SCHEMA)
        return (
            log.filter(pl.col("repeat") < self.repeats)
            .join(samples.with_row_index("sample"), on=samples.columns)
            .join(configurations.with_row_index("configuration"), on=KNOBS)
            .unique(["sample", "configuration", "repeat"], keep="first", maintain_order=True)
        )

    def done(self, log: pl.DataFrame) -> NDArray[np.bool_]:
        """[R, N, C] whether a log holds the measurement."""
        found = self.of(log).select("repeat", "sample", "configuration").to_numpy()
        done = np.zeros((self.repeats, len(self.items), len(self.configurations)), bool)
        done[tuple(found.astype(np.int64).T)] = True
        return done


# -- the log -----------------------------------------------------------------------------------------------------------


def read_logs(folder: str | Path) -> pl.DataFrame:
    """What all processes have measured so far, one row for each measurement.

    Raises:
        InputError: a log that is none.
    """
    frames = [pl.DataFrame(schema=_SCHEMA)]
    for path in sorted(Path(folder).glob("measured-*.jsonl")):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # another process may be at its next line
        if whole:
            try:
                frame = pl.read_ndjson(io.BytesIO(whole), infer_schema_length=None, schema_overrides=_SCHEMA)
            except pl.exceptions.PolarsError as error:
                raise InputError(f"{path}: is damaged ({error}); move it away to measure its part again") from error
            frames.append(frame.with_columns(pl.selectors.starts_with(EXTRA).cast(pl.Float64)))
    return pl.concat(frames, how="diagonal")


@contextmanager
def appended(path: str | Path) -> Iterator[BinaryIO]:
    """A log, opened at the end of its last whole line; what a kill left half written is cut off.

    Raises:
        InputError: another process has it open.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{path}: another process is measuring into it; give each its own shard=…, or another out folder"
            ) from None
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        yield file


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(
    model: AdaptiveVLM,
    plan: Plan,
    log: BinaryIO,
    done: NDArray[np.bool_],
    *,
    store: FeatureStore | None = None,
    untaken: set[str] | None = None,
    seed: int = 0,
    warm_up: int = 1,
    block: int = 1,
) -> None:
    """Measure what is not `done`, one request at a time.

    The first stage is run anew for each measurement, since its time is part of what is measured; where an answer
    cannot go on from it (`kept` is None), once for each sample.

    Args:
        model: what is measured.
        plan: the samples and configurations.
        log: gets a line for each measurement.
        done: [R, N, C] what was measured before.
        store: gets the features of samples in `untaken`.
        untaken: content keys of samples whose features are wanted; those taken are removed.
        seed: of the order.
        warm_up: untimed answers with each configuration before anything is timed.
        block: samples in a row under one configuration.

    Raises:
        InputError: the model failed, or gave an answer that cannot be; it names sample and configuration.
    """
    if done.all():
        return
    run = _Asking(model, plan)
    # what was measured in an earlier session says nothing about how warm this one is
    needed = np.flatnonzero(~done.all((0, 1)))
    with progress("warming up", warm_up * len(needed), quiet_s=5) as tick:
        for i in range(warm_up):
            for number, j in enumerate(needed, i * len(needed) + 1):
                run(i % len(plan.items), int(j))
                tick(number, "")
    untaken = set() if untaken is None or store is None else untaken
    count = int(done.sum())
    try:
        with progress("measuring", plan.total, count) as tick, _collected_between() as collect:
            for repeat in range(plan.repeats):
                before = -1
                for i, j in measuring_order(len(plan.items), len(plan.configurations), block, (seed, repeat)).tolist():
                    if done[repeat, i, j]:
                        continue
                    if block > 1 and j != before:
                        run(i, j)
                    before = j
                    stage, answer = run(i, j)
                    log.write(_line(plan, repeat, i, j, answer))
                    if plan.contents[i] in untaken and store is not None:
                        store.add(plan.contents[i], stage.features, plan.items[i].id)
                        untaken.discard(plan.contents[i])
                    count += 1
                    tick(count, "")
                    if count % _COLLECT_EVERY == 0:
                        collect()
    finally:
        if store is not None:
            store.flush()


def measuring_order(samples: int, configurations: int, block: int, seed: int | tuple[int, ...]) -> NDArray[np.int64]:
    """[N·C, 2] every pair of sample and configuration once, in random order over both.

    With a block, each configuration's samples come in blocks of this size, and the blocks of all in random order.
    """
    rng = np.random.default_rng(seed)
    sample = rng.permuted(np.tile(np.arange(samples), (configurations, 1)), axis=1)
    blocks = math.ceil(samples / block)
    rank = rng.permutation(configurations * blocks).reshape(configurations, blocks)
    place = np.arange(samples)
    order = np.lexsort((np.tile(place, configurations), rank[:, place // block].ravel()))
    return np.stack([sample.ravel()[order], order // samples], 1)


class _Asking:
    """Asks one question under one configuration."""

    def __init__(self, model: AdaptiveVLM, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self._stages: dict[int, FirstStage] = {}  # that nothing goes on from: without their images they are small

    def __call__(self, i: int, j: int) -> tuple[FirstStage, Answer]:
        item, configuration = self.plan.items[i], self.plan.configurations[j]
        request = Request(item.picture(), self.plan.questions[i])
        try:
            if i in self._stages:
                stage = replace(self._stages[i], request=request)
            else:
                stage = self.model.first_stage(request)
                if stage.kept is None:
                    self._stages[i] = replace(stage, request=Request(None, None))
            (answer,) = self.model.answer([stage], configuration)
            check_answer(answer)
        except Exception as error:  # whatever a model may raise, out of memory included
            setting = " ".join(f"{knob}={value}" for knob, value in configuration.items())
            words = " ".join(str(error).split())[:300]
            raise InputError(
                f"sample {item.id!r} with {setting}: the model failed ({type(error).__name__}: {words}). What was "
                "measured is on disk: the same command goes on from there, also with values or samples left out"
            ) from error
        return stage, answer


def check_answer(answer: Answer) -> None:
    """Refuse an answer that cannot be written down.

    Raises:
        ValueError: times that are negative, not finite, or not vision ≤ prefill ≤ total; an extra of a taken name.
    """
    times = [0.0, answer.vision_ms, answer.prefill_ms, answer.total_ms]
    if not all(map(math.isfinite, times)) or times != sorted(times):
        raise ValueError(f"its times are vision {times[1]}, prefill {times[2]}, total {times[3]} ms")
    if taken := answer.extra.keys() & COLUMNS:
        raise ValueError(f"its extra {min(taken)!r} is the name of a column; call it otherwise")


def _line(plan: Plan, repeat: int, i: int, j: int, answer: Answer) -> bytes:
    values = {
        "sample_id": plan.items[i].id,
        "content": plan.contents[i],
        **plan.configurations[j],
        "repeat": repeat,
        "text": answer.text.encode("utf-8", "replace").decode(),
        **{name: float(getattr(answer, name)) for name in TIMES},
        **{name: int(getattr(answer, name)) for name in TOKENS},
        **{EXTRA + name: float(value) for name, value in answer.extra.items() if math.isfinite(value)},
    }
    return json.dumps(values).encode() + b"\n"


@contextmanager
def _collected_between() -> Iterator[Callable[[], object]]:
    """Keep the garbage collector from stopping the clock at random cells: give what collects, to be called between."""
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there now is not looked at again
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()

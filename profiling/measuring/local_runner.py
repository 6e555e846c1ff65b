"""Measure a model in this process: ask it, check its answers, and make the lines of the log."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import orjson

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.profiling.measuring.adaptive_model import (
    CLOCKS,
    AdaptiveVLM,
    Answer,
    FirstStage,
    clock_ms,
)
from knobwise.profiling.measuring.measuring import (
    COLUMNS,
    EXTRA,
    TIMES,
    TOKENS,
    WORKER,
    Job,
    MeasurementPlan,
    Taken,
    as_they_end,
)

# with clock=cpu a model's time may be this much more than the thread's CPU time: a factor, and ms
_SLACK = 1.02, 0.2


TRIED = 8
"""So many requests are given to a model that divides configurations into blocks."""


class LocalRunner:
    """A `Runner` in this process.

    Args:
        model: the model to measure.
        plan: the measurements to take.
        number: of this process among several, which each line then names.
    """

    def __init__(
        self, model: AdaptiveVLM, plan: MeasurementPlan, number: int | None = None
    ) -> None:
        self.model = model
        self.plan = plan
        self.answer_all = getattr(model, "answer_all", None)
        self.together = self.answer_all is not None
        self.concurrency = getattr(model, "concurrency", 1)
        self._noted = {} if number is None else {WORKER: number}

    @property
    def progress(self) -> str:
        return getattr(self.model, "progress", "")

    def affords(self, job: Job) -> bool:
        """Ask the model whether a job may begin."""
        if not hasattr(self.model, "affords"):
            return True
        _, i, columns = job
        request = self.plan.requests.request(self.plan.items[i].id)
        return all(self.model.affords(request, self.plan.configurations[j]) for j in columns)

    def saving_for(self, job: Job) -> AbstractContextManager[None]:
        """Have the model afford nothing that takes what this job may need."""
        if not hasattr(self.model, "saving_for"):
            return nullcontext()
        _, i, columns = job
        request = self.plan.requests.request(self.plan.items[i].id)
        configurations = [self.plan.configurations[j] for j in columns]
        context: AbstractContextManager[None] = self.model.saving_for(request, configurations)
        return context

    def blocks(self, columns: Sequence[int]) -> list[list[int]]:
        """Ask the model which configurations are measured one after the other, if it has a say."""
        config = self.plan.config
        if not (config.warm_up and len(columns) > 1 and hasattr(self.model, "blocks")):
            return [[*columns]]
        items = self.plan.items[:TRIED]
        requests = [self.plan.requests.request(item.id) for item in items]
        blocks = self.model.blocks(requests, [self.plan.configurations[j] for j in columns])
        return [[columns[place] for place in block] for block in blocks]

    def warm_up(self, columns: Sequence[int]) -> None:
        """Answer untimed; the warm-up of an earlier session does not count for this one."""
        samples = len(self.plan.items)
        total = self.plan.config.warm_up * len(columns)
        with progress("warming up", total, quiet_s=5) as tick:
            jobs: list[Job] = []
            for step in range(total):
                # another sample in each round
                turn, place = divmod(step, len(columns))
                jobs.append((0, turn % samples, [columns[place]]))
            affordable = itertools.takewhile(self.affords, jobs)
            for step, _ in enumerate(self.as_they_end(affordable), 1):
                tick(step)

    def as_they_end(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Taken]]:
        """Do jobs, as many at once as the model has `concurrency`."""
        return as_they_end(self, jobs, self.concurrency)

    def __call__(self, job: Job) -> Taken:
        """Run the first stage of a sample, and answer it under the configurations of the job."""
        repeat, i, columns = job
        item = self.plan.items[i]
        configurations = [self.plan.configurations[j] for j in columns]
        request = self.plan.requests.request(item.id)
        try:
            start_ns = CLOCKS["cpu"]()
            stage = self.model.first_stage(request)
            if self.answer_all is None:
                answers = [self.model.answer([stage], each)[0] for each in configurations]
            else:
                answers = self.answer_all(stage, configurations)
            # the thread's own count, whatever the model says
            cpu_ms = (CLOCKS["cpu"]() - start_ns) / 1e6
            for answer in answers:
                _check_answer(answer, self.plan, cpu_ms)
        except Exception as error:  # whatever a model may raise, out of memory included
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"sample {item.id!r} with {configurations[:1]}: the model failed "
                f"({type(error).__name__}: {reason}). What was measured is on disk: repeat the "
                "command to continue, if need be without some values or samples"
            ) from error
        lines = []
        for j, answer in zip(columns, answers, strict=True):
            lines.append(self._line(repeat, i, j, stage, answer))
        return Taken(stage.features, lines)

    def _line(self, repeat: int, i: int, j: int, stage: FirstStage, answer: Answer) -> bytes:
        """Return one measurement as a line of the log."""
        configuration = self.plan.configurations[j]
        values = {
            "sample_id": self.plan.items[i].id,
            "content": self.plan.contents[i],
            **configuration,
            "repeat": repeat,
            "text": answer.text.encode("utf-8", "replace").decode(),
        }
        times = {name: getattr(answer, name) for name in TIMES}
        times |= {"features_ms": stage.extra_ms, "first_look_ms": stage.unused_ms(configuration)}
        # clocks tick in ns, so no time needs more than six decimals
        values |= {name: round(float(ms), 6) for name, ms in times.items()}
        values |= {name: int(getattr(answer, name)) for name in TOKENS}
        finite = {name: x for name, x in answer.extra.items() if math.isfinite(x)}
        values |= {EXTRA + name: float(value) for name, value in finite.items()}
        values |= self._noted
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def _check_answer(answer: Answer, plan: MeasurementPlan, cpu_ms: float) -> None:
    """Raise ValueError for an answer with impossible times, or an extra with a reserved name.

    Times must be finite, with 0 ≤ vision ≤ prefill ≤ total; with clock=cpu they are no more than
    the thread spent on the CPU.
    """
    if not 0 <= answer.vision_ms <= answer.prefill_ms <= answer.total_ms < math.inf:
        raise ValueError(
            f"its times are vision {answer.vision_ms}, prefill {answer.prefill_ms}, total "
            f"{answer.total_ms} ms"
        )
    if columns := COLUMNS.union(plan.knobs).intersection(answer.extra):
        raise ValueError(f"its extra {min(columns)!r} is the name of a column; rename it")
    factor, allowance_ms = _SLACK
    if plan.config.clock == "cpu" and answer.total_ms > cpu_ms * factor + allowance_ms:
        raise ValueError(
            f"its time is {answer.total_ms:.3f} ms, but its thread took {cpu_ms:.3f} ms of CPU "
            f"time; with clock=cpu a model must take its times from {clock_ms.__module__}.clock_ms"
        )

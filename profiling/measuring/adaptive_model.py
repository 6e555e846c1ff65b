"""The interface of a model with knobs.

Implement `AdaptiveVLM` for a model of your own, and you can profile it
(`knobwise.profiling.measuring.profiler`) and serve it (`knobwise.serving.adaptive_model`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.common.words import spelled

KNOBS = ("max_crops", "top_k", "num_active_blocks")
"""The knobs of the elastic model, of Hugging Face models and of exp5/exp6 files. Other models name
theirs freely."""

Configuration = Mapping[str, Any]
"""A value for each knob, by name: a number, or the name of a mode. A knob that is left out keeps
its default."""

CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
"""`wall`: the time that passes. `cpu`: the CPU time of this thread, for a machine that others use
too."""
_clock: ContextVar[Callable[[], int]] = ContextVar("clock", default=time.perf_counter_ns)


def clock_ms(on_cpu: bool = True) -> float:
    """Return the time in ms by the clock in use, which is the wall clock outside of `clocked_by`.

    Models take all their times from it. Raises InputError if it counts CPU time and the work is not
    `on_cpu`.
    """
    # a thread waits for a GPU without spending CPU time
    if not on_cpu and _clock.get() is CLOCKS["cpu"]:
        raise InputError(
            "clock=cpu: the model runs on a GPU, whose work is no CPU time; take clock=wall"
        )
    return _clock.get()() / 1e6


class clocked_by:
    """A context in which `clock_ms` reads another clock, in this thread. Raises InputError for an
    unknown one."""

    def __init__(self, clock: str) -> None:
        if clock not in CLOCKS:
            raise InputError(f"clock={clock}: must be {' or '.join(CLOCKS)}")
        self._read = CLOCKS[clock]

    def __enter__(self) -> None:
        self._token = _clock.set(self._read)

    def __exit__(self, *exception: object) -> None:
        _clock.reset(self._token)


@dataclass(frozen=True)
class KnobSupport:
    """A knob on a certain model: its values and its default."""

    name: str
    default: Any
    """Its value in the unchanged model, which a restored model has again. 0 for a knob that the
    model lacks."""
    least: float = 0
    most: float = 0
    """The range of whole numbers that can be set; both equal `default` where the model lacks the
    knob."""
    sets: str = ""
    """What it sets, such as "image tiles", "pixels of the image, in units of …", "experts for each
    token"."""
    note: str = ""
    """What a user must know: why the model lacks it, or that it saves no time on this model."""
    values: tuple[Any, ...] = ()
    """The only values that can be set, where that is no range: names such as "fast", or certain
    numbers; names from the cheapest to the most expensive."""

    @property
    def available(self) -> bool:
        """True if the knob has more than one value on this model."""
        return len(self.values) > 1 or self.least < self.most

    def accepts(self, value: Any) -> bool:
        """Return True if the knob can be set to this value."""
        if not self.available:
            # a lacking knob can be set to what it is anyway
            return bool(value == self.default)
        if self.values:
            return value in self.values
        return isinstance(value, int | np.integer) and bool(self.least <= value <= self.most)


@dataclass(frozen=True)
class Request:
    """One request: a question, and an image for vision models."""

    image: Any
    """A PIL image, None for a language model, or whatever else a model of your own takes."""
    question: Any
    """A text, or whatever else a model of your own takes."""


@dataclass(slots=True)
class FirstStage:
    """State of a request after the first stage: its features, and what `answer` continues from.
    Times as in `Answer`."""

    request: Request
    features: dict[str, NDArray[np.float32]]
    """What a decision may see, by name, [d] each, such as `image_features`, `language_features`.
    Empty if they were not wanted."""
    kept: Any
    """What `answer` continues from, so that nothing is computed twice."""
    total_ms: float
    """Time of this stage."""
    extra_ms: float
    """The part of it that the model would not have spent without a decision to make: pooling,
    copies, and whatever it computed that no configuration can continue from. It does not include
    what is reused."""
    reused_by: Callable[[Configuration], bool] | None = None
    """Whether an answer under a configuration continues from this stage; None: under every
    configuration."""
    texts: dict[str, str] = field(default_factory=dict)
    """What a decision may read beside the features, by the name of the column in the profile."""

    def unused_ms(self, configuration: Configuration) -> float:
        """Return the first-stage ms, without `extra_ms`, that this configuration cannot reuse; 0 if
        its answer continues from the stage."""
        if self.reused_by is None or self.reused_by(configuration):
            return 0.0
        return self.total_ms - self.extra_ms


@dataclass(slots=True)
class Answer:
    """An answer and what it cost. Times are differences of `clock_ms` in ms; a device finishes its
    work before the clock is read.

    They are end to end, as if run without a pause: the reused first-stage time counts, `extra_ms`
    does not.
    """

    text: str
    total_ms: float
    """From the image to the last token."""
    prefill_ms: float
    """From the image to the first token; total_ms − prefill_ms is the decoding."""
    vision_ms: float
    """The part of prefill_ms that the image's encoder took, preprocessing included."""
    vision_tokens: int
    """Tokens of the image that the language model read."""
    language_tokens: int
    output_tokens: int
    extra: dict[str, float] = field(default_factory=dict)
    """Other numbers worth keeping, such as thread CPU time. `failed`: 1 for an answer that counts
    as wrong whatever its text, such as a refusal."""
    uncounted_ms: float = 0.0
    """What `answer` took for it beside total_ms, and no budget pays for: waits for a rate limit,
    attempts that came to nothing."""


class AdaptiveVLM(Protocol):
    """A model with knobs, with or without images. A request goes through `first_stage`, which gives
    the features that a decision needs; once the configuration is chosen, `answer` continues from
    there.

    A model may have more, which `knobwise profile` uses:

    - `answer_all(stage, configurations)`, the answers to one request under several configurations,
      for a model that can compute once what they share. Each has its own time, as if it had gone
      straight through.
    - `questions`, a sequence of `VQAItem`, for a model that brings its own; `dataset`, their name.
    - `measured`, the values of knobs that are measured by default, by name.
    - `identity`, what else tells it from others, as JSON can hold it: a profile goes on only with
      an equal one.
    - `columns`, further columns of the table: `prompt`, the question as it is asked, and names in
      `Answer.extra`.
    - `repeats`, how often it is measured by default.
    - `concurrency`, how many requests it answers at once, each in a thread of its own.
    - `blocks(requests, configurations)`, asked before anything is measured with some of the
      requests: the places of the configurations in blocks, lists of which each is measured after
      the one before, where a change takes long that belongs to no answer.
    - `remarks(plan, log)`, lines for people on what was measured, a `MeasurementPlan` and its log.
    - `affords(request, configuration)`, asked before each request; False ends the measuring, and
      `limit` is the setting that did. `saving_for(request, configurations)`, a context of the
      requests that come before a measurement, such as a warm-up: they leave enough for this one.
    - `continues(state, log)` is told the folder for what later calls need, and what was measured
      before.
    - `progress`, a text beside the progress, such as what was spent; `close`, called at the end.
    """

    @property
    def name(self) -> str:
        """The model's name in files and reports."""
        ...

    @property
    def knobs(self) -> tuple[KnobSupport, ...]:
        """The knobs, under any names; a model with one of `KNOBS` names all three, also those that
        it lacks."""
        ...

    def set_knobs(self, configuration: Configuration) -> AbstractContextManager[None]:
        """Run the model with this configuration inside the context and restore it exactly at the
        end, whatever happens. Not for two threads at once. Raises InputError for a value that
        cannot be set."""
        ...

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Run the part that comes before a decision, which is independent of every knob.

        `features` is False where the decision needs none, because it is always the same at this
        budget: leave out what only they need, and a first look that not every configuration
        continues from.
        """
        ...

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer a group of requests under one configuration, in their order. Sets the knobs
        itself."""
        ...


def check_configuration(
    knobs: Sequence[KnobSupport], configuration: Configuration
) -> dict[str, Any]:
    """Return the configuration with defaults filled in.

    Raises InputError for an unknown knob, a value that it does not take, or any value but the
    default for a knob that the model lacks.
    """
    known = {knob.name: knob for knob in knobs}
    for name, value in configuration.items():
        if name not in known:
            raise InputError(f"unknown knob {name!r}; known are {', '.join(known)}")
        knob = known[name]
        if knob.accepts(value):
            continue
        if not knob.available:
            raise InputError(
                f"{name}={value}: this model lacks the knob ({knob.note}); leave it at "
                f"{knob.default}"
            )
        # the values, or the range of whole numbers
        takes = ", ".join(map(str, map(spelled, knob.values))) or f"{knob.least} to {knob.most}"
        as_text = ""
        if any(value == spelled(each) for each in knob.values):
            as_text = (
                f"; this {value} is text: write it without quotes, and train a controller of an "
                "earlier version again"
            )
        raise InputError(f"{name}={value}: this model takes {takes} ({knob.sets}){as_text}")
    return {name: configuration.get(name, knob.default) for name, knob in known.items()}


class KeepsConfiguration:
    """Knobs that are set by keeping their values in `configuration`, which answers read."""

    knobs: tuple[KnobSupport, ...]
    configuration: dict[str, Any]
    """A value for every knob."""

    @contextmanager
    def set_knobs(self, configuration: Configuration) -> Iterator[None]:
        """Set the knobs inside the context, as `AdaptiveVLM` demands."""
        before = self.configuration
        self.configuration = check_configuration(self.knobs, configuration)
        try:
            yield
        finally:
            self.configuration = before

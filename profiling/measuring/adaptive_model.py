"""What knobwise asks of a model that it sets the knobs of: one interface to measure it, and to decide in front of it.

An image and a question go through `first_stage`, which is the model's own beginning and gives the features that a
decision needs; then, the configuration being known, through `answer`, which goes on from it. Whoever implements
`AdaptiveVLM` for another model gets the profiler (`knobwise.profiling.measuring.profiler`) and the runtime
(`knobwise.agents.serving.adaptive_model`) with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError

KNOBS = ("max_crops", "top_k", "num_active_blocks")
"""In the order of exp5/exp6 files."""

Configuration = Mapping[str, int]
"""A value for each knob, by name. What a model lacks may be left out or be given at `KnobSupport.default`."""


@dataclass(frozen=True)
class KnobSupport:
    """What one knob is on one model."""

    name: str
    """One of `KNOBS`."""
    default: int
    """Its value in the model as it came: what a restored model runs with. 0 for a knob that the model lacks."""
    least: int = 0
    most: int = 0
    """The values that can be set; the same as `default` where the model lacks the knob."""
    sets: str = ""
    """What it sets there, such as "image tiles", "pixels of the image, in units of …", "experts for each token"."""
    note: str = ""
    """What a user must know: why the model lacks it, or that it saves no time on this model."""

    @property
    def available(self) -> bool:
        """Whether there is anything to set."""
        return self.least < self.most


@dataclass(frozen=True)
class Request:
    """What a model is asked."""

    image: Any
    """A PIL image; a model of one's own may take something else."""
    question: Any
    """A text; likewise."""


@dataclass(slots=True)
class FirstStage:
    """A request that has gone through the model's first stage."""

    request: Request
    features: dict[str, NDArray[np.float32]]
    """What a decision may see, [d] each: `image_features`, `language_features`."""
    kept: Any
    """What `answer` goes on from, so that nothing is computed twice."""
    total_ms: float
    """Wall time of this stage."""
    extra_ms: float
    """The part of it that the model would not have spent without a decision to make: pooling, copies, and whatever it
    computed that no configuration can go on from. What is reused is not in it."""


@dataclass(slots=True)
class Answer:
    """An answer and what it cost. Wall times in ms, on a device that had finished its work before each clock was read.

    Times are those of the whole way, as if the request had gone straight through with this configuration: the first
    stage's share without its `extra_ms` is in them.
    """

    text: str
    total_ms: float
    """From the image to the last token."""
    prefill_ms: float
    """From the image to the first token; total_ms − prefill_ms is the decoding."""
    vision_ms: float
    """The part of prefill_ms that the image's encoder took, preprocessing included."""
    vision_tokens: int
    """That the language model read."""
    language_tokens: int
    output_tokens: int
    extra: dict[str, float] = field(default_factory=dict)
    """Other numbers worth keeping, such as thread CPU time."""


class AdaptiveVLM(Protocol):
    """A vision-language model whose knobs can be set."""

    @property
    def name(self) -> str:
        """How it is called in files and reports."""
        ...

    @property
    def knobs(self) -> tuple[KnobSupport, ...]:
        """The three of `KNOBS`, in this order, also those that it lacks."""
        ...

    def set_knobs(self, configuration: Configuration) -> AbstractContextManager[None]:
        """Run the model with this configuration inside the context, and restore it exactly at its end, whatever
        happens. Not for two threads at once.

        Raises:
            InputError: a value that cannot be set.
        """
        ...

    def first_stage(self, request: Request) -> FirstStage:
        """The part that comes before a decision; independent of every knob."""
        ...

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer a group of requests under one configuration, in their order. Sets the knobs itself."""
        ...


def check_configuration(knobs: Sequence[KnobSupport], configuration: Configuration) -> dict[str, int]:
    """The configuration with defaults filled in, refused unless the model can run it.

    Raises:
        InputError: an unknown knob, a value out of range, a knob that the model lacks set to anything but its default.
    """
    known = {knob.name: knob for knob in knobs}
    if unknown := [name for name in configuration if name not in known]:
        raise InputError(f"unknown knob {unknown[0]!r}; known are {', '.join(known)}")
    for name, value in configuration.items():
        knob = known[name]
        if not knob.available and value != knob.default:
            raise InputError(f"{name}={value}: this model lacks the knob ({knob.note}); leave it at {knob.default}")
        if knob.available and not knob.least <= value <= knob.most:
            raise InputError(f"{name}={value}: this model takes {knob.least} to {knob.most} ({knob.sets})")
    return {name: int(configuration.get(name, knob.default)) for name, knob in known.items()}

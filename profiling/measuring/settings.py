"""The settings of a profile of any model, each with its meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from knobwise.common.checks import at_least, one_of
from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import CLOCKS, KNOBS
from knobwise.profiling.measuring.answer_metrics import METRICS

REPEATS = 3
"""How often a model is measured, unless it says otherwise."""
BUILT_IN = {
    "elastic": "knobwise.testbeds.elastic.adapter:ElasticAdaptive",
    "ocr": "knobwise.testbeds.ocr.adapter:RapidOCRModel",
    "shots": "knobwise.testbeds.smollm.demonstrated_model:SmollmShots",
}
"""Models with knobs that bring their questions along, and their classes."""


@dataclass
class VLMProfileConfig:
    """What `profile_vlm` measures of a model."""

    name: str = ""
    """Name of the data set, such as text_vqa; empty for the name of the file."""
    samples: int | None = None
    """How many samples to draw and measure; a larger number later includes these. None for all."""
    metric: str = "auto"
    """vqa, exact, choice, anls, relaxed. auto: choice for a sample with choices, else vqa for one
    with three answers or more, else exact. Or module:function, your own: accuracy in [0, 1] of an
    answer and the tuple of right ones; one that needs a third argument gets the `VQAItem`."""
    prompt: str = "{question}{choices}"
    """The prompt. {choices} stands for the options of the question with their letters, a line each,
    or for nothing if there are none. Leave {choices} out if the questions already contain them."""
    max_crops: tuple[int, ...] = ()
    """Values of this knob to measure; empty for the model's default alone."""
    top_k: tuple[int, ...] = ()
    """Values to measure: experts for each token."""
    num_active_blocks: tuple[int, ...] = ()
    """Values to measure: decoder blocks that run."""
    values: Any = None
    """Values to measure of knobs with other names, such as {side: [4, 8], mode: [fast, exact]}.
    A knob that is not named here has the values that its model lists, and without a list its
    default alone."""
    count: int = 0
    """How many configurations of a large grid are measured, as a Latin hypercube; 0 for all."""
    per_sample: int = 0
    """How many of the configurations are measured for each sample to train on, at random and each
    equally often; 0 for all. A fifth of the samples, to test on, are measured with all of them, and
    the table says which."""
    whole_test: bool = True
    """Where part of the cells is measured: whether the samples to test on are measured with all
    configurations. false: as few as the others."""
    max_hours: float | None = None
    """So many hours after its start the call stops measuring; the same command goes on. It writes
    the profile of what it has if each configuration was measured on some samples, or with
    per_sample all that was drawn. null or 0: no limit."""
    repeats: int | None = None
    """Repeats of each (sample, configuration). The table keeps all, each with its own answer;
    summary numbers use the mean accuracy and the median time. null: 3, or 1 behind an endpoint,
    where each is paid for."""
    clock: str = "wall"
    """The clock: wall, the time that passes, or cpu, the CPU time of the measuring thread, for a
    machine that others use too and a model that runs on one thread."""
    warm_up: int = 1
    """Untimed answers with each configuration before anything is timed."""
    max_new_tokens: int = 32
    """Length at which an answer is cut off."""
    force: bool = False
    """Compute the features again, also where image, question and model are the same."""

    def __post_init__(self) -> None:
        # numbers and names
        for name, least in {"warm_up": 0, "max_new_tokens": 1}.items():
            at_least(f"knobs.{name}", getattr(self, name), least)
        if self.repeats is not None:
            at_least("knobs.repeats", self.repeats, 1)
        if self.samples is not None:
            at_least("knobs.samples", self.samples, 1)
        at_least("knobs.per_sample", self.per_sample, 0)
        if not self.whole_test and self.per_sample < 2:
            raise InputError(
                f"knobs.whole_test=false: needs knobs.per_sample of at least 2, not "
                f"{self.per_sample}; of one configuration a sample nothing can be replayed"
            )
        if not (self.max_hours is None or 0 <= self.max_hours < math.inf):
            raise InputError(f"knobs.max_hours={self.max_hours}: must be null or at least 0")
        if ":" not in self.metric:
            one_of("knobs.metric", self.metric, ("auto", *METRICS))
        one_of("knobs.clock", self.clock, CLOCKS)
        if "{question}" not in self.prompt:
            raise InputError(f"knobs.prompt={self.prompt!r} must contain {{question}}")
        # knobs: those of the elastic model by their names, any others in `values`
        for knob in KNOBS:
            setattr(self, knob, tuple(int(value) for value in getattr(self, knob)))
        if not isinstance(self.values or {}, dict):
            raise InputError(f"knobs.values={self.values}: must be like {{side: [4, 8]}}")
        for name, values in (self.values or {}).items():
            if not isinstance(values, list | tuple):
                raise InputError(f"knobs.values.{name}={values}: must be a list of values")
            if getattr(self, name, ()) and name in KNOBS:
                raise InputError(
                    f"knobs.values.{name}: knobs.{name} is set too; give the values once"
                )

    def chosen_values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values to measure of each knob that has some here."""
        chosen = {knob: getattr(self, knob) for knob in KNOBS} | (self.values or {})
        return {name: one_type(values) for name, values in chosen.items() if values}


def one_type(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values of a knob as a column of a table holds them, which has one type: whole
    numbers among others, such as 1 in [1, 0.5], become floats too. True is no number."""
    kinds = {*map(type, values)}
    if float in kinds and bool not in kinds:
        return tuple(map(float, values))
    return tuple(values)

"""The settings of `profile`, which measures a model, and `inspect`, which looks at what was
measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from knobwise.profiling.demonstrations.settings import (
    BeamProfileConfig,
    LearnerTaskConfig,
    PoolConfig,
    VLMTaskConfig,
)
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.profiling.measuring.settings import VLMProfileConfig


@dataclass
class ProfileRun(EndpointOptions):
    """knobwise profile: measure a model at every configuration, or record which demonstrations help
    it."""

    model: str = "elastic"
    """elastic, the built-in elastic model; ocr, RapidOCR, with the extra ocr;
    shots, SmolLM2, whose knobs are the demonstrations before a question; a Hugging Face model by
    its name or folder, or smollm2, with `data`; openai, models behind an OpenAI-compatible
    `endpoint`, with `data` and the extra endpoint; or module:Class, a class of your
    own, which may bring its questions along (docs/real_models.md). To record demonstrations:
    learner, the built-in in-context learner, smollm2, or with vlm.data a Hugging Face model, openai
    or module:Class, a scorer of your own (docs/demonstrations.md)."""
    data: str | None = None
    """The questions that a model is measured on, a table such as JSON lines: id, image, question,
    answers, optionally image_id and choices."""
    out: str = "profiles/${model}"
    """Folder for the files. Repeat the command to resume an interrupted run."""
    checkpoint: str | None = None
    """A trained selector, whose draws are recorded as one more round in `out`."""
    complete: str | None = None
    """A run that was trained on the profile in `out`, of which part of the cells was measured: what
    its controller and static choose on validation and test samples is measured too, and the guard
    is calibrated again by these measurements. Settings of `knobs` are those of the profile."""
    workers: int = 1
    """Processes that measure or record at the same time, each with a replica of the model. More
    than one needs the extra ray."""
    gpus: int = 0
    """GPUs that each of several workers has to itself."""
    ray_address: str | None = None
    """The Ray cluster with these workers: auto, or HOST:PORT. None starts Ray on this machine."""
    knobs: VLMProfileConfig = field(default_factory=VLMProfileConfig)
    """With a model that has knobs: which knob values are measured, and how."""
    importance: str | None = None
    """With `data`: a file with the importance of each block, {"4": 0.0156, …}; the least important
    block is left out first. None leaves out blocks starting from the end."""
    dtype: str = "auto"
    """With `data`: type of the weights: auto, bfloat16, float16 or float32."""
    device: str | None = None
    """With `data`: cpu or cuda; None for the GPU where there is one."""
    learner: LearnerTaskConfig = field(default_factory=LearnerTaskConfig)
    """With model=learner: the built-in task."""
    vlm: VLMTaskConfig = field(default_factory=VLMTaskConfig)
    """With a Hugging Face model that scores demonstrations: its questions, and how it runs."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Which candidates a query's demonstrations are chosen from."""
    beams: BeamProfileConfig = field(default_factory=BeamProfileConfig)
    """Which sequences of demonstrations are recorded."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""


@dataclass
class InspectRun:
    """knobwise inspect: what a profile holds, what is wrong with it, how much there is to gain; or
    what a log holds."""

    profile: Any = MISSING
    """The profile: measured or simulated outcomes."""
    log: str | None = None
    """Instead of a profile: the folder of `AdaptiveModel(log=…)`."""
    budgets_ms: list[float] | None = None
    """With a profile: budgets to estimate the gain at, in ms, or in the unit of costs that are no
    times, such as the deadlines of your requests; None for five quantiles of the table's latencies,
    as in `train`."""
    learning_curve: bool = False
    """With a profile: estimate what a policy would gain if fewer cells had been measured. It takes
    minutes."""
    json: str | None = None
    """Write the summary to this file, as JSON."""
    html: str | None = None
    """With a profile: write an HTML report with charts to this file."""

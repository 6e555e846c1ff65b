"""The settings of the verbs that open a trained controller or selector."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from knobwise.common.checks import a_seed, at_least, one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.settings import TRAINING_REWARD, RewardConfig
from knobwise.experiments.settings.options import SplitConfig
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.profiling.measuring.settings import VLMProfileConfig


@dataclass
class LiveConfig:
    """A simulated stream of requests, each of which arrives when the one before it has been
    answered."""

    requests: int = 1000
    """Number of requests: test samples in random order, then again in another order if there are
    too few."""
    fresh: bool = False
    """Serve samples that are not in the profile instead. They cannot be replayed."""
    skip: int = 0
    """With `fresh`: how many such samples to skip first, so that different calls serve different
    samples."""
    clock: str = "wall"
    """wall; or cpu, which counts the CPU time of the thread, for a machine that others use at the
    same time."""
    seed: int = 0
    """Seed of budgets and orders."""
    slowdown: float = 1.0
    """From the middle of the stream on answers take so many times as long, by waiting: what does a
    machine that becomes slower do to the share on time? At least 1."""

    def __post_init__(self) -> None:
        for name, least in {"requests": 1, "skip": 0}.items():
            at_least(f"stream.{name}", getattr(self, name), least)
        a_seed("stream.seed", self.seed)
        at_least("stream.slowdown", self.slowdown, 1)
        one_of("stream.clock", self.clock, ("wall", "cpu"))
        if self.skip and not self.fresh:
            raise InputError(f"stream.skip={self.skip}: is for stream.fresh=true")


@dataclass
class EvaluateRun(EndpointOptions):
    """knobwise evaluate: evaluate a trained controller again, on the test samples of its profile or
    on another profile; or a trained selector, on held-out queries of its beams or on other
    beams."""

    checkpoint: str = "runs/latest"
    """The controller or selector: a checkpoint file, or a run folder (its deployed policy)."""
    beams: Any = MISSING
    """The beams to judge a selector on."""
    encoder: Any = MISSING
    """What embeds their queries and candidates, as in the training of the selector."""
    judged_shots: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    """Numbers of demonstrations in a sequence, for a selector."""
    profile: Any = MISSING
    """The profile to evaluate on; that of the run unless you give another one."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Shares of the samples, for a profile that the controller was not trained on; baselines fit on
    `train`."""
    budgets_ms: list[float] | None = None
    """Budgets to judge at, in ms; None for those of the run, or on another profile for five
    quantiles of its latencies, none below what three quarters of the samples can meet. A controller
    for mean budgets is judged at those that its prices were calibrated for."""
    reward: RewardConfig = field(default_factory=lambda: replace(TRAINING_REWARD))
    """Reward to report in the column `reward`; the policy is unchanged."""
    unprofiled: str = "predict"
    """A cell that was not measured: predict, its outcome is predicted and it may be chosen; forbid,
    it may not be chosen for its sample."""
    baselines: bool = True
    """Evaluate all baselines; give `baselines=false` again for a run that was trained with it."""
    own_cost: bool = True
    """Charge the controller for the time of its decisions and features, which no other policy pays.
    This time is measured, so figures differ slightly from call to call; false compares decisions
    alone, exactly."""
    live: bool = False
    """Run the profiled model behind the controller, instead of replaying the profile."""
    model: str = "elastic"
    """With `live`: the model, as in `knobwise profile`."""
    data: str | None = None
    """With `live`: its questions."""
    knobs: VLMProfileConfig = field(default_factory=VLMProfileConfig)
    """With `live` and `data`: metric, prompt and max_new_tokens, as in `knobwise profile`."""
    importance: str | None = None
    """With `live` and a Hugging Face model: the file of block importance that it was profiled
    with."""
    dtype: str = "auto"
    """With `live` and a Hugging Face model: the type of its weights."""
    device: str | None = None
    """With `live` and a Hugging Face model: cpu or cuda; None for the GPU where there is one."""
    stream: LiveConfig = field(default_factory=LiveConfig)
    """With `live`: the simulated stream of requests."""
    json: str | None = None
    """Write the results to this file."""
    decisions: str | None = None
    """Write every decision to this Parquet file, in the columns of a run's decisions.parquet."""
    html: str | None = None
    """With `live`: write a page with charts of the results to this file."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""


@dataclass
class ExplainRun:
    """knobwise explain: why a trained controller sets the knobs as it does. It explains the
    decisions of a run or, with `sample` and `budget_ms`, what the controller expects of each
    configuration for one input."""

    checkpoint: str = "runs/latest"
    """The folder of a run; with `sample` also a checkpoint."""
    profile: Any = MISSING
    """With `sample`: the profile that holds it; that of the run unless you give another one."""
    sample: str | None = None
    """The id of a sample of the profile, or DATASET/ID."""
    budget_ms: float | None = None
    """With `sample`: how long the answer may take, in ms, or what it may cost, in the unit of the
    profile."""
    tracker: str | None = None
    """With `sample`: what a tracker has learned in front of the model, `tracker.state()` written as
    JSON."""
    json: str | None = None
    """Write the explanation to this file."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""


@dataclass
class ExportRun:
    """knobwise export: write a trained controller as a stand-alone file, and graphs that are
    compared with it."""

    checkpoint: str = "runs/latest"
    """The controller: a checkpoint file, or a run folder (its deployed policy)."""
    profile: Any = MISSING
    """The profile that decisions are compared on; that of the run unless you give another one,
    which must have the same configurations and features."""
    out: str = "exported"
    """Folder for the files."""
    onnx: bool = False
    """Write controller.onnx too, a graph for deadlines; needs the extra onnx."""
    int8: bool = False
    """Write both controller.onnx and controller.int8.onnx, with weights of 8 bits. Some of its
    decisions may differ; export.json says how many."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""


@dataclass
class DecideRun:
    """knobwise decide: decide for every request in a file. Those that cannot be decided are listed
    on stderr, with their line and the reason. The exit status is 0 if all were decided, 3 if some
    were refused and the others written, 2 if nothing was written."""

    requests: str = MISSING
    """A table, such as a CSV, with a row for each request: the features as columns, by their names
    in the training, and optionally `budget_ms` and `sample_id`."""
    checkpoint: str = "runs/latest"
    """The controller: a checkpoint file, a run folder (its deployed policy), or an exported
    controller.npz."""
    budget_ms: float | None = None
    """Budget of requests without a `budget_ms` of their own, in ms (or the profile's cost unit)."""
    out: str = "decisions.csv"
    """The CSV to write: the line of the request, its sample_id if it has one, its budget, and a
    column for each knob."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""


@dataclass
class UpdateRun:
    """knobwise update: update a deployed controller from the log of its requests; the new one takes
    over if the log shows that it is better. Or adapt a controller to other hardware, from a few
    timed cells."""

    checkpoint: str = "runs/latest"
    """A controller for deadlines that has a teacher (policy=auto or policy=utility): a checkpoint,
    a run folder (its deployed policy), or the current version in `out`."""
    log: str | None = None
    """What it learns from: the folder of `wrap(log=…)` or `AdaptiveModel(log=…)`."""
    out: str = "updated"
    """Folder for the versions; out/current is the one that serves."""
    accept: bool = False
    """Deploy the update even if the log looks unreliable. Without it such an update is written and
    explained, but does not serve."""
    rollback: bool = False
    """Return to the version before the current one, and do nothing else."""
    profile: Any = None
    """Instead of a log: timings from the new hardware. About 30 (sample, configuration) pairs of
    `trained_on` are enough."""
    trained_on: Any = MISSING
    """With `profile`: the profile that the controller was trained on; that of the run unless you
    give another one."""
    rule: str | None = None
    """The rule of a run that was trained under one of your own, as module:Class. It is imported."""

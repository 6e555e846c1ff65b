"""The settings of every verb of the command line: dataclasses whose fields carry their meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from knobwise.agents.training.settings import (
    AugmentationConfig,
    LossConfig,
    OptimiserConfig,
    PolicyConfig,
    a_seed,
    at_least,
    one_of,
    positive,
    training_seeds,
)
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetConfig
from knobwise.envs.configurations.contexts import BalanceConfig
from knobwise.envs.configurations.reward import RewardConfig
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.tracker import TrackingSettings
from knobwise.profiling.demonstrations.profile import BeamProfileConfig
from knobwise.profiling.demonstrations.tasks import LearnerTaskConfig, PoolConfig, VLMTaskConfig
from knobwise.profiling.elastic.profile import ElasticProfileConfig
from knobwise.profiling.measuring.profiler import VLMProfileConfig


def _not_rewarded(reward: RewardConfig) -> None:
    """Refuse a price of a missed budget that would reward missing it."""
    if not 0 <= reward.miss < math.inf:
        raise InputError(f"reward.miss={reward.miss}: is what a missed budget costs; must be 0 or a positive number")


@dataclass
class SplitConfig:
    """Shares of the samples; what is left is the test part."""

    train: float = 0.6
    """Share to fit on."""
    validation: float = 0.2
    """Share to choose on."""
    seed: int = 0
    """Of the split. It is the same for all training seeds, so that all are judged on the same samples."""
    leave_out: str | None = None
    """A data set to be judged on and not trained on; the others give training and validation."""
    folds: int | None = None
    """Divide the samples into so many folds, data set by data set, and judge on one of them: `fold`."""
    fold: int = 0
    """Which fold, counted from 0; `-m split.fold=0,1,2` runs several."""

    def __post_init__(self) -> None:
        a_seed("split.seed", self.seed)
        if self.folds is not None:
            at_least("split.folds", self.folds, 2)


@dataclass
class TrainRun:
    """knobwise train: train a controller with several seeds, judge it beside every simple way, report."""

    experiment: str = "controller"
    """Which experiment; the name of a file in conf/experiment."""
    profile: Any = MISSING
    """Group: builtin, exp5_exp6, core_exp, table, joint, simulated, calibrated."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Shares of the samples."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Group: quantiles, relative, uniform, fixed: deadlines in training; mean: the mean over requests is limited."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Group: utility, shaped. Under budget=mean it is always accuracy − latency/worth."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Group: auto, utility, additive, autoregressive, independent, joint."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Group: exact, sampled."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """Group: what suits each policy, under its name."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Which samples are drawn how often in training."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """How features are varied in training."""
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    """Group: auto, offline, online, disabled."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Training seeds; results are means over them."""
    budgets_ms: list[float] | None = None
    """Budgets to be judged on, in ms; None for five quantiles of the table's latencies, or under budget=mean of the
    configurations' mean latencies. Under budget=mean prices are calibrated for these and no others."""
    baselines: bool = True
    """Judge every simple way beside it; false leaves budget-aware static and the oracle."""
    name: str | None = None
    """Name of the run; None makes one from what was changed on the command line."""
    runs: str = "runs"
    """Folder of all runs."""
    threads: int = 1
    """Threads of torch; the network is so small that one is fastest."""
    device: str = "cpu"
    """cpu or cuda."""

    def __post_init__(self) -> None:
        training_seeds(self.seeds)
        _not_rewarded(self.reward)


@dataclass
class InspectRun:
    """knobwise inspect: what is in a profile, what is wrong with it, how much there is to gain."""

    profile: Any = MISSING
    """Group: builtin, exp5_exp6, core_exp, table, joint, simulated, calibrated."""
    json: str | None = None
    """Write the facts to this file."""
    html: str | None = None
    """Draw them into this page."""


@dataclass
class LiveConfig:
    """A simulated stream of requests."""

    requests: int = 1000
    """How many; test samples in random order, again in another when there are fewer."""
    repeats: int = 1
    """How often the whole stream is served, in another random order of the policies."""
    rate: float | None = None
    """Requests per second that arrive at random (Poisson), at one server for each policy: waiting then counts against
    the budget. None lets each request arrive when the one before is answered."""
    budgets_ms: list[float] | None = None
    """Budgets to be drawn from, in ms of the profile; None for five quantiles of its latencies. They are multiplied by
    the speed of this machine."""
    student: bool = True
    """A controller with experts, whose decisions take as long as an answer, is served by a student that is fitted to
    it first (half a minute); false serves it as it is."""
    fixed: int = 3
    """Fixed configurations beside it: 1 the best static one, 2 also the cheapest, 3 also the most accurate."""
    calibration: int = 200
    """Cells of the profile that are timed before, to find the speed of this machine."""
    warm_up: int = 50
    """Requests that are served before anything counts."""
    clock: str = "wall"
    """wall, or cpu: the CPU time of the thread, for a machine that others use at the same time."""
    seed: int = 0
    """Of arrivals, budgets and orders."""
    json: str | None = None
    """Write the results to this file."""
    html: str | None = None
    """Draw them into this page."""

    def __post_init__(self) -> None:
        for name in ("requests", "repeats", "fixed", "calibration"):
            at_least(f"stream.{name}", getattr(self, name), 1)
        at_least("stream.warm_up", self.warm_up, 0)
        a_seed("stream.seed", self.seed)
        one_of("stream.clock", self.clock, ("wall", "cpu"))
        if self.fixed > 3:
            raise InputError(f"stream.fixed={self.fixed}: must be 1, 2 or 3")
        if self.rate is not None:
            positive("stream.rate", self.rate)


@dataclass
class EvaluateRun:
    """knobwise evaluate: judge a trained controller again, on the test samples of its profile or on another profile; or
    a trained selector, on held-out queries of its beams or on other beams."""

    checkpoint: str = "runs/latest/checkpoints/best.pt"
    """The controller or selector."""
    beams: Any = MISSING
    """Group: builtin, files. What a selector is judged on."""
    judged_shots: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    """Demonstrations in a sequence, for a selector."""
    profile: Any = MISSING
    """Group: builtin, exp5_exp6, core_exp, table, joint, simulated, calibrated."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Which part the baselines are fitted on, for a profile that the controller was not trained on."""
    budgets_ms: list[float] | None = None
    """Budgets to be judged on, in ms; None for five quantiles of the table's latencies. A controller for mean budgets
    is judged at those that its prices were calibrated for."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Group: utility, shaped. What the column `reward` is in."""
    baselines: bool = True
    """Judge every simple way beside it."""
    live: bool = False
    """Put the controller in front of the built-in elastic model, which really runs, instead of replaying the profile:
    for one that was trained on the built-in profile."""
    stream: LiveConfig = field(default_factory=LiveConfig)
    """With `live`: the simulated stream of requests."""
    json: str | None = None
    """Write the results to this file."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        _not_rewarded(self.reward)


@dataclass
class ProfileRun:
    """knobwise profile: measure a model at every configuration, or record which demonstrations help it."""

    model: str = "elastic"
    """elastic, the built-in elastic model; or a Hugging Face vision-language model by its name or folder, with `data`.
    For recorded demonstrations: learner, the built-in in-context learner, or a Hugging Face model with vlm.data and
    vlm.embeddings instead."""
    data: str | None = None
    """With a Hugging Face model: the questions that it is measured on, as JSON lines, JSON, Parquet or CSV: id, image,
    question, answers, optionally image_id and choices."""
    out: str = "profiles/${model}"
    """Folder for the files. Called again with the same settings after an interruption, it goes on where it stopped."""
    checkpoint: str | None = None
    """A trained selector: what it draws is recorded as one more round, beside all else that `out` holds."""
    elastic: ElasticProfileConfig = field(default_factory=ElasticProfileConfig)
    """The elastic vision-language model and what is measured of it."""
    knobs: VLMProfileConfig = field(default_factory=VLMProfileConfig)
    """With `data`: which values of the model's knobs are measured, and how."""
    importance: str | None = None
    """With `data`: a file that says which blocks matter, {"4": 0.0156, …}: the least important are left out first;
    measure: find out with the first questions. None leaves out blocks from the end on."""
    dtype: str = "auto"
    """With `data`: of the weights: auto, bfloat16, float16 or float32."""
    device: str | None = None
    """With `data`: cpu, cuda; None for the GPU where there is one."""
    learner: LearnerTaskConfig = field(default_factory=LearnerTaskConfig)
    """With model=learner: the built-in task."""
    vlm: VLMTaskConfig = field(default_factory=VLMTaskConfig)
    """With a vision-language model: what it is asked, and how it runs."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Which candidates a query's demonstrations are chosen from."""
    beams: BeamProfileConfig = field(default_factory=BeamProfileConfig)
    """Which sequences of demonstrations are recorded."""


@dataclass
class ExportRun:
    """knobwise export: write a trained controller as files that decide alone, and hold them against it."""

    checkpoint: str = "runs/latest/checkpoints/best.pt"
    """The controller."""
    profile: Any = MISSING
    """Group: builtin, exp5_exp6, core_exp, table, joint, simulated, calibrated. What decisions are compared on; of the
    configurations and features that the controller was trained for, at best the profile itself."""
    out: str = "exported"
    """Folder for the files."""
    onnx: bool = True
    """Write controller.onnx; needs the packages of knobwise[export]."""
    int8: bool = False
    """Write controller.int8.onnx too, with weights of 8 bits. It decides otherwise now and then: how often is measured
    and written to export.json."""
    student: bool = False
    """Export a light network that was fitted to what the controller decides, guard included; student.pt is its
    checkpoint. For a controller with experts."""
    threads: int = 1
    """Threads of torch, NumPy and onnxruntime."""


@dataclass
class CompareRun:
    """knobwise compare RUN RUN …: finished runs side by side, on the terminal and as one page; a run, or a folder of
    runs, such as a sweep leaves."""

    runs: list[str] = MISSING
    """Folders of runs, or folders with runs in them. The first one is what the others are held against."""
    html: str | None = "comparison.html"
    """The page; null writes none."""
    json: str | None = None
    """Write the numbers to this file."""
    budgets_ms: list[float] | None = None
    """Only these of the budgets that the runs were judged at."""


@dataclass
class WorkspaceRun:
    """knobwise workspace: the W&B view of a project: Pareto scatter, utility and budgets kept against budget, knob
    shares, run comparer, parallel coordinates. Without a key it is built and checked, and said what is missing."""

    project: str | None = None
    """W&B project; None means WANDB_PROJECT, else knobwise."""
    entity: str | None = None
    """W&B team or user; None means the key's default."""
    name: str = "knobwise"
    """What the view is called."""
    knobs: list[str] = field(default_factory=lambda: ["max_crops", "top_k", "num_active_blocks"])
    """Whose shares are drawn; the names of the knobs in the profile."""
    json: str | None = None
    """Write the view, as W&B stores it, to this file."""


VERBS: dict[str, type[Any]] = {
    "train": TrainRun,
    "train_selector": SelectorRun,
    "inspect": InspectRun,
    "evaluate": EvaluateRun,
    "profile": ProfileRun,
    "export": ExportRun,
    "compare": CompareRun,
    "workspace": WorkspaceRun,
}
"""The settings of every verb. `train` has two, see `settings.schema_of`."""
EXPERIMENTS = {"train": "controller", "train_selector": "selector"}
"""The experiment that is meant when none is named."""

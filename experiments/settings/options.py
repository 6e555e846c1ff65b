"""The settings of every verb of the command line: dataclasses whose fields explain themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.checks import a_seed, at_least, one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import (
    TRAINING_REWARD,
    BalanceConfig,
    BudgetConfig,
    RewardConfig,
    reward_of,
)
from knobwise.experiments.settings.choices import AUTO, DISTILLED_OPTIMISER, SAMPLED
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.settings.tracking import Training
from knobwise.losses.settings import LossConfig
from knobwise.profiling.demonstrations.settings import (
    BeamProfileConfig,
    LearnerTaskConfig,
    PoolConfig,
    VLMTaskConfig,
)
from knobwise.profiling.endpoint.settings import EndpointOptions
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.serving.proxy.settings import ServeRun

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass
class SplitConfig:
    """Shares of the samples; the rest is the test part."""

    train: float = 0.6
    """Share to fit on."""
    validation: float = 0.2
    """Share to validate on."""
    seed: int = 0
    """Seed of the split. All training seeds share it, so that all are judged on the same
    samples."""
    leave_out: str | None = None
    """A data set that is only judged on; training and validation use the others."""

    def __post_init__(self) -> None:
        a_seed("split.seed", self.seed)


@dataclass
class RepeatedSplitConfig(SplitConfig):
    """Shares of the samples, and how many times these are split."""

    repeats: int = 1
    """Number of random splits, with the seeds `seed`, `seed` + 1 and so on. Every policy is trained
    and judged anew on each of them, and all numbers are means over the splits; the policy of the
    first split is deployed."""
    folds: int = 0
    """K-fold cross-validation: K disjoint test folds that together hold all samples, with every
    data set spread evenly over them. Every policy is retrained for each fold, on the other samples
    in the ratio of `train` and `validation`; otherwise as `repeats`. 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("split.repeats", self.repeats, 1)
        if self.folds == 1 or self.folds < 0 or (self.folds and self.repeats > 1):
            problem = "must be 0 or at least 2, and without split.repeats"
            raise InputError(f"split.folds={self.folds}: {problem}")


@dataclass
class TrainRun(Training):
    """knobwise train: train a controller with several seeds, compare it with every simple policy,
    and report."""

    experiment: str = "controller"
    profile: Any = MISSING
    """The profile: measured or simulated outcomes to train on."""
    split: RepeatedSplitConfig = field(default_factory=RepeatedSplitConfig)
    """Shares of the samples, and how many times they are split."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """The latency constraint: a deadline for each request or, with mean, a limit on mean latency;
    or a rule of your own, module:Class."""
    reward: RewardConfig = field(default_factory=lambda: replace(TRAINING_REWARD))
    """The reward in training. Under budget=mean it is always accuracy − λ·latency, and under a rule
    of your own the rule's."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """How often each sample is drawn in training."""
    policy: PolicyConfig = field(default_factory=lambda: replace(AUTO))
    """A small network with one head per knob. auto: distilled from an ensemble that predicts
    outcomes, then GRPO; utility: distilled from one network (several times faster), then GRPO;
    independent: from rewards alone, without a teacher."""
    loss: LossConfig = field(default_factory=lambda: replace(SAMPLED))
    """The policy loss: GRPO on sampled actions (sampled), GRPO over all configurations (exact),
    PPO, or a loss of your own, module:Class."""
    optimiser: OptimiserConfig = field(default_factory=lambda: replace(DISTILLED_OPTIMISER))
    """Iterations, learning rate and schedule of each stage; the default depends on the policy."""
    budgets_ms: list[float] | None = None
    """Budgets to judge at, in ms, or in the unit of costs that are no times; None for five
    quantiles of the table's latencies, 10 to 90 %, none below what three quarters of the samples
    can meet (under budget=mean, quantiles of the configurations' mean latencies).
    Under budget=mean, prices are calibrated for these budgets only."""
    unprofiled: str = "predict"
    """A cell that was not measured: predict, its outcome is predicted and it may be chosen; forbid,
    it may not be chosen for its sample."""
    chat: str = "last"
    """What is read of a text that is a chat, a list of messages: last, the last message of the
    user; user, all messages of the user; all, every message."""
    baselines: bool = True
    """Evaluate all baselines; false keeps only budget-aware static and the oracle."""
    own_cost: bool = True
    """Charge the controller for the time of its decisions and features, which no other policy pays.
    This time is measured, so figures differ slightly from call to call; false compares decisions
    alone, exactly."""
    threads: int = 1
    """torch threads; one is fastest for a network this small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("threads", self.threads, 1)
        kind = KINDS[self.reward.kind]
        if kind.judged_by == "reward" and not kind.learned_by_teacher:
            # the aim is another one than utility
            if self.policy.experts:
                raise InputError(
                    f"reward={self.reward.kind}: experts learn the reward utility only; give "
                    "policy=utility"
                )
            if self.budget.constraint != kind.constraint:
                raise InputError(
                    f"reward={self.reward.kind}: is for deadlines; "
                    f"budget={self.budget.constraint} has a reward of its own"
                )


def resolve(config: TrainRun) -> TrainRun:
    """Return the settings with what follows from the kind of budget: a mean budget, and a rule of
    the user's own, has a reward of its own."""
    if config.budget.constraint == "deadline":
        return config
    return replace(config, reward=reward_of(config.budget.constraint))


@dataclass
class InspectRun:
    """knobwise inspect: what a profile holds, what is wrong with it, how much there is to gain; or
    what a log holds."""

    profile: Any = MISSING
    """The profile: measured or simulated outcomes."""
    log: str | None = None
    """Instead of a profile: the folder of `AdaptiveModel(log=…)`."""
    learning_curve: bool = False
    """Estimate what a policy would gain if fewer cells had been measured. It takes minutes."""
    json: str | None = None
    """Write the summary to this file, as JSON."""
    html: str | None = None
    """Write an HTML report with charts to this file."""


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

    def __post_init__(self) -> None:
        for name, least in {"requests": 1, "skip": 0}.items():
            at_least(f"stream.{name}", getattr(self, name), least)
        a_seed("stream.seed", self.seed)
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
    """The questions that a model is measured on, as JSON lines, JSON, Parquet or CSV: id, image,
    question, answers, optionally image_id and choices."""
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
    """A CSV, Parquet, JSON or ARFF file with a row for each request: the features as columns, by
    their names in the training, and optionally `budget_ms` and `sample_id`."""
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


@dataclass
class CompareRun:
    """knobwise compare RUN RUN …: finished runs side by side, on the terminal and as one page. RUN
    is a run, or a folder of runs such as a sweep leaves."""

    runs: list[str] = MISSING
    """Folders of runs, or folders that contain runs. Every other run is compared with the first."""
    html: str | None = "comparison.html"
    """The page to write; null writes none."""
    json: str | None = None
    """Write the numbers to this file."""


@dataclass
class WorkspaceRun:
    """knobwise workspace: the W&B view of a project: Pareto scatter, utility and on-time share
    against budget, knob shares, run comparer, parallel coordinates. Without a W&B key it is only
    built and checked."""

    project: str | None = None
    """W&B project; None means WANDB_PROJECT, else knobwise."""
    entity: str | None = None
    """W&B team or user; None means the key's default."""
    knobs: list[str] = field(default_factory=lambda: ["max_crops", "top_k", "num_active_blocks"])
    """The knobs whose shares are drawn, by their names in the profile."""
    runs: str = "runs"
    """Folder of all runs. The address of the saved view is noted there, in wandb_views.txt, so that
    the next one takes its place."""
    json: str | None = None
    """Write what the view shows to this file."""


VERBS: dict[str, type[DataclassInstance]] = {
    "train": TrainRun,
    "train_selector": SelectorRun,
    "inspect": InspectRun,
    "evaluate": EvaluateRun,
    "explain": ExplainRun,
    "profile": ProfileRun,
    "export": ExportRun,
    "decide": DecideRun,
    "update": UpdateRun,
    "serve": ServeRun,
    "compare": CompareRun,
    "workspace": WorkspaceRun,
}
"""The settings of every verb. `train` has two, for controllers and for selectors."""

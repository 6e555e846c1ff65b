"""The settings of `train` for controllers: dataclasses whose fields explain themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

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
from knobwise.experiments.settings.tracking import Training
from knobwise.losses.settings import LossConfig

CHATS = ("last", "user", "all")
"""What may be read of a chat, see `knobwise.agents.deployed.text.MESSAGES`."""


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
    grpo: by GRPO alone, from a cold start; independent: from rewards alone, without a teacher, a
    guard or a head for utility."""
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

    @property
    def tags(self) -> list[str]:
        """See `Training`."""
        return [
            "taught" if self.policy.teacher else "independent",
            self.loss.objective[:64],
            f"reward-{self.reward.kind}",
            f"advantage-{self.loss.advantage}"[:64],  # the longest that W&B takes
        ]

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("threads", self.threads, 1)
        one_of("chat", self.chat, CHATS)
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


def resolve_training(config: TrainRun) -> TrainRun:
    """Return the settings with what follows from the kind of budget: a mean budget, and a rule of
    the user's own, has a reward of its own."""
    if config.budget.constraint == "deadline":
        return config
    return replace(config, reward=reward_of(config.budget.constraint))

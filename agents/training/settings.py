"""The settings of training, each with its meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from knobwise.common.checks import at_least, one_of, positive


@dataclass
class OptimiserConfig:
    """Settings of a controller's optimiser and of its stages."""

    teacher_iterations: int = 150
    """Iterations of the teacher's regression, where there is a teacher; twice as many where bins of
    the features are tried (`knobwise.agents.teacher.network`)."""
    pretrain_iterations: int = 600
    """Iterations before GRPO, in which the heads imitate the teacher, or without one the rewards,
    by RCE; 0 starts cold, without a teacher."""
    iterations: int = 300
    """Iterations of GRPO."""
    contexts: int = 256
    """P, contexts drawn in each iteration."""
    minibatch: int = 128
    """Contexts in each optimiser step."""
    epochs: int = 1
    """Passes over the contexts of one iteration."""
    pretrain_lr: float = 2e-3
    """Learning rate of AdamW in the warm-up."""
    lr: float = 1e-3
    """Learning rate of AdamW in GRPO."""
    schedule: str = "cosine"
    """`cosine` (to 0 over each stage, after a linear rise at its beginning) or `constant`."""
    lr_warmup: float = 0.05
    """Share of a stage in which the learning rate rises."""
    weight_decay: float = 0.01
    """Weight decay of AdamW, in both stages."""
    clip_grad: float = 1.0
    """Largest norm of the gradient."""
    evaluate_every: int = 20
    """Iterations between evaluations on the validation split; each stage ends with one, too."""
    patience: int = 8
    """Patience: evaluations without a better validation utility that end GRPO; 0 never ends it
    early."""
    keep: str = "best"
    """Which weights are used: the `best` on validation, or the `last`."""

    def __post_init__(self) -> None:
        one_of("optimiser.keep", self.keep, ("best", "last"))
        one_of("optimiser.schedule", self.schedule, ("cosine", "constant"))
        for name in ("contexts", "minibatch", "epochs", "evaluate_every"):
            at_least(f"optimiser.{name}", getattr(self, name), 1)
        for name in (
            "teacher_iterations",
            "pretrain_iterations",
            "iterations",
            "patience",
            "lr",
            "pretrain_lr",
            "weight_decay",
        ):
            at_least(f"optimiser.{name}", getattr(self, name), 0)
        positive("optimiser.clip_grad", self.clip_grad)
        positive("optimiser.lr_warmup", self.lr_warmup)


@dataclass
class StageConfig:
    """Settings of one stage of a selector."""

    epochs: int = 4
    """Passes (epochs) over the training queries. Every epoch is kept."""
    keep: str = "best"
    """Which epoch is used: the `best` on validation, which may be the start; the `last`; or
    `best_kl`, the trained epoch with the lowest KL to the SFT policy on validation."""
    lr: float = 3e-4
    """Learning rate of AdamW."""
    queries: int = 64
    """P, queries in each step."""
    collected: int | None = None
    """Queries whose old log-probs are computed at once; None: those of one step. With more, the
    policy moves away from its old log-probs before they are computed anew, and GRPO's clip acts."""
    lr_warmup: float = 0.05
    """Share of the stage in which the learning rate rises; then it falls to 0 as a cosine."""
    weight_decay: float = 1e-3
    """Weight decay of AdamW."""
    clip_grad: float = 1.0
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 0)
        at_least("queries", self.queries, 1)
        if self.collected is not None:
            at_least("collected", self.collected, 1)
        one_of("keep", self.keep, ("best", "last", "best_kl"))
        for name in ("lr", "lr_warmup", "clip_grad"):
            positive(name, getattr(self, name))
        at_least("weight_decay", self.weight_decay, 0)

    def optimiser(self, training_queries: int) -> OptimiserConfig:
        """Return these settings with epochs converted to iterations over `training_queries`
        queries."""
        collected = min(self.collected or self.queries, training_queries)
        iterations_per_epoch = math.ceil(training_queries / collected)
        return OptimiserConfig(
            pretrain_iterations=0,
            iterations=self.epochs * iterations_per_epoch,
            contexts=collected,
            minibatch=min(self.queries, collected),
            evaluate_every=iterations_per_epoch,
            patience=0,
            lr=self.lr,
            lr_warmup=self.lr_warmup,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )

"""The settings of a controller and of its training, each with its meaning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from knobwise.agents.heads import HEADS
from knobwise.envs.errors import InputError
from knobwise.losses.advantage import ADVANTAGES


def one_of(key: str, value: str, known: Collection[str]) -> None:
    """Refuse a word that is not known.

    Raises:
        InputError: naming the key and the words that are.
    """
    if value not in known:
        raise InputError(f"{key}={value!r}: must be one of {', '.join(known)}")


def positive(key: str, value: float) -> None:
    """Refuse a number that is not above 0.

    Raises:
        InputError: naming the key.
    """
    if not value > 0:
        raise InputError(f"{key}={value}: must be positive")


def at_least(key: str, value: float, least: float) -> None:
    """Refuse a number that is too small.

    Raises:
        InputError: naming the key.
    """
    if not value >= least:
        raise InputError(f"{key}={value}: must be at least {least}")


@dataclass
class PolicyConfig:
    """The network."""

    head: str = "additive"
    """Structure over the knobs: `additive`, `independent` or `joint` (see `knobwise.agents.heads`)."""
    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 2
    """Number of hidden layers."""
    dropout: float = 0.6
    """Dropout in the hidden layers during the warm-up. Draws, log-probs and decisions are always taken without."""
    budget_encoding: str = "sinusoidal"
    """`sinusoidal` or `linear`, of the standardised log-budget."""
    budget_width: int = 9
    """Width of the sinusoidal encoding: 1 + 2·frequencies."""

    def __post_init__(self) -> None:
        one_of("policy.head", self.head, HEADS)
        one_of("policy.budget_encoding", self.budget_encoding, ("sinusoidal", "linear"))
        for name in ("hidden", "layers", "budget_width"):
            at_least(f"policy.{name}", getattr(self, name), 1)
        if not 0 <= self.dropout < 1:
            raise InputError(f"policy.dropout={self.dropout}: must be in [0, 1)")


@dataclass
class LossConfig:
    """What is minimised after the warm-up."""

    objective: str = "exact"
    """`exact`: the expectation over all configurations; `sampled`: over `group_size` draws."""
    group_size: int = 8
    """G, draws for each context under `sampled`."""
    advantage: str = "centred"
    """`zscore`, `centred` or `rank`, inside the group."""
    advantage_std_floor: float = 0.1
    """Smallest standard deviation that `zscore` divides by, in units of reward."""
    advantage_clip: float = 5.0
    """Advantages are cut to ± this."""
    clip_epsilon: float = 0.2
    """ε of PPO's clip."""
    entropy_coeff: float = 0.0
    """η, weight of the entropy."""
    kl_to_ref_coeff: float = 0.0
    """β, weight of the k3 KL to the policy at the end of the warm-up."""
    kl_band: tuple[float, float] | None = None
    """(low, high) in nats: β is raised above and lowered below this band; None keeps it fixed."""
    temperature_start: float = 0.5
    """τ of the RCE warm-up at its beginning, in units of reward."""
    temperature_end: float = 0.1
    """τ at its end; it falls linearly."""

    def __post_init__(self) -> None:
        one_of("loss.objective", self.objective, ("exact", "sampled"))
        one_of("loss.advantage", self.advantage, ADVANTAGES)
        at_least("loss.group_size", self.group_size, 1)
        for name in ("clip_epsilon", "entropy_coeff", "kl_to_ref_coeff"):
            at_least(f"loss.{name}", getattr(self, name), 0)
        for name in ("temperature_start", "temperature_end", "advantage_std_floor", "advantage_clip"):
            positive(f"loss.{name}", getattr(self, name))
        if self.kl_band is not None and not 0 <= self.kl_band[0] <= self.kl_band[1]:
            raise InputError(f"loss.kl_band={list(self.kl_band)}: must be [low, high] with 0 ≤ low ≤ high")


@dataclass
class OptimiserConfig:
    """How it is minimised."""

    warmup_iterations: int = 600
    """Iterations of RCE before GRPO; 0 starts cold."""
    iterations: int = 300
    """Iterations of GRPO."""
    contexts: int = 256
    """P, contexts drawn in each iteration."""
    minibatch: int = 128
    """Contexts in each optimiser step."""
    epochs: int = 1
    """Passes over the contexts of one iteration."""
    warmup_lr: float = 2e-3
    """Learning rate of AdamW in the warm-up."""
    lr: float = 1e-3
    """Learning rate of AdamW in GRPO."""
    schedule: str = "cosine"
    """`cosine` (to 0 over each stage, after a linear rise over its first 4 %) or `constant`."""
    weight_decay: float = 0.01
    """Weight decay of AdamW, in both stages."""
    clip_grad: float = 1.0
    """Largest norm of the gradient."""
    evaluate_every: int = 20
    """Iterations between evaluations on the validation split."""
    patience: int = 10
    """Evaluations without a better validation utility after which GRPO stops; 0 never stops early."""

    def __post_init__(self) -> None:
        one_of("optimiser.schedule", self.schedule, ("cosine", "constant"))
        for name in ("contexts", "minibatch", "epochs", "evaluate_every"):
            at_least(f"optimiser.{name}", getattr(self, name), 1)
        for name in ("warmup_iterations", "iterations", "patience", "lr", "warmup_lr", "weight_decay"):
            at_least(f"optimiser.{name}", getattr(self, name), 0)
        positive("optimiser.clip_grad", self.clip_grad)

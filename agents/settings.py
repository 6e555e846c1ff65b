"""The settings of a controller and of its training, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.envs.errors import InputError


@dataclass
class PolicyConfig:
    """The network."""

    head: str = "additive"
    """Structure over the knobs: `additive`, `independent` or `joint` (see `knobwise.agents.heads`)."""
    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 2
    """Number of hidden layers."""
    dropout: float = 0.1
    """Dropout in the hidden layers during the warm-up. Draws, log-probs and decisions are always taken without."""
    budget_encoding: str = "sinusoidal"
    """`sinusoidal` or `linear`, of the standardised log-budget."""
    budget_width: int = 9
    """Width of the sinusoidal encoding: 1 + 2·frequencies."""


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


@dataclass
class OptimiserConfig:
    """How it is minimised."""

    warmup_iterations: int = 300
    """Iterations of RCE before GRPO; 0 starts cold."""
    iterations: int = 300
    """Iterations of GRPO."""
    contexts: int = 256
    """P, contexts drawn in each iteration."""
    minibatch: int = 128
    """Contexts in each optimiser step."""
    epochs: int = 1
    """Passes over the contexts of one iteration."""
    warmup_lr: float = 1e-3
    """Learning rate of AdamW in the warm-up."""
    lr: float = 3e-4
    """Learning rate of AdamW in GRPO."""
    schedule: str = "cosine"
    """`cosine` (to 0 over each stage, after a linear rise over its first 5 %) or `constant`."""
    weight_decay: float = 0.01
    """Weight decay of AdamW, in both stages."""
    clip_grad: float = 1.0
    """Largest norm of the gradient."""
    evaluate_every: int = 20
    """Iterations between evaluations on the validation split."""
    patience: int = 10
    """Evaluations without a better validation utility after which GRPO stops; 0 never stops early."""

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "constant"):
            raise InputError(f"optimiser.schedule={self.schedule!r}: must be cosine or constant")
        for name in ("contexts", "minibatch", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise InputError(f"optimiser.{name}={getattr(self, name)}: must be at least 1")
        if self.warmup_iterations < 0 or self.iterations < 0:
            raise InputError("optimiser.warmup_iterations and optimiser.iterations must not be negative")

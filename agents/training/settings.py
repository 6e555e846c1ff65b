"""The settings of a controller and of its training, each with its meaning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from knobwise.agents.controller.heads import HEADS
from knobwise.common.errors import InputError
from knobwise.losses.advantage import ADVANTAGES

EXPERTS = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting")
"""The families of `knobwise.agents.predictors.regressors`."""


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


def a_seed(key: str, value: int) -> None:
    """Refuse a seed that not all of NumPy, torch and scikit-learn take: from 0 to 2³² − 1.

    Raises:
        InputError: naming the key.
    """
    if not 0 <= value < 2**32:
        raise InputError(f"{key}={value}: a seed is a whole number from 0 to {2**32 - 1}")


def training_seeds(values: Collection[int]) -> None:
    """Refuse seeds that no run can be trained with.

    Raises:
        InputError: there is none, one stands there twice, or one is no seed.
    """
    if not values or len(set(values)) < len(values):
        raise InputError(f"seeds={list(values)}: at least one seed is needed, and none twice; such as seeds=[0,1,2]")
    for value in values:
        a_seed("seeds", value)


def band(key: str, value: tuple[float, float] | None) -> None:
    """Refuse what is not (low, high).

    Raises:
        InputError: naming the key.
    """
    if value is not None and not 0 <= value[0] <= value[1]:
        raise InputError(f"{key}={list(value)}: must be [low, high] with 0 ≤ low ≤ high")


@dataclass
class PolicyConfig:
    """The network."""

    structure: str = "additive"
    """`utility` predicts accuracy and latency of every configuration (see `knobwise.agents.controller.networks`);
    `additive`,
    `autoregressive`, `independent` and `joint` are heads over the knobs (see `knobwise.agents.controller.heads`)."""
    members: int = 1
    """Networks side by side. One is fitted on the training samples and stopped on the validation samples; of several
    each is fitted on all of these but one fold, stopped together on their folds, and they decide together."""
    experts: tuple[str, ...] = ()
    """Stacked beside a `utility` network of several members: any of ridge, kernel_ridge, knn, random_forest,
    gradient_boosting. None of them is the lean form, the network alone."""
    retrieval: int = 0
    """How many training samples a `utility` network looks at beside its prediction, by attention; 0 for none."""
    guard: bool = True
    """Whether a `utility` network of several members decides inside a guard (`knobwise.agents.stack.guard`); under mean
    budgets, whether any policy does (`knobwise.agents.stack.priced_policy`)."""
    level: float = 0.95
    """Share of the requests that could be met at all whose budget the guard keeps."""
    level_cost: float = 0.1
    """Share of the gain over budget-aware static that keeping the level may cost; where it costs more the report says
    so, and nothing is forced. 1 keeps the level at any cost."""
    confidence: float = 0.8
    """How sure, one-sided, the guard wants to be that the policy is better than budget-aware static."""
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
        one_of("policy.structure", self.structure, ("utility", *HEADS))
        for expert in self.experts:
            one_of("policy.experts", expert, EXPERTS)
        if self.experts and (self.structure != "utility" or self.members < 2):
            key = "structure" if self.structure != "utility" else "members"
            raise InputError(
                f"policy.{key}={getattr(self, key)}: policy.experts ({', '.join(self.experts)}) stand beside "
                "policy.structure=utility with policy.members of at least 2 alone; policy.experts=[] leaves them out"
            )
        for name in ("level", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"policy.{name}={getattr(self, name)}: must be between 0 and 1")
        at_least("policy.retrieval", self.retrieval, 0)
        if not 0 <= self.level_cost <= 1:
            raise InputError(f"policy.level_cost={self.level_cost}: must be in [0, 1]")
        one_of("policy.budget_encoding", self.budget_encoding, ("sinusoidal", "linear"))
        for name in ("members", "hidden", "layers", "budget_width"):
            at_least(f"policy.{name}", getattr(self, name), 1)
        if not 0 <= self.dropout < 1:
            raise InputError(f"policy.dropout={self.dropout}: must be in [0, 1)")


@dataclass
class GRPOConfig:
    """What controller and selector share of what is minimised."""

    group_size: int = 8
    """G, draws for each context."""
    advantage: str = "centred"
    """`zscore`, `centred`, `rank` or `unnormalised`, inside the group."""
    advantage_std_floor: float = 0.1
    """Smallest standard deviation that `zscore` divides by, in units of reward."""
    advantage_clip: float = 5.0
    """Advantages are cut to ± this."""
    clip_epsilon: float = 0.2
    """ε of PPO's clip."""
    entropy_coeff: float = 0.0
    """η, weight of the entropy."""
    kl_to_ref_coeff: float = 0.0
    """β, weight of the k3 KL to the reference policy."""
    kl_band: tuple[float, float] | None = None
    """(low, high) in nats: β is raised above and lowered below this band; None keeps it fixed."""
    temperature_start: float = 0.5
    """τ of the RCE warm-up at its beginning, in units of reward."""
    temperature_end: float = 0.1
    """τ at its end; it falls linearly."""

    def of_grpo(self) -> dict[str, Any]:
        """Those that `GRPOLoss` takes."""
        names = "clip_epsilon entropy_coeff kl_to_ref_coeff advantage advantage_std_floor advantage_clip"
        return {name: getattr(self, name) for name in names.split()}

    def __post_init__(self) -> None:
        one_of("loss.advantage", self.advantage, ADVANTAGES)
        at_least("loss.group_size", self.group_size, 1)
        for name in ("clip_epsilon", "entropy_coeff", "kl_to_ref_coeff"):
            at_least(f"loss.{name}", getattr(self, name), 0)
        for name in ("temperature_start", "temperature_end", "advantage_std_floor", "advantage_clip"):
            positive(f"loss.{name}", getattr(self, name))
        band("loss.kl_band", self.kl_band)


@dataclass
class LossConfig(GRPOConfig):
    """What is minimised after the warm-up. The reference policy is that of the end of the warm-up."""

    objective: str = "exact"
    """`exact`: the expectation over all configurations; `sampled`: over `group_size` draws."""
    regression_coeff: float = 0.2
    """Weight of the regression on measured accuracy and latency beside GRPO, for a `utility` structure."""

    def of_grpo(self) -> dict[str, Any]:
        return super().of_grpo() | {"objective": self.objective}

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss.objective", self.objective, ("exact", "sampled"))
        at_least("loss.regression_coeff", self.regression_coeff, 0)


@dataclass
class OptimiserConfig:
    """How it is minimised."""

    warmup_iterations: int = 600
    """Iterations before GRPO, of RCE or under `policy=utility` of regression; 0 starts cold."""
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
    """`cosine` (to 0 over each stage, after a linear rise at its beginning) or `constant`."""
    rise: float = 0.05
    """Share of a stage in which the learning rate rises."""
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
        positive("optimiser.rise", self.rise)


@dataclass
class AugmentationConfig:
    """How the features of training samples are varied; nothing is by default. For policies that predict outcomes."""

    noise: float = 0.0
    """Standard deviation of Gaussian noise on normalised features, whose own is 1."""
    drop: float = 0.0
    """Probability that a feature block of a sample is hidden: every column stands at its mean."""
    mix: float = 0.0
    """α of mixup: features and outcomes of a sample are mixed with those of another one of the same data set, in shares
    drawn from Beta(α, α); 0 mixes nothing."""

    def __post_init__(self) -> None:
        at_least("augmentation.noise", self.noise, 0)
        at_least("augmentation.mix", self.mix, 0)
        if not 0 <= self.drop < 1:
            raise InputError(f"augmentation.drop={self.drop}: must be in [0, 1)")

    @property
    def active(self) -> bool:
        """Whether anything is varied."""
        return self.noise > 0 or self.drop > 0 or self.mix > 0

    def check(self, policy: PolicyConfig) -> None:
        """Refuse a policy that this is not for.

        Raises:
            InputError: it does not predict outcomes, or it knows its training samples again by their features.
        """
        if self.active and policy.structure != "utility":
            raise InputError(f"augmentation: is for policy.structure=utility, not {policy.structure}")
        if self.active and policy.retrieval:
            raise InputError(
                "augmentation: does not go with policy.retrieval, which knows a training sample by its very features"
            )

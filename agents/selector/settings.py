"""The settings of a selector's training, each with its meaning. Those of the network:
`knobwise.agents.selector.networks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from knobwise.agents.training.settings import GRPOConfig, OptimiserConfig, at_least, band, one_of, positive
from knobwise.losses.advantage import ADVANTAGES


@dataclass
class SelectorLossConfig(GRPOConfig):
    """What is minimised. The reference policy of the KL is the one after supervised fine-tuning."""

    advantage: str = "zscore"
    """`zscore`, `centred`, `rank` or `unnormalised`, inside the group."""
    kl_to_ref_coeff: float = 0.02
    """β, weight of the k3 KL to the SFT policy."""
    temperature_start: float = 2.0
    """τ of the RCE warm-up at its beginning, in units of the scores."""
    temperature_end: float = 0.5
    """τ at its end; it falls linearly."""
    scores: str = "raw"
    """What RCE weighs by: `raw` rewards, or `zscore`, `centred`, `rank`, compared inside the group first. `rank` gives
    every query the same weights."""
    curriculum: float = 0.0
    """Share of GRPO in which only the best `curriculum_top` sequences of a group take part, after the advantages were
    taken in the whole group."""
    curriculum_top: int = 3
    """How many these are."""
    min_positive: float = 0.0
    """Conditional training: GRPO leaves out queries of whose group a smaller share is right."""
    temperature_band: tuple[float, float] | None = None
    """(low, high) in nats: the policy is drawn from, and trained, at a temperature that falls while the KL to the SFT
    policy is above this band and rises while it is below; None keeps it at 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss.scores", self.scores, ("raw", *ADVANTAGES))
        at_least("loss.curriculum_top", self.curriculum_top, 1)
        for name in ("curriculum", "min_positive"):
            at_least(f"loss.{name}", getattr(self, name), 0)
        band("loss.temperature_band", self.temperature_band)


@dataclass
class StageConfig:
    """How one stage is trained."""

    epochs: int = 4
    """Passes over the training queries. Every one is kept."""
    keep: str = "best"
    """Which epoch goes on: the `best` on validation, the start among them, or the `last`."""
    lr: float = 3e-4
    """Learning rate of AdamW."""
    queries: int = 64
    """P, queries in each step."""
    collected: int | None = None
    """Queries whose old log-probs are taken at once; None: those of one step. With more of them the policy moves away
    from its old log-probs before they are taken anew, and GRPO's clip acts."""
    rise: float = 0.05
    """Share of the stage in which the learning rate rises; then it falls to 0 as a cosine."""
    weight_decay: float = 1e-3
    """Weight decay of AdamW."""
    clip_grad: float = 1.0
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 0)
        at_least("queries", self.queries, 1)
        at_least("collected", self.queries if self.collected is None else self.collected, 1)
        one_of("keep", self.keep, ("best", "last"))
        for name in ("lr", "rise", "clip_grad"):
            positive(name, getattr(self, name))
        at_least("weight_decay", self.weight_decay, 0)

    def optimiser(self, training_queries: int) -> OptimiserConfig:
        """The same for a number of training queries, as the loop wants it: in iterations, an epoch at a time."""
        collected = min(self.collected or self.queries, training_queries)
        each = math.ceil(training_queries / collected)
        return OptimiserConfig(
            warmup_iterations=0,
            iterations=self.epochs * each,
            contexts=collected,
            minibatch=min(self.queries, collected),
            lr=self.lr,
            rise=self.rise,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
            evaluate_every=each,
            patience=0,
        )

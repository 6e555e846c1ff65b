"""How a controller learns from a log."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import a_seed, at_least, positive
from knobwise.common.errors import InputError


@dataclass
class UpdateConfig:
    """How a controller learns from a log."""

    confidence: float = 0.95
    """One-sided confidence, required to take over, that the gain in utility on held-out requests is above 0."""
    folds: int = 4
    """Parts of the log; each is judged by a controller that learned from the others."""
    clip: float = 200.0
    """The largest importance weight 1/probability."""
    steps: int = 100
    """Steps of GRPO after the offsets; 0 for none."""
    minibatch: int = 256
    """Requests in each."""
    lr: float = 3e-4
    """Their learning rate. Only the last layer learns."""
    kl_coeff: float = 0.02
    """Weight of the KL to the policy before them."""
    regression_coeff: float = 0.5
    """Weight of the regression on labels and times of the log beside GRPO."""
    seed: int = 0
    """Seed of the minibatches."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise InputError(f"learning.confidence={self.confidence}: must be at least 0.5 and below 1")
        at_least("learning.folds", self.folds, 2)
        at_least("learning.clip", self.clip, 1)
        for name in ("steps", "kl_coeff", "regression_coeff"):
            at_least(f"learning.{name}", getattr(self, name), 0)
        at_least("learning.minibatch", self.minibatch, 1)
        positive("learning.lr", self.lr)
        a_seed("learning.seed", self.seed)

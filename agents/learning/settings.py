"""The settings of learning from a log."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError


@dataclass
class UpdateConfig:
    """Settings of an update from a log."""

    confidence: float = 0.95
    """One-sided confidence, required to take over, that the gain in utility on held-out requests is
    above 0."""
    folds: int = 4
    """Parts of the log; each is judged by a controller that learned from the others."""
    clip: float = 200.0
    """The largest importance weight 1/probability."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise InputError(
                f"learning.confidence={self.confidence}: must be at least 0.5 and below 1"
            )
        at_least("learning.folds", self.folds, 2)
        at_least("learning.clip", self.clip, 1)

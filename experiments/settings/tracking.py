"""The settings of tracking, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrackingSettings:
    """Where a run is logged. `metrics.csv` is always written."""

    mode: str = "auto"
    """W&B: online, offline, disabled; auto follows WANDB_MODE, else online if there is a key, else offline."""
    project: str | None = None
    """W&B project; None means WANDB_PROJECT, else knobwise."""
    entity: str | None = None
    """W&B team or user; None means the key's default."""
    tags: list[str] = field(default_factory=list)
    """Put on every W&B run of this experiment."""
    tensorboard: bool = True
    """Write event files into the run's `tensorboard/`."""

"""The settings of `compare` and `workspace`, which show several runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


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

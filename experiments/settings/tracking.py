"""The settings that every training has, including tracking."""

from __future__ import annotations

from dataclasses import dataclass, field

from knobwise.common.checks import a_device, a_seed, distinct


@dataclass
class TrackingSettings:
    """Where a run is logged. `metrics.csv` is always written."""

    mode: str = "auto"
    """W&B: online, offline or disabled; auto follows WANDB_MODE, else online if there is a key,
    else offline."""
    project: str | None = None
    """W&B project; None means WANDB_PROJECT, else knobwise."""
    entity: str | None = None
    """W&B team or user; None means the key's default."""
    tags: list[str] = field(default_factory=list)
    """Tags of every W&B run of this experiment."""
    notes: str | None = None
    """Notes of every W&B run; None means the question in the experiment's file."""
    workspace: bool = True
    """Save the view of `knobwise workspace` after the first online run of a project in `runs`."""
    tensorboard: bool = True
    """Write event files into the run's `tensorboard/`."""


@dataclass
class Training:
    """A training of a controller or a selector."""

    experiment: str
    """The experiment, a file in conf/experiment."""
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    """Where the run is logged."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Training seeds; results are means over them."""
    name: str | None = None
    """Name of the run; None makes one from the options on the command line."""
    runs: str = "runs"
    """Folder of all runs."""
    init_from: str | None = None
    """A checkpoint, or the folder of a run, whose weights training starts from; None starts from
    fresh weights. A controller starts from the heads of a controller, a selector's supervised
    fine-tuning from a selector. Knobs, features and the settings of the network must be the same.
    optimiser.pretrain_iterations=0 begins with GRPO at once; with sft.epochs=0 the weights are the
    SFT policy, which the KL is taken to."""
    device: str = "cpu"
    """cpu or cuda."""

    @property
    def tags(self) -> list[str]:
        """Tags that its runs are filtered by in W&B."""
        return []

    def __post_init__(self) -> None:
        distinct("seeds", self.seeds)
        for seed in self.seeds:
            a_seed("seeds", seed)
        a_device(self.device)

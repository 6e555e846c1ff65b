"""What trainings of controllers and selectors share: their set-up, their folders, their log."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

from knobwise.agents.training.trainer import Trainer
from knobwise.common.files import written_whole
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.controllers import profile_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.settings.device import a_device
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.tracker import Tracker, wandb_mode


class Experiment(ABC):
    """A training of controllers or selectors. Construction refuses settings that cannot work.

    Raises:
        InputError: a device that is not there, tracking that cannot be used.
    """

    config: TrainRun | SelectorRun
    table: ProfileTable | BeamTable
    """The data to train on."""
    notes: list[str]
    """Facts about the data that a person should know."""

    def __init__(self, config: TrainRun | SelectorRun, threads: int = 1) -> None:
        self.config = config
        set_up_torch(threads)
        wandb_mode(config.tracking)
        a_device(config.device, usable=True)

    @abstractmethod
    def train(self, folder: Path) -> None:
        """Train all seeds, from where they were stopped; checkpoints go into
        `checkpoints/seed<k>`."""

    @abstractmethod
    def evaluate(self, folder: Path) -> tuple[RunResults, pl.DataFrame]:
        """Judge all policies on held-out data: the contents of `results.json` and of
        `decisions.parquet`."""


def set_up_torch(threads: int = 1) -> None:
    """Set the number of threads, and stop TorchRL from announcing what it allocates."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(threads)


def keep_best(folder: Path, scores: Mapping[Path, float]) -> Path:
    """Copy the checkpoints of the best training into the folder of the run.

    Args:
        scores: the folder of each training's checkpoints → its validation score.

    Returns:
        The folder of the best training.
    """
    best = max(scores, key=scores.__getitem__)
    for name in ("best.pt", "last.pt"):
        # a reader never sees half of a checkpoint
        with written_whole(folder / "checkpoints" / name) as temporary:
            shutil.copyfile(best / name, temporary)
    return best


def seed_folder(folder: Path, seed: int) -> Path:
    """Return the folder of the checkpoints of a seed, inside that of the run."""
    return folder / "checkpoints" / f"seed{seed}"


def run_logged(
    trainer: Trainer,
    config: TrainRun | SelectorRun,
    folder: Path,
    table: ProfileTable | BeamTable,
    stage: str = "",
    first: int = 0,
) -> None:
    """Run a training, or what is left of it, to its end, and log it; `stage` and `first` as in
    `Tracker`."""
    finished = trainer.state.finished
    if finished:
        # W&B gets it whole, with the test scores
        config = replace(config, tracking=replace(config.tracking, mode="disabled"))
    options = {"stage": stage, "first": first, "state": trainer.state}
    with tracker_of(config, folder, table, "train", trainer.seed, **options) as trainer.log:
        if not finished:
            trainer.run()


def tracker_of(
    config: TrainRun | SelectorRun,
    folder: Path,
    table: ProfileTable | BeamTable,
    job_type: str,
    seed: int | None = None,
    **options: Any,
) -> Tracker:
    """Return the tracker of a run, or of one of its seeds, with more arguments of `Tracker`."""
    # tags that runs are filtered by in W&B
    if isinstance(config, SelectorRun):
        tags = [f"reward-{config.reward.mode}"]
    else:
        tags = [
            "taught" if config.policy.teacher else "independent",
            config.loss.objective[:64],
            f"reward-{config.reward.kind}",
            f"advantage-{config.loss.advantage}"[:64],  # the longest that W&B takes
        ]
    return Tracker(
        folder,
        name=folder.name,
        experiment=config.experiment,
        job_type=job_type,
        config=asdict(config),
        settings=config.tracking,
        seed=seed,
        tags=tags,
        profile=profile_of(table),
        **options,
    )

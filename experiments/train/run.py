"""What trainings of controllers and selectors share: their set-up, their folders, their log."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from knobwise.agents.training.trainer import Trainer
from knobwise.common.checks import a_device
from knobwise.common.files import written_whole
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.profile_facts import profile_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.settings.tracking import Training
from knobwise.experiments.tracking.tracker import Tracker, wandb_mode

if TYPE_CHECKING:
    from knobwise.envs.demonstrations.beam_table import BeamTable


class Experiment(ABC):
    """A training of controllers or selectors: `prepare`, `train`, `evaluate`. Construction refuses
    settings that cannot work.

    Raises:
        InputError: a device that is not there, tracking that cannot be used.
    """

    config: Training
    table: ProfileTable | BeamTable
    """The data to train on, once it is prepared."""
    notes: list[str]
    """Facts about the data that a person should know, once it is prepared."""

    def __init__(self, config: Training, threads: int = 1) -> None:
        self.config = config
        set_up_torch(threads)
        wandb_mode(config.tracking)
        a_device(config.device, usable=True)

    @abstractmethod
    def prepare(self) -> None:
        """Read the data, and make what is trained, before anything is written.

        Raises:
            InputError: data or settings that cannot be used.
        """

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


def split_folder(folder: Path, number: int) -> Path:
    """Return the folder of a split inside that of the run; the first split has no own."""
    return folder / f"split{number}" if number else folder


def patience_of(trainer: Trainer) -> int:
    """Return after how many iterations without a better score the last stage ends; 0 for never."""
    return trainer.stages[-1].patience * trainer.settings.evaluate_every


def run_logged(
    trainer: Trainer,
    config: Training,
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
    config: Training,
    folder: Path,
    table: ProfileTable | BeamTable,
    job_type: str,
    seed: int | None = None,
    **options: Any,
) -> Tracker:
    """Return the tracker of a run, or of one of its seeds, with more arguments of `Tracker`."""
    return Tracker(
        folder,
        name=folder.name,
        experiment=config.experiment,
        job_type=job_type,
        config=asdict(config),
        settings=config.tracking,
        seed=seed,
        tags=config.tags,
        profile=profile_of(table),
        **options,
    )

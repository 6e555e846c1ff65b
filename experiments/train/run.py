"""A run from settings to a report, the same for controllers and selectors: claim a folder, train, judge, write, report,
track."""

from __future__ import annotations

import logging
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console

from knobwise.agents.training.loop import Trainer
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import say
from knobwise.experiments.report.report import print_results, result_images, write_report
from knobwise.experiments.report.words import write_results
from knobwise.experiments.results.controllers import profile_of
from knobwise.experiments.results.decisions import write_decisions
from knobwise.experiments.results.run_folder import STUDENT, claim
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.metrics_file import MetricsFile
from knobwise.experiments.tracking.tracker import Tracker, wandb_mode


class Experiment(ABC):
    """What training controllers and training selectors share; settings that cannot work are refused on construction.

    Raises:
        InputError: a device that is not there, tracking that cannot be used.
    """

    table: Any
    """What is trained on, a `ProfileTable` or a `BeamTable`."""
    notes: list[str]
    """What a person should know of the data."""

    def __init__(self, config: Any, threads: int = 1) -> None:
        self.config = config
        set_up_torch(threads)
        wandb_mode(config.tracking)
        if config.device not in ("cpu", "cuda") or (config.device == "cuda" and not torch.cuda.is_available()):
            raise InputError(f"device={config.device}: must be cpu, or cuda where torch finds it")

    @abstractmethod
    def train(self, folder: Path) -> None:
        """Train all seeds, from where they were stopped; checkpoints go into `checkpoints/seed<k>`."""

    @abstractmethod
    def judge(self, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
        """Judge all policies on held-out data: the contents of `results.json` and of `decisions.parquet`."""

    def run(self, overrides: list[str]) -> Path:
        """Train, judge and report; returns the run's folder. Repeat it with the same settings to resume an interrupted
        run. `overrides` are the words of the command line. Raises InputError: the folder cannot be used."""
        for note in self.notes:
            say(note)
        with claim(self.config, overrides) as folder:
            say(f"run: {folder}")
            self.train(folder)
            say("judging every policy on held-out data …")
            results, decisions = self.judge(folder)
            results["experiment"] = self.config.experiment
            results["command"] = " ".join(["knobwise train", *map(shlex.quote, overrides)])
            write_decisions(folder, decisions)
            write_results(folder, results)
            report = write_report(folder)
            with tracker_of(self.config, folder, self.table, "evaluate") as tracker:
                drawn = tracker.mode != "disabled"  # pictures take longer to draw than all else here
                tracker.log_results(results, images=result_images(results) if drawn else None)
        print_results(results, Console())
        print(f"report: {report}")
        return folder


def set_up_torch(threads: int = 1) -> None:
    """The number of threads; and TorchRL does not announce what it allocates."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(threads)


def keep_best(folder: Path, scores: Mapping[Path, float]) -> Path:
    """Copy the checkpoints of the best training, of these folders with their validation scores, to the run's own."""
    best = max(scores, key=scores.__getitem__)
    for name in ("best.pt", "last.pt", STUDENT):
        if name != STUDENT or (best / name).exists():
            with written_whole(folder / "checkpoints" / name) as temporary:
                shutil.copyfile(best / name, temporary)
    return best


def train_seed(trainer: Trainer, config: Any, folder: Path) -> Path:
    """Train one seed of a run, or go on where it stopped; gives the folder of its checkpoints."""
    trainer.folder = checkpoints = folder / "checkpoints" / f"seed{trainer.seed}"
    trainer.resume(checkpoints / "last.pt")
    if trainer.finished:
        MetricsFile(folder / "metrics.csv", trainer.seed, trainer.iteration, trainer.logged)
    else:
        # the checkpoint was written before the rows of its own iteration were complete
        step = trainer.iteration - 1
        tracker = tracker_of(config, folder, trainer.table, "train", trainer.seed, step)
        tracker.known = trainer.logged
        with tracker as trainer.log:
            trainer.run()
    return checkpoints


def tracker_of(
    config: Any, folder: Path, table: Any, job_type: str, seed: int | None = None, step: int | None = None
) -> Tracker:
    """The tracker of a run, or of one of its seeds. `step` is where a resumed seed continues; a negative one means from
    the beginning."""
    if isinstance(config, SelectorRun):
        tags = [f"reward-{config.reward.mode}"]
    else:
        tags = [config.policy.structure, config.loss.objective, f"reward-{config.reward.kind}"]
    return Tracker(
        folder,
        name=folder.name,
        experiment=config.experiment,
        job_type=job_type,
        config=asdict(config),
        settings=config.tracking,
        seed=seed,
        tags=list(tags),
        profile=profile_of(table),
        resume_step=step if step is not None and step >= 0 else None,
    )

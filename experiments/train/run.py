"""A run from settings to a report, for controllers and selectors alike: claim a folder, train,
judge, write, report, track."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console

from knobwise.agents.training.trainer import Trainer
from knobwise.common.checks import a_device
from knobwise.common.files import written_whole
from knobwise.common.progress import say
from knobwise.experiments.compare.runs import find_runs
from knobwise.experiments.evidence.decisions import write_decisions
from knobwise.experiments.evidence.run_folder import (
    claim,
    command_of,
    finished_run,
    taken_up_if_damaged,
)
from knobwise.experiments.evidence.summary import profile_of
from knobwise.experiments.report.report import print_results, result_images, write_report
from knobwise.experiments.report.words import write_results
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.settings.words import typed
from knobwise.experiments.tracking.tracker import Tracker, git_commit, wandb_mode
from knobwise.experiments.tracking.wandb_results import scores_by_seed
from knobwise.experiments.tracking.workspace import save_once


class Experiment(ABC):
    """A training of controllers or selectors. Construction refuses settings that cannot work.

    Raises:
        InputError: a device that is not there, tracking that cannot be used.
    """

    table: Any
    """The data to train on, a `ProfileTable` or a `BeamTable`."""
    notes: list[str]
    """Facts about the data that a person should know."""

    def __init__(self, config: Any, threads: int = 1) -> None:
        self.config = config
        set_up_torch(threads)
        wandb_mode(config.tracking)
        a_device(config.device, usable=True)

    @abstractmethod
    def train(self, folder: Path) -> None:
        """Train all seeds, from where they were stopped; checkpoints go into
        `checkpoints/seed<k>`."""

    @abstractmethod
    def judge(self, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
        """Judge all policies on held-out data: the contents of `results.json` and of
        `decisions.parquet`."""

    def run(self, overrides: list[str], named: list[str], once: bool = False) -> Path:
        """Train, judge and report; return the run's folder.

        Repeat it with the same settings to resume an interrupted run.

        Args:
            overrides: the `key=value` words of the command line.
            named: those of them that the run is named after.
            once: whether a finished run of the same settings and data is left as it is.

        Raises:
            InputError: the folder cannot be used.
        """
        # noted first, before anybody edits the code that runs
        commit = git_commit()
        for note in self.notes:
            say(note)
        finished = finished_run(self.config, named, self.table.digest) if once else None
        if finished is not None and not taken_up_if_damaged(finished):
            say(f"finished before and not run again: {finished}")
            return finished
        # the folder stays locked until everything is written
        with claim(self.config, named) as folder:
            say(f"run: {folder}")
            self.train(folder)
            say("judging every policy on held-out data …")
            results, decisions = self.judge(folder)
            started = (folder / "config.yaml").stat().st_mtime
            date = f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M}"
            results |= {
                "experiment": self.config.experiment,
                "command": command_of(overrides),
                "run": {
                    "started": date,
                    "seconds": round(time.time() - started, 1),
                    "commit": commit,
                },
            }
            write_decisions(folder, decisions)
            write_results(folder, results)
            report = write_report(folder)
            mode = track_results(self.config, folder, self.table, results)
        print_results(results, Console())
        print(f"report: {report}")
        if mode == "offline":
            print(f"W&B:    wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*")
        print(f"next:   {next_command(folder)}")
        return folder


def next_command(folder: Path) -> str:
    """Return the command that usually follows a run, as a shell takes it."""
    if (folder / "controller.npz").exists():
        return f"knobwise export {typed('checkpoint', folder)}"
    # to compare takes two
    if len(find_runs([str(folder.parent)])[0]) > 1:
        return f"knobwise compare {shlex.quote(str(folder.parent))}"
    return f"knobwise evaluate {typed('checkpoint', folder)}"


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


def run_logged(trainer: Trainer, config: Any, folder: Path, table: Any, **options: Any) -> None:
    """Run a training to its end, and log it; `options` are more arguments of `Tracker`."""
    with tracker_of(config, folder, table, "train", trainer.seed, **options) as trainer.log:
        trainer.run()


def track_results(config: Any, folder: Path, table: Any, results: Mapping[str, Any]) -> str:
    """Log to W&B the results, and the test scores of each seed in the run that trained it.

    Returns:
        The mode of W&B.
    """
    model = None
    kept = (results.get("best_policy", ""), results.get("best_seed"))
    if wandb_mode(config.tracking) != "disabled":
        for (stage, seed), scores in scores_by_seed(results, folder).items():
            with tracker_of(
                config, folder, table, "train", seed, stage=stage, finished=True
            ) as tracker:
                model = tracker.log_scores(scores, (stage, seed) == kept) or model
    with tracker_of(config, folder, table, "evaluate") as tracker:
        # drawing pictures takes longer than everything else here
        images = result_images(results) if tracker.mode != "disabled" else {}
        tracker.log_results(results, images, model)
    if tracker.mode == "online" and config.tracking.workspace:
        save_once(config.tracking, [knob.name for knob in getattr(table, "knobs", ())])
    return tracker.mode


def tracker_of(
    config: Any,
    folder: Path,
    table: Any,
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
            config.loss.objective,
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

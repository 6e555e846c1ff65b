"""The tracker of a run, which writes the same numbers to its journal, TensorBoard and W&B.

The journal, `metrics.csv` and the files beside it, is what counts: a training that goes on cuts it
back to the checkpoint, and TensorBoard and W&B are made anew from it.

Each seed is one W&B run (job type: train); of a selector, each stage of each seed. One more W&B run
(job type: evaluate) holds the results. Everything lies inside the run's folder, and nothing needs
an account or a network.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import netrc
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from knobwise.agents.training.state import TrainingState
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking.histograms import (
    EDGES,
    counts_in_bins,
    part_histograms,
    values_from_counts,
)
from knobwise.experiments.tracking.metrics_file import MetricsFile, Row, place
from knobwise.experiments.tracking.wandb_run import WandbRun, reason, wandb_run

THROUGHPUT = "Train/Actions_Per_Second"
"""The metric of speed, which differs between equal runs."""
SCORES = ("Val/Utility", "Val/Reward_Mean", "Val/Accuracy_Mean")
"""Columns of TensorBoard's table of hyperparameters: the scores that settings are chosen by."""
LONGEST_NAME = 40
"""The most letters that changed settings take in the name of a W&B run."""
NAME_END = 9
"""The letters at the end of a longer name that stay: the digest in the name of our run."""
MODES = ("online", "offline", "disabled")
WANDB_SERVERS = ("api.forge.coreweave.com", "api.wandb.ai")
"""W&B's own servers as the file of keys has them: of `wandb login` since 0.31, and before."""


def wandb_mode(settings: TrackingSettings) -> str:
    """Return online, offline or disabled: from `settings.mode`, else from WANDB_MODE, else online
    where this machine has a key.

    Raises:
        InputError: if the mode is unknown, online is wanted without a key, or W&B would refuse the
            project or a tag.
    """
    source = "tracking.mode"
    mode = settings.mode
    if mode == "auto":
        source = "WANDB_MODE"
        mode = os.environ.get(source) or ("online" if _has_key() else "offline")
    one_of(source, mode, MODES)
    if mode == "online" and not _has_key():
        raise InputError(
            f"{source}={mode}: needs a key; set WANDB_API_KEY, run `wandb login`, or use "
            "tracking=offline"
        )
    if mode != "disabled":
        _check_names(settings)
    return mode


def project_of(setting: str | None) -> str:
    """Return the W&B project: that of a setting, else of WANDB_PROJECT, else knobwise."""
    return setting or os.environ.get("WANDB_PROJECT") or "knobwise"


def _check_names(settings: TrackingSettings) -> None:
    """Refuse early a project or tags that W&B would refuse when a run begins."""
    import wandb  # slow to import

    project = project_of(settings.project)
    try:
        wandb.Settings(project=project, run_tags=tuple(settings.tags))
    except (wandb.Error, ValueError) as error:
        raise InputError(
            f"tracking.project or WANDB_PROJECT={project}, tracking.tags={settings.tags}: "
            f"W&B says {reason(error)!r}"
        ) from error


@dataclass
class Tracker:
    """A context manager that writes the numbers of one run to metrics.csv, TensorBoard and W&B.

    An exception that leaves the block marks the W&B run as failed. A disabled tracker still writes
    `metrics.csv`. If W&B fails after it has started, a line reports it, and the rest continues.

    Raises:
        InputError: see `wandb_mode`; also if W&B is wanted online but cannot be reached when the
            first seed begins.
    """

    folder: Path
    """The run's folder; the journal, `tensorboard/` and `wandb/` are made inside it."""
    _: KW_ONLY
    name: str
    """The name of our run; `short_name` makes the name of its W&B run."""
    experiment: str
    """The W&B group."""
    job_type: str
    """train or evaluate."""
    config: Mapping[str, Any]
    """The resolved configuration; seed, stage, profile digest and git commit are added."""
    settings: TrackingSettings
    """Where the run is logged."""
    seed: int | None = None
    """None for the results of all seeds."""
    tags: Sequence[str] = ()
    """Tags in addition to those of the settings."""
    profile: Mapping[str, Any] | None = None
    """Facts about the profile as in `results.json`; online the profile becomes an input of the W&B
    run of a seed."""
    stage: str = ""
    """The stage of a selector's training, which becomes part of the names in `metrics.csv`."""
    first: int = 0
    """The step of `metrics.csv` that the stage begins at."""
    state: TrainingState | None = None
    """Where the training stands, to which the journal is cut back; None if only scores or results
    are to come."""

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self._metrics, self._histograms, self._speed = (
            MetricsFile(self.folder / f"{name}.csv", self.seed, self.stage)
            for name in ("metrics", "histograms", "speed")
        )
        self.mode = wandb_mode(self.settings)
        # one event file and one W&B run for each key
        self.key = self.job_type
        if self.seed is not None:
            self.key = f"seed{self.seed}"
        if self.stage:
            self.key += f"/{self.stage}"
        self._tensorboard: Any = None
        self._wandb: WandbRun | None = None
        self._stack = contextlib.ExitStack()

    def _about(self) -> dict[str, Any]:
        """Return the arguments of `wandb.init` that describe the run."""
        settings = self.settings
        # tags that we give replace those of the environment, so these are added again
        from_environment = filter(None, os.environ.get("WANDB_TAGS", "").split(","))
        added = {
            "seed": self.seed,
            "stage": self.stage,
            "profile_digest": (self.profile or {}).get("digest", ""),
            "run": f"{self.experiment}/{self.name}",  # equal for the W&B runs of all seeds
            "git_commit": git_commit(),
        }
        return {
            "mode": self.mode,
            "project": project_of(settings.project),
            "entity": settings.entity,
            "name": short_name(self.experiment, self.name, self.stage, self.seed),
            "group": self.experiment,
            "job_type": self.job_type,
            "notes": settings.notes,
            "tags": list(dict.fromkeys([*settings.tags, *from_environment, *self.tags])),
            # JSON has no infinity, so it becomes the text `inf`
            "config": json.loads(json.dumps({**self.config, **added}), parse_constant=_in_words),
        }

    def __enter__(self) -> Tracker:
        with contextlib.ExitStack() as stack:
            if self.state is not None:
                self._cut_back(self.state)
                if self.settings.tensorboard:
                    self._start_tensorboard(stack)
            if self.mode != "disabled":
                self._start_wandb(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a row of numbers, and histograms of those in tensors [n]. Steps never decrease; of
        a step there may be a validation, and after it an iteration (names with `Train/`)."""
        numbers: dict[str, float] = {}
        speed: dict[str, float] = {}
        counts: dict[str, float] = {}
        for name, value in metrics.items():
            if np.ndim(value):
                counts |= counts_in_bins(name, value)
            elif name == THROUGHPUT:
                speed[name] = float(value)
            else:
                numbers[name] = float(value)
        self._metrics.append(self.first + step, numbers)
        if counts:
            self._histograms.append(self.first + step, counts)
        if speed:
            self._speed.append(self.first + step, speed)
        values = numbers | speed | counts
        self._to_tensorboard(values, step)
        if self._wandb is not None:
            self._wandb.log(values, step)

    def log_scores(self, scores: Mapping[str, float], kept: bool) -> Any:
        """Write the test scores of this seed into the summary of its W&B run.

        Args:
            kept: True if our run keeps the checkpoint of this seed, which is then logged too.

        Returns:
            The artifact of the checkpoint, or None.
        """
        if self._wandb is not None:
            # what describes a finished run is imported when there is one
            from knobwise.experiments.tracking import wandb_results

            with self._wandb.reporting("the test scores"):
                self._wandb.run.summary.update(scores)
                if kept:
                    return wandb_results.log_model(self._wandb.run, self.folder, scores)
        return None

    def log_results(self, results: RunResults, images: Mapping[str, bytes], model: Any) -> None:
        """Write the results of a finished run to W&B, see `wandb_results.log_results`."""
        if self._wandb is not None:
            from knobwise.experiments.tracking import wandb_results

            with self._wandb.reporting("the results"):
                wandb_results.log_results(self._wandb.run, self.folder, results, images, model)

    def _cut_back(self, state: TrainingState) -> None:
        """Remove from the journal what came after the checkpoint, and will come again."""
        # a checkpoint is written before an iteration, and after the validation
        end = place(self.first + state.iteration, []) + bool(state.rows)
        for file in (self._histograms, self._speed):
            file.cut(end)
        missing = state.rows - self._metrics.cut(end)
        if missing > 0:
            say(
                f"{self._metrics.path}: {missing} of {state.rows} rows of {self.key} are missing "
                "or damaged; the training goes on without them"
            )

    def _start_tensorboard(self, stack: contextlib.ExitStack) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        folder = self.folder / "tensorboard" / self.key
        # a process that was killed had written too few rows, or too many. TensorBoard reads the
        # files by name, and two made in one second may have their names in the wrong order
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        writer = SummaryWriter(str(folder), purge_step=0, flush_secs=10)
        stack.callback(writer.close)
        self._tensorboard = writer
        # the table of hyperparameters needs names of scores; no value is logged here
        settings = dict(_single_values({**self.config, "seed": self.seed, "stage": self.stage}))
        for summary in hparams(settings, dict.fromkeys(SCORES, 0.0)):
            self._tensorboard.file_writer.add_summary(summary)
        for step, values in self._rows():
            self._to_tensorboard(values, step)

    def _rows(self) -> list[Row]:
        """Return all rows of the journal, in order, with the steps of the stage."""
        joined: dict[int, Row] = {}
        for file in (self._metrics, self._histograms, self._speed):
            for step, values in file.rows():
                joined.setdefault(place(step, values), (step, {}))[1].update(values)
        first = self.first
        if self.stage and self.state is None:
            # every stage logs its beginning
            first = min((step for step, _ in joined.values()), default=0)
        return [(joined[key][0] - first, joined[key][1]) for key in sorted(joined)]

    def _to_tensorboard(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step into the event file, if there is one."""
        if self._tensorboard is not None:
            numbers, histograms = part_histograms(values)
            for name, number in numbers.items():
                self._tensorboard.add_scalar(name, number, step)
            for name, counts in histograms.items():
                self._tensorboard.add_histogram(name, values_from_counts(counts), step, bins=EDGES)

    def _start_wandb(self, stack: contextlib.ExitStack) -> None:
        """Start the W&B run of this tracker, if W&B starts."""
        key = self.key.replace("/", "-")
        insist = self.settings.mode == "online"
        run = wandb_run(self.folder, key, self._about(), self._rows(), insist)
        self._wandb = stack.enter_context(run)
        if self._wandb is None:
            self.mode = "disabled"
            return
        if self.mode == "online" and self._wandb.run.offline:
            self.mode = self.settings.mode = "offline"  # the next seeds need not wait again
        if self.profile and self.state is not None and self.mode == "online":
            from knobwise.experiments.tracking import wandb_results

            with self._wandb.reporting("the profile"):
                wandb_results.log_profile(self._wandb.run, self.profile)


def short_name(experiment: str, name: str, stage: str = "", seed: int | None = None) -> str:
    """Return the name of a W&B run, such as `controller s0`: the changed settings without their
    sections, or the experiment if nothing was changed; then the stage and the seed. Seeds and
    baselines do not change what a run trains. Of a long name the middle is left out."""
    same = r"default$|seeds-[-\d,]+(?:_|$)|baselines-\w+?(?:_|$)"
    changed = re.sub(rf"(?:(?<=_)|^)(?:{same}|(?:[a-z_]+\.)+(?=[a-z]))", "", name)
    if len(changed) > LONGEST_NAME:
        changed = f"{changed[: LONGEST_NAME - NAME_END - 1]}…{changed[-NAME_END:]}"
    parts = [changed.strip("_"), stage]
    if not any(parts):
        parts = [experiment]
    if seed is not None:
        parts.append(f"s{seed}")
    return " ".join(filter(None, parts))


def _single_values(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that are single values, as TensorBoard takes them."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and key != "tracking":
            yield from _single_values(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float):
            yield prefix + key, value


def _in_words(constant: str) -> str:
    """Return a number that JSON has not, such as `-Infinity`, as Python and Hydra write it."""
    return str(float(constant))


def git_commit() -> str | None:
    """Return the commit of the current folder's repository, or else of the one that this code is
    in, with `-dirty` when files were changed; None without one."""
    for folder in (Path.cwd(), Path(__file__).resolve().parent):
        options = ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
        command = ["git", "-C", str(folder), "describe", *options]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
    return None


def _has_key() -> bool:
    """Return True if the environment holds a key, or the file of `wandb login` has one for the
    server that WANDB_BASE_URL or an earlier `wandb login --host` names, or else for W&B's own."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    saved = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, configparser.Error):
        folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
        saved.read(folder / "settings")
    server = os.environ.get("WANDB_BASE_URL") or saved.get("default", "base_url", fallback="")
    hosts = {urlsplit(server).netloc}
    if not server or hosts.intersection(WANDB_SERVERS):
        hosts = {*WANDB_SERVERS}
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return not hosts.isdisjoint(netrc.netrc(path).hosts)
    return False

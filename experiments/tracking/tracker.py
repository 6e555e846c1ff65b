"""Where a run's numbers go: metrics.csv, TensorBoard and Weights & Biases, the same in all three.

Each seed is one W&B run (job type: train); one more (job type: evaluate) holds the results. Everything lies inside the
run's folder, and nothing needs an account or a network.
"""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from knobwise.common.errors import InputError
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_results
from knobwise.experiments.tracking.metrics_file import MetricsFile, Row
from knobwise.experiments.tracking.wandb_run import WandbRun, reason

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}


def wandb_mode(settings: TrackingSettings) -> str:
    """online, offline or disabled, from `settings.mode`, else WANDB_MODE, else whether this machine has a key.

    Raises:
        InputError: if the mode is unknown, online is wanted without a key, or W&B would refuse the project or a tag.
    """
    explicit = settings.mode != "auto"
    mode = settings.mode if explicit else os.environ.get("WANDB_MODE") or "auto"
    source = "tracking.mode" if explicit else "WANDB_MODE"
    if mode not in ("auto", *MODES):
        auto = "auto, " * explicit
        raise InputError(f"{source}={mode}: unknown mode; use {auto}online, offline or disabled")
    if MODES.get(mode) == "online" and not _has_key():
        raise InputError(f"{source}={mode}: needs a key; set WANDB_API_KEY, run `wandb login`, or use tracking=offline")
    if mode == "auto":
        mode = "online" if _has_key() else "offline"
    if MODES[mode] != "disabled":
        _check_names(settings.project, settings.tags)
    return MODES[mode]


def _check_names(project: str | None, tags: Sequence[str]) -> None:
    """Refuse early what W&B refuses only when a run begins; without a project the one of the environment counts."""
    import wandb  # slow to import

    name = project or os.environ.get("WANDB_PROJECT") or ""
    try:
        wandb.Settings(project=name)
    except wandb.Error as error:
        source = "tracking.project" if project else "WANDB_PROJECT"
        hint = "; tracking.entity names the owner of the project" if "/" in name else ""
        raise InputError(f"{source}={name}: W&B says {reason(error)!r}{hint}") from error
    try:
        wandb.Settings(run_tags=tuple(tags))
    except ValueError as error:
        raise InputError(f"tracking.tags={list(tags)}: W&B says {reason(error)!r}") from error


class Tracker:
    """Writes one run's numbers to every place at once; used as a context manager.

    An exception that leaves the block marks the W&B run as failed. A disabled tracker still writes `metrics.csv`. If
    W&B fails after it has started, a line reports it, and the rest continues.

    Args:
        folder: the run's folder; `metrics.csv`, `tensorboard/` and `wandb/` are made inside it.
        name: of the W&B run; `-seed<k>` is added when there is a seed.
        experiment, job_type: the W&B group; train or evaluate.
        config: the resolved configuration; seed, profile digest, git commit and machine are added to it.
        seed: None for the results of all seeds.
        tags: in addition to those of the settings.
        profile: as in `results.json`; online it becomes an input of the W&B run of a seed.
        resume_step: the step of the checkpoint that training resumes from. Later rows of this seed are dropped; None
            starts from the beginning and drops every earlier row of this seed.

    Raises:
        InputError: see `wandb_mode`; also if W&B is wanted online but cannot be reached when the first seed begins.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        experiment: str,
        job_type: str,
        config: Mapping[str, Any],
        settings: TrackingSettings,
        seed: int | None = None,
        tags: Sequence[str] = (),
        profile: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.folder, self.settings, self.job_type = Path(folder).absolute(), settings, job_type
        self.seed, self.resume_step, self.profile = seed, resume_step, profile
        self.known: Sequence[Row] = ()  # set before the block begins: see `MetricsFile`
        digest = (profile or {}).get("digest", "")
        # `run` is the same for the W&B runs of all seeds
        added = {"profile_digest": digest, "git_commit": git_commit(), "machine": machine(), "run": name}
        whole = {**config, **added} | ({} if seed is None else {"seed": seed})
        from_environment = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]  # ours replace them
        self.about = {
            "project": settings.project or os.environ.get("WANDB_PROJECT") or "knobwise",
            "entity": settings.entity,
            "name": name if seed is None else f"{name}-seed{seed}",
            "group": experiment,
            "job_type": job_type,
            "tags": list(dict.fromkeys([*settings.tags, *from_environment, *tags])),
            "config": _without_infinity(whole),
        }
        self.mode = wandb_mode(settings)
        self._tensorboard: Any = None
        self._wandb: WandbRun | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
        with contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._csv = MetricsFile(self.folder / "metrics.csv", self.seed, self.resume_step, self.known)
            if self.settings.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                folder = self.folder / "tensorboard" / (self.job_type if self.seed is None else f"seed{self.seed}")
                # everything is written again: a killed process had not written its last rows. TensorBoard reads the
                # files by name, and two made in one second may have their names in the wrong order
                for earlier in folder.glob("events.out.tfevents.*"):
                    earlier.unlink()
                self._tensorboard = SummaryWriter(str(folder), purge_step=0, flush_secs=10)
                stack.callback(self._tensorboard.close)
                for step, values in self._csv.kept:
                    self._to_tensorboard(values, step)
            if self.mode != "disabled":
                self._wandb = self._start_wandb(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    @property
    def url(self) -> str | None:
        """The address of the W&B run; None when it is not online."""
        return None if self._wandb is None else self._wandb.url

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers of one training step. Steps never decrease; several calls a step are fine."""
        values = {name: float(value) for name, value in metrics.items()}
        self._csv.append(step, values)
        self._to_tensorboard(values, step)
        if self._wandb is not None:
            self._wandb.log(values, step)

    def log_results(self, results: Mapping[str, Any], images: Mapping[str, bytes] | None = None) -> None:
        """Write the results of a finished run to TensorBoard, and to W&B as `wandb_results.log_results` does."""
        self._to_tensorboard(wandb_results.summaries_of(results), 0)
        if self._wandb is not None:
            with self._wandb.reporting("the results"):
                wandb_results.log_results(self._wandb.run, results, self.folder, images)

    def _to_tensorboard(self, values: Mapping[str, float], step: int) -> None:
        if self._tensorboard is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # one event for all values: add_scalar writes one for each, and costs ten times as much
        event = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._tensorboard.file_writer.add_summary(event, step)

    def _start_wandb(self, stack: contextlib.ExitStack) -> WandbRun | None:
        begun = any((self.folder / "wandb").glob("*.id"))  # trained seeds must not be lost
        insist = self.settings.mode == "online" and not begun
        wandb_run = stack.enter_context(WandbRun(self.folder, self.mode, self.about, self._csv, insist))
        before, self.mode = self.mode, wandb_run.mode
        if self.mode == "disabled":
            return None
        if self.mode != before:
            self.settings.mode = self.mode  # the next seeds need not wait again
        if self.profile is not None and self.job_type == "train" and wandb_run.mode == "online":
            with wandb_run.reporting("the profile"):
                wandb_results.log_profile(wandb_run.run, self.profile)
        return wandb_run


def _without_infinity(value: Any) -> Any:
    """Settings as W&B can keep them: JSON has no infinity, which is `inf` on our command line."""
    if isinstance(value, Mapping):
        return {key: _without_infinity(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinity(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> dict[str, Any]:
    """The machine and the versions of a run, for its configuration."""
    import torch

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git_commit() -> str | None:
    """The commit of the current repository (else of the one this code is in), with `-dirty` when files were changed."""
    for folder in (Path.cwd(), Path(__file__).resolve().parent):
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = {"api.wandb.ai", urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc}
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return bool(hosts & netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser()).hosts.keys())
    return False

"""Where a run's numbers go: metrics.csv, TensorBoard and Weights & Biases, the same in all three.

Each seed is one W&B run (group: the experiment, job type: train); one more (job type: evaluate) carries the results.
Everything lies inside the run's folder, and nothing needs an account or a network.
"""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch

from knobwise.common.errors import InputError
from knobwise.experiments.tracking import sweep_agent, wandb_results
from knobwise.experiments.tracking.metrics_file import MetricsFile
from knobwise.experiments.tracking.wandb_run import WandbRun

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
REFUSED = "/\\#?%:"
"""Characters that no W&B project may have in its name."""
LONGEST_NAME, LONGEST_TAG = 128, 64
"""How many characters W&B takes."""


@dataclass
class TrackingSettings:
    """Where a run is logged. `metrics.csv` is always written."""

    mode: str = "auto"
    """W&B: online, offline, disabled; auto does what WANDB_MODE says, else online when there is a key, else offline."""
    project: str | None = None
    """W&B project; None means WANDB_PROJECT, else knobwise."""
    entity: str | None = None
    """W&B team or user; None means the key's default."""
    tags: list[str] = field(default_factory=list)
    """Put on every W&B run of this experiment."""
    tensorboard: bool = True
    """Write event files into the run's `tensorboard/`."""


def wandb_mode(settings: TrackingSettings) -> str:
    """online, offline or disabled: what `settings.mode`, WANDB_MODE and the keys on this machine come to.

    Raises:
        InputError: an unknown mode, online asked for without a key, or names that W&B would refuse.
    """
    told = settings.mode != "auto"
    mode = settings.mode if told else os.environ.get("WANDB_MODE") or "auto"
    said = f"tracking.mode={mode}" if told else f"WANDB_MODE={mode}"
    if mode not in ("auto", *MODES):
        raise InputError(f"{said}: is no mode of W&B; use {'auto, ' if told else ''}online, offline or disabled")
    if MODES.get(mode) == "online" and not _has_key():
        raise InputError(f"{said}: needs a key; set WANDB_API_KEY, run `wandb login`, or use tracking=offline")
    found = MODES.get(mode) or ("online" if _has_key() else "offline")
    if found != "disabled":
        _check_names(settings.project, settings.tags)
    return found


def _check_names(project: str | None, tags: Sequence[str] = ()) -> None:
    """Refuse what W&B refuses only when a run is begun; a project of None is that of the environment.

    Raises:
        InputError: naming the setting or the variable.
    """
    name = project or os.environ.get("WANDB_PROJECT") or ""
    if len(name) > LONGEST_NAME or any(sign in name for sign in REFUSED):
        said = f"tracking.project={name}" if project else f"WANDB_PROJECT={name}"
        whose = " (tracking.entity is whose project it is)" if "/" in name else ""
        raise InputError(f"{said}: W&B takes at most {LONGEST_NAME} characters, and none of {' '.join(REFUSED)}{whose}")
    for tag in tags:
        if not 1 <= len(tag) <= LONGEST_TAG:
            raise InputError(f"tracking.tags: {tag!r} must have between 1 and {LONGEST_TAG} characters for W&B")


class Tracker:
    """Writes one run's numbers to every place at once; used as a context manager.

    An exception that leaves the block marks the W&B run as failed. A disabled tracker still writes `metrics.csv`, so
    that no caller has to ask whether tracking is on. Where W&B fails after it was started a line says so, and the rest
    goes on.

    Args:
        folder: the run's folder; `metrics.csv`, `tensorboard/` and `wandb/` are made inside it.
        name: how the W&B run is called; `-seed<k>` is added when there is a seed.
        experiment: the W&B group.
        job_type: train or evaluate.
        config: the resolved configuration; seed, profile digest, git commit and machine are added to it.
        seed: which seed this is, or None for what belongs to all of them.
        tags: beside those of the settings.
        profile_digest: `ProfileTable.digest`.
        profile: what else is known of the profile, as in `results.json`: online the W&B run of a seed has it as input.
        resume_step: the step of the checkpoint that training goes on from. Rows of this seed after it are dropped;
            None means from the start, and drops every earlier row of this seed.

    Raises:
        InputError: see `wandb_mode`; W&B asked for online, but not to be reached when the first seed begins.
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
        profile_digest: str = "",
        profile: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.name = name if seed is None else f"{name}-seed{seed}"
        self.experiment, self.job_type, self.settings = experiment, job_type, settings
        self.seed, self.resume_step, self.profile = seed, resume_step, profile
        environment = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]  # ours would replace them
        self.tags = list(dict.fromkeys([*settings.tags, *environment, *tags]))
        self.config = dict(config) | {
            "profile_digest": profile_digest,
            "git_commit": git_commit(),
            "machine": machine(),
        }
        self.config["run"] = name  # what the runs of all its seeds have in common
        if seed is not None:
            self.config["seed"] = seed
        self.sweep = sweep_agent.sweep_job() if job_type == "evaluate" else None
        if self.sweep is not None:
            self.config = self.sweep.config(self.config)
        self.config = _said_plainly(self.config)
        self.mode = wandb_mode(settings)
        self._tensorboard: Any = None
        self._wandb: WandbRun | None = None
        self._after = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
        with contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._csv = MetricsFile(self.folder / "metrics.csv", self.seed, self.resume_step)
            if self.settings.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                self._tensorboard = SummaryWriter(
                    str(self.folder / "tensorboard" / (self.job_type if self.seed is None else f"seed{self.seed}")),
                    purge_step=0,  # all is written again: a process that was killed had not written its last rows
                    flush_secs=10,
                )
                stack.callback(self._tensorboard.close)
                for step, values in self._csv.kept:
                    self._to_tensorboard(values, step)
            if self.mode != "disabled":
                self._wandb = self._start_wandb(stack)
            self._after = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._after.__exit__(kind, error, trace)

    @property
    def url(self) -> str | None:
        """Where the W&B run can be looked at; None when it is not online."""
        return None if self._wandb is None else self._wandb.url

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers that belong to one training step. Steps do not go back; several calls a step are fine."""
        values = {name: float(value) for name, value in metrics.items()}
        self._csv.append(step, values)
        self._to_tensorboard(values, step)
        if self._wandb is not None:
            self._wandb.log(values, step)

    def log_results(
        self,
        results: Mapping[str, Any],
        *,
        images: Mapping[str, bytes] | None = None,
        profile_files: Sequence[str | Path] = (),
    ) -> None:
        """Write what a finished run found (`results.json`), its report and its checkpoint, where they exist.

        The means over the budgets become summaries `Test/<policy>/<number>`; every row goes into the W&B table
        `Test/policies`, what single samples got into `Test/decisions`, and how often knobs were set to what into
        `Test/knob_usage`; numbers per budget become curves `Budget/<policy>/<number>` over `budget_ms`, and so do the
        shares `Knobs/<policy>/<knob>=<value>`; images (name → PNG, from `report.result_images`) become `Charts/<name>`.
        Artifacts: the profile (its digest and sizes; the files only when given), the best checkpoint with the
        configuration.

        Of a selector the summaries are those at the shots of training, the curves `Shots/<policy>/<number>` go over
        `shots`, controls are among the policies, and `Test/differences` is one more table.
        """
        self._to_tensorboard(wandb_results.summaries_of(results), 0)
        if self._wandb is not None:
            with self._wandb.said("the results"):
                wandb_results.log_results(
                    self._wandb.run, results, self.folder, images=images, profile_files=profile_files
                )

    def _to_tensorboard(self, values: Mapping[str, float], step: int) -> None:
        if self._tensorboard is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # one event for all values: add_scalar writes one for each, and costs ten times as much
        event = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._tensorboard.file_writer.add_summary(event, step)

    def _start_wandb(self, stack: contextlib.ExitStack) -> WandbRun | None:
        about = {
            "project": self.settings.project or os.environ.get("WANDB_PROJECT") or "knobwise",
            "entity": self.settings.entity,
            "name": self.name,
            "group": self.experiment,
            "job_type": self.job_type,
            "tags": self.tags,
            "config": self.config,
        }
        begun = any((self.folder / "wandb").glob("*.id"))  # some of it is trained: that is not to be lost
        wandb_run = WandbRun(
            self.folder,
            self.mode,
            about,
            earlier=self._csv.earlier,
            kept=self._csv.kept,
            sweep=self.sweep,
            insist=self.settings.mode == "online" and not begun,
        )
        stack.enter_context(wandb_run)
        if wandb_run.mode == "disabled":
            self.mode = wandb_run.mode
            return None
        if wandb_run.mode != self.mode:
            self.mode = self.settings.mode = wandb_run.mode  # the seeds that follow need not wait again
        if self.profile is not None and self.job_type == "train" and wandb_run.mode == "online":
            with wandb_run.said("the profile"):
                wandb_results.log_profile(wandb_run.run, self.profile)
        return wandb_run


def _said_plainly(value: Any) -> Any:
    """Settings as W&B can keep them: JSON has no infinity, which is `inf` on our command line."""
    if isinstance(value, Mapping):
        return {key: _said_plainly(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_said_plainly(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> dict[str, Any]:
    """What the run ran on, for its configuration."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git_commit() -> str | None:
    """The commit of the repository we are in (else of the one this code is in), `-dirty` when files were changed."""
    for place in (Path.cwd(), Path(__file__).resolve().parent):
        command = ["git", "-C", str(place), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return found.stdout.strip()
    return None


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = {"api.wandb.ai", urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc}
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return bool(hosts & netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser()).hosts.keys())
    return False

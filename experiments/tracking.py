"""Where a run's numbers go: metrics.csv, TensorBoard and Weights & Biases, the same in all three.

Each seed is one W&B run (group: the experiment, job type: train); one more (job type: evaluate) carries the results.
Everything lies inside the run's folder, and nothing needs an account or a network.
"""

from __future__ import annotations

import contextlib
import io
import json
import netrc
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch

from knobwise.envs.errors import InputError
from knobwise.experiments import selector_results
from knobwise.experiments.metrics_file import MetricsFile

MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
LEARNED = ("controller", *selector_results.LEARNED)
"""What is trained, whose numbers go with its checkpoint."""
HIGHER_IS_BETTER = re.compile(r"Reward_Mean|Accuracy_Mean|Utility|Satisfaction|Gap_Closed|/ESS$", re.IGNORECASE)
LOWER_IS_BETTER = re.compile(r"Loss|Latency|Violation", re.IGNORECASE)
PATIENCE_S = 20
"""How long W&B may take to answer when it is online; its own limit is far longer."""


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
        InputError: an unknown mode, or online asked for without a key.
    """
    mode = settings.mode if settings.mode != "auto" else os.environ.get("WANDB_MODE") or "auto"
    if mode == "auto":
        return "online" if _has_key() else "offline"
    if mode not in MODES:
        raise InputError(f"tracking: unknown W&B mode {mode!r}; use auto, online, offline or disabled")
    if MODES[mode] == "online" and not _has_key():
        raise InputError(
            "tracking: W&B mode online needs a key; set WANDB_API_KEY, run `wandb login`, or use mode=offline"
        )
    return MODES[mode]


class Tracker:
    """Writes one run's numbers to every place at once; used as a context manager.

    An exception that leaves the block marks the W&B run as failed. A disabled tracker still writes `metrics.csv`, so
    that no caller has to ask whether tracking is on.

    Args:
        folder: the run's folder; `metrics.csv`, `tensorboard/` and `wandb/` are made inside it.
        name: how the W&B run is called; `-seed<k>` is added when there is a seed.
        experiment: the W&B group.
        job_type: train or evaluate.
        config: the resolved configuration; seed, profile digest, git commit and machine are added to it.
        seed: which seed this is, or None for what belongs to all of them.
        tags: beside those of the settings.
        profile_digest: `ProfileTable.digest`.
        resume_step: the step of the checkpoint that training goes on from. Rows of this seed after it are dropped;
            None means from the start, and drops every earlier row of this seed.

    Raises:
        InputError: see `wandb_mode`; W&B asked for online, but not to be reached.
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
        resume_step: int | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.name = name if seed is None else f"{name}-seed{seed}"
        self.experiment, self.job_type, self.settings = experiment, job_type, settings
        self.seed, self.resume_step = seed, resume_step
        self.tags = list(dict.fromkeys([*settings.tags, *tags]))
        self.config = dict(config) | {
            "profile_digest": profile_digest,
            "git_commit": git_commit(),
            "machine": machine(),
        }
        if seed is not None:
            self.config["seed"] = seed
        self.mode = wandb_mode(settings)
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._defined: set[str] = set()
        self._after = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
        with contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._csv = MetricsFile(self.folder / "metrics.csv", self.seed, self.resume_step)
            if self.settings.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                self._tensorboard = SummaryWriter(
                    str(self.folder / "tensorboard" / (self.job_type if self.seed is None else f"seed{self.seed}")),
                    purge_step=0 if self.resume_step is None else self.resume_step + 1,
                    flush_secs=10,
                )
                stack.callback(self._tensorboard.close)
            if self.mode != "disabled":
                stack.enter_context(_wandb_environment(self.folder / "wandb"))
                self._wandb = self._start_wandb()
            self._after = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._after:
            if self._wandb is not None:
                stopped_well = kind is None or (isinstance(error, SystemExit) and not error.code)
                self._wandb.finish(exit_code=0 if stopped_well else 130 if kind is KeyboardInterrupt else 1)

    @property
    def url(self) -> str | None:
        """Where the W&B run can be looked at; None when it is not online."""
        return self._wandb.url if self.mode == "online" and self._wandb is not None else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers that belong to one training step. Steps do not go back; several calls a step are fine."""
        values = {name: float(value) for name, value in metrics.items()}
        self._csv.append(step, values)
        self._to_tensorboard(values, step)
        if self._wandb is not None:
            for name in values.keys() - self._defined:
                best = "max," if HIGHER_IS_BETTER.search(name) else "min," if LOWER_IS_BETTER.search(name) else ""
                self._wandb.define_metric(name, step_metric="step", summary=f"{best}last")
                self._defined.add(name)
            self._wandb.log({**values, "step": step})

    def log_results(
        self,
        results: Mapping[str, Any],
        *,
        images: Mapping[str, bytes] | None = None,
        profile_files: Sequence[str | Path] = (),
    ) -> None:
        """Write what a finished run found (`results.json`), its report and its checkpoint, where they exist.

        The means over the budgets become summaries `Test/<policy>/<number>`; every row goes into the W&B table
        `Test/policies`; numbers per budget become curves `Budget/<policy>/<number>` over `budget_ms`; images (name →
        PNG, from `report.result_images`) become `Charts/<name>`. Artifacts: the profile (its digest and sizes; the
        files only when given), the best checkpoint with the configuration.

        Of a selector the summaries are those at the shots of training, the curves `Shots/<policy>/<number>` go over
        `shots`, controls are among the policies, and `Test/differences` is a second table.
        """
        rows = [_flat(row) for row in [*results["rows"], *results.get("controls", [])]]
        axis, summarised = "budget_ms", None
        if results.get("system") == "selector":
            axis, summarised = "shots", selector_results.shown_at(results)
        means = _numbers("Test", [row for row in rows if row.get(axis) == summarised])
        self._to_tensorboard(means, 0)
        if self._wandb is None:
            return
        import wandb
        from PIL import Image

        self._wandb.summary.update(means)
        tables = {"Test/policies": rows, "Test/differences": [_flat(row) for row in results.get("differences", [])]}
        shown = {}
        for name, content in tables.items():
            if content:
                columns = list(dict.fromkeys(column for row in content for column in row))
                shown[name] = wandb.Table(columns=columns, data=[[row.get(c) for c in columns] for row in content])
        report = self.folder / "report.html"
        page = {"report": wandb.Html(str(report), inject=False)} if report.exists() else {}
        pictures = {f"Charts/{k}": wandb.Image(Image.open(io.BytesIO(png))) for k, png in (images or {}).items()}
        self._wandb.log({**shown, **page, **pictures})
        head = axis.removesuffix("_ms").capitalize()
        self._wandb.define_metric(axis, hidden=True)
        self._wandb.define_metric(f"{head}/*", step_metric=axis)
        for place in sorted({row[axis] for row in rows if row.get(axis) is not None}):
            numbers = _numbers(head, [row for row in rows if row.get(axis) == place])
            self._wandb.log({axis: place, **numbers})

        profile = dict(results.get("profile", {}))
        data = wandb.Artifact(_artifact_name(f"profile-{profile.get('name', self.name)}"), "dataset", metadata=profile)
        with data.new_file("profile.json") as file:
            file.write(json.dumps(profile, indent=1))
        for path in profile_files:
            data.add_file(str(path))
        self._wandb.log_artifact(data)
        if (self.folder / "checkpoints" / "best.pt").exists():
            # W&B takes at most 100 keys
            learned = {key: value for key, value in means.items() if key.split("/")[1] in LEARNED}
            model = wandb.Artifact(_artifact_name(f"{self.experiment}-{self.name}"), "model", metadata=learned)
            for path in ("checkpoints/best.pt", "config.yaml", "results.json"):
                if (self.folder / path).exists():
                    model.add_file(str(self.folder / path))
            self._wandb.log_artifact(model, aliases=["best"])

    def _to_tensorboard(self, values: Mapping[str, float], step: int) -> None:
        if self._tensorboard is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        # one event for all values: add_scalar writes one for each, and costs ten times as much
        event = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._tensorboard.file_writer.add_summary(event, step)

    def _start_wandb(self) -> Any:
        import wandb

        remembered = self.folder / "wandb" / f"{self.name}.id"  # so that an online run goes on as the same one
        online = self.mode == "online"
        resumed = online and self.resume_step is not None and remembered.exists()
        identity = remembered.read_text().strip() if resumed else os.urandom(4).hex()
        try:
            run = wandb.init(
                project=self.settings.project or os.environ.get("WANDB_PROJECT") or "knobwise",
                entity=self.settings.entity,
                name=self.name,
                group=self.experiment,
                job_type=self.job_type,
                tags=self.tags,
                config=self.config,
                id=identity,
                resume="allow" if resumed else None,
                # a key without a network would otherwise block for minutes, and without a terminal init raises
                settings=wandb.Settings(
                    mode=self.mode, root_dir=str(self.folder), silent=True, console="off", init_timeout=PATIENCE_S
                ),
            )
        except wandb.Error as error:
            if not online:
                raise
            if self.settings.mode == "online":
                raise InputError(f"tracking: W&B cannot be reached ({error}); use mode=offline") from error
            print(f"W&B cannot be reached, so this run is logged offline ({error})", file=sys.stderr)
            self.mode = self.settings.mode = "offline"  # the seeds that follow need not wait again
            return self._start_wandb()
        if online:
            remembered.write_text(identity)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run


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


@contextlib.contextmanager
def _wandb_environment(folder: Path) -> Iterator[None]:
    """Quiet, artifact bodies inside the run's folder, and no empty WANDB_… variable (an empty WANDB_SILENT crashes)."""
    wanted: dict[str, str | None] = {k: None for k, v in os.environ.items() if k.startswith("WANDB_") and not v}
    wanted |= {"WANDB_SILENT": "true", "WANDB_DATA_DIR": str(folder)}
    before = {name: os.environ.get(name) for name in wanted}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _set_environment(wanted)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of results.json with its intervals as two columns; other lists are left out."""
    ends = {f"{k}_{end}": v[i] for k, v in row.items() if k.endswith("ci95") for i, end in enumerate(("low", "high"))}
    return {name: value for name, value in row.items() if not isinstance(value, list)} | ends


def _numbers(head: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{head}/{row['policy']}/{name}": float(value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name not in ("budget_ms", "shots")
    }


def _artifact_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:128]

"""One run in Weights & Biases: started or resumed, and never the reason that training ends.

An interrupted run resumes as the same W&B run, which holds every number once and every step in
order. Each session logs again, now, what the run had logged before. Online, W&B ignores the rows
that it has. Offline, where it cannot continue its file, the new session takes the place of the
earlier ones; that has all but the speed. A run that `waits` for its test scores stays open, so that
it keeps its times and system metrics.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.experiments.tracking.metrics_file import Row

OF_AGENT = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
"""The variables that `wandb agent` sets for a job: the id of a W&B run, its sweep, and a file with
the parameters. A job of ours is several W&B runs; the one with the results, which has the
validation score as a mean over the seeds, belongs to the sweep."""
NOT_FOR_WANDB = (*OF_AGENT, "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_SERVICE")
"""Variables that are hidden from wandb. They are about a single run, but a job of ours is several;
WANDB_SERVICE names the service process of the program that started ours, which may be gone."""
PATIENCE_S = 20
"""Seconds that W&B may take to answer when it is online; its own limit is far longer."""
UPLOAD_S = 600
"""Seconds that W&B may go on uploading after the end. The rest stays in the run's folder, for
`wandb sync`."""
PLOTTED = {
    "Train/Reward_Mean": max,
    "Train/Accuracy_Mean": max,
    "Train/Budget_Violation_Rate": min,
    "Train/Loss": min,
    "Train/KL": None,
    "Train/Entropy": None,
    "Val/Utility": max,
    "Val/Satisfaction_Feasible": max,
    "Val/Budget_Violation_Rate": min,
    "Val/Reward_Mean": max,
    "Val/Accuracy_Mean": max,
    "Val/Beam_Score_Mean": max,
    "Val/Latency_Mean": min,
    "Val/KL": None,
}
"""The dozen numbers that W&B plots by itself, and what is best in a run, if anything is; it plots
the others where somebody asks for them."""
_waiting: dict[tuple[Path, str], WandbRun] = {}
"""The offline runs of this process that wait for their test scores, by folder and key."""


@contextlib.contextmanager
def wandb_run(
    folder: Path,
    key: str,
    about: Mapping[str, Any],
    rows: Sequence[Row],
    earlier: Sequence[Row],
    insist: bool = False,
    waits: bool = False,
) -> Iterator[WandbRun | None]:
    """Start a W&B run, or resume it, for the length of a block; None if W&B does not start.

    An exception that leaves the block marks the run as failed.

    Args:
        folder: the folder of our run; `wandb/` is made inside it.
        key: the name of the file `wandb/<key>.id`, which holds the id of the W&B run.
        about: arguments of `wandb.init`, such as mode (online or offline), project and config.
        rows: what was logged before and still counts.
        earlier: all that was logged before, whether it counts or not.
        insist: whether W&B must be reached when the first W&B run of the folder starts.
        waits: offline, leave the run open after success: this process will log its test scores.

    Raises:
        InputError: if W&B cannot be reached, with `insist`.
    """
    agent = [os.environ.get(name) for name in OF_AGENT]
    with _quiet(folder / "wandb"):
        run = _waiting.pop((folder, key), None)
        try:
            if run is None:
                run = _start(folder, key, about, insist, *agent)
                _log_again(run, rows, earlier)
        except InputError:
            raise
        except Exception as error:
            # even offline, as wandb's own service may not start on a busy machine
            say(f"W&B does not start ({reason(error)}): {about['name']} is not logged")
        exit_code = 1
        try:
            yield run
            exit_code = 0
        finally:
            if run is not None and waits and run.run.offline and exit_code == 0:
                _waiting[folder, key] = run
            elif run is not None:
                run.finish(exit_code)


@dataclass
class WandbRun:
    """A W&B run that never stops the program."""

    run: Any
    """The run as wandb has it."""
    folder: Path
    """The folder of our run."""
    name: str
    """Its name there."""
    replaced: Sequence[Path]
    """The folders of earlier offline sessions, which this one takes the place of."""
    first: int = 0
    """The number of the first row that W&B is sent, see `log`."""
    halved: int = -1
    """The step of which an earlier session logged the validation only, see `log`."""
    number: int = 0
    """The number of the last row."""
    broken: bool = False
    """True after W&B refused numbers; no more are sent."""
    logged: list[Mapping[str, Any]] = field(default_factory=list)
    """What was logged in all sessions."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers of one step; W&B joins all of one step as row 2·step. It takes nothing more
        for a row that an earlier session sent, so a training that was interrupted after a
        validation goes on in row 2·step + 1."""
        if self.broken:
            return
        self.logged.append(values)
        self.number = 2 * step + (step == self.halved and _trains(values))
        self.broken = True
        with self.reporting(f"step {step} and all that follows"):
            if self.number >= self.first:
                self.run.log({**values, "step": step}, step=self.number)
            self.broken = False

    def finish(self, exit_code: int) -> None:
        """End the W&B run."""
        with self.reporting("the end of the run"):
            if self.logged and not self.broken:
                self.run.log({}, step=self.number, commit=True)  # the last row is complete
                self._summarise()
            self.run.finish(exit_code=exit_code)

    def _summarise(self) -> None:
        """Write the last value of what W&B plots into the summary, and the best where that has a
        meaning: W&B's own summary covers this session only."""
        for name, best in PLOTTED.items():
            values = [row[name] for row in self.logged if name in row]
            if values:
                summary = {"last": values[-1]}
                if best is not None:
                    summary[best.__name__] = best(values)
                self.run.summary[name] = summary

    @contextlib.contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Run a block in which W&B may fail: a line reports it, and the program continues."""
        try:
            yield
        except Exception as error:
            say(f"W&B did not take {what} of {self.name} ({reason(error)}); {self.folder} holds it")


def _trains(values: Mapping[str, Any]) -> bool:
    """Return True for numbers of a training iteration, False for those of a validation."""
    return any(name.startswith("Train/") for name in values)


# -- starting --------------------------------------------------------------------------------------


def _start(
    folder: Path,
    key: str,
    about: Mapping[str, Any],
    insist: bool,
    job: str | None,
    sweep: str | None,
    parameters: str | None,
) -> WandbRun:
    """Start a W&B run, or resume it.

    Args:
        job, sweep, parameters: the values of `OF_AGENT`.
    """
    id_file = folder / "wandb" / f"{key}.id"
    identity = None
    replaced: list[Path] = []
    if id_file.exists():
        identity = id_file.read_text().strip()
        replaced = list(folder.glob(f"wandb/offline-run-*-{identity}*"))  # …-1 too
    resume: Any = "allow"
    if about["job_type"] != "evaluate":
        sweep = None
    else:
        # results are logged once, at the end: a run interrupted there has logged none. A job of a
        # sweep has its results in the W&B run that the agent names
        resume = None
        identity = job if sweep else None
    run = _init(folder, insist, {**about, "id": identity, "resume": resume}, sweep)
    id_file.write_text(run.id)
    if sweep and parameters:
        # the sweep looks for `optimiser.lr` and the like in the config
        swept: Any = OmegaConf.load(parameters)
        run.config.update({key: swept[key].value for key in swept if key != "wandb_version"})
    if resume:
        _define_curves(run)
    return WandbRun(run, folder, about["name"], replaced)


def _init(folder: Path, insist: bool, about: dict[str, Any], sweep: str | None) -> Any:
    """Return W&B's own run, which is offline if W&B cannot be reached."""
    import wandb  # slow to import

    # a key without a network could block for minutes, and init without a terminal raises
    about["settings"] = wandb.Settings(
        root_dir=str(folder),
        silent=True,
        console="off",
        init_timeout=PATIENCE_S,
        finish_timeout=UPLOAD_S,
        sweep_id=sweep,
        reinit="create_new",  # others may wait for their scores
    )
    try:
        return wandb.init(**about)
    except wandb.Error as error:
        if about["mode"] == "offline":
            raise
        problem = f"W&B cannot be reached ({error})"
        # after the first seed, training goes on rather than stop
        if insist and not any(folder.glob("wandb/*.id")):
            raise InputError(f"tracking: {problem}; use tracking=offline") from error
        say(f"{problem}, so this run is logged offline")
    # under another id, as wandb still holds this one
    return wandb.init(**about | {"mode": "offline", "id": os.urandom(4).hex()})


def _log_again(run: WandbRun, rows: Sequence[Row], earlier: Sequence[Row]) -> None:
    """Log what the run had logged before, in place of its earlier offline sessions. What `wandb
    sync` has sent of these stays, and the rest is sent after it."""
    synced = any(any(session.glob("*.synced")) for session in run.replaced)
    if earlier:
        last, values = earlier[-1]
        if synced and run.run.offline:
            run.first = 2 * last + 1
            run.replaced = ()
        if not (run.replaced or _trains(values)):
            run.halved = last
    for step, values in rows:
        run.log(values, step)
    if not run.broken:
        for session in run.replaced:
            shutil.rmtree(session)


def _define_curves(run: Any) -> None:
    """Have W&B plot the numbers of `PLOTTED` over the training step, and hide all others."""
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step", hidden=True)
    for name, best in PLOTTED.items():
        summary = "last" if best is None else f"{best.__name__},last"
        run.define_metric(name, step_metric="step", summary=summary)


def reason(error: Exception) -> str:
    """Return the first line of an error's message; for an error of pydantic, its sentence."""
    if hasattr(error, "errors"):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _quiet(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return a block in which wandb says nothing, keeps artifacts in a folder, which is made, and
    knows nothing of `NOT_FOR_WANDB`."""
    folder.mkdir(parents=True, exist_ok=True)
    # an empty WANDB_SILENT makes wandb crash
    empty = [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]
    wanted = {"WANDB_SILENT": "true", "WANDB_DATA_DIR": str(folder)}
    return environment(dict.fromkeys([*empty, *NOT_FOR_WANDB]) | wanted)


@contextlib.contextmanager
def environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for the length of the block; None removes one."""
    before = {name: os.environ.pop(name) for name in wanted if name in os.environ}
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)

"""One run in Weights & Biases: started or resumed, and never the reason that training ends.

A row of the journal is a row there. A run that goes on, be it for its test scores, is sent the
whole journal: online the same W&B run, which takes what comes after its last row; offline, where a
file cannot be continued, a new one in place of the old.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.progress import say
from knobwise.experiments.tracking.histograms import for_wandb
from knobwise.experiments.tracking.metrics_file import Row, ends_step

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


@contextlib.contextmanager
def wandb_run(
    folder: Path,
    key: str,
    about: Mapping[str, Any],
    rows: Sequence[Row],
    insist: bool = False,
) -> Iterator[WandbRun | None]:
    """Start a W&B run, or resume it, for the length of a block; None if W&B does not start.

    An exception that leaves the block marks the run as failed.

    Args:
        folder: the folder of our run; `wandb/` is made inside it.
        key: the name of the file `wandb/<key>.id`, which holds the id of the W&B run.
        about: arguments of `wandb.init`, such as mode (online or offline), project and config.
        rows: what the journal holds of it, with histograms as counts.
        insist: whether W&B must be reached when the first W&B run of the folder starts.

    Raises:
        InputError: if W&B cannot be reached, with `insist`.
    """
    agent = [os.environ.get(name) for name in OF_AGENT]
    with _quiet(folder / "wandb"):
        run = None
        try:
            run = _start(folder, key, about, insist, *agent)
            for step, values in rows:
                run.log(values, step)
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
            if run is not None:
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
    broken: bool = False
    """True after W&B refused numbers; no more are sent."""
    summaries: dict[str, dict[str, float]] = field(default_factory=dict)
    """The last value of what W&B plots, and the best where that has a meaning, of all sessions."""
    waiting: dict[str, float] = field(default_factory=dict)
    """What waits for the rest of its step."""
    step: int = 0
    """The step of what waits."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of a step, unless W&B has the step; all of one step is one row of W&B."""
        if self.broken:
            return
        self._summarise(values)
        if step != self.step:
            self._send()
        self.step = step
        self.waiting |= values
        if ends_step(values):
            self._send()

    def _send(self) -> None:
        """Send what waits: W&B takes a step only once."""
        values, self.waiting = self.waiting, {}
        if not values or self.broken:
            return
        self.broken = True
        with self.reporting(f"step {self.step} and all that follows"):
            # where this session began, or after the row before
            if self.step >= self.run.step:
                steps = dict.fromkeys(map(step_key, values), self.step)
                row = {**for_wandb(values), "step": self.step, **steps}
                self.run.log(row, step=self.step, commit=True)
                changed = self.summaries.keys() & values.keys()
                self.run.summary.update({name: self.summaries[name] for name in sorted(changed)})
            self.broken = False

    def finish(self, exit_code: int) -> None:
        """End the W&B run. If it failed, half a step is not sent: the rest may come later."""
        if exit_code == 0:
            self._send()
        with self.reporting("the end of the run"):
            if self.summaries and not self.broken:
                self.run.summary.update(self.summaries)
            self.run.finish(exit_code=exit_code)

    def _summarise(self, values: Mapping[str, float]) -> None:
        """Count numbers in the summaries. W&B's own cover this session only, and its highest and
        lowest value of a number that was NaN once stay NaN."""
        for name in PLOTTED.keys() & values.keys():
            value, best = values[name], PLOTTED[name]
            summary = self.summaries.setdefault(name, {})
            summary["last"] = value
            if best is not None and not math.isnan(value):
                summary[best.__name__] = best(value, summary.get(best.__name__, value))

    @contextlib.contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Run a block in which W&B may fail: a line reports it, and the program continues."""
        try:
            yield
        except Exception as error:
            say(f"W&B did not take {what} of {self.name} ({reason(error)}); {self.folder} holds it")


def step_key(name: str) -> str:
    """Return the column that TorchRL's `WandbLogger` logs the step of a number in, such as
    `Val/step`. Our rows have it too, beside `step`, so that one panel draws both."""
    prefix, slash, _ = name.rpartition("/")
    return f"{prefix}{slash}step"


def is_job_of_agent() -> bool:
    """Tell whether `wandb agent` started this program, and named the W&B run of its results."""
    return all(os.environ.get(name) for name in OF_AGENT[:2])


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
    """Start a W&B run; online, go on with the one that was begun.

    Args:
        job, sweep, parameters: the values of `OF_AGENT`.
    """
    import wandb  # slow to import

    online = about["mode"] == "online"
    trains = about["job_type"] == "train"
    begun = any(folder.glob("wandb/*.id"))
    id_file = folder / "wandb" / f"{key}.id"
    identity = id_file.read_text() if id_file.exists() else ""
    if identity:
        for session in folder.glob(f"wandb/offline-run-*-{identity}*"):  # …-1 too
            shutil.rmtree(session)
    if not (identity and online):
        identity = _new_identity()
    if trains:
        sweep = None
    elif sweep and job:
        # a job of a sweep has its results in the W&B run that the agent names
        identity = job
    settings: dict[str, Any] = {**about, "settings": _settings(folder, sweep)}
    # noted first, so that whatever is left of it is found
    write_text(id_file, identity)
    try:
        # results that were not logged to their end are replaced
        resume: Any = "allow" if online and trains else None
        run = wandb.init(**settings, id=identity, resume=resume)
    except wandb.Error as error:
        if not online:
            raise
        problem = f"W&B cannot be reached ({error})"
        # after the first seed, training goes on rather than stop
        if insist and not begun:
            id_file.unlink()
            raise InputError(f"tracking: {problem}; use tracking=offline") from error
        say(f"{problem}, so this run is logged offline")
        # under another id, as wandb still holds this one
        identity = _new_identity()
        write_text(id_file, identity)
        run = wandb.init(**settings | {"mode": "offline"}, id=identity)
    if sweep and parameters:
        # the sweep looks for `optimiser.lr` and the like in the config
        swept: Any = OmegaConf.load(parameters)
        run.config.update({key: swept[key].value for key in swept if key != "wandb_version"})
    if trains:
        _define_curves(run)
    return WandbRun(run, folder, about["name"])


def _settings(folder: Path, sweep: str | None) -> Any:
    """Return W&B's own settings of a run."""
    import wandb

    # a key without a network could block for minutes, and init without a terminal raises
    return wandb.Settings(
        root_dir=str(folder),
        silent=True,
        console="off",
        init_timeout=PATIENCE_S,
        finish_timeout=UPLOAD_S,
        sweep_id=sweep,
        reinit="create_new",  # that of another run of the process may not have ended
    )


def _new_identity() -> str:
    """Return an id that no other W&B run has."""
    return os.urandom(4).hex()


def _define_curves(run: Any) -> None:
    """Have W&B plot the numbers of `PLOTTED`, which `WandbRun` summarises, over the training step,
    and hide all others."""
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step", hidden=True)
    for name in PLOTTED:
        run.define_metric(name, step_metric="step", summary="none")


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

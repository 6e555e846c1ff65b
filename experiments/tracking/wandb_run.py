"""One run in Weights & Biases: started or resumed, and never the reason that training ends.

An interrupted run resumes as the same W&B run, which holds every step once and in order. Online,
what `metrics.csv` held when it was interrupted is not sent again. Offline, W&B cannot continue its
file: a later session logs all but the speed again, now, and takes the place of the earlier ones. A
run that `waits` for its test scores stays open, so that it keeps its times and system metrics.
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
LOOKED_AT = {
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
"""The dozen numbers that W&B plots by itself, and what is best in a run; it plots the others where
somebody asks for them."""
_waiting: dict[tuple[Path, str], Any] = {}
"""The offline runs of this process that wait for their test scores, by folder and key."""


@dataclass
class WandbRun:
    """A W&B run; a context manager. An exception that leaves the block marks the run as failed.

    Raises:
        InputError: if W&B cannot be reached, with `insist`.
    """

    folder: Path
    """The folder of our run; `wandb/` is made inside it."""
    mode: str
    """online or offline; disabled after W&B did not start."""
    about: Mapping[str, Any]
    """Arguments of `wandb.init`: project, entity, name, group, job_type, tags, notes, config."""
    key: str
    """The name of the file `wandb/<key>.id`, which holds the id of the W&B run."""
    kept: Sequence[Row]
    """Rows that were logged before and still count."""
    earlier: Sequence[Row]
    """All rows that were logged before."""
    insist: bool
    """Raise if W&B cannot be reached, instead of logging offline."""
    waits: bool = False
    """Offline, leave the run open after success: this process will log its test scores."""
    run: Any = None
    """The run as wandb has it."""
    _broken: bool = False
    """True after W&B refused numbers; no more are sent."""
    _sent: set[tuple[int, str]] = field(default_factory=set)
    """The steps and names of the numbers that earlier sessions sent."""
    _replaced: Sequence[Path] = ()
    """The folders of earlier offline sessions, which this one takes the place of."""
    _step: int | None = None
    """The step of the row that is not complete yet."""
    _summaries: dict[str, dict[str, float]] = field(default_factory=dict)
    """The best and the last value of what W&B plots, over all sessions."""
    _environment: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> WandbRun:
        agent = [os.environ.get(name) for name in OF_AGENT]
        # an empty WANDB_SILENT makes wandb crash
        hidden = [
            name for name, value in os.environ.items() if name.startswith("WANDB_") and not value
        ]
        folder = self.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # wandb is quiet, and keeps artifacts in our folder
        wanted = {"WANDB_SILENT": "true", "WANDB_DATA_DIR": str(folder)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(environment(dict.fromkeys([*hidden, *NOT_FOR_WANDB]) | wanted))
            try:
                self.run = _waiting.pop((self.folder, self.key), None)
                if self.run is None:
                    self.run = self._start(agent)
                else:
                    self.kept = ()  # is in it
            except InputError:
                raise
            except Exception as error:
                # even offline, as wandb's own service may not start on a busy machine
                say(f"W&B does not start ({reason(error)}): {self.about['name']} is not logged")
                self.mode = "disabled"
                return self
            self._environment = stack.pop_all()
        with self.reporting("what earlier sessions logged"):
            # of numbers that were sent this updates the summary only
            for step, values in self.kept:
                self.log(values, step)
            if not self._broken:
                for session in self._replaced:
                    shutil.rmtree(session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        if self.mode == "disabled":
            return
        exit_code = 1
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            exit_code = 0
        elif kind is KeyboardInterrupt:
            exit_code = 130
        with self._environment, self.reporting("the end of the run"):
            if not self._broken:
                if self._step is not None:
                    self.run.log({})  # the last row is complete
                # W&B's own summaries cover this session only
                self.run.summary.update(self._summaries)
                if self.waits and self.mode == "offline" and exit_code == 0:
                    _waiting[self.folder, self.key] = self.run
                    return
            self.run.finish(exit_code=exit_code)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of one step. Steps never decrease; all calls for one step are one row of the
        W&B run."""
        if self._broken:
            return
        self._broken = True
        with self.reporting(f"step {step} and all that follows"):
            self._summarise(values)
            new = {name: value for name, value in values.items() if (step, name) not in self._sent}
            if new:
                if self._step not in (None, step):
                    self.run.log({})  # the row of the step before is complete
                self._step = step
                # W&B joins all that is logged until the row is complete
                self.run.log({**new, "step": step}, commit=False)
            self._broken = False

    @contextlib.contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Run a block in which W&B may fail: a line reports it, and the program continues."""
        try:
            yield
        except Exception as error:
            name = self.about["name"]
            say(f"W&B did not take {what} of {name} ({reason(error)}); {self.folder} holds it")

    def _summarise(self, values: Mapping[str, float]) -> None:
        """Note the last value of each number that W&B plots, and the best where that has a
        meaning."""
        for name in LOOKED_AT.keys() & values:
            summary = self._summaries.setdefault(name, {})
            best = LOOKED_AT[name]
            if best is not None:
                earlier = summary.get(best.__name__, values[name])
                summary[best.__name__] = best(earlier, values[name])
            summary["last"] = values[name]

    # -- starting ----------------------------------------------------------------------------------

    def _start(self, agent: Sequence[str | None], fresh: bool = False) -> Any:
        """Start the W&B run, or resume it; `fresh` starts a new one in any case.

        Args:
            agent: the values of `OF_AGENT`.
        """
        import wandb

        id_file = self.folder / "wandb" / f"{self.key}.id"
        evaluates = self.about["job_type"] == "evaluate"
        online = self.mode == "online"
        before = id_file.read_text().strip() if id_file.exists() else ""
        sessions = [*self.folder.glob(f"wandb/offline-run-*-{before or None}*")]  # …-1 too
        # results are logged once, at the end: a run interrupted there has logged none
        resumes = before and not (fresh or evaluates)
        job = sweep = parameters = None
        if evaluates and not fresh and agent[1]:
            # a job of a sweep has its results in the W&B run that the agent names
            job, sweep, parameters = agent
        identity = job or os.urandom(4).hex()
        if resumes:
            identity = before
        # a key without a network could block for minutes, and init without a terminal raises
        settings = wandb.Settings(
            mode=self.mode,
            root_dir=str(self.folder),
            silent=True,
            console="off",
            init_timeout=PATIENCE_S,
            finish_timeout=UPLOAD_S,
            sweep_id=sweep,
            reinit="create_new",  # others may wait for their scores
        )
        joins: Any = "allow" if resumes and online else None
        try:
            run = wandb.init(**self.about, id=identity, resume=joins, settings=settings)
        except wandb.Error as error:
            if not online:
                raise
            problem = f"W&B cannot be reached ({error})"
            if self.insist:
                raise InputError(f"tracking: {problem}; use tracking=offline") from error
            say(f"{problem}, so this run is logged offline")
            self.mode = "offline"
            return self._start(agent, fresh=True)  # wandb still holds the other one
        id_file.write_text(identity)
        if parameters:
            # the sweep looks for `optimiser.lr` and the like in the config
            swept: Any = OmegaConf.load(parameters)
            run.config.update({key: swept[key].value for key in swept if key != "wandb_version"})
        # what `wandb sync` has sent stays, and the rest is sent after it
        synced = any(self.folder.glob(f"wandb/offline-run-*/run-{before}.*.synced"))
        if sessions and not (synced or run.resumed):
            self._replaced = sessions
        elif run.resumed or (resumes and not online):
            self._sent = {(step, name) for step, row in self.earlier for name in row}
        if not evaluates:
            _define_curves(run)
        return run


def _define_curves(run: Any) -> None:
    """Have W&B plot the numbers of `LOOKED_AT` over the training step, and hide all others."""
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step", hidden=True)
    for name, best in LOOKED_AT.items():
        summary = "last" if best is None else f"{best.__name__},last"
        run.define_metric(name, step_metric="step", summary=summary)


def reason(error: Exception) -> str:
    """Return the first line of an error's message; for an error of pydantic, its sentence."""
    if hasattr(error, "errors"):
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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

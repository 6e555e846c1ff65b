"""One run in Weights & Biases: started, gone on with where it was, and never the reason that training ends.

Whether online or offline, a run that was stopped goes on as the same W&B run: every step is in it once, in order.
Online the server says how far it got, offline the files of the sessions before do (`wandb sync` puts them together).
What the server never got is sent again from `metrics.csv`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from knobwise.common.errors import InputError
from knobwise.experiments.tracking import sweep_agent

NOT_OURS = (*sweep_agent.VARIABLES, "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM", "WANDB_SERVICE")
"""Variables that W&B must not see itself: they are about one run, a job of ours is several; and the process that serves
the program that started ours, which may be gone."""
PATIENCE_S = 20
"""How long W&B may take to answer when it is online; its own limit is far longer."""
UPLOAD_S = 600
"""How long W&B may go on uploading after the end; what is left lies in the run's folder, for `wandb sync`."""
HIGHER_IS_BETTER = re.compile(
    r"Reward_Mean|Accuracy_Mean|Beam_Score_Mean|Utility|Satisfaction|Gap_Closed|/ESS$", re.IGNORECASE
)
LOWER_IS_BETTER = re.compile(r"Loss|Latency|Violation", re.IGNORECASE)
Row = tuple[int, dict[str, float]]
"""A step, and what was logged at it."""


class WandbRun:
    """A W&B run; a context manager. An exception that leaves the block marks the run as failed.

    Args:
        folder: of our run; `wandb/` is made inside it.
        mode: online or offline.
        about: for `wandb.init`: project, entity, name, group, job_type, tags, config.
        earlier: every row that this run logged before it was stopped, in order.
        kept: those of them whose steps training does not go through again.
        sweep: the job of a W&B sweep that this run answers for.
        insist: raise where W&B cannot be reached, instead of logging offline.

    Raises:
        InputError: W&B cannot be reached, with `insist`.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        about: Mapping[str, Any],
        *,
        earlier: Sequence[Row] = (),
        kept: Sequence[Row] = (),
        sweep: sweep_agent.SweepJob | None = None,
        insist: bool = False,
    ) -> None:
        self.folder, self.mode, self.about, self.insist = folder, mode, dict(about), insist
        self.sweep, self.earlier, self.kept = sweep, list(earlier), list(kept)
        self.run: Any = None
        """The `wandb.Run`, once it was started; None, and `mode` disabled, where that failed."""
        self._resumed = self._broken = False
        self._sent: dict[int, set[str]] = {}
        self._waiting: Row = (0, {})
        self._summaries: dict[str, dict[str, float]] = {}
        self._environment = contextlib.ExitStack()

    @property
    def url(self) -> str | None:
        """Where it can be looked at; None when it is not online."""
        return self.run.url if self.mode == "online" else None

    def __enter__(self) -> WandbRun:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_wandb_environment(self.folder / "wandb"))
            try:
                self.run = self._start()
            except InputError:
                raise
            except Exception as error:  # also without a network: its own service may not start on a busy machine
                said = (str(error).strip() or type(error).__name__).splitlines()[0]
                print(f"W&B does not start ({said}), so {self.about['name']} is not logged there", file=sys.stderr)
                self.mode = "disabled"
                return self
            self._environment = stack.pop_all()
        for step, values in self.kept:
            self.log(values, step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mode == "disabled":
            return
        well = kind is None or (isinstance(error, SystemExit) and not error.code)
        with self._environment, self.said("the end of the run"):
            if not self._broken:
                self._send()
                if self._resumed:
                    self.run.summary.update(self._summaries)  # W&B's own are of this session alone
            self.run.finish(exit_code=0 if well else 130 if kind is KeyboardInterrupt else 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of one step. Steps do not go back; all calls for one step are one row of the W&B run."""
        if self._broken:
            return
        self._broken = True
        with self.said(f"step {step} and what follows"):
            if step != self._waiting[0]:
                self._send()
            for name, value in values.items():
                self._summarise(name, value)
            new = {name: value for name, value in values.items() if name not in self._sent.get(step, ())}
            self._waiting = step, self._waiting[1] | new
            self._broken = False

    @contextlib.contextmanager
    def said(self, what: str) -> Iterator[None]:
        """Where W&B fails inside the block a line says so, and all else goes on."""
        try:
            yield
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"W&B did not take {what} of {self.about['name']} ({said}); {self.folder} holds it", file=sys.stderr)

    def _send(self) -> None:
        step, values = self._waiting
        self._waiting = step, {}
        if values:
            self.run.log({**values, "step": step})

    def _summarise(self, name: str, value: float) -> None:
        best = "max" if HIGHER_IS_BETTER.search(name) else "min" if LOWER_IS_BETTER.search(name) else None
        if name not in self._summaries:
            self.run.define_metric(name, step_metric="step", summary=f"{best},last" if best else "last")
            self._summaries[name] = {} if best is None else {best: value}
        found = self._summaries[name]
        if best is not None:
            found[best] = max(found[best], value) if best == "max" else min(found[best], value)
        found["last"] = value

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, fresh: bool = False) -> Any:
        """Init the run, `fresh` as a new one whatever went before."""
        import wandb

        remembered = self.folder / "wandb" / f"{self.about['name']}.id"
        # results are logged once and at the end: whoever was stopped there has not logged any
        again = not fresh and self.about["job_type"] == "train" and remembered.exists()
        identity = remembered.read_text().strip() if again else os.urandom(4).hex()
        if self.sweep is not None:
            identity = self.sweep.run_id
        online = self.mode == "online"
        known = _last_step(self.folder / "wandb", identity) if again and not online else None
        try:
            run = wandb.init(
                **self.about,
                id=identity,
                resume="allow" if again and online else None,
                # a key without a network would otherwise block for minutes, and without a terminal init raises
                settings=wandb.Settings(
                    mode=self.mode,
                    root_dir=str(self.folder),
                    silent=True,
                    console="off",
                    init_timeout=PATIENCE_S,
                    finish_timeout=UPLOAD_S,
                    sweep_id=None if self.sweep is None else self.sweep.sweep_id,
                ),
            )
        except wandb.Error as error:
            if not online:
                raise
            if self.insist:
                raise InputError(f"tracking: W&B cannot be reached ({error}); use tracking=offline") from error
            print(f"W&B cannot be reached, so this run is logged offline ({error})", file=sys.stderr)
            self.mode = "offline"
            return self._start(fresh=True)  # wandb still holds the other one
        remembered.write_text(identity)
        if run.resumed:
            known = run.summary.get("step")
        if known is not None:
            self._resumed = True
            for step, values in self.earlier:
                if step <= known:
                    self._sent.setdefault(step, set()).update(values)
        if self.about["job_type"] == "train":
            run.define_metric("step", hidden=True)
            run.define_metric("*", step_metric="step")
        return run


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """What W&B wrote into the folder of one of its runs, record by record, by its own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    # it writes a log of its own into wandb/ where it is started
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent.parent).stdout
    for line in found.splitlines():
        yield json.loads(line)


def _last_step(folder: Path, identity: str) -> int | None:
    """The last step in the files that sessions of this W&B run left behind; None where there are none."""
    steps = [
        record["history"]["item"].get("step")
        for session in folder.glob(f"*run-*-{identity}")
        for record in records(session)
        if record["type"] == "history"
    ]
    return max((int(step) for step in steps if step is not None), default=None)


@contextlib.contextmanager
def _wandb_environment(folder: Path) -> Iterator[None]:
    """Quiet, artifact bodies inside the run's folder, and no empty WANDB_… variable (an empty WANDB_SILENT crashes)."""
    wanted: dict[str, str | None] = {k: None for k, v in os.environ.items() if k.startswith("WANDB_") and not v}
    wanted |= dict.fromkeys(NOT_OURS)
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

"""One job of a sweep, wherever a launcher runs it, and what it leaves in the sweep's folder for the others to see; and
whether a launcher can run any.

`N.json` says how job N fares. A job in another process writes what it prints into `N.log`, and ends, as by Ctrl-C, when
a file `stop` appears: all of this goes by files, so that it works alike on one machine and on many that share a disk.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from knobwise.common.errors import InputError
from knobwise.common.files import refused_by_system, written_whole
from knobwise.common.interruption import stopped_by_signals
from knobwise.experiments.command_line.settings import settings_of, with_variants
from knobwise.experiments.settings.selector_options import SelectorRun

STOP = "stop"
LOOKED_S = 0.3
"""So often a job in another process looks whether it is to stop."""
ANSWERS_S = 5.0
"""So long a Ray cluster may take to accept a connection."""


def train(config: Any, overrides: list[str]) -> Path:
    """Train a controller or a selector, as the settings say; returns the run's folder.

    Raises:
        InputError: settings or files that cannot be used; nothing has been written then.
    """
    if isinstance(config, SelectorRun):
        from knobwise.experiments.train import selector

        return selector.run(config, overrides)
    from knobwise.experiments.train import controller

    return controller.run(config, overrides)


@dataclass
class Outcome:
    """How a job fares."""

    state: str
    """running, finished, failed or stopped."""
    folder: str | None = None
    """Of its run, when it is finished."""
    seconds: float = 0.0
    """How long it took, this time."""
    error: str | None = None
    """Why it failed, or where it stands when it was stopped, in a line."""
    crashed: bool = False
    """Whether it failed by an error of the program or a full disk, and not by something given that was wrong."""

    def write(self, folder: Path, number: int) -> Outcome:
        """Into the folder of the sweep."""
        with written_whole(folder / f"{number}.json") as temporary:
            temporary.write_text(json.dumps(asdict(self)))
        return self


def read_outcome(folder: Path, number: int) -> Outcome | None:
    """What is known of a job; None before it has begun."""
    path = folder / f"{number}.json"
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


def result_line(run: Path) -> str:
    """What came of a finished run, in a few words: its utility, or the accuracy of each way of post-training."""
    results = json.loads((run / "results.json").read_text())
    if results.get("system") != "selector":
        own = next(row for row in results["rows"] if row["policy"] == "controller" and row["budget_ms"] is None)
        low, high = own["utility_ci95"]
        return f"utility {own['utility']:.3f} [{low:.3f}, {high:.3f}]"
    at = [row for row in results["rows"] if row["shots"] == results["trained_shots"]] or results["rows"]
    found = {row["policy"]: row["accuracy"] for row in at}
    return "accuracy " + ", ".join(f"{name} {found[name]:.3f}" for name in results["variants"] if name in found)


@dataclass(frozen=True)
class Job:
    """What a launcher calls in each job's process. It raises nothing but what stops a process, and returns nothing: how
    it went is in the folder."""

    folder: Path
    """Of the sweep, absolute."""
    jobs: list[list[str]]
    """The words of every job."""
    at: str
    """Folder in which the sweep was launched, which relative paths are meant from."""
    launcher: tuple[str, int]
    """Machine and process that launched it."""

    def __call__(self, config: DictConfig) -> None:
        given = list(HydraConfig.get().overrides.task)
        number = next(i for i, words in enumerate(self.jobs, 1) if with_variants(words) == given)
        if here() == self.launcher:
            self._run(config, number)
        elif not (self.folder / STOP).exists():
            os.chdir(self.at)
            with _output_into(self.folder / f"{number}.log"), _stopped_by(self.folder / STOP):
                self._run(config, number)

    def _run(self, config: DictConfig, number: int) -> None:
        start = time.monotonic()
        Outcome("running").write(self.folder, number)
        try:
            run = train(settings_of(config), self.jobs[number - 1])
            outcome = Outcome("finished", str(run.absolute()))
        except InputError as error:
            outcome = Outcome("failed", error=str(error))
        except Exception as error:
            refused = refused_by_system(error) if isinstance(error, OSError) else None
            if refused is None:
                traceback.print_exc()
                line = str(error).splitlines()[0] if str(error) else "no message"
                refused = 1, f"{type(error).__name__}: {line}"
            outcome = Outcome("failed", error=refused[1], crashed=refused[0] == 1)
        except BaseException as stop:
            where = "; ".join(getattr(stop, "__notes__", ())) or None
            Outcome("stopped", seconds=time.monotonic() - start, error=where).write(self.folder, number)
            if here() == self.launcher:
                raise
            return
        outcome.seconds = time.monotonic() - start
        outcome.write(self.folder, number)


def check_launcher(launcher: DictConfig) -> None:
    """Refuse a launcher that cannot launch, and join the Ray cluster that was named.

    The launcher itself would tell Ray how much memory to take, which a cluster that runs already does not accept; of
    what is joined it lets be. A Ray of our own is our own alone, even where a cluster runs on this machine.

    Raises:
        InputError: no process is allowed, or no Ray cluster answers.
    """
    if launcher.get("n_jobs") == 0:
        raise InputError("hydra.launcher.n_jobs=0: must be at least 1, or -1 for as many jobs as there are cores")
    if not str(launcher._target_).endswith(".RayLauncher"):
        return
    given = launcher.ray.init.get("address")
    address = given if given not in (None, "auto") else os.environ.get("RAY_ADDRESS") or given
    if address in (None, "local"):
        launcher.ray.init.address = "local"
        return
    address = str(address)  # a port alone is read as a number
    key = "hydra.launcher.ray.init.address" if address == str(given) else "RAY_ADDRESS"
    nobody = f"{key}={address}: no Ray cluster answers at {address}"
    if place := re.fullmatch(r"(?:\w+://)?\[?([^/]+?)\]?:(\d+)", address):  # Ray itself tries for long
        try:
            socket.create_connection((place[1], int(place[2])), ANSWERS_S).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise InputError(f"{nobody} ({getattr(error, 'strerror', None) or error})") from error
    import ray

    if not ray.is_initialized():
        try:
            ray.init(**dict(OmegaConf.to_container(launcher.ray.init, resolve=True)))  # type: ignore[arg-type]
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"{nobody} as it should ({said})") from error


def here() -> tuple[str, int]:
    """This machine and this process."""
    return socket.gethostname(), os.getpid()


@contextmanager
def _output_into(path: Path) -> Iterator[None]:
    """Write what this process and its children print to a file: several jobs at once would garble a terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def _stopped_by(path: Path) -> Iterator[None]:
    """Interrupt this process, once, when a file appears or whoever launched it is gone.

    It becomes a process group of its own: a Ctrl-C in the terminal reaches the launcher alone, which makes the file,
    and a process that waits for its next job is not broken by it."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent, ended, busy = os.getppid(), threading.Event(), threading.Lock()

    def look() -> None:
        while not ended.wait(LOOKED_S):
            with busy:
                if not ended.is_set() and (path.exists() or os.getppid() != parent):
                    os.kill(os.getpid(), signal.SIGINT)
                    return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        with stopped_by_signals():
            yield
    finally:
        with busy:
            ended.set()
        thread.join()

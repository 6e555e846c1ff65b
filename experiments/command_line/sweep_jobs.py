"""The jobs of a sweep: running one, wherever the launcher puts it; showing the states of all while
the sweep runs, and reporting them at its end; checking that a launcher can run them.

Each job leaves its state in the sweep's folder: `N.json` for the launching process, and from
another process its output in `N.log`. A job in another process stops, as by Ctrl-C, when a file
`stop` appears. All of this goes by files, so it works alike on one machine and on many that share a
disk.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from knobwise.common.errors import InputError
from knobwise.common.files import WINDOWS, refused_by_system
from knobwise.common.interruption import Held, stopped_by_signals
from knobwise.common.progress import duration, has_terminal, say
from knobwise.experiments.command_line.compose import experiments, question_of
from knobwise.experiments.results.problem import problem_of
from knobwise.experiments.results.sweep_folder import Outcome, read_outcome
from knobwise.experiments.settings.selector_options import SelectorRun

STOP = "stop"
POLL_S = 0.3
"""Seconds between looks of a job in another process for that file, and of the launching process at
the jobs."""
ANSWERS_S = 5.0
"""Seconds within which a Ray cluster must accept a connection."""


def train(config: Any, words: list[str]) -> Path:
    """Train a controller or a selector; returns the run's folder. Raises InputError: settings or
    files that cannot be used; nothing has been written then."""
    experiment: Any
    if config.experiment in experiments():
        question = question_of(config.experiment)
    else:
        question = ""
    config.tracking.notes = config.tracking.notes or question
    if has_terminal():  # where somebody waits for the next line, which takes seconds
        say(
            f"{config.experiment}: {question}\ntraining with seeds={config.seeds}; loading "
            "PyTorch and the data …"
        )
    if isinstance(config, SelectorRun):
        from knobwise.experiments.train.selector import SelectorExperiment as experiment
    else:
        from knobwise.experiments.train.controller import ControllerExperiment as experiment
    return experiment(config).run(words)


def result_line(run: Path) -> str:
    """The result of a finished run in a few words: its utility, or the accuracy of each way of
    post-training."""
    results = json.loads((run / "results.json").read_text())
    if problem_of(results).averaged:
        problem = problem_of(results)
        row = problem.row(results, problem.trained[0], None)
        low, high = row["utility_ci95"]
        return f"utility {row['utility']:.3f} [{low:.3f}, {high:.3f}]"
    rows = [row for row in results["rows"] if row["shots"] == results["trained_shots"]] or results[
        "rows"
    ]
    accuracy = {row["policy"]: row["accuracy"] for row in rows}
    return "accuracy " + ", ".join(
        f"{name} {accuracy[name]:.3f}" for name in results["variants"] if name in accuracy
    )


class Crashed(Exception):
    """A job or its launcher failed by an error of the program."""


class Sweep:
    """The jobs of a sweep, whose states stand in its folder. A launcher calls it in each job's
    process.

    Args:
        folder: of the sweep, absolute.
        jobs: the words of every job.
        configs: the settings of every job.
        in_turn: whether the jobs run in this process, one after the other.
    """

    def __init__(
        self, folder: Path, jobs: list[list[str]], configs: list[Any], in_turn: bool
    ) -> None:
        self.folder = folder
        self.jobs = jobs
        self.configs = configs
        self.in_turn = in_turn
        self.start = os.getcwd()
        self.launcher = this_process()
        (folder / STOP).unlink(missing_ok=True)
        self.done_before = set(self.outcomes("finished"))
        self.announced: dict[int, str] = {}
        self.tick: Callable[[int, str], None] = lambda done, note: None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tick": None}  # only the launching process has a bar

    # -- one job -----------------------------------------------------------------------------------

    def __call__(self, config: DictConfig) -> None:
        """Run the job `config.job`. Raises nothing but KeyboardInterrupt: the result is in the
        folder."""
        if this_process() == self.launcher:
            self.run(config.job)
        elif not self.is_stopped():
            os.chdir(self.start)  # which relative paths refer to
            _write_into(self.folder / f"{config.job}.log")
            with _stopped_by(self.is_stopped):
                self.run(config.job)
            sys.stdout.flush()
        if _is_gone(self.launcher):
            os._exit(1)  # else joblib lets this process wait minutes for its next job

    def is_stopped(self) -> bool:
        """Whether the jobs are told to stop, or the launching process is gone."""
        return (self.folder / STOP).exists() or _is_gone(self.launcher)

    def run(self, number: int) -> None:
        """Train, and write the outcome."""
        start = time.monotonic()
        self._note(number, Outcome("running"))
        try:
            run = train(self.configs[number - 1], self.jobs[number - 1])
            outcome = Outcome("finished", str(run.absolute()))
        except InputError as error:
            outcome = Outcome("failed", error=str(error))
        except Exception as error:
            if isinstance(error, OSError):
                refused = refused_by_system(error)
            else:
                refused = None
            if refused is None:
                traceback.print_exc()
                refused = 1, described(error)
            outcome = Outcome("failed", error=refused[1], crashed=refused[0] == 1)
        except BaseException as stop:
            outcome = Outcome("stopped", error="; ".join(getattr(stop, "__notes__", ())) or None)
            if this_process() == self.launcher:
                raise
        finally:
            outcome.seconds = time.monotonic() - start
            self._note(number, outcome)

    def _note(self, number: int, outcome: Outcome) -> None:
        outcome.write(self.folder, number)
        if self.in_turn:
            self.show()

    # -- all jobs ----------------------------------------------------------------------------------

    @property
    def size(self) -> str:
        """`1 job`, `2 jobs`."""
        return f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)}"

    def settings(self, number: int) -> str:
        """The words of a job that not all jobs have, but its name."""
        words = [word for word in self.jobs[number - 1] if not word.startswith("name=")]
        return " ".join(word for word in words if not all(word in job for job in self.jobs))

    def name(self, number: int) -> str:
        settings = self.settings(number)
        return f"job {number} of {len(self.jobs)}" + (f" ({settings})" if settings else "")

    def outcomes(self, *states: str) -> dict[int, Outcome]:
        """The jobs that are in one of these states, or in any, by their numbers."""
        every = {
            number: read_outcome(self.folder, number) for number in range(1, len(self.jobs) + 1)
        }
        return {
            number: outcome
            for number, outcome in every.items()
            if outcome and outcome.state in (states or [outcome.state])
        }

    def add_notes(self, stop: KeyboardInterrupt) -> None:
        """Note how many jobs are finished and, of jobs in other processes, where each stands."""
        counts = {state: len(self.outcomes(state)) for state in ("finished", "failed", "stopped")}
        note = f"{counts.pop('finished')} of {self.size} are finished"
        stop.add_note(
            ", ".join([note, *(f"{number} {state}" for state, number in counts.items() if number)])
        )
        for number, outcome in {} if self.in_turn else self.outcomes("stopped").items():
            stop.add_note(f"{self.name(number)}: {outcome.error or 'stopped'}")

    @contextmanager
    def watched(self, held: Held) -> Iterator[None]:
        """Show the jobs in other processes, and tell them to stop after a signal."""

        def watch() -> bool:
            self.show()
            if held.number is not None:
                (self.folder / STOP).touch()
            return False

        try:
            with _repeated(watch):
                yield
        finally:
            self.show()

    def show(self) -> None:
        """Say what has changed since the last call."""
        for number, outcome in self.outcomes().items():
            if number in self.done_before or self.announced.get(number) == outcome.state:
                continue
            self.announced[number] = outcome.state
            if outcome.state == "running":
                say(f"{self.name(number)} …")
            elif outcome.state == "failed":
                say(f"{self.name(number)}: failed: {outcome.error}")
            elif outcome.folder is not None:
                result = result_line(Path(outcome.folder))
                say(f"{self.name(number)}: {result}, {duration(outcome.seconds)}")
        running = ", ".join(self.name(number) for number in self.outcomes("running"))
        self.tick(len(self.outcomes("finished", "failed")), running)

    def report(self) -> None:
        """Print the jobs in a table, and the command that compares them.

        Raises:
            InputError: jobs failed for a mistake in what was given.
            Crashed: jobs failed otherwise.
        """
        finished = self.outcomes("finished")
        failed = self.outcomes("failed")
        folders = {
            number: relative(Path(str(outcome.folder))) for number, outcome in finished.items()
        }
        rows = [("job", "settings", "result", "time", "run")]
        for number, folder in folders.items():
            time_taken = duration(finished[number].seconds)
            rows.append(
                (
                    str(number),
                    self.settings(number) or "–",
                    result_line(Path(folder)),
                    time_taken,
                    folder,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows if finished else ():
            # not a rich table: the terminal may wrap a path, but a broken one cannot be copied
            print(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
        if len(folders) > 1:
            print(f"compare them: knobwise compare {shlex.join(_together(list(folders.values())))}")
        if failed:
            number, outcome = next(iter(failed.items()))
            if len(failed) > 1:
                others = f" (and {len(failed) - 1} more of them)"
            else:
                others = ""
            line = (
                f"{self.name(number)}{others}: {outcome.error}; repeat the "
                "command to run the failed jobs again"
            )
            raise Crashed(line) if outcome.crashed else InputError(line)


def _together(folders: list[str]) -> list[str]:
    """The one folder that holds these runs and no others, where there is one."""
    parents = {Path(folder).parent for folder in folders}
    runs = {str(path.parent) for parent in parents for path in parent.glob("*/results.json")}
    if len(parents) == 1 and runs == set(folders):
        return [str(parents.pop())]
    return folders


def relative(path: Path) -> str:
    """A path as a person in this folder would write it."""
    if path.is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return str(path)


def described(error: Exception) -> str:
    """An error of the program in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"


# -- processes -------------------------------------------------------------------------------------


def check_launcher(launcher: DictConfig) -> None:
    """Refuse a launcher that cannot launch, and join the Ray cluster that was named.

    Hydra's launcher would tell Ray how much memory to take, which a running cluster refuses, so the
    cluster is joined here. Without an address Ray is started anew (`local`), also where a cluster
    runs on this machine.

    Raises:
        InputError: no process is allowed, or no Ray cluster answers.
    """
    if launcher.get("n_jobs") == 0:
        raise InputError(
            "hydra.launcher.n_jobs=0: must be at least 1, or -1 for as many jobs as there are cores"
        )
    if not str(launcher._target_).endswith(".RayLauncher"):
        return
    setting = launcher.ray.init.get("address")
    if setting not in (None, "auto"):
        address = setting
    else:
        address = os.environ.get("RAY_ADDRESS") or setting
    if address in (None, "local"):
        launcher.ray.init.address = "local"
        return
    address = str(address)  # Hydra reads a port alone as a number
    if address == str(setting):
        key = "hydra.launcher.ray.init.address"
    else:
        key = "RAY_ADDRESS"
    join_cluster(key, address, dict(OmegaConf.to_container(launcher.ray.init, resolve=True)))  # type: ignore[arg-type]


def join_cluster(key: str, address: str, init: dict[str, Any]) -> None:
    """Join the Ray cluster at an address, which `key` names, with these arguments of `ray.init`.
    Raises InputError if none answers."""
    no_answer = f"{key}={address}: no Ray cluster answers at {address}"
    if place := re.fullmatch(
        r"(?:\w+://)?\[?([^/]+?)\]?:(\d+)", address
    ):  # Ray itself would try for long
        try:
            socket.create_connection((place[1], int(place[2])), ANSWERS_S).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise InputError(
                f"{no_answer} ({getattr(error, 'strerror', None) or error})"
            ) from error
    import ray

    try:
        if not ray.is_initialized():
            ray.init(**init)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{no_answer} as it should ({reason})") from error


def this_process() -> tuple[str, int]:
    """This machine and this process."""
    return socket.gethostname(), os.getpid()


def _is_gone(process: tuple[str, int]) -> bool:
    """Whether a process of this machine has ended; False for those of other machines, and on
    Windows."""
    machine, number = process
    try:
        if machine == socket.gethostname() and not WINDOWS:
            os.kill(number, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@contextmanager
def _repeated(work: Callable[[], bool]) -> Iterator[None]:
    """Do some work every `POLL_S` in another thread, until it gives True or the block ends."""
    ended = threading.Event()
    busy = threading.Lock()

    def repeat() -> None:
        while not ended.wait(POLL_S):
            with busy:
                if ended.is_set() or work():
                    return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with busy:
            ended.set()
        thread.join()


@contextmanager
def _stopped_by(is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Interrupt this process, once, when that holds or its parent is gone.

    The process gets a group of its own: a Ctrl-C in the terminal reaches the launching process
    alone, which makes the file, and does not break a process that waits for its next job."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = os.getppid()

    def interrupt() -> bool:
        stop = is_stopped() or os.getppid() != parent
        if stop:
            os.kill(os.getpid(), signal.SIGINT)
        return stop

    with _repeated(interrupt), stopped_by_signals():
        yield


def _write_into(path: Path) -> None:
    """Write the output of this process and its children to a file: that of several jobs would
    garble a terminal."""
    with path.open("ab") as file:
        for number, stream in enumerate((sys.stdout, sys.stderr), 1):
            stream.flush()
            os.dup2(file.fileno(), number)

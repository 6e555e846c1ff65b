"""Sweeps: `knobwise train -m key=a,b …`, one job after the other or by a launcher at the same time.

Which jobs there are is decided here, all of them are checked before the first is run, and what is finished is not run
again when a sweep goes on. Running them is Hydra's: by its own launcher in turn, by `hydra/launcher=joblib` in the
processes of one machine, by `hydra/launcher=ray` on many.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.types import HydraContext
from joblib import effective_n_jobs
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from knobwise.common.errors import InputError
from knobwise.common.interruption import Held, held_back
from knobwise.common.progress import progress
from knobwise.envs.tables.splits import divide
from knobwise.experiments.command_line.settings import (
    CONF,
    EXPERIMENTS,
    GROUPS,
    composed,
    divided,
    parsed,
    read_settings,
    register,
    schema_of,
    with_variants,
)
from knobwise.experiments.command_line.sweep_jobs import (
    STOP,
    Job,
    Outcome,
    check_launcher,
    here,
    read_outcome,
    result_line,
)
from knobwise.experiments.results.run_folder import claim_folder, run_name
from knobwise.experiments.settings.beams import read_data
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.settings.selector_options import SelectorRun
from knobwise.experiments.tracking.tracker import wandb_mode

QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
"""What a sweep says it says itself."""
STOPPING = "stopping the jobs, which save what they have; once more stops at once"
WATCHED_S = 0.5
"""So often the launching process looks how jobs in others fare."""
WIDEST = 10_000
"""Columns of a table that nothing is to be broken in."""


def jobs_of(schema: str, words: Sequence[str]) -> list[list[str]]:
    """The words of every job of a sweep, in the order in which they are run, ready for `read_settings`.

    A job is one choice for each `key=a,b` of the command line and of the experiment file's `hydra.sweeper.params`; the
    command line holds for a key that both name. Flags and Hydra's own settings are left out.

    Args:
        schema: of `VERBS`.
        words: of the command line.

    Raises:
        InputError: words that cannot be read, an unknown experiment, experiments of both systems, the same job twice.
    """
    own, about_hydra = divided(words)
    swept = {one.key_or_group: one for one in own if one.is_sweep_override()}
    for one in swept.values():
        if not one.is_discrete_sweep():
            raise InputError(f"settings: {one.input_line}: a sweep lists its values, {one.key_or_group}=a,b,…")
    fixed = [one for one in own if not one.is_sweep_override()]
    as_given = {f"{one.get_key_element()}={one.get_value_element_as_str()!s}": str(one.input_line) for one in fixed}
    names = [EXPERIMENTS[schema]]
    for one in own:
        if one.key_or_group == "experiment":
            names = [*one.sweep_string_iterator()] if one.is_sweep_override() else [str(one.value())]
    if any(schema_of("train", [f"experiment={name}"]) != schema for name in names):
        raise InputError(f"experiment={','.join(names)}: selectors and controllers are trained by two commands")
    jobs: list[list[str]] = []
    for name in names:
        hydra = composed(schema, [f"experiment={name}", *about_hydra], with_hydra=True).hydra
        if not str(hydra.sweeper._target_).endswith("BasicSweeper"):
            raise InputError("hydra/sweeper: sweeps are over key=a,b alone; searching is done by W&B sweeps")
        of_file = OmegaConf.to_container(hydra.sweeper.params or OmegaConf.create({}))
        assert isinstance(of_file, dict)
        chosen = [one for one in own if one.key_or_group != "experiment" or "experiment" not in swept]
        named = [f"experiment={name}"] if "experiment" in swept else []
        overrides = parsed([*(f"{key!s}={values!s}" for key, values in of_file.items()), *named])
        found = BasicSweeper.split_arguments([*overrides, *chosen], None)[0]
        jobs += [[as_given.get(word, word) for word in job] for job in found]
    for job in jobs:
        if jobs.count(job) > 1:
            raise InputError(f"settings: {' '.join(job)}: the sweep has this job twice")
    if not jobs:
        raise InputError("settings: the sweep has no job; what a glob(…) in it asks for is not there")
    return jobs


# -- running them ------------------------------------------------------------------------------------------------------


def sweep(schema: str, words: Sequence[str], check: Callable[[Any], None]) -> int:
    """Run every job of a sweep, show how it goes, and say how to compare the runs; gives the exit status.

    One that was stopped goes on: finished jobs are not run again, and one that was in the middle goes on from there.

    Args:
        schema: of `VERBS`.
        words: of the command line.
        check: raises InputError when the settings of a job cannot be used.

    Raises:
        InputError: a mistake in any job or a launcher that cannot be used, before the first has begun; or jobs that
            failed for such a mistake, when all others are done.
    """
    words = _in_order(words)
    jobs = jobs_of(schema, words)
    configs = [read_settings(schema, job) for job in jobs]
    digests = _check(configs)
    for config in configs:
        check(config)
    own, about_hydra = divided(words)
    if not any("hydra/launcher" in word for word in about_hydra):
        about_hydra.append("hydra/launcher=basic")
    launched = composed(schema, [f"runs={json.dumps(configs[0].runs)}", *about_hydra, *QUIET], with_hydra=True)
    check_launcher(launched.hydra.launcher)
    experiments = ",".join(dict.fromkeys(config.experiment for config in configs))
    first = Path(launched.hydra.sweep.dir) / experiments / run_name([str(one.input_line) for one in own])
    described = [
        {"words": job, "settings": hashlib.sha256(OmegaConf.to_yaml(asdict(config)).encode()).hexdigest(), "data": data}
        for job, config, data in zip(jobs, configs, digests, strict=True)
    ]
    try:
        with claim_folder(first, "jobs.yaml", OmegaConf.to_yaml(described)) as folder:
            _Sweep(folder.absolute(), jobs, launched).run()
    except _Crashed as error:
        print(f"knobwise: {error}", file=sys.stderr)
        return 1
    return 0


def _in_order(words: Sequence[str]) -> list[str]:
    """In the order of their keys: the same words in another order are the same sweep. What is said of a key and again
    of something inside it stays as it is, because the last one holds."""
    keys = [word.lstrip("+~").split("=")[0] for word in words]
    plain = [key for key in keys if key not in GROUPS]
    if any(key.startswith(f"{other}.") for key in keys for other in plain):
        return list(words)
    return [word for _, word in sorted(zip(keys, words, strict=True), key=lambda pair: pair[0])]


def _check(configs: Sequence[Any]) -> list[str]:
    """Refuse what would fail in the first moments of a job; what several jobs read is read once. Gives the digest of
    what each job learns from.

    Raises:
        InputError: settings or files that cannot be used.
    """
    read: dict[str, Any] = {}
    digests = []
    for config in configs:
        wandb_mode(config.tracking)
        if isinstance(config, SelectorRun):
            for name in config.variants:
                variant = config.variant(name)
                config.stage(variant, name)
                config.of(variant, name)
            key = repr(config.beams)
            table = read[key] = read.get(key) or read_data(config.beams).table
        else:
            key = repr(config.profile)
            table = read[key] = read.get(key) or read_profile(config.profile)
            divide(table, **asdict(config.split))
        digests.append(table.digest)
    return digests


class _Crashed(Exception):
    """A job, or what should have run it, failed by an error of the program."""


class _Sweep:
    def __init__(self, folder: Path, jobs: list[list[str]], launched: DictConfig) -> None:
        self.folder, self.jobs, self.launched = folder, jobs, launched
        (folder / STOP).unlink(missing_ok=True)
        for number in range(1, len(jobs) + 1):
            outcome = read_outcome(folder, number)
            if outcome and not (outcome.folder and (Path(outcome.folder) / "results.json").exists()):
                (folder / f"{number}.json").unlink()
        self.done_before = set(self._outcomes("finished"))
        self.said: dict[int, str] = {}
        self.begun: dict[int, float] = {}

    def run(self) -> None:
        """Launch what is not finished, and say what came of it."""
        left = [number for number in self._numbers() if read_outcome(self.folder, number) is None]
        at_once = "" if self._in_turn else f" at the same time; what they print is in {_near(self.folder)}/*.log"
        _say(f"sweep: {_count(len(self.jobs), 'job')}{at_once}")
        if self.done_before:
            _say(f"{len(self.done_before)} of them finished before, not run again")
        job = Job(self.folder, self.jobs, os.getcwd(), here())
        with progress("jobs", len(self.jobs), len(self.done_before), every_s=math.inf) as self.tick:
            try:
                if self._in_turn:
                    self._launch(left, lambda config: self._one(job, config))
                else:
                    with held_back(say=STOPPING) as held, self._watched(held):
                        self._launch_elsewhere(left, job, held)
            except KeyboardInterrupt as stop:
                self._tell_where(stop)
                raise
            except Exception as error:  # not of a job, which keeps its own to itself
                lost = ", ".join(self.name(number) for number in self._outcomes("running")) or "the launcher"
                what = next(iter(str(error).splitlines()), "no message")
                raise _Crashed(f"{lost}: {type(error).__name__}: {what}; the same command goes on") from error
        self._report()

    def _tell_where(self, stop: KeyboardInterrupt) -> None:
        """Note how far the sweep is, and of jobs in other processes where each stands: they could not say it here."""
        states = {state: self._outcomes(state) for state in ("finished", "failed", "stopped")}
        others = [f"{len(states[state])} {state}" for state in ("failed", "stopped") if states[state]]
        said = f"{len(states['finished'])} of {_count(len(self.jobs), 'job')} are finished"
        stop.add_note(", ".join([said, *others]))
        if not self._in_turn:
            for number, outcome in states["stopped"].items():
                stop.add_note(f"{self.name(number)}: {outcome.error or 'stopped'}")

    def name(self, number: int) -> str:
        """What a job is called."""
        apart = self.apart(number)
        return f"job {number} of {len(self.jobs)}" + (f" ({apart})" if apart else "")

    def apart(self, number: int) -> str:
        """The settings that not all jobs have."""
        return " ".join(word for word in self.jobs[number - 1] if not all(word in job for job in self.jobs))

    @property
    def _in_turn(self) -> bool:
        launcher = self.launched.hydra.launcher
        # joblib starts no process for one job at a time
        return ("n_jobs" in launcher and effective_n_jobs(launcher.n_jobs) == 1) or "Basic" in str(launcher._target_)

    def _numbers(self) -> range:
        return range(1, len(self.jobs) + 1)

    def _outcomes(self, state: str) -> dict[int, Outcome]:
        found = {number: read_outcome(self.folder, number) for number in self._numbers()}
        return {number: outcome for number, outcome in found.items() if outcome and outcome.state == state}

    def _launch(self, numbers: Sequence[int], task: Callable[[DictConfig], None]) -> None:
        if not numbers:
            return
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            launcher = Plugins.instance().instantiate_launcher(context, task, self.launched)
            words = [with_variants(self.jobs[number - 1]) for number in numbers]
            for ended in launcher.launch(words, initial_job_idx=0):
                if ended.status == JobStatus.FAILED:  # before it began: on a machine without our folder, say
                    raise ended._return_value

    def _launch_elsewhere(self, numbers: Sequence[int], job: Job, held: Held) -> None:
        try:
            self._launch(numbers, job)
        except Exception:
            held.check()  # a process that was stopped before it began its job is missed by the launcher
            raise

    def _one(self, job: Job, config: DictConfig) -> None:
        """A job in this process."""
        number = next(number for number in self._numbers() if read_outcome(self.folder, number) is None)
        _say(f"{self.name(number)} …")
        self.said[number], self.begun[number] = "running", time.monotonic()
        self.tick(self._ended(), self.name(number))
        job(config)
        self._look()

    @contextmanager
    def _watched(self, held: Held) -> Iterator[None]:
        """Look after jobs in other processes, and pass on the wish to stop."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(WATCHED_S):
                self._look()
                if held.asked is not None:
                    (self.folder / STOP).touch()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._look()

    def _ended(self) -> int:
        return len(self._outcomes("finished")) + len(self._outcomes("failed"))

    def _look(self) -> None:
        """Say what has changed since."""
        for number in self._numbers():
            outcome = read_outcome(self.folder, number)
            if outcome is None or number in self.done_before or self.said.get(number) == outcome.state:
                continue
            self.said[number] = outcome.state
            if outcome.state == "running":
                self.begun[number] = time.monotonic()
                _say(f"{self.name(number)} …")
            elif outcome.state == "failed":
                _say(f"{self.name(number)}: failed: {outcome.error}")
            elif outcome.folder is not None:
                result = result_line(Path(outcome.folder))
                _say(f"{self.name(number)}: {result}, {_time(outcome.seconds)}{self._left()}")
        running = ", ".join(self.name(number) for number in self._outcomes("running"))
        self.tick(self._ended(), running)

    def _left(self) -> str:
        """How long the rest takes, when every job takes as long as those of this session on average; nothing where all
        run already, and for longer than that."""
        took = [one.seconds for number, one in self._outcomes("finished").items() if number not in self.done_before]
        each, now, running = sum(took) / len(took), time.monotonic(), self._outcomes("running")
        waiting = len(self.jobs) - self._ended() - len(running)
        seconds = waiting * each + sum(max(0.0, each - (now - self.begun.get(number, now))) for number in running)
        left = seconds / max(1, len(running))
        return f"; {_time(max(1.0, left))} left" if waiting or left >= 1 else ""

    def _report(self) -> None:
        """The jobs in a table, and what can be done next.

        Raises:
            InputError: some failed, by what was given.
            _Crashed: some failed otherwise.
        """
        finished, failed = self._outcomes("finished"), self._outcomes("failed")
        table = Table(box=None, pad_edge=False)
        for column in ("job", "settings", "result", "time", "run"):
            table.add_column(column, overflow="fold")
        folders = [_near(Path(str(outcome.folder))) for outcome in finished.values()]
        for (number, outcome), folder in zip(finished.items(), folders, strict=True):
            settings = self.apart(number) or "–"
            cells = [str(number), settings, result_line(Path(folder)), _time(outcome.seconds), folder]
            table.add_row(*(cell.replace("[", r"\[") for cell in cells))
        if finished:
            console = Console()
            width = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
            # in a terminal pieces of a path cannot be copied; whoever reads a file has room
            if narrow := sys.stdout.isatty() and width > console.width:
                table.columns.pop()
            Console(width=None if narrow else width).print(table)
            if narrow:
                print(*(f"job {number}: {folder}" for number, folder in zip(finished, folders, strict=True)), sep="\n")
        if len(folders) > 1:
            print(f"compare them: knobwise compare {shlex.join(_together(folders))}")
        if failed:
            number, outcome = next(iter(failed.items()))
            others = f" (and {len(failed) - 1} more of them)" if len(failed) > 1 else ""
            line = f"{self.name(number)}{others}: {outcome.error}; the same command runs what failed again"
            raise _Crashed(line) if outcome.crashed else InputError(line)


def shown_by_hydra(schema: str, words: Sequence[str]) -> None:
    """What Hydra's own flags ask for, such as `--cfg job`: what is composed, and from where."""
    register()
    flags = [word for word in words if word.startswith("-")]
    others = [word for word in words if word not in flags]
    # Hydra wants its flags first, each with its own word behind it
    behind = [word for word in others if "=" not in word]
    sys.argv = ["knobwise train", *flags, *behind, *with_variants([word for word in others if "=" in word])]
    hydra.main(config_path=str(CONF), config_name=schema, version_base="1.3")(lambda config: None)()


def _together(folders: list[str]) -> list[str]:
    """The one folder that holds these runs and no others, where there is one."""
    above = {Path(folder).parent for folder in folders}
    there = {str(path.parent) for parent in above for path in parent.glob("*/results.json")}
    return [str(above.pop())] if len(above) == 1 and there == set(folders) else folders


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _near(path: Path) -> str:
    """A path as a person here would write it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _say(line: str) -> None:
    with suppress(AttributeError, OSError, ValueError):  # nobody may be there to read it
        print(line, file=sys.stderr, flush=True)

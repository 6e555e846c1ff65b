"""Sweeps: `knobwise train -m key=a,b …`, one job after the other or several at the same time.

Hydra's multirun and launchers run the jobs: its own launcher in turn, `hydra/launcher=joblib` in
processes of this machine, `hydra/launcher=ray` on many. This module decides which jobs there are,
checks all of them before the first one starts, leaves out those that are finished, and reports.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.types import Override
from joblib import effective_n_jobs
from omegaconf import OmegaConf

from knobwise.common.errors import InputError
from knobwise.common.interruption import held_back
from knobwise.common.progress import progress, say
from knobwise.experiments.command_line import compose
from knobwise.experiments.command_line.compose import GROUPS, composed, read_settings
from knobwise.experiments.command_line.sweep_jobs import (
    Crashed,
    Sweep,
    check_launcher,
    described,
    relative,
)
from knobwise.experiments.results.run_folder import UNFINISHED, claim_folder, finished_run, run_name
from knobwise.experiments.results.sweep_folder import Outcome, read_outcome
from knobwise.experiments.settings.options import EXPERIMENTS
from knobwise.experiments.settings.selector_options import SelectorRun

JOBS = "jobs.yaml"
QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
STOPPING = "stopping the jobs, which save what they have; interrupt again to stop at once"


def jobs_of(schema: str, words: Sequence[str]) -> list[list[str]]:
    """The words of every job of a sweep, in the order in which they run, ready for `read_settings`.

    A job is one choice for each `key=a,b` of the command line and of `hydra.sweeper.params` in the
    experiment's file; the command line holds for a key that both name. Flags and Hydra's own
    options are left out.

    Raises:
        InputError: words that cannot be read, an unknown experiment, experiments of both systems,
            the same job twice.
    """
    about_hydra = _about_hydra(words)
    overrides = compose.parsed(
        [word for word in words if not word.startswith("-") and word not in about_hydra]
    )
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise InputError(
                f"{override.input_line}: a sweep lists values, as in {override.key_or_group}=a,b"
            )
    choices = {override.get_key_element(): _choices(override) for override in overrides}
    named = "experiment" in choices
    typed = choices.pop("experiment", [f"experiment={EXPERIMENTS[schema]}"])
    names = [word.partition("=")[2].strip("'\"") for word in typed]
    if any(compose.schema_of("train", [f"experiment={name}"]) != schema for name in names):
        raise InputError(
            f"experiment={','.join(names)}: train selectors and controllers with two commands"
        )
    jobs: list[list[str]] = []
    for name in names:
        sweeper = composed(
            schema, [f"experiment={name}", *about_hydra], with_hydra=True
        ).hydra.sweeper
        if not str(sweeper._target_).endswith("BasicSweeper"):
            raise InputError(
                "hydra/sweeper: sweeps run over key=a,b only; to search, use W&B sweeps"
            )
        of_file = compose.parsed(
            [f"{key}={values}" for key, values in (sweeper.params or {}).items()]
        )
        every = {override.get_key_element(): _choices(override) for override in of_file}
        every |= ({"experiment": [f"experiment={name}"]} if named else {}) | choices
        jobs += [list(job) for job in itertools.product(*every.values())]
    for job in jobs:
        if jobs.count(job) > 1:
            raise InputError(f"{' '.join(job)}: the sweep has this job twice")
    if not jobs:
        raise InputError("the sweep has no job; its glob(…) matches nothing")
    return jobs


def _choices(override: Override) -> list[str]:
    """The words that a word of a sweep stands for; a word with one value stays as it is."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _about_hydra(words: Sequence[str]) -> list[str]:
    """The words that set options of Hydra itself. Raises InputError: Ray is asked for and not
    installed."""
    about_hydra = [word for word in words if re.match(compose.ABOUT_HYDRA, word)]
    missing = find_spec("ray") is None or find_spec("hydra_plugins.hydra_ray_launcher") is None
    if missing and any(word.lstrip("+").startswith("hydra/launcher=ray") for word in about_hydra):
        raise InputError(
            "hydra/launcher=ray: Ray is not installed; install it with `pip install "
            "'knobwise[ray]'`"
        )
    return about_hydra


# -- running them ----------------------------------------------------------------------------------


def run_sweep(schema: str, words: Sequence[str], check: Callable[[Any], None]) -> int:
    """Run every job of a sweep, show progress, and say how to compare the runs; gives the exit
    status. After an interruption, it resumes the job that was interrupted and leaves out the
    finished ones.

    Args:
        check: raises InputError when the settings of a job cannot be used.

    Raises:
        InputError: a mistake in any job or a launcher that cannot be used, before the first job
            starts; or, after all others are done, jobs that failed for such a mistake.
    """
    compose.check_flags(schema, words, allowed=compose.MULTIRUN)
    words = _in_order(words)
    jobs = _named_apart(jobs_of(schema, words))
    configs = [read_settings(schema, job) for job in jobs]
    for config in configs:
        check(config)
    content = [
        {
            "words": job,
            "settings": hashlib.sha256(OmegaConf.to_yaml(asdict(config)).encode()).hexdigest(),
            "data": data,
        }
        for job, config, data in zip(jobs, configs, _digests(configs), strict=True)
    ]
    about_hydra = _about_hydra(words)
    if not any("hydra/launcher" in word for word in about_hydra):
        about_hydra.append("hydra/launcher=basic")
    launched = composed(
        schema, [f"runs={json.dumps(configs[0].runs)}", *about_hydra], with_hydra=True
    ).hydra
    launcher = launched.launcher
    check_launcher(launcher)
    settings = [word for word in words if not word.startswith("-") and word not in about_hydra]
    if OmegaConf.select(launcher, "ray.init.address") == "local":
        about_hydra.append("hydra.launcher.ray.init.address=local")
    experiments = ",".join(dict.fromkeys(config.experiment for config in configs))
    names = {word.removeprefix("name=") for word in settings if re.fullmatch(r"name=[\w.-]+", word)}
    first = Path(launched.sweep.dir) / experiments / (names.pop() if names else run_name(settings))
    # joblib starts no process for one job at a time
    in_turn = "Basic" in str(launcher._target_) or effective_n_jobs(launcher.get("n_jobs", 2)) == 1
    try:
        with claim_folder(first, JOBS, OmegaConf.to_yaml(content)) as folder:
            _take_up(folder, jobs, configs)
            sweep = Sweep(folder.absolute(), jobs, configs, in_turn)
            _run(sweep, [word for word in about_hydra if "hydra.sweeper" not in word])
            sweep.report()
    except Crashed as error:
        say(f"knobwise: {error}")
        return 1
    return 0


def _named_apart(jobs: list[list[str]]) -> list[list[str]]:
    """The jobs, each with what only it has behind a name that all were given."""
    shared = [word for word in jobs[0] if all(word in job for job in jobs)]
    name = next((word for word in shared if word.startswith("name=")), None)
    if name is None or len(jobs) == 1:
        return jobs
    named = []
    for job in jobs:
        differs = run_name([word for word in job if word not in shared])
        named.append([f"{name}-{differs}" if word == name else word for word in job])
    return named


def _take_up(folder: Path, jobs: Sequence[list[str]], configs: Sequence[Any]) -> None:
    """Leave no outcome but those of finished jobs, also of those that were killed before they could
    note it."""
    since = min(
        (folder / name).stat().st_mtime for name in (JOBS, UNFINISHED)
    )  # one of them may be written again
    for number, (words, config) in enumerate(zip(jobs, configs, strict=True), 1):
        outcome = read_outcome(folder, number)
        if outcome and outcome.folder and (Path(outcome.folder) / "results.json").exists():
            continue
        if run := finished_run(config, words, since):
            Outcome("finished", str(run.absolute())).write(folder, number)
        else:
            (folder / f"{number}.json").unlink(missing_ok=True)


def _in_order(words: Sequence[str]) -> list[str]:
    """The words in the order of their keys, so that the same words in another order are the same
    sweep. Where a key and a part of it are both set, the order counts and stays."""
    keys = [word.lstrip("+~").split("=")[0] for word in words]
    whole = [key for key in keys if key not in GROUPS]
    if any(key.startswith(f"{other}.") for key in keys for other in whole):
        return list(words)
    return [word for _, word in sorted(zip(keys, words, strict=True), key=lambda pair: pair[0])]


def _digests(configs: Sequence[Any]) -> list[str]:
    """The digest of the data that each job learns from, each file being read once. Raises
    InputError: settings or files that would make a job fail in its first moments."""
    from knobwise.envs.tables.divisions import divide
    from knobwise.experiments.settings.beams import read_data
    from knobwise.experiments.settings.profiles import read_profile
    from knobwise.experiments.tracking.tracker import wandb_mode

    tables: dict[str, Any] = {}
    digests = []
    for config in configs:
        wandb_mode(config.tracking)
        is_selector = isinstance(config, SelectorRun)
        key = repr(config.beams if is_selector else config.profile)
        if is_selector:
            for name in config.variants:
                config.plan(name)
        if key not in tables:
            if is_selector:
                tables[key] = read_data(config.beams).table
            else:
                tables[key] = read_profile(config.profile)
        if not is_selector:
            divide(tables[key], **asdict(config.split))
        digests.append(tables[key].digest)
    return digests


def _run(sweep: Sweep, about_hydra: Sequence[str]) -> None:
    """Launch the jobs that are not finished. Raises Crashed: the launcher failed."""
    done = len(sweep.done_before)
    total = len(sweep.jobs)
    if sweep.in_turn:
        others = ""
    else:
        others = f" at the same time; their output is in {relative(sweep.folder)}/*.log"
    say(f"sweep: {sweep.size}{others}")
    if done:
        say(f"finished before and not run again: {done} of them{_with_other_code(sweep)}")
    waiting = [str(number) for number in range(1, total + 1) if number not in sweep.done_before]
    arguments = ["-m", f"job={','.join(waiting)}", *about_hydra, *QUIET]
    arguments.append(f"hydra.sweep.dir={json.dumps(str(sweep.folder))}")
    with progress("jobs", total, done, every_s=math.inf) as sweep.tick:
        try:
            if waiting and sweep.in_turn:
                _run_by_hydra(arguments, compose.SWEEP, sweep)
            elif waiting:
                with held_back(say=STOPPING) as held, sweep.watched(held):
                    try:
                        _run_by_hydra(arguments, compose.SWEEP, sweep)
                    except Exception:
                        # a launcher misses a process that was stopped before it began its job
                        held.check()
                        raise
        except KeyboardInterrupt as stop:
            sweep.add_notes(stop)
            raise
        except Exception as error:  # of the launcher: jobs keep theirs to themselves
            lost = (
                ", ".join(sweep.name(number) for number in sweep.outcomes("running"))
                or "the launcher"
            )
            raise Crashed(f"{lost}: {described(error)}; repeat the command to resume") from error


def _with_other_code(sweep: Sweep) -> str:
    """How many of the jobs that finished before were trained by other code than this."""
    from knobwise.experiments.report.words import read_results
    from knobwise.experiments.tracking.tracker import code_digest

    now = code_digest()
    runs = [Path(str(outcome.folder)) for outcome in sweep.outcomes("finished").values()]
    others = sum(read_results(run).get("run", {}).get("code", now) != now for run in runs)
    if others:
        return f", {others} by other code; another name=… trains all anew"
    return ""


def _run_by_hydra(words: list[str], config: str, task: Callable[[Any], None]) -> None:
    """Have Hydra run a task as if the command line were this."""
    compose.register()
    before = sys.argv
    sys.argv = ["knobwise train", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # it raises errors instead of printing them
    try:
        hydra.main(config_path=None, config_name=config, version_base="1.3")(task)()
    finally:
        sys.argv = before

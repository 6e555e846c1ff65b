"""Runs a study: trains every experiment that a YAML file lists, and writes a page that compares
them.

    python experiments/studies/study.py key=value …

The default study, `reference.yaml`, writes docs/results.md; it takes an hour and a half to two
hours on two cores. Finished runs are kept, interrupted runs resume, experiments with the same
settings share a run, and the page shows what is finished.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.interruption import status_of, stopped_by_signals
from knobwise.common.processes import in_processes
from knobwise.common.progress import progress
from knobwise.experiments.command_line import sweep_jobs
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.sweep import jobs_of
from knobwise.experiments.compare.runs import dotted, read_settings_of
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.results.run_folder import LEFT_OUT_OF_NAME, run_name
from knobwise.experiments.studies.page import Study, StudyRun, results_page

FAILED = "failed: "


@dataclass
class ReferenceConfig:
    """The settings, each as key=value."""

    study: str = str(Path(__file__).with_name("reference.yaml"))
    """The study: a YAML file like `reference.yaml`."""
    experiments: list[str] = field(default_factory=list)
    """Experiments to run; empty for all of them. The page shows all that are finished."""
    profiles: list[str] = field(default_factory=list)
    """Profiles to train controllers on (builtin, calibrated); empty for all of them."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """Training seeds."""
    runs: str = "runs"
    """Where the runs are kept."""
    out: str = "docs/results.md"
    """The page."""
    jobs: int = 2
    """Runs at the same time, one thread each."""


def read_study(path: str = ReferenceConfig.study) -> Study:
    """Read a study.

    Raises:
        InputError: there is no such file.
    """
    if not Path(path).is_file():
        raise InputError(f"study={path}: no such file")
    return cast(
        Study,
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), OmegaConf.load(path))),
    )


def run(config: ReferenceConfig) -> list[str]:
    """Train what is not finished and write the page; returns a line for each run that failed.

    Raises:
        InputError: an unknown experiment or profile, or a run in the way that was made with other
            settings; nothing has been trained then.
    """
    study = read_study(config.study)
    known = {"experiments": [*study.controllers, *study.selectors], "profiles": [*study.profiles]}
    for key, names in known.items():
        if unknown := [name for name in getattr(config, key) if name not in names]:
            raise InputError(f"{key}={unknown}: must be some of {', '.join(names)}")
    at_least("jobs", config.jobs, 1)
    if not config.seeds:
        raise InputError("seeds=[]: at least one is needed")
    runs: list[StudyRun] = []
    with progress("planning: experiments", len(known["experiments"])) as tick:
        for planned in plan(config, study):
            check(planned)
            runs.append(planned)
            tick(len({run.experiment for run in runs}), planned.experiment)
    experiments, profiles = (getattr(config, key) or names for key, names in known.items())
    wanted = {
        run.folder
        for run in runs
        if run.experiment in experiments and run.profile in (*profiles, "beams")
    }
    first: dict[Path, StudyRun] = {}
    for each in runs:  # a shared run is made as the first experiment has it
        first.setdefault(each.folder, each)
    missing = [(each,) for folder, each in first.items() if folder in wanted and not each.finished]
    notes = in_turn("runs", train_or_note, missing, config.jobs, len(wanted) - len(missing))
    finished = [_read(run) for run in runs if run.finished]
    if finished:
        write_text(
            config.out, results_page(study, finished, config.seeds, len(runs) - len(finished))
        )
    return [note.removeprefix(FAILED) for note in notes if note.startswith(FAILED)]


def plan(config: ReferenceConfig, study: Study) -> Iterator[StudyRun]:
    """Every run of the study. Runs with equal settings have the same folder.

    Raises:
        InputError: settings that cannot be used.
    """
    seeds = f"seeds=[{','.join(map(str, config.seeds))}]"
    folders: dict[str, Path] = {}
    for experiment, section in study.controllers.items():
        jobs = jobs_of("train", [f"experiment={experiment}"])
        shared = [word for word in jobs[0] if all(word in job for job in jobs)]
        for profile in section.profiles:
            common = [*study.profiles[profile].words, seeds]
            default = training_settings("train", [*shared, *common])
            for job in jobs:
                varied = [word for word in job if word not in shared]
                words = [*varied, f"experiment={experiment}", *common]
                settings = training_settings("train", words)
                name = "-".join(["reference", profile, *([run_name(varied)] if varied else [])])
                folder = Path(config.runs) / experiment / name
                folder = folders.setdefault(json.dumps(settings, sort_keys=True), folder)
                variant = " ".join(varied)
                is_default = settings == default
                yield StudyRun(
                    experiment,
                    profile,
                    variant,
                    is_default,
                    folder,
                    words,
                    settings,
                    section.baselines,
                )
    for experiment in study.selectors:
        folder = Path(config.runs) / experiment / "reference"
        words = [f"experiment={experiment}", seeds]
        yield StudyRun(
            experiment, "beams", "", True, folder, words, training_settings("train_selector", words)
        )


def check(run: StudyRun) -> None:
    """Check that a run, if it was begun, was made with the settings that it would have now.
    Settings that only one of them has are newer or older than the run, and do not count.

    Raises:
        InputError: it was made with other settings, or is no run.
    """
    saved = read_settings_of(run.folder)
    # what a run chooses itself, it has written down: the reward under a mean budget, and what was
    # left to it
    mean = run.settings.get("budget.sense") == "mean"
    for key in sorted(saved.keys() & run.settings.keys()):
        before = saved[key]
        now = run.settings[key]
        if before != now and now != "auto" and not (mean and key.startswith("reward")):
            raise InputError(
                f"{run.folder}: was made with {key}={before}, now it is {now}; move it away, or "
                "give another runs=…"
            )


def training_settings(verb: str, words: list[str]) -> dict[str, Any]:
    """The settings that two runs share when they train the same, by dotted key: not where a run is
    kept, nor what else it judges."""
    content = OmegaConf.to_container(
        OmegaConf.create(OmegaConf.to_yaml(asdict(read_settings(verb, words))))
    )
    assert isinstance(content, dict)
    return dotted(
        {
            key: value
            for key, value in content.items()
            if key not in (*LEFT_OUT_OF_NAME, "baselines")
        }
    )


def train_or_note(run: StudyRun) -> str:
    """`train`; an error becomes a note that begins with `FAILED`, so that the other runs go on."""
    try:
        return train(run)
    except Exception as error:
        if isinstance(error, InputError):
            reason = str(error)
        else:
            reason = repr(error)
        return f"{FAILED}{run.folder}: {reason.splitlines()[0]}"


def train(run: StudyRun) -> str:
    """Train and judge with every seed; returns a note with the time that it took."""
    place = [f"name={run.folder.name}", f"runs={run.folder.parent.parent}", "tracking=disabled"]
    if run.profile == "beams":
        verb = "train_selector"
        place = [*place, "jobs=1"]
    else:
        verb = "train"
        place = [*place, f"baselines={str(run.baselines).lower()}"]
    start = time.monotonic()
    settings = read_settings(verb, [*run.words, *place])
    # a run with another number of jobs would not be resumed but trained anew in a second folder
    if (jobs := read_settings_of(run.folder).get("jobs", 1)) != 1:
        raise InputError(f"was begun with jobs={jobs}; finish it with these, or move it away")
    with quiet():
        folder = sweep_jobs.train(settings, run.words)
    if folder != run.folder:
        raise InputError(f"was begun with other settings; move it away (this run is {folder})")
    return f"{folder.parent.name}/{folder.name}: {time.monotonic() - start:.0f} s"


def _read(run: StudyRun) -> StudyRun:
    """A finished run."""
    return run._replace(results=read_results(run.folder), decisions=read_decisions(run.folder))


def in_turn(
    title: str, work: Callable[..., str], pieces: Sequence[tuple[Any, ...]], jobs: int, done: int
) -> list[str]:
    """Call `work(*piece)` for every piece, in `jobs` processes; with one job in this process.
    Returns the notes."""
    if jobs > 1:
        return in_processes(title, work, pieces, jobs, done)
    notes: list[str] = []
    with progress(title, done + len(pieces), done) as tick:
        for piece in pieces:
            notes.append(work(*piece))
            tick(done + len(notes), notes[-1])
    return notes


@contextmanager
def quiet() -> Iterator[None]:
    """No output from what runs inside: the study shows its own progress."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def main(arguments: Sequence[str]) -> int:
    """Run a study from `key=value` words.

    Returns:
        the exit status: 2 for a wrong word, 1 when a part failed, 130 or 143 when a signal stopped
        it.
    """
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(ReferenceConfig), OmegaConf.from_dotlist(list(arguments))
        )
        settings: Any = OmegaConf.to_object(merged)
        with stopped_by_signals():
            failed = run(settings)
    except (InputError, OmegaConfBaseException) as error:
        print(f"reference: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("reference: stopped; repeat the command to resume", file=sys.stderr)
        return status_of(stop)
    for line in failed:
        print(f"reference: {line}", file=sys.stderr)
    print(f"page: {settings.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

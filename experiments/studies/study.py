"""Runs a study: trains every experiment that a YAML file lists, and writes a page that compares them.

    python experiments/studies/study.py key=value …

The default study, `reference.yaml`, writes docs/results.md; it takes an hour and a half to two hours on two cores.
Finished runs are kept, interrupted runs resume, experiments with the same settings share a run, and the page shows
what is finished.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import OmegaConf

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.experiments.command_line import sweep_jobs
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.sweep import jobs_of
from knobwise.experiments.compare.runs import read_settings_of
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.results.run_folder import LEFT_OUT_OF_NAME, UNFINISHED, run_name
from knobwise.experiments.studies.findings import Study, StudyRun
from knobwise.experiments.studies.page import results_page
from knobwise.experiments.studies.running import in_turn, quiet, run_from_words, write_page

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


class Run(NamedTuple):
    """One training with all seeds."""

    experiment: str
    profile: str
    """A key of `Study.profiles`; "beams" for a selector."""
    variant: str
    """What the sweep sets; empty without a sweep."""
    default: bool
    """Whether the experiment's file sets the same without a sweep."""
    folder: Path
    """In the folder of the first experiment that has these settings."""
    words: list[str]
    """The command line, except for the name and the folder of the run."""
    settings: dict[str, Any]
    """What decides how it trains, by dotted key."""
    baselines: bool = False

    @property
    def verb(self) -> str:
        return "train_selector" if self.profile == "beams" else "train"

    @property
    def place(self) -> list[str]:
        """The rest of the command line."""
        words = [f"name={self.folder.name}", f"runs={self.folder.parent.parent}", "tracking=disabled"]
        if self.verb == "train_selector":
            return [*words, "jobs=1"]
        return words if self.baselines else [*words, "baselines=false"]

    @property
    def finished(self) -> bool:
        return (self.folder / "results.json").exists() and not (self.folder / UNFINISHED).exists()


def read_study(path: str = ReferenceConfig.study) -> Study:
    """Read a study.

    Raises:
        InputError: there is no such file.
    """
    if not Path(path).is_file():
        raise InputError(f"study={path}: no such file")
    return cast(Study, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), OmegaConf.load(path))))


def run(config: ReferenceConfig) -> list[str]:
    """Train what is not finished and write the page; returns a line for each run that failed.

    Raises:
        InputError: an unknown experiment or profile, or a run in the way that was made with other settings; nothing
            has been trained then.
    """
    study = read_study(config.study)
    known = {"experiments": [*study.controllers, *study.selectors], "profiles": [*study.profiles]}
    for key, names in known.items():
        if unknown := [name for name in getattr(config, key) if name not in names]:
            raise InputError(f"{key}={unknown}: must be among {', '.join(names)}")
    at_least("jobs", config.jobs, 1)
    if not config.seeds:
        raise InputError("seeds=[]: at least one is needed")
    runs: list[Run] = []
    with progress("planning: experiments", len(known["experiments"])) as tick:
        for planned in plan(config, study):
            runs.append(planned)
            tick(len({run.experiment for run in runs}), planned.experiment)
    for planned in runs:
        if (planned.folder / "config.yaml").exists():
            check(planned)
    experiments, profiles = (getattr(config, key) or names for key, names in known.items())
    wanted = {run.folder for run in runs if run.experiment in experiments and run.profile in (*profiles, "beams")}
    first = {run.folder: run for run in reversed(runs)}  # a shared run is made as the first experiment has it
    missing = [(first[folder],) for folder in dict.fromkeys(run.folder for run in runs) if folder in wanted]
    missing = [piece for piece in missing if not piece[0].finished]
    notes = in_turn("runs", train_or_note, missing, config.jobs, len(wanted) - len(missing))
    finished = [_read(run) for run in runs if run.finished]
    if finished:
        write_page(config.out, results_page(study, finished, config.seeds, len(runs) - len(finished)))
    return [note.removeprefix(FAILED) for note in notes if note.startswith(FAILED)]


def plan(config: ReferenceConfig, study: Study) -> Iterator[Run]:
    """Every run of the study. Runs with equal settings have the same folder.

    Raises:
        InputError: settings that cannot be used.
    """
    seeds = f"seeds=[{','.join(map(str, config.seeds))}]"
    folders: dict[str, Path] = {}

    @functools.cache  # composing takes long, so what a profile changes is composed once
    def of_profile(profile: str) -> dict[str, Any]:
        settings = training_settings("train", study.profiles[profile].words)
        return {key: value for key, value in settings.items() if _of_profile(key)}

    for experiment, section in study.controllers.items():
        first = study.profiles[section.profiles[0]].words
        jobs = [[*job, *first, seeds] for job in jobs_of("train", [f"experiment={experiment}"])]
        shared = set.intersection(*map(set, jobs))
        composed = [training_settings("train", job) for job in jobs]
        default = composed[0]
        if len(jobs) > 1:
            default = training_settings("train", [word for word in jobs[0] if word in shared])
        for profile in section.profiles:
            for job, in_first in zip(jobs, composed, strict=True):
                varied = [word for word in job if word not in shared]
                name = "-".join(["reference", profile, *([run_name(varied)] if varied else [])])
                words = [*varied, f"experiment={experiment}", *study.profiles[profile].words, seeds]
                settings = in_first
                if profile != section.profiles[0]:
                    settings = {key: value for key, value in in_first.items() if not _of_profile(key)}
                    settings |= of_profile(profile)
                key = json.dumps(settings, sort_keys=True)
                folder = folders.setdefault(key, Path(config.runs) / experiment / name)
                variant, is_default = " ".join(varied), in_first == default
                yield Run(experiment, profile, variant, is_default, folder, words, settings, section.baselines)
    for experiment in study.selectors:
        folder, words = Path(config.runs) / experiment / "reference", [f"experiment={experiment}", seeds]
        yield Run(experiment, "beams", "", True, folder, words, training_settings("train_selector", words))


def check(run: Run) -> None:
    """Check that a run was made with the settings that it would have now. Settings that only one of them has are newer
    or older than the run, and do not count.

    Raises:
        InputError: it was made with other settings, or is no run.
    """
    saved = read_settings_of(run.folder)
    mean = run.settings.get("budget.sense") == "mean"  # which sets the reward itself, and says so
    for key in sorted(saved.keys() & run.settings.keys()):
        before, now = saved[key], run.settings[key]
        if before != now and not (mean and key.startswith("reward")):
            raise InputError(
                f"{run.folder}: was made with {key}={before}, now it is {now}; move it away, or give another runs=…"
            )


def training_settings(verb: str, words: list[str]) -> dict[str, Any]:
    """The settings that two runs share when they train the same, by dotted key: not where a run is kept, nor what
    else it judges."""
    content = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(asdict(read_settings(verb, words)))))
    assert isinstance(content, dict)
    left_out = (*LEFT_OUT_OF_NAME, "baselines")
    return dict(_flat({key: value for key, value in content.items() if key not in left_out}))


def _flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _of_profile(key: str) -> bool:
    return key.partition(".")[0] == "profile"


def train_or_note(run: Run) -> str:
    """`train`; an error becomes a note that begins with `FAILED`, so that the other runs go on."""
    try:
        return train(run)
    except Exception as error:
        reason = str(error) if isinstance(error, InputError) else repr(error)
        return f"{FAILED}{run.folder}: {reason.splitlines()[0]}"


def train(run: Run) -> str:
    """Train and judge with every seed; returns a note with the time that it took."""
    start = time.monotonic()
    settings, saved = read_settings(run.verb, [*run.words, *run.place]), run.folder / "config.yaml"
    # a run with another number of jobs would not be resumed but trained anew in a second folder
    if saved.exists() and (jobs := OmegaConf.select(OmegaConf.load(saved), "jobs", default=1)) != 1:
        raise InputError(f"was begun with jobs={jobs}; finish it that way, or move it away")
    with quiet():
        folder = sweep_jobs.train(settings, run.words)
    if folder != run.folder:
        raise InputError(f"was begun with other settings; move it away (this run is {folder})")
    return f"{folder.parent.name}/{folder.name}: {time.monotonic() - start:.0f} s"


def _read(run: Run) -> StudyRun:
    """A finished run. A selector's results are enough for the page."""
    results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
    stages = {key: run.settings.get(f"optimiser.{key}") for key in ("warmup_iterations", "iterations")}
    results.setdefault("training", stages)
    decisions = read_decisions(run.folder) if run.verb == "train" else None
    return StudyRun(run.experiment, run.profile, run.variant, run.default, results, decisions)


def main(words: list[str]) -> int:
    """Run from `key=value` words; returns the exit status."""
    return run_from_words("reference", ReferenceConfig, run, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Reference results: every experiment on the built-in data and on calibrated simulated data sets, and docs/results.md.

    python experiments/studies/reference.py key=value …

An hour and a half to two hours on two cores. A run that is finished is not run again, one that was stopped goes on,
and settings that two experiments share are run once; the page shows what is finished.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from knobwise.agents.training.settings import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.interruption import status_of, stopped_by_signals
from knobwise.common.processes import in_processes
from knobwise.common.progress import progress
from knobwise.experiments.command_line.settings import read_settings
from knobwise.experiments.command_line.sweeps import jobs_of
from knobwise.experiments.results.decisions_file import read_decisions
from knobwise.experiments.results.run_folder import LEFT_OUT_OF_NAME, UNFINISHED, run_name
from knobwise.experiments.settings.selector_options import changed
from knobwise.experiments.studies.reference_page import CONTROLLERS, PROFILES, Found, page_of
from knobwise.experiments.studies.reference_selectors import SELECTORS

NAME = "reference"
FAILED = "failed: "


@dataclass
class ReferenceConfig:
    """The settings, each as key=value."""

    experiments: list[str] = field(default_factory=lambda: [*CONTROLLERS, *SELECTORS])
    """Which are run; the page shows all that are finished."""
    profiles: list[str] = field(default_factory=lambda: list(PROFILES))
    """What controllers are trained on: builtin, calibrated."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """Training seeds."""
    runs: str = "runs"
    """Where the runs are kept."""
    out: str = "docs/results.md"
    """The page."""
    jobs: int = 2
    """Runs at the same time, one thread each."""

    def __post_init__(self) -> None:
        for key, known in (("experiments", [*CONTROLLERS, *SELECTORS]), ("profiles", list(PROFILES))):
            if unknown := [name for name in getattr(self, key) if name not in known]:
                raise InputError(f"{key}={unknown}: must be among {', '.join(known)}")
        at_least("jobs", self.jobs, 1)
        if not self.seeds:
            raise InputError("seeds=[]: at least one is needed")


class Run(NamedTuple):
    """One training with all seeds."""

    experiment: str
    profile: str
    """One of `PROFILES`; beams for selectors."""
    variant: str
    """What a sweep sets; nothing without one."""
    default: bool
    """Whether the experiment's file sets the same without a sweep."""
    folder: Path
    """That of another experiment where that one has the same settings."""
    words: list[str]
    """Of the command line, without what says where the run is kept."""
    where: list[str]
    """The others."""
    settings: dict[str, Any]
    """What they come to, without names and places."""

    @property
    def verb(self) -> str:
        return "train" if self.experiment in CONTROLLERS else "train_selector"


def run(config: ReferenceConfig) -> list[str]:
    """Train everything that is not finished, and write the page; gives a line for each run that failed.

    Raises:
        InputError: a run that was made or begun with other settings; nothing has been run then.
    """
    runs = []
    with progress("planning: experiments", len(CONTROLLERS) + len(SELECTORS)) as tick:
        for one in plan(config):
            runs.append(one)
            tick(len({r.experiment for r in runs}), one.experiment)
    first = {one.folder: one for one in reversed(runs)}  # whose folder it is
    asked = [r for r in runs if r.experiment in config.experiments and r.profile in (*config.profiles, "beams")]
    wanted = {one.folder: first[one.folder] for one in asked}
    missing = [one for one in wanted.values() if not finished(one.folder)]
    for one in runs:
        if (one.folder / "config.yaml").exists():
            check(one)
    failed = _train_all(missing, len(wanted), config.jobs)
    found = [_found(one) for one in runs if finished(one.folder)]
    if found:
        with written_whole(config.out) as temporary:
            temporary.write_text(page_of(found, config.seeds, open_runs=len(runs) - len(found)), encoding="utf-8")
    return failed


def plan(config: ReferenceConfig) -> Iterator[Run]:
    """Every run of the page, whichever are asked for now: what two experiments share is kept in the first one's folder.

    Raises:
        InputError: settings that cannot be used.
    """
    seeds = f"seeds=[{','.join(map(str, config.seeds))}]"
    at: dict[str, Path] = {}
    # composing takes long: what profiles change is composed once
    of_profile = {name: _compared("train", profile.words)["profile"] for name, profile in PROFILES.items()}
    for experiment, section in CONTROLLERS.items():
        jobs = [
            [*job, *PROFILES[section.profiles[0]].words, seeds]
            for job in jobs_of("train", [f"experiment={experiment}"])
        ]
        everywhere = set.intersection(*map(set, jobs))
        composed = [_compared("train", job) for job in jobs]
        alone = composed[0]
        if len(jobs) > 1:
            alone = _compared("train", [word for word in jobs[0] if word in everywhere])
        for profile in section.profiles:
            for job, own in zip(jobs, composed, strict=True):
                varied = [word for word in job if word not in everywhere]
                words = [*varied, f"experiment={experiment}", *PROFILES[profile].words, seeds]
                name = "-".join([NAME, profile, *([run_name(varied)] if varied else [])])
                where = [f"name={name}", f"runs={config.runs}", "tracking=disabled"]
                where += [] if section.every_simple_way else ["baselines=false"]
                settings = own if profile == section.profiles[0] else {**own, "profile": of_profile[profile]}
                folder = at.setdefault(json.dumps(settings), Path(config.runs) / experiment / name)
                yield Run(experiment, profile, " ".join(varied), own == alone, folder, words, where, settings)
    for experiment in SELECTORS:
        where = [f"name={NAME}", f"runs={config.runs}", "tracking=disabled", "jobs=1"]
        folder, words = Path(config.runs) / experiment / NAME, [f"experiment={experiment}", seeds]
        yield Run(experiment, "beams", "", True, folder, words, where, _compared("train_selector", words))


def finished(folder: Path) -> bool:
    return (folder / "results.json").exists() and not (folder / UNFINISHED).exists()


def check(one: Run) -> None:
    """That a run is what would be run now.

    Raises:
        InputError: it was made with other settings, or is no run.
    """
    try:
        saved = _plain((one.folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{one.folder / 'config.yaml'}: cannot be read; move the run away") from error
    now = dict(one.settings)
    if now.get("budget", {}).get("sense") == "mean":
        now.pop("reward")  # there is one reward only, and the run says so
    for key, before, after in _different(saved, now):
        raise InputError(
            f"{one.folder}: was made with {key}={before}, now it is {after}; move it away, or give another runs=…"
        )


def _compared(verb: str, words: list[str]) -> dict[str, Any]:
    """What two runs share when they train the same."""
    return _plain(OmegaConf.to_yaml(asdict(read_settings(verb, words))))


def _plain(text: str) -> dict[str, Any]:
    """Settings as they are read from `config.yaml`, without names and places, and whatever is judged beside."""
    settings = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key not in (*LEFT_OUT_OF_NAME, "baselines")}


def _different(saved: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, before, now); keys of one side only are newer or older than the run, and do not count."""
    for key in saved.keys() & now.keys():
        if isinstance(saved[key], dict) and isinstance(now[key], dict):
            yield from _different(saved[key], now[key], f"{at}{key}.")
        elif saved[key] != now[key]:
            yield f"{at}{key}", saved[key], now[key]


def _train_all(missing: Sequence[Run], total: int, jobs: int) -> list[str]:
    """Train, in as many processes; gives a line for each run that failed. Others go on."""
    if not missing:
        return []
    done = total - len(missing)
    if jobs > 1:
        notes = in_processes("runs", train_or_say, [(one,) for one in missing], jobs, done)
    else:
        notes = []
        with progress("runs", total, done) as tick:
            for one in missing:
                notes.append(train_or_say(one))
                tick(done + len(notes), notes[-1])
    return [note.removeprefix(FAILED) for note in notes if note.startswith(FAILED)]


def train_or_say(one: Run) -> str:
    """`train`, where an error is a note that begins with `FAILED`."""
    try:
        return train(one)
    except Exception as error:
        said = str(error) if isinstance(error, InputError) else repr(error)
        return f"{FAILED}{one.folder}: {said.splitlines()[0]}"


def train(one: Run) -> str:
    """Train and judge with every seed, without a word: that is the study's; gives a note on what came of it."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    start = time.monotonic()
    settings, saved = read_settings(one.verb, [*one.words, *one.where]), one.folder / "config.yaml"
    # begun with as many processes it is taken up; begun with others it would be trained anew beside it
    if saved.exists() and (jobs := OmegaConf.select(OmegaConf.load(saved), "jobs", default=1)) != 1:
        raise InputError(f"was begun with jobs={jobs}; finish it so, or move it away")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        if one.verb == "train":
            from knobwise.experiments.train import controller

            folder = controller.run(settings, one.words)
        else:
            from knobwise.experiments.train import selector

            folder = selector.run(settings, one.words)
    if folder != one.folder:
        raise InputError(f"was begun with other settings; move it away (this run is {folder})")
    return f"{one.folder.parent.name}/{one.folder.name}: {time.monotonic() - start:.0f} s"


def _found(one: Run) -> Found:
    """A finished run. Of selectors only the means are needed, which older runs have too."""
    results = json.loads((one.folder / "results.json").read_text(encoding="utf-8"))
    results.setdefault("training", one.settings.get("optimiser", {}))
    decisions = read_decisions(one.folder) if one.verb == "train" else None
    return Found(one.experiment, one.profile, one.variant, one.default, results, decisions)


def main(words: Sequence[str]) -> int:
    """Run from `key=value` words; 2 when one of them is wrong, 1 when a run failed, 130 or 143 when stopped."""
    try:
        config = changed(ReferenceConfig(), OmegaConf.from_dotlist(list(words)), "reference")
        with stopped_by_signals():
            failed = run(config)
    except InputError as error:
        print(f"reference: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("reference: stopped; the same command goes on where it was", file=sys.stderr)
        return status_of(stop)
    for line in failed:
        print(f"reference: {line}", file=sys.stderr)
    print(f"page: {config.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

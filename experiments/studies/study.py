"""Run a study: train what each section of a YAML file lists, then compare its runs.

    python experiments/studies/study.py key=value …

The default study, `reference.yaml`, is that of docs/results.md; it takes hours. A command that is
repeated resumes: finished runs are kept, and sections that train the same share a run.
"""

from __future__ import annotations

import glob
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from knobwise.common.checks import distinct
from knobwise.common.errors import InputError
from knobwise.experiments.report.runs import read_settings_of


@dataclass
class StudyConfig:
    """The settings, each as key=value."""

    study: str = str(Path(__file__).with_name("reference.yaml"))
    """The study: a YAML file like `reference.yaml`."""
    sections: list[str] = field(default_factory=list)
    """Sections to run, by their names in the file; empty for all of them."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    """Training seeds."""
    runs: str = "runs"
    """Where the runs are kept."""
    out: str = "comparisons"
    """Folder for a page and its numbers, for each section that trains more than one run."""
    words: list[str] = field(default_factory=lambda: ["tracking=disabled"])
    """Further words for every training, such as optimiser.iterations=50."""


def sections_of(study: str) -> dict[str, list[str]]:
    """Return the commands of each section of a study, by the name of the section.

    A section is a list of commands, or it has the commands `train` and the names of `profiles` of
    the file. Then it becomes a section for each profile, such as lean_builtin, whose runs have the
    name of the profile.
    """
    if not Path(study).is_file():
        raise InputError(f"study={study}: no such file")
    content: Any = OmegaConf.to_container(OmegaConf.load(study))
    sections = {}
    for name, section in content["sections"].items():
        if isinstance(section, list):
            sections[name] = section
            continue
        # the same commands on each profile
        for profile in section["profiles"]:
            words = content["profiles"][profile].replace("${name}", profile)
            commands = [f"{command} name={profile} {words}" for command in section["train"]]
            sections[f"{name}_{profile}"] = commands
    return sections


def run(config: StudyConfig) -> list[str]:
    """Train the runs that are not finished, and compare those of each section in an HTML page;
    return a line for each failure.

    Raises:
        InputError: there is no such study, no seeds, the study lacks a section, or a finished run
            has other seeds.
    """
    distinct("seeds", config.seeds)
    sections = sections_of(config.study)
    if unknown := [name for name in config.sections if name not in sections]:
        raise InputError(f"sections={unknown}: must be some of {', '.join(sections)}")
    # a command that fails does not stop the others
    names = config.sections or list(sections)
    failures = []
    for name in names:
        failures += run_section(config, name, sections[name])
    return failures


def run_section(config: StudyConfig, name: str, commands: Sequence[str]) -> list[str]:
    """Train and compare the runs of a section; return a line for each command that failed.

    Raises InputError for a finished run with other seeds.
    """
    folders: list[str] = []
    failures = []
    for command in commands:
        words = shlex.split(command)
        folder = folder_of(words, config.runs)
        finished = (folder / "results.json").exists()
        if finished and read_settings_of(folder)["seeds"] != config.seeds:
            raise InputError(f"{folder}: was trained with other seeds; give another runs=…")
        seeds = f"seeds=[{','.join(map(str, config.seeds))}]"
        # a sweep leaves finished jobs as they are
        words += [seeds, f"runs={config.runs}", *config.words]
        failures += knobwise("train", "-m", *words)
        # its jobs are called name, name-2 and so on
        folders += map(str, sorted(folder.parent.glob(f"{glob.escape(folder.name)}*")))
    # a single run has a report, and nothing to compare
    if len(folders) > 1:
        page = Path(config.out) / name
        page.parent.mkdir(parents=True, exist_ok=True)
        failures += knobwise("compare", *folders, f"html={page}.html", f"json={page}.json")
    return failures


def folder_of(words: Sequence[str], runs: str) -> Path:
    """Return where `knobwise train` keeps a run with these words, or the first of a sweep."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    return Path(runs, settings["experiment"], settings["name"])


def knobwise(*words: str) -> list[str]:
    """Run a command of knobwise. Return a list with one line if it failed, otherwise none."""
    done = subprocess.run([sys.executable, "-m", "knobwise", *words], check=False)
    # Ctrl-C or a request to end stopped the command, so this process stops too
    if done.returncode in (130, 143):
        raise KeyboardInterrupt
    if done.returncode:
        return [f"knobwise {shlex.join(words)}: failed with status {done.returncode}"]
    return []


def main(arguments: Sequence[str]) -> int:
    """Run a study from `key=value` words.

    Returns:
        the exit status: 2 for a wrong word, 1 when a part failed, 130 when it was stopped.
    """
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(StudyConfig), OmegaConf.from_dotlist(list(arguments))
        )
        failures = run(OmegaConf.to_object(merged))  # type: ignore[arg-type]
    except (InputError, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", "settings")
        print(f"study: {key}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("study: stopped; repeat the command to resume", file=sys.stderr)
        return 130
    for line in failures:
        print(f"study: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

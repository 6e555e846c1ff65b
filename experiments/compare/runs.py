"""Find finished runs to compare and read their files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from knobwise.common.errors import InputError
from knobwise.experiments.report.words import (
    Row,
    read_results,
)
from knobwise.experiments.results.decisions import FILE, read_decisions
from knobwise.experiments.results.problem import Problem, problem_of
from knobwise.experiments.results.run_folder import UNFINISHED

NOT_COMPARED = ("name", "runs", "jobs", "tracking")
"""Settings that say where a run is kept and logged, not what it does."""
DEEPEST = 5
"""How many levels down a folder is searched for runs."""
UNKNOWN = "–"
"""The value of a setting that a run does not have."""


@dataclass(frozen=True)
class ComparedRun:
    """A finished run, read from its folder."""

    folder: Path
    label: str
    """See `labels_of`; different from that of every other run."""
    problem: Problem
    results: dict[str, Any]
    settings: dict[str, Any]
    """From `config.yaml`, by dotted key; empty without that file."""
    decisions: pl.DataFrame | None
    missing: str = ""
    """Why there are no decisions."""

    @property
    def experiment(self) -> str:
        """The experiment's name; without settings that of the folder above."""
        return str(self.settings.get("experiment", self.folder.resolve().parent.name))

    @property
    def places(self) -> list[float]:
        """The budgets in ms, or the numbers of shots, that the run was judged at."""
        return sorted({place_of(place) for place in self.problem.judged_at(self.results)})

    @property
    def policy(self) -> str:
        """The policy that stands for the run: the learned controller, or the selector that was best
        on validation.

        Raises:
            InputError: no trained selector was judged.
        """
        policy = self.problem.main_policy(self.results)
        if policy is None and not self.problem.averaged:
            raise InputError(f"{self.folder}: no trained selector was judged in it; leave it out")
        return policy or self.problem.trained[0]

    @property
    def trained(self) -> list[str]:
        """All trained policies, in the order of the results."""
        variants = self.results.get("variants") or ()
        names = {*self.problem.trained, *self.problem.controls, *variants}
        judged = dict.fromkeys(row["policy"] for row in self.problem.rows(self.results))
        return [name for name in judged if name in names]

    def row(self, policy: str, place: float | None) -> Row:
        """Return the row of a policy at a place, or its mean over the places (None); {} if there is
        none."""
        return next(iter(self.rows_at(policy, [place])), {})

    def rows_at(self, policy: str, places: Sequence[float | None]) -> list[Row]:
        """Return the rows of a policy at these places, where it has any."""
        rows = {}
        for row in self.problem.rows(self.results):
            if row["policy"] == policy:
                rows[place_of(row.get(self.problem.place))] = row
        return [rows[place] for place in places if place in rows]


def place_of(place: Any) -> Any:
    """Round a place to six figures, because files may hold the same budget with more or fewer; None
    stays None."""
    if place is None:
        return None
    return float(f"{place:.6g}")


# -- finding ---------------------------------------------------------------------------------------


def find_runs(folders: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the finished runs among these folders or below them, in the order given, and the names
    of the unfinished ones.

    The runs in a folder are sorted by name, with numbers by size. The link `latest` in a folder of
    runs is not followed.

    Raises:
        InputError: if there is no such folder, or no run in it.
    """
    finished: dict[Path, Path] = {}
    unfinished: list[str] = []
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            raise InputError(
                f"{name}: no such folder; give the folders of finished runs, or a folder of runs"
            )
        runs = _runs_below(folder, DEEPEST)
        if not runs:
            raise InputError(
                f"{name}: holds no run; the folder of a run holds config.yaml and results.json"
            )
        for run in runs:
            if (run / "results.json").exists() and not (run / UNFINISHED).exists():
                finished.setdefault(run.resolve(), run)
            elif str(run) not in unfinished:
                unfinished.append(str(run))
    return list(finished.values()), unfinished


def _runs_below(folder: Path, levels: int) -> list[Path]:
    """Return all runs in a folder, down to so many levels below it, in the order of their names."""
    # inside a run no further runs are looked for
    if any((folder / name).is_file() for name in ("results.json", "config.yaml")):
        return [folder]
    if not levels:
        return []
    try:
        inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from error
    visible = [path for path in inside if not path.name.startswith(".")]
    runs = []
    for path in sorted(visible, key=_name_order):
        runs += _runs_below(path, levels - 1)
    return runs


def _name_order(path: Path) -> tuple[bool, list[str | float]]:
    """Return a sort key for folders: `default` first, then by name, with numbers by size."""
    # text and numbers take turns, so that keys can be compared
    parts: list[str | float] = [*re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", path.name)]
    parts[1::2] = map(float, parts[1::2])
    return path.name != "default", parts


# -- reading ---------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read the results, settings and decisions of every run.

    Raises:
        InputError: if files cannot be read, or the runs are about different problems.
    """
    results = [read_results(folder) for folder in folders]
    settings = [read_settings_of(folder) for folder in folders]
    # all runs must be about the problem of the first one
    kind = problem_of(results[0])
    runs = []
    for i, (folder, label) in enumerate(zip(folders, labels_of(folders), strict=True)):
        problem = problem_of(results[i])
        if problem is not kind:
            raise InputError(
                f"{folder}: is a run of {problem.agents}, {folders[0]} one of {kind.agents}; "
                "their numbers mean different things; compare runs of one kind"
            )
        decisions = None
        missing = ""
        try:
            decisions = read_decisions(folder)
        except InputError as error:
            missing = str(error) if (folder / FILE).exists() else f"has no {FILE}"
        runs.append(
            ComparedRun(folder, label, problem, results[i], settings[i], decisions, missing)
        )
    return runs


def read_settings_of(folder: Path) -> dict[str, Any]:
    """Read `config.yaml` by dotted key; {} if there is none.

    Raises:
        InputError: if the file is not YAML, or holds no settings.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no settings")
    return dotted(content)


def dotted(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return nested settings by dotted key; an empty group stays a value."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            for name, leaf in dotted(value).items():
                flat[f"{key}.{name}"] = leaf
        else:
            flat[str(key)] = value
    return flat


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs: key → the value in every run, as the
    command line takes it."""
    table = {}
    # in the order of the files
    for key in dict.fromkeys(itertools.chain(*settings)):
        values = [value_words(run[key]) if key in run else UNKNOWN for run in settings]
        if key.split(".")[0] not in NOT_COMPARED and len(set(values)) > 1:
            table[key] = values
    return table


def value_words(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(value_words, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Call each run by the name of its folder, or where several have the same name by that of the
    folder above too, or by its whole path."""
    paths = [folder.resolve() for folder in folders]
    ways = [[path.name for path in paths], ["/".join(path.parts[-2:]) for path in paths]]
    # the shortest way that tells all runs apart
    unique = (labels for labels in ways if len(set(labels)) == len(labels))
    return next(unique, list(map(str, folders)))

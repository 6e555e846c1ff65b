"""Find finished runs to compare and read their files."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.experiments.evidence.decisions import FILE, SAMPLE, read_decisions
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.run_folder import UNFINISHED, words_in_name
from knobwise.experiments.evidence.schema import PolicyRow, RunResults
from knobwise.experiments.evidence.task import condition_of, task_of
from knobwise.experiments.settings.config_file import flatten_keys, read_settings_file

NOT_COMPARED = ("name", "runs", "jobs", "tracking")
"""Settings that say where a run is kept and logged, not what it does."""
UNKNOWN = "–"
"""The value of a setting that a run does not have."""


class Run:
    """A finished run.

    Attributes:
        results: the content of `results.json`.
        label: what it is called among other runs, see `labels_of`.
        folder: where its other files are; None for results without files.
        settings: from `config.yaml`, by dotted key; empty without that file.
        policy: what stands for the run: the learned controller, or the selector that was best on
            validation; "" if no learned policy was judged.
        conditions: the budgets in ms, or the numbers of shots, that the run was judged at.
        words: of the command, if the run is named by them: its name was not chosen.
        missing: why there are no `decisions`, which are read when they are asked for.

    Raises:
        InputError: if `config.yaml` cannot be read.
    """

    def __init__(self, results: RunResults, label: str = "", folder: Path | None = None) -> None:
        self.results = results
        self.label = label
        self.folder = folder
        self.task = task_of(results)
        self.settings = read_settings_of(folder) if folder else {}
        self.policy = self.task.main_policy(results) or ""
        self.conditions = self.task.conditions(results)
        self.words = [] if self.settings.get("name") else words_in_name(_typed(results))
        self.missing = ""

    @cached_property
    def decisions(self) -> pl.DataFrame | None:
        """The rows of `decisions.parquet`, see `_with_keys`; None if they cannot be read."""
        if self.folder is None:
            return None
        try:
            return _with_keys(read_decisions(self.folder))
        except InputError as error:
            has_file = (self.folder / FILE).exists()
            self.missing = str(error) if has_file else f"has no {FILE}"
        return None

    @property
    def trained(self) -> list[str]:
        """All trained policies, in the order of the results."""
        variants = self.results.get("variants") or ()
        names = {*self.task.trained, *self.task.controls, *variants}
        judged = dict.fromkeys(row["policy"] for row in self.task.rows(self.results))
        return [name for name in judged if name in names]

    def row(self, policy: str, condition: float | None) -> PolicyRow:
        """Return the row of a policy at a condition, or its mean over the conditions (None); {} if
        there is none."""
        return self.task.row(self.results, policy, condition)


def _with_keys(decisions: pl.DataFrame) -> pl.DataFrame:
    """Add split and data set to `sample`, and round conditions so that those of both runs are
    equal."""
    # an id is unique only together with split and data set
    sample = pl.concat_str(*SAMPLE, separator="\t", ignore_nulls=True).alias("sample")
    conditions = {
        condition: condition_of(condition) for condition in decisions["condition"].unique()
    }
    return decisions.with_columns(sample, pl.col("condition").replace_strict(conditions))


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
    unfinished = []
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            raise InputError(
                f"{name}: no such folder; give the folders of finished runs, or a folder of runs"
            )
        runs = _runs_below(folder)
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


def _runs_below(folder: Path) -> list[Path]:
    """Return all runs in a folder or below it, in the order of their names."""
    # inside a run no further runs are looked for
    if (folder / "results.json").exists() or (folder / "config.yaml").exists():
        return [folder]
    runs = []
    for path in sorted(folder.iterdir(), key=_name_order):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            runs += _runs_below(path)
    return runs


def _name_order(folder: Path) -> tuple[bool, list[str | float]]:
    """Return a sort key for folders: `default` first, then by name, with numbers by size."""
    # text and numbers take turns, so that keys can be compared
    parts: list[str | float] = [*re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", folder.name)]
    parts[1::2] = map(float, parts[1::2])
    return folder.name != "default", parts


# -- reading ---------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the results and settings of every run.

    Raises:
        InputError: if files cannot be read, or the runs are about different tasks.
    """
    runs = [Run(read_results(folder), folder=folder) for folder in folders]
    for run, label in zip(runs, labels_of(runs), strict=True):
        run.label = label
    first = runs[0]
    for run in runs:
        if run.task.agents != first.task.agents:
            raise InputError(
                f"{run.folder}: is a run of {run.task.agents}, {first.folder} one of "
                f"{first.task.agents}; their numbers mean different things; compare runs of "
                "one kind"
            )
    return runs


def read_settings_of(folder: Path) -> dict[str, Any]:
    """Read `config.yaml` by dotted key; {} if there is none.

    Raises:
        InputError: see `read_settings_file`.
    """
    path = folder / "config.yaml"
    return flatten_keys(read_settings_file(path)) if path.exists() else {}


def differing_settings(settings: Sequence[Mapping[str, object]]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs: key → the value in every run, as the
    command line takes it."""
    table = {}
    # in the order of the files
    for key in dict.fromkeys(itertools.chain(*settings)):
        values = [value_words(run[key]) if key in run else UNKNOWN for run in settings]
        if key.split(".")[0] not in NOT_COMPARED and len(set(values)) > 1:
            table[key] = values
    return table


def value_words(value: object) -> str:
    """Return a value as the command line takes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).strip('"')


def _typed(results: RunResults) -> list[str]:
    """Return the `key=value` words of the command of a run."""
    try:
        return shlex.split(results.get("command", ""))[2:]
    except ValueError:  # as nobody has typed it
        return []


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Call each run by its path below the folder that holds all runs. In place of a name that
    nobody chose stand the words of its command that `shared_words` lacks, `default` without any,
    unless that is longer or some other run is called so."""
    folders = [run.folder.resolve() for run in runs if run.folder]
    top = os.path.commonpath([folder.parent for folder in folders])
    paths = [folder.relative_to(top) for folder in folders]
    shared = shared_words(runs)
    labels = []
    for run, path in zip(runs, paths, strict=True):
        rest = " ".join(word for word in run.words if word not in shared) or "default"
        is_shorter = run.words and shared and len(rest) < len(path.name)
        labels.append(str(path.parent / rest) if is_shorter else str(path))
    names = zip(labels, map(str, paths), strict=True)
    chosen = [label if labels.count(label) == 1 else path for label, path in names]
    return chosen if len({*chosen}) == len(chosen) else list(map(str, paths))


def shared_words(runs: Sequence[Run]) -> list[str]:
    """Return the words that are in the command of every run whose name nobody chose, if there are
    several."""
    first, *others = [run.words for run in runs if run.words] or [[]]
    return [word for word in first if others and all(word in words for words in others)]

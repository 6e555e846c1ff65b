"""Finished runs to be compared: finding them, reading what they left, naming them by what differs, their settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from knobwise.common.errors import InputError
from knobwise.experiments.report.verdict import read_results
from knobwise.experiments.results.decisions_file import FILE, read_decisions
from knobwise.experiments.results.run_folder import LEFT_OUT_OF_NAME, UNFINISHED

KINDS = {"deadline": "controllers under deadlines", "mean": "controllers under mean budgets", "selector": "selectors"}
NOT_COMPARED = ("name", "runs", "jobs", "tracking")
"""Settings that say where a run is kept and watched, and nothing of what it does."""
NOT_OF_TRAINING = ("experiment", "baselines", "budgets_ms", "device", "threads")
"""Settings that do not go into a label where others tell runs apart."""
LONGEST_NAME = 120
"""Of a run's folder (`run_folder.run_name`); what is longer was cut."""
DEEPEST = 5
"""How far down runs are looked for in a folder."""
LONGEST_LABEL = 24
"""A longer name that somebody gave is no label where a few settings tell runs apart."""
FEW = 3
"""So many settings fit into a label."""
UNKNOWN = "–"
"""The value of a setting that a run does not have."""


@dataclass(frozen=True)
class Outcomes:
    """What came of one policy's decisions: S seeds, n samples, P places (budgets or numbers of shots)."""

    seeds: tuple[int | None, ...]
    samples: tuple[str, ...]
    places: tuple[float, ...]
    values: dict[str, np.ndarray]
    """By column of `decisions.parquet`: float64 [S, n, P], NaN where nothing is known."""


@dataclass(frozen=True)
class ComparedRun:
    """A finished run, as its folder tells of it."""

    folder: Path
    label: str
    """Short, and different from that of every other run."""
    kind: str
    """Of `KINDS`."""
    results: dict[str, Any]
    settings: dict[str, Any]
    """Of `config.yaml`, by dotted key; empty without that file."""
    decisions: pl.DataFrame | None
    missing: str = ""
    """Why there are no decisions."""

    @property
    def experiment(self) -> str:
        """What was run; of a folder without settings the name of the folder above."""
        return str(self.settings.get("experiment", self.folder.resolve().parent.name))

    @property
    def places(self) -> list[float]:
        """The budgets in ms, or the numbers of shots, that it was judged at."""
        key = "shots" if self.kind == "selector" else "budget_ms"
        return sorted({place_of(row[key]) for row in self.results["rows"] if row.get(key) is not None})

    def row(self, policy: str, place: float | None) -> Mapping[str, Any]:
        """The row of a policy at a budget or number of shots, its mean over budgets (None); {} where none is."""
        key = "shots" if self.kind == "selector" else "budget_ms"
        rows = [*self.results["rows"], *self.results.get("controls", [])]
        wanted = (row for row in rows if row["policy"] == policy)
        return next((r for r in wanted if (None if r.get(key) is None else place_of(r[key])) == place), {})


def place_of(budget: float) -> float:
    """A budget to six figures: the same one may have been kept in more or in fewer."""
    return float(f"{budget:.6g}")


def find_runs(folders: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The finished runs among these folders or below them, in the order given, and in words what is not finished. Those
    of one folder by name, numbers in names by size; those of a sweep's own folder (`runs/multirun/…`) as its jobs. The
    link `latest` in a folder of runs is not followed.

    Raises:
        InputError: no such folder, or no run in it.
    """
    finished: dict[Path, Path] = {}
    unfinished: list[str] = []
    for word in folders:
        if word.startswith("-"):
            raise InputError(f"{word}: no such option; settings are given as key=value, such as html=FILE")
        given = Path(word)
        if not given.is_dir():
            raise InputError(f"{word}: no such folder; give the folders of finished runs, or a folder of runs")
        if (given / "jobs.yaml").is_file():
            found, stopped = _runs_of_sweep(given)
            unfinished += stopped
        else:
            found = _runs_in(given, DEEPEST)
            if not found:
                raise InputError(f"{word}: no run in it; the folder of a run holds config.yaml and results.json")
        for folder in found:
            if (folder / "results.json").exists() and not (folder / UNFINISHED).exists():
                finished.setdefault(folder.resolve(), folder)
            elif str(folder) not in unfinished:
                unfinished.append(str(folder))
    return list(finished.values()), unfinished


def _runs_of_sweep(folder: Path) -> tuple[list[Path], list[str]]:
    """The runs of its finished jobs, and the other jobs in words."""
    from knobwise.experiments.command_line.sweep_jobs import read_outcome

    runs, stopped = [], []
    for number in range(1, len(OmegaConf.load(folder / "jobs.yaml")) + 1):
        outcome = read_outcome(folder, number)
        if outcome is not None and outcome.folder is not None and Path(outcome.folder).is_dir():
            runs.append(Path(outcome.folder))
        else:
            stopped.append(f"job {number} of {folder}")
    return runs, stopped


def _runs_in(folder: Path, deep: int) -> list[Path]:
    if any((folder / name).is_file() for name in ("results.json", "config.yaml")):
        return [folder]
    try:
        below = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()] if deep else []
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from error
    below = sorted((path for path in below if not path.name.startswith(".")), key=lambda path: _in_order(path.name))
    return [run for path in below for run in _runs_in(path, deep - 1)]


def _in_order(name: str) -> tuple[bool, list[tuple[float, str]]]:
    """`default` first, then by name, numbers by size."""
    parts = re.findall(r"(\d+(?:\.\d+)?(?:e-?\d+)?)|(\D)", name)
    return name != "default", [(float(number), "") if number else (math.inf, letter) for number, letter in parts]


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Everything that is compared, of every run.

    Raises:
        InputError: files that cannot be read; runs of different systems.
    """
    results = [read_results(folder) for folder in folders]
    settings = [read_settings_of(folder) for folder in folders]
    kinds = [kind_of(one) for one in results]
    if len(set(kinds)) > 1:
        other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
        raise InputError(
            f"{folders[other]}: is a run of {KINDS[kinds[other]]}, {folders[0]} one of {KINDS[kinds[0]]}; their "
            "numbers mean different things, compare runs of one kind"
        )
    runs = []
    labels = labels_of(folders, settings)
    for folder, label, kind, one, own in zip(folders, labels, kinds, results, settings, strict=True):
        decisions, missing = None, ""
        one.setdefault("training", {n: own.get(f"optimiser.{n}") for n in ("warmup_iterations", "iterations")})
        try:
            decisions = read_decisions(folder)
        except InputError as error:
            missing = f"has no {FILE} (an older run)" if not (folder / FILE).exists() else str(error)
        runs.append(ComparedRun(folder, label, kind, one, own, decisions, missing))
    return runs


def kind_of(results: Mapping[str, Any]) -> str:
    """Which of `KINDS` these results are of."""
    if results.get("system") == "selector":
        return "selector"
    return "mean" if results.get("sense") == "mean" else "deadline"


def outcomes_of(run: ComparedRun, policy: str) -> Outcomes | None:
    """What came of a policy's decisions; None where the run has no such decisions, or not of every sample and place."""
    if run.decisions is None:
        return None
    place, columns = ("shots", ["correct"]) if run.kind == "selector" else ("budget_ms", _OF_CONTROLLERS)
    if not {place, *columns} <= set(run.decisions.columns):
        return None
    part = run.decisions.filter(pl.col("policy") == policy)
    part = part.with_columns(pl.col(place).cast(pl.Float64).round_sig_figs(6))
    if "dataset" in part.columns:  # only together are the two unique
        part = part.with_columns(
            pl.concat_str("dataset", "sample_id", separator="\t", ignore_nulls=True).alias("sample_id")
        )
    part = part.unique(["seed", "sample_id", place], keep="first").sort("seed", "sample_id", place)
    seeds, samples, places = (part[name].unique().sort().to_list() for name in ("seed", "sample_id", place))
    shape = len(seeds), len(samples), len(places)
    if not part.height or part.height != math.prod(shape):
        return None
    cubes = {name: part[name].cast(pl.Float64).fill_null(math.nan).to_numpy().reshape(shape) for name in columns}
    return Outcomes(tuple(seeds), tuple(samples), tuple(map(place_of, places)), cubes)


_OF_CONTROLLERS = ["utility", "accuracy", "latency_ms"]


# -- settings and names ------------------------------------------------------------------------------------------------


def read_settings_of(folder: Path) -> dict[str, Any]:
    """`config.yaml` by dotted key; {} where there is none.

    Raises:
        InputError: not YAML, or no settings.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no settings")
    return dict(_flat(content, ""))


def _flat(content: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    lines: list[tuple[str, Any]] = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            lines += _flat(value, f"{prefix}{key}.")
        else:
            lines.append((f"{prefix}{key}", value))
    return lines


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The settings that are not the same in all of these runs, and their value in each, in words."""
    keys = dict.fromkeys(key for one in settings for key in one if key.split(".")[0] not in NOT_COMPARED)
    values = {key: [value_words(one[key]) if key in one else UNKNOWN for one in settings] for key in keys}
    return {key: words for key, words in values.items() if len(set(words)) > 1}


def value_words(value: Any) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(value_words, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def labels_of(folders: Sequence[Path], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each run: the settings that differ, where they are few; else of its folder's name the words that
    not all share; and its experiment where these differ, alone where every run has another. Where that does not tell
    runs apart, the number at the end of the folder's name, what differs in the path, or the whole name or path.
    """
    places = [folder.resolve() for folder in folders]
    experiments = [str(of.get("experiment", place.parent.name)) for place, of in zip(places, settings, strict=True)]
    apart = differing(settings)
    found = [""] * len(places)
    in_full = [place.name for place in places], [f"{place.parent.name}/{place.name}" for place in places]
    of_training = {key: words for key, words in apart.items() if key not in NOT_OF_TRAINING}
    short = [_short(places, settings, keys, experiments) for keys in (of_training, apart)]
    for labels in (
        *short,
        _numbered(short[-1], places),
        _by_folder(short[-1], places),
        *in_full,
        list(map(str, places)),
    ):
        found = [one if one and found.count(one) == 1 else new for one, new in zip(found, labels, strict=True)]
    return found


def _numbered(labels: Sequence[str], places: Sequence[Path]) -> list[str]:
    """The same settings run again and again, each time into a folder with a higher number: the label and that number;
    "" for other runs."""
    stems = [re.fullmatch(r"(.*?)(?:-(\d+))?", str(place)) for place in places]
    found = []
    for label, place, own in zip(labels, places, stems, strict=True):
        alike = [str(other) for other, of in zip(places, labels, strict=True) if of == label]
        # the name of the first one may itself end in a number
        stem = str(place) if any(other.startswith(f"{place}-") for other in alike) else own[1] if own else ""
        together = all(re.fullmatch(rf"{re.escape(stem)}(-\d+)?", other) for other in alike)
        number = str(place).removeprefix(stem).removeprefix("-")
        found.append((f"{label} ({number})" if number else label) if together else "")
    return found


def _by_folder(labels: Sequence[str], places: Sequence[Path]) -> list[str]:
    """The same settings run in several folders of runs: the label and the first part of the path that differs; "" for
    runs whose settings say nothing."""
    found = []
    for label, place in zip(labels, places, strict=True):
        alike = [other.parts for other, of in zip(places, labels, strict=True) if of == label]
        depth = next((i for i, parts in enumerate(zip(*alike, strict=False)) if len(set(parts)) > 1), 0)
        found.append(f"{label} ({place.parts[depth]})" if depth and label != place.name else "")
    return found


def _short(
    places: Sequence[Path],
    settings: Sequence[Mapping[str, Any]],
    apart: Mapping[str, list[str]],
    experiments: Sequence[str],
) -> list[str]:
    words = [_words(place.name, of, apart) for place, of in zip(places, settings, strict=True)]
    shared = set.intersection(*map(set, words)) if len(words) > 1 else set()
    kept = [[word for word in name if word not in shared] for name in words]
    # names that people gave say more than settings, as long as they are short
    given = any(not value and len(key) <= LONGEST_LABEL for name in words for key, value in name)
    if len(set(experiments)) == 1 and not given and 0 < len(apart) <= FEW:
        kept = [[(key, said[i]) for key, said in apart.items()] for i in range(len(places))]
    keys = list(dict.fromkeys(key for name in kept for key, value in name if value))
    last = [key.rsplit(".", 1)[-1] for key in keys]
    short = {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}
    said = [", ".join(f"{short[key]}={value}" if value else key for key, value in name) for name in kept]
    if len(set(experiments)) == len(places):
        return list(experiments)
    if len(set(experiments)) > 1:
        return [f"{name}: {one}" if one else name for name, one in zip(experiments, said, strict=True)]
    return [one or place.name for one, place in zip(said, places, strict=True)]


def _words(name: str, settings: Mapping[str, Any], apart: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of a folder's name (`run_folder.run_name`) the keys and values of what differs; (name, "") of a name that
    somebody gave. That of `default` is nothing."""
    if re.fullmatch(r"default(-\d+)?", name):
        return []
    groups = {key.rsplit(".", depth)[0] for key in settings for depth in range(1, key.count(".") + 1)}
    keys = sorted({*settings, *groups} - set(LEFT_OUT_OF_NAME), key=len, reverse=True)
    if not keys:
        return [(name, "")]
    starts = list(re.finditer(rf"(?:^|(?<=_))({'|'.join(map(re.escape, keys))})-", name))
    if not starts or starts[0].start() != 0:
        return [(name, "")]
    ends = [*(start.start() - 1 for start in starts[1:]), len(name)]
    if len(name) >= LONGEST_NAME and starts[-1][1] not in settings:  # the last word is not whole
        starts, ends = starts[:-1], ends[:-1]
    return [
        (m[1], value_words(settings[m[1]]) if m[1] in settings else name[m.end() : end].strip("-"))
        for m, end in zip(starts, ends, strict=True)
        if any(f"{key}.".startswith(f"{m[1]}.") for key in apart)
    ]

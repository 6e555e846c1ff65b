"""The workers of a profile: what is noted of each, and how its times compare with the others'.

Cells are handed out at random, so that a slow machine slows all samples and settings alike. How
much slower it is, shared cells tell: every worker measures the same ones, beside its others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from knobwise.profiling.measuring.machine import read_note, write_readable_json
from knobwise.profiling.measuring.measuring import (
    COLUMNS,
    EXTRA,
    LOG,
    SEED,
    WORKER,
    Job,
    read_measurements,
)

NOTES = "workers.json"
"""The file of the notes, in the state folder."""
SHARED = "shared.jsonl"
"""The file of the measurements of shared cells, there too."""
SHARED_SAMPLES = 20
"""Samples that every worker measures, at one configuration each."""
SLOWER = 0.05
"""Times that differ by a smaller share are not reported."""


def number_of(path: Path, note: Mapping[str, object], taken: set[int]) -> int:
    """Return the number of a worker, and note it: that of an earlier one with an equal note, unless
    it is `taken`, or a new one."""
    notes = read_note(path, list) if path.exists() else []
    for number, known in enumerate(notes):
        if known == note and number not in taken:
            return number
    write_readable_json(path, [*notes, note])
    return len(notes)


def shared_cells(samples: int, configurations: int) -> list[Job]:
    """Draw the cells that every worker measures."""
    generator = np.random.default_rng((SEED, samples, configurations))
    rows = generator.permutation(samples)[:SHARED_SAMPLES]
    columns = generator.integers(configurations, size=len(rows))
    return [(0, i, [j]) for i, j in zip(rows.tolist(), columns.tolist(), strict=True)]


def note_workers(folder: Path) -> None:
    """Add `compared` to what `profile.json` in a folder holds, as `workers`."""
    path = folder / "profile.json"
    workers = compare_workers(folder / "state")
    write_readable_json(path, read_note(path, dict) | {"workers": workers})


def compare_workers(state: Path) -> list[dict[str, Any]]:
    """Compare the workers of a profile, by what its state folder holds.

    Returns:
        For each worker what is noted of it, and

        - `worker`: its number
        - `measured`: how many measurements of the log are its own
        - `shared`: how many shared cells it and another one measured
        - `times`: how many times as long as the others it took for these, the geometric mean
        - `times_error`: standard error of that, as a share; both None without shared cells
    """
    log = read_measurements(state / LOG)
    counts: dict[int, int] = {}
    if WORKER in log.columns:
        counts = dict(log.group_by(WORKER).len().iter_rows())
    shared = pl.DataFrame()
    if (state / SHARED).exists():
        shared = read_measurements(state / SHARED)
    differences: dict[int, list[float]] = {}
    if len(shared):
        knobs = {*shared.columns} - COLUMNS
        cell = ["content", *(name for name in knobs if not name.startswith(EXTRA))]
        ln = pl.col("total_ms").clip(1e-6).log()
        # each against the mean of the others, which is n / (n − 1) times that against all
        count = pl.len().over(cell)
        against = (ln - ln.mean().over(cell)) * count / (count - 1)
        several = shared.unique([*cell, WORKER], keep="first").filter(pl.len().over(cell) > 1)
        rows = several.select(WORKER, against).group_by(WORKER).agg("total_ms")
        differences = dict(rows.iter_rows())
    workers = []
    for number, note in enumerate(read_note(state / NOTES, list)):
        ln_times = np.array(differences.get(number, ()))
        row = {"worker": number, **note, "measured": counts.get(number, 0)}
        row |= {"shared": len(ln_times), "times": None, "times_error": None}
        if len(ln_times) > 1:
            row["times"] = round(math.exp(ln_times.mean()), 4)
            row["times_error"] = round(float(ln_times.std(ddof=1)) / math.sqrt(len(ln_times)), 4)
        workers.append(row)
    return workers


def differing_machines(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the machines, and of those that do not differ the workers, whose times differ from the
    others': by more than `SLOWER` and more than three errors. The slowest comes first.

    Args:
        workers: see `compared`.

    Returns:
        `name`, `shared`, `times` and `times_error` of each, as in `compared`.
    """
    timed = [worker for worker in workers if worker["times"] is not None]
    machines: dict[str, list[Mapping[str, Any]]] = {}
    for worker in timed:
        name = ", ".join([worker["host"], worker["accelerator"]]).removesuffix(", none")
        machines.setdefault(name, []).append(worker)
    compare = []
    for name, those in machines.items():
        ln_times = sum(math.log(worker["times"]) for worker in those) / len(those)
        error = math.sqrt(sum(worker["times_error"] ** 2 for worker in those)) / len(those)
        # against the other machines, and not also against the others of its own
        against = (len(timed) - 1) / max(1, len(timed) - len(those))
        row = {"name": name, "shared": those[0]["shared"]}
        row |= {"times": math.exp(against * ln_times), "times_error": against * error}
        if _differs(row) and len(machines) > 1:
            compare.append(row)
        else:
            compare += [
                {**worker, "name": f"Worker {worker['worker']} on {name}"}
                for worker in those
                if _differs(worker)
            ]
    return sorted(compare, key=lambda row: -row["times"])


def _differs(row: Mapping[str, Any]) -> bool:
    ln_times = abs(math.log(row["times"]))
    return bool(ln_times > max(math.log1p(SLOWER), 3 * row["times_error"]))

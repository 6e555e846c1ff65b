"""The content of `results.json`: its file, and the rows in it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np

from knobwise.common.errors import Damaged, InputError
from knobwise.common.files import sha256_of, write_json
from knobwise.common.json_text import decode_json, is_deeper
from knobwise.common.words import is_known
from knobwise.envs.tables.measured_decisions import are_known, not_known_words
from knobwise.experiments.evidence.decisions import FILE
from knobwise.experiments.evidence.schema import (
    DifferenceRow,
    PolicyRow,
    PolicyRows,
    ReliabilityBin,
    RunResults,
)
from knobwise.experiments.evidence.task import DEMONSTRATIONS, task_of

if TYPE_CHECKING:
    from knobwise.agents.calibration.guard import GuardRow

MAX_BYTES = 100_000_000
"""The longest `results.json` that is read."""
DEEPEST = 40
"""The most levels of lists and objects in it."""
SINGLE = "best_single"
METRICS = "metrics.csv"
"""The file of what a run logged while it trained."""


def write_results(folder: Path, results: RunResults) -> None:
    """Write `results.json`, with digests of its content and of `decisions.parquet`, which has been
    written before."""
    write_json(folder / "results.json", {**results, "sha256": _digests(folder, results)})


def _digests(folder: Path, results: RunResults) -> list[str]:
    """Return SHA-256 of the results, and of the decisions if the file exists."""
    content = {key: value for key, value in results.items() if key != "sha256"}
    digests = [hashlib.sha256(json.dumps(content).encode()).hexdigest()]
    if (folder / FILE).exists():
        digests.append(sha256_of(folder / FILE))
    return digests


def read_results(run_folder: str | Path) -> RunResults:
    """Read `results.json` in the folder of a run.

    Raises:
        InputError: it is missing, does not hold the results of a run with their checksum, as
            `RunResults` describes them, or is larger or deeper than these are.
        Damaged: it does not match its checksum.
    """
    path = Path(run_folder) / "results.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        results: RunResults = decode_json(path.read_bytes())
        if is_deeper(results, DEEPEST):
            raise ValueError("nested too deeply")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is this the folder of a finished run?") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # bytes that are no text, text that is no JSON
        raise InputError(f"{path}: not the results of a run ({error})") from error
    if not isinstance(results, dict) or "sha256" not in results:
        raise InputError(
            f"{path}: not the results of a run, which hold their checksum; restore a copy, or "
            "judge the run again"
        )
    # the first digest is of the results, the second of the decisions
    noted = results["sha256"]
    digests = _digests(path.parent, results)
    if not isinstance(noted, list) or noted[:1] != digests[:1]:
        raise Damaged(path)
    if noted[: len(digests)] != digests:
        raise InputError(
            f"{path.with_name(FILE)}: does not match its checksum in {path}; one of the two "
            "is damaged: restore copies of both, or judge the run again"
        )
    try:
        judged = [row["policy"] for row in results["rows"]]
    except (KeyError, TypeError):
        judged = []
    if not judged:
        raise InputError(
            f"{path}: not the results of a run: `rows`, one for each policy and budget, is missing"
        )
    if place := _misfit(results, RunResults):
        raise InputError(
            f"{path}: `{place}` is not what this version writes there; judge the run again, or "
            "leave it out"
        )
    return results


def _misfit(value: Any, hint: Any, place: str = "") -> str:
    """Return the place of the first value that is of another type than the schema says, such as
    `rows[0].policy`; "" where all fit. What is unknown is null, but for the lists of the whole."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if value is None:
        return place if kind is list and place in RunResults.__annotations__ else ""
    if kind is UnionType:
        known = [part for part in parts if part is not NoneType]
        return _misfit(value, known[0], place) if len(known) == 1 else ""
    if kind is object:
        return ""
    held: list[tuple[str, Any, Any]] = []
    if is_typeddict(kind) or kind is dict:
        fits = isinstance(value, dict)
        if fits:
            hints = _hints_of(kind) if parts == () else dict.fromkeys(value, parts[1])
            names = [name for name in value if name in hints]
            held = [(f"{place}.{name}".lstrip("."), value[name], hints[name]) for name in names]
    elif kind in (list, tuple):
        # an interval has two ends
        fits = isinstance(value, list) and (not place.endswith("ci95") or len(value) == 2)
        if fits and kind is list:
            held = [(f"{place}[{i}]", each, parts[0]) for i, each in enumerate(value)]
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is kind
    if not fits:
        return place
    return next(filter(None, (_misfit(*each[1:], each[0]) for each in held)), "")


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    """Return the types of the keys of a part of the results."""
    # the guard's module imports torch, which is slow to load
    return get_type_hints(kind, localns={"GuardRow": dict[str, object]})


def unit_of(results: RunResults) -> str:
    """Return the unit of latencies and budgets: ms, or that of the cost that replaces latency."""
    return str(results.get("unit", "ms"))


def rows_at(
    results: RunResults, condition: float | None, rows: PolicyRows = "rows"
) -> dict[str, PolicyRow]:
    """Return policy → its row at a budget or a number of shots, or with the means over the budgets
    (None)."""
    key = task_of(results).condition
    return {row["policy"]: row for row in results.get(rows, []) if row.get(key) == condition}


def rank_rows(results: RunResults, rows: PolicyRows = "rows") -> list[PolicyRow]:
    """Return the rows at the condition that the results are about, best first."""
    task = task_of(results)
    judged = rows_at(results, task.main_condition(results), rows).values()
    return sorted(judged, key=lambda row: -value_of(row, task.ranked_by))


def value_of(row: Mapping[str, object], metric: str = "utility") -> float:
    """Return the number of a row to rank by; −∞ where it is not known."""
    value = row.get(metric)
    return float(value) if is_known(value) else -math.inf


def not_known(row: Mapping[str, Any]) -> str:
    """Say why a row has no numbers: `not known: 0 of 40 decisions were measured`; "" of a row that
    has some."""
    measured, decisions = row.get("measured_decisions"), row.get("decisions")
    # without these every decision was measured
    if measured is None or decisions is None or are_known(measured, decisions):
        return ""
    return not_known_words(measured, decisions)


def are_held_out_known(results: RunResults) -> bool:
    """Return whether enough of what a controller chose for held-out samples was measured to know
    its score there, as far as the guard counted that; earlier versions did not."""
    return all(row.get("gain", 0.0) is not None for row in chain(*(results.get("guard") or [])))


def mean_of(rows: Sequence[Mapping[str, object]], name: str) -> float:
    """Return the mean of the known values; NaN where none is known."""
    values = list(filter(is_known, (row.get(name) for row in rows)))
    return float(np.mean(values or [math.nan]))


def guard_by_budget(results: RunResults) -> list[list[GuardRow]]:
    """Return the guard's results: for each budget a row for each seed. [] without a guard."""
    at = {}
    for rows in zip(*(results.get("guard") or []), strict=True):
        at[rows[0]["budget_ms"]] = list(rows)
    return list(at.values())


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """Return the expected calibration error of the bins of `results["reliability"]`: the mean over
    all decisions of the absolute difference between predicted probability and observed share in
    their bin (Naeini, Cooper and Hauskrecht 2015, "Obtaining Well Calibrated Probabilities Using
    Bayesian Binning", AAAI). NaN without bins."""
    if not bins:
        return math.nan
    errors = [abs(row["expected_in_time"] - row["in_time"]) for row in bins]
    return float(np.average(errors, weights=[row["decisions"] for row in bins]))


def grpo_begins(results: RunResults) -> list[int]:
    """Return the iteration at which GRPO begins; [] if training had no warm-up or no GRPO, or if it
    is not known."""
    training = results.get("training") or {}
    if training.get("iterations") and training.get("warmup_iterations"):
        return [training["warmup_iterations"]]
    return []


def kept_before_grpo(results: RunResults) -> int:
    """Count the seeds whose best checkpoint is from before GRPO."""
    # without GRPO nothing is kept from before it
    begin = max(grpo_begins(results), default=-1)
    return sum(seed.get("iteration", math.inf) <= begin for seed in results.get("chosen") or ())


def differences_at(results: RunResults, shots: int) -> dict[tuple[str, str], DifferenceRow]:
    """Return (policy, the policy it is compared with) → the difference at a number of shots."""
    rows = [row for row in results.get("differences", []) if row["shots"] == shots]
    return {(row["policy"], row["against"]): row for row in rows}


def baselines(results: RunResults) -> list[str]:
    """Return the baselines, the best first: of demonstrations the simple ways, else every policy
    that is neither learned nor a reference."""
    task = task_of(results)
    policies = [row["policy"] for row in rank_rows(results)]
    if task.name == DEMONSTRATIONS.name:
        from knobwise.agents.selector.baselines import (
            SIMPLE,  # imports torch, which is slow to load
        )

        return [name for name in policies if name in SIMPLE]
    references = (*task.trained, task.low, SINGLE, task.high)
    return [name for name in policies if name not in references]

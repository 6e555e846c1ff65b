"""Names and numbers in words, for the sentences and tables of all pages; reading `results.json`."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from knobwise.common.errors import Damaged, InputError
from knobwise.common.files import write_json
from knobwise.common.json_text import decoded, is_deeper
from knobwise.envs.tables.units import in_words
from knobwise.experiments.evidence.decisions import FILE
from knobwise.experiments.evidence.problem import (
    DEMONSTRATIONS,
    Metric,
    Results,
    Row,
    problem_of,
)
from knobwise.experiments.evidence.statistics import Difference
from knobwise.experiments.evidence.statistics import sign_of as sign_of

LEARNED = "controller"
TEACHER = "teacher"
STATIC = "budget_aware_static"
ORACLE = "oracle"
FROZEN = "controller_frozen"
MIX = "static_mix"
SINGLE = "best_single"
POLICIES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("policies.json").read_text(encoding="utf-8")
)
"""Policy → its name, its colour and a description."""


def policy_name(policy: str, results: Results | None = None) -> str:
    """Return a policy in plain words; the names of some controls contain what was hidden in these
    results, and others what their budgets limit."""
    if policy in POLICIES:
        name = POLICIES[policy]["name"].format(hidden=hidden_words(results or {}))
        return said_of(results or {}, name)
    return policy.replace("_", " ")


def hidden_words(results: Results) -> str:
    """Name the blocks of the embeddings that the controls did not see."""
    return listed(results.get("hidden") or ["information"])


# -- numbers ---------------------------------------------------------------------------------------


def known(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def quantity(value: float | None, unit: str = "ms") -> str:
    """Format a number and its unit, with three significant figures, or with all digits before the
    point from 100 on."""
    if not known(value):
        return "–"
    # some files keep only six figures of a budget: rounding to six first makes 2.185 look the same
    # from every file
    rounded = float(f"{value:.6g}")
    # "#" keeps trailing zeros, and also a point at the end
    figures = f"{rounded:#.3g}".rstrip(".")
    if abs(value) >= 100:
        figures = f"{value:,.0f}"
    return f"{figures} {unit}".rstrip()


def number(value: Any, how: str) -> str:
    """Format a number, for example with ".3f" or "+.1%"; return a dash if it is not known."""
    if not known(value):
        return "–"
    sign = "+" if how.startswith("+") else ""
    return f"{value:{sign}z{how.removeprefix('+')}}"  # z: no −0.0


def interval(ci95: Any, how: str) -> str:
    """Format the interval that stands below a number in a cell.

    It is "" where both ends are equal, as for the gap that the oracle closes.
    """
    if not ci95 or not all(map(known, ci95)) or not ci95[0] < ci95[1]:
        return ""
    return "\n" + bracketed(ci95, how)


def bracketed(ci95: Sequence[float], how: str) -> str:
    """Write an interval in brackets, so that it excludes 0 wherever `sign_of` says so: an end that
    would be rounded to 0 gets more digits."""
    written = [number(end, how) for end in ci95]
    digits = re.search(r"\.(\d)", how)
    # an end without a digit other than 0
    vanished = not all(re.search("[1-9]", end) for end in written)
    if digits and vanished and sign_of(ci95):
        return bracketed(ci95, how.replace(digits[0], f".{int(digits[1]) + 1}"))
    return f"[{', '.join(written)}]"


def cell(row: Row, metric: Metric, unit: str = "ms") -> str:
    """Return the cell of a metric, with its interval; `unit` is the unit of latencies."""
    value = row.get(metric.key)
    # latencies and costs have no interval
    if metric.unit:
        return quantity(value, {"ms": unit}.get(metric.unit, metric.unit))
    ci95 = row.get(f"{metric.key}_ci95")
    return number(value, metric.how) + interval(ci95, metric.how.removeprefix("+"))


def points(share: Any, how: str = "+.1f") -> str:
    """Format a share in points (hundredths); return a dash if it is not known."""
    if not known(share):
        return "–"
    return number(100 * share, how)


def span(ci95: Sequence[float] | None, how: str = "") -> str:
    """Write an interval for a sentence, in the format `how`, or in points if that is "".

    An unknown interval is "".
    """
    if not ci95 or not all(map(known, ci95)):
        return ""
    if not how:
        ci95 = [100 * end for end in ci95]
    return f" {bracketed(ci95, how or '.1f')}"


def listed(words: Sequence[str]) -> str:
    """Join words with commas and "and"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, such as `1 request` and `1,000 requests`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shots_words(count: int) -> str:
    return counted(count, "shot")


# -- differences -----------------------------------------------------------------------------------

COMPARED = {1: "is better than", -1: "is worse than", 0: "shows no difference from"}
"""`sign_of` a difference → what it shows, in a sentence."""
SIGN_WORDS = {1: "better", -1: "worse", 0: "no difference shown"}
"""`sign_of` a difference → what it shows, in a table."""
LEANING = {1: "may be better than", -1: "may be worse than"}
"""`sign_of` a difference whose interval excludes 0 while its p is not small → the same, in a
sentence."""
LEANING_WORDS = {1: "perhaps better", -1: "perhaps worse"}
"""The same, in a table."""


def shown_by(difference: Difference) -> str:
    """Return what a tested difference shows, for a table: what interval and p say together."""
    if not difference.sign and sign_of(difference.ci95):
        return LEANING_WORDS[sign_of(difference.ci95)]
    return SIGN_WORDS[difference.sign]


def difference_words(row: Row) -> str:
    """Write a difference for a sentence: `+1.2 points [0.3, 2.1]`."""
    return f"{points(row['difference'])} points{span(row['ci95'])}"


def difference_cell(row: Row) -> str:
    """Return the cell of a difference, in points, with its interval; a dash where it is not
    known."""
    cell = points(row.get("difference"))
    ci95 = row.get("ci95")
    if ci95 and all(map(known, ci95)):
        cell += "\n" + bracketed([100 * end for end in ci95], "+.1f")
    return cell


# -- results.json ----------------------------------------------------------------------------------


MOST_BYTES = 100_000_000
"""The longest `results.json` that is read."""
DEEPEST = 40
"""The most levels of lists and objects in it."""


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write `results.json`, with digests of its content and of `decisions.parquet`, which has been
    written before."""
    results = results | {"sha256": _digests(folder, results)}
    write_json(folder / "results.json", results)


def _digests(folder: Path, results: dict[str, Any]) -> list[str]:
    """Return SHA-256 of the results, and of the decisions if the file exists."""
    content = {key: value for key, value in results.items() if key != "sha256"}
    contents = [json.dumps(content).encode()]
    if (folder / FILE).exists():
        contents.append((folder / FILE).read_bytes())
    return [hashlib.sha256(content).hexdigest() for content in contents]


def read_results(run_folder: str | Path) -> dict[str, Any]:
    """Read `results.json` in the folder of a run.

    Raises:
        InputError: it is missing, does not hold the results of a run, or is larger or deeper than
            these are.
        Damaged: it does not match its checksum.
    """
    path = Path(run_folder) / "results.json"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        results: dict[str, Any] = decoded(path.read_bytes())
        if is_deeper(results, DEEPEST):
            raise ValueError("nested too deeply")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is this the folder of a finished run?") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # bytes that are no text, text that is no JSON
        raise InputError(f"{path}: not the results of a run ({error})") from error
    if isinstance(results, dict) and "sha256" in results:
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
    return results


def unit_of(results: Results) -> str:
    """Return the unit of latencies and budgets: ms, or that of the cost that replaces latency."""
    return str(results.get("unit", "ms"))


def said_of(results: Results, text: str) -> str:
    """Return a text about latencies as one about what these results limit, such as a price."""
    return in_words(text, unit_of(results))


def place_words(results: Results, place: float) -> str:
    """Return a budget or a number of shots in words."""
    if problem_of(results).averaged:
        return quantity(place, unit_of(results))
    return shots_words(int(place))


def rows_at(results: Results, place: float | None, rows: str = "rows") -> dict[str, Row]:
    """Return policy → its row at a budget or a number of shots, or with the means over the budgets
    (None)."""
    key = problem_of(results).place
    return {row["policy"]: row for row in results.get(rows, []) if row.get(key) == place}


def ranked(results: Results, rows: str = "rows") -> list[Row]:
    """Return the rows at the place that the results are about, best first."""
    problem = problem_of(results)
    judged = rows_at(results, problem.main_place(results), rows).values()
    return sorted(judged, key=lambda row: -value_of(row, problem.ranked_by))


def value_of(row: Row, metric: str = "utility") -> float:
    """Return the number of a row to rank by; −∞ where it is not known."""
    if known(row.get(metric)):
        return float(row[metric])
    return -math.inf


def guarantees(results: Results) -> list[list[Row]]:
    """Return the guard's results: for each budget a row for each seed. [] without a guard."""
    at = {}
    for rows in zip(*(results.get("guard") or []), strict=True):
        at[rows[0]["budget_ms"]] = list(rows)
    return list(at.values())


def in_seeds(count: int, seeds: int) -> str:
    """Say in how many seeds something holds; "" where that is in all."""
    return f" in {count} of {seeds} seeds" * (count < seeds)


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Return the mean of the known values; NaN where none is known."""
    values = [row[name] for row in rows if known(row.get(name))]
    return float(np.mean(values or [math.nan]))


def calibration_error(bins: Sequence[Row]) -> float:
    """Return the expected calibration error of the bins of `results["reliability"]`: the mean over
    all decisions of the absolute difference between predicted probability and observed share in
    their bin (Naeini, Cooper and Hauskrecht 2015, "Obtaining Well Calibrated Probabilities Using
    Bayesian Binning", AAAI). NaN without bins."""
    if not bins:
        return math.nan
    errors = [abs(row["expected_in_time"] - row["in_time"]) for row in bins]
    return float(np.average(errors, weights=[row["decisions"] for row in bins]))


def grpo_begins(results: Results) -> list[int]:
    """Return the iteration at which GRPO begins; [] if training had no warm-up or no GRPO, or if it
    is not known."""
    training = results.get("training") or {}
    if training.get("iterations") and training.get("warmup_iterations"):
        return [training["warmup_iterations"]]
    return []


def kept_before_grpo(results: Results) -> int:
    """Count the seeds whose best checkpoint is from before GRPO."""
    # without GRPO nothing is kept from before it
    begin = max(grpo_begins(results), default=-1)
    return sum(seed.get("iteration", math.inf) <= begin for seed in results.get("chosen") or ())


def differences_at(results: Results, shots: int) -> dict[tuple[str, str], Row]:
    """Return (policy, the policy it is compared with) → the difference at a number of shots."""
    rows = [row for row in results.get("differences", []) if row["shots"] == shots]
    return {(row["policy"], row["against"]): row for row in rows}


def baselines(results: Results) -> list[str]:
    """Return the baselines, the best first: of demonstrations the simple ways, else every policy
    that is neither learned nor a reference."""
    from knobwise.agents.selector.baselines import SIMPLE  # imports torch, which is slow to load

    problem = problem_of(results)
    policies = [row["policy"] for row in ranked(results)]
    if problem is DEMONSTRATIONS:
        return [name for name in policies if name in SIMPLE]
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    return [name for name in policies if name not in references]


def with_score(row: Row, score: str) -> str:
    """Name a policy with its score, and the interval of that."""
    interval = span(row.get(f"{score}_ci95"), ".3f")
    return f"{policy_name(row['policy'])} ({number(value_of(row, score), '.3f')}{interval})"

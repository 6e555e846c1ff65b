"""Names and numbers in words, for the sentences and tables of all pages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from knobwise.common.words import (
    format_count,
    format_number,
    is_known,
    join_words,
    points,
    quantity,
)
from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import not_known, unit_of, value_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.statistics import Difference, sign_of
from knobwise.experiments.evidence.task import Metric, Row, task_of

LEARNED = "controller"
TEACHER = "teacher"
STATIC = "budget_aware_static"
ORACLE = "oracle"
FROZEN = "controller_frozen"
POLICIES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("policies.json").read_text(encoding="utf-8")
)
"""Policy → its name, its colour and a description."""


def policy_name(policy: str, results: RunResults | None = None) -> str:
    """Return a policy in plain words; the names of some controls contain what was hidden in these
    results, and others what their budgets limit."""
    if policy in POLICIES:
        name = POLICIES[policy]["name"].format(hidden=hidden_words(results or {}))
        return said_of(results or {}, name)
    return policy.replace("_", " ")


def hidden_words(results: RunResults) -> str:
    """Name the blocks of the embeddings that the controls did not see."""
    return join_words(results.get("hidden") or ["information"])


# -- numbers ---------------------------------------------------------------------------------------


def format_interval(ci95: Sequence[float] | None, how: str) -> str:
    """Format the interval that stands below a number in a cell.

    It is "" where both ends are equal, as for the gap that the oracle closes.
    """
    if not ci95 or not all(map(is_known, ci95)) or not ci95[0] < ci95[1]:
        return ""
    return "\n" + bracketed(ci95, how)


def bracketed(ci95: Sequence[float], how: str) -> str:
    """Write an interval in brackets, so that it excludes 0 wherever `sign_of` says so: an end that
    would be rounded to 0 gets more digits."""
    written = [format_number(end, how) for end in ci95]
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
    return format_number(value, metric.how) + format_interval(ci95, metric.how.removeprefix("+"))


def span(ci95: Sequence[float] | None, how: str = "") -> str:
    """Write an interval for a sentence, in the format `how`, or in points if that is "".

    An unknown interval is "".
    """
    if not ci95 or not all(map(is_known, ci95)):
        return ""
    if not how:
        ci95 = [100 * end for end in ci95]
    return f" {bracketed(ci95, how or '.1f')}"


def shots_words(count: int) -> str:
    return format_count(count, "shot")


# -- differences -----------------------------------------------------------------------------------

SIGN_WORDS = {1: "better", -1: "worse", 0: "no difference shown"}
"""`sign_of` a difference → what it shows, in a table."""
LEANING_WORDS = {1: "perhaps better", -1: "perhaps worse"}
"""`sign_of` a difference whose interval excludes 0 while its p is not small → the same."""


def shown_by(difference: Difference) -> str:
    """Return what a tested difference shows, for a table: what interval and p say together."""
    if not difference.sign and sign_of(difference.ci95):
        return LEANING_WORDS[sign_of(difference.ci95)]
    return SIGN_WORDS[difference.sign]


def difference_words(row: Row) -> str:
    """Write a difference for a sentence: `+1.2 points [0.3, 2.1]`."""
    return f"{points(row['difference'])} points{span(row['ci95'])}"


def reward_words(row: Row) -> str:
    """Write a difference of rewards, which have a unit of their own: `+2.67 [2.14, 3.2]`."""
    return f"{format_number(row['difference'], '+.3g')}{span(row['ci95'], '.3g')}"


def difference_cell(row: Row) -> str:
    """Return the cell of a difference, in points, with its interval; a dash where it is not
    known."""
    cell = points(row.get("difference"))
    ci95 = row.get("ci95")
    if ci95 and all(map(is_known, ci95)):
        cell += "\n" + bracketed([100 * end for end in ci95], "+.1f")
    return cell


def said_of(results: RunResults, text: str) -> str:
    """Return a text about latencies as one about what these results limit, such as a price."""
    return in_words(text, unit_of(results))


def condition_words(results: RunResults, condition: float) -> str:
    """Return a budget or a number of shots in words."""
    if task_of(results).averaged:
        return quantity(condition, unit_of(results))
    return shots_words(int(condition))


def seeds_words(seeds: Sequence[int]) -> str:
    """Say how many seeds there are, and which: `2 seeds (0, 1)`."""
    return f"{format_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})"


def in_seeds(count: int, seeds: int) -> str:
    """Say in how many seeds something holds; "" where that is in all."""
    return f" in {count} of {seeds} seeds" * (count < seeds)


def with_score(row: Row, score: str) -> str:
    """Name a policy with its score, and the interval of that."""
    if unknown := not_known(row):
        return f"{policy_name(row['policy'])} ({unknown})"
    interval = span(row.get(f"{score}_ci95"), ".3f")
    return f"{policy_name(row['policy'])} ({format_number(value_of(row, score), '.3f')}{interval})"

"""How the choices of a controller depend on the request, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import unit_of
from knobwise.experiments.evidence.schema import RunResults, Tree
from knobwise.experiments.evidence.task import DEADLINE, Row, task_of
from knobwise.experiments.wording.words import LEARNED, number, quantity, sign_of, span


def setting(knobs: Mapping[str, Any]) -> str:
    """Return a configuration in words: `crops=2, mode=fast`."""
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


def rule_condition(bounds: Sequence[tuple[str, str, float]], unit: str) -> str:
    """Return the condition of a rule in words; "always" without bounds."""
    parts = []
    for name, sign, value in bounds:
        bound = quantity(value, unit) if name == "budget" else f"{value:.3g}"
        if "=" in name and value == 0.5:
            # a place of a text holds 0 or 1
            text, _, wanted = name.partition("=")
            parts.append(f"{text} is {wanted}" if sign == ">" else f"{text} is not {wanted}")
        else:
            parts.append(f"{name} {sign} {bound}")
    return " and ".join(parts) or "always"


def on_usage(results: RunResults) -> list[str]:
    """Say for each budget how often each value of a knob is used."""
    lines = []
    usage = [row for row in results["knob_usage"] if row["policy"] == LEARNED and row["share"] > 0]
    usage.sort(key=lambda row: -row["share"])
    for budget in sorted({row["budget_ms"] for row in usage}):
        knobs: dict[str, list[str]] = {row["knob"]: [] for row in results["knob_usage"]}
        for row in usage:
            if row["budget_ms"] == budget:
                knobs[row["knob"]].append(f"{row['value']} ({number(row['share'], '.0%')})")
        used = "; ".join(f"{knob} {', '.join(shares)}" for knob, shares in knobs.items())
        lines.append(f"At {quantity(budget, unit_of(results))}: {used}.")
    return lines


def on_difficulty(results: RunResults) -> list[str]:
    """Say whether hard samples get costly settings, and whether more time is used."""
    why = results["explanation"]
    hard = why["difficulty"]
    lines = [
        "The difficulty of a sample is the latency of its cheapest right configuration (accuracy "
        f"at least 0.5). {hard['unanswered']:,} of {why['samples']:,} samples have none and are "
        "left out."
    ]
    if hard["groups"]:
        lines.append(_on_correlation(results))
    else:
        lines.append("At every budget all samples get the same setting: nothing can be compared.")
    if more := why.get("more_time"):
        lines.append(
            f"With the next larger budget {number(more['cheaper'], '.1%')} of the choices get "
            f"cheaper (static: {number(more['static_cheaper'], '.1%')}), and "
            f"{number(more['worse'], '.1%')} get slower and less accurate (static: "
            f"{number(more['static_worse'], '.1%')}), by the means of their settings."
        )
    return lines


SPENDS_ON = {
    1: "Easy samples get cheaper settings than hard ones",
    -1: "Hard samples, which are often slow under every setting, get cheaper settings",
    0: "No difference is shown between the settings of easy and hard samples",
}
"""`sign_of` the correlation of settings with difficulty → what it shows."""


def _on_correlation(results: RunResults) -> str:
    """Say how the latency of the choice goes with difficulty, and what of that is the setting."""
    hard = results["explanation"]["difficulty"]
    sign = sign_of(hard["setting_ci95"])
    worthwhile = ""
    if sign < 0 and task_of(results) is DEADLINE:
        worthwhile = (
            " A deadline makes this worthwhile: time that is left over is worth nothing, and a "
            "costly setting would be late."
        )
    return (
        f"{SPENDS_ON[sign]}: at {quantity(hard['budget_ms'], unit_of(results))} the rank "
        "correlation of difficulty with the mean latency of the setting is "
        f"{number(hard['setting'], '+.2f')}{span(hard['setting_ci95'], '+.2f')}.{worthwhile}"
    )


def on_tree(tree: Tree) -> str:
    """Say how well a few rules describe the decisions."""
    return (
        f"A tree with at most eight leaves gets {number(tree['fidelity'], '.0%')}"
        f"{span(tree['ci95'], '.0%')} of the policy's knob values right on held-out decisions, and "
        f"all knobs of {number(tree['exact'], '.0%')} of them. A tree that sees only the budget "
        f"gets {number(tree['by_budget_alone'], '.0%')} of the values right."
    )


def decision(explained: Row, unit: str) -> list[str]:
    """Say why a controller decided as it did for one sample, and what was measured of the choice.

    Args:
        explained: the explanation of `knobwise.load(…).decide`, with what was measured.
        unit: of the budgets.
    """
    budget_ms = explained["budget_ms"]
    question = f" ({explained['question']})" if explained["question"] else ""
    lines = [
        f"Sample {explained['sample']}{question} under a budget of {quantity(budget_ms, unit)}: "
        f"{setting(explained['decision'])}. Why: {explained['reason']}."
    ]
    if guard := explained["guard"]:
        reason = guard["reason"] or ("deployed" if guard["deployed"] else "fell back")
        lines.append(
            f"The guard at {quantity(guard['budget_ms'], unit)}, its nearest calibrated budget: "
            f"{in_words(reason, unit)}."
        )
    if without := explained["without_drift"]:
        lines.append(
            f"This uses what the tracker has learned; without it the choice is {setting(without)}."
        )
    if steps := explained["by_budget"]:
        lines.append("The choice by budget, each up to the next one:")
    for (budget, configuration), (following, _) in pairwise([*steps, (float("inf"), {})]):
        mark = " ← this budget" if budget <= budget_ms < following else ""
        lines.append(f"from {quantity(budget, unit)}: {setting(configuration)}{mark}")
    for row in explained["expected"]:
        if row["configuration"] == explained["decision"]:
            chosen = row["measured"]
    if not chosen:
        return [*lines, "The profile did not measure this configuration for this sample."]
    late = "on time"
    if chosen["latency_ms"] > budget_ms:
        late = f"{quantity(chosen['latency_ms'] - budget_ms, unit)} late"
    late = in_words(late, unit)
    return [
        *lines,
        f"What the profile measured: accuracy {number(chosen['accuracy'], '.2f')} in "
        f"{quantity(chosen['latency_ms'], unit)}, {late}.",
    ]

"""How the choices of a controller depend on the request, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import unit_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.task import DEADLINE, Row, task_of
from knobwise.experiments.wording.words import LEARNED, number, quantity, sign_of, span


def setting(knobs: Mapping[str, Any]) -> str:
    """Return a configuration in words: `crops=2, mode=fast`."""
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


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


SPENDS_ON = {
    1: "Easy samples get cheaper settings than hard ones",
    -1: "Hard samples, which are often slow under every setting, get cheaper settings",
    0: "No difference is shown between the settings of easy and hard samples",
}
"""`sign_of` the correlation of settings with difficulty → what it shows."""


def on_difficulty(results: RunResults) -> list[str]:
    """Say whether hard samples get costly settings, and whether more time is used."""
    why = results["explanation"]
    hard = why["difficulty"]
    lines = []
    if hard["groups"]:
        sign = sign_of(hard["setting_ci95"])
        line = (
            f"{SPENDS_ON[sign]}: at {quantity(hard['budget_ms'], unit_of(results))} the rank "
            "correlation of difficulty with the mean latency of the setting is "
            f"{number(hard['setting'], '+.2f')}{span(hard['setting_ci95'], '+.2f')}."
        )
        if sign < 0 and task_of(results) is DEADLINE:
            line += " Time that is left over is worth nothing, and a costly setting would be late."
        lines.append(line)
    else:
        lines.append("At every budget all samples get the same setting: nothing can be compared.")
    lines.append(
        "The difficulty of a sample is the latency of its cheapest right configuration (accuracy "
        f"at least 0.5). {hard['unanswered']:,} of {why['samples']:,} samples have none and are "
        "left out."
    )
    if more := why.get("more_time"):
        lines.append(
            f"With the next larger budget {number(more['cheaper'], '.1%')} of the choices get "
            f"cheaper (static: {number(more['static_cheaper'], '.1%')}), and "
            f"{number(more['worse'], '.1%')} get slower and less accurate (static: "
            f"{number(more['static_worse'], '.1%')}), by the means of their settings."
        )
    return lines


def decision(explained: Row, unit: str) -> list[str]:
    """Say what the budget, the features and the teacher had to do with a controller's choice for
    one sample, and what was measured of it.

    Args:
        explained: the explanation of `knobwise.load(…).decide`, with what was measured, and the
            choices of `static` and for `typical` features.
        unit: of the budgets.
    """
    budget_ms = explained["budget_ms"]
    chosen = explained["decision"]
    question = f" ({explained['question']})" if explained["question"] else ""
    lines = [
        f"Sample {explained['sample']}{question} under a budget of {quantity(budget_ms, unit)}: "
        f"{setting(chosen)}. Why: {explained['reason']}.",
        f"The budget: without looking at the sample, static chooses "
        f"{_or_same(explained['static'], chosen)}.",
    ]
    if explained["typical"] is not None:
        lines.append(
            "The features: for a sample with average features it would choose "
            f"{_or_same(explained['typical'], chosen)}."
        )
    rows = {setting(row["configuration"]): row for row in explained["expected"]}
    lines += _of_teacher(rows[setting(chosen)], rows.get(setting(explained["static"])), unit)
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
    steps = explained["by_budget"]
    next_budgets = [budget for budget, _ in steps[1:]] + [float("inf")]
    if steps:
        lines.append("The choice by budget, each up to the next one:")
    for (budget, configuration), following in zip(steps, next_budgets, strict=False):
        mark = " ← this budget" if budget <= budget_ms < following else ""
        lines.append(f"from {quantity(budget, unit)}: {setting(configuration)}{mark}")
    measured = rows[setting(chosen)]["measured"]
    if not measured:
        return [*lines, "The profile did not measure this configuration for this sample."]
    late = "on time"
    if measured["latency_ms"] > budget_ms:
        late = f"{quantity(measured['latency_ms'] - budget_ms, unit)} late"
    return [
        *lines,
        f"What the profile measured: accuracy {number(measured['accuracy'], '.2f')} in "
        f"{quantity(measured['latency_ms'], unit)}, {in_words(late, unit)}.",
    ]


def _or_same(configuration: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    return "the same" if configuration == chosen else setting(configuration)


def _of_teacher(chosen: Row, static: Row | None, unit: str) -> list[str]:
    """Say what the teacher expects of the choice, and of that of static if it is another."""
    if "utility" not in chosen:
        return ["The teacher: there is none; the network was trained on rewards alone."]
    parts = []
    for name, row in (("this choice", chosen), ("static's", static)):
        if row is not None and (name == "this choice" or row is not chosen):
            text = f"utility {number(row['utility'], '.3f')} of {name}"
            text += f" (accuracy {number(row['accuracy'], '.2f')} in "
            parts.append(f"{text}{quantity(row['latency_ms'], unit)})")
    return [f"The teacher expects {', '.join(parts)}."]

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
    1: "Easy samples get cheaper configurations than hard ones",
    -1: "Hard samples get cheaper configurations",
    0: "Easy and hard samples get equally costly configurations, as far as one can tell",
}
"""`sign_of` the correlation of configurations with difficulty → what it shows."""


def on_difficulty(results: RunResults) -> list[str]:
    """Say whether hard samples get costly settings, and whether more time is used."""
    why = results["explanation"]
    hard = why["difficulty"]
    lines = []
    if hard["groups"]:
        sign = sign_of(hard["setting_ci95"])
        line = (
            f"{SPENDS_ON[sign]}: rank correlation {number(hard['setting'], '+.2f')}"
            f"{span(hard['setting_ci95'], '+.2f')} of difficulty with the configuration's mean "
            f"latency, at {quantity(hard['budget_ms'], unit_of(results))}."
        )
        if sign < 0 and task_of(results).name == DEADLINE.name:
            line += " They are often slow anyway: a costlier one would miss the deadline, and "
            line += "unused time earns nothing."
        lines.append(line)
    else:
        lines.append("At every budget all samples get the same configuration: nothing to compare.")
    lines.append(
        "Difficulty is the latency of the fastest configuration that answers correctly (accuracy "
        f"≥ 0.5). {hard['unanswered']:,} of {why['samples']:,} samples have none and are excluded."
    )
    if more := why.get("more_time"):
        lines.append(
            f"Raising the budget one step makes {number(more['cheaper'], '.1%')} of choices "
            f"cheaper (static: {number(more['static_cheaper'], '.1%')}) and "
            f"{number(more['worse'], '.1%')} slower yet less accurate (static: "
            f"{number(more['static_worse'], '.1%')}), judged by configuration means."
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
        f"Static (budget only) would choose {_or_same(explained['static'], chosen)}.",
    ]
    if explained["typical"] is not None:
        lines.append(
            "The controller, given average features, would choose "
            f"{_or_same(explained['typical'], chosen)}."
        )
    rows = {setting(row["configuration"]): row for row in explained["expected"]}
    lines += _of_teacher(rows[setting(chosen)], rows.get(setting(explained["static"])), unit)
    if guard := explained["guard"]:
        reason = guard["reason"] or f"{'policy' if guard['deployed'] else 'static'} deployed"
        lines.append(
            f"Guard (calibrated at {quantity(guard['budget_ms'], unit)}, the nearest budget): "
            f"{in_words(reason, unit)}."
        )
    if without := explained["without_drift"]:
        line = "Tracked drift does not change the choice."
        if without != chosen:
            line = f"Tracked drift changes the choice: without it, {setting(without)}."
        lines.append(line)
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

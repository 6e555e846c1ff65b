"""How a controller chooses: what its choices depend on in a run, and why it chose as it did for one
sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from knobwise.common.words import format_number, quantity, setting, spelled
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.units import unit_in
from knobwise.experiments.evidence.results import unit_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.statistics import sign_of
from knobwise.experiments.evidence.task import DEADLINE, Row, task_of
from knobwise.experiments.report.sentences import Sentence, texts
from knobwise.experiments.report.tables import (
    Block,
    Folded,
    Table,
    print_sections,
    records,
    reword_costs,
)
from knobwise.experiments.report.words import LEARNED, condition_words, span

# -- over a run ------------------------------------------------------------------------------------


def explanation(results: RunResults) -> list[Block]:
    """Return the blocks that explain how the deployed policy sets the knobs."""
    why = results["explanation"]
    unit = unit_of(results)
    about = texts()["about"]
    seed = ""
    if results.get("best_seed") is not None and len(results["seeds"]) > 1:
        seed = f" (seed {results['best_seed']})"
    filled = {"seed": seed, "samples": f"{why['samples']:,}", "reads": on_reading(results)}
    score = task_of(results).score
    if task_of(results).equal_latency:
        score += " minus the price of the latency"
    features = []
    for row in why["importance"]:
        # a block of features, or one of its columns: by its name, or else by its number
        name = row["name"]
        if isinstance(row["column"], str):
            name = row["column"]
        elif row["column"] is not None:
            name = f"{name} [{row['column']}]"
        features.append(row | {"name": name})
    blocks: list[Block] = [
        about["why"].format(**filled),
        list(map(str, on_usage(results))),
        *(map(str, on_difficulty(results)) if "unanswered" in why["difficulty"] else ()),
        records(why["difficulty"]["groups"], "difficulty", unit),
        about["importance"].format(score=score) if features else "",
        records(features, "importance"),
        str(on_rules(results)),
        _rules(results),
    ]
    for title, decisions in (("gain most over", why["best"]), ("lose most against", why["worst"])):
        # there are none where nothing is known of gains
        if decisions:
            table = records(decisions, "decisions", unit)
            blocks.append(Folded(f"The decisions that {title} static", [table]))
    return [block for block in blocks if not isinstance(block, Table) or block.rows]


def print_explanation(results: RunResults, console: Console) -> None:
    """Print why the deployed policy sets the knobs as it does."""
    blocks = reword_costs(explanation(results), unit_of(results))
    print_sections(console, {"Why these configurations": blocks})


def on_reading(results: RunResults) -> Sentence:
    """Say at which budgets the policy reads features; where the guard fell back, it does not."""
    read_at = results["explanation"]["reads"]
    if not read_at:
        return Sentence("reads_nothing")
    elsewhere: Sentence | str = ""
    if len(read_at) < len(task_of(results).conditions(results)):
        elsewhere = Sentence("static_elsewhere")
    budgets = ", ".join(condition_words(results, budget) for budget in read_at)
    return Sentence("reads", budgets=budgets, elsewhere=elsewhere)


def on_usage(results: RunResults) -> list[Sentence]:
    """Say for each budget how often each value of a knob is used."""
    lines = []
    usage = [row for row in results["knob_usage"] if row["policy"] == LEARNED and row["share"] > 0]
    usage.sort(key=lambda row: -row["share"])
    for budget in sorted({row["budget_ms"] for row in usage}):
        knobs: dict[str, list[str]] = {row["knob"]: [] for row in results["knob_usage"]}
        for row in usage:
            if row["budget_ms"] == budget:
                knobs[row["knob"]].append(
                    f"{spelled(row['value'])} ({format_number(row['share'], '.0%')})"
                )
        used = "; ".join(f"{knob} {', '.join(shares)}" for knob, shares in knobs.items())
        lines.append(Sentence("usage", budget=quantity(budget, unit_of(results)), used=used))
    return lines


SPENDS_ON = {1: "hard_get_more", -1: "hard_get_less", 0: "hard_get_the_same"}
"""`sign_of` the correlation of configurations with difficulty → what it shows."""


def on_difficulty(results: RunResults) -> list[Sentence]:
    """Say whether hard samples get costly settings, and whether more time is used."""
    why = results["explanation"]
    hard = why["difficulty"]
    lines = [Sentence("all_the_same")]
    if hard["groups"]:
        correlation = Sentence(
            "correlation",
            value=format_number(hard["setting"], "+.2f"),
            ci95=span(hard["setting_ci95"], "+.2f"),
            budget=quantity(hard["budget_ms"], unit_of(results)),
        )
        sign = sign_of(hard["setting_ci95"])
        slow_anyway: Sentence | str = ""
        if sign < 0 and task_of(results).name == DEADLINE.name:
            slow_anyway = Sentence("slow_anyway")
        lines = [Sentence(SPENDS_ON[sign], correlation=correlation, slow_anyway=slow_anyway)]
    counts = {"unanswered": f"{hard['unanswered']:,}", "samples": f"{why['samples']:,}"}
    lines.append(Sentence("difficulty", **counts))
    if more := why.get("more_time"):
        shares = {name: format_number(share, ".1%") for name, share in more.items()}
        lines.append(Sentence("more_time", **shares))
    return lines


def on_rules(results: RunResults) -> Sentence:
    """Say how well a few rules describe the decisions."""
    tree = results["explanation"]["tree"]
    limits: Sentence | str = ""
    beyond = sign_of(tree.get("beyond_budget_ci95")) > 0
    if "beyond_budget_ci95" not in tree:
        # results of before 0.2 have no interval of the difference
        beyond = tree["ci95"][0] > tree["by_budget_alone"]
    if not beyond:
        limits = Sentence("tree_explains_nothing")
    elif any(re.search(r"\[\d+\]$", name) for name in _names_in(tree)):
        limits = Sentence("tree_without_names")
    return Sentence(
        "tree",
        fidelity=f"{format_number(tree['fidelity'], '.0%')}{span(tree['ci95'], '.0%')}",
        by_budget=format_number(tree["by_budget_alone"], ".0%"),
        limits=limits,
    )


def _names_in(tree: Row) -> set[str]:
    """Return the names of the features in the rules of a tree."""
    return {name for rule in tree["rules"] for name, _, _ in rule["when"]}


def _rules(results: RunResults) -> Table:
    """List the rules if the features add to what the budget says alone, and have names."""
    rules = []
    if not on_rules(results).fields["limits"]:
        unit = unit_of(results)
        for rule in results["explanation"]["tree"]["rules"]:
            rules.append({**rule, "if": rule_condition(rule["when"], unit)})
    return records(rules, "rules")


def rule_condition(bounds: Sequence[tuple[str, str, float]], unit: str) -> str:
    """Return the condition of a rule in words; "always" without bounds."""
    parts = []
    for name, sign, value in bounds:
        bound = quantity(value, unit) if name == "budget" else f"{value:.3g}"
        text, equals, wanted = name.partition("=")
        if equals and value == 0.5:
            # a place of a text holds 0 or 1
            parts.append(f"{text} is {'not ' * (sign != '>')}{wanted}")
        else:
            parts.append(f"{name} {sign} {bound}")
    return " and ".join(parts) or "always"


# -- of one sample ---------------------------------------------------------------------------------


def decision(explained: Row, unit: str) -> list[str]:
    """Say what the budget, the features and the teacher had to do with a controller's choice for
    one sample, and what was measured of it.

    Args:
        explained: the explanation of `knobwise.load(…).decide`, with what was measured, and the
            choices of `static` and for `typical` features.
        unit: of the budgets.
    """
    return list(map(str, on_decision(explained, unit)))


def on_decision(explained: Row, unit: str) -> list[Sentence]:
    """Return the sentences of `decision`."""
    chosen = explained["decision"]
    question = f" ({explained['question']})" if explained["question"] else ""
    decided = Sentence(
        "decided",
        sample=explained["sample"],
        question=question,
        budget=quantity(explained["budget_ms"], unit),
        choice=setting(chosen),
        reason=explained["reason"],
    )
    limits = explained["limits"]
    static = _or_same(explained["static"], chosen)
    within: Sentence | str = Sentence("and_limits") if limits else ""
    lines = [decided, Sentence("static_choice", limits=within, choice=static)]
    if explained["typical"] is not None:
        lines.append(Sentence("typical_choice", choice=_or_same(explained["typical"], chosen)))
    rows = {setting(row["configuration"]): row for row in explained["expected"]}
    row = rows[setting(chosen)]
    lines.append(_of_teacher(row, rows.get(setting(explained["static"])), unit))
    if guard := explained["guard"]:
        reason = guard["reason"] or f"{'policy' if guard['deployed'] else 'static'} deployed"
        at = quantity(guard["budget_ms"], unit)
        lines.append(Sentence("guard", budget=at, reason=in_words(reason, unit)))
    if without := explained["without_drift"]:
        line = Sentence("same_without_drift")
        if without != chosen:
            line = Sentence("other_without_drift", choice=setting(without))
        lines.append(line)
    budget_ms = explained["budget_ms"] if explained["deadline"] else None
    measured = _measured(row, budget_ms, limits, unit)
    return [*lines, *_by_budget(explained, unit), measured]


def _or_same(configuration: Mapping[str, object], chosen: Mapping[str, object]) -> Sentence | str:
    return Sentence("the_same") if configuration == chosen else setting(configuration)


def _of_teacher(chosen: Row, static: Row | None, unit: str) -> Sentence:
    """Say what the teacher expects of the choice, and of that of static if it is another."""
    if "utility" not in chosen:
        return Sentence("no_teacher")
    rows = {"this choice": chosen}
    if static is not None and static is not chosen:
        rows["static's"] = static
    parts = []
    for name, row in rows.items():
        expected = Sentence(
            "expected",
            utility=format_number(row["utility"], ".3f"),
            choice=name,
            accuracy=format_number(row["accuracy"], ".2f"),
            latency=quantity(row["latency_ms"], unit),
        )
        parts.append(str(expected))
    return Sentence("teacher", expected=", ".join(parts))


def _by_budget(explained: Row, unit: str) -> list[Sentence]:
    """List the choices for this sample under other budgets."""
    steps = explained["by_budget"]
    next_budgets = [budget for budget, _ in steps[1:]] + [float("inf")]
    lines = [Sentence("by_budget")] if steps else []
    for (budget, configuration), following in zip(steps, next_budgets, strict=False):
        mark = " ← this budget" if budget <= explained["budget_ms"] < following else ""
        choice = setting(configuration)
        at = quantity(budget, unit)
        lines.append(Sentence("from_budget", budget=at, choice=choice, mark=mark))
    return lines


def _measured(
    chosen: Row, budget_ms: float | None, limits: Mapping[str, float], unit: str
) -> Sentence:
    """Say what the profile measured of the choice, whose budget is None where nothing is late; an
    answer above a limit counts as late."""
    measured = chosen["measured"]
    if not measured:
        return Sentence("not_measured")
    faults = []
    in_time = "on time" if budget_ms is not None else "where nothing is late"
    # a budget or limit is compared as float32, as what was measured
    if budget_ms is not None and measured["latency_ms"] > np.float32(budget_ms):
        late = f"{quantity(measured['latency_ms'] - budget_ms, unit)} late"
        faults.append(in_words(late, unit))
    for name, limit in limits.items():
        # another profile need not have it
        cost = measured.get(f"cost_{name}")
        if cost is not None and cost > np.float32(limit):
            words = unit_in(name) or name
            numbers = {"cost": f"{cost:.4g} {words}", "limit": f"{limit:g} {words}"}
            faults.append(str(Sentence("above_limit", **numbers)))
    return Sentence(
        "measured",
        accuracy=format_number(measured["accuracy"], ".2f"),
        latency=quantity(measured["latency_ms"], unit),
        late=", ".join(faults) or in_words(in_time, unit),
    )

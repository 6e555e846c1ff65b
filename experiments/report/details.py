"""What a page folds: further tables, what explains the choices, how to repeat a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from markupsafe import Markup
from rich.console import Console

from knobwise.envs.tables.units import TIMES
from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.evidence.results import unit_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.task import Row, task_of
from knobwise.experiments.report.content import by_dataset, table_at
from knobwise.experiments.report.live import details_of as details_of_live
from knobwise.experiments.report.tables import (
    Folded,
    Table,
    print_sections,
    records,
    reworded,
    texts,
)
from knobwise.experiments.wording import words
from knobwise.experiments.wording.between_runs import condition_name
from knobwise.experiments.wording.choice_sentences import on_difficulty, on_usage
from knobwise.experiments.wording.words import number, policy_name, quantity


def details(comparison: Comparison) -> list[Folded]:
    """Build the folded parts of a page: settings that differ, tables of every condition, records of
    training, glossary, commands."""
    results = comparison.reference.results
    about = texts()["about"]
    task = comparison.task
    unit = comparison.unit
    main = condition_name(comparison, comparison.main)
    hidden = words.hidden_words(results)
    parts = []
    if comparison.settings:
        labels = [run.label for run in comparison.runs]
        rows = [[key, *values] for key, values in comparison.settings.items()]
        table = Table(["option", *labels], rows)
        parts.append(Folded("Options that differ", [table], open=True))
    if results.get("by_dataset") and comparison.single:
        text = about["datasets"][task.name]
        parts.append(Folded("Every data set", [text, by_dataset(results)], open=True))
    if "live" in results:
        parts += details_of_live(results)
    every = [
        Folded(condition_name(comparison, condition), [table_at(comparison, condition)])
        for condition in comparison.conditions
    ]
    if every:
        parts.append(Folded(f"Every {task.condition_words[0]}", every))
    # records of the results that need no more than a format
    for name, rows_of in RECORDS.items():
        title, text = about[name]
        table = records(rows_of(comparison), name, unit, results)
        if table.rows:
            blocks = [text.format(main=main, hidden=hidden), table]
            parts.append(Folded(title, blocks, open=name == "spent"))
    if comparison.single and results.get("explanation"):
        parts.append(Folded("Why these configurations", explanation(results)))
    parts.append(Folded("What the words mean", [_glossary(comparison)]))
    parts = reworded(parts, unit)
    if comparison.reference.folder is not None:
        parts.append(_reproduce(comparison))
    return parts


def _of_run(key: str) -> Callable[[Comparison], list[Any]]:
    """Make a function that reads the records under `key` of a single run; it gives [] for several
    runs."""

    def rows(comparison: Comparison) -> list[Any]:
        results: Row = comparison.reference.results
        return list(results.get(key) or ()) if comparison.single else []

    return rows


def _calls(comparison: Comparison) -> list[Any]:
    """Return how often each policy called the answering model, as a mean over the seeds."""
    rows = _of_run("true_calls")(comparison)
    return [row | {"calls": sum(row["calls"]) / len(row["calls"])} for row in rows]


def _by_seed(comparison: Comparison, rows: Sequence[Sequence[Row]]) -> list[Any]:
    """Flatten the records of each seed into one list, with the seed in each."""
    seeds = comparison.reference.results.get("seeds", range(len(rows)))
    pairs = zip(seeds, rows, strict=False)
    return [{**row, "seed": seed} for seed, of_seed in pairs for row in of_seed]


def _guarantees(comparison: Comparison) -> list[Any]:
    """List the rows of the guard: one for each seed and budget."""
    return _by_seed(comparison, _of_run("guard")(comparison))


def _chosen(comparison: Comparison) -> list[Any]:
    """Return the iteration that was kept in each seed, and the weight and the settings of each
    member of its teacher."""
    rows = []
    for chosen in _of_run("chosen")(comparison):
        members = []
        for name, weight in (chosen.get("weights") or {"network": None}).items():
            value = chosen.get("settings", {}).get(name)
            about = texts()["members"].get(name, "")
            member = {"member": name, "weight": weight, "value": value, "settings": about}
            members.append(member | {"iteration": f"{chosen.get('iteration', 0):,}"})
        rows.append(members)
    return _by_seed(comparison, rows)


def _spent(comparison: Comparison) -> list[Any]:
    """List what the controller of a single run got and spent under each mean budget."""
    if not (comparison.single and comparison.task.equal_latency):
        return []
    results = comparison.reference.results
    rows = [comparison.task.row(results, words.LEARNED, each) for each in comparison.conditions]
    return [row for row in rows if row]


def _stages(comparison: Comparison) -> list[Any]:
    """List the tested differences between policies that both runs trained, with what is shown by
    each."""
    return [asdict(each) | {"shown": words.shown_by(each)} for each in comparison.by_policy]


RECORDS: dict[str, Callable[[Comparison], list[Any]]] = {
    "spent": _spent,
    "stages": _stages,
    "differences": _of_run("differences"),
    "votes": _of_run("votes"),
    "controls": _of_run("controls"),
    "calls": _calls,
    "guarantees": _guarantees,
    "chosen": _chosen,
}
"""Name in `texts.yaml` → the records of a folded table."""


# -- why these settings ----------------------------------------------------------------------------


def explanation(results: RunResults) -> list[Any]:
    """Return the blocks that explain how the deployed policy sets the knobs."""
    why = results["explanation"]
    unit = unit_of(results)
    about = texts()["about"]
    seed = ""
    if results.get("best_seed") is not None and len(results["seeds"]) > 1:
        seed = f" (seed {results['best_seed']})"
    # where the guard fell back, no feature is read
    reads = "It uses no features."
    if why["reads"]:
        budgets = ", ".join(words.condition_words(results, budget) for budget in why["reads"])
        reads = f"It uses features at {budgets}."
        if len(why["reads"]) < len(task_of(results).conditions(results)):
            reads += " Elsewhere static decides."
    filled = {"seed": seed, "samples": f"{why['samples']:,}", "reads": reads}
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
    blocks = [
        about["why"].format(**filled),
        on_usage(results),
        *on_difficulty(results),
        records(why["difficulty"]["groups"], "difficulty", unit),
        about["importance"].format(score=score) if features else "",
        records(features, "importance"),
        *_rules(results),
    ]
    for title, decisions in (("gain most over", why["best"]), ("lose most against", why["worst"])):
        table = records(decisions, "decisions", unit)
        blocks.append(Folded(f"The decisions that {title} static", [table]))
    return [block for block in blocks if not isinstance(block, Table) or block.rows]


def print_explanation(results: RunResults, console: Console) -> None:
    """Print why the deployed policy sets the knobs as it does."""
    blocks = reworded(explanation(results), unit_of(results))
    print_sections(console, {"Why these configurations": blocks})


def _rules(results: RunResults) -> list[Any]:
    """Say how well a few rules describe the decisions; return the rules if the features add to what
    the budget says alone, and have names."""
    tree = results["explanation"]["tree"]
    fidelity = f"{number(tree['fidelity'], '.0%')}{words.span(tree['ci95'], '.0%')}"
    by_budget = number(tree["by_budget_alone"], ".0%")
    text = (
        f"A decision tree with at most eight leaves reproduces {fidelity} of the policy's knob "
        f"values on held-out decisions; one on the budget alone {by_budget}."
    )
    if tree["ci95"][0] <= tree["by_budget_alone"]:
        return [f"{text} So simple feature rules explain nothing beyond the budget."]
    names = {name for rule in tree["rules"] for name, _, _ in rule["when"]}
    if any(re.search(r"\[\d+\]$", name) for name in names):
        return [f"{text} Its rules are on columns without names, so they are not listed."]
    unit = unit_of(results)
    rules = [{**rule, "if": rule_condition(rule["when"], unit)} for rule in tree["rules"]]
    return [text, records(rules, "rules")]


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


# -- the end of the page ---------------------------------------------------------------------------


def _glossary(comparison: Comparison) -> dict[str, str]:
    """Explain what is new here, and describe every policy in the tables: term → meaning."""
    task = comparison.task
    results = comparison.reference.results
    terms = dict(texts()["glossary"]["live" if "live" in results else task.name])
    if comparison.unit not in TIMES:
        terms |= texts()["glossary"]["not_charged"]
    # only policies of the project have a description
    policies = [row["policy"] for row in task.rows(results)]
    for policy in dict.fromkeys([*policies, *(run.policy for run in comparison.runs)]):
        if about := words.POLICIES.get(policy):
            description = about["description"].format(hidden=words.hidden_words(results))
            terms[policy_name(policy, results)] = description
    return terms


def _reproduce(comparison: Comparison) -> Folded:
    """Return the commands, what repeats and what does not, and the settings of a single run."""
    from knobwise import __version__

    commands: dict[str, str] = {}
    for run in comparison.runs:
        if run.folder is not None:
            repeated = f"knobwise train experiment={run.folder.parent.name}"
            commands[str(run.folder)] = run.results.get("command") or repeated
    run = comparison.reference
    digest = (run.results.get("profile") or {}).get("digest", "unknown")
    about = texts()["about"]["reproduce"].format(version=__version__, digest=digest)
    blocks: list[Any] = [commands, about]
    config = run.folder / "config.yaml" if run.folder else None
    if comparison.single and config is not None and config.exists():
        settings = Markup("<pre>{}</pre>").format(config.read_text(encoding="utf-8"))
        blocks.append(Folded("The resolved configuration (config.yaml)", [settings]))
    return Folded("How to reproduce", blocks)

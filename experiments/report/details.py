"""What a page folds: further tables, what explains the choices, how to repeat a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console

from knobwise.envs.tables.units import TIMES
from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.evidence.results import (
    differences_at,
    guard_by_budget,
    mean_of,
    unit_of,
)
from knobwise.experiments.evidence.schema import RunResults, SingleDecision
from knobwise.experiments.evidence.task import DEADLINE, shown_at, task_of
from knobwise.experiments.report import content
from knobwise.experiments.report.tables import (
    Folded,
    Table,
    print_sections,
    reworded,
    table_of,
    texts,
)
from knobwise.experiments.wording import words
from knobwise.experiments.wording.between_runs import condition_name
from knobwise.experiments.wording.choice_sentences import on_difficulty, on_usage, setting
from knobwise.experiments.wording.sentences import promise
from knobwise.experiments.wording.words import number, policy_name, quantity


def details(comparison: Comparison) -> list[Folded]:
    """Return everything that a page folds, but figures; what is open can be seen at once."""
    results = comparison.reference.results
    about = texts()["about"]
    task = comparison.task
    main = condition_name(comparison, comparison.main)
    parts = []
    if comparison.settings:
        labels = [run.label for run in comparison.runs]
        table = content.settings_table(comparison.settings, labels)
        parts.append(Folded("What differs in the settings", [table], open=True))
    conditions = about["conditions" if comparison.single else "compared"]
    every = [conditions, content.by_condition(comparison)]
    if comparison.single:
        if results.get("by_dataset"):
            text = about["datasets"][task.name]
            parts.append(Folded("Every data set", [text, content.by_dataset(results)], open=True))
        parts.append(Folded(f"Every {task.condition_words[0]}", every))
        if not task.averaged:
            parts += _of_selectors(comparison)
        if results.get("guard"):
            parts.append(Folded("Guarantees", [about["guarantees"], guarantees(results)]))
        if results.get("explanation"):
            parts.append(Folded("Why these settings", explanation(results)))
        parts += _chosen(results)
    else:
        parts.append(Folded(f"Every {task.condition_words[0]}", every))
        if comparison.by_policy:
            stages = [about["stages"].format(main=main), _stages(comparison)]
            parts.append(Folded("Stage by stage", stages))
    parts.append(Folded("What the words mean", [_glossary(comparison)]))
    return [*reworded(parts, comparison.unit), _reproduce(comparison)]


def _of_selectors(comparison: Comparison) -> list[Folded]:
    """Return the further tables of a selector that are not empty."""
    results = comparison.reference.results
    filled = {
        "main": condition_name(comparison, comparison.main),
        "hidden": words.hidden_words(results),
    }
    tables = {
        "Differences": ("differences", differences(results)),
        "Without the model": ("votes", content.by_condition(comparison, "votes")),
        "Controls": ("controls", content.by_condition(comparison, "controls")),
        "True calls": ("calls", _calls(results)),
    }
    folded = []
    for title, (about, table) in tables.items():
        if table.rows:
            folded.append(Folded(title, [texts()["about"][about].format(**filled), table]))
    return folded


# -- differences -----------------------------------------------------------------------------------


def differences(results: RunResults) -> Table:
    """Return the differences between selectors at every number of shots, in points, and what they
    show at the one that the page is about."""
    main = shown_at(results)
    lines = []
    pairs = [(row["policy"], row["against"]) for row in results.get("differences", [])]
    for pair in dict.fromkeys(pairs):
        line = {"policy": "\nover ".join(policy_name(name, results) for name in pair)}
        for shots in sorted(results["shots"]):
            gap = differences_at(results, shots).get(pair, {})
            line[words.shots_words(shots)] = words.difference_cell(gap)
            if shots == main:
                outcome = words.SIGN_WORDS[words.sign_of(gap.get("ci95"))]
        lines.append(line | {f"at {words.shots_words(main)}": outcome})
    return table_of(lines)


def _stages(comparison: Comparison) -> Table:
    """Return the differences between policies that both runs trained."""
    runs = {run.label: run.results for run in comparison.runs}
    lines = []
    for each in comparison.by_policy:
        line = {"run": each.run, "policy": policy_name(each.policy, runs[each.run])}
        lines.append(line | content.tested_cells(each))
    return table_of(lines)


def _calls(results: RunResults) -> Table:
    lines = []
    for row in results.get("true_calls", []):
        calls = f"{sum(row['calls']) / len(row['calls']):,.0f}"
        lines.append({"policy": policy_name(row["policy"], results), "true calls": calls})
    return table_of(lines)


# -- guarantees and choices ------------------------------------------------------------------------


def guarantees(results: RunResults) -> Table:
    """Return what the guard decided at each budget in each seed, and what is guaranteed."""
    lines = []
    for seeds in guard_by_budget(results):
        line = {"budget": quantity(seeds[0]["budget_ms"], unit_of(results))}
        line["decision"] = "\n".join(row["reason"] for row in seeds)
        if "level" in seeds[0]:
            deployed = [row for row in seeds if row["deployed"]]
            line["margin"] = number(mean_of(deployed, "margin"), ".0%")
            line["on time"] = number(mean_of(seeds, "satisfaction_deployed"), ".1%")
            line[f"{100 * seeds[0]['level']:g}% on time"] = promise(seeds)
        lines.append(line)
    return table_of(lines, wordy=[1, 4])


def _chosen(results: RunResults) -> list[Folded]:
    """Return which iteration was kept in each seed, and the weight of each member of the teacher
    and its settings, unless there is a network alone."""
    chosen = results.get("chosen")
    if not chosen:
        return []
    iterations = ", ".join(f"{seed['iteration']:,}" for seed in chosen)
    seeds = ", ".join(map(str, results.get("seeds", range(len(chosen)))))
    blocks: list[Any] = [f"The network of iteration {iterations} (seeds {seeds})."]
    lines = []
    for name in chosen[0].get("weights", {}):
        values = [str(seed["settings"][name]) for seed in chosen if name in seed["settings"]]
        line = {"member": policy_name(name)}
        line["weight, in each seed"] = ", ".join(f"{seed['weights'][name]:.1%}" for seed in chosen)
        line["settings"] = texts()["members"].get(name, "")
        line["values, in each seed"] = "\n".join(dict.fromkeys(values))
        lines.append(line)
    if len(lines) > 1:
        blocks.append(table_of(lines, wordy=[2, 3]))
    return [Folded("What was chosen on held-out samples", blocks)]


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
    reads = ", ".join(words.condition_words(results, budget) for budget in why["reads"])
    samples = f"{why['samples']:,}"
    blocks = [
        about["why"].format(seed=seed, samples=samples, reads=reads or "no budget"),
        on_usage(results),
        *on_difficulty(results),
    ]
    if groups := why["difficulty"]["groups"]:
        lines = [
            {
                "difficulty": quantity(group["difficulty_ms"], unit),
                "latency of the choice": quantity(group["policy_ms"], unit)
                + words.interval(group["ci95"], ".3g"),
                "of static": quantity(group["static_ms"], unit),
            }
            for group in groups
        ]
        blocks.append(table_of(lines))
    if why["importance"]:
        score = (
            "utility" if task_of(results) is DEADLINE else "accuracy minus the price of the latency"
        )
        blocks += [about["importance"].format(score=score), _importance(results)]
    blocks += _rules(results)
    for title, decisions in (("gain most over", why["best"]), ("lose most against", why["worst"])):
        if decisions:
            table = _decisions(decisions, unit)
            blocks.append(Folded(f"The decisions that {title} static", [table]))
    return blocks


def print_explanation(results: RunResults, console: Console) -> None:
    """Print why the deployed policy sets the knobs as it does."""
    blocks = reworded(explanation(results), unit_of(results))
    print_sections(console, {"Why these settings": blocks})


def _importance(results: RunResults) -> Table:
    """Return what is lost without each block of features, or some of its columns."""
    lines = []
    # a block of features, or one of its columns
    for row in results["explanation"]["importance"]:
        name = row["name"]
        if isinstance(row["column"], str):
            name = row["column"]
        elif row["column"] is not None:
            name += f" [{row['column']}]"
        # a loss has no plus sign; its interval stands below it
        loss = words.points(row["lost"], ".1f") + words.span(row["ci95"]).replace(" ", "\n", 1)
        lines.append({"features": name, "lost": loss})
    return table_of(lines)


def _rules(results: RunResults) -> list[Any]:
    """Say how well a few rules describe the decisions; return the rules if the features add to what
    the budget says alone, and have names."""
    tree = results["explanation"]["tree"]
    fidelity = f"{number(tree['fidelity'], '.0%')}{words.span(tree['ci95'], '.0%')}"
    by_budget = number(tree["by_budget_alone"], ".0%")
    text = (
        f"A tree of at most eight leaves gets {fidelity} of the policy's knob values right on "
        f"held-out decisions; one that sees only the budget {by_budget}."
    )
    if tree["ci95"][0] <= tree["by_budget_alone"]:
        return [f"{text} So no few rules on features describe the choices better than the budget."]
    names = {name for rule in tree["rules"] for name, _, _ in rule["when"]}
    if any(re.search(r"\[\d+\]$", name) for name in names):
        return [f"{text} Its rules are on columns without names, so they are not listed."]
    unit = unit_of(results)
    lines = []
    for rule in tree["rules"]:
        line = {"if": _condition(rule["when"], unit), "then": setting(rule["then"])}
        line["share of decisions"] = f"{rule['share']:.0%}"
        lines.append(line | {"agreement": f"{rule['alike']:.0%}"})
    return [text, table_of(lines, wordy=[0, 1])]


def _condition(bounds: Sequence[tuple[str, str, float]], unit: str) -> str:
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


def _decisions(decisions: Sequence[SingleDecision], unit: str) -> Table:
    """Return single decisions of the policy beside those of static."""
    lines = []
    for row in decisions:
        line = {"sample": f"{row['question'] or ''}\n{row['dataset']}, {row['sample_id']}"}
        line["budget"] = quantity(row["budget_ms"], unit)
        for name in ("policy", "static"):
            side = row[name]
            outcome = f"{number(side['accuracy'], '.2f')} accurate"
            latency = quantity(side["latency_ms"], unit)
            line[name] = f"{setting(side['configuration'])}\n{outcome}, {latency}"
        lines.append(line | {"gain": f"{row['gain']:+.2f}"})
    return table_of(lines, wordy=[0, 2, 3])


# -- the end of the page ---------------------------------------------------------------------------


def _glossary(comparison: Comparison) -> dict[str, str]:
    """Return the terms, and every policy in the tables."""
    task = comparison.task
    results = comparison.reference.results
    terms = dict(texts()["glossary"][task.name])
    if comparison.unit not in TIMES:
        terms |= texts()["glossary"]["not_charged"]
        terms.pop("if free", None)
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

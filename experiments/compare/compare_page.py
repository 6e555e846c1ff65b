"""The page of `knobwise compare`: what differs between runs, in words, tables and charts, in one file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from knobwise.experiments.compare.compare import Comparison
from knobwise.experiments.compare.compare_charts import comparison_charts
from knobwise.experiments.compare.compare_words import (
    SIDE_BY_SIDE,
    SPOKEN_OF,
    cells,
    difference_words,
    header,
    method,
    p_words,
    settings_cells,
    shown_words,
    verdict,
)
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.selector_verdict import policy_words, shots_words
from knobwise.experiments.report.verdict import interval, number
from knobwise.experiments.results.paired import Difference


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page and return its path."""
    runs = comparison.runs
    names = " · ".join(run.label for run in runs) if len(runs) <= SIDE_BY_SIDE else f"{len(runs)} runs"
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    title = f"{', '.join(experiments)}: {names}" if len(experiments) == 1 else names
    says = "".join(f"<p>{html.escape(words)}</p>" for words in verdict(comparison))
    parts = [
        f"<p class=soft>knobwise comparison</p><h1>{html.escape(title)}</h1>",
        f"<p class=soft>{html.escape(' · '.join(_facts(comparison)))}</p>",
        f"<div class=verdict>{says}</div>",
        *(f"<p>{html.escape(note)}</p>" for note in comparison.notes),
        *_settings(comparison),
        *_results(comparison),
    ]
    for name, (caption, chart) in comparison_charts(comparison).items():
        parts += [f"<h2>{name}</h2>", page.figure(chart, caption)]
    entries = "".join(
        f"<dt>{html.escape(run.label)}</dt><dd>{html.escape(str(run.folder))}<br>"
        f"<code>{html.escape(str(run.results.get('command', '')))}</code></dd>"
        for run in runs
    )
    parts.append(page.folded("The runs: folders and commands", f"<dl>{entries}</dl>"))
    return page.write_page(path, f"knobwise: {title}", parts)


def _facts(comparison: Comparison) -> list[str]:
    results = comparison.runs[0].results
    profile = results.get("profile") or {}
    if comparison.kind == "selector":
        judged = f"judged on {results['test_queries']:,} held-out queries"
    else:
        judged = f"judged on {results.get('test_samples', '?')} test samples"
        judged += f" at {', '.join(page.quantity(budget, comparison.unit) for budget in comparison.places)}"
    return [f"held against {comparison.runs[0].label}", f"profile {profile.get('name', 'unnamed')}", judged]


# -- tables ------------------------------------------------------------------------------------------------------------


def _settings(comparison: Comparison) -> list[str]:
    parts = ["<h2>What differs in the settings</h2>"]
    if not comparison.settings:
        known = all(run.settings for run in comparison.runs)
        return [*parts, "<p>Nothing.</p>" if known else "<p>Nothing that is known.</p>"]
    head, lines = settings_cells(comparison)
    return [*parts, page.table(head, [list(map(_broken, line)) for line in lines])]


def _broken(value: str) -> str:
    """A long list in several lines."""
    if len(value) <= 40:
        return value
    words, lines = value.split(","), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 40:
            lines.append("")
        lines[-1] += word + ","
    return "\n".join(lines).rstrip(",")


def _results(comparison: Comparison) -> list[str]:
    parts = ["<h2>Results</h2>"]
    if comparison.kind == "selector":
        parts.append("<p>Share of held-out queries answered right, of the policy that was best on validation.</p>")
    elif comparison.kind == "mean":
        parts.append("<p>Means over the mean budgets; differences to the static mix are at equal mean latency.</p>")
    else:
        parts.append("<p>Means over the budgets. Utility is the accuracy of an answer in time, 0 for a late one.</p>")
    parts.append(page.table(*_narrow(comparison), [0]))
    if words := method(comparison):
        parts.append(f"<p class=soft>{html.escape(words)}</p>")
    if comparison.found:
        caption = "A dot is the difference to the first run, the line its 95% interval; grey: it may be chance."
        parts.append(page.figure(charts.differences(_differences(comparison), _axis(comparison)), caption))
    if comparison.kind != "selector":
        per_budget = "<p>Utility" if comparison.kind == "deadline" else "<p>Accuracy"
        per_budget += " with its interval; below it the difference to the first run, p, and its interval; * where "
        per_budget += "the interval excludes 0 and p is small enough."
        per_budget += _family(comparison.in_detail) + "</p>"
        table = page.table(*_per_budget(comparison), [0])
        if len(comparison.runs) <= SPOKEN_OF:
            parts += ["<h2>Per budget</h2>", per_budget, table]
        else:
            parts.append(page.folded("Per budget", per_budget + table))
    elif comparison.in_detail and len(comparison.places) > 1:
        words = f"<p>Differences to the first run, in points, and p.{_family(comparison.in_detail)}</p>"
        parts += ["<h2>By number of demonstrations</h2>", words, _per_shots(comparison)]
    if comparison.of_policies:
        words = f"<p>The same of every policy that both runs trained, at {shots_words(int(comparison.main or 0))}."
        parts += ["<h2>Stage by stage</h2>", f"{words}{_family(comparison.of_policies)}</p>", _per_policy(comparison)]
    return parts


def _narrow(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table of the terminal, with difference, p and what they show in one cell."""
    head, lines = header(comparison), cells(comparison)
    place = head.index("p") - 1
    for line in lines:
        gap, p, shown = line[place : place + 3]
        line[place : place + 3] = [f"{gap}\n{shown}, p {p}" if p != "–" else shown or "–"]
    return [*head[: place + 1], *head[place + 3 :]], lines


def _family(family: Sequence[Difference]) -> str:
    return f" p is corrected for the {len(family)} comparisons of this table." if len(family) > 1 else ""


def _axis(comparison: Comparison) -> str:
    what = {
        "deadline": "difference in mean utility",
        "mean": "difference in accuracy at equal mean latency",
        "selector": "difference in accuracy, points",
    }[comparison.kind]
    return f"{what} to the first run"


def _differences(comparison: Comparison) -> pl.DataFrame:
    scale = 100 if comparison.kind == "selector" else 1  # as the tables have it
    return pl.DataFrame(
        [
            {"run": one.run, "difference": scale * one.difference}
            | {"low": scale * one.ci95[0], "high": scale * one.ci95[1]}
            | {"shown": shown_words(one)}
            for one in comparison.found
        ]
    )


def _with_difference(first: str, one: Difference | None, kind: str) -> str:
    if one is None:
        return first
    gap, span = difference_words(one, kind)
    mark = " *" if one.sign else ""
    return f"{first}\n{gap}{mark}, p {p_words(one.p_holm)}\n{span}"


def _per_budget(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    at = {(one.run, one.place): one for one in comparison.in_detail}
    column = "utility" if comparison.kind == "deadline" else "accuracy"
    lines = []
    for run, policy in zip(comparison.runs, comparison.policies, strict=True):
        row = [run.row(policy, place) for place in comparison.places]
        own = [number(r.get(column), ".3f") + interval(r.get(f"{column}_ci95"), ".3f") for r in row]
        found = [at.get((run.label, place)) for place in comparison.places]
        both = zip(own, found, strict=True)
        lines.append([run.label, *(_with_difference(first, one, comparison.kind) for first, one in both)])
    return ["run", *(page.quantity(place, comparison.unit) for place in comparison.places)], lines


def _per_shots(comparison: Comparison) -> str:
    at = {(one.run, one.place): one for one in comparison.in_detail}
    lines = []
    for run in comparison.runs[1:]:
        found = [at.get((run.label, place)) for place in comparison.places]
        lines.append([run.label, *(_points(one) for one in found)])
    return page.table(["run", *(shots_words(int(place)) for place in comparison.places)], lines)


def _points(one: Difference | None) -> str:
    if one is None:
        return "–"
    gap, span = difference_words(one, "selector")
    return f"{gap}{' *' if one.sign else ''}\n{span}\np {p_words(one.p_holm)}"


def _per_policy(comparison: Comparison) -> str:
    lines = []
    for one in comparison.of_policies:
        run = next(run for run in comparison.runs if run.label == one.run)
        reference = comparison.runs[0]
        before, after = (r.row(one.policy, one.place).get("accuracy") for r in (reference, run))
        gap = "\n".join(difference_words(one, "selector"))
        row = [policy_words(one.policy, run.results), number(before, ".3f"), number(after, ".3f"), gap]
        lines.append([one.run, *row, p_words(one.p_holm), shown_words(one)])
    head = ["run", "policy", comparison.runs[0].label, "this run", "difference, points", "p", "shown"]
    return page.table(head, lines)

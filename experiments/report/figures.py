"""The figures of one finished run or of several, for their page and, as pictures, for W&B.

Each figure is drawn by one function, whatever the number of runs: `Comparison.lines` says what has
a line in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import polars as pl

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.compare.comparison import Comparison, Entry
from knobwise.experiments.evidence.results import (
    calibration_error,
    known,
    ranked,
)
from knobwise.experiments.evidence.task import CONTROLS, FEASIBLE, UPPER, Row, Task, condition_of
from knobwise.experiments.report import charts
from knobwise.experiments.report.content import name_of
from knobwise.experiments.report.page import HUES, Figure, unchecked
from knobwise.experiments.report.tables import reworded, texts
from knobwise.experiments.report.training_curves import on_validation
from knobwise.experiments.wording import words
from knobwise.experiments.wording.words import policy_name, quantity

Figures = dict[str, Figure]
"""Heading → figure."""
KINDS = {
    "stands for the run": "blue",
    "trained": "cyan",
    "simple baseline": "orange",
    "upper bound": "purple",
    "control": "grey",
}
"""Kind of policy of a selector → its hue."""
TEXTS = ("heading", "caption")
"""What is said of a figure."""
Drawn = tuple[list[Any], dict[str, Any]] | None
"""The charts of a figure, and what its heading and caption are filled with; None without numbers.
`columns` is how many charts stand side by side."""


@unchecked
def figures_of(comparison: Comparison) -> Figures:
    """Draw all figures that the runs have numbers for, the one to be seen first in front."""
    figures = {}
    task = comparison.task
    words_of_task: dict[str, Any] = {
        "condition": task.condition_words[0],
        "samples": task.samples,
        "reference": "the first run",
    }
    if comparison.single:
        words_of_task["reference"] = policy_name(task.low)
    left_out = len(comparison.runs) - len(comparison.drawn())
    more = f" {left_out} more runs are in the tables." * bool(left_out)
    for name, draw in FIGURES.items():
        drawn = draw(comparison)
        if drawn is None or not drawn[0]:
            continue
        pictures, filled = drawn
        heading, caption = (_for(task, texts()["figures"][name][key]) for key in TEXTS)
        filled = words_of_task | filled
        columns = filled.get("columns", min(len(pictures), 3))
        figure = Figure(pictures, caption.format(**filled) + more, columns)
        figures[heading.format(**filled)] = figure
    return reworded(figures, comparison.unit)


def _for(task: Task, text: str | dict[str, str]) -> str:
    """Return a text, that of this task where there is one for each."""
    return text if isinstance(text, str) else text[task.name]


def _numbers(comparison: Comparison, key: str, entries: list[Entry] | None = None) -> pl.DataFrame:
    """Return the rows that a chart needs at every condition: the policy under its name, the
    condition, the metrics of the task, and low and high, the interval of `key`."""
    task = comparison.task
    rows = []
    for entry in comparison.lines() if entries is None else entries:
        for condition in comparison.conditions:
            row: Row = entry.run.row(entry.policy, condition)
            low, high = row.get(f"{key}_ci95") or (None, None)
            names = dict.fromkeys([key, *(metric.key for metric in task.metrics)])
            drawn = {"policy": name_of(entry), task.condition: row.get(task.condition)}
            drawn |= {"latency_ms": row.get("latency_ms_mean"), "low": low, "high": high}
            rows.append(drawn | {name: row.get(name) for name in names})
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return frame.drop_nulls(task.condition) if rows else frame


def _score(comparison: Comparison) -> Drawn:
    """Draw the score against the condition, and beside it the gain over the reference; of selectors
    also the score of every policy at the main condition."""
    task = comparison.task
    pictures = []
    if not task.averaged:
        pictures.append(_every_policy(comparison))
    elif not comparison.conditions:
        return None
    options: dict[str, Any] = {"unit": comparison.unit}
    if task.equal_latency:
        options["level"] = 0.0
    title = next(metric.name for metric in task.metrics if metric.key == task.ranked_by)
    rows = _numbers(comparison, task.ranked_by)
    if task.averaged or len(comparison.conditions) > 1:
        if not task.averaged:
            options["trained"] = comparison.reference.results["trained_shots"]
        shown = in_words(title, comparison.unit)
        if rows[task.ranked_by].is_not_null().any():
            chart = charts.by_condition(rows, task.condition, task.ranked_by, shown, **options)
            pictures.append(chart)
    gains = _gains(comparison)
    if len(gains):
        options["level"] = 0.0
        gained = f"{task.score} gained, in points"
        pictures.append(charts.by_condition(gains, task.condition, "gain", gained, **options))
    return pictures, {"columns": min(2, len(pictures))}


def _gains(comparison: Comparison) -> pl.DataFrame:
    """Return the differences at every condition, in points: of one run under deadlines to static,
    of several to the first run."""
    task = comparison.task
    rows: list[dict[str, Any]] = []
    if comparison.single and task.compared[:1] == ("over_static",):
        others = [each for each in comparison.lines() if each.policy not in (task.low, task.high)]
        frame = _numbers(comparison, "over_static", others)
        if "over_static" in frame.columns:
            rows = frame.rename({"over_static": "gain"}).drop_nulls("low").to_dicts()
    drawn = {run.label for run in comparison.drawn()}
    for each in comparison.by_condition:
        if each.run in drawn:
            row = {"policy": each.run, task.condition: each.condition, "gain": each.difference}
            rows.append(row | dict(zip(("low", "high"), each.ci95, strict=True)))
    frame = pl.DataFrame(rows, infer_schema_length=None)
    if not rows:
        return frame
    points = pl.col("gain", "low", "high") * 100
    return frame.select("policy", task.condition, points)


def _every_policy(comparison: Comparison) -> Any:
    """Draw the score of every policy of a selector, controls too, or of several runs, at the main
    condition."""
    results = comparison.reference.results
    entries = comparison.listed()
    if comparison.single:
        from knobwise.agents.selector.baselines import SIMPLE  # imports torch, slow to load

        kinds = dict.fromkeys(SIMPLE, "simple baseline") | dict.fromkeys(UPPER, "upper bound")
        kinds |= dict.fromkeys(CONTROLS, "control")
        kinds[comparison.reference.policy] = "stands for the run"
        controls = ranked(results, "controls")
        entries += [Entry(comparison.reference, row["policy"]) for row in controls]
    rows = []
    for entry in entries:
        row: Row = entry.run.row(entry.policy, comparison.main)
        if row:
            kind = kinds.get(entry.policy, "trained") if comparison.single else name_of(entry)
            rows.append([name_of(entry), row["accuracy"], *row["accuracy_ci95"], kind])
    frame = pl.DataFrame(rows, schema=["name", "value", "low", "high", "kind"], orient="row")
    title = f"accuracy with {words.shots_words(int(comparison.main or 0))} (0 to 1)"
    if not comparison.single:
        return charts.dots_of_policies(frame, title)
    hues = {kind: HUES[hue] for kind, hue in KINDS.items() if kind in set(frame["kind"])}
    return charts.dots(frame, title, charts.colour_of(hues, "kind"))


def _on_time(comparison: Comparison) -> Drawn:
    """Draw the share of the feasible requests that is on time against the budget."""
    if FEASIBLE not in comparison.task.metrics or not comparison.conditions:
        return None
    level = comparison.reference.results.get("satisfaction_level") or 0.95
    chart = charts.by_condition(
        _numbers(comparison, FEASIBLE.key).drop("low", "high"),
        comparison.task.condition,
        FEASIBLE.key,
        in_words("on time, of the feasible requests", comparison.unit),
        percent=True,
        level=level,
        unit=comparison.unit,
    )
    return [chart], {"level": level}


def _plane(comparison: Comparison) -> Drawn:
    """Draw accuracy against the mean latency that was spent."""
    results = comparison.reference.results
    configurations = results.get("configurations")
    if not configurations or not comparison.conditions:
        return None
    columns = ["policy", "accuracy", "latency_ms"]
    entries = comparison.lines()
    corners = results.get("static_hull")
    mix = comparison.task.low
    if corners:
        # the static mix has a line along its corners instead of its rows
        entries = [each for each in entries if each.policy != mix]
    paths = [_numbers(comparison, "accuracy", entries)]
    if corners:
        name = pl.lit(policy_name(mix))
        paths.append(pl.DataFrame(corners).select("accuracy", "latency_ms", policy=name))
    rows = pl.concat([path.select(columns) for path in paths], how="vertical_relaxed")
    return [charts.plane(configurations, rows, comparison.unit)], {}


def _usage(comparison: Comparison) -> Drawn:
    """Draw the share of the requests that gets each value of a knob: a row of charts for each knob,
    a column for each run, or for the policy of one run and static."""
    task = comparison.task
    entries = [each for each in comparison.lines() if each.stands_for_run]
    if comparison.single:
        entries = [Entry(comparison.reference, name) for name in (task.trained[0], task.low)]
    knobs = {row["knob"] for row in comparison.reference.results.get("knob_usage", [])}
    rows = []
    for entry in entries:
        for row in entry.run.results.get("knob_usage", []):
            if row["policy"] == entry.policy and row["knob"] in knobs:
                budget = condition_of(row["budget_ms"])
                shown = {"label": name_of(entry), "value": str(row["value"]), "budget_ms": budget}
                rows.append(shown | {"knob": row["knob"], "share": row["share"]})
    if not rows:
        return None
    frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
    frame = frame.sort("budget_ms", maintain_order=True)
    condition = pl.col("budget_ms").map_elements(lambda ms: quantity(ms, ""), pl.String)
    labels = [name for name in map(name_of, entries) if name in set(frame["label"])]
    limit = in_words(f"latency budget ({comparison.unit})", comparison.unit)
    drawn = charts.knob_usage(frame.with_columns(condition=condition), labels, limit)
    return drawn, {"columns": len(labels)}


def _reliability(comparison: Comparison) -> Drawn:
    """Draw observed shares on time against predicted probabilities."""
    rows = []
    errors = []
    for entry in comparison.lines():
        bins = entry.run.results.get("reliability")
        if bins and entry.policy == entry.run.policy:
            errors.append(words.points(calibration_error(bins), ".1f"))
            for each in bins:
                row = {"policy": name_of(entry), "predicted": each["expected_in_time"]}
                rows.append(row | {"observed": each["in_time"], "decisions": each["decisions"]})
    if not rows:
        return None
    titles = ("predicted probability of being on time", "observed share on time")
    titles_of_unit = [in_words(title, comparison.unit) for title in titles]
    chart = charts.predictions(pl.DataFrame(rows), *titles_of_unit)
    return [chart], {"error": words.listed(errors)}


def _calibration(comparison: Comparison) -> Drawn:
    """Draw the share of right answers against the probability that a learned reward predicts: a
    chart for each policy that predicts, with a line for each policy that drew the
    demonstrations."""
    pictures = []
    for run in comparison.drawn():
        bins = sorted(run.results.get("calibration", []), key=lambda row: row["policy"])
        for policy, rows in itertools.groupby(bins, key=lambda row: row["policy"]):
            points = [
                {
                    "policy": policy_name(row["drawn_by"], run.results),
                    "predicted": row["expected"],
                    "observed": row["right"],
                }
                for row in rows
            ]
            title = policy_name(policy, run.results)
            if not comparison.single:
                title = f"{run.label}: {title}"
            titles = ("predicted probability", "share of right answers")
            chart = charts.predictions(
                pl.DataFrame(points), *titles, title=charts.titled(title), height=220
            )
            pictures.append(chart)
    return pictures, {}


def _difficulty(comparison: Comparison) -> Drawn:
    """Draw the latency of the choice against difficulty: lines through the means of groups, of each
    run with its intervals and of static, and of one run a dot for each sample."""
    rows = []
    explained: Row = {}
    for run in comparison.drawn():
        why: Row = run.results.get("explanation") or {}
        hard: Row = why.get("difficulty", {})
        explained = explained or hard
        name = policy_name(run.policy) if comparison.single else run.label
        for group in hard.get("groups", []):
            row = [name, group["difficulty_ms"], group["policy_ms"], *group["ci95"]]
            rows.append(row)
    static = policy_name(comparison.task.low)
    for group in explained.get("groups", []):
        # static has no interval
        rows.append([static, group["difficulty_ms"], group["static_ms"], None, None])
    if not rows:
        return None
    unit = comparison.unit
    columns = ["policy", "difficulty", "latency", "low", "high"]
    groups = pl.DataFrame(rows, schema=columns, orient="row", infer_schema_length=None)
    points = explained["points"] if comparison.single else []
    samples = pl.DataFrame(points, schema=columns[1:3], orient="row")
    chart = charts.difficulty(groups, samples, unit)
    return [chart], {"budget": quantity(explained["budget_ms"], unit)}


def _datasets(comparison: Comparison) -> Drawn:
    """Draw the score of the most important policies, or of the runs, in each data set."""
    task = comparison.task
    title = next(metric.name for metric in task.metrics if metric.key == task.ranked_by)
    rows = []
    results = comparison.reference.results
    wanted = {each.policy for each in comparison.lines() if not each.stands_for_run}
    if comparison.single:
        wanted = {row["policy"] for row in results.get("by_dataset", [])}
    for run in comparison.drawn():
        for row in run.results.get("by_dataset", []):
            named: Row = row
            name = policy_name(row["policy"], run.results)
            is_reference = run is comparison.reference and row["policy"] in wanted
            if not comparison.single and row["policy"] == run.policy:
                name = run.label
            elif not is_reference:
                continue
            if known(named.get(task.ranked_by)):
                ends = named[f"{task.ranked_by}_ci95"]
                rows.append([row["dataset"], name, named[task.ranked_by], *ends])
    columns = ["dataset", "name", "value", "low", "high"]
    frame = pl.DataFrame(rows, schema=columns, orient="row")
    pictures = []
    for (dataset,), part in frame.group_by("dataset", maintain_order=True):
        chart = charts.dots_of_policies(part, title)
        pictures.append(chart.properties(title=charts.titled(str(dataset))))
    return pictures, {"columns": min(2, len(pictures) or 1)}


FIGURES: dict[str, Callable[[Comparison], Drawn]] = {
    "score": _score,
    "on_time": _on_time,
    "plane": _plane,
    "usage": _usage,
    "training": on_validation,
    "reliability": _reliability,
    "calibration": _calibration,
    "difficulty": _difficulty,
    "datasets": _datasets,
}
"""The key of the texts of a figure → what draws it. A run has numbers for eight of them at most."""

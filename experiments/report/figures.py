"""The figures of one finished run or of several, for their page and, as pictures, for W&B.

Each figure is drawn by one function, whatever the number of runs: `Comparison.lines` says what has
a line in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import polars as pl

from knobwise.common.words import join_words, points, quantity, spelled
from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import calibration_error
from knobwise.experiments.evidence.statistics import ROUNDED
from knobwise.experiments.evidence.task import (
    DEADLINE,
    ON_TIME,
    UTILITY,
    Task,
    condition_of,
)
from knobwise.experiments.report import charts, words
from knobwise.experiments.report.comparison import Comparison, Entry
from knobwise.experiments.report.content import name_of_entry
from knobwise.experiments.report.page import Figure, colours_of, unchecked
from knobwise.experiments.report.sentences import texts
from knobwise.experiments.report.tables import reword_costs
from knobwise.experiments.report.training_curves import on_validation
from knobwise.experiments.report.words import policy_name

Figures = dict[str, Figure]
"""Heading → figure."""
TEXTS = ("heading", "caption")
"""What is said of a figure."""
Drawn = tuple[list[alt.LayerChart], dict[str, Any]] | None
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
    return reword_costs(figures, comparison.unit)


def _for(task: Task, text: str | dict[str, str]) -> str:
    """Return a text, that of this task where there is one for each; with a promise its own, if
    any."""
    if isinstance(text, str):
        return text
    name = task.name
    if task.score == "accuracy" and f"{name} promised" in text:
        name = f"{name} promised"
    return text[name]


def _frame(
    comparison: Comparison, key: str, interval: str = "", entries: Sequence[Entry] | None = None
) -> pl.DataFrame:
    """Return the records of what is drawn, under its name as the column policy; `low` and `high`
    are the ends of an interval.

    Args:
        comparison: whose `lines` are drawn.
        key: of the records in the results, such as "rows", or "a.b" if they lie deeper. Records of
            other policies and at other conditions are left out; those that name no policy are of
            the one that stands for the run.
        interval: its key in a record.
        entries: what is drawn, in the place of the lines.
    """
    condition = comparison.task.condition
    rows = []
    for entry in comparison.lines() if entries is None else entries:
        records: Any = entry.run.results
        for part in key.split("."):
            records = (records or {}).get(part)
        for row in records or []:
            at = condition_of(row.get(condition))
            elsewhere = at is not None and at not in comparison.conditions
            if elsewhere or row.get("policy", entry.run.policy) != entry.policy:
                continue
            low, high = row.get(interval) or (None, None)
            # polars would make 1 of a knob's True beside the 2 of another one
            numbers = {
                name: spelled(value) if name == "value" else value
                for name, value in row.items()
                if not isinstance(value, list)
            }
            rows.append(numbers | {"policy": name_of_entry(entry), "low": low, "high": high})
    return pl.DataFrame(rows, infer_schema_length=None)


def _at_conditions(
    comparison: Comparison, metric: str, entries: Sequence[Entry] | None = None
) -> pl.DataFrame | None:
    """Return the rows at all conditions that have a number, with its interval; None without any."""
    rows = _frame(comparison, "rows", f"{metric}_ci95", entries or None)
    needed = {metric, comparison.task.condition}
    if not needed <= {*rows.columns}:
        return None
    rows = rows.drop_nulls(needed)
    return rows if len(rows) else None


def _score(comparison: Comparison) -> Drawn:
    """Draw the score against the condition, and beside it the gain over the reference; of selectors
    also the score of every policy at the main condition."""
    task = comparison.task
    pictures = []
    options: dict[str, Any] = {"unit": comparison.unit}
    if task.equal_latency:
        options["level"] = 0.0
    if not task.averaged:
        options["trained"] = comparison.reference.results["trained_shots"]
        controls = [row["policy"] for row in comparison.reference.results.get("controls", [])]
        entries = [Entry(comparison.reference, name) for name in dict.fromkeys(controls)]
        rows = _frame(comparison, "rows", "accuracy_ci95", comparison.listed())
        rows = pl.concat(
            [rows, _frame(comparison, "controls", "accuracy_ci95", entries)], how="diagonal_relaxed"
        )
        rows = rows.filter(pl.col("shots") == comparison.main).sort("accuracy", descending=True)
        title = f"accuracy with {words.shots_words(int(comparison.main or 0))} (0 to 1)"
        rows = rows.rename({"policy": "name", "accuracy": "value"})
        pictures.append(charts.dots_of_policies(rows, title))
    title = next(metric.name for metric in task.metrics if metric.key == task.ranked_by)
    scores = _at_conditions(comparison, task.ranked_by)
    gains = _gains(comparison)
    gained = f"{task.score} gained, in points"
    several = task.averaged or len(comparison.conditions) > 1
    for rows_of, column, text in ((scores, task.ranked_by, title), (gains, "gain", gained)):
        if rows_of is not None and several:
            if column == "gain":
                options["level"] = 0.0
            axis = in_words(text, comparison.unit)
            chart = charts.by_condition(rows_of, task.condition, column, axis, **options)
            pictures.append(chart)
    return pictures, {"columns": min(2, len(pictures))}


def _gains(comparison: Comparison) -> pl.DataFrame | None:
    """Return the differences at every condition, in points: of one run under deadlines to static,
    of several to the first run; None without any."""
    task = comparison.task
    rows = None
    if comparison.single and task.name == DEADLINE.name:
        others = [each for each in comparison.lines() if each.policy not in (task.low, task.high)]
        rows = _at_conditions(comparison, "over_static", others)
        if rows is not None:
            rows = rows.rename({"over_static": "gain"}).drop_nulls("low")
    drawn = {run.label for run in comparison.drawn()}
    tested = [
        {"policy": each.run, task.condition: each.condition, "gain": each.difference}
        | dict(zip(("low", "high"), each.ci95, strict=True))
        for each in comparison.by_condition
        if each.run in drawn
    ]
    if tested:
        # the first run has no line here, but a colour on this page
        colours = colours_of([name_of_entry(entry) for entry in comparison.lines()])
        rows = pl.DataFrame(tested).with_columns(colour=pl.col("policy").replace(colours))
    if rows is None or not len(rows):
        return None
    gains = pl.col("gain", "low", "high")
    # as for the words: what differs by rounding alone is no difference
    return rows.with_columns(pl.when(gains.abs() > ROUNDED).then(gains * 100).otherwise(0.0))


def _on_time(comparison: Comparison) -> Drawn:
    """Draw the share of the requests that is on time against the budget."""
    rows = _at_conditions(comparison, ON_TIME.key)
    if rows is None or ON_TIME not in comparison.task.metrics:
        return None
    promises = comparison.reference.results.get("promises")
    level = promises[0]["promise"] if promises else None
    title = in_words("on time", comparison.unit)
    options: dict[str, Any] = {"percent": True, "level": level, "unit": comparison.unit}
    chart = charts.by_condition(rows, comparison.task.condition, ON_TIME.key, title, **options)
    promised = texts()["figures"]["on_time"]["promised"] if promises else ""
    return [chart], {"promised": promised}


def _plane(comparison: Comparison) -> Drawn:
    """Draw accuracy against the mean latency that was spent."""
    results = comparison.reference.results
    configurations = results.get("configurations")
    entries = comparison.lines()
    corners = results.get("static_hull")
    mix = comparison.task.low
    if corners:
        # the static mix has a line along its corners instead of its rows
        entries = [each for each in entries if each.policy != mix]
    paths = _at_conditions(comparison, "accuracy", entries)
    if not configurations or paths is None:
        return None
    rows = paths.select("policy", "accuracy", latency_ms="latency_ms_mean")
    if corners:
        line = pl.DataFrame(corners).select(
            "accuracy", "latency_ms", policy=pl.lit(policy_name(mix))
        )
        rows = pl.concat([rows, line.select(rows.columns)], how="vertical_relaxed")
    return [charts.plane(configurations, rows, comparison.unit)], {}


def _usage(comparison: Comparison) -> Drawn:
    """Draw the share of the requests that gets each value of a knob: a row of charts for each knob,
    a column for each run, or for the policy of one run and static."""
    task = comparison.task
    entries = [each for each in comparison.lines() if each.stands_for_run]
    if comparison.single:
        entries = [Entry(comparison.reference, name) for name in (task.trained[0], task.low)]
    shares = _frame(comparison, "knob_usage", "", entries)
    if not len(shares):
        return None
    shares = shares.unique(maintain_order=True).sort("budget_ms", maintain_order=True)
    condition = pl.col("budget_ms").map_elements(lambda ms: quantity(ms, ""), pl.String)
    shares = shares.with_columns(pl.col("value").cast(pl.String), condition=condition)
    limit = in_words(f"latency budget ({comparison.unit})", comparison.unit)
    labels = [name for name in map(name_of_entry, entries) if name in set(shares["policy"])]
    return charts.knob_usage(shares, labels, limit), {"columns": len(labels)}


def _reliability(comparison: Comparison) -> Drawn:
    """Draw observed shares on time against predicted probabilities."""
    rows = _frame(comparison, "reliability")
    if not len(rows):
        return None
    bins = [run.results.get("reliability") or [] for run in comparison.drawn()]
    errors = [points(calibration_error(each), ".1f") for each in bins if each]
    rows = rows.rename({"expected_in_time": "predicted", "in_time": "observed"})
    chart = charts.predictions(
        rows,
        x=in_words("predicted probability of being on time", comparison.unit),
        y=in_words("observed share on time", comparison.unit),
    )
    return [chart], {"error": join_words(errors)}


def _calibration(comparison: Comparison) -> Drawn:
    """Draw the share of right answers against the probability that a learned reward predicts: a
    chart for each policy that predicts, with a line for each policy that drew the
    demonstrations."""
    pictures = []
    for run in comparison.drawn():
        bins = pl.DataFrame(run.results.get("calibration", []))
        for (policy,), rows in bins.group_by("policy", maintain_order=True) if len(bins) else ():
            names = [policy_name(name, run.results) for name in rows["drawn_by"]]
            rows = rows.select(predicted="expected", observed="right", policy=pl.Series(names))
            title = policy_name(str(policy), run.results)
            if not comparison.single:
                title = f"{run.label}: {title}"
            chart = charts.predictions(
                rows,
                x="predicted probability",
                y="share of right answers",
                title=charts.titled(title),
            )
            pictures.append(chart)
    return pictures, {}


def _difficulty(comparison: Comparison) -> Drawn:
    """Draw the latency of the choice against difficulty: lines through the means of groups, of each
    run with its intervals and of static, and of one run a dot for each sample.

    A run whose choices never differ, or that was not explained, has no groups. Static is that of
    the first run that has some."""
    groups = _frame(comparison, "explanation.difficulty.groups", "ci95")
    if not len(groups):
        return None
    whys = [run.results.get("explanation") for run in comparison.drawn()]
    drawn = [why["difficulty"] for why in whys if why and why["difficulty"]["groups"]]
    columns = ["policy", "difficulty_ms", "policy_ms", "low", "high"]
    static = pl.DataFrame(drawn[0]["groups"]).select(
        "difficulty_ms", policy_ms="static_ms", policy=pl.lit(policy_name(comparison.task.low))
    )
    # static has no interval
    rows = pl.concat([groups.select(columns), static], how="diagonal_relaxed")
    points = drawn[0]["points"] if comparison.single else []
    samples = pl.DataFrame(points, schema=columns[1:3], orient="row")
    chart = charts.difficulty(rows, samples, comparison.unit)
    # each run at the last budget at which its choices differ
    budgets = {quantity(each["budget_ms"], comparison.unit): None for each in drawn}
    return [chart], {"budget": join_words([*budgets])}


def _datasets(comparison: Comparison) -> Drawn:
    """Draw the score of the most important policies, or of the runs, in each data set."""
    task = comparison.task
    entries = comparison.lines()
    if comparison.single:
        entries = comparison.listed()
    rows = _frame(comparison, "by_dataset", f"{task.ranked_by}_ci95", entries)
    if task.ranked_by not in rows.columns:
        return None
    rows = rows.drop_nulls("low").rename({"policy": "name", task.ranked_by: "value"})
    title = next(metric.name for metric in task.metrics if metric.key == task.ranked_by)
    pictures = []
    for (dataset,), part in rows.group_by("dataset", maintain_order=True):
        chart = charts.dots_of_policies(part, title)
        pictures.append(chart.properties(title=charts.titled(str(dataset))))
    return pictures, {"columns": min(2, len(pictures))}


def _served(comparison: Comparison) -> Drawn:
    """Draw of every policy that served requests the share on time, and the utility."""
    if "live" not in comparison.reference.results:
        return None
    pictures = []
    for metric, title in ((ON_TIME, "share on time"), (UTILITY, "utility (0 to 1)")):
        rows = _frame(comparison, "rows", f"{metric.key}_ci95", comparison.listed())
        rows = rows.rename({"policy": "name", metric.key: "value"})
        pictures.append(charts.dots_of_policies(rows, title))
    return pictures, {}


def _timeline(comparison: Comparison) -> Drawn:
    """Draw the requests that the controller served live, in their order."""
    requests = _requests(comparison)
    return ([*charts.timeline(requests)], {"columns": 1}) if len(requests) else None


def _residuals(comparison: Comparison) -> Drawn:
    """Draw what of the latencies of these requests the controller did not expect."""
    requests = _requests(comparison)
    return ([charts.residual_chart(requests)], {}) if len(requests) else None


def _requests(comparison: Comparison) -> pl.DataFrame:
    """Return the requests that the controller served live; of other runs there are none."""
    return pl.DataFrame(comparison.reference.results.get("live", {}).get("timeline"))


FIGURES: dict[str, Callable[[Comparison], Drawn]] = {
    "score": _score,
    "served": _served,
    "timeline": _timeline,
    "residuals": _residuals,
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

"""The charts of `knobwise compare`, in which every run is a line under its label."""

from __future__ import annotations

import altair as alt
import polars as pl

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import ComparedRun
from knobwise.experiments.report import charts
from knobwise.experiments.report.page import Figure
from knobwise.experiments.report.result_charts import ON_TIME, SHARE_ON_TIME, Figures, numbers
from knobwise.experiments.report.training_charts import (
    is_shown_first,
    logged_numbers,
    metrics_in_time,
    title_of,
)
from knobwise.experiments.report.words import (
    SIGN_WORDS,
    grpo_begins,
    number,
    policy_name,
    shots_words,
)
from knobwise.experiments.results.problem import FEASIBLE

COLOURED = 4
"""At most this many runs have a colour: the first one, and the best of the runs that are comparable
with it."""


def comparison_charts(comparison: Comparison) -> Figures:
    """Draw all figures that the runs have numbers for."""
    problem = comparison.problem
    labels = order(comparison)
    unit = comparison.unit
    runs = list(zip(comparison.runs, comparison.policies, strict=True))
    # a line for each run, grey where it has no colour of its own
    rows = _numbers(comparison, [(run, policy, _line(comparison, run)) for run, policy in runs])
    if len(runs) > COLOURED:
        rows = rows.drop("low", "high")
    names = {row["policy"]: policy_name(row["policy"]) for row in comparison.reference_rows()}
    lines = [
        (comparison.reference, policy, {"policy": name, "name": name})
        for policy, name in names.items()
    ]
    drawn: Figures = {}
    coloured, grey = _colours(comparison)
    metric = next(metric for metric in problem.metrics if metric.key == problem.ranked_by)
    heading = f"{metric.name.capitalize()} by {problem.place_words[0]}"
    shaded = "" if grey else " Shaded: 95% intervals."
    if problem.averaged:
        # the reference policies of the first run
        if lines:
            rows = pl.concat(
                [rows, _numbers(comparison, lines).select(rows.columns)], how="vertical_relaxed"
            )
        legend = [*labels, *names.values()]
        chart = charts.by_budget(rows, metric.key, metric.name, legend, unit=unit)
        drawn[heading] = Figure(chart, f"{shaded}{grey}".strip())
    elif len(comparison.places) > 1:
        shots = int(comparison.main or 0)
        drawn[heading] = Figure(
            charts.by_shots(rows, labels, shots),
            f"Dashed: {shots_words(shots)}, the number compared above.{shaded}{grey}",
        )
    if FEASIBLE in problem.metrics:
        level = comparison.reference.results.get("satisfaction_level")
        rows = rows.drop("low", "high", strict=False)
        chart = charts.by_budget(
            rows, FEASIBLE.key, ON_TIME, legend, percent=True, level=level, unit=unit
        )
        dashed = ""
        if level is not None:
            dashed = f" Dashed: {number(level, '.0%')}, the level that the guard keeps."
        drawn["On time"] = Figure(chart, f"{SHARE_ON_TIME}{dashed}{grey}")
    columns = [(run.label, policy, run.results) for run, policy in runs if run.label in labels]
    if usage := charts.knob_usage(columns, unit):
        of_runs = f" Of {coloured}." if grey else ""
        caption = f"Share of the test requests that get each value of a knob, per budget.{of_runs}"
        drawn["Which settings are used"] = Figure(usage, caption, min(len(runs), COLOURED))
    if training := _training(comparison):
        drawn[f"Training, on validation {problem.samples}"] = Figure(
            training,
            "Means over the seeds, shaded from the lowest to the highest; a curve ends where its "
            "first seed ends. Dashed: where GRPO begins, if it follows a warm-up. The curves of "
            f"controllers are of the network alone, without experts or guard.{grey}",
        )
    return drawn


def _colours(comparison: Comparison) -> tuple[str, str]:
    """Say which runs have a colour, and how many are grey; "" for the second if all have one."""
    best = len(order(comparison)) - 2
    grey = len(comparison.runs) - 1 - best
    coloured = "the first run"
    if best:
        others = "best other" if best == 1 else f"{best} best others"
        coloured += f" and the {others} judged on the same {comparison.problem.samples}"
    if len(comparison.runs) <= COLOURED:
        return coloured, ""
    return coloured, f" In colour: {coloured}; grey: {grey} more."


def forest(comparison: Comparison) -> Figure:
    """Draw the differences at the main place, in points as in the tables."""
    rows = []
    for difference in comparison.differences:
        low, high = difference.ci95
        row = {"name": difference.run, "value": 100 * difference.difference}
        row |= {"low": 100 * low, "high": 100 * high, "shown": SIGN_WORDS[difference.sign]}
        rows.append(row)
    title = f"difference in {comparison.problem.score} to {comparison.reference.label}, in points"
    colour = charts.colour_of(
        {"blue": "better", "orange": "worse", "grey": "no difference shown"}, "shown"
    )
    return Figure(
        charts.dots(pl.DataFrame(rows), title, colour, zero=True),
        f"A dot is the difference to {comparison.reference.label}, the line its 95% interval; "
        "grey: it may be chance.",
    )


def order(comparison: Comparison) -> list[str]:
    """Return the labels in the legend: those of the runs with a colour, in the order of the runs,
    and one for all others."""
    labels = [run.label for run in comparison.runs]
    if len(labels) <= COLOURED:
        return labels
    # the first run has a colour in any case
    best = [i for i in comparison.ranking() if i][: COLOURED - 1]
    return [*(labels[i] for i in sorted([0, *best])), charts.OTHER]


def _line(comparison: Comparison, run: ComparedRun) -> dict[str, str]:
    """Return the columns that name a run's line: its label in the legend, and its own label."""
    label = run.label if run.label in order(comparison) else charts.OTHER
    return {"policy": label, "name": run.label}


def _numbers(
    comparison: Comparison, lines: list[tuple[ComparedRun, str, dict[str, str]]]
) -> pl.DataFrame:
    """Return the numbers of each line at each place.

    Args:
        lines: run, policy, and the columns that name the line.
    """
    problem = comparison.problem
    rows = []
    for run, policy, names in lines:
        for place in comparison.places:
            if row := run.row(policy, place):
                rows.append(names | numbers(problem, row) | {problem.place: place})
    return pl.DataFrame(rows, infer_schema_length=None)


def _training(comparison: Comparison) -> list[alt.LayerChart]:
    """Draw for each metric the mean, the lowest and the highest seed of every run, by step."""
    frames = []
    for run in comparison.runs:
        logged = logged_numbers(run.folder / "metrics.csv")
        if logged is not None:
            line = {name: pl.lit(value) for name, value in _line(comparison, run).items()}
            frames.append(
                logged.with_columns(grpo=pl.lit(grpo_begins(run.results), pl.Int64), **line)
            )
    if not frames:
        return []
    logged = (
        pl.concat(frames)
        .filter(pl.col("part") == "validation")
        .with_columns(pl.col("seed").fill_null(""))
    )
    # the score on validation, and the rewards of stages
    scores = ("Utility", comparison.problem.validation.removeprefix("Val/"))
    names = [name for name in metrics_in_time(logged) if name in scores or is_shown_first(name)]
    titles = {name: title_of(name, comparison.unit) for name in names}
    value = pl.col("value")
    curve = ["name", "metric"]
    # steps that only some seeds reached have no mean over the seeds
    last = pl.col("step").max().over(*curve, "seed").min().over(curve)
    points = logged.filter(pl.col("metric").is_in(list(titles)), pl.col("step") <= last)
    # mean and range over the seeds
    points = points.group_by("policy", *curve, "grpo", "step").agg(
        mean=value.mean(), low=value.min(), high=value.max()
    )
    points = points.sort(*curve, "step").with_columns(
        pl.col("mean", "low", "high").round_sig_figs(5),
        pl.col("metric").replace(titles).alias("panel"),
        alone=pl.len().over(curve) == 1,
    )
    return charts.curves(points.drop("metric"), list(titles.values()), order(comparison))

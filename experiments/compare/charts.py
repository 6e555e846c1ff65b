"""The charts of `knobwise compare`, in which every run is a line under its label."""

from __future__ import annotations

import altair as alt
import polars as pl

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.report import charts
from knobwise.experiments.report.page import Figure, unchecked
from knobwise.experiments.report.result_charts import Figures, numbers, on_time
from knobwise.experiments.report.training_charts import logged_numbers
from knobwise.experiments.report.words import SIGN_WORDS, grpo_begins, policy_name, shots_words
from knobwise.experiments.results.problem import FEASIBLE

COLOURED = 4
"""At most this many runs have a colour: the first one, and the best of the runs that are comparable
with it."""


@unchecked
def comparison_charts(comparison: Comparison) -> Figures:
    """Draw all figures that the runs have numbers for."""
    problem = comparison.problem
    unit = comparison.unit
    labels = order(comparison)
    coloured = [run for run in comparison.runs if run.label in labels]
    grey = ""
    if others := len(comparison.runs) - len(coloured):
        grey = (
            " In colour: the first run and the best others judged on the same "
            f"{problem.samples}; grey: {others} more."
        )
    rows = []
    for run in comparison.runs:
        for row in run.rows_at(run.policy, comparison.places):
            line = numbers(problem, row, run.label)
            rows.append(line | {"policy": _label(labels, run.label)})
    drawn = {}
    metric = next(metric for metric in problem.metrics if metric.key == problem.ranked_by)
    heading = f"{metric.name.capitalize()} by {problem.place_words[0]}"
    legend = list(labels)
    # the reference policies of the first run
    for policy in comparison.reference_rows():
        legend.append(policy_name(policy["policy"]))
        for row in comparison.reference.rows_at(policy["policy"], comparison.places):
            rows.append(numbers(problem, row, legend[-1]))
    frame = pl.DataFrame(rows, infer_schema_length=None)
    shaded = " Shaded: 95% intervals."
    if grey:
        frame = frame.drop("low", "high")
        shaded = grey
    if problem.averaged:
        chart = charts.by_budget(frame, metric.key, metric.name, legend, unit=unit)
        drawn[heading] = Figure(chart, shaded.strip())
    elif len(comparison.places) > 1:
        shots = int(comparison.main or 0)
        chart = charts.by_shots(frame, labels, shots)
        drawn[heading] = Figure(chart, f"Dashed: {shots_words(shots)}, compared above.{shaded}")
    if FEASIBLE in problem.metrics:
        drawn["On time"] = on_time(frame, legend, comparison.reference.results, grey)
    columns = [(run.label, run.policy, run.results) for run in coloured]
    if usage := charts.knob_usage(columns, unit):
        caption = f"Share of the test requests that get each value of a knob, per budget.{grey}"
        drawn["Which settings are used"] = Figure(usage, caption, len(coloured))
    if training := _training(comparison, labels):
        drawn[f"Training, on validation {problem.samples}"] = Figure(
            training,
            "Means over the seeds, shaded from the lowest to the highest; a curve ends where its "
            "first seed ends. Dashed: where GRPO begins, if it follows a warm-up. The curves of "
            f"controllers are of the network alone, without experts or guard.{grey}",
        )
    return drawn


@unchecked
def forest(comparison: Comparison) -> Figure:
    """Draw the differences at the main place, in points as in the tables."""
    rows = []
    for difference in comparison.differences:
        points = [100 * value for value in (difference.difference, *difference.ci95)]
        rows.append([difference.run, *points, SIGN_WORDS[difference.sign]])
    frame = pl.DataFrame(rows, schema=["name", "value", "low", "high", "shown"], orient="row")
    reference = comparison.reference.label
    title = f"difference in {comparison.problem.score} to {reference}, in points"
    hues = {"blue": SIGN_WORDS[1], "orange": SIGN_WORDS[-1], "grey": SIGN_WORDS[0]}
    colour = charts.colour_of(hues, "shown")
    return Figure(
        charts.dots(frame, title, colour, zero=True),
        f"A dot is the difference to {reference}, the line its 95% interval; grey: it may be "
        "chance.",
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


def _label(labels: list[str], run: str) -> str:
    """Return the label of a run in the legend."""
    return run if run in labels else charts.OTHER


def _training(comparison: Comparison, labels: list[str]) -> list[alt.LayerChart]:
    """Draw for each metric the mean, the lowest and the highest seed of every run, by step."""
    frames = []
    begins: set[int] = set()
    for run in comparison.runs:
        logged = logged_numbers(run.folder / "metrics.csv", comparison.unit)
        if logged is not None:
            policy = _label(labels, run.label)
            frames.append(logged.with_columns(name=pl.lit(run.label), policy=pl.lit(policy)))
            begins |= set(grpo_begins(run.results))
    if not frames:
        return []
    # the score on validation, and the rewards of stages
    scores = ("Val/Utility", comparison.problem.validation)
    logged = pl.concat(frames).with_columns(pl.col("seed").fill_null(""))
    drawn = pl.col("variable").is_in(scores) | (pl.col("of_stage") & (pl.col("part") != "train"))
    # steps that only some seeds reached have no mean over the seeds
    curve = ["policy", "name", "panel"]
    last = pl.col("step").max().over(*curve, "seed").min().over(curve)
    points = logged.filter(drawn).filter(pl.col("step") <= last)
    value = pl.col("value")
    points = points.group_by(*curve, "step", maintain_order=True).agg(
        value.mean().round_sig_figs(5), low=value.min(), high=value.max()
    )
    return charts.curves(points, labels, sorted(begins))

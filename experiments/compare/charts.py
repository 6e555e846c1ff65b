"""The charts of `knobwise compare`, in which every run is a line under its label."""

from __future__ import annotations

import altair as alt
import polars as pl

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.evidence.results import grpo_begins
from knobwise.experiments.evidence.task import FEASIBLE
from knobwise.experiments.report import charts
from knobwise.experiments.report.page import HUES, Figure, colours_of, unchecked
from knobwise.experiments.report.result_charts import Figures, numbers, on_time
from knobwise.experiments.report.tables import reworded
from knobwise.experiments.report.training_charts import logged_numbers
from knobwise.experiments.wording.words import (
    LEANING_WORDS,
    SIGN_WORDS,
    policy_name,
    shots_words,
    shown_by,
)


@unchecked
def comparison_charts(comparison: Comparison) -> Figures:
    """Draw all figures that the runs have numbers for, of the runs in `comparison.drawn`."""
    task = comparison.task
    unit = comparison.unit
    # label, policy and run, then the reference policies of the first run
    sides = [(run.label, run.policy, run) for run in comparison.drawn]
    for row in comparison.reference_rows():
        sides.append((policy_name(row["policy"]), row["policy"], comparison.reference))
    rows = []
    for label, policy, run in sides:
        for row in run.rows_at(policy, comparison.conditions):
            rows.append(numbers(task, row, label))
    frame = pl.DataFrame(rows, infer_schema_length=None)
    drawn = {}
    metric = next(metric for metric in task.metrics if metric.key == task.ranked_by)
    heading = f"{metric.name.capitalize()} by {task.condition_words[0]}"
    some = ""
    if left_out := len(comparison.runs) - len(comparison.drawn):
        some = f" The first run and the best others; {left_out} more are in the tables."
    if task.averaged:
        title = in_words(metric.name, unit)
        chart = charts.by_budget(frame, metric.key, title, unit=unit)
        drawn[heading] = Figure(chart, f"Shaded: 95% intervals.{some}")
    elif len(comparison.conditions) > 1:
        shots = int(comparison.main or 0)
        caption = f"Dashed: {shots_words(shots)}, compared above. Shaded: 95% intervals.{some}"
        drawn[heading] = Figure(charts.by_shots(frame, shots), caption)
    if FEASIBLE in task.metrics:
        drawn["On time"] = on_time(frame, comparison.reference.results)
    columns = [(run.label, run.policy, run.results) for run in comparison.drawn]
    if usage := charts.knob_usage(columns, unit):
        caption = f"Share of the test requests that get each value of a knob, per budget.{some}"
        drawn["Which settings are used"] = Figure(usage, caption, len(columns))
    if training := _training(comparison):
        drawn[f"Training, on validation {task.samples}"] = Figure(
            training,
            "Means over the seeds, shaded from the lowest to the highest; a curve ends where its "
            "first seed ends. Dashed: where GRPO begins, if it follows a warm-up. The curves of "
            f"controllers are of the network alone, without experts or guard.{some}",
        )
    return reworded(drawn, unit)


@unchecked
def forest(comparison: Comparison) -> Figure:
    """Draw the differences at the main condition, in points as in the tables."""
    rows = []
    for difference in comparison.differences:
        points = [100 * value for value in (difference.difference, *difference.ci95)]
        rows.append([difference.run, *points, shown_by(difference)])
    frame = pl.DataFrame(rows, schema=["name", "value", "low", "high", "shown"], orient="row")
    reference = comparison.reference.label
    title = f"difference in {comparison.task.score} to {reference}, in points"
    hues = dict(zip(SIGN_WORDS.values(), (HUES["blue"], HUES["orange"], HUES["grey"]), strict=True))
    hues |= dict.fromkeys(LEANING_WORDS.values(), HUES["grey"])
    colour = charts.colour_of(hues, "shown")
    return Figure(
        charts.dots(frame, title, colour, zero=True),
        f"A dot is the difference to {reference}, the line its 95% interval; grey: it may be "
        "chance.",
    )


def _training(comparison: Comparison) -> list[alt.LayerChart]:
    """Draw for each metric the mean, the lowest and the highest seed of every run, by step."""
    frames = []
    begins: set[int] = set()
    for run in comparison.drawn:
        logged = logged_numbers(run.folder / "metrics.csv", comparison.unit)
        if logged is not None:
            frames.append(logged.with_columns(policy=pl.lit(run.label)))
            begins |= set(grpo_begins(run.results))
    if not frames:
        return []
    # the score on validation, and the rewards of stages
    scores = ("Val/Utility", comparison.task.validation)
    logged = pl.concat(frames).with_columns(pl.col("seed").fill_null(""))
    drawn = pl.col("variable").is_in(scores) | (pl.col("of_stage") & (pl.col("part") != "train"))
    # steps that only some seeds reached have no mean over the seeds
    curve = ["policy", "panel"]
    last = pl.col("step").max().over(*curve, "seed").min().over(curve)
    points = logged.filter(drawn).filter(pl.col("step") <= last)
    value = pl.col("value")
    points = points.group_by(*curve, "step", maintain_order=True).agg(
        value.mean().round_sig_figs(5), low=value.min(), high=value.max()
    )
    colours = colours_of([run.label for run in comparison.drawn])
    return charts.curves(points, colours, "policy", sorted(begins))

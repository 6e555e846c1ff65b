"""The charts of a run's training: what was logged, over the iterations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from knobwise.common.errors import InputError
from knobwise.experiments.report import charts, words
from knobwise.experiments.report.page import Figure, Folded
from knobwise.experiments.report.sentences import on_training
from knobwise.experiments.results.problem import CONTROLS, problem_of

TITLES = {
    "Utility": "utility (0 to 1)",
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean ({unit})",
    "Budget_Violation_Rate": "over budget (share)",
    "Loss": "loss",
}
"""Logged number → the title of its panel."""
OF_STAGES = ("Reward_Mean", "Accuracy_Mean")
"""The numbers shown first of each stage of training. A stage logs under its name, as in
`Val/rce/Reward_Mean`."""
POINTS = 6000
"""At most this many points go into a figure of training curves."""


def training(results: Mapping[str, Any], path: Path) -> list[Any]:
    """Return the blocks of a page on the training of a run: sentences and curves; [] without
    logged numbers.

    Args:
        results: the content of `results.json`.
        path: of `metrics.csv`.
    """
    logged = logged_numbers(path)
    if logged is None:
        return []
    in_time = metrics_in_time(logged)
    begins = words.grpo_begins(results)
    dashed = "" if begins is None else " Dashed: where the warm-up ends."
    score = problem_of(results).validation
    # rewards of each stage first, all else folded
    stages = [name for name in in_time if is_shown_first(name)]
    others = sorted(name for name in in_time if name not in stages)
    blocks: list[Any] = on_training(results)
    if curves := _parts_of_grpo(results, logged.filter(pl.col("variable") == score), begins):
        caption = (
            "A line for each seed, of networks without the guard on samples that they were not "
            f"fitted on.{dashed}"
        )
        blocks.append(Figure(curves, caption))
    if stages:
        blocks.append(Figure(_curves(logged, stages, begins), "A line for each seed and stage."))
    if others:
        caption = f"A line for each seed; long curves are averaged over steps.{dashed}"
        curves = _curves(logged, others, begins)
        blocks.append(Folded("All other logged numbers", [Figure(curves, caption)]))
    return blocks


def _parts_of_grpo(
    results: Mapping[str, Any], logged: pl.DataFrame, begins: int | None
) -> list[alt.LayerChart]:
    """Draw the score on validation before and during GRPO, and where there is GRPO also the change
    from what it started with."""
    first = f"{problem_of(results).score} on validation"
    second = "GRPO alone: points gained since it began"
    colours = {"slate": "before GRPO" if begins else "without GRPO", "blue": "GRPO"}
    points = logged.select(
        "seed", "step", "value", panel=pl.lit(first), grpo=pl.lit(begins, pl.Int64)
    )

    # seed → the score that GRPO started with
    chosen = zip(results.get("seeds", []), results.get("chosen") or (), strict=False)
    starts = {
        str(seed): seeds["grpo"]["start"] for seed, seeds in chosen if begins and seeds.get("grpo")
    }

    # the second panel: points gained, from 0 at the start
    of_grpo = pl.col("step") > pl.col("grpo")
    before = pl.col("seed").replace_strict(starts, default=None, return_dtype=pl.Float64)
    gained = 100 * (pl.col("value") - before)
    during = points.filter(of_grpo).with_columns(value=gained, panel=pl.lit(second))
    zero = {"step": begins, "value": 0.0, "panel": second, "grpo": begins}
    zeros = pl.DataFrame([{"seed": seed} | zero for seed in starts], schema=points.schema)
    points = pl.concat([points, during.drop_nulls("value"), zeros]).sort("panel", "seed", "step")

    part = pl.when(of_grpo | (pl.col("panel") == second)).then(pl.lit("GRPO"))
    points = points.with_columns(part=part.otherwise(pl.lit(colours["slate"])))
    panels = [panel for panel in (first, second) if panel in points["panel"]]
    return charts.curves(points, panels, colours, colour="part", line="seed", y="value")


def logged_numbers(path: Path) -> pl.DataFrame | None:
    """Read what a run logged while it trained.

    Returns:
        columns seed, step, variable, value, metric (`variable` without Train/ or Val/) and part
        (train or validation); None if the file is missing or holds no such numbers.

    Raises:
        InputError: the file is no table, or not of a run.
    """
    if not path.exists():
        return None
    try:
        frame = pl.read_csv(
            path,
            infer_schema_length=None,
            schema_overrides={"seed": pl.String},
            raise_if_empty=False,
        )
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    # other columns are of the system, such as times
    names = [
        name
        for name in frame.columns
        if name.startswith(("Train/", "Val/")) and frame[name].dtype.is_numeric()
    ]
    if not {"seed", "step"} <= set(frame.columns):
        raise InputError(
            f"{path}: is empty or damaged, without columns seed and step; delete it to go without "
            "curves"
        )
    if not names:
        return None
    frame = frame.with_columns(pl.col("step").cast(pl.Int64, strict=False))
    logged = frame.unpivot(names, index=["seed", "step"]).drop_nulls().cast({"value": pl.Float64})
    part, metric = (pl.col("variable").str.extract(pattern) for pattern in (r"^(\w+)/", r"/(.*)$"))
    return logged.filter(pl.col("value").is_finite()).with_columns(
        metric=metric, part=part.replace({"Train": "train", "Val": "validation"})
    )


def metrics_in_time(logged: pl.DataFrame) -> list[str]:
    """Return the metrics by the step at which they were first logged, then by name."""
    begins = logged.group_by("metric").agg(pl.col("step").min())
    return begins.sort("step", "metric")["metric"].to_list()


def is_shown_first(metric: str) -> bool:
    """Return whether a metric is one of `OF_STAGES`, of a stage of training that is no control."""
    stage, _, number = metric.rpartition("/")
    return bool(stage) and number in OF_STAGES and stage not in CONTROLS


def title_of(metric: str, unit: str = "ms") -> str:
    """Return the title of a panel; for a stage of training it begins with the name of the stage."""
    stage, _, number = metric.rpartition("/")
    title = TITLES.get(number, number).format(unit=unit)
    if stage:
        title = f"{stage}: {title}"
    return title.replace("_", " ")


def _curves(logged: pl.DataFrame, metrics: list[str], begins: int | None) -> list[alt.LayerChart]:
    """Draw a chart for each metric. A long curve is thinned: its points are means over stretches of
    steps, each drawn at its last step."""
    logged = logged.filter(pl.col("metric").is_in(metrics))
    curve = ["metric", "part", "seed"]
    most = max(10, min(120, POINTS // max(1, logged.select(curve).n_unique())))
    index = pl.int_range(pl.len()).over(curve, order_by="step")
    stretch = index * most // pl.len().over(curve).clip(most)
    thinned = logged.group_by(*curve, stretch.alias("bin")).agg(
        pl.col("step").max(), pl.col("value").mean().round_sig_figs(5)
    )
    titles = {name: title_of(name) for name in metrics}
    # a row for each point
    points = thinned.sort(*curve, "step").drop("bin")
    points = points.with_columns(pl.col("metric").replace(titles).alias("panel"))
    points = points.drop("metric").with_columns(grpo=pl.lit(begins, pl.Int64))
    parts = {"slate": "train", "blue": "validation"}
    return charts.curves(
        points, list(titles.values()), parts, colour="part", line="seed", y="value"
    )

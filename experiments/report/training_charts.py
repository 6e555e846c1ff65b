"""The charts of a run's training: what was logged, over the iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import grpo_begins, unit_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.task import CONTROLS, task_of
from knobwise.experiments.report import charts
from knobwise.experiments.report.page import HUES, Figure
from knobwise.experiments.report.tables import Folded
from knobwise.experiments.wording.sentences import on_training

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
PARTS = {"train": HUES["slate"], "validation": HUES["blue"]}
"""Part of the samples → the colour of its curves."""
POINTS = 6000
"""At most this many points go into a figure of training curves."""


def training(results: RunResults, path: Path) -> list[Any]:
    """Return the blocks of a page on the training of a run: sentences and curves; [] without
    logged numbers.

    Args:
        results: the content of `results.json`.
        path: of `metrics.csv`.
    """
    logged = logged_numbers(path, unit_of(results))
    if logged is None:
        return []
    begins = grpo_begins(results)
    dashed = " Dashed: where the warm-up ends." * len(begins)
    blocks: list[Any] = on_training(results)
    score = logged.filter(pl.col("variable") == task_of(results).validation)
    if len(score):
        caption = (
            "A line for each seed, of networks without the guard on samples that they were not "
            f"fitted on.{dashed}"
        )
        gained = _gained(results, score, begins)
        blocks.append(Figure(_curves(pl.concat([score, gained]), begins), caption))
    # rewards of each stage first, all else folded
    if curves := _curves(logged.filter("of_stage"), begins):
        blocks.append(Figure(curves, "A line for each seed and stage."))
    if curves := _curves(logged.filter(~pl.col("of_stage")), begins):
        caption = f"A line for each seed; long curves are averaged over steps.{dashed}"
        blocks.append(Folded("All other logged numbers", [Figure(curves, caption)]))
    return blocks


def _gained(results: RunResults, score: pl.DataFrame, begins: Sequence[int]) -> pl.DataFrame:
    """Return how much more the score on validation is than what GRPO started with, in points."""
    seeds = zip(results.get("seeds", []), results.get("chosen") or (), strict=False)
    starts = {str(seed): chosen["grpo"]["start"] for seed, chosen in seeds if chosen.get("grpo")}
    start = pl.col("seed").replace_strict(starts, default=None, return_dtype=pl.Float64)
    during = score.filter(pl.col("step") > max(begins, default=math.inf))
    return during.with_columns(
        panel=pl.lit("GRPO alone: points gained since it began"),
        value=100 * (pl.col("value") - start),
    ).drop_nulls("value")


def logged_numbers(path: Path, unit: str) -> pl.DataFrame | None:
    """Read what a run logged while it trained.

    Args:
        path: of `metrics.csv`.
        unit: of latencies.

    Returns:
        columns seed, step, variable, value, panel (the title of its chart), part (train or
        validation) and of_stage (whether it is one of `OF_STAGES`, of a stage that is no control),
        by the step at which a number was first logged; None if the file is missing or holds no
        such numbers.

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
            glob=False,
        ).with_columns("seed", pl.col("step").cast(pl.Int64, strict=False))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); delete it to go without curves"
        ) from error
    # other columns are of the system, such as times
    titles = {}
    stages = []
    for name in frame.columns:
        if name.startswith(("Train/", "Val/")) and frame[name].dtype.is_numeric():
            *stage, number = name.split("/")[1:]
            title = in_words(TITLES.get(number, number).format(unit=unit), unit)
            title = ": ".join([*stage, title])
            titles[name] = title.replace("_", " ")
            if stage and number in OF_STAGES and stage[0] not in CONTROLS:
                stages.append(name)
    if not titles:
        return None
    logged = frame.unpivot(list(titles), index=["seed", "step"]).cast({"value": pl.Float64})
    variable = pl.col("variable")
    return (
        logged.drop_nulls()
        .filter(pl.col("value").is_finite())
        .with_columns(
            panel=variable.replace_strict(titles),
            part=variable.str.extract(r"^(\w+)").replace({"Train": "train", "Val": "validation"}),
            of_stage=variable.is_in(stages),
        )
        .sort(pl.col("step").min().over("panel"), "panel", "step")
    )


def _curves(logged: pl.DataFrame, begins: Sequence[int]) -> list[alt.LayerChart]:
    """Draw a chart for each number. A long curve is thinned: its points are means over stretches of
    steps, each drawn at its last step."""
    curve = ["panel", "part", "seed"]
    most = max(10, min(120, POINTS // max(1, logged.select(curve).n_unique())))
    stretch = pl.int_range(pl.len()).over(curve) * most // pl.len().over(curve).clip(most)
    points = logged.group_by(*curve, stretch.alias("stretch"), maintain_order=True).agg(
        pl.col("step").last(), pl.col("value").mean().round_sig_figs(5)
    )
    seed = alt.Detail("seed:N")
    return charts.curves(points.drop("stretch"), PARTS, "part", begins, seed)

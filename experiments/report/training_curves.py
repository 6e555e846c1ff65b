"""The training curves of a run's report, drawn from its `metrics.csv`."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from knobwise.common.errors import InputError
from knobwise.experiments.report import charts, page
from knobwise.experiments.results.selector_results import CONTROLS

SHARED = {
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean (ms)",
    "Budget_Violation_Rate": "over budget (share)",
    "Loss": "loss",
}
"""What is shown at once, in this order, and how it is called."""
OF_STAGES = ("Reward_Mean", "Accuracy_Mean")
"""The same where one run logs several stages of training, each under its own name, as `Val/rce/Reward_Mean`."""
POINTS = 6000
"""At most this many points go into a figure."""


def training_curves(path: Path, begins: int | None = None) -> list[str]:
    """The part of the report about training: what matters most, the rest to be opened; [] without numbers.

    Args:
        path: `metrics.csv`.
        begins: the step at which GRPO begins, where that is known.
    """
    logged = logged_numbers(path)
    if logged is None:
        return []
    in_time = logged.group_by("metric").agg(pl.col("step").min()).sort("step", "metric")["metric"].to_list()
    first = sorted(filter(_shown_at_once, in_time), key=lambda name: list(SHARED).index(name) if name in SHARED else 0)
    rest = sorted(set(in_time) - set(first))
    caption = "One line a seed; long curves are averaged in steps." + " Dashed: where GRPO begins." * bool(begins)
    parts = ["<h2>Training</h2>", _figure(logged, first, caption, begins)] if first else ["<h2>Training</h2>"]
    return [*parts, page.folded("All other logged numbers", _figure(logged, rest, caption, begins))] if rest else parts


def logged_numbers(path: Path) -> pl.DataFrame | None:
    """What a run logged while it trained: seed, step, variable, value, metric (`variable` without Train/ or Val/) and
    part (train or validation); None where the file is missing or holds nothing of the kind.

    Raises:
        InputError: no table with commas.
    """
    if not path.exists():
        return None
    try:
        frame = pl.read_csv(path, infer_schema_length=None, schema_overrides={"seed": pl.String})
    except pl.exceptions.NoDataError:
        return None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    if not {"seed", "step"} <= set(frame.columns):
        return None
    names = [name for name in frame.columns if name.startswith(("Train/", "Val/")) and frame[name].dtype.is_numeric()]
    if not names:
        return None
    frame = frame.with_columns(pl.col("step").cast(pl.Int64, strict=False))
    logged = frame.unpivot(names, index=["seed", "step"]).drop_nulls().cast({"value": pl.Float64})
    return logged.filter(pl.col("value").is_finite()).with_columns(
        pl.col("variable").str.extract(r"/(.*)$").alias("metric"),
        pl.when(pl.col("variable").str.starts_with("Train/"))
        .then(pl.lit("train"))
        .otherwise(pl.lit("validation"))
        .alias("part"),
    )


def _shown_at_once(metric: str) -> bool:
    stage, _, number = metric.rpartition("/")
    return number in OF_STAGES and stage not in CONTROLS if stage else number in SHARED


def _words(metric: str) -> str:
    stage, _, number = metric.rpartition("/")
    return f"{stage}: {SHARED.get(number, number)}".removeprefix(": ").replace("_", " ")


def _figure(logged: pl.DataFrame, metrics: list[str], caption: str, begins: int | None) -> str:
    """One panel a metric; of long curves the means over stretches of steps, each at its last step."""
    logged, curve = logged.filter(pl.col("metric").is_in(metrics)), ["metric", "part", "seed"]
    most = max(10, min(120, POINTS // logged.select(curve).n_unique()))
    place = pl.int_range(pl.len()).over(curve, order_by="step") * most // pl.len().over(curve).clip(most)
    thinned = logged.group_by(*curve, place.alias("bin")).agg(
        pl.col("step").max(), pl.col("value").mean().round_sig_figs(5)
    )
    thinned = thinned.sort(*curve, "step").drop("bin")
    words = {name: _words(name) for name in metrics}
    panels = thinned.with_columns(pl.col("metric").replace(words).alias("panel")).drop("metric")
    return page.figure(charts.curves(panels, list(words.values()), begins), caption)

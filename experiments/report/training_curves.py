"""The training curves of a run's report, drawn from its `metrics.csv`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from knobwise.common.errors import InputError
from knobwise.experiments.report import charts
from knobwise.experiments.results.problem import CONTROLS

if TYPE_CHECKING:
    import altair as alt

SHARED = {
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean (ms)",
    "Budget_Violation_Rate": "over budget (share)",
    "Loss": "loss",
}
"""The numbers shown first, in this order, and their titles."""
OF_STAGES = ("Reward_Mean", "Accuracy_Mean")
"""Those shown first if a run logs several stages of training, each under its name, as in `Val/rce/Reward_Mean`."""
POINTS = 6000
"""At most this many points go into a figure."""


class Curves(NamedTuple):
    """What a report shows of training."""

    first: alt.FacetChart | None
    """The numbers that matter most."""
    rest: alt.FacetChart | None
    """All others."""


def training_curves(path: Path, begins: int | None = None) -> Curves | None:
    """The curves of a run; None if it logged no numbers.

    Args:
        path: `metrics.csv`.
        begins: the step at which GRPO begins, if it is known.
    """
    logged = logged_numbers(path)
    if logged is None:
        return None
    in_time = logged.group_by("metric").agg(pl.col("step").min()).sort("step", "metric")["metric"].to_list()
    first = sorted(filter(_is_shown_first, in_time), key=lambda name: list(SHARED).index(name) if name in SHARED else 0)
    rest = sorted(set(in_time) - set(first))
    return Curves(*(_chart(logged, names, begins) if names else None for names in (first, rest)))


def logged_numbers(path: Path) -> pl.DataFrame | None:
    """What a run logged while it trained: seed, step, variable, value, metric (`variable` without Train/ or Val/) and
    part (train or validation); None if the file is missing or holds no such numbers.

    Raises:
        InputError: the file is no table.
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


def _is_shown_first(metric: str) -> bool:
    stage, _, number = metric.rpartition("/")
    return number in OF_STAGES and stage not in CONTROLS if stage else number in SHARED


def _title(metric: str) -> str:
    stage, _, number = metric.rpartition("/")
    return f"{stage}: {SHARED.get(number, number)}".removeprefix(": ").replace("_", " ")


def _chart(logged: pl.DataFrame, metrics: list[str], begins: int | None) -> alt.FacetChart:
    """One panel a metric; of long curves the means over stretches of steps, each at its last step."""
    logged, curve = logged.filter(pl.col("metric").is_in(metrics)), ["metric", "part", "seed"]
    most = max(10, min(120, POINTS // logged.select(curve).n_unique()))
    place = pl.int_range(pl.len()).over(curve, order_by="step") * most // pl.len().over(curve).clip(most)
    thinned = logged.group_by(*curve, place.alias("bin")).agg(
        pl.col("step").max(), pl.col("value").mean().round_sig_figs(5)
    )
    titles = {name: _title(name) for name in metrics}
    panels = thinned.sort(*curve, "step").drop("bin").with_columns(pl.col("metric").replace(titles).alias("panel"))
    return charts.curves(panels.drop("metric"), list(titles.values()), begins)

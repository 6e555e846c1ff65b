"""Summarise a table of decisions: what every policy gets, with intervals.

A number of a policy is a mean over its samples, then over its seeds, then over the conditions.
Intervals are of the bootstrap over samples (or clusters), seeds and splits, the same draws for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from knobwise.envs.tables.measured_decisions import are_known
from knobwise.experiments.evidence.decisions import SAMPLE, splits_of
from knobwise.experiments.evidence.schema import ReliabilityBin, UsageRow
from knobwise.experiments.evidence.statistics import ends_of_means, resampled_means
from knobwise.experiments.evidence.task import Metric, Task

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import KnobValue

WEIGHT = "sampling_weight"
"""The column that says of a decision whether it was measured, see
`knobwise.experiments.evidence.decisions`."""
BINS = 10
"""Number of bins of predicted probabilities."""
Array = NDArray[np.float64]


def summarise(
    decisions: pl.DataFrame,
    metrics: Sequence[Metric],
    conditions: bool = True,
    over_conditions: bool = True,
) -> list[dict[str, Any]]:
    """Return a row for each policy: its mean over the conditions, under the condition None, then
    its numbers under each condition.

    Args:
        decisions: of every policy the same samples under the same conditions, in the same order;
            its seeds may differ from those of others.
        metrics: their numbers become those of a row, see `Metric`. A number without an interval is
            None where it is unknown, and a ratio with its interval where nothing could be gained.
            Numbers that rest on decisions of which too few were measured are None, see
            `_without_unknown`.
        conditions: whether there are rows for each condition.
        over_conditions: whether there are rows with the mean over the conditions.
    """
    # differences are taken in float64
    decisions = decisions.with_columns(pl.col(pl.Float32).cast(pl.Float64))
    samples = decisions.select(*SAMPLE, "cluster").unique(maintain_order=True)
    splits = splits_of(samples)
    means = _aggregated(decisions, [metric for metric in metrics if metric.aggregate is not None])
    estimated = [metric for metric in metrics if metric.value is not None]
    rows: list[dict[str, Any]] = []
    ratios: list[_Ratio] = []
    for (policy,), part in decisions.group_by("policy", maintain_order=True):
        judged = part["condition"].unique(maintain_order=True).to_list()
        slices: dict[float | None, slice] = {None: slice(None)} if over_conditions else {}
        if conditions:
            slices |= {condition: slice(i, i + 1) for i, condition in enumerate(judged)}
        cubes = [_Ratio.from_decisions(part, metric, len(judged)) for metric in estimated]
        for condition, where in slices.items():
            row = {"policy": policy, "condition": condition, **means[policy, condition]}
            for metric, cube in zip(estimated, cubes, strict=True):
                ratio = cube.over(where)
                row[metric.key] = ratio.value
                ratios.append(ratio)
                if metric.in_parts:
                    row |= _parts(metric.key, ratio.above, part["seed"], splits)
            rows.append(row)
    # all intervals at once: they share their draws
    intervals = iter(_intervals(ratios, splits))
    for row in rows:
        for metric in estimated:
            ci95 = next(intervals)
            row[f"{metric.key}_ci95"] = None if row[metric.key] is None else ci95
    for row, metric in itertools.product(rows, metrics):
        if metric.share:
            _cut_off(row, metric.key)
    _without_unknown(rows, decisions, metrics)
    return rows


OF_MEASURING = ("sampling_weight", "decision_us")
"""The columns of decisions that no measured cell is needed for."""


def _without_unknown(
    rows: Sequence[dict[str, Any]], decisions: pl.DataFrame, metrics: Sequence[Metric]
) -> None:
    """Add to rows how many decisions were measured, where that is not all, and replace by None
    every number that rests on too few of them (`knobwise.envs.tables.measured_decisions`).

    A number rests on the policy's own decisions, and where it compares on those of the others. Each
    seed counts for itself. A mean over the conditions is known if it is known at each of them, and
    has the count of the condition where fewest were measured.
    """
    weights = [name for name in decisions.columns if name.endswith(WEIGHT)]
    weights = [name for name in weights if not decisions[name].is_null().all()]
    if not weights:
        return
    # a row for each policy, seed and condition: how many decisions, and how many were measured
    measured = [(pl.col(name).is_null() | (pl.col(name) > 0)).sum().alias(name) for name in weights]
    counts = decisions.group_by("policy", "condition", "seed").agg(pl.len(), *measured)
    for row in rows:
        judged = counts.filter(policy=row["policy"])
        if row["condition"] is not None:
            judged = judged.filter(condition=row["condition"])
        known = {
            name: all(are_known(*pair) for pair in judged.select(name, "len").iter_rows())
            for name in weights
        }
        fewest = judged.sort(WEIGHT, "len").row(0, named=True) if WEIGHT in weights else None
        if fewest is not None:
            row["measured_decisions"], row["decisions"] = fewest[WEIGHT], fewest["len"]
        for metric in metrics:
            columns = {
                name
                for side in (metric.value, metric.per, metric.aggregate)
                if side is not None
                for name in side.meta.root_names()
            }
            if columns <= {*OF_MEASURING}:
                continue
            needed = [WEIGHT, *(f"{name}_{WEIGHT}" for name in columns)]
            if not all(known.get(name, True) for name in needed):
                names = [name for name in row if name in _keys(metric.key)]
                row.update(dict.fromkeys(names))


def _keys(key: str) -> tuple[str, ...]:
    """Return the names under which a row has a number, its interval and its parts."""
    return key, f"{key}_ci95", f"{key}_per_seed", f"{key}_per_split"


def _cut_off(row: dict[str, Any], key: str) -> None:
    """Bring what a row has of a share into 0 … 1.

    Doubly robust estimates of the share on time may lie above 1. A ratio to the sum of the weights
    would not mend that: with predictions in it, it may lie outside too. Whatever the truth is, it
    is in the range, so an estimate that is cut off is no farther from it.
    """
    for name in _keys(key):
        if row.get(name) is not None:
            row[name] = np.clip(row[name], 0.0, 1.0).tolist()


def _aggregated(
    decisions: pl.DataFrame, metrics: Sequence[Metric]
) -> dict[tuple[str, float | None], dict[str, Any]]:
    """Return the numbers that have no interval, by policy and condition; None for the mean over
    the conditions at which they are known."""
    numbers = {metric.key: metric.aggregate for metric in metrics}
    # rows keep their order, so that sums do not differ between two runs
    aggregations = {name: cast("pl.Expr", samples) for name, samples in numbers.items()}
    of_seeds = decisions.group_by("policy", "condition", "seed", maintain_order=True).agg(
        **aggregations
    )
    mean = [pl.col(name).cast(pl.Float64).mean().fill_nan(None) for name in numbers]
    by_condition = of_seeds.group_by("policy", "condition", maintain_order=True).agg(mean)
    overall = by_condition.group_by("policy", maintain_order=True).agg(mean)
    overall = overall.with_columns(condition=pl.lit(None, pl.Float64))
    means: dict[tuple[str, float | None], dict[str, Any]] = {}
    for frame in (by_condition, overall):
        for row in frame.iter_rows(named=True):
            means[row.pop("policy"), row.pop("condition")] = row
    return means


def _parts(
    key: str, scores: Array, seeds: pl.Series, splits: NDArray[np.int64] | None
) -> dict[str, list[float]]:
    """Return the mean of scores [S, n] by seed where there are seeds, and by split where there are
    several."""
    parts = {}
    if not seeds.has_nulls():
        parts[f"{key}_per_seed"] = scores.mean(1).tolist()
    if splits is not None and splits[0].any():
        of_splits = [scores[:, splits[0] == split] for split in np.unique(splits[0])]
        parts[f"{key}_per_split"] = [float(values.mean()) for values in of_splits]
    return parts


class _Ratio(NamedTuple):
    """The mean of an array, float [S, n, …], divided by that of another one, if there is one."""

    above: Array
    below: Array | None = None

    @classmethod
    def from_decisions(cls, decisions: pl.DataFrame, metric: Metric, conditions: int) -> _Ratio:
        """Return a metric of a policy with S seeds for n samples under each condition, [S, n, B],
        NaN where it is unknown."""

        def array(side: pl.Expr) -> Array:
            column = decisions.select("seed", side.cast(pl.Float64).fill_null(np.nan).alias("x"))
            # with several splits the rows of a seed are not together; `partition_by` joins them
            seeds = [seed["x"].to_numpy() for seed in column.partition_by("seed")]
            return np.stack(seeds).reshape(len(seeds), -1, conditions)

        # only metrics with a value are estimated
        assert metric.value is not None
        above = array(metric.value)
        if metric.per is None:
            return cls(above)
        return cls(above, array(metric.per))

    def over(self, where: slice) -> _Ratio:
        """Return the means over some of the conditions, [S, n]."""
        above = self.above[..., where].mean(-1)
        if self.below is None:
            return _Ratio(above)
        return _Ratio(above, self.below[..., where].mean(-1))

    @property
    def value(self) -> float | None:
        """The ratio of the means; None where nothing could be gained. A mean that is not known is
        0."""
        if self.below is None:
            return float(np.nan_to_num(self.above.mean()))
        value = float(_divided(self.above.mean(), self.below.mean()))
        return None if np.isnan(value) else value

    def by_sample(self) -> Array:
        """Return what each sample gives, [S, n], whose mean is the ratio, and which varies as it
        does, to first order; NaN where nothing could be gained."""
        if self.below is None:
            return self.above
        below = self.below.mean()
        ratio = _divided(self.above.mean(), below)
        return ratio + _divided(self.above - ratio * self.below, below)


def _divided(above: Array | np.float64, below: Array | np.float64) -> Array:
    """Return the ratio of two means; NaN where the second is 0."""
    return above / np.where(below > 1e-9, below, np.nan)


def _intervals(ratios: Sequence[_Ratio], splits: NDArray[np.int64] | None) -> list[list[float]]:
    """Return the 95 % interval of each ratio of means, see `ends_of_means`. A draw in which nothing
    could be gained says nothing."""
    arrays = [side for ratio in ratios for side in ratio if side is not None]
    if not arrays:
        return []
    drawn = iter(resampled_means(arrays, splits=splits).T)
    intervals = []
    for ratio in ratios:
        column = next(drawn)[:, None]
        if ratio.below is not None:
            column = _divided(column, next(drawn)[:, None])
        intervals += ends_of_means([ratio.by_sample()], column)
    return intervals


# -- beside others ---------------------------------------------------------------------------------


def with_references(task: Task, decisions: pl.DataFrame) -> pl.DataFrame:
    """Add the scores that the reference policy (`of_reference`) and the upper bound
    (`of_upper_bound`) of a task have for the same request."""
    for column, policy in (("of_reference", task.low), ("of_upper_bound", task.high)):
        decisions = with_score_of(decisions, policy, task.score, column)
    return decisions


def with_score_of(
    decisions: pl.DataFrame, policy: str, score: str, column: str, seeds: bool = False
) -> pl.DataFrame:
    """Add a column with a score of a policy for the same request, with the same seed if wanted.

    Where not every cell was measured a second column, `{column}_sampling_weight`, says whether that
    decision was.
    """
    keys = [*SAMPLE, "condition", *(["seed"] if seeds else [])]
    added = [pl.col(score).alias(column)]
    # requests that were served have none
    if WEIGHT in decisions.columns and not decisions[WEIGHT].is_null().all():
        added.append(pl.col(WEIGHT).alias(f"{column}_{WEIGHT}"))
    other = decisions.filter(policy=policy).select(*keys, *added)
    return decisions.join(other, on=keys, how="left", nulls_equal=True, maintain_order="left")


# -- other numbers ---------------------------------------------------------------------------------


def reliability(decisions: pl.DataFrame, policy: str) -> list[ReliabilityBin]:
    """Return a policy's decisions, all conditions and seeds together, in ten bins of equally many
    and of rising probability: how many `decisions`, and the means of `expected_in_time` and
    `in_time`. [] if it predicts none."""
    known = decisions.filter(policy=policy).drop_nulls("expected_on_time")
    number = pl.int_range(pl.len()) * BINS // pl.len()
    bins = (
        known.sort("expected_on_time", maintain_order=True)
        .group_by(number.alias("bin"), maintain_order=True)
        .agg(
            pl.len().alias("decisions"),
            pl.col("expected_on_time").cast(pl.Float64).mean().alias("expected_in_time"),
            pl.col("on_time").cast(pl.Float64).mean().clip(0, 1).alias("in_time"),
        )
    )
    return cast("list[ReliabilityBin]", bins.drop("bin").to_dicts())


def usage(
    decisions: pl.DataFrame,
    policies: Sequence[str],
    settings: Mapping[str, Mapping[str, KnobValue]],
    knobs: Mapping[str, Sequence[KnobValue]],
) -> list[UsageRow]:
    """Return how often policies set each knob to each value, under each condition; for a mixture
    how often they are expected to.

    Args:
        settings: configuration, by its label → the value of each knob.
        knobs: name → values.
    """
    part = decisions.filter(pl.col("policy").is_in(policies))
    share = pl.col("second_share").fill_null(0.0)
    first = part.select("policy", "condition", "choice", times=1 - share)
    second = part.select("policy", "condition", choice="second_choice", times=share)
    counted = pl.concat([first, second]).drop_nulls("choice")
    conditions = decisions["condition"].unique(maintain_order=True).to_list()
    rows: list[UsageRow] = []
    for policy, (knob, values) in itertools.product(policies, knobs.items()):
        # values by number, since knobs may hold names and numbers
        number = {label: values.index(setting[knob]) for label, setting in settings.items()}
        value = pl.col("choice").replace_strict(number, return_dtype=pl.Int64).alias("value")
        times = counted.filter(policy=policy).group_by("condition", value).agg(pl.sum("times"))
        shares = times.with_columns(pl.col("times") / pl.sum("times").over("condition"))
        known = {row[:2]: row[2] for row in shares.iter_rows()}
        for condition, (i, each) in itertools.product(conditions, enumerate(values)):
            row: UsageRow = {"policy": policy, "budget_ms": condition, "knob": knob}
            rows.append(row | {"value": each, "share": known.get((condition, i), 0.0)})
    return rows

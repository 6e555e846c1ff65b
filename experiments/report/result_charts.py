"""The charts of a run's results and of its training, for its report and, as pictures, for W&B."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.common.errors import InputError
from knobwise.experiments.report import charts, page, words
from knobwise.experiments.report.words import MIX, ORACLE, SINGLE, policy_name, rows_at, shots_words
from knobwise.experiments.results.problem import (
    CONTROLS,
    DEMONSTRATIONS,
    LEARNED,
    UPPER,
    WEIGHTS,
    Problem,
    problem_of,
    shown_at,
)

Charts = dict[str, alt.TopLevelMixin]
"""Heading → chart."""
KINDS = {name: kind for kind, names in (("simple baseline", SIMPLE), ("sees the answer", UPPER)) for name in names}
KINDS |= dict.fromkeys(CONTROLS, "control")
"""Of the policies that are not learned, for the bars."""
TITLES = {
    "Utility": "utility (0 to 1)",
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean ({unit})",
    "Budget_Violation_Rate": "over budget (share)",
    "Loss": "loss",
}
"""Of logged numbers."""
SHOWN_FIRST = list(TITLES)[1:]
"""Those shown first, in this order."""
OF_STAGES = ("Reward_Mean", "Accuracy_Mean")
"""Those shown first if a run logs several stages of training, each under its name, as in `Val/rce/Reward_Mean`."""
POINTS = 6000
"""At most this many points go into a figure of training curves."""


def result_charts(results: Mapping[str, Any]) -> Charts:
    """The charts that the results have numbers for."""
    if problem_of(results) is WEIGHTS:
        return {"Fronts": fronts([(policy_name(row["policy"]), row) for row in results["rows"]], results)}
    return _over_budgets(results) if problem_of(results).averaged else _over_shots(results)


def result_images(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The same charts as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(chart) for name, chart in result_charts(results).items()}


def numbers(problem: Problem, row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a row of results for a chart; `low` and `high` are the interval of what policies are ranked by."""
    low, high = row.get(f"{problem.ranked_by}_ci95") or (None, None)
    metrics = {metric.key: row.get(metric.key) for metric in problem.metrics}
    place, latency = row[problem.place], row.get("latency_ms_mean")
    return {problem.place: place, "latency_ms": latency, **metrics, "low": low, "high": high}


def baselines(results: Mapping[str, Any]) -> list[str]:
    """The policies that are neither learned nor references, the best first."""
    problem = problem_of(results)
    if not problem.averaged:
        rows = rows_at(results, shown_at(results))
        return sorted((name for name in SIMPLE if name in rows), key=lambda name: -float(rows[name]["accuracy"]))
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    ranked = (row["policy"] for row in words.ranked(results, problem.ranked_by))
    return [name for name in ranked if name not in references]


# -- over budgets ------------------------------------------------------------------------------------------------------


def _over_budgets(results: Mapping[str, Any]) -> Charts:
    """Learned policy, static reference, the strongest other baseline and oracle in colour, all others thin and grey."""
    problem, unit, others = problem_of(results), words.unit_of(results), baselines(results)
    named = (*problem.trained, problem.low, *others[:1], problem.high)
    labels = {name: policy_name(name) for name in named if name in words.means_of(results)}
    legend = [*labels.values(), *([charts.OTHER] if len(others) > 1 else [])]
    rows = [
        {"policy": labels.get(row["policy"], charts.OTHER), "name": policy_name(row["policy"])} | numbers(problem, row)
        for row in results["rows"]
        if row.get("budget_ms") is not None
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
    drawn: Charts = {}
    if results.get("configurations"):
        paths = None
        if rows:
            paths = frame.filter(pl.col("policy") != charts.OTHER)
            paths = paths.select("policy", "budget_ms", "accuracy", "latency_ms")
        heading = "Accuracy and latency"
        if problem.equal_latency and paths is not None:
            hull = pl.DataFrame(results["static_hull"]).select("accuracy", "latency_ms", budget_ms="latency_ms")
            hull = hull.with_columns(policy=pl.lit(policy_name(MIX))).select(paths.columns)
            paths = pl.concat([paths.filter(pl.col("policy") != policy_name(MIX)), hull], how="vertical_relaxed")
            heading = "Accuracy against the mean latency spent"
        drawn[heading] = charts.plane(results["configurations"], paths, list(labels.values()), unit)
    if not rows:
        return drawn
    if problem.equal_latency:
        learners = frame.filter(~pl.col("name").is_in([policy_name(name) for name in (ORACLE, SINGLE, MIX)]))
        if len(learners):
            legend = [label for label in legend if label in set(learners["policy"])]
            title = "accuracy over the static mix"
            heading = "Accuracy over the static mix of equal mean latency"
            drawn[heading] = charts.by_budget(learners, problem.ranked_by, title, legend, level=0.0, unit=unit)
        return drawn
    utility = frame.drop(bound for bound in ("low", "high") if frame[bound].is_null().any())
    title, level = "utility (0 to 1)", results.get("satisfaction_level")
    drawn["Utility against budget"] = charts.by_budget(utility, problem.ranked_by, title, legend, unit=unit)
    drawn["On time"] = charts.on_time(frame, legend, 0.95 if level is None else float(level), unit)
    if "reliability" in results:
        drawn["Reliability"] = reliability(results["reliability"])
    usage = charts.knob_usage([(policy_name(policy), policy, results) for policy in problem.usage], unit)
    return drawn if usage is None else drawn | {"Which settings are used": usage}


def fronts(rows: Sequence[tuple[str, Mapping[str, Any]]], results: Mapping[str, Any]) -> alt.HConcatChart:
    """Accuracy against mean latency and against mean further cost: a dot for each pair of worths, from rows of results
    with the label of each policy or run."""
    keys = ("accuracy", "latency_ms_mean", "cost_mean", "worth_ms", "worth_cost")
    points = [{"policy": label} | {key: row[key] for key in keys} for label, row in rows if row["weights"] is not None]
    titles = {keys[1]: f"mean latency ({words.unit_of(results)})", keys[2]: f"mean {results['cost_name']}"}
    labels, y = list(dict.fromkeys(label for label, _ in rows)), alt.Y("accuracy:Q", title="mean accuracy")
    dots = alt.Chart(pl.DataFrame(points)).mark_circle(size=42, opacity=0.85).properties(width=370, height=340)
    dots = dots.encode(y.scale(charts.CLOSE), charts.colour_of(labels), tooltip=["policy:N", *(f"{k}:Q" for k in keys)])
    return alt.hconcat(*(dots.encode(alt.X(f"{key}:Q", title=t, scale=charts.CLOSE)) for key, t in titles.items()))


def reliability(bins: Sequence[Mapping[str, float]]) -> alt.LayerChart:
    """Observed shares on time against predicted probabilities: expected_in_time, in_time and decisions of each bin, and
    a dashed diagonal, on which the two are equal."""
    rows = pl.DataFrame(bins).rename({"expected_in_time": "predicted", "in_time": "observed"})
    lowest = min(0.99, *(row[key] for row in bins for key in ("expected_in_time", "in_time")))
    corners = [math.floor(20 * lowest) / 20, 1.0]
    scale, axis = alt.Scale(domain=corners, nice=False), alt.Axis(format="%", tickCount=5)
    x = alt.X("predicted:Q", title="predicted probability of being on time", scale=scale, axis=axis)
    y = alt.Y("observed:Q", title="observed share on time", scale=scale, axis=axis)
    diagonal = (
        alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners})).mark_line(**charts.DASHED).encode(x, y)
    )
    tooltip = [*(alt.Tooltip(f"{side}:Q", format=".1%") for side in ("predicted", "observed")), "decisions:Q"]
    dots = alt.Chart(rows).encode(x, y, tooltip=tooltip)
    layers = dots.mark_line(strokeWidth=1.5), dots.mark_circle(size=60, opacity=1)
    return alt.layer(diagonal, *layers).properties(width=340, height=340)


def difficulty(explained: Mapping[str, Any], unit: str) -> alt.LayerChart:
    """Latency of the choice against difficulty: a dot for each sample, and over groups of samples the means of the
    policy, with their intervals, and of static, from `by_difficulty`."""
    names = {"policy_ms": policy_name(words.LEARNED), "static_ms": policy_name(words.STATIC)}
    rows = [
        {"policy": name, "name": name, "difficulty": group["difficulty_ms"], "latency": group[key]}
        | dict(zip(("low", "high"), group["ci95"] if key == "policy_ms" else 2 * [group[key]], strict=True))
        for key, name in names.items()
        for group in explained["groups"]
    ]
    scale = alt.Scale(type="log", nice=False, padding=12)
    x = alt.X("difficulty:Q", title=f"difficulty: latency of the cheapest right configuration ({unit})", scale=scale)
    points = pl.DataFrame(explained["points"], schema=["difficulty", "latency"], orient="row")
    dots = alt.Chart(points).mark_circle(style="quiet", size=14, opacity=0.35)
    lines = charts.lines(pl.DataFrame(rows), x, "latency", f"latency of the choice ({unit})", list(names.values()))
    layers = dots.encode(x, alt.Y("latency:Q")), *lines
    return alt.layer(*layers).properties(width=820, height=340)


# -- over numbers of shots ---------------------------------------------------------------------------------------------


def _over_shots(results: Mapping[str, Any]) -> Charts:
    shots = shown_at(results)
    rows = [
        {"policy": row["policy"], "name": policy_name(row["policy"], results)}
        | {"kind": KINDS.get(row["policy"], "learned")}
        | numbers(DEMONSTRATIONS, row)
        for row in DEMONSTRATIONS.rows(results)
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    bars = frame.filter(pl.col("shots") == shots).sort("accuracy", descending=True, maintain_order=True)
    drawn: Charts = {f"Accuracy with {shots_words(shots)}": charts.policy_bars(bars.drop("policy", "shots"))}
    drawn |= _learned_rewards(results)
    if len(results["shots"]) == 1:
        return drawn
    named = dict.fromkeys((DEMONSTRATIONS.main_policy(results), *LEARNED[-2:], *baselines(results)[:1]))
    judged = rows_at(results, shots)
    labels = {name: policy_name(name, results) for name in named if name in judged}
    colour = pl.when(pl.col("policy").is_in(list(labels))).then(pl.col("name")).otherwise(pl.lit(charts.OTHER))
    lines = frame.filter(pl.col("kind") != "control").with_columns(policy=colour).drop("kind")
    legend = [*labels.values(), charts.OTHER]
    return drawn | {"Accuracy against shots": charts.by_shots(lines, legend, results["trained_shots"])}


def _learned_rewards(results: Mapping[str, Any]) -> Charts:
    """Accuracy against true calls, and how well learned rewards predict right answers."""
    judged, drawn = rows_at(results, shown_at(results)), dict[str, alt.TopLevelMixin]()
    spent = [
        numbers(DEMONSTRATIONS, judged[row["policy"]])
        | {"policy": "GRPO", "name": "GRPO", "calls": sum(row["calls"]) / len(row["calls"])}
        for row in results.get("true_calls", [])
        if row["policy"] in judged
    ]
    if spent:
        axis = alt.Axis(values=sorted(row["calls"] for row in spent), format=",.0f")
        x = alt.X("calls:Q", title="true calls", axis=axis, scale=alt.Scale(type="symlog", constant=100))
        layers = charts.lines(pl.DataFrame(spent).sort("calls"), x, "accuracy", "accuracy (0 to 1)", ["GRPO"])
        drawn["Accuracy against true calls"] = alt.layer(*layers).properties(width=820, height=260)
    if bins := results.get("calibration"):
        rows = [
            {**row, "policy": policy_name(row["policy"], results)}
            | {"drawn_by": "itself" if row["drawn_by"] == row["policy"] else policy_name(row["drawn_by"], results)}
            for row in bins
        ]
        x, y = alt.X("expected:Q", title="predicted probability"), alt.Y("right:Q", title="share of right answers")
        diagonal = alt.Chart(pl.DataFrame({"expected": [0.0, 1.0], "right": [0.0, 1.0]})).mark_line(**charts.DASHED)
        lines = (
            alt.Chart(pl.DataFrame(rows)).mark_line(point=True).encode(x, y, alt.Color("drawn_by:N", title="drawn by"))
        )
        layer = alt.layer(diagonal.encode(x, y), lines).properties(width=240, height=240)
        drawn["Calibration of the learned reward"] = layer.facet("policy:N", data=pl.DataFrame(rows), columns=3)
    return drawn


# -- training curves ---------------------------------------------------------------------------------------------------


def training_curves(path: Path, begins: int | None = None) -> list[alt.FacetChart | None]:
    """The curves of a run: of the numbers that matter most, and of all others; [] if it logged no numbers.

    Args:
        path: `metrics.csv`.
        begins: the step at which GRPO begins, if it is known.
    """
    logged = logged_numbers(path)
    if logged is None:
        return []
    in_time = metrics_in_time(logged)
    shared = [name for name in SHOWN_FIRST if name in in_time]
    first = shared + [name for name in in_time if is_shown_first(name) and name not in shared]
    rest = sorted(set(in_time) - set(first))
    return [_curves(logged, names, begins) if names else None for names in (first, rest)]


def logged_numbers(path: Path) -> pl.DataFrame | None:
    """What a run logged while it trained: seed, step, variable, value, metric (`variable` without Train/ or Val/) and
    part (train or validation); None if the file is missing or holds no such numbers.

    Raises:
        InputError: the file is no table.
    """
    if not path.exists():
        return None
    try:
        frame = pl.read_csv(path, infer_schema_length=None, schema_overrides={"seed": pl.String}, raise_if_empty=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    names = [name for name in frame.columns if name.startswith(("Train/", "Val/")) and frame[name].dtype.is_numeric()]
    if not names or not {"seed", "step"} <= set(frame.columns):
        return None
    frame = frame.with_columns(pl.col("step").cast(pl.Int64, strict=False))
    logged = frame.unpivot(names, index=["seed", "step"]).drop_nulls().cast({"value": pl.Float64})
    part, metric = (pl.col("variable").str.extract(pattern) for pattern in (r"^(\w+)/", r"/(.*)$"))
    return logged.filter(pl.col("value").is_finite()).with_columns(
        metric=metric, part=part.replace({"Train": "train", "Val": "validation"})
    )


def metrics_in_time(logged: pl.DataFrame) -> list[str]:
    """The metrics, those logged first before others."""
    return logged.group_by("metric").agg(pl.col("step").min()).sort("step", "metric")["metric"].to_list()


def is_shown_first(metric: str) -> bool:
    """Whether a logged number matters most; of the stages of training the controls do not."""
    stage, _, number = metric.rpartition("/")
    return number in OF_STAGES and stage not in CONTROLS if stage else number in SHOWN_FIRST


def title_of(metric: str, unit: str = "ms") -> str:
    """The title of a panel; that of a stage of training begins with its name."""
    stage, _, number = metric.rpartition("/")
    return f"{stage}: {TITLES.get(number, number).format(unit=unit)}".removeprefix(": ").replace("_", " ")


def _curves(logged: pl.DataFrame, metrics: list[str], begins: int | None) -> alt.FacetChart:
    """One panel a metric; of long curves the means over stretches of steps, each at its last step."""
    logged, curve = logged.filter(pl.col("metric").is_in(metrics)), ["metric", "part", "seed"]
    most = max(10, min(120, POINTS // logged.select(curve).n_unique()))
    place = pl.int_range(pl.len()).over(curve, order_by="step") * most // pl.len().over(curve).clip(most)
    thinned = logged.group_by(*curve, place.alias("bin")).agg(
        pl.col("step").max(), pl.col("value").mean().round_sig_figs(5)
    )
    titles = {name: title_of(name) for name in metrics}
    points = thinned.sort(*curve, "step").drop("bin").with_columns(pl.col("metric").replace(titles).alias("panel"))
    if begins is not None:
        points = points.with_columns(grpo=pl.lit(begins))
    points, parts = points.drop("metric"), {"slate": "train", "blue": "validation"}
    return charts.curves(points, list(titles.values()), parts, colour="part", line="seed", y="value", columns=3)

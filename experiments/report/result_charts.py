"""The charts of a run's results, for its report and, as pictures, for W&B."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report import charts, page, words
from knobwise.experiments.report.words import (
    MIX,
    ORACLE,
    SINGLE,
    STATIC,
    policy_name,
    rows_at,
    shots_words,
)
from knobwise.experiments.results.problem import (
    CONTROLS,
    DEMONSTRATIONS,
    FEASIBLE,
    LEARNED,
    UPPER,
    Problem,
    problem_of,
    shown_at,
)

Charts = dict[str, charts.Figure]
"""Heading → chart, or several side by side."""
KINDS = dict.fromkeys(SIMPLE, "simple baseline")
KINDS |= dict.fromkeys(UPPER, "sees the answer")
KINDS |= dict.fromkeys(CONTROLS, "control")
"""Policy → its kind, for selectors that are not learned."""
BEST = "stands for the run"
"""The kind of the policy that a run is represented by."""
HUES_OF_KINDS = {
    "blue": BEST,
    "cyan": "learned",
    "orange": "simple baseline",
    "purple": "sees the answer",
}
HUES_OF_KINDS |= {"grey": "control"}
"""Hue → the kind of policy that it stands for."""


def result_charts(results: Mapping[str, Any]) -> Charts:
    """Draw all charts that the results have numbers for."""
    if problem_of(results).averaged:
        return _over_budgets(results)
    return _over_shots(results)


def result_images(results: Mapping[str, Any]) -> dict[str, bytes]:
    """Draw the charts of `result_charts` as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(chart) for name, chart in result_charts(results).items()}


def numbers(problem: Problem, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row of results that a chart needs; `low` and `high` are the interval
    of the number that policies are ranked by."""
    low, high = row.get(f"{problem.ranked_by}_ci95") or (None, None)
    metrics = {metric.key: row.get(metric.key) for metric in problem.metrics}
    place = row[problem.place]
    latency = row.get("latency_ms_mean")
    return {problem.place: place, "latency_ms": latency, **metrics, "low": low, "high": high}


def baselines(results: Mapping[str, Any]) -> list[str]:
    """Return the policies that are neither learned nor references, the best first."""
    problem = problem_of(results)
    if not problem.averaged:
        rows = rows_at(results, shown_at(results))
        simple = [name for name in SIMPLE if name in rows]
        return sorted(simple, key=lambda name: -float(rows[name]["accuracy"]))
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    ranked = (row["policy"] for row in words.ranked(results, problem.ranked_by))
    return [name for name in ranked if name not in references]


# -- over budgets ----------------------------------------------------------------------------------


def _over_budgets(results: Mapping[str, Any]) -> Charts:
    """Draw the learned policy, the static reference, the strongest baseline and the oracle."""
    problem = problem_of(results)
    judged = words.means_of(results)
    candidates = (problem.trained[0], problem.low, *baselines(results)[:1], problem.high)
    policies = [name for name in candidates if name in judged]
    rows = []
    for row in results["rows"]:
        if row["policy"] in policies:
            name = policy_name(row["policy"])
            row = {"budget_ms": None} | row
            rows.append(numbers(problem, row) | {"policy": name, "name": name})
    drawn = Charts()
    if any(row["budget_ms"] is not None for row in rows):
        frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
        draw = _mean_budgets if problem.equal_latency else _deadlines
        drawn = draw(results, frame, list(map(policy_name, policies)))
    learned = [(policy_name(problem.trained[0]), problem.trained[0], results)]
    if usage := charts.knob_usage(learned, words.unit_of(results), problem.low):
        drawn["Which settings are used"] = usage
    if "reliability" in results:
        drawn["Reliability"] = reliability(results["reliability"])
    return drawn


def _mean_budgets(results: Mapping[str, Any], rows: pl.DataFrame, policies: list[str]) -> Charts:
    """Draw `numbers` under mean budgets: accuracy over the static mix, and against latency.

    Args:
        rows: also with the columns policy and name, in words.
        policies: their names in words, in the order of the legend.
    """
    unit = words.unit_of(results)
    key = problem_of(results).ranked_by
    drawn = Charts()
    others = rows.filter(pl.col("budget_ms").is_not_null(), pl.col("policy") != policy_name(MIX))
    learners = others.filter(pl.col("policy") != policy_name(ORACLE))
    if len(learners):
        labels = [name for name in policies if name in set(learners["policy"])]
        heading = "Accuracy over the static mix of equal mean latency"
        title = "accuracy over the static mix"
        drawn[heading] = charts.by_budget(learners, key, title, labels, level=0.0, unit=unit)
    if configurations := results.get("configurations"):
        # the static mix has a line along its corners instead of its rows
        hull = pl.DataFrame(results["static_hull"]).select(
            "accuracy", "latency_ms", budget_ms="latency_ms"
        )
        hull = hull.with_columns(policy=pl.lit(policy_name(MIX)), name=pl.lit(policy_name(MIX)))
        paths = pl.concat([others.select(hull.columns), hull], how="vertical_relaxed")
        drawn["Accuracy against the mean latency spent"] = charts.plane(
            configurations, paths, policies, unit
        )
    return drawn


def _deadlines(results: Mapping[str, Any], rows: pl.DataFrame, policies: list[str]) -> Charts:
    """Draw `numbers` under deadlines: utility, the gain over static, late answers, and the shares
    on time. The arguments are those of `_mean_budgets`."""
    unit = words.unit_of(results)
    at_budgets = rows.filter(pl.col("budget_ms").is_not_null())
    unknown = [bound for bound in ("low", "high") if at_budgets[bound].is_null().any()]
    utility = at_budgets.drop(unknown)
    first = [charts.by_budget(utility, "utility", "utility (0 to 1)", policies, unit=unit)]
    labels = [name for name in policies if name not in (policy_name(STATIC), policy_name(ORACLE))]
    if gains := _gains_over_static(results, labels):
        title = "utility gained over static, in points"
        frame = pl.DataFrame(gains)
        first.append(charts.by_budget(frame, "gain", title, labels, level=0.0, unit=unit))
    drawn: Charts = {"Utility against budget": first}

    configurations = results.get("configurations")
    if configurations and all("utility" in cell for cell in configurations):
        means = rows.filter(pl.col("budget_ms").is_null())
        drawn["Late answers counted"] = charts.plane(
            configurations, means, policies, unit, "utility"
        )

    title = "on time, of the feasible requests"
    on_time = at_budgets.drop("low", "high")
    level = results.get("satisfaction_level")
    level = 0.95 if level is None else float(level)
    panel = charts.by_budget(
        on_time, FEASIBLE.key, title, policies, percent=True, level=level, unit=unit
    )
    return drawn | {"On time": panel}


def _gains_over_static(results: Mapping[str, Any], labels: list[str]) -> list[dict[str, Any]]:
    """Return the utility gained over static at each budget, with its interval, in points; only of
    the policies with these names."""
    gains = []
    for row in results["rows"]:
        name = policy_name(row["policy"])
        ci95 = row.get("over_static_ci95")
        if ci95 and row["budget_ms"] and name in labels:
            gain, low, high = (100 * value for value in (row["over_static"], *ci95))
            line = {"policy": name, "name": name, "budget_ms": row["budget_ms"]}
            gains.append(line | {"gain": gain, "low": low, "high": high})
    return gains


def reliability(bins: Sequence[Mapping[str, float]]) -> alt.LayerChart:
    """Draw observed shares on time against predicted probabilities, and a dashed diagonal, on which
    the two are equal.

    Args:
        bins: expected_in_time, in_time and decisions of each.
    """
    rows = pl.DataFrame(bins).rename({"expected_in_time": "predicted", "in_time": "observed"})
    lowest = min(0.99, rows.select("predicted", "observed").to_numpy().min())
    corners = [math.floor(20 * lowest) / 20, 1.0]  # in steps of 5 %
    scale = alt.Scale(domain=corners, nice=False)
    axis = alt.Axis(format="%", tickCount=5)
    x = alt.X("predicted:Q", title="predicted probability of being on time", scale=scale, axis=axis)
    y = alt.Y("observed:Q", title="observed share on time", scale=scale, axis=axis)
    diagonal = alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners})).encode(x, y)
    tooltip = [alt.Tooltip(f"{side}:Q", format=".1%") for side in ("predicted", "observed")]
    dots = alt.Chart(rows).encode(x, y, tooltip=[*tooltip, alt.Tooltip("decisions:Q")])
    return charts.layered(
        diagonal.mark_line(**charts.DASHED),
        dots.mark_line(strokeWidth=1.5),
        dots.mark_circle(size=60, opacity=1),
    )


def difficulty(explained: Mapping[str, Any], unit: str) -> alt.LayerChart:
    """Draw the latency of the choice against difficulty: a dot for each sample, and lines through
    the means of groups of samples, of the policy with their intervals and of static.

    Args:
        explained: from `knobwise.experiments.results.explanation.by_difficulty`.
        unit: of the latencies.
    """
    names = {"policy_ms": policy_name(words.LEARNED), "static_ms": policy_name(words.STATIC)}
    rows = []
    for key, name in names.items():
        for group in explained["groups"]:
            row = {"policy": name, "name": name}
            row |= {"difficulty": group["difficulty_ms"], "latency": group[key]}
            low, high = group["ci95"] if key == "policy_ms" else (group[key], group[key])
            rows.append(row | {"low": low, "high": high})
    scale = alt.Scale(type="log", nice=False, padding=12)
    x = alt.X(
        "difficulty:Q",
        title=f"difficulty: latency of the cheapest right configuration ({unit})",
        scale=scale,
    )
    points = pl.DataFrame(explained["points"], schema=["difficulty", "latency"], orient="row")
    dots = alt.Chart(points).mark_circle(style="quiet", size=14, opacity=0.35)
    lines = charts.lines(
        pl.DataFrame(rows), x, "latency", f"latency of the choice ({unit})", list(names.values())
    )
    return charts.layered(dots.encode(x, alt.Y("latency:Q")), *lines)


# -- over numbers of shots -------------------------------------------------------------------------


def _over_shots(results: Mapping[str, Any]) -> Charts:
    """Draw accuracy of all policies at the trained number of shots, and of the main ones against
    this number."""
    shots = shown_at(results)
    best = DEMONSTRATIONS.main_policy(results)
    rows = []
    for row in DEMONSTRATIONS.rows(results):
        names = {"policy": row["policy"], "name": policy_name(row["policy"], results)}
        rows.append(names | numbers(DEMONSTRATIONS, row))

    # all policies at the trained number
    kinds = KINDS | {best: BEST}
    dots = []
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        if row["shots"] == shots:
            dot = {"name": row["name"], "low": row["low"], "value": row["accuracy"]}
            dot |= {"high": row["high"], "kind": kinds.get(row["policy"], "learned")}
            dots.append(dot | {"beside": f"{row['accuracy']:.3f}"})
    kinds_judged = {dot["kind"] for dot in dots}
    hues = {hue: kind for hue, kind in HUES_OF_KINDS.items() if kind in kinds_judged}
    chart = charts.dots(pl.DataFrame(dots), "accuracy (0 to 1)", charts.colour_of(hues, "kind"))
    drawn: Charts = {f"Accuracy with {shots_words(shots)}": chart}
    drawn |= _learned_rewards(results)
    if len(results["shots"]) == 1:
        return drawn

    # the main policies at every number
    frame = pl.DataFrame(rows, infer_schema_length=None)
    named = dict.fromkeys((best, *LEARNED[-2:], *baselines(results)[:1]))
    judged = rows_at(results, shots)
    labels = {name: policy_name(name, results) for name in named if name in judged}
    policy = (
        pl.when(pl.col("policy").is_in(list(labels)))
        .then(pl.col("name"))
        .otherwise(pl.lit(charts.OTHER))
    )
    lines = frame.filter(~pl.col("policy").is_in(CONTROLS)).with_columns(policy=policy)
    legend = [*labels.values(), charts.OTHER]
    return drawn | {
        "Accuracy against shots": charts.by_shots(lines, legend, results["trained_shots"])
    }


def _learned_rewards(results: Mapping[str, Any]) -> Charts:
    """Draw accuracy against true calls, and how well learned rewards predict right answers."""
    judged = rows_at(results, shown_at(results))
    drawn = Charts()
    spent = []
    for row in results.get("true_calls", []):
        if row["policy"] in judged:
            calls = sum(row["calls"]) / len(row["calls"])
            line = {"policy": "GRPO", "name": "GRPO", "calls": calls}
            spent.append(numbers(DEMONSTRATIONS, judged[row["policy"]]) | line)
    if spent:
        axis = alt.Axis(values=sorted(row["calls"] for row in spent), format=",.0f")
        x = alt.X(
            "calls:Q", title="true calls", axis=axis, scale=alt.Scale(type="symlog", constant=100)
        )
        layers = charts.lines(
            pl.DataFrame(spent).sort("calls"), x, "accuracy", "accuracy (0 to 1)", ["GRPO"]
        )
        drawn["Accuracy against true calls"] = charts.layered(*layers, height=260)
    if results.get("calibration"):
        drawn["Calibration of the learned reward"] = _calibration(results)
    return drawn


def _calibration(results: Mapping[str, Any]) -> list[alt.LayerChart]:
    """Draw the share of right answers against the predicted probability: a chart for each policy,
    with a line for each policy that drew the demonstrations."""
    x = alt.X("expected:Q", title="predicted probability")
    y = alt.Y("right:Q", title="share of right answers")
    corners = pl.DataFrame({"expected": [0.0, 1.0], "right": [0.0, 1.0]})
    diagonal = alt.Chart(corners).mark_line(**charts.DASHED)
    bins = results["calibration"]
    figure = []
    for policy in dict.fromkeys(row["policy"] for row in bins):
        points = []
        for row in bins:
            if row["policy"] == policy:
                by = row["drawn_by"]
                name = "itself" if by == policy else policy_name(by, results)
                points.append(row | {"drawn_by": name})
        lines = alt.Chart(pl.DataFrame(points)).mark_line(point=True)
        lines = lines.encode(x, y, alt.Color("drawn_by:N", title="drawn by"))
        chart = charts.layered(diagonal.encode(x, y), lines, height=240)
        figure.append(chart.properties(title=policy_name(policy, results)))
    return figure

"""The figures of a run's results, for its report and, as pictures, for W&B."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report import charts, page, words
from knobwise.experiments.report.page import Figure
from knobwise.experiments.report.sentences import baselines
from knobwise.experiments.report.words import (
    MIX,
    ORACLE,
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

Figures = dict[str, Figure]
"""Heading → figure."""
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
    "grey": "control",
}
"""Hue → the kind of policy that it stands for."""
ON_TIME = "on time, of the feasible requests"
"""The title of an axis."""
SHARE_ON_TIME = (
    "Share of the requests on time, of those that at least one configuration serves on time."
)
"""What such a chart shows."""


def result_charts(results: Mapping[str, Any]) -> Figures:
    """Draw all figures that the results have numbers for, the one to be seen first in front."""
    if problem_of(results).averaged:
        return _over_budgets(results)
    return _over_shots(results)


def result_images(results: Mapping[str, Any]) -> dict[str, bytes]:
    """Draw the figures of `result_charts` as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(figure) for name, figure in result_charts(results).items()}


def numbers(problem: Problem, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row of results that a chart needs; `low` and `high` are the interval
    of the number that policies are ranked by."""
    low, high = row.get(f"{problem.ranked_by}_ci95") or (None, None)
    metrics = {metric.key: row.get(metric.key) for metric in problem.metrics}
    place = row[problem.place]
    latency = row.get("latency_ms_mean")
    return {problem.place: place, "latency_ms": latency, **metrics, "low": low, "high": high}


# -- over budgets ----------------------------------------------------------------------------------


def _over_budgets(results: Mapping[str, Any]) -> Figures:
    """Draw the learned policy, the static reference, the strongest baseline and the oracle."""
    problem = problem_of(results)
    judged = words.means_of(results)
    candidates = (problem.trained[0], problem.low, *baselines(results)[:1], problem.high)
    policies = [name for name in candidates if name in judged]
    # rows of the policies that are drawn, in words
    rows = []
    for row in results["rows"]:
        if row["policy"] in policies:
            name = policy_name(row["policy"])
            row = {"budget_ms": None} | row
            rows.append(numbers(problem, row) | {"policy": name, "name": name})
    drawn: Figures = {}
    if any(row["budget_ms"] is not None for row in rows):
        frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
        draw = _mean_budgets if problem.equal_latency else _deadlines
        drawn = draw(results, frame, list(map(policy_name, policies)))
    learned = [(policy_name(problem.trained[0]), problem.trained[0], results)]
    if usage := charts.knob_usage(learned, words.unit_of(results), problem.low):
        drawn["Which settings are used"] = Figure(
            usage,
            "Share of the test requests for which the learned controller sets a knob to a value, "
            f"by budget. Outlined: the most frequent setting of {policy_name(problem.low)}.",
        )
    if bins := results.get("reliability"):
        drawn["Reliability"] = reliability(bins)
    return drawn


def _strongest(results: Mapping[str, Any], kind: str) -> str:
    """Return a sentence that names the strongest baseline, if any."""
    strongest = [policy_name(name, results) for name in baselines(results)[:1]]
    return "".join(f" The strongest {kind} baseline is {name}." for name in strongest)


def _mean_budgets(results: Mapping[str, Any], rows: pl.DataFrame, policies: list[str]) -> Figures:
    """Draw `numbers` under mean budgets: accuracy over the static mix, and against latency.

    Args:
        results: the content of `results.json`.
        rows: also with the columns policy and name, in words.
        policies: their names in words, in the order of the legend.
    """
    unit = words.unit_of(results)
    key = problem_of(results).ranked_by
    drawn: Figures = {}
    # the static mix is at 0, and has its own line in the plane
    others = rows.filter(pl.col("budget_ms").is_not_null(), pl.col("policy") != policy_name(MIX))
    learners = others.filter(pl.col("policy") != policy_name(ORACLE))
    if len(learners):
        labels = [name for name in policies if name in set(learners["policy"])]
        title = "accuracy over the static mix"
        drawn["Accuracy over the static mix of equal mean latency"] = Figure(
            charts.by_budget(learners, key, title, labels, level=0.0, unit=unit),
            "Difference in accuracy to the static mix, the best random mixture of two settings, "
            "the same for every input, by mean budget. Shaded: 95% intervals."
            + _strongest(results, "other"),
        )
    if configurations := results.get("configurations"):
        # the static mix has a line along its corners instead of its rows
        hull = pl.DataFrame(results["static_hull"]).select(
            "accuracy", "latency_ms", budget_ms="latency_ms"
        )
        hull = hull.with_columns(policy=pl.lit(policy_name(MIX)), name=pl.lit(policy_name(MIX)))
        paths = pl.concat([others.select(hull.columns), hull], how="vertical_relaxed")
        drawn["Accuracy against the mean latency spent"] = Figure(
            charts.plane(configurations, paths, policies, unit),
            "Each grey dot is one configuration used for every test input; the line of the static "
            "mix joins those that it mixes. A point of a policy is its result at one mean budget: "
            "its height above that line is what it gains from looking at the input, at equal mean "
            "latency.",
        )
    return drawn


def _deadlines(results: Mapping[str, Any], rows: pl.DataFrame, policies: list[str]) -> Figures:
    """Draw `numbers` under deadlines: utility, the gain over static, late answers, and the shares
    on time. The arguments are those of `_mean_budgets`."""
    unit = words.unit_of(results)
    at_budgets = rows.filter(pl.col("budget_ms").is_not_null())
    # a band needs both ends at every budget
    unknown = [bound for bound in ("low", "high") if at_budgets[bound].is_null().any()]
    utility = at_budgets.drop(unknown)
    first = [charts.by_budget(utility, "utility", "utility (0 to 1)", policies, unit=unit)]
    labels = [name for name in policies if name not in (policy_name(STATIC), policy_name(ORACLE))]
    if gains := _gains_over_static(results, labels):
        title = "utility gained over static, in points"
        frame = pl.DataFrame(gains)
        first.append(charts.by_budget(frame, "gain", title, labels, level=0.0, unit=unit))
    drawn = {
        "Utility against budget": Figure(
            first,
            "Utility is the accuracy of an answer that is on time, and 0 for a late one. "
            "Budget-aware static is the best fixed setting for each budget; the oracle knows every "
            f"outcome.{_strongest(results, 'other')} Shaded: 95% intervals, on the right of the "
            "paired difference.",
        )
    }

    # results of earlier versions hold no utility of configurations
    configurations = results.get("configurations")
    if configurations and all("utility" in cell for cell in configurations):
        means = rows.filter(pl.col("budget_ms").is_null())
        drawn["Late answers counted"] = Figure(
            charts.plane(configurations, means, policies, unit, "utility"),
            "Means over the budgets; a late answer has accuracy 0. Each grey dot is one "
            "configuration used for every input and every budget; no other beats those on the "
            "dashed line. Higher is better, further left is faster.",
        )

    level = results.get("satisfaction_level")
    dashed = "95%" if level is None else f"{words.number(level, '.0%')}, as asked for"
    panel = charts.by_budget(
        at_budgets.drop("low", "high"),
        FEASIBLE.key,
        ON_TIME,
        policies,
        percent=True,
        level=0.95 if level is None else float(level),
        unit=unit,
    )
    drawn["On time"] = Figure(panel, f"{SHARE_ON_TIME} Dashed: {dashed}.")
    return drawn


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


def reliability(bins: Sequence[Mapping[str, float]]) -> Figure:
    """Draw observed shares on time against predicted probabilities, and a dashed diagonal, on which
    the two are equal.

    Args:
        bins: expected_in_time, in_time and decisions of each.
    """
    rows = pl.DataFrame(bins).rename({"expected_in_time": "predicted", "in_time": "observed"})
    # the axes begin where the bins do
    lowest = min(0.99, rows.select("predicted", "observed").to_numpy().min())
    corners = [math.floor(20 * lowest) / 20, 1.0]  # in steps of 5 %
    scale = alt.Scale(domain=corners, nice=False)
    axis = alt.Axis(format="%", tickCount=5)
    x = alt.X("predicted:Q", title="predicted probability of being on time", scale=scale, axis=axis)
    y = alt.Y("observed:Q", title="observed share on time", scale=scale, axis=axis)
    diagonal = alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners})).encode(x, y)
    tooltip = [alt.Tooltip(f"{side}:Q", format=".1%") for side in ("predicted", "observed")]
    dots = alt.Chart(rows).encode(x, y, tooltip=[*tooltip, alt.Tooltip("decisions:Q")])
    chart = charts.layered(
        diagonal.mark_line(**charts.DASHED),
        dots.mark_line(strokeWidth=1.5),
        dots.mark_circle(size=60, opacity=1),
    )
    error = words.points(words.calibration_error(bins), "")
    caption = (
        "The probability of being on time that the controller's teacher predicted for its choices, "
        "and the share that was: a dot is a tenth of its decisions, over all budgets and seeds. On "
        f"the dashed line the two are equal; on average they differ by {error} points (expected "
        "calibration error). Below it the controller is late more often than it expects."
    )
    return Figure(chart, caption, columns=2)


def difficulty(explained: Mapping[str, Any], unit: str) -> Figure:
    """Draw the latency of the choice against difficulty: a dot for each sample, and lines through
    the means of groups of samples, of the policy with their intervals and of static.

    Args:
        explained: from `knobwise.experiments.results.explanation.by_difficulty`.
        unit: of the latencies.
    """
    names = {"policy_ms": policy_name(words.LEARNED), "static_ms": policy_name(words.STATIC)}
    rows = []
    # static has no interval: its band is a line
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
    budget = words.quantity(explained["budget_ms"], unit)
    return Figure(
        charts.layered(dots.encode(x, alt.Y("latency:Q")), *lines),
        f"At a budget of {budget}: each grey dot is a test sample, the lines are means over groups "
        "of samples of similar difficulty, shaded: 95% interval. Where the line of the policy "
        "rises more steeply than that of static, it spends more on hard samples than their size "
        "explains.",
    )


# -- over numbers of shots -------------------------------------------------------------------------


def _over_shots(results: Mapping[str, Any]) -> Figures:
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
    chosen = ", the best on validation" if results.get("best_policy") else ""
    caption = (
        "Share of held-out queries answered right, of every policy, with 95% intervals. In blue "
        f"the policy that stands for the run{chosen}. Controls should gain nothing; those that see "
        "the answer are bounds."
    )
    drawn = {f"Accuracy with {shots_words(shots)}": Figure(chart, caption)}
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
    drawn["Accuracy against shots"] = Figure(
        charts.by_shots(lines, legend, results["trained_shots"]),
        f"Trained with {shots_words(results['trained_shots'])} (dashed), used with other numbers "
        "without retraining; shaded: 95% intervals; grey: everything else in the table."
        + _strongest(results, "simple"),
    )
    return drawn


def _learned_rewards(results: Mapping[str, Any]) -> Figures:
    """Draw accuracy against true calls, and how well learned rewards predict right answers."""
    judged = rows_at(results, shown_at(results))
    drawn: Figures = {}
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
        drawn["Accuracy against true calls"] = Figure(
            charts.layered(*layers, height=260),
            "Sequences of training queries that the answering model answered during GRPO, mean "
            "over the seeds; recorded ones that a reward was learned from, and those of "
            "validation, are not among them. Lines: 95% intervals.",
        )
    if results.get("calibration"):
        drawn["Calibration of the learned reward"] = Figure(
            _calibration(results),
            "Mean probability of the members against the share of right answers, on sequences for "
            "held-out queries, by who drew them; ten groups of equally many. Below the dashed line "
            "the prediction is too high.",
        )
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

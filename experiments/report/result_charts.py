"""The figures of a run's results, for its report and, as pictures, for W&B."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import altair as alt
import polars as pl

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import (
    baselines,
    calibration_error,
    ranked,
    rows_at,
    unit_of,
)
from knobwise.experiments.evidence.schema import (
    CalibrationBin,
    Difficulty,
    PolicyRow,
    ReliabilityBin,
    RunResults,
)
from knobwise.experiments.evidence.task import (
    CONTROLS,
    DEMONSTRATIONS,
    FEASIBLE,
    LEARNED,
    UPPER,
    Row,
    Task,
    shown_at,
    task_of,
)
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.page import Figure
from knobwise.experiments.report.tables import reworded
from knobwise.experiments.wording import words
from knobwise.experiments.wording.words import MIX, ORACLE, STATIC, policy_name, shots_words

Figures = dict[str, Figure]
"""Heading → figure."""
BEST = "stands for the run"
"""The kind of the policy that stands for a selector's run."""
KINDS = {
    BEST: "blue",
    "trained": "cyan",
    "simple baseline": "orange",
    "upper bound": "purple",
    "control": "grey",
}
"""Kind of policy → its hue."""


def result_charts(results: RunResults) -> Figures:
    """Draw all figures that the results have numbers for, the one to be seen first in front."""
    if not task_of(results).averaged:
        return _over_shots(results)
    return reworded(_over_budgets(results), unit_of(results))


@page.unchecked
def result_images(results: RunResults) -> dict[str, bytes]:
    """Draw the figures of `result_charts` as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(figure) for name, figure in result_charts(results).items()}


def numbers(task: Task, row: PolicyRow, name: str, key: str = "") -> dict[str, Any]:
    """Return the numbers of a row of results that a chart needs, under a policy's name in words;
    `low` and `high` are the interval of `key`, or of the number that policies are ranked by."""
    key = key or task.ranked_by
    named: Row = row  # keys are put together here
    low, high = named.get(f"{key}_ci95") or (None, None)
    keys = [key, task.condition, *(metric.key for metric in task.metrics)]
    drawn = {"policy": name, "latency_ms": row.get("latency_ms_mean")}
    return drawn | {key: named.get(key) for key in keys} | {"low": low, "high": high}


def on_time(rows: pl.DataFrame, results: RunResults) -> Figure:
    """Draw the share of the feasible requests that is on time against the budget.

    Args:
        rows: see `numbers`.
        results: of the run whose level is drawn: the share that its guard keeps.
    """
    level = results.get("satisfaction_level") or 0.95
    chart = charts.by_budget(
        rows.drop("low", "high"),
        FEASIBLE.key,
        in_words("on time, of the feasible requests", unit_of(results)),
        percent=True,
        level=level,
        unit=unit_of(results),
    )
    return Figure(
        chart,
        "Share on time, among the requests that some configuration serves on time. "
        f"Dashed: {level:.0%}.",
    )


# -- over budgets ----------------------------------------------------------------------------------


def _over_budgets(results: RunResults) -> Figures:
    """Draw the learned policy, the static reference, the strongest baseline and the oracle."""
    task = task_of(results)
    candidates = (task.trained[0], task.low, *baselines(results)[:1], task.high)
    judged = rows_at(results, None)
    policies = [name for name in candidates if name in judged]
    drawn = {}
    if task.conditions(results):
        draw = _mean_budgets if task.equal_latency else _deadlines
        drawn = draw(results, policies)
    sides = [(policy_name(name), name, results) for name in (task.trained[0], task.low)]
    if usage := charts.knob_usage(sides, unit_of(results)):
        drawn["Which settings are used"] = Figure(
            usage, "Share of the test requests that get each value of a knob, by budget.", 2
        )
    if bins := results.get("reliability"):
        drawn["Reliability"] = reliability(bins, unit_of(results))
    return drawn


def _frame(
    results: RunResults, policies: Collection[str], key: str = ""
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the `numbers` of these policies at the budgets, and as means over them.

    Args:
        results: the content of `results.json`.
        policies: those that are drawn.
        key: see `numbers`.
    """
    task = task_of(results)
    rows = [
        numbers(task, row, policy_name(row["policy"], results), key)
        for row in results["rows"]
        if row["policy"] in policies
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
    mean = pl.col(task.condition).is_null()
    return frame.filter(~mean), frame.filter(mean)


def _mean_budgets(results: RunResults, policies: Sequence[str]) -> Figures:
    """Draw results under mean budgets: accuracy over the static mix, and against latency.

    Args:
        results: the content of `results.json`.
        policies: those that are drawn.
    """
    unit = unit_of(results)
    # the static mix is at 0, and has its own line in the plane
    others, _ = _frame(results, [name for name in policies if name != MIX])
    learners = others.filter(pl.col("policy") != policy_name(ORACLE))
    drawn = {}
    if len(learners):
        key = task_of(results).ranked_by
        title = "accuracy over the static mix"
        drawn["Accuracy over the static mix of equal mean latency"] = Figure(
            charts.by_budget(learners, key, title, level=0.0, unit=unit),
            "Difference in accuracy to the static mix, the best random mixture of two settings, "
            "the same for every input, by mean budget. Shaded: 95% intervals.",
        )
    if configurations := results.get("configurations"):
        # the static mix has a line along its corners instead of its rows
        hull = pl.DataFrame(results["static_hull"]).select(
            "accuracy", "latency_ms", budget_ms="latency_ms", policy=pl.lit(policy_name(MIX))
        )
        paths = pl.concat([others.select(hull.columns), hull], how="vertical_relaxed")
        drawn["Accuracy against the mean latency spent"] = Figure(
            charts.plane(configurations, paths, unit),
            "Each grey dot is one configuration used for every test input; the line of the static "
            "mix joins those that it mixes. A point of a policy is its result at one mean budget: "
            "its height above that line is what it gains from looking at the input.",
        )
    return drawn


def _deadlines(results: RunResults, policies: Sequence[str]) -> Figures:
    """Draw results under deadlines: utility, the gain over static, late answers, and the shares on
    time. The arguments are those of `_mean_budgets`."""
    unit = unit_of(results)
    at_budgets, means = _frame(results, policies)
    first = [charts.by_budget(at_budgets, "utility", "utility (0 to 1)", unit=unit)]
    # the gain over static in points
    others = [name for name in policies if name not in (STATIC, ORACLE)]
    gains, _ = _frame(results, others or policies, "over_static")
    gains = gains.drop_nulls("low").with_columns(pl.col("over_static", "low", "high") * 100)
    if len(gains):
        title = "utility gained over static, in points"
        first.append(charts.by_budget(gains, "over_static", title, level=0.0, unit=unit))
    # a run may judge no others
    best_other = "The best other baseline is drawn, too. "
    if not set(baselines(results)).intersection(policies):
        best_other = ""
    drawn = {
        "Utility against budget": Figure(
            first,
            "Utility is the accuracy of an answer that is on time, and 0 for a late one. "
            "Budget-aware static is the best fixed setting for each budget; the oracle knows every "
            f"outcome. {best_other}Shaded: 95% intervals, on the right of the paired difference.",
        )
    }
    if configurations := results.get("configurations"):
        drawn["Late answers counted"] = Figure(
            charts.plane(configurations, means, unit, "utility"),
            "Means over the budgets; a late answer has accuracy 0. Each grey dot is one "
            "configuration used for every input and every budget; no other beats those on the "
            "dashed line. Higher is better, further left is faster.",
        )
    drawn["On time"] = on_time(at_budgets, results)
    return drawn


def reliability(bins: Sequence[ReliabilityBin], unit: str = "ms") -> Figure:
    """Draw observed shares on time against predicted probabilities.

    Args:
        bins: expected_in_time, in_time and decisions of each.
        unit: of the budgets.
    """
    rows = pl.DataFrame(bins).rename({"expected_in_time": "predicted", "in_time": "observed"})
    titles = ("predicted probability of being on time", "observed share on time")
    error = words.points(calibration_error(bins), ".1f")
    return Figure(
        charts.predictions(rows, *(in_words(title, unit) for title in titles)),
        "The probability of being on time that the controller's teacher predicted for its choices, "
        "and the share that was: a dot is a tenth of its decisions. On the dashed line the two are "
        f"equal; on average they differ by {error} points (expected calibration error). Below it "
        "the controller is late more often than it expects.",
        columns=2,
    )


def difficulty(explained: Difficulty, unit: str) -> Figure:
    """Draw the latency of the choice against difficulty: a dot for each sample, and lines through
    the means of groups, of the policy with their intervals and of static.

    Args:
        explained: from `knobwise.experiments.evidence.explanation.by_difficulty`.
        unit: of the latencies.
    """
    rows = []
    for group in explained["groups"]:
        row = [policy_name(words.LEARNED), group["difficulty_ms"], group["policy_ms"]]
        rows.append([*row, *group["ci95"]])
        # static has no interval
        rows.append([policy_name(STATIC), group["difficulty_ms"], *[group["static_ms"]] * 3])
    columns = ["policy", "difficulty", "latency", "low", "high"]
    title = in_words(f"difficulty: latency of the cheapest right configuration ({unit})", unit)
    x = alt.X("difficulty:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=12))
    title = in_words(f"latency of the choice ({unit})", unit)
    y = alt.Y("latency:Q", title=title, scale=charts.CLOSE)
    # behind the lines
    samples = pl.DataFrame(explained["points"], schema=columns[1:3], orient="row")
    dots = alt.Chart(samples).mark_circle(color=charts.GREY, size=14, opacity=0.4).encode(x, y)
    groups = pl.DataFrame(rows, schema=columns, orient="row")
    return Figure(
        charts.layered(dots, *charts.lines(groups, x, y)),
        f"At a budget of {words.quantity(explained['budget_ms'], unit)}: each grey dot is a test "
        "sample, the lines are means over groups of samples of similar difficulty, shaded: 95% "
        "interval. Where the line of the policy rises more steeply than that of static, it spends "
        "more on hard samples than their size explains.",
    )


# -- over numbers of shots -------------------------------------------------------------------------


def _over_shots(results: RunResults) -> Figures:
    """Draw accuracy of all policies at the trained number of shots, and of the main ones against
    this number."""
    shots = shown_at(results)
    best = DEMONSTRATIONS.main_policy(results)
    kinds = _kinds() | {best: BEST}
    rows = []
    for row in ranked(results) + ranked(results, "controls"):
        name = policy_name(row["policy"], results)
        kind = kinds.get(row["policy"], "trained")
        rows.append([name, row["accuracy"], *row["accuracy_ci95"], kind])
    frame = pl.DataFrame(rows, schema=["name", "value", "low", "high", "kind"], orient="row")
    hues = {kind: page.HUES[hue] for kind, hue in KINDS.items() if kind in set(frame["kind"])}
    drawn = {
        f"Accuracy with {shots_words(shots)}": Figure(
            charts.dots(frame, "accuracy (0 to 1)", charts.colour_of(hues, "kind")),
            "Share of held-out queries answered right, of every policy, with 95% intervals. "
            "Controls should gain nothing; upper bounds see the answer.",
        )
    }
    if len(results["shots"]) > 1:
        # the main policies at every number
        named = (best, *LEARNED[-2:], *baselines(results)[:1])
        points = [
            numbers(DEMONSTRATIONS, row, policy_name(row["policy"], results))
            for row in results["rows"]
            if row["policy"] in named
        ]
        drawn["Accuracy against shots"] = Figure(
            charts.by_shots(
                pl.DataFrame(points, infer_schema_length=None), results["trained_shots"]
            ),
            f"Trained with {shots_words(results['trained_shots'])} (dashed), used with other "
            "numbers without retraining; shaded: 95% intervals.",
        )
    if bins := results.get("calibration"):
        drawn["Calibration of the learned reward"] = Figure(
            _calibration(results, bins),
            "Mean probability of the members against the share of right answers, on sequences for "
            "held-out queries, by who drew them; ten groups of equally many. Below the dashed line "
            "the prediction is too high.",
        )
    return drawn


def _kinds() -> dict[str, str]:
    """Return policy → its kind, for policies of selectors that are not trained to be used."""
    from knobwise.agents.selector.baselines import SIMPLE  # imports torch, which is slow to load

    kinds = dict.fromkeys(SIMPLE, "simple baseline")
    return kinds | dict.fromkeys(UPPER, "upper bound") | dict.fromkeys(CONTROLS, "control")


def _calibration(results: RunResults, bins: Sequence[CalibrationBin]) -> list[alt.LayerChart]:
    """Draw the share of right answers against the predicted probability.

    Each policy that predicts has a chart, with a line for each policy that drew the demonstrations.
    """
    rows = []
    for row in bins:
        name = policy_name(row["drawn_by"], results)
        if row["drawn_by"] == row["policy"]:
            name = "itself"
        rows.append([row["policy"], row["expected"], row["right"], name])
    columns = ["policy", "predicted", "observed", "drawn_by"]
    frame = pl.DataFrame(rows, schema=columns, orient="row")
    colour = alt.Color("drawn_by:N", title="drawn by")
    titles = ("predicted probability", "share of right answers")
    drawn = []
    for (policy,), points in frame.group_by("policy", maintain_order=True):
        chart = charts.predictions(points, *titles, colour)
        drawn.append(chart.properties(title=policy_name(str(policy), results), height=240))
    return drawn

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
from knobwise.experiments.report.words import (
    MIX,
    ORACLE,
    STATIC,
    baselines,
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
    Results,
    Row,
    problem_of,
    shown_at,
)

Figures = dict[str, Figure]
"""Heading → figure."""
KINDS = {
    **dict.fromkeys(SIMPLE, "simple baseline"),
    **dict.fromkeys(UPPER, "upper bound"),
    **dict.fromkeys(CONTROLS, "control"),
}
"""Policy → its kind, for selectors that are not learned."""
BEST = "stands for the run"
"""The kind of the policy that a run is represented by."""
HUES_OF_KINDS = {
    "blue": BEST,
    "cyan": "learned",
    "orange": "simple baseline",
    "purple": "upper bound",
    "grey": "control",
}
"""Hue → the kind of policy that it stands for."""


def result_charts(results: Results) -> Figures:
    """Draw all figures that the results have numbers for, the one to be seen first in front."""
    if problem_of(results).averaged:
        return _over_budgets(results)
    return _over_shots(results)


@page.unchecked
def result_images(results: Results) -> dict[str, bytes]:
    """Draw the figures of `result_charts` as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(figure) for name, figure in result_charts(results).items()}


def numbers(problem: Problem, row: Row, name: str, key: str = "") -> dict[str, Any]:
    """Return the numbers of a row of results that a chart needs, under a policy's name in words;
    `low` and `high` are the interval of `key`, or of the number that policies are ranked by."""
    key = key or problem.ranked_by
    low, high = row.get(f"{key}_ci95") or (None, None)
    keys = [key, problem.place, *(metric.key for metric in problem.metrics)]
    drawn = {"policy": name, "name": name, "latency_ms": row.get("latency_ms_mean")}
    return drawn | {key: row.get(key) for key in keys} | {"low": low, "high": high}


def on_time(
    rows: pl.DataFrame, policies: Sequence[str], results: Results, caption: str = ""
) -> Figure:
    """Draw the share of the feasible requests that is on time against the budget.

    Args:
        rows: see `numbers`.
        policies: those with a colour.
        results: of the run whose level is drawn: the share that its guard keeps.
        caption: more to say.
    """
    level = results.get("satisfaction_level") or 0.95
    chart = charts.by_budget(
        rows.drop("low", "high", strict=False),
        FEASIBLE.key,
        "on time, of the feasible requests",
        policies,
        percent=True,
        level=level,
        unit=words.unit_of(results),
    )
    return Figure(
        chart,
        "Share on time, among the requests that some configuration serves on time. "
        f"Dashed: {level:.0%}.{caption}",
    )


# -- over budgets ----------------------------------------------------------------------------------


def _over_budgets(results: Results) -> Figures:
    """Draw the learned policy, the static reference, the strongest baseline and the oracle."""
    problem = problem_of(results)
    candidates = (problem.trained[0], problem.low, *baselines(results)[:1], problem.high)
    judged = words.rows_at(results, None)
    policies = {name: policy_name(name) for name in candidates if name in judged}
    drawn = {}
    if problem.judged_at(results):
        draw = _mean_budgets if problem.equal_latency else _deadlines
        drawn = draw(results, policies)
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


def _frame(
    results: Results, policies: Mapping[str, str], key: str = ""
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the `numbers` of these policies at the budgets, and as means over them.

    Args:
        results: the content of `results.json`.
        policies: policy → its name in words.
        key: see `numbers`.
    """
    problem = problem_of(results)
    rows = [
        numbers(problem, row, policies[row["policy"]], key)
        for row in results["rows"]
        if row["policy"] in policies
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
    mean = pl.col(problem.place).is_null()
    return frame.filter(~mean), frame.filter(mean)


def _strongest(results: Results, kind: str) -> str:
    """Return a sentence that names the strongest baseline, if any."""
    strongest = [policy_name(name, results) for name in baselines(results)[:1]]
    return "".join(f" The strongest {kind} baseline is {name}." for name in strongest)


def _mean_budgets(results: Results, policies: Mapping[str, str]) -> Figures:
    """Draw results under mean budgets: accuracy over the static mix, and against latency.

    Args:
        results: the content of `results.json`.
        policies: policy → its name in words, in the order of the legend.
    """
    unit = words.unit_of(results)
    # the static mix is at 0, and has its own line in the plane
    others, _ = _frame(results, {key: policies[key] for key in policies if key != MIX})
    learners = others.filter(pl.col("policy") != policy_name(ORACLE))
    drawn = {}
    if len(learners):
        labels = [name for key, name in policies.items() if key not in (MIX, ORACLE)]
        key = problem_of(results).ranked_by
        title = "accuracy over the static mix"
        drawn["Accuracy over the static mix of equal mean latency"] = Figure(
            charts.by_budget(learners, key, title, labels, level=0.0, unit=unit),
            "Difference in accuracy to the static mix, the best random mixture of two settings, "
            "the same for every input, by mean budget. Shaded: 95% intervals."
            + _strongest(results, "other"),
        )
    if configurations := results.get("configurations"):
        # the static mix has a line along its corners instead of its rows
        mix = pl.lit(policy_name(MIX))
        hull = pl.DataFrame(results["static_hull"]).select(
            "accuracy", "latency_ms", budget_ms="latency_ms", policy=mix, name=mix
        )
        paths = pl.concat([others.select(hull.columns), hull], how="vertical_relaxed")
        drawn["Accuracy against the mean latency spent"] = Figure(
            charts.plane(configurations, paths, list(policies.values()), unit),
            "Each grey dot is one configuration used for every test input; the line of the static "
            "mix joins those that it mixes. A point of a policy is its result at one mean budget: "
            "its height above that line is what it gains from looking at the input.",
        )
    return drawn


def _deadlines(results: Results, policies: Mapping[str, str]) -> Figures:
    """Draw results under deadlines: utility, the gain over static, late answers, and the shares on
    time. The arguments are those of `_mean_budgets`."""
    unit = words.unit_of(results)
    names = list(policies.values())
    at_budgets, means = _frame(results, policies)
    utility = at_budgets
    # a band needs both ends at every budget
    if utility["low"].has_nulls():
        utility = utility.drop("low", "high")
    first = [charts.by_budget(utility, "utility", "utility (0 to 1)", names, unit=unit)]
    # the gain over static in points
    others = {key: name for key, name in policies.items() if key not in (STATIC, ORACLE)}
    gains, _ = _frame(results, others or policies, "over_static")
    gains = gains.drop_nulls("low").with_columns(pl.col("over_static", "low", "high") * 100)
    if len(gains):
        title = "utility gained over static, in points"
        legend = list(others.values())
        first.append(charts.by_budget(gains, "over_static", title, legend, level=0.0, unit=unit))
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
        drawn["Late answers counted"] = Figure(
            charts.plane(configurations, means, names, unit, "utility"),
            "Means over the budgets; a late answer has accuracy 0. Each grey dot is one "
            "configuration used for every input and every budget; no other beats those on the "
            "dashed line. Higher is better, further left is faster.",
        )
    drawn["On time"] = on_time(at_budgets, names, results)
    return drawn


def reliability(bins: Sequence[Mapping[str, float]]) -> Figure:
    """Draw observed shares on time against predicted probabilities.

    Args:
        bins: expected_in_time, in_time and decisions of each.
    """
    rows = pl.DataFrame(bins).rename({"expected_in_time": "predicted", "in_time": "observed"})
    # the axes begin where the bins do, in steps of 5 %
    lowest = min(0.99, *rows["predicted"], *rows["observed"])
    begin = math.floor(20 * lowest) / 20
    titles = ("predicted probability of being on time", "observed share on time")
    error = words.points(words.calibration_error(bins), ".1f")
    return Figure(
        charts.predictions(rows, *titles, begin),
        "The probability of being on time that the controller's teacher predicted for its choices, "
        "and the share that was: a dot is a tenth of its decisions. On the dashed line the two are "
        f"equal; on average they differ by {error} points (expected calibration error). Below it "
        "the controller is late more often than it expects.",
        columns=2,
    )


def difficulty(explained: Row, unit: str) -> Figure:
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
            # static has no interval: its band is a line
            band = {"policy_ms": group["ci95"]}.get(key, [group[key]] * 2)
            rows.append([name, name, *band, group["difficulty_ms"], group[key]])
    columns = ["policy", "name", "low", "high", "difficulty", "latency"]
    title = f"difficulty: latency of the cheapest right configuration ({unit})"
    x = alt.X("difficulty:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=12))
    y = alt.Y("latency:Q", title=f"latency of the choice ({unit})", scale=charts.CLOSE)
    # a dot for each sample, behind the lines
    points = pl.DataFrame(explained["points"], schema=["difficulty", "latency"], orient="row")
    dots = alt.Chart(points).mark_circle(style="quiet", size=14, opacity=0.35).encode(x, y)
    groups = pl.DataFrame(rows, schema=columns, orient="row")
    lines = charts.lines(groups, x, y, list(names.values()))
    budget = words.quantity(explained["budget_ms"], unit)
    return Figure(
        charts.layered(dots, *lines),
        f"At a budget of {budget}: each grey dot is a test sample, the lines are means over groups "
        "of samples of similar difficulty, shaded: 95% interval. Where the line of the policy "
        "rises more steeply than that of static, it spends more on hard samples than their size "
        "explains.",
    )


# -- over numbers of shots -------------------------------------------------------------------------


def _over_shots(results: Results) -> Figures:
    """Draw accuracy of all policies at the trained number of shots, and of the main ones against
    this number."""
    shots = shown_at(results)
    best = DEMONSTRATIONS.main_policy(results)
    kinds = KINDS | {best: BEST}
    judged = rows_at(results, shots) | rows_at(results, shots, "controls")
    dots = []
    for policy, row in judged.items():
        name = f"{policy_name(policy, results)}: {row['accuracy']:.3f}"
        dot = numbers(DEMONSTRATIONS, row, name) | {"kind": kinds.get(policy, "learned")}
        dots.append(dot | {"value": row["accuracy"]})
    frame = pl.DataFrame(dots, infer_schema_length=None).sort("value", descending=True)
    frame = frame.select("name", "low", "value", "high", "kind")
    hues = {hue: kind for hue, kind in HUES_OF_KINDS.items() if kind in set(frame["kind"])}
    chart = charts.dots(frame, "accuracy (0 to 1)", charts.colour_of(hues, "kind"))
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
    named = dict.fromkeys((best, *LEARNED[-2:], *baselines(results)[:1]))
    labels = {name: policy_name(name, results) for name in named if name in judged}
    points = []
    for row in results["rows"]:
        line = numbers(DEMONSTRATIONS, row, policy_name(row["policy"], results))
        points.append(line | {"policy": labels.get(row["policy"], charts.OTHER)})
    lines = pl.DataFrame(points, infer_schema_length=None)
    legend = [*labels.values(), charts.OTHER]
    drawn["Accuracy against shots"] = Figure(
        charts.by_shots(lines, legend, results["trained_shots"]),
        f"Trained with {shots_words(results['trained_shots'])} (dashed), used with other numbers "
        "without retraining; shaded: 95% intervals; grey: everything else in the table."
        + _strongest(results, "simple"),
    )
    return drawn


def _learned_rewards(results: Results) -> Figures:
    """Draw accuracy against true calls, and how well learned rewards predict right answers."""
    judged = rows_at(results, shown_at(results))
    drawn = {}
    spent = []
    for row in results.get("true_calls", []):
        if row["policy"] in judged:
            line = numbers(DEMONSTRATIONS, judged[row["policy"]], "GRPO")
            spent.append(line | {"calls": sum(row["calls"]) / len(row["calls"])})
    if spent:
        axis = alt.Axis(values=sorted(row["calls"] for row in spent), format=",.0f")
        scale = alt.Scale(type="symlog", constant=100)
        x = alt.X("calls:Q", title="true calls", axis=axis, scale=scale)
        y = alt.Y("accuracy:Q", title="accuracy (0 to 1)", scale=charts.CLOSE)
        layers = charts.lines(pl.DataFrame(spent).sort("calls"), x, y, ["GRPO"])
        drawn["Accuracy against true calls"] = Figure(
            charts.layered(*layers, height=260),
            "Sequences of training queries that the answering model answered during GRPO, mean "
            "over the seeds; recorded ones that a reward was learned from, and those of "
            "validation, are not among them. Shaded: 95% intervals.",
        )
    return drawn

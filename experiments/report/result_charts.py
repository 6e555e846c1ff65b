"""The charts of a run's results, for its report and, as pictures, for W&B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.words import MIX, ORACLE, SINGLE, policy_name, ranked, rows_at, shots_words, unit_of
from knobwise.experiments.results.problem import (
    CONTROLS,
    DEMONSTRATIONS,
    LEARNED,
    UPPER,
    Problem,
    problem_of,
    shown_at,
)

if TYPE_CHECKING:
    import altair as alt

Charts = dict[str, tuple[str, "alt.TopLevelMixin"]]
"""Heading → caption and chart."""
KINDS = {"simple baseline": SIMPLE, "sees the answer": UPPER, "control": CONTROLS}
"""Of the policies that are not learned, for the bars."""
SAME_EVERYWHERE = ("controller", "budget_aware_static", "static_per_dataset", "static_mix", "best_single", "oracle")


def result_charts(results: Mapping[str, Any]) -> Charts:
    """The charts that the results have numbers for."""
    return _over_budgets(results) if problem_of(results).averaged else _over_shots(results)


def result_images(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The same charts as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(chart) for name, (_, chart) in result_charts(results).items()}


def by_dataset(results: Mapping[str, Any]) -> alt.LayerChart:
    """Mean utility of the policies in each data set."""
    rows = [
        {"dataset": row["dataset"], "policy": policy_name("best_other"), "utility": row["utility"]}
        | ({"policy": policy_name(row["policy"])} if row["policy"] in SAME_EVERYWHERE else {})
        | dict(zip(("low", "high"), row["utility_ci95"], strict=True))
        for row in results["by_dataset"]
    ]
    return charts.by_dataset(pl.DataFrame(rows), list(dict.fromkeys(row["policy"] for row in rows)))


def weights(results: Mapping[str, Any]) -> alt.LayerChart:
    """The weight of each member of the stack, in each seed."""
    seeds = map(str, results.get("seeds", range(len(results["chosen"]))))
    rows = [
        {"member": policy_name(name), "seed": seed, "weight": weight}
        for seed, chosen in zip(seeds, results["chosen"], strict=True)
        for name, weight in chosen["weights"].items()
    ]
    return charts.weights(pl.DataFrame(rows))


# -- over budgets ------------------------------------------------------------------------------------------------------


def _over_budgets(results: Mapping[str, Any]) -> Charts:
    """Learned policy, static reference, the strongest other baseline and oracle in colour, all others thin and grey."""
    problem, unit = problem_of(results), unit_of(results)
    names = [row["policy"] for row in ranked(results, problem.ranked_by)]
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    others = [name for name in names if name not in references]
    named = [n for n in (*problem.trained, problem.low, *others[:1], problem.high) if n in names]
    labels = {name: policy_name(name) for name in named}
    legend = [*labels.values(), *([charts.OTHER] if len(others) > 1 else [])]
    frame = _rows(results, problem, labels)
    strongest = f" The strongest other baseline is {policy_name(others[0])}." if others else ""
    drawn: Charts = {}
    if results.get("configurations"):
        drawn |= _plane(results, problem, frame, list(labels.values()), strongest)
    if not len(frame):
        return drawn
    if problem.equal_latency:
        learners = frame.filter(~pl.col("name").is_in([policy_name(name) for name in (ORACLE, SINGLE, MIX)]))
        if len(learners):
            legend = [label for label in legend if label in set(learners["policy"])]
            title = "accuracy over the static mix"
            drawn["Accuracy over the static mix of equal mean latency"] = (
                f"Difference in accuracy, by mean budget; shaded: 95% intervals.{strongest}",
                charts.by_budget(learners, problem.ranked_by, title, legend, level=0.0, unit=unit),
            )
        return drawn
    utility = frame.drop(c for c in ("low", "high") if frame[c].is_null().any())
    drawn["Utility against budget"] = (
        f"Mean accuracy of the answers, 0 if late; shaded: 95% intervals.{strongest}",
        charts.by_budget(utility, problem.ranked_by, "utility (0 to 1)", legend, unit=unit),
    )
    return drawn | _on_time(results, frame, legend) | _usage(results, problem)


def _rows(results: Mapping[str, Any], problem: Problem, labels: Mapping[str, str]) -> pl.DataFrame:
    """One row for each policy and budget; `low` and `high` are the interval of what policies are ranked by."""
    numbers = ("accuracy", "satisfaction", "satisfaction_feasible", problem.ranked_by)
    rows = [
        {"policy": labels.get(row["policy"], charts.OTHER), "name": policy_name(row["policy"])}
        | {"budget_ms": float(row["budget_ms"]), "latency_ms": row.get("latency_ms_mean")}
        | {name: row.get(name) for name in numbers}
        | dict(zip(("low", "high"), row.get(f"{problem.ranked_by}_ci95") or (None, None), strict=True))
        for row in results["rows"]
        if row.get("budget_ms") is not None
    ]
    return pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)


def _plane(
    results: Mapping[str, Any], problem: Problem, frame: pl.DataFrame, legend: list[str], strongest: str
) -> Charts:
    dots = pl.DataFrame([{k: c[k] for k in ("label", "accuracy", "latency_ms")} for c in results["configurations"]])
    paths = None
    if len(frame):
        columns = ["policy", "budget_ms", "accuracy", "latency_ms"]
        paths = frame.filter(pl.col("policy") != charts.OTHER).select(columns)
    if not problem.equal_latency or paths is None:
        caption = (
            "Each grey dot is one configuration used for every test input; the dashed line joins those that no other "
            "beats. A coloured line is a policy, with one point per budget. Above the dashed line it reaches what no "
            f"single configuration does.{strongest}"
        )
        return {"Accuracy and latency": (caption, charts.plane(dots, paths, legend, unit=unit_of(results)))}
    hull = pl.DataFrame(
        [
            {"policy": policy_name(MIX), "budget_ms": c["latency_ms"], "accuracy": c["accuracy"]}
            | {"latency_ms": c["latency_ms"]}
            for c in results["static_hull"]
        ]
    )
    paths = pl.concat([paths.filter(pl.col("policy") != policy_name(MIX)), hull])
    caption = (
        "Each grey dot is one configuration used for every test input; the line of the static mix joins those that it "
        "mixes. A point of a policy is its result at one mean budget: its height above that line is what it gains from "
        f"looking at the input, at equal mean latency.{strongest}"
    )
    chart = charts.plane(dots, paths, legend, unit=unit_of(results))
    return {"Accuracy against the mean latency spent": (caption, chart)}


def _on_time(results: Mapping[str, Any], frame: pl.DataFrame, legend: list[str]) -> Charts:
    required = results.get("satisfaction_level")
    level = 0.95 if required is None else float(required)
    caption = f"Share of requests on time; dashed: {level:.0%}{'' if required is None else ', as asked for'}."
    return {"On time": (caption, on_time(frame, legend, level, unit_of(results)))}


def on_time(rows: pl.DataFrame, legend: Sequence[str], level: float | None, unit: str) -> alt.HConcatChart:
    """The share on time against the budget, for each line in the legend: of all requests, and of the feasible ones.

    Args:
        rows: policy, name, budget_ms, satisfaction, satisfaction_feasible.
        level: draws a line at this height.
    """
    rows = rows.drop("low", "high", strict=False)
    panels = {"satisfaction": "on time, all requests", "satisfaction_feasible": "on time, feasible requests"}
    sides = [
        charts.by_budget(rows, y, title, legend, percent=True, level=level, size=(350, 250), unit=unit)
        for y, title in panels.items()
    ]
    return charts.side_by_side(sides)


def _usage(results: Mapping[str, Any], problem: Problem) -> Charts:
    frame = knob_usage([(policy_name(policy), policy, results) for policy in problem.usage])
    if frame is None:
        return {}
    chart = charts.knob_usage(frame, list(map(policy_name, problem.usage)), unit_of(results))
    return {"Which settings are used": ("Share of the test requests that each value of a knob gets, by budget.", chart)}


def knob_usage(runs: Sequence[tuple[str, str, Mapping[str, Any]]]) -> pl.DataFrame | None:
    """How often each value of a knob is used, for `charts.knob_usage`; None if it is not known.

    Args:
        runs: label, policy and results of each column.
    """
    rows = [
        row | {"policy": label, "value": str(row["value"])}
        for label, policy, results in runs
        for row in results.get("knob_usage", [])
        if row["policy"] == policy
    ]
    return pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True) if rows else None


# -- over numbers of shots ---------------------------------------------------------------------------------------------


def _over_shots(results: Mapping[str, Any]) -> Charts:
    shots = shown_at(results)
    frame = pl.DataFrame(
        [
            {"policy": row["policy"], "name": policy_name(row["policy"], results), "shots": row["shots"]}
            | {"accuracy": row["accuracy"], "low": row["accuracy_ci95"][0], "high": row["accuracy_ci95"][1]}
            | {"kind": next((kind for kind, names in KINDS.items() if row["policy"] in names), "learned")}
            for row in DEMONSTRATIONS.rows(results)
        ],
        infer_schema_length=None,
    )
    bars = frame.filter(pl.col("shots") == shots).sort("accuracy", descending=True, maintain_order=True)
    drawn: Charts = {
        f"Accuracy with {shots_words(shots)}": (
            "Every policy, with 95% intervals. Controls should gain nothing; those that see the answer are bounds.",
            charts.policy_bars(bars.drop("policy", "shots")),
        )
    }
    if len(results["shots"]) == 1:
        return drawn
    rows = rows_at(results, shots)
    simple = sorted((name for name in SIMPLE if name in rows), key=lambda name: -float(rows[name]["accuracy"]))
    named = dict.fromkeys((DEMONSTRATIONS.main_policy(results), *LEARNED[-2:], *simple[:1]))
    labels = {name: policy_name(name, results) for name in named if name in rows}
    lines = frame.filter(pl.col("kind") != "control").with_columns(
        pl.when(pl.col("policy").is_in(list(labels)))
        .then(pl.col("name"))
        .otherwise(pl.lit(charts.OTHER))
        .alias("policy")
    )
    strongest = f" The strongest simple baseline is {policy_name(simple[0], results)}." if simple else ""
    drawn["Accuracy against shots"] = (
        f"Trained with {shots_words(results['trained_shots'])} (dashed), used with other numbers without retraining; "
        f"shaded: 95% intervals; grey: everything else in the table.{strongest}",
        charts.by_shots(lines.drop("kind"), [*labels.values(), charts.OTHER], results["trained_shots"]),
    )
    return drawn

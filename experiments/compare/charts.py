"""The charts of `knobwise compare`: every run a line, under its label."""

from __future__ import annotations

from typing import Any

import polars as pl

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import ComparedRun
from knobwise.experiments.report import charts
from knobwise.experiments.report.result_charts import Charts, knob_usage, logged_numbers, metrics_in_time
from knobwise.experiments.report.words import SIGN_WORDS, grpo_begins, policy_name
from knobwise.experiments.results.problem import CONTROLS, FEASIBLE, Problem

COLOURED = 4
"""So many runs have a colour: the first one, and those with the best scores."""
CURVES = {
    "Utility": "utility (0 to 1)",
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean ({unit})",
    "Budget_Violation_Rate": "over budget (share)",
}
"""The training curves, in this order; the reward only where there is no utility, since runs may differ in it."""
POINTS = 400
"""How many points a curve has at most."""


def comparison_charts(comparison: Comparison) -> Charts:
    """The charts that the runs have numbers for."""
    problem, labels, unit = comparison.problem, order(comparison), comparison.unit
    runs = list(zip(comparison.runs, comparison.policies, strict=True))
    rows = _numbers(comparison, [(run, policy, _line(comparison, run)) for run, policy in runs])
    if len(runs) > COLOURED:
        rows = rows.drop("low", "high")
    names = [row["policy"] for row in comparison.reference_rows()]
    references = None
    if names:
        lines = [(comparison.reference, name, {"policy": policy_name(name)}) for name in names]
        references = _numbers(comparison, lines).drop("low", "high")
    drawn: Charts = {}
    if configurations := comparison.reference.results.get("configurations"):
        path = ["policy", "budget_ms", "accuracy", "latency_ms"]
        behind = None if references is None else references.select(path)
        drawn["Accuracy and latency"] = charts.plane(configurations, rows.select("name", *path), labels, unit, behind)
    heading, name = score_heading(problem), _score(problem)
    if problem.averaged:
        drawn[heading] = charts.by_budget(rows, problem.ranked_by, name, labels, unit=unit, references=references)
    elif len(comparison.places) > 1:
        drawn[heading] = charts.by_shots(rows, labels, int(comparison.main or 0))
    if FEASIBLE in problem.metrics:
        level = comparison.reference.results.get("satisfaction_level")
        drawn["On time"] = charts.on_time(rows, labels, level, unit)
    columns = [(run.label, policy, run.results) for run, policy in runs if run.label in labels]
    if usage := knob_usage(columns, unit):
        drawn["Which settings are used"] = usage
    if training := _training(comparison):
        drawn[f"Training, on validation {problem.samples}"] = training
    return drawn


def score_heading(problem: Problem) -> str:
    """The heading of the chart of what runs are ranked by."""
    return f"{_score(problem).capitalize()} by {problem.place_words[0]}"


def _score(problem: Problem) -> str:
    return next(metric.name for metric in problem.metrics if metric.key == problem.ranked_by)


def forest(comparison: Comparison) -> charts.alt.LayerChart:
    """The differences at the main place, in points as in the tables."""
    rows = [
        {"run": difference.run, "difference": 100 * difference.difference}
        | {"low": 100 * difference.ci95[0], "high": 100 * difference.ci95[1], "shown": SIGN_WORDS[difference.sign]}
        for difference in comparison.differences
    ]
    title = f"difference in {comparison.problem.score} to the first run, in points"
    return charts.differences(pl.DataFrame(rows), title)


def order(comparison: Comparison) -> list[str]:
    """The labels in the legend: of the runs with a colour, in the order given, and of all others together."""
    labels = [run.label for run in comparison.runs]
    if len(labels) <= COLOURED:
        return labels
    best = [i for i in comparison.ranking() if i][: COLOURED - 1]
    return [*(labels[i] for i in sorted([0, *best])), charts.OTHER]


def _line(comparison: Comparison, run: ComparedRun) -> dict[str, str]:
    return {"policy": run.label if run.label in order(comparison) else charts.OTHER, "name": run.label}


def _numbers(comparison: Comparison, lines: list[tuple[ComparedRun, str, dict[str, str]]]) -> pl.DataFrame:
    """The numbers of each (run, policy, columns that name the line) at each place; `low` and `high` are the interval of
    what runs are ranked by."""
    problem, rows = comparison.problem, []
    for run, policy, names in lines:
        for place in comparison.places:
            if row := run.row(policy, place):
                low, high = row.get(f"{problem.ranked_by}_ci95") or (None, None)
                numbers: dict[str, Any] = {metric.key: row.get(metric.key) for metric in problem.metrics}
                numbers |= {problem.place: place, "latency_ms": row.get("latency_ms_mean"), "low": low, "high": high}
                rows.append(names | numbers)
    return pl.DataFrame(rows, infer_schema_length=None)


# -- training curves ---------------------------------------------------------------------------------------------------


def _training(comparison: Comparison) -> charts.alt.FacetChart | None:
    frames = [frame for run in comparison.runs if (frame := _curves(comparison, run)) is not None]
    titles = _titles(pl.concat(frames), comparison.unit) if frames else {}
    if not titles:
        return None
    points = pl.concat(frames).filter(pl.col("metric").is_in(list(titles)))
    points = points.with_columns(pl.col("metric").replace(titles).alias("panel")).drop("metric")
    return charts.curves(points, list(titles.values()), order(comparison))


def _curves(comparison: Comparison, run: ComparedRun) -> pl.DataFrame | None:
    """For each metric and step of a run the mean, the lowest and the highest seed."""
    logged = logged_numbers(run.folder / "metrics.csv")
    if logged is None:
        return None
    logged = logged.filter(pl.col("part") == "validation").with_columns(seed=pl.col("seed").fill_null(""))
    # steps that only some seeds reached have no mean over the seeds
    last = pl.col("step").max().over("metric", "seed").min().over("metric")
    value, every = pl.col("value"), pl.len().over("metric") // POINTS + 1
    points = logged.filter(pl.col("step") <= last).group_by("metric", "step")
    return (
        points.agg(mean=value.mean(), low=value.min(), high=value.max())
        .filter(pl.int_range(pl.len()).over("metric", order_by="step") % every == 0)
        .sort("metric", "step")
        .with_columns(
            pl.col("mean", "low", "high").round_sig_figs(5),
            **{name: pl.lit(value) for name, value in _line(comparison, run).items()},
            grpo=pl.lit(grpo_begins(run.results), pl.Int64),
            alone=pl.len().over("metric") == 1,
        )
    )


def _titles(points: pl.DataFrame, unit: str) -> dict[str, str]:
    """Metric → title of its panel; stages of training are panels under their names."""
    by_start = metrics_in_time(points)
    titles = {name: title.format(unit=unit) for name, title in CURVES.items() if name in by_start}
    if "Utility" in titles:
        titles.pop("Reward_Mean", None)
    if titles:
        return titles
    for number in ("Accuracy_Mean", "Reward_Mean"):
        stages = [name.removesuffix(f"/{number}") for name in by_start if name.endswith(f"/{number}")]
        if trained := [stage for stage in stages if stage not in CONTROLS]:
            return {f"{stage}/{number}": f"{stage}: {CURVES[number]}".replace("_", " ") for stage in trained}
    return {}

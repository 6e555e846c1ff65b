"""The charts of `knobwise compare`: every run a line, under its label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import ComparedRun
from knobwise.experiments.compare.words import SIDE_BY_SIDE
from knobwise.experiments.report import charts
from knobwise.experiments.report.training_curves import logged_numbers
from knobwise.experiments.report.words import SIGN_WORDS, grpo_begins, policy_name, shots_words
from knobwise.experiments.results.problem import CONTROLS, FEASIBLE, ON_TIME

if TYPE_CHECKING:
    import altair as alt

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
Drawn = dict[str, tuple[str, "alt.TopLevelMixin"]]
"""Heading → caption and chart."""


def comparison_charts(comparison: Comparison) -> Drawn:
    """The charts that the runs have numbers for."""
    rows, references = _rows(comparison), _references(comparison)
    drawn = _plane(comparison, rows, references) | _scores(comparison, rows, references)
    if FEASIBLE in comparison.problem.metrics:
        drawn |= _on_time(comparison, rows)
    return drawn | _usage(comparison) | _training(comparison)


def forest(comparison: Comparison) -> alt.LayerChart:
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


def _grey(comparison: Comparison) -> str:
    more = len(comparison.runs) - COLOURED
    return f" In colour: the first run and the {COLOURED - 1} best others; grey: {more} more." if more > 0 else ""


# -- results by place --------------------------------------------------------------------------------------------------


def _rows(comparison: Comparison) -> pl.DataFrame:
    """The numbers of each run at each place; `low` and `high` are the interval of what runs are ranked by, for few
    runs."""
    rows = [
        _line(comparison, run) | _numbers(comparison, run, policy, place)
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
        for place in comparison.places
        if run.row(policy, place)
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return frame if len(comparison.runs) <= COLOURED else frame.drop("low", "high")


def _numbers(comparison: Comparison, run: ComparedRun, policy: str, place: float) -> dict[str, Any]:
    row, problem = run.row(policy, place), comparison.problem
    low, high = row.get(f"{problem.ranked_by}_ci95") or (None, None)
    numbers = {metric.key: row.get(metric.key) for metric in problem.metrics}
    return numbers | {problem.place: place, "latency_ms": row.get("latency_ms_mean"), "low": low, "high": high}


def _references(comparison: Comparison) -> pl.DataFrame | None:
    """The numbers of the reference policies of the first run at each place."""
    run = comparison.reference
    rows = [
        {"policy": policy_name(row["policy"])} | _numbers(comparison, run, row["policy"], place)
        for row in comparison.reference_rows()
        for place in comparison.places
        if run.row(row["policy"], place)
    ]
    return pl.DataFrame(rows, infer_schema_length=None).drop("low", "high") if rows else None


def _plane(comparison: Comparison, rows: pl.DataFrame, references: pl.DataFrame | None) -> Drawn:
    configurations = comparison.reference.results.get("configurations")
    if not configurations:
        return {}
    dots = pl.DataFrame([{key: c[key] for key in ("label", "accuracy", "latency_ms")} for c in configurations])
    caption = (
        "A coloured line is what a run reached, one point per budget. Each grey dot is one configuration used for "
        "every test input; the thin dashed line joins those that no other beats. Dots and reference policies are "
        f"those of {comparison.reference.label}.{_grey(comparison)}"
    )
    columns = ["policy", "budget_ms", "accuracy", "latency_ms"]
    behind = None if references is None else references.select(columns)
    chart = charts.plane(dots, rows.select("name", *columns), order(comparison), comparison.unit, behind)
    return {"Accuracy and latency": (caption, chart)}


def _scores(comparison: Comparison, rows: pl.DataFrame, references: pl.DataFrame | None) -> Drawn:
    """What runs are ranked by, at each place."""
    problem = comparison.problem
    name = next(metric.name for metric in problem.metrics if metric.key == problem.ranked_by)
    heading = f"{name.capitalize()} by {problem.place_words[0]}"
    caption = "Shaded: 95% intervals." * ("low" in rows.columns) + _grey(comparison)
    if problem.averaged:
        chart = charts.by_budget(
            rows, problem.ranked_by, name, order(comparison), unit=comparison.unit, references=references
        )
        return {heading: (caption.strip(), chart)}
    if len(comparison.places) < 2:
        return {}
    trained = int(comparison.main or 0)
    caption = f"Dashed: {shots_words(trained)}, the number compared above. {caption}{_policies(comparison)}"
    return {heading: (caption, charts.by_shots(rows, order(comparison), trained))}


def _policies(comparison: Comparison) -> str:
    """Which policy each line is of."""
    runs = zip(comparison.runs, comparison.policies, strict=True)
    names = {run.label: policy_name(policy, run.results) for run, policy in runs}
    if len(set(names.values())) == 1:
        return f" All lines are of {next(iter(names.values()))}."
    lines = ", ".join(f"{name} ({label})" for label, name in names.items())
    return f" The lines are of {lines}." if len(names) <= SIDE_BY_SIDE else ""


def _on_time(comparison: Comparison, rows: pl.DataFrame) -> Drawn:
    level, rows = comparison.reference.results.get("satisfaction_level"), rows.drop("low", "high", strict=False)
    style: dict[str, Any] = {"percent": True, "level": level, "size": (350, 250), "unit": comparison.unit}
    panels = [charts.by_budget(rows, m.key, m.name, order(comparison), **style) for m in (ON_TIME, FEASIBLE)]
    wanted = "" if level is None else f" Dashed: {level:.0%}, the level that the guard keeps."
    caption = f"Share of requests on time; right: of those that some configuration can serve on time.{wanted}"
    return {"On time": (caption + _grey(comparison), charts.side_by_side(panels))}


def _usage(comparison: Comparison) -> Drawn:
    labels = order(comparison)
    usage = [
        use | {"policy": run.label, "value": str(use["value"])}
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
        for use in run.results.get("knob_usage", [])
        if use["policy"] == policy and run.label in labels
    ]
    if not usage:
        return {}
    frame = pl.DataFrame(usage, infer_schema_length=None).unique(maintain_order=True)
    labels = [label for label in labels if label in set(frame["policy"])]
    few = f" Of the first run and the {COLOURED - 1} best others." if _grey(comparison) else ""
    caption = f"Share of the test requests that get each value of a knob, per budget.{few}"
    chart = charts.knob_usage(frame, labels, comparison.unit, width=200 if len(labels) <= 3 else 150)
    return {"Which settings are used": (caption, chart)}


# -- training curves ---------------------------------------------------------------------------------------------------


def _training(comparison: Comparison) -> Drawn:
    frames = [frame for run in comparison.runs if (frame := _curves(comparison, run)) is not None]
    titles = _titles(pl.concat(frames), comparison.unit) if frames else {}
    if not titles:
        return {}
    points = pl.concat(frames).filter(pl.col("metric").is_in(list(titles)))
    points = points.with_columns(pl.col("metric").replace(titles).alias("panel")).drop("metric")
    caption = "Means over the seeds, shaded from the lowest to the highest; a curve ends where its first seed ends."
    caption += " Dashed: where GRPO begins." * (points["grpo"].null_count() < len(points))
    caption += " The curves are of the network alone, without experts or guard." * comparison.problem.averaged
    chart = charts.curves_of_runs(points, list(titles.values()), order(comparison))
    return {f"Training, on validation {comparison.problem.samples}": (caption + _grey(comparison), chart)}


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
    by_start = points.group_by("metric").agg(pl.col("step").min()).sort("step", "metric")["metric"].to_list()
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

"""The charts of `knobwise compare`: every run a line, under its label."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from knobwise.experiments.compare.compare import Comparison
from knobwise.experiments.compare.compare_words import SIDE_BY_SIDE
from knobwise.experiments.compare.compared_runs import ComparedRun
from knobwise.experiments.report import charts
from knobwise.experiments.report.selector_verdict import policy_words, shots_words
from knobwise.experiments.report.training_curves import logged_numbers
from knobwise.experiments.report.verdict import MIX, ORACLE, STATIC, grpo_begins, policy_name
from knobwise.experiments.results.selector_results import CONTROLS

if TYPE_CHECKING:
    import altair as alt

COLOURED = 4
"""So many runs have a colour of their own: the first, and those with the best scores."""
CURVES = {
    "Utility": "utility (0 to 1)",
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean ({unit})",
    "Budget_Violation_Rate": "over budget (share)",
}
"""What is drawn of training, in this order; the reward only where there is no utility: runs may differ in it."""
POINTS = 400
"""At most so many points has a curve."""


def comparison_charts(comparison: Comparison) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """The charts that the runs have numbers for: heading → (caption, chart)."""
    drawn = _of_selectors(comparison) if comparison.kind == "selector" else _of_controllers(comparison)
    panels, points = _curves(comparison)
    if len(points):
        chart = charts.curves_of_runs(points, panels, order(comparison))
        alone = "" if comparison.kind == "selector" else " They are of the network alone, without experts or guard."
        mark = " Dashed: where GRPO begins." * (points["grpo"].null_count() < len(points))
        of = "queries" if comparison.kind == "selector" else "samples"
        drawn[f"Training, on validation {of}"] = (
            "Means over the seeds, shaded from the lowest to the highest seed; each curve ends where the first of its "
            f"seeds did.{mark}{alone}{_grey(comparison)}",
            chart,
        )
    return drawn


def coloured(comparison: Comparison) -> list[str]:
    """The labels of the runs with a colour of their own, in the order given."""
    if len(comparison.runs) <= COLOURED:
        return [run.label for run in comparison.runs]
    chosen = {0, *[i for i in comparison.best() if i][: COLOURED - 1]}
    return [run.label for i, run in enumerate(comparison.runs) if i in chosen]


def order(comparison: Comparison) -> list[str]:
    """Of the legend."""
    return [*coloured(comparison), *([charts.OTHER] if len(comparison.runs) > COLOURED else [])]


def _colour(comparison: Comparison, run: ComparedRun) -> dict[str, str]:
    return {"policy": run.label if run.label in coloured(comparison) else charts.OTHER, "name": run.label}


def _grey(comparison: Comparison) -> str:
    more = len(comparison.runs) - COLOURED
    return f" In colour: the first run and the {COLOURED - 1} best others; grey: {more} more." if more > 0 else ""


def _of_controllers(comparison: Comparison) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """Under deadlines utility, the plane, keeping budgets, knobs; under mean budgets the plane, and what is over the
    static mix."""
    reference, unit, places = comparison.runs[0], comparison.unit, comparison.places
    static = MIX if comparison.kind == "mean" else STATIC
    paths = _rows(comparison, {run.label: run for run in comparison.runs})
    quiet = pl.DataFrame(
        [
            {"policy": policy_name(policy), "budget_ms": place, "accuracy": row.get("accuracy")}
            | {"latency_ms": row.get("latency_ms_mean"), "utility": row.get("utility")}
            | {"satisfaction": row.get("satisfaction"), "satisfaction_feasible": row.get("satisfaction_feasible")}
            for policy in (static, ORACLE)
            for place in places
            if (row := reference.row(policy, place))
        ],
        infer_schema_length=None,
    )
    seen = quiet if len(quiet) else None
    drawn: dict[str, tuple[str, alt.TopLevelMixin]] = {}
    grey, named = _grey(comparison), order(comparison)
    if configurations := reference.results.get("configurations"):
        dots = pl.DataFrame([{k: c[k] for k in ("label", "accuracy", "latency_ms")} for c in configurations])
        columns = ["policy", "name", "budget_ms", "accuracy", "latency_ms"]
        drawn["Accuracy and latency"] = (
            "A coloured line is what a run reached, one point per budget. Each grey dot is one configuration used for "
            "every test input, the thin dashed line joins those that no other beats. Dots, "
            f"{policy_name(static)} and oracle are those of {reference.label}.{grey}",
            charts.plane(
                dots,
                paths.select(columns),
                named,
                unit,
                None if seen is None else seen.select("policy", "budget_ms", "accuracy", "latency_ms"),
            ),
        )
    if comparison.kind == "mean":
        drawn["Accuracy over the static mix of equal mean latency"] = (
            f"Difference in accuracy, by mean budget; shaded: 95% intervals.{grey}",
            charts.by_budget(paths, "over", "accuracy over the static mix", named, level=0.0, unit=unit),
        )
        return drawn
    bands = paths if len(comparison.runs) <= COLOURED else paths.drop("low", "high")
    drawn["Utility against budget"] = (
        f"Mean accuracy of answers, counted 0 when late.{' Shaded: 95% intervals.' * ('low' in bands.columns)}{grey}",
        charts.by_budget(bands, "utility", "utility (0 to 1)", named, unit=unit, references=seen),
    )
    asked = reference.results.get("satisfaction_level")
    level = None if asked is None else float(asked)
    panels = [("satisfaction", "all requests in time"), ("satisfaction_feasible", "in time, where possible")]
    size, kept = (350, 250), paths.drop("low", "high")
    drawn["Keeping the budget"] = (
        f"Share of requests that met their budget{'' if level is None else f'; dashed: {level:.0%}, as asked for'}."
        f"{grey}",
        charts.side_by_side(
            [charts.by_budget(kept, y, t, named, percent=True, level=level, size=size, unit=unit) for y, t in panels]
        ),
    )
    usage = [
        {"policy": run.label, "budget_ms": row["budget_ms"], "knob": row["knob"]}
        | {"value": str(row["value"]), "share": row["share"]}
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
        for row in run.results.get("knob_usage", [])
        if row["policy"] == policy and run.label in coloured(comparison)
    ]
    if usage:
        few = f" Of the first run and the {COLOURED - 1} best others." if grey else ""
        frame = pl.DataFrame(usage, infer_schema_length=None).unique(maintain_order=True)
        shown = [label for label in coloured(comparison) if label in set(frame["policy"])]
        drawn["Which settings are used"] = (
            f"Share of the test requests that each value of a knob gets, per budget.{few}",
            charts.knob_usage(frame, shown, unit, 200 if len(shown) <= 3 else 150),
        )
    return drawn


def _rows(comparison: Comparison, runs: dict[str, ComparedRun]) -> pl.DataFrame:
    """The numbers of the learned policy of each run at each budget."""
    rows = []
    for run, policy in zip(runs.values(), comparison.policies, strict=True):
        for place in comparison.places:
            row = run.row(policy, place)
            if not row:
                continue
            spread = "over_static_mix_ci95" if comparison.kind == "mean" else "utility_ci95"
            low, high = row.get(spread) or (None, None)
            rows.append(
                {**_colour(comparison, run), "budget_ms": place, "accuracy": row.get("accuracy")}
                | {"latency_ms": row.get("latency_ms_mean"), "utility": row.get("utility"), "low": low, "high": high}
                | {"over": row.get("over_static_mix"), "satisfaction": row.get("satisfaction")}
                | {"satisfaction_feasible": row.get("satisfaction_feasible")}
            )
    return pl.DataFrame(rows, infer_schema_length=None)


def _of_selectors(comparison: Comparison) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """Accuracy over shots."""
    if len(comparison.places) < 2:
        return {}
    rows = [
        {**_colour(comparison, run), "shots": int(place), "accuracy": row["accuracy"]}
        | dict(zip(("low", "high"), row.get("accuracy_ci95") or (None, None), strict=True))
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
        for place in comparison.places
        if (row := run.row(policy, place))
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    if len(comparison.runs) > COLOURED:
        frame = frame.drop("low", "high")
    words = {
        run.label: policy_words(policy, run.results)
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
    }
    which = (
        f" All lines are of {next(iter(words.values()))}."
        if len(set(words.values())) == 1
        else f" The lines are of {', '.join(f'{policy} ({label})' for label, policy in words.items())}."
        if len(words) <= SIDE_BY_SIDE
        else ""
    )
    return {
        "Accuracy against shots": (
            f"Share of held-out queries answered right; dashed: {shots_words(int(comparison.main or 0))}, what is "
            f"compared above.{' Shaded: 95% intervals.' * ('low' in frame.columns)}{which}{_grey(comparison)}",
            charts.by_shots(frame, order(comparison), int(comparison.main or 0)),
        )
    }


# -- curves ------------------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> tuple[list[str], pl.DataFrame]:
    """Panels, and for each of them, each run and step the mean, lowest and highest seed."""
    frames, steps = [], pl.col("step").max().over("metric", "seed")
    for run in comparison.runs:
        logged = logged_numbers(run.folder / "metrics.csv")
        if logged is None:
            continue
        logged = logged.filter(pl.col("part") == "validation").with_columns(seed=pl.col("seed").fill_null(""))
        # one that went on longer than the others is no mean over seeds
        logged = logged.filter(pl.col("step") <= steps.min().over("metric"))
        means = logged.group_by("metric", "step").agg(
            pl.col("value").mean().alias("mean"),
            pl.col("value").min().alias("low"),
            pl.col("value").max().alias("high"),
        )
        every = pl.int_range(pl.len()).over("metric", order_by="step") % (pl.len().over("metric") // POINTS + 1) == 0
        colour = {name: pl.lit(value) for name, value in _colour(comparison, run).items()}
        begins = grpo_begins(run.results)
        frames.append(
            means.filter(every)
            .sort("metric", "step")
            .with_columns(**colour, grpo=pl.lit(begins, pl.Int64), alone=pl.len().over("metric") == 1)
        )
    if not frames:
        return [], pl.DataFrame()
    points = pl.concat(frames).with_columns(pl.col("mean", "low", "high").round_sig_figs(5))
    names = points["metric"].unique(maintain_order=True).to_list()
    words = {name: text.format(unit=comparison.unit) for name, text in CURVES.items() if name in names}
    if "Utility" in words:
        words.pop("Reward_Mean", None)
    if not words:  # stages of training, each under its own name
        in_time = points.group_by("metric").agg(pl.col("step").min()).sort("step", "metric")["metric"].to_list()
        stages = [name for name in in_time if "/" in name and name.split("/")[0] not in CONTROLS]
        kept = [name for name in stages if name.endswith("/Accuracy_Mean")] or [
            name for name in stages if name.endswith("/Reward_Mean")
        ]
        words = {name: f"{name.split('/')[0]}: {CURVES[name.split('/')[1]]}".replace("_", " ") for name in kept}
    points = points.filter(pl.col("metric").is_in(list(words)))
    return list(words.values()), points.with_columns(pl.col("metric").replace(words).alias("panel")).drop("metric")

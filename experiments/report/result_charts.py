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
    WEIGHTS,
    Problem,
    problem_of,
    shown_at,
)

Charts = dict[str, charts.Figure]
"""Heading → chart, or several side by side."""
KINDS = {
    name: kind
    for kind, names in (("simple baseline", SIMPLE), ("sees the answer", UPPER))
    for name in names
}
KINDS |= dict.fromkeys(CONTROLS, "control")
"""Of the policies that are not learned."""
BEST = "stands for the run"
HUES_OF_KINDS = {
    "blue": BEST,
    "cyan": "learned",
    "orange": "simple baseline",
    "purple": "sees the answer",
}
HUES_OF_KINDS |= {"grey": "control"}
TITLES = {
    "Utility": "utility (0 to 1)",
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean ({unit})",
    "Budget_Violation_Rate": "over budget (share)",
    "Loss": "loss",
}
"""Of logged numbers."""
OF_STAGES = ("Reward_Mean", "Accuracy_Mean")
"""Those shown first of each stage of training, which is logged under its name, as in
`Val/rce/Reward_Mean`."""
POINTS = 6000
"""At most this many points go into a figure of training curves."""


def result_charts(results: Mapping[str, Any]) -> Charts:
    """The charts that the results have numbers for."""
    if problem_of(results) is WEIGHTS:
        return {
            "Fronts": fronts(
                [(policy_name(row["policy"]), row) for row in results["rows"]], results
            )
        }
    if problem_of(results).averaged:
        return _over_budgets(results)
    return _over_shots(results)


def result_images(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The same charts as pictures (PNG), for W&B: heading → bytes."""
    return {name: page.png(chart) for name, chart in result_charts(results).items()}


def numbers(problem: Problem, row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a row of results for a chart; `low` and `high` are the interval of what
    policies are ranked by."""
    low, high = row.get(f"{problem.ranked_by}_ci95") or (None, None)
    metrics = {metric.key: row.get(metric.key) for metric in problem.metrics}
    place = row[problem.place]
    latency = row.get("latency_ms_mean")
    return {problem.place: place, "latency_ms": latency, **metrics, "low": low, "high": high}


def baselines(results: Mapping[str, Any]) -> list[str]:
    """The policies that are neither learned nor references, the best first."""
    problem = problem_of(results)
    if not problem.averaged:
        rows = rows_at(results, shown_at(results))
        return sorted(
            (name for name in SIMPLE if name in rows),
            key=lambda name: -float(rows[name]["accuracy"]),
        )
    references = (*problem.trained, problem.low, SINGLE, problem.high)
    ranked = (row["policy"] for row in words.ranked(results, problem.ranked_by))
    return [name for name in ranked if name not in references]


# -- over budgets ----------------------------------------------------------------------------------


def _over_budgets(results: Mapping[str, Any]) -> Charts:
    """Of the learned policy, the static reference, the strongest other baseline and the oracle."""
    problem = problem_of(results)
    unit = words.unit_of(results)
    drawn = Charts()
    judged = words.means_of(results)
    best = baselines(results)[:1]
    named = [
        name for name in (problem.trained[0], problem.low, *best, problem.high) if name in judged
    ]
    rows = [
        {"budget_ms": None, "name": policy_name(row["policy"])} | row
        for row in results["rows"]
        if row["policy"] in named
    ]
    if any(row["budget_ms"] is not None for row in rows):
        lines = [
            numbers(problem, row) | {"policy": row["name"], "name": row["name"]} for row in rows
        ]
        frame = pl.DataFrame(lines, infer_schema_length=None).unique(maintain_order=True)
        drawn = (_mean_budgets if problem.equal_latency else _deadlines)(
            results, frame, list(map(policy_name, named))
        )
    learned = [(policy_name(problem.trained[0]), problem.trained[0], results)]
    if usage := charts.knob_usage(learned, unit, problem.low):
        drawn["Which settings are used"] = usage
    if "reliability" in results:
        drawn["Reliability"] = reliability(results["reliability"])
    return drawn


def _mean_budgets(results: Mapping[str, Any], rows: pl.DataFrame, policies: list[str]) -> Charts:
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
    unit = words.unit_of(results)
    level = results.get("satisfaction_level")
    configurations = results.get("configurations")
    places = rows.filter(pl.col("budget_ms").is_not_null())
    utility = places.drop(bound for bound in ("low", "high") if places[bound].is_null().any())
    first = [charts.by_budget(utility, "utility", "utility (0 to 1)", policies, unit=unit)]
    labels = [name for name in policies if name not in (policy_name(STATIC), policy_name(ORACLE))]
    gains = [
        {
            "policy": (name := policy_name(row["policy"])),
            "name": name,
            "budget_ms": row["budget_ms"],
        }
        | {
            key: 100 * value
            for key, value in zip(("gain", "low", "high"), (row["over_static"], *ci95), strict=True)
        }
        for row in results["rows"]
        if (ci95 := row.get("over_static_ci95"))
        and row["budget_ms"]
        and policy_name(row["policy"]) in labels
    ]
    if gains:
        title = "utility gained over static, in points"
        first.append(
            charts.by_budget(pl.DataFrame(gains), "gain", title, labels, level=0.0, unit=unit)
        )
    drawn: Charts = {"Utility against budget": first}
    if configurations and all("utility" in cell for cell in configurations):
        means = rows.filter(pl.col("budget_ms").is_null())
        drawn["Late answers counted"] = charts.plane(
            configurations, means, policies, unit, "utility"
        )
    title = "on time, of the feasible requests"
    on_time = places.drop("low", "high")
    level = 0.95 if level is None else float(level)
    panel = charts.by_budget(
        on_time, FEASIBLE.key, title, policies, percent=True, level=level, unit=unit
    )
    return drawn | {"On time": panel}


def fronts(
    rows: Sequence[tuple[str, Mapping[str, Any]]], results: Mapping[str, Any]
) -> charts.Figure:
    """Accuracy against mean latency and against mean further cost: a dot for each pair of worths,
    from rows of results with the label of each policy or run."""
    keys = ("accuracy", "latency_ms_mean", "cost_mean", "worth_ms", "worth_cost")
    points = [
        {"policy": label} | {key: row[key] for key in keys}
        for label, row in rows
        if row["weights"] is not None
    ]
    titles = {
        keys[1]: f"mean latency ({words.unit_of(results)})",
        keys[2]: f"mean {results['cost_name']}",
    }
    labels = list(dict.fromkeys(label for label, _ in rows))
    y = alt.Y("accuracy:Q", title="mean accuracy")
    dots = alt.Chart(pl.DataFrame(points)).mark_circle(size=42, opacity=0.85)
    dots = dots.encode(
        y.scale(charts.CLOSE),
        charts.colour_of(labels),
        tooltip=["policy:N", *(f"{k}:Q" for k in keys)],
    )
    xs = [alt.X(f"{key}:Q", title=title, scale=charts.CLOSE) for key, title in titles.items()]
    return [charts.layered(dots.encode(x), height=340) for x in xs]


def reliability(bins: Sequence[Mapping[str, float]]) -> alt.LayerChart:
    """Observed shares on time against predicted probabilities: expected_in_time, in_time and
    decisions of each bin, and a dashed diagonal, on which the two are equal."""
    rows = pl.DataFrame(bins).rename({"expected_in_time": "predicted", "in_time": "observed"})
    corners = [
        math.floor(20 * min(0.99, rows.select("predicted", "observed").to_numpy().min())) / 20,
        1.0,
    ]
    scale = alt.Scale(domain=corners, nice=False)
    axis = alt.Axis(format="%", tickCount=5)
    x = alt.X("predicted:Q", title="predicted probability of being on time", scale=scale, axis=axis)
    y = alt.Y("observed:Q", title="observed share on time", scale=scale, axis=axis)
    diagonal = alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners})).encode(x, y)
    tooltip = [
        *(alt.Tooltip(f"{side}:Q", format=".1%") for side in ("predicted", "observed")),
        alt.Tooltip("decisions:Q"),
    ]
    dots = alt.Chart(rows).encode(x, y, tooltip=tooltip)
    return charts.layered(
        diagonal.mark_line(**charts.DASHED),
        dots.mark_line(strokeWidth=1.5),
        dots.mark_circle(size=60, opacity=1),
    )


def difficulty(explained: Mapping[str, Any], unit: str) -> alt.LayerChart:
    """Latency of the choice against difficulty: a dot for each sample, and over groups of samples
    the means of the policy, with their intervals, and of static, from `by_difficulty`."""
    names = {"policy_ms": policy_name(words.LEARNED), "static_ms": policy_name(words.STATIC)}
    rows = [
        {"policy": name, "name": name, "difficulty": group["difficulty_ms"], "latency": group[key]}
        | dict(
            zip(
                ("low", "high"),
                group["ci95"] if key == "policy_ms" else 2 * [group[key]],
                strict=True,
            )
        )
        for key, name in names.items()
        for group in explained["groups"]
    ]
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
    shots = shown_at(results)
    best = DEMONSTRATIONS.main_policy(results)
    rows = [
        {"policy": row["policy"], "name": policy_name(row["policy"], results)}
        | numbers(DEMONSTRATIONS, row)
        for row in DEMONSTRATIONS.rows(results)
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    kinds = KINDS | {best: BEST}
    at = [
        {"name": row["name"], "low": row["low"], "value": row["accuracy"], "high": row["high"]}
        | {"kind": kinds.get(row["policy"], "learned"), "beside": f"{row['accuracy']:.3f}"}
        for row in sorted(rows, key=lambda row: -row["accuracy"])
        if row["shots"] == shots
    ]
    kinds_judged = {row["kind"] for row in at}
    colour = charts.colour_of(
        {hue: kind for hue, kind in HUES_OF_KINDS.items() if kind in kinds_judged}, "kind"
    )
    drawn: Charts = {
        f"Accuracy with {shots_words(shots)}": charts.dots(
            pl.DataFrame(at), "accuracy (0 to 1)", colour
        )
    }
    drawn |= _learned_rewards(results)
    if len(results["shots"]) == 1:
        return drawn
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
    """Accuracy against true calls, and how well learned rewards predict right answers."""
    judged = rows_at(results, shown_at(results))
    drawn = Charts()
    spent = [
        numbers(DEMONSTRATIONS, judged[row["policy"]])
        | {"policy": "GRPO", "name": "GRPO", "calls": sum(row["calls"]) / len(row["calls"])}
        for row in results.get("true_calls", [])
        if row["policy"] in judged
    ]
    if spent:
        axis = alt.Axis(values=sorted(row["calls"] for row in spent), format=",.0f")
        x = alt.X(
            "calls:Q", title="true calls", axis=axis, scale=alt.Scale(type="symlog", constant=100)
        )
        layers = charts.lines(
            pl.DataFrame(spent).sort("calls"), x, "accuracy", "accuracy (0 to 1)", ["GRPO"]
        )
        drawn["Accuracy against true calls"] = charts.layered(*layers, height=260)
    if bins := results.get("calibration"):
        x = alt.X("expected:Q", title="predicted probability")
        y = alt.Y("right:Q", title="share of right answers")
        diagonal = alt.Chart(pl.DataFrame({"expected": [0.0, 1.0], "right": [0.0, 1.0]})).mark_line(
            **charts.DASHED
        )
        drawn["Calibration of the learned reward"] = figure = []
        for policy in dict.fromkeys(row["policy"] for row in bins):
            of_policy = [
                row
                | {
                    "drawn_by": "itself"
                    if row["drawn_by"] == policy
                    else policy_name(row["drawn_by"], results)
                }
                for row in bins
                if row["policy"] == policy
            ]
            lines = alt.Chart(pl.DataFrame(of_policy)).mark_line(point=True)
            lines = lines.encode(x, y, alt.Color("drawn_by:N", title="drawn by"))
            chart = charts.layered(diagonal.encode(x, y), lines, height=240)
            figure.append(chart.properties(title=policy_name(policy, results)))
    return drawn


# -- training curves -------------------------------------------------------------------------------


def training_curves(results: Mapping[str, Any], path: Path) -> dict[str, list[alt.LayerChart]]:
    """The curves of a run, as far as it logged them in `metrics.csv` at this path: the score on
    `validation`, with GRPO's part beside it, or the rewards of its `stages`; and all `others`."""
    logged = logged_numbers(path)
    if logged is None:
        return {}
    in_time = metrics_in_time(logged)
    begins = words.grpo_begins(results)
    score = problem_of(results).validation
    stages = [name for name in in_time if is_shown_first(name)]
    others = sorted(name for name in in_time if name not in stages)
    validation = _parts_of_grpo(results, logged.filter(pl.col("variable") == score), begins)
    return {
        "validation": validation,
        "stages": _curves(logged, stages, begins),
        "others": _curves(logged, others, begins),
    }


def _parts_of_grpo(
    results: Mapping[str, Any], logged: pl.DataFrame, begins: int | None
) -> list[alt.LayerChart]:
    """The score on validation before and during GRPO, and the change from what GRPO started with;
    without the second where there is no GRPO."""
    first = f"{problem_of(results).score} on validation"
    second = "GRPO alone: points gained since it began"
    colours = {"slate": "before GRPO" if begins else "without GRPO", "blue": "GRPO"}
    chosen = zip(results.get("seeds", []), results.get("chosen") or (), strict=False)
    starts = {
        str(seed): seeds["grpo"]["start"] for seed, seeds in chosen if begins and seeds.get("grpo")
    }
    points = logged.select(
        "seed", "step", "value", panel=pl.lit(first), grpo=pl.lit(begins, pl.Int64)
    )
    of_grpo = pl.col("step") > pl.col("grpo")
    gained = 100 * (
        pl.col("value")
        - pl.col("seed").replace_strict(starts, default=None, return_dtype=pl.Float64)
    )
    during = (
        points.filter(of_grpo).with_columns(value=gained, panel=pl.lit(second)).drop_nulls("value")
    )
    start = [
        {"seed": seed, "step": begins, "value": 0.0, "panel": second, "grpo": begins}
        for seed in starts
    ]
    points = pl.concat([points, during, pl.DataFrame(start, schema=points.schema)]).sort(
        "panel", "seed", "step"
    )
    points = points.with_columns(
        part=pl.when(of_grpo | (pl.col("panel") == second))
        .then(pl.lit("GRPO"))
        .otherwise(pl.lit(colours["slate"]))
    )
    panels = [panel for panel in (first, second) if panel in points["panel"]]
    return charts.curves(points, panels, colours, colour="part", line="seed", y="value")


def logged_numbers(path: Path) -> pl.DataFrame | None:
    """What a run logged while it trained: seed, step, variable, value, metric (`variable` without
    Train/ or Val/) and part (train or validation); None if the file is missing or holds no such
    numbers.

    Raises:
        InputError: the file is no table, or not of a run.
    """
    if not path.exists():
        return None
    try:
        frame = pl.read_csv(
            path,
            infer_schema_length=None,
            schema_overrides={"seed": pl.String},
            raise_if_empty=False,
        )
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    names = [
        name
        for name in frame.columns
        if name.startswith(("Train/", "Val/")) and frame[name].dtype.is_numeric()
    ]
    if not {"seed", "step"} <= set(frame.columns):
        raise InputError(
            f"{path}: is empty or damaged, without columns seed and step; delete it to go without "
            "curves"
        )
    if not names:
        return None
    frame = frame.with_columns(pl.col("step").cast(pl.Int64, strict=False))
    logged = frame.unpivot(names, index=["seed", "step"]).drop_nulls().cast({"value": pl.Float64})
    part, metric = (pl.col("variable").str.extract(pattern) for pattern in (r"^(\w+)/", r"/(.*)$"))
    return logged.filter(pl.col("value").is_finite()).with_columns(
        metric=metric, part=part.replace({"Train": "train", "Val": "validation"})
    )


def metrics_in_time(logged: pl.DataFrame) -> list[str]:
    """The metrics, those logged first before others."""
    return (
        logged.group_by("metric")
        .agg(pl.col("step").min())
        .sort("step", "metric")["metric"]
        .to_list()
    )


def is_shown_first(metric: str) -> bool:
    """Whether a logged number is one that matters most of a stage of training which is no
    control."""
    stage, _, number = metric.rpartition("/")
    return bool(stage) and number in OF_STAGES and stage not in CONTROLS


def title_of(metric: str, unit: str = "ms") -> str:
    """The title of a panel; that of a stage of training begins with its name."""
    stage, _, number = metric.rpartition("/")
    return f"{stage}: {TITLES.get(number, number).format(unit=unit)}".removeprefix(": ").replace(
        "_", " "
    )


def _curves(logged: pl.DataFrame, metrics: list[str], begins: int | None) -> list[alt.LayerChart]:
    """A chart for each metric; of long curves the means over stretches of steps, each at its last
    step."""
    logged = logged.filter(pl.col("metric").is_in(metrics))
    curve = ["metric", "part", "seed"]
    most = max(10, min(120, POINTS // max(1, logged.select(curve).n_unique())))
    place = (
        pl.int_range(pl.len()).over(curve, order_by="step")
        * most
        // pl.len().over(curve).clip(most)
    )
    thinned = logged.group_by(*curve, place.alias("bin")).agg(
        pl.col("step").max(), pl.col("value").mean().round_sig_figs(5)
    )
    titles = {name: title_of(name) for name in metrics}
    points = (
        thinned.sort(*curve, "step")
        .drop("bin")
        .with_columns(pl.col("metric").replace(titles).alias("panel"))
    )
    points = points.drop("metric").with_columns(grpo=pl.lit(begins, pl.Int64))
    parts = {"slate": "train", "blue": "validation"}
    return charts.curves(
        points, list(titles.values()), parts, colour="part", line="seed", y="value"
    )

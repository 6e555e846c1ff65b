"""The charts (Altair) of all pages: frame → chart. Colours come from the page (`knobwise.experiments.report.page`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from knobwise.experiments.report.page import OTHERS as OTHER
from knobwise.experiments.report.page import by_hue, domain
from knobwise.experiments.report.words import policy_name, quantity
from knobwise.experiments.results.problem import FEASIBLE, ON_TIME
from knobwise.experiments.results.statistics import pareto_front

DASHED: dict[str, Any] = {"style": "quiet", "strokeWidth": 1.5, "strokeDash": [5, 4]}
MOST_VALUES = 12
"""A knob with more values than this is drawn with its most used ones and "other"."""
SAME_EVERYWHERE = ("controller", "budget_aware_static", "static_per_dataset", "static_mix", "best_single", "oracle")
"""Policies that are drawn in every data set; of all others only the best."""
CLOSE = alt.Scale(zero=False, padding=12)


def colour_of(labels: Sequence[str] | Mapping[str, str], field: str = "policy") -> alt.Color:
    """Colour by policy: every policy has one colour, on this page and on all others. Other labels name their hues: hue
    → label."""
    values = list(labels.values() if isinstance(labels, Mapping) else labels)
    # long names, as of runs, stand in fewer columns, so that the legend is no wider than the chart
    columns = max(1, min(5, 820 // (6 * max(map(len, values), default=1) + 34)))
    legend = alt.Legend(orient="top", title=None, labelLimit=340, columns=columns, symbolOpacity=1, values=values)
    scale = alt.Scale(domain=by_hue(labels) if isinstance(labels, Mapping) else domain(labels))
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


def _tooltip(rows: pl.DataFrame) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{name}:{'Q' if dtype.is_numeric() else 'N'}") for name, dtype in rows.schema.items()]


# -- lines -------------------------------------------------------------------------------------------------------------


def _thin_and_named(lines: alt.Chart, width: float, size: int = 0) -> list[alt.Chart]:
    """The policies that have a colour, with dots of some size, and all others thin."""
    thin, named = (lines.transform_filter(test) for test in (alt.datum.policy == OTHER, alt.datum.policy != OTHER))
    dots = [named.mark_circle(size=size, opacity=1)] if size else []
    return [thin.mark_line(strokeWidth=1), named.mark_line(strokeWidth=width), *dots]


def _quiet(references: pl.DataFrame, x: alt.X, y: alt.Y) -> alt.Chart:
    """The references of a chart: without colour, distinguished by their dashes."""
    names = references["policy"].unique(maintain_order=True).to_list()
    scale = alt.Scale(domain=names, range=[[1, 3], [7, 3], [1, 0]][: len(names)])
    legend = alt.Legend(orient="bottom", title=None, labelLimit=340, symbolSize=900)
    dash = alt.StrokeDash("policy:N", scale=scale, legend=legend)
    return alt.Chart(references).mark_line(style="quiet", strokeWidth=2).encode(x, y, dash, order="budget_ms:Q")


def plane(
    configurations: Sequence[Mapping[str, Any]],
    paths: pl.DataFrame | None = None,
    policies: Sequence[str] = (),
    unit: str = "ms",
    references: pl.DataFrame | None = None,
) -> alt.LayerChart:
    """Mean accuracy against mean latency: configurations as dots, the Pareto front, one path over the budgets a policy.

    Args:
        configurations: label, accuracy, latency_ms, and perhaps samples, of each.
        paths: policy, budget_ms, accuracy, latency_ms; perhaps name, where several policies have one colour.
        policies: the order of the policies, which gives their colours.
        references: without colour, as `paths`.
    """
    x = alt.X("latency_ms:Q", title=f"mean latency ({unit})", scale=CLOSE, axis=alt.Axis(tickCount=10))
    y = alt.Y("accuracy:Q", title="mean accuracy (0 to 1)", scale=CLOSE)
    columns = ("label", "accuracy", "latency_ms", "samples")
    dots = pl.DataFrame([{key: cell[key] for key in columns if key in cell} for cell in configurations])
    front = dots.filter(pareto_front(dots["accuracy"].to_numpy(), dots["latency_ms"].to_numpy()))
    steps = alt.Chart(front).mark_line(style="quiet", strokeWidth=1.5, interpolate="step-after", strokeDash=[4, 3])
    circles = alt.Chart(dots).mark_circle(style="quiet", size=36, opacity=0.55)
    layers = [circles.encode(x, y, tooltip=_tooltip(dots)), steps.encode(x, y)]
    if paths is not None and len(paths):
        line = alt.Chart(paths).encode(x, y, colour_of(policies), order="budget_ms:Q", tooltip=_tooltip(paths))
        line = line.encode(detail="name:N") if "name" in paths.columns else line
        layers += _thin_and_named(line, width=2, size=60)
    if references is not None:
        layers.append(_quiet(references, x, y))
    return alt.layer(*layers).properties(width=820, height=360)


def by_budget(
    rows: pl.DataFrame,
    y: str,
    title: str,
    policies: Sequence[str],
    *,
    percent: bool = False,
    level: float | None = None,
    size: tuple[int, int] = (820, 320),
    unit: str = "ms",
    references: pl.DataFrame | None = None,
) -> alt.LayerChart:
    """One number against the budget: the policies named are coloured, all others thin and grey.

    Args:
        rows: policy, name, budget_ms, `y`, and low and high where the interval is to be drawn.
        level: draws a line at this height.
        references: without colour: policy, budget_ms, `y`.
    """
    positive = [budget for budget in rows["budget_ms"] if budget > 0] or [1.0]
    wide = max(positive) > 20 * min(positive)
    scale = alt.Scale(type="log") if wide else alt.Scale(zero=False, nice=False, padding=12)
    x = alt.X("budget_ms:Q", title=f"latency budget ({unit})", scale=scale, axis=alt.Axis(tickCount=size[0] // 80))
    layers = lines(rows, x, y, title, policies, percent)
    if level is not None:
        layers.append(alt.Chart(pl.DataFrame({"level": [level]})).mark_rule(**DASHED).encode(y="level:Q"))
    if references is not None:
        layers.append(_quiet(references, x, alt.Y(f"{y}:Q", title=title)))
    return alt.layer(*layers).properties(width=size[0], height=size[1])


def on_time(rows: pl.DataFrame, policies: Sequence[str], level: float | None, unit: str) -> alt.HConcatChart:
    """The share on time against the budget, of all requests and of the feasible ones: policy, name, budget_ms,
    satisfaction, satisfaction_feasible."""
    panel = partial(by_budget, rows.drop("low", "high", strict=False), policies=policies, unit=unit, level=level)
    panels = [panel(y=share.key, title=share.name, percent=True, size=(350, 250)) for share in (ON_TIME, FEASIBLE)]
    return alt.hconcat(*panels, spacing=40).resolve_scale(color="shared")


def by_shots(rows: pl.DataFrame, policies: Sequence[str], trained: int) -> alt.LayerChart:
    """Accuracy against the number of demonstrations: the policies named are coloured, all others thin and grey.
    Columns: policy, name, shots, accuracy, low, high. A dashed line stands at the number trained with."""
    axis = alt.Axis(values=sorted(rows["shots"].unique()), format="d", grid=False)
    x = alt.X("shots:Q", title="demonstrations (shots)", axis=axis, scale=alt.Scale(padding=24, nice=False, zero=False))
    mark = alt.Chart(pl.DataFrame({"shots": [trained]})).mark_rule(**DASHED).encode(x)
    layers = [mark, *lines(rows, x, "accuracy", "accuracy (0 to 1)", policies)]
    return alt.layer(*layers).properties(width=820, height=340)


def lines(
    rows: pl.DataFrame, x: alt.X, y: str, title: str, policies: Sequence[str], percent: bool = False
) -> list[alt.Chart]:
    """Lines over x, with a band where the interval is known (low, high)."""
    axis = alt.Axis(format="%") if percent else alt.Axis()
    scale = alt.Scale(zero=False, nice=False, padding=8) if percent else alt.Scale(zero=False)
    height = alt.Y(f"{y}:Q", title=title, axis=axis, scale=scale)
    tooltip = ["name:N", x.shorthand, alt.Tooltip(f"{y}:Q", format=".1%" if percent else ".3f")]
    line = alt.Chart(rows).encode(x, height, colour_of(policies), detail="name:N", tooltip=tooltip)
    layers = _thin_and_named(line, width=2.5, size=50)
    if "low" in rows.columns:
        band = alt.Chart(rows.filter(pl.col("policy") != OTHER)).mark_area(opacity=0.15)
        layers.insert(0, band.encode(x, alt.Y("low:Q", title=title), colour_of(policies), y2="high:Q"))
    return layers


def curves(
    points: pl.DataFrame,
    panels: Sequence[str],
    labels: Sequence[str] | Mapping[str, str],
    *,
    colour: str = "policy",
    line: str = "name",
    y: str = "mean",
    columns: int = 2,
) -> alt.FacetChart:
    """Small charts of numbers against the training step, with a dashed line where GRPO begins: one panel a number.

    Args:
        points: panel, `colour`, `line`, step, `y`; low and high for a band; grpo, the step where GRPO begins; alone,
            whether it is the only point of its line.
        labels: policies in order, all others being thin and grey, or hue → label.
    """
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=alt.Scale(zero=False))
    number = alt.Y(f"{y}:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4))
    tooltip = [f"{name}:N" for name in (colour, line) if name != "policy"]
    base = alt.Chart().encode(x, colour_of(labels, colour), detail=f"{line}:N")
    drawn = base.encode(number, tooltip=[*tooltip, "step:Q", alt.Tooltip(f"{y}:Q", format=".4~g")])
    layers = _thin_and_named(drawn, width=2) if colour == "policy" else [drawn.mark_line(strokeWidth=1.5)]
    if "low" in points.columns:
        band = base.transform_filter(alt.datum.policy != OTHER).mark_area(opacity=0.15)
        layers.insert(0, band.encode(alt.Y("low:Q", scale=alt.Scale(zero=False)), y2="high:Q"))
    if "alone" in points.columns:
        layers.append(drawn.transform_filter(alt.datum.alone).mark_circle(size=60, opacity=1))
    if "grpo" in points.columns:
        known = alt.Chart().transform_filter(alt.datum.grpo != None)  # noqa: E711
        begins = known.transform_aggregate(groupby=["grpo"]).mark_rule(**DASHED)
        layers.insert(0, begins.encode(x="grpo:Q"))
    facet = alt.Facet("panel:N", sort=list(panels), title=None)
    width, height = (360, 180) if columns == 2 else (225, 130)
    layered = alt.layer(*layers).properties(width=width, height=height)
    spacing = {"row": 74, "column": 66}
    faceted = layered.facet(facet, data=points, columns=columns, bounds="flush", spacing=spacing)
    return faceted.resolve_scale(x="independent", y="independent")


# -- bars, and dots with their intervals -------------------------------------------------------------------------------


def _bars(rows: pl.DataFrame, x: alt.X, y: alt.Y, colour: alt.Color, tooltip: Sequence[Any] = ()) -> alt.LayerChart:
    """Bars, with their intervals where these are known (low, high)."""
    base = alt.Chart(rows).encode(y, tooltip=list(tooltip))
    bars = base.mark_bar(height={"band": 0.6}, opacity=0.75).encode(x, colour.legend(None))
    if "low" not in rows.columns:
        return alt.layer(bars)
    return bars + base.mark_rule(style="quiet", strokeWidth=2).encode(alt.X("low:Q"), alt.X2("high:Q"))


def policy_bars(policies: pl.DataFrame) -> alt.LayerChart:
    """Accuracy of each policy as a bar in its colour, with its interval and its number; controls are grey.
    Columns: name, kind, accuracy, low, high, in order. A kind other than "learned" is written beside the bar."""
    kind = pl.col("kind")
    rows = policies.with_columns(
        colour=pl.when(kind == "control").then(pl.lit(OTHER)).otherwise(pl.col("name")),
        beside=pl.when(kind == "learned").then(pl.lit("")).otherwise("  " + kind),
    )
    scale, axis = alt.Scale(domain=[0, 1.25 * max(1.0, *policies["high"])]), alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1])
    x = alt.X("accuracy:Q", title="accuracy (0 to 1)", scale=scale, axis=axis)
    y = alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=260))
    tooltip = ["name:N", "kind:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("accuracy", "low", "high"))]
    bars = _bars(rows, x, y, colour_of(rows["colour"].unique(maintain_order=True).to_list(), "colour"), tooltip)
    label = alt.Chart(rows).transform_calculate(label="format(datum.accuracy, '.3f') + datum.beside")
    words = label.mark_text(style="quiet", align="left", dx=6).encode(y, alt.X("high:Q"), alt.Text("label:N"))
    return alt.layer(bars, words).properties(width=640, height=alt.Step(24))


def share_bars(shares: pl.DataFrame) -> alt.HConcatChart:
    """Shares as bars with their intervals, a panel for each metric: metric, policy, value, low, high, in order."""
    policies = shares["policy"].unique(maintain_order=True).to_list()
    sides: list[alt.LayerChart] = []
    for (title,), rows in shares.group_by("metric", maintain_order=True):
        x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, 1]))
        y = alt.Y("policy:N", sort=policies, title=None, axis=alt.Axis(labels=not sides, ticks=False))
        sides.append(_bars(rows, x, y, colour_of(policies)).properties(width=340, height=28 * len(policies)))
    return alt.hconcat(*sides)


def timeline(requests: pl.DataFrame) -> alt.VConcatChart:
    """Requests in order, with their latency_ms and budget_ms, and the `level` that a tracker expects: latency here /
    latency predicted."""
    rows = requests.with_row_index("request", 1).with_columns(share=pl.col("latency_ms") / pl.col("budget_ms"))
    chart, x = alt.Chart(rows).properties(width=680), alt.X("request:Q")
    share = alt.Y("share:Q", title="latency / budget", scale=alt.Scale(type="log", padding=8))
    dots = chart.mark_circle(size=14, opacity=0.7).encode(x, share, tooltip=_tooltip(rows))
    budget = alt.Chart(pl.DataFrame({"share": [1.0]})).mark_rule(**DASHED).encode(y=share)
    level = chart.mark_line(strokeWidth=1.5).encode(x, alt.Y("level:Q", title="tracked level", scale=CLOSE))
    return alt.vconcat(alt.layer(dots, budget).properties(height=240), level.properties(height=110))


def residuals(requests: pl.DataFrame) -> alt.LayerChart:
    """How far ln(latency) was from what was expected, in units of the expected spread (`residual`): a histogram, and
    dashed the normal distribution that decisions assume. Residuals beyond ±6 count as ±6."""
    edges = np.arange(-6, 6.25, 0.25)
    counts, _ = np.histogram(requests["residual"].clip(-6, 6).to_numpy(), edges)
    middle = edges[:-1] + 0.125
    normal = np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi) * 0.25
    rows = pl.DataFrame({"residual": middle, "share": counts / max(counts.sum(), 1), "normal": normal})
    x = alt.X("residual:Q", title="residual in expected spreads")
    bars = alt.Chart(rows).mark_bar(size=12).encode(x, alt.Y("share:Q", title="share of the requests"))
    curve = alt.Chart(rows).mark_line(**DASHED).encode(x, alt.Y("normal:Q"))
    return alt.layer(bars, curve).properties(width=680, height=220)


def weights(chosen: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> alt.LayerChart:
    """The weight of each member of the stack: a bar for the mean over the seeds and a dot for each of them."""
    rows = [
        {"member": policy_name(name), "seed": str(seed), "weight": weight}
        for seed, stack in zip(seeds, chosen, strict=True)
        for name, weight in stack["weights"].items()
    ]
    members = pl.DataFrame(rows)
    x = alt.X("weight:Q", title="weight in the stack", axis=alt.Axis(format="%", tickCount=8))
    y = alt.Y("member:N", sort=None, title=None)
    means = members.group_by("member", maintain_order=True).agg(pl.col("weight").mean())
    tooltip = ["member:N", alt.Tooltip("weight:Q", format=".1%")]
    bars = _bars(means, x, y, colour_of(means["member"].to_list(), "member"), tooltip)
    dots = alt.Chart(members).mark_circle(style="quiet", size=36, opacity=1).encode(x, y, tooltip=[*tooltip, "seed:N"])
    return alt.layer(bars, dots).properties(width=680, height=alt.Step(26))


def _dots_with_spans(base: alt.Chart, x: alt.X) -> list[alt.Chart]:
    spans = base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title=x["title"]), x2="high:Q")
    return [spans, base.mark_circle(size=75, opacity=1).encode(x)]


def by_dataset(judged: Sequence[Mapping[str, Any]]) -> alt.LayerChart:
    """Mean utility and its interval: a band for each data set, and in it a line for each policy."""
    rows = pl.DataFrame(
        [
            {"dataset": row["dataset"], "policy": row["policy"] if row["policy"] in SAME_EVERYWHERE else "best_other"}
            | {"utility": row["utility"], "low": row["utility_ci95"][0], "high": row["utility_ci95"][1]}
            for row in judged
        ]
    )
    rows = rows.with_columns(pl.col("policy").replace({policy: policy_name(policy) for policy in rows["policy"]}))
    policies = rows["policy"].unique(maintain_order=True).to_list()
    y = alt.Y("dataset:N", title=None, axis=alt.Axis(labelLimit=200))
    offset = alt.YOffset("policy:N", scale=alt.Scale(domain=policies, paddingOuter=0.4))
    base = alt.Chart(rows).encode(y, offset, colour_of(policies), tooltip=_tooltip(rows))
    layers = _dots_with_spans(base, alt.X("utility:Q", title="utility (0 to 1)", scale=CLOSE))
    height = 18 * len(policies) * rows["dataset"].n_unique() + 20
    return alt.layer(*layers).properties(width=720, height=height)


def differences(rows: pl.DataFrame, title: str) -> alt.LayerChart:
    """Differences with their intervals, one below the other, and a line at 0: run, difference, low, high, shown
    (better, worse, no difference shown), in order."""
    y = alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=400))
    colour = colour_of({"blue": "better", "orange": "worse", "grey": "no difference shown"}, "shown")
    detail = ["run:N", *(alt.Tooltip(f"{name}:Q", format="+.3f") for name in ("difference", "low", "high")), "shown:N"]
    base = alt.Chart(rows).encode(y, colour, tooltip=detail)
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(style="quiet", strokeDash=[5, 4]).encode(x="zero:Q")
    layers = _dots_with_spans(base, alt.X("difference:Q", title=title))
    return alt.layer(zero, *layers).properties(width=500, height=alt.Step(24))


# -- knobs -------------------------------------------------------------------------------------------------------------


def knob_usage(runs: Sequence[tuple[str, str, Mapping[str, Any]]], unit: str = "ms") -> alt.VConcatChart | None:
    """Which share of the requests gets which value of a knob, per budget: one row a knob, one column a policy.

    Args:
        runs: label, policy and results of each column.

    Returns:
        None where no usage is known.
    """
    shares = [
        row | {"policy": label, "value": str(row["value"])}
        for label, policy, results in runs
        for row in results.get("knob_usage", [])
        if row["policy"] == policy
    ]
    if not shares:
        return None
    usage = pl.DataFrame(shares, infer_schema_length=None).unique(maintain_order=True)
    width = 200 if usage["policy"].n_unique() <= 3 else 150
    # the name of a run says several things, one below the other
    header = alt.Header(labelLimit=width + 20, labelExpr="split(datum.label, ', ')")
    x = alt.X("budget:O", title="latency budget", sort=alt.SortField("budget_ms"), axis=alt.Axis(labelAngle=-35))
    y = alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    names = {budget: quantity(budget, unit) for budget in usage["budget_ms"].unique()}
    usage = usage.with_columns(pl.col("budget_ms").replace_strict(names, return_dtype=pl.String).alias("budget"))
    rows = []
    for knob in usage["knob"].unique(maintain_order=True):
        part = usage.filter(pl.col("knob") == knob)
        used = part.group_by("value").agg(pl.col("share").sum()).sort("share", descending=True)["value"]
        values = sorted(used.head(MOST_VALUES).to_list(), key=in_order)
        if len(used) > MOST_VALUES:
            rare = pl.col("value").is_in(values).not_()
            part = part.with_columns(pl.when(rare).then(pl.lit("other")).otherwise(pl.col("value")).alias("value"))
            values.append("other")
        part = part.group_by("policy", "budget_ms", "budget", "value", maintain_order=True).agg(pl.col("share").sum())
        part = part.with_columns(pl.col("value").replace_strict(values, range(len(values))).alias("place"))
        colour = alt.Color("value:O", sort=values, title=knob, scale=alt.Scale(domain=values))
        column = alt.Column("policy:N", sort=[run[0] for run in runs], title=None, header=header)
        tooltip = ["policy:N", "budget:O", "value:O", alt.Tooltip("share:Q", format=".1%")]
        bars = alt.Chart(part).mark_bar().encode(x, y, colour, column, order="place:Q", tooltip=tooltip)
        rows.append(bars.properties(width=width, height=130))
    return alt.vconcat(*rows).resolve_scale(color="independent")


def in_order(value: object) -> tuple[bool, float, str]:
    """Sort key for knob values written as words: numbers by size, then names."""
    try:
        return False, float(str(value)), ""
    except ValueError:
        return True, 0.0, str(value)


def knob_effects(knobs: Mapping[str, Mapping[str, Sequence[Any]]]) -> alt.VConcatChart:
    """Mean accuracy (left) and latency (right) for each value of each knob: name → values, accuracy, latency_ms."""
    rows = []
    # one scale for all knobs, so that a knob which does little looks like it
    domains = {y: np.concatenate([knob[y] for knob in knobs.values()]) for y in ("accuracy", "latency_ms")}
    scales = {
        y: alt.Scale(domain=[float(means.min()), float(means.max())], nice=True, zero=False, padding=6)
        for y, means in domains.items()
    }
    for name, knob in knobs.items():
        values = list(map(str, knob["values"]))
        frame = pl.DataFrame({"value": values, "accuracy": knob["accuracy"], "latency_ms": knob["latency_ms"]})
        names = any(isinstance(value, str) for value in knob["values"])
        axis = alt.Axis(labelAngle=-40 if names else 0, labelLimit=90, labelOverlap=True)
        base = alt.Chart(frame).encode(alt.X("value:O", title=name, sort=values, axis=axis), tooltip=_tooltip(frame))
        sides = []
        for y, title in (("accuracy", "mean accuracy"), ("latency_ms", "mean latency (ms)")):
            line = base.encode(alt.Y(f"{y}:Q", title=title, scale=scales[y], axis=alt.Axis(tickCount=4)))
            # a line says that values are in order, which names are not
            dots = line.mark_circle(size=50, opacity=1)
            layers = alt.layer(dots) if names else line.mark_line(strokeWidth=2) + dots
            sides.append(layers.properties(width=360, height=140))
        rows.append(alt.hconcat(*sides, spacing=40))
    return alt.vconcat(*rows)


def coverage(frames: Iterable[pl.DataFrame]) -> alt.ConcatChart:
    """How much was profiled: one or two columns named after knobs, and share (0 to 1); white is nothing."""
    colour = alt.Color("share:Q", title="profiled", scale=alt.Scale(domain=[0, 1]), legend=alt.Legend(format="%"))
    panels = []
    for frame in frames:
        names = [name for name in frame.columns if name != "share"]
        orders = {name: sorted(frame[name].unique().to_list()) for name in names}
        x = alt.X(f"{names[0]}:O", sort=orders[names[0]], axis=alt.Axis(labelAngle=0, labelOverlap=True))
        y = [alt.Y(f"{name}:O", sort=orders[name]) for name in names[1:]]
        tooltip = [*names, alt.Tooltip("share:Q", format=".1%")]
        cells = alt.Chart(frame).mark_rect().encode(x, *y, colour, tooltip=tooltip)
        panels.append(cells.properties(width=210 if y else 760, height=170 if y else 30))
    return alt.concat(*panels, columns=3)

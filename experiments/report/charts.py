"""The charts of all pages, drawn with Altair. A function takes a frame or rows and returns a chart,
or a list of charts that make up a figure.

A chart is as wide as its place on the page. Its colours come from
`knobwise.experiments.report.page`. Channels are objects such as `alt.X("name:N")`, not strings:
Altair would look up each string in its schema, which takes longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from knobwise.experiments.report.page import OTHERS as OTHER
from knobwise.experiments.report.page import by_hue, domain
from knobwise.experiments.report.words import policy_name, quantity
from knobwise.experiments.results.statistics import pareto_front

DASHED: dict[str, Any] = {"style": "quiet", "strokeWidth": 1.5, "strokeDash": [5, 4]}
"""The style of lines that mark a reference."""
MOST_VALUES = 12
"""A knob with more values than this is drawn with its most used ones and "other"."""
SAME_EVERYWHERE = (
    "controller",
    "budget_aware_static",
    "static_per_dataset",
    "static_mix",
    "best_single",
    "oracle",
)
"""Policies that are drawn in every data set; of all others only the best."""
CLOSE = alt.Scale(zero=False, padding=12)
"""A scale that begins near the smallest number, not at 0."""


def layered(
    *layers: alt.Chart | alt.LayerChart, height: int | alt.Step = 320, **properties: Any
) -> alt.LayerChart:
    """Return one chart of these layers, as wide as its place on the page."""
    # arguments of alt.layer: .properties() would copy all layers
    return alt.layer(*layers, width="container", height=height, **properties)


def colour_of(labels: Sequence[str] | Mapping[str, str], field: str = "policy") -> alt.Color:
    """Return the colour channel of a column, with its legend.

    Args:
        labels: policies or runs, for the palette of `domain`, where a policy has the same colour on
            every page; or other labels by hue: hue → label.
        field: the column that holds the labels.
    """
    if isinstance(labels, Mapping):
        values = list(labels.values())
        scale = alt.Scale(domain=by_hue(labels))
    else:
        values = list(labels)
        scale = alt.Scale(domain=domain(labels))
    # the legend wraps by the width of the container, which axes do not change: a legend that wraps
    # after the layout is cut off. A picture has no container, so there its own width counts
    longest = 6 * max(map(len, values), default=1) + 40
    width = "(containerSize()[0] || width + 60) - 60 + 0 * width"
    columns = alt.ExprRef(f"max(1, floor(({width}) / {longest}))")
    legend = alt.Legend(
        orient="top", title=None, labelLimit=340, columns=columns, symbolOpacity=1, values=values
    )
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


def _tooltip(rows: pl.DataFrame) -> list[alt.Tooltip]:
    tooltip = []
    for name, dtype in rows.schema.items():
        kind = "Q" if dtype.is_numeric() else "N"
        tooltip.append(alt.Tooltip(f"{name}:{kind}"))
    return tooltip


# -- lines -----------------------------------------------------------------------------------------


def _thin_and_named(lines: alt.Chart, width: float, size: int = 0) -> list[alt.Chart]:
    """Draw policies without a colour as thin lines and all others as lines of this width, with dots
    if `size` is not 0."""
    thin = lines.transform_filter(alt.datum.policy == OTHER)
    named = lines.transform_filter(alt.datum.policy != OTHER)
    layers = [thin.mark_line(strokeWidth=1), named.mark_line(strokeWidth=width)]
    if size:
        layers.append(named.mark_circle(size=size, opacity=1))
    return layers


def plane(
    configurations: Sequence[Mapping[str, Any]],
    paths: pl.DataFrame | None = None,
    policies: Sequence[str] = (),
    unit: str = "ms",
    y: str = "accuracy",
) -> alt.LayerChart:
    """Draw mean accuracy or utility against mean latency.

    Args:
        configurations: label, latency_ms, `y` and perhaps samples of each: drawn as dots, with a
            dashed line through those that no other beats.
        paths: columns policy, name, budget_ms, latency_ms and `y`: a line for each policy.
        policies: those with a colour, see `colour_of`.
        unit: of the latencies.
        y: "accuracy" or "utility".
    """
    x = alt.X(
        "latency_ms:Q",
        title=f"mean latency ({unit})",
        scale=CLOSE,
        axis=alt.Axis(labelOverlap=True),
    )
    shares = [cell[y] for cell in configurations]
    scale = CLOSE
    if min(shares) < max(shares) / 5:  # padding would begin the axis below 0
        scale = alt.Scale(zero=True)
    height = alt.Y(f"{y}:Q", title=f"mean {y} (0 to 1)", scale=scale)

    # the configurations, and the line through the best
    columns = ("label", y, "latency_ms", "samples")
    rows = []
    for cell in configurations:
        rows.append({key: cell[key] for key in columns if key in cell})
    dots = pl.DataFrame(rows)
    front = dots.filter(pareto_front(dots[y].to_numpy(), dots["latency_ms"].to_numpy()))
    steps = alt.Chart(front).mark_line(
        style="quiet", strokeWidth=1.5, interpolate="step-after", strokeDash=[4, 3]
    )
    circles = alt.Chart(dots).mark_circle(style="quiet", size=36, opacity=0.55)
    layers = [circles.encode(x, height, tooltip=_tooltip(dots)), steps.encode(x, height)]

    # the policies
    if paths is not None and len(paths):
        line = alt.Chart(paths).encode(
            x, height, colour_of(policies), alt.Detail("name:N"), alt.Order("budget_ms:Q")
        )
        layers += _thin_and_named(line.encode(tooltip=_tooltip(paths)), width=2, size=90)
    return layered(*layers, height=360)


def by_budget(
    rows: pl.DataFrame,
    y: str,
    title: str,
    policies: Sequence[str],
    *,
    percent: bool = False,
    level: float | None = None,
    unit: str = "ms",
) -> alt.LayerChart:
    """Draw a number against the budget: `policies` have a colour, all others are thin and grey.

    Args:
        rows: policy, name, budget_ms, `y`, and low and high where the interval is to be drawn.
        y: the column of the number.
        title: of the vertical axis.
        policies: labels in the order of the legend.
        percent: whether the number is a share.
        level: the height of a dashed line, if any.
        unit: of the budgets.
    """
    # a wide range of budgets is drawn on a logarithmic axis
    positive = [budget for budget in rows["budget_ms"] if budget > 0] or [1.0]
    if max(positive) > 20 * min(positive):
        scale = alt.Scale(type="log")
    else:
        scale = alt.Scale(zero=False, nice=False, padding=12)
    x = alt.X(
        "budget_ms:Q",
        title=f"latency budget ({unit})",
        scale=scale,
        axis=alt.Axis(labelOverlap=True),
    )
    layers = lines(rows, x, y, title, policies, percent)
    if level is not None:
        mark = alt.Chart(pl.DataFrame({"level": [level]})).mark_rule(**DASHED)
        layers.append(mark.encode(alt.Y("level:Q")))
    return layered(*layers)


def by_shots(rows: pl.DataFrame, policies: Sequence[str], trained: int) -> alt.LayerChart:
    """Draw accuracy against the number of demonstrations.

    Args:
        rows: columns policy, name, shots, accuracy, low, high.
        policies: those with a colour; all others are thin and grey.
        trained: the number of demonstrations in training, marked by a dashed line.
    """
    axis = alt.Axis(values=sorted(rows["shots"].unique()), format="d", grid=False)
    x = alt.X(
        "shots:Q",
        title="demonstrations (shots)",
        axis=axis,
        scale=alt.Scale(padding=24, nice=False, zero=False),
    )
    mark = alt.Chart(pl.DataFrame({"shots": [trained]})).mark_rule(**DASHED).encode(x)
    return layered(mark, *lines(rows, x, "accuracy", "accuracy (0 to 1)", policies))


def lines(
    rows: pl.DataFrame, x: alt.X, y: str, title: str, policies: Sequence[str], percent: bool = False
) -> list[alt.Chart]:
    """Return the layers of lines over x, with a band if there are columns low and high.

    The other arguments are those of `by_budget`.
    """
    if percent:
        axis = alt.Axis(format="%")
        scale = alt.Scale(zero=False, nice=False, padding=8)
        digits = ".1%"
    else:
        axis = alt.Axis()
        scale = alt.Scale(zero=False)
        digits = ".3f"
    height = alt.Y(f"{y}:Q", title=title, axis=axis, scale=scale)
    value = alt.Tooltip(f"{y}:Q", format=digits)
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip(x.shorthand), value]
    # a line for each name, in the colour of its policy
    line = alt.Chart(rows).encode(
        x, height, colour_of(policies), alt.Detail("name:N"), tooltip=tooltip
    )
    layers = _thin_and_named(line, width=2.5, size=50)
    if "low" in rows.columns:
        band = alt.Chart(rows.filter(pl.col("policy") != OTHER)).mark_area(opacity=0.12)
        layers.insert(
            0, band.encode(x, alt.Y("low:Q", title=title), colour_of(policies), alt.Y2("high:Q"))
        )
    return layers


def curves(
    points: pl.DataFrame,
    panels: Sequence[str],
    labels: Sequence[str] | Mapping[str, str],
    *,
    colour: str = "policy",
    line: str = "name",
    y: str = "mean",
) -> list[alt.LayerChart]:
    """Draw numbers against the training step, a chart for each panel.

    Args:
        points: panel, `colour`, `line`, step, `y`; low and high for a band; grpo, the step where
            GRPO begins, which gets a dashed line; alone, whether it is the only point of its line.
        panels: the panels that are drawn, in order.
        labels: policies in order, all others being thin and grey; or hue → label.
        colour: the column that a line has its colour by.
        line: the column that tells lines apart.
        y: the column of the number.
    """
    scale = alt.Scale(zero=False)
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=scale)
    height = alt.Y(f"{y}:Q", title=None, scale=scale, axis=alt.Axis(tickCount=4))
    tooltip = [alt.Tooltip(f"{name}:N") for name in (colour, line) if name != "policy"]
    tooltip += [alt.Tooltip("step:Q"), alt.Tooltip(f"{y}:Q", format=".4~g")]
    figure = []
    for panel in panels:
        # each panel has its own data
        rows = points.filter(pl.col("panel") == panel)
        base = alt.Chart(rows).encode(x, colour_of(labels, colour), alt.Detail(f"{line}:N"))
        drawn = base.encode(height, tooltip=tooltip)
        if colour == "policy":
            layers = _thin_and_named(drawn, width=2)
        else:
            layers = [drawn.mark_line(strokeWidth=1.5)]
        if "low" in points.columns:
            band = base.transform_filter(alt.datum.policy != OTHER).mark_area(opacity=0.15)
            layers.insert(0, band.encode(alt.Y("low:Q", scale=scale), alt.Y2("high:Q")))
        if "alone" in points.columns:
            layers.append(drawn.transform_filter(alt.datum.alone).mark_circle(size=60, opacity=1))
        if "grpo" in points.columns and rows["grpo"].is_not_null().any():
            begins = alt.Chart(rows.select("grpo").drop_nulls().unique()).mark_rule(**DASHED)
            layers.insert(0, begins.encode(alt.X("grpo:Q")))
        figure.append(layered(*layers, height=170, title=panel))
    return figure


# -- dots with their intervals ---------------------------------------------------------------------


def dots(
    rows: pl.DataFrame, title: str, colour: alt.Color | None = None, zero: bool = False
) -> alt.LayerChart:
    """Draw numbers with their intervals, one below the other. The axis begins where the numbers do.

    Args:
        rows: name, value, low, high and the column of the colour, in order from the top; `beside`,
            if there is such a column, is text behind the interval.
        title: of the horizontal axis.
        colour: see `colour_of`.
        zero: whether to draw a line at 0.
    """
    base = alt.Chart(rows).encode(
        alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=230))
    )
    marks = base.encode(tooltip=_tooltip(rows))
    if colour is not None:
        marks = marks.encode(colour)
    scale = CLOSE
    axis = alt.Axis()
    if "beside" in rows.columns:  # leave room for the text
        bounds = rows.select(pl.col("low", "high").fill_null(pl.col("value"))).to_numpy()
        low = float(bounds.min())
        high = float(bounds.max())
        axis = alt.Axis(labelExpr=f"datum.value > {high} ? '' : datum.label", tickCount=8)
        scale = alt.Scale(domain=[low, low + 1.2 * (high - low or 1.0)])
    # the interval, then the number on it
    start = alt.X("low:Q", title=title, scale=scale, axis=axis)
    value = alt.X("value:Q", title=title, scale=scale, axis=axis)
    layers = [
        marks.mark_rule(strokeWidth=2).encode(start, alt.X2("high:Q")),
        marks.mark_circle(size=75, opacity=1).encode(value),
    ]
    if zero:
        line = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(style="quiet", strokeDash=[5, 4])
        layers.insert(0, line.encode(alt.X("zero:Q")))
    if "beside" in rows.columns:
        text = base.mark_text(style="quiet", align="left", dx=8)
        layers.append(text.encode(alt.X("high:Q"), alt.Text("beside:N")))
    return layered(*layers, height=alt.Step(24))


def dots_of_policies(rows: Sequence[Mapping[str, Any]], metric: str, title: str) -> alt.LayerChart:
    """Draw a number of each policy with its interval, in the colours of the policies.

    Args:
        rows: policy, the metric and its interval, of each.
        metric: the key of the number.
        title: of the horizontal axis.
    """
    drawn = []
    for row in rows:
        low, high = row[f"{metric}_ci95"]
        dot = {"name": policy_name(row["policy"]), "value": row[metric], "low": low, "high": high}
        drawn.append(dot)
    colour = colour_of([dot["name"] for dot in drawn], "name").legend(None)
    return dots(pl.DataFrame(drawn), title, colour)


def by_dataset(judged: Sequence[Mapping[str, Any]]) -> list[alt.LayerChart]:
    """Draw mean utility and its interval for the most important policies, a chart for each data
    set."""
    # weaker baselines share a name: which is best differs between data sets
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in judged:
        policy = row["policy"] if row["policy"] in SAME_EVERYWHERE else "best_other"
        rows_of.setdefault(row["dataset"], []).append({**row, "policy": policy})
    return [
        dots_of_policies(rows, "utility", "utility (0 to 1)").properties(title=dataset)
        for dataset, rows in rows_of.items()
    ]


# -- latencies -------------------------------------------------------------------------------------


def timeline(requests: pl.DataFrame) -> list[alt.LayerChart]:
    """Draw latency / budget of requests in their order, and below it the tracked level.

    Args:
        requests: latency_ms, budget_ms, and the `level` that a tracker expects: latency here /
            latency predicted.
    """
    rows = requests.with_row_index("request", 1).with_columns(
        share=pl.col("latency_ms") / pl.col("budget_ms")
    )
    chart = alt.Chart(rows)
    x = alt.X("request:Q")
    share = alt.Y("share:Q", title="latency / budget", scale=alt.Scale(type="log", padding=8))
    circles = chart.mark_circle(size=14, opacity=0.7).encode(x, share, tooltip=_tooltip(rows))
    budget = alt.Chart(pl.DataFrame({"share": [1.0]})).mark_rule(**DASHED).encode(share)
    level = chart.mark_line(strokeWidth=1.5).encode(
        x, alt.Y("level:Q", title="tracked level", scale=CLOSE)
    )
    return [layered(circles, budget, height=240), layered(level, height=110)]


# -- knobs -----------------------------------------------------------------------------------------


def knob_usage(
    runs: Sequence[tuple[str, str, Mapping[str, Any]]], unit: str = "ms", outlined: str = ""
) -> list[alt.LayerChart]:
    """Draw the share of the requests that gets each value of a knob, by budget: for each knob a
    chart for each run. [] where no usage is known.

    Args:
        runs: label, policy and results of each.
        unit: of the budgets.
        outlined: the policy whose most frequent values are outlined, in every run.
    """
    usage = _usage_of(runs, outlined)
    if usage is None:
        return []
    figure = []
    for knob in usage["knob"].unique(maintain_order=True):
        # a chart for each knob and run
        part, values = _most_used(usage.filter(pl.col("knob") == knob))
        x = alt.X("budget:O", title=f"latency budget ({unit})", sort=alt.SortField("budget_ms"))
        x = x.axis(labelAngle=0)
        y = alt.Y("value:O", title=knob, sort=values[::-1], scale=alt.Scale(domain=values[::-1]))
        for label, policy, _ in runs:
            rows = part.filter(pl.col("run") == label)
            layers = _usage_cells(rows.filter(pl.col("policy") == policy), x, y)
            edges = rows.filter(pl.col("policy") == outlined)
            # the most frequent value at each budget
            edges = edges.filter(pl.col("share") == pl.col("share").max().over("budget_ms"))
            if len(edges):
                layers.append(_outlines(edges, policy_name(outlined), x, y))
            title = {"title": label} if len(runs) > 1 else {}
            figure.append(layered(*layers, height=alt.Step(24), **title))
    return figure


def _usage_of(
    runs: Sequence[tuple[str, str, Mapping[str, Any]]], outlined: str
) -> pl.DataFrame | None:
    """Return the rows `knob_usage` of all runs that are drawn, with the columns run and budget (in
    words); None where there are none."""
    shares = []
    for label, policy, results in runs:
        for row in results.get("knob_usage", []):
            if row["policy"] in (policy, outlined):
                shares.append(row | {"run": label, "value": str(row["value"])})
    if not shares:
        return None
    usage = pl.DataFrame(shares, infer_schema_length=None).unique(maintain_order=True)
    names = {budget: quantity(budget, "").strip() for budget in usage["budget_ms"].unique()}
    budget = pl.col("budget_ms").replace_strict(names, return_dtype=pl.String)
    return usage.with_columns(budget.alias("budget"))


def _most_used(usage: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Return the usage of one knob, with rare values joined as "other", and its values in order."""
    shares = usage.group_by("value").agg(pl.col("share").sum())
    used = shares.sort("share", descending=True)["value"]
    values = sorted(used.head(MOST_VALUES).to_list(), key=in_order)
    if len(used) > MOST_VALUES:
        value = pl.when(pl.col("value").is_in(values).not_()).then(pl.lit("other"))
        usage = usage.with_columns(value.otherwise(pl.col("value")).alias("value"))
        values.append("other")
    keys = ("run", "policy", "budget_ms", "budget", "value")
    return usage.group_by(*keys, maintain_order=True).agg(pl.col("share").sum()), values


def _usage_cells(rows: pl.DataFrame, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Draw a cell for each budget and value, the darker the larger its share, with the share in
    it."""
    share = alt.Tooltip("share:Q", format=".1%")
    tooltip = [alt.Tooltip("budget:O"), alt.Tooltip("value:O"), share]
    cells = alt.Chart(rows).encode(x, y, tooltip=tooltip)
    opacity = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0, 0.6]), legend=None)
    text = cells.transform_filter(alt.datum.share >= 0.005).mark_text()
    return [cells.mark_rect().encode(opacity), text.encode(alt.Text("share:Q", format=".0%"))]


def _outlines(rows: pl.DataFrame, name: str, x: alt.X, y: alt.Y) -> alt.Chart:
    """Draw frames around cells in the colour of a policy."""
    rows = rows.with_columns(policy=pl.lit(name))
    stroke = alt.Stroke("policy:N", scale=colour_of([name])["scale"], legend=None)
    return alt.Chart(rows).mark_rect(filled=False, strokeWidth=2).encode(x, y, stroke)


def in_order(value: object) -> tuple[bool, float, str]:
    """Return a sort key for knob values written as text: numbers by size, then names."""
    try:
        return False, float(str(value)), ""
    except ValueError:
        return True, 0.0, str(value)


def knob_effects(knobs: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[alt.LayerChart]:
    """Draw mean accuracy, then latency, for each value of each knob.

    Args:
        knobs: name → values, and the mean accuracy and latency_ms of each.
    """
    # one scale for all knobs, so that a knob which does little looks like it
    scales = {}
    for y in ("accuracy", "latency_ms"):
        means = np.concatenate([knob[y] for knob in knobs.values()])
        bounds = [float(means.min()), float(means.max())]
        scales[y] = alt.Scale(domain=bounds, nice=True, zero=False, padding=6)
    figure = []
    for name, knob in knobs.items():
        values = list(map(str, knob["values"]))
        frame = pl.DataFrame(
            {"value": values, "accuracy": knob["accuracy"], "latency_ms": knob["latency_ms"]}
        )
        names = any(isinstance(value, str) for value in knob["values"])
        axis = alt.Axis(labelAngle=-40 if names else 0, labelLimit=90, labelOverlap=True)
        base = alt.Chart(frame).encode(
            alt.X("value:O", title=name, sort=values, axis=axis), tooltip=_tooltip(frame)
        )
        for y, title in (("accuracy", "mean accuracy"), ("latency_ms", "mean latency (ms)")):
            height = alt.Y(f"{y}:Q", title=title, scale=scales[y], axis=alt.Axis(tickCount=4))
            line = base.encode(height)
            layers = [line.mark_circle(size=50, opacity=1)]
            if not names:  # names have no order that a line could follow
                layers.insert(0, line.mark_line(strokeWidth=2))
            figure.append(layered(*layers, height=140))
    return figure


def coverage(frames: Iterable[pl.DataFrame]) -> list[alt.LayerChart]:
    """Draw how much was profiled, a chart for each frame; white is nothing.

    Args:
        frames: a column for each of one or two knobs, under its name, and share (0 to 1).
    """
    colour = alt.Color(
        "share:Q", title="profiled", scale=alt.Scale(domain=[0, 1]), legend=alt.Legend(format="%")
    )
    figure = []
    for frame in frames:
        names = [name for name in frame.columns if name != "share"]
        x = alt.X(f"{names[0]}:O", axis=alt.Axis(labelAngle=0, labelOverlap=True))
        y = [alt.Y(f"{name}:O", sort="descending") for name in names[1:]]
        tooltip = [*map(alt.Tooltip, names), alt.Tooltip("share:Q", format=".1%")]
        cells = alt.Chart(frame).mark_rect().encode(x, *y, colour, tooltip=tooltip)
        figure.append(layered(cells, height=170 if y else 30))
    return figure

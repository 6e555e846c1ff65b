"""The charts of all pages, drawn with Altair. A function takes a frame or rows and returns a chart,
or a list of charts that make up a figure.

A chart is as wide as its place on the page; what all share is `CONFIG` in
`knobwise.experiments.report.page`. Channels are objects such as `alt.X("name:N")`, not strings:
Altair would look up each string in its schema, which takes longer than all the rest.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.statistics import pareto_front
from knobwise.experiments.evidence.task import Row
from knobwise.experiments.report.page import HUES, colours_of

GREY = HUES["grey"]
DASHED = {"color": GREY, "strokeWidth": 1.5, "strokeDash": [5, 4]}
"""The style of lines that mark a reference."""
CLOSE = alt.Scale(zero=False, nice=False, padding=12)
"""A scale that begins near the smallest number, not at 0."""
FARTHEST = 6
"""The largest residual in a chart, in expected spreads."""


def layer_charts(
    *layers: alt.Chart | alt.LayerChart, height: int | alt.Step = 220, **properties: Any
) -> alt.LayerChart:
    """Return one chart of these layers, as wide as its place on the page."""
    # arguments of alt.layer: .properties() would copy all layers
    return alt.layer(*layers, width="container", height=height, **properties)


def titled(title: str) -> list[str]:
    """Return the lines of a title, so that it is whole above a narrow chart."""
    return textwrap.wrap(title, 32)


def colour_of(colours: Mapping[str, str], field: str = "policy") -> alt.Color:
    """Return the colour channel of a column, by label → colour, with its legend."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", scale=scale)


def dashed(channel: alt.X | alt.Y, column: str, values: Sequence[float | None]) -> alt.Chart:
    """Draw a dashed line across the chart at each of these values of a channel."""
    return alt.Chart(pl.DataFrame({column: values})).mark_rule(**DASHED).encode(channel)


# -- lines -----------------------------------------------------------------------------------------


def lines(rows: pl.DataFrame, x: alt.X, y: alt.Y, size: int = 60) -> list[alt.Chart]:
    """Return the layers of a line for each policy with its points on it, and a band if there are
    columns low and high.

    Args:
        rows: the points: policy and the columns of the channels; the points of a line stand in
            their order. A row without a number is left out, and so is a policy without rows. A
            column `colour` says that of a policy where others on the page have taken the usual one.
        x: the horizontal axis.
        y: the vertical axis.
        size: of the points.
    """
    rows = rows.drop_nulls(y["shorthand"].partition(":")[0]).with_row_index("rank")
    colours = colours_of(rows["policy"].unique(maintain_order=True).to_list())
    if "colour" in rows.columns:
        colours = dict(rows.select("policy", "colour").iter_rows())
    colour = colour_of(colours)
    base = alt.Chart(rows).encode(x, colour)
    points = base.mark_circle(size=size, opacity=1).encode(y)
    layers = [base.mark_line().encode(y, alt.Order("rank:Q")), points]
    if "low" in rows.columns and rows["low"].is_not_null().any():
        # an area has no order: it would be cut into one for each point
        low = alt.Y("low:Q", title=y["title"], scale=y["scale"])
        layers.insert(0, base.mark_area(opacity=0.13).encode(low, alt.Y2("high:Q")))
    return layers


def plane(
    configurations: Sequence[Row], paths: pl.DataFrame | None = None, unit: str = "ms"
) -> alt.LayerChart:
    """Draw mean accuracy against mean latency.

    Args:
        configurations: label, latency_ms and accuracy of each: drawn as dots, with a dashed line
            through those that no other beats.
        paths: columns policy, latency_ms and accuracy: a line for each policy.
        unit: of the latencies.
    """
    rows = pl.DataFrame(configurations, schema=["label", "accuracy", "latency_ms"])
    title = in_words(f"mean latency ({unit})", unit)
    x = alt.X("latency_ms:Q", title=title, scale=CLOSE)
    # without padding, which could begin the axis below 0
    y = alt.Y("accuracy:Q", title="mean accuracy (0 to 1)", scale=alt.Scale(zero=False))

    # the configurations, and the line through those that no other beats
    front = rows.filter(pareto_front(rows["accuracy"].to_numpy(), rows["latency_ms"].to_numpy()))
    steps = alt.Chart(front).mark_line(interpolate="step-after", **DASHED)
    circles = alt.Chart(rows).mark_circle(color=GREY, size=24)
    layers = [circles.encode(x, y, alt.Detail("label:N")), steps.encode(x, y)]
    if paths is not None:
        layers += lines(paths, x, y)
    return layer_charts(*layers)


def by_condition(
    rows: pl.DataFrame,
    condition: str,
    y: str,
    title: str,
    *,
    percent: bool = False,
    level: float | None = None,
    trained: int | None = None,
    unit: str = "ms",
) -> alt.LayerChart:
    """Draw a number against the budget or the number of demonstrations.

    Args:
        rows: policy, the condition, `y`, and low and high where the interval is to be drawn.
        condition: the column of the condition, "budget_ms" or "shots".
        y: the column of the number.
        title: of the vertical axis.
        percent: whether the number is a share.
        level: the height of a dashed line, if any.
        trained: the number of demonstrations in training, marked by a dashed line.
        unit: of the budgets.
    """
    values = rows[condition].unique().to_list()
    axis = alt.Axis()
    scale = CLOSE
    limit = in_words(f"latency budget ({unit})", unit)
    if condition == "shots":
        limit = "demonstrations (shots)"
        axis = alt.Axis(values=sorted(values), format="d", grid=False)
    elif 0 < 20 * min(values) < max(values):
        # a wide range of budgets
        scale = alt.Scale(type="log")
    x = alt.X(f"{condition}:Q", title=limit, scale=scale, axis=axis)
    height = alt.Y(f"{y}:Q", title=title, scale=CLOSE)
    if percent:
        height = height.axis(format="%")
    layers = lines(rows.sort(condition, maintain_order=True), x, height)
    if level is not None:
        layers.append(dashed(alt.Y("level:Q"), "level", [level]))
    if trained is not None:
        layers.append(dashed(x, condition, [trained]))
    return layer_charts(*layers)


def curves(points: pl.DataFrame, stages: Mapping[str, int]) -> list[alt.LayerChart]:
    """Draw numbers against the training step, a chart for each panel.

    Args:
        points: panel, policy, step, value, and low and high for a band.
        stages: name → the step where a stage of training begins, marked by a dashed line.
    """
    scale = alt.Scale(zero=False)
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=scale)
    y = alt.Y("value:Q", title=None, scale=scale, axis=alt.Axis(tickCount=4))
    drawn = []
    # each panel has its own data
    for (panel,), rows in points.group_by("panel", maintain_order=True):
        start = float(rows["step"].min() or 0)  # type: ignore[arg-type]
        first = max((begin for begin in stages.values() if begin <= start), default=0)
        begins = [(name, begin) for name, begin in stages.items() if begin >= first]
        frame = pl.DataFrame(begins, schema=["stage", "begins"], orient="row")
        rules = alt.Chart(frame).encode(alt.X("begins:Q"))
        names = rules.mark_text(align="left", dx=3, dy=6, color=GREY, fontSize=10)
        marks = [rules.mark_rule(**DASHED), names.encode(alt.Text("stage:N"), y=alt.value(0))]
        layers = [*marks[: 2 * len(begins)], *lines(rows, x, y, size=9)]
        drawn.append(layer_charts(*layers, height=170, title=titled(str(panel))))
    return drawn


def predictions(rows: pl.DataFrame, x: str, y: str, **properties: Any) -> alt.LayerChart:
    """Draw observed shares against predicted probabilities, and a dashed diagonal, on which the two
    are equal.

    Args:
        rows: columns policy, predicted and observed.
        x: the title of the horizontal axis.
        y: the title of the vertical axis.
        properties: of the chart.
    """
    corners = [min(*rows["predicted"], *rows["observed"]), 1.0]
    axis = alt.Axis(format="%", tickCount=5)
    channels = [
        alt.X("predicted:Q", title=x, scale=alt.Scale(zero=False), axis=axis),
        alt.Y("observed:Q", title=y, scale=alt.Scale(zero=False), axis=axis),
    ]
    diagonal = alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners}))
    diagonal = diagonal.mark_line(**DASHED).encode(*channels)
    return layer_charts(diagonal, *lines(rows, *channels), **properties)


def difficulty(groups: pl.DataFrame, samples: pl.DataFrame, unit: str) -> alt.LayerChart:
    """Draw the latency of the choice against difficulty.

    Args:
        groups: policy, difficulty_ms, policy_ms, low and high: a line each, with a band.
        samples: difficulty_ms and policy_ms of single samples, drawn as dots behind the lines.
        unit: of the latencies.
    """
    title = in_words(f"latency of the cheapest right configuration ({unit})", unit)
    x = alt.X("difficulty_ms:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=12))
    y = alt.Y("policy_ms:Q", title=in_words(f"latency of the choice ({unit})", unit), scale=CLOSE)
    dots = [alt.Chart(samples).mark_circle(color=GREY, size=14, opacity=0.4).encode(x, y)]
    return layer_charts(*dots * bool(len(samples)), *lines(groups, x, y))


# -- dots with their intervals ---------------------------------------------------------------------


def dots(
    rows: pl.DataFrame, title: str, colour: alt.Color | None = None, zero: bool = False
) -> alt.LayerChart:
    """Draw numbers with their intervals, one below the other. The axis begins where the numbers do.

    Args:
        rows: name, value, low, high and the column of the colour, in order from the top.
        title: of the horizontal axis.
        colour: see `colour_of`.
        zero: whether to draw a line at 0.
    """
    y = alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=280))
    base = alt.Chart(rows).encode(y, color=colour or alt.value(HUES["blue"]))
    interval = alt.X("low:Q", title=title, scale=CLOSE, axis=alt.Axis(tickCount=7))
    zeros = [dashed(alt.X("zero:Q"), "zero", [0.0])] * zero
    return layer_charts(
        *zeros,
        base.mark_rule(strokeWidth=2).encode(interval, alt.X2("high:Q")),
        base.mark_circle(size=75, opacity=1).encode(alt.X("value:Q")),
        height=alt.Step(24),
    )


def dots_of_policies(rows: pl.DataFrame, title: str) -> alt.LayerChart:
    """Draw a number of each policy with its interval, in the colours of the policies.

    Args:
        rows: name, value, low, high of each.
        title: of the horizontal axis.
    """
    colour = colour_of(colours_of(rows["name"].to_list()), "name").legend(None)
    return dots(rows, title, colour)


# -- latencies -------------------------------------------------------------------------------------


def timeline(requests: pl.DataFrame) -> list[alt.LayerChart]:
    """Draw latency / budget of requests in their order, and below it the tracked level.

    Args:
        requests: latency_ms, budget_ms and `level`, the factor on expected latencies that a tracker
            allowed for.
    """
    share = pl.col("latency_ms") / pl.col("budget_ms")
    rows = requests.with_row_index("request", 1).with_columns(share=share)
    chart = alt.Chart(rows).encode(alt.X("request:Q", scale=CLOSE), color=alt.value(HUES["blue"]))
    scale = alt.Scale(type="log", padding=8)
    y = alt.Y("share:Q", title="latency / budget", scale=scale, axis=alt.Axis(tickCount=5))
    dots = chart.mark_circle(size=14, opacity=0.7).encode(y)
    level = alt.Y("level:Q", title="tracked level", scale=CLOSE, axis=alt.Axis(tickCount=4))
    return [
        layer_charts(dots, dashed(y, "share", [1.0]), height=240),
        layer_charts(chart.mark_line(strokeWidth=1.5).encode(level), height=110),
    ]


def residual_chart(requests: pl.DataFrame) -> alt.LayerChart:
    """Draw the distribution of the column `residual`, and dashed the standard normal one; residuals
    beyond ±`FARTHEST` count as such."""
    edges = np.arange(-FARTHEST, FARTHEST + 0.1, 0.25)
    counts, _ = np.histogram(requests["residual"].clip(-FARTHEST, FARTHEST), edges)
    middle = (edges[1:] + edges[:-1]) / 2
    normal = 0.25 * np.exp(-(middle**2) / 2) / math.sqrt(2 * math.pi)
    columns = {"from": edges[:-1], "to": edges[1:], "middle": middle, "normal": normal}
    chart = alt.Chart(pl.DataFrame(columns | {"share": counts / len(requests)}))
    x = alt.X("from:Q", bin="binned", title="residual, in expected spreads")
    y = alt.Y("share:Q", title="share of the requests", axis=alt.Axis(format="%"))
    return layer_charts(
        chart.mark_bar(color=HUES["blue"]).encode(x, y, alt.X2("to:Q")),
        chart.mark_line(**DASHED).encode(alt.X("middle:Q"), alt.Y("normal:Q")),
        height=220,
    )


# -- knobs -----------------------------------------------------------------------------------------


def knob_usage(shares: pl.DataFrame, labels: Sequence[str], limit: str) -> list[alt.LayerChart]:
    """Draw the share of the requests that gets each value of a knob, by condition: a row of charts
    for each knob, with one for each label.

    Args:
        shares: columns policy, knob, value (of any type), condition and share; conditions are texts
            in their order.
        labels: of the policies or runs.
        limit: the title of the horizontal axis.
    """
    figure = []
    order = shares["condition"].unique(maintain_order=True).to_list()
    x = alt.X("condition:O", title=limit, sort=order)
    # a sum of shares may be a little more than 1, for which a free scale would add a step
    whole = alt.Scale(domain=[0, 1])
    y = alt.Y("share:Q", title=None, axis=alt.Axis(format="%", tickCount=3), scale=whole)
    for (knob,), rows in shares.group_by("knob", maintain_order=True):
        # the same colours for all labels: names have different hues, numbers go from dark to light
        values = rows["value"].unique(maintain_order=True).to_list()
        scheme = "tableau10"
        if all(re.fullmatch(r"-?[\d.]+(e-?\d+)?", value) for value in values):
            values.sort(key=float)
            scheme = "viridis"
        ranked = rows.with_columns(rank=pl.col("value").replace_strict(values, range(len(values))))
        colour = alt.Color("value:O", scale=alt.Scale(domain=values, scheme=scheme))
        for label in labels:
            bars = alt.Chart(ranked.filter(policy=label)).mark_bar()
            bars = bars.encode(x, y, colour, alt.Order("rank:Q"))
            title = {"text": titled(str(knob)), "subtitle": titled(label)}
            figure.append(layer_charts(bars, height=90, title=title))
    return figure

"""The charts of all pages, drawn with Altair. A function takes a frame or rows and returns a chart,
or a list of charts that make up a figure.

A chart is as wide as its place on the page. Its colours come from
`knobwise.experiments.report.page`. Channels are objects such as `alt.X("name:N")`, not strings:
Altair would look up each string in its schema, which takes longer than all the rest.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from knobwise.experiments.report.page import OTHERS as OTHER
from knobwise.experiments.report.page import by_hue, domain
from knobwise.experiments.report.words import policy_name, quantity
from knobwise.experiments.results.problem import Results, Row
from knobwise.experiments.results.statistics import pareto_front

DASHED = {"style": "quiet", "strokeWidth": 1.5, "strokeDash": [5, 4]}
"""The style of lines that mark a reference."""
MOST_VALUES = 12
"""A knob with more values than this is drawn with its most used ones and "other"."""
CLOSE = alt.Scale(zero=False, nice=False, padding=12)
"""A scale that begins near the smallest number, not at 0."""
SPARSE = alt.Axis(labelOverlap=True)
"""An axis that leaves out labels rather than print one over another."""


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
    values = list(labels)
    if isinstance(labels, Mapping):
        values = list(labels.values())
        scale = alt.Scale(domain=by_hue(labels))
    else:
        scale = alt.Scale(domain=domain(values))
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
    """Show all columns beside the pointer."""
    tooltip = []
    for name, kind in rows.schema.items():
        if kind.is_float():
            tooltip.append(alt.Tooltip(f"{name}:Q", format=".4~r"))
        else:
            tooltip.append(alt.Tooltip(f"{name}:N"))
    return tooltip


def dashed(channel: alt.X | alt.Y, column: str, values: Sequence[float | None]) -> alt.Chart:
    """Draw a dashed line across the chart at each of these values of a channel."""
    return alt.Chart(pl.DataFrame({column: values})).mark_rule(**DASHED).encode(channel)


# -- lines -----------------------------------------------------------------------------------------


def lines(
    rows: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    labels: Sequence[str] | Mapping[str, str],
    *,
    colour: str = "policy",
    line: str = "name",
    dots: bool = True,
) -> list[alt.Chart]:
    """Return the layers of lines: a band where there are columns low and high, policies without a
    colour thin and grey, all others thick.

    Args:
        rows: the points, with the columns of x, y, `colour` and `line`; `budget_ms`, if there is
            such a column, is the order of the points of a line.
        x: the horizontal axis.
        y: the vertical axis.
        labels: see `colour_of`.
        colour: the column that a line has its colour by.
        line: the column that tells lines apart.
        dots: whether to draw the points, too.
    """
    order = [alt.Order("budget_ms:Q")] * ("budget_ms" in rows.columns)
    base = alt.Chart(rows).encode(x, colour_of(labels, colour), alt.Detail(f"{line}:N"))
    columns = [axis.shorthand.removesuffix(":Q") for axis in (x, y)]
    drawn = base.encode(y, *order, tooltip=_tooltip(rows.select(colour, line, *columns)))
    # what has no colour of its own stays in the background
    has_colour = alt.datum[colour] != OTHER
    thick = drawn.transform_filter(has_colour)
    thin = drawn.transform_filter(alt.datum[colour] == OTHER)
    layers = [thin.mark_line(strokeWidth=1), thick.mark_line(strokeWidth=2)]
    if "low" in rows.columns:
        # an area has no order: it would be cut into one for each point
        band = base.transform_filter(has_colour).mark_area(opacity=0.13)
        low = alt.Y("low:Q", title=y["title"], scale=y["scale"])
        layers.insert(0, band.encode(low, alt.Y2("high:Q")))
    if dots:
        # equal numbers would hide each other, so each policy has its dots a little aside
        coloured = [*dict.fromkeys(labels.values() if isinstance(labels, Mapping) else labels)]
        for i, label in enumerate(coloured):
            aside = 5 * (i - (len(coloured) - 1) / 2)
            of_label = thick.transform_filter(alt.datum[colour] == label)
            layers.append(of_label.mark_circle(size=60, opacity=1, xOffset=aside))
    return layers


def plane(
    configurations: Sequence[Row],
    paths: pl.DataFrame | None = None,
    policies: Sequence[str] = (),
    unit: str = "ms",
    y: str = "accuracy",
) -> alt.LayerChart:
    """Draw mean accuracy or utility against mean latency.

    Args:
        configurations: label, latency_ms and `y` of each: drawn as dots, with a dashed line through
            those that no other beats.
        paths: columns policy, name, budget_ms, latency_ms and `y`: a line for each policy.
        policies: those with a colour, see `colour_of`.
        unit: of the latencies.
        y: "accuracy" or "utility".
    """
    rows = pl.DataFrame(configurations, schema=["label", y, "latency_ms"])
    x = alt.X("latency_ms:Q", title=f"mean latency ({unit})", scale=CLOSE, axis=SPARSE)
    # without padding, which could begin the axis below 0
    height = alt.Y(f"{y}:Q", title=f"mean {y} (0 to 1)", scale=alt.Scale(zero=False))

    # the configurations, and the line through those that no other beats
    front = rows.filter(pareto_front(rows[y].to_numpy(), rows["latency_ms"].to_numpy()))
    steps = alt.Chart(front).mark_line(interpolate="step-after", **DASHED)
    circles = alt.Chart(rows).mark_circle(style="quiet", size=36, opacity=0.55)
    layers = [circles.encode(x, height, tooltip=_tooltip(rows)), steps.encode(x, height)]
    # the policies
    if paths is not None:
        layers += lines(paths.drop("low", "high", strict=False), x, height, policies)
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
    scale = CLOSE
    if max(positive) > 20 * min(positive):
        scale = alt.Scale(type="log")
    x = alt.X("budget_ms:Q", title=f"latency budget ({unit})", scale=scale, axis=SPARSE)
    height = alt.Y(f"{y}:Q", title=title, scale=CLOSE)
    if percent:
        height = height.axis(format="%")
    layers = lines(rows, x, height, policies)
    if level is not None:
        layers.append(dashed(alt.Y("level:Q"), "level", [level]))
    return layered(*layers)


def by_shots(rows: pl.DataFrame, policies: Sequence[str], trained: int) -> alt.LayerChart:
    """Draw accuracy against the number of demonstrations.

    Args:
        rows: columns policy, name, shots, accuracy, low, high.
        policies: those with a colour; all others are thin and grey.
        trained: the number of demonstrations in training, marked by a dashed line.
    """
    axis = alt.Axis(values=sorted(rows["shots"].unique()), format="d", grid=False)
    x = alt.X("shots:Q", title="demonstrations (shots)", axis=axis, scale=CLOSE)
    height = alt.Y("accuracy:Q", title="accuracy (0 to 1)", scale=CLOSE)
    return layered(dashed(x, "shots", [trained]), *lines(rows, x, height, policies))


def curves(
    points: pl.DataFrame,
    labels: Sequence[str] | Mapping[str, str],
    begins: Sequence[int],
    colour: str = "policy",
    line: str = "name",
) -> list[alt.LayerChart]:
    """Draw numbers against the training step, a chart for each panel.

    Args:
        points: panel, `colour`, `line`, step, value; low and high for a band.
        labels: policies in order, all others being thin and grey; or hue → label.
        begins: the steps where GRPO begins, marked by dashed lines.
        colour: the column that a line has its colour by.
        line: the column that tells lines apart.
    """
    scale = alt.Scale(zero=False)
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=scale)
    y = alt.Y("value:Q", title=None, scale=scale, axis=alt.Axis(tickCount=4))
    figure = []
    # each panel has its own data
    for rows in points.partition_by("panel", maintain_order=True):
        layers = lines(rows, x, y, labels, colour=colour, line=line, dots=False)
        # a line of one point would not be seen
        alone = alt.Chart(rows.filter(pl.len().over(colour, line) == 1)).mark_circle(size=60)
        layers.append(alone.encode(x, y, colour_of(labels, colour)))
        if begins:
            layers.insert(0, dashed(alt.X("grpo:Q"), "grpo", begins))
        figure.append(layered(*layers, height=170, title=rows["panel"][0]))
    return figure


def predictions(rows: pl.DataFrame, x: str, y: str, begin: float) -> alt.LayerChart:
    """Draw observed shares against predicted probabilities, and a dashed diagonal, on which the two
    are equal.

    Args:
        rows: columns predicted and observed.
        x: the title of the horizontal axis.
        y: the title of the vertical axis.
        begin: where the axes begin.
    """
    corners = [begin, 1.0]
    scale = alt.Scale(domain=corners, nice=False)
    axis = alt.Axis(format="%", tickCount=5)
    channels = [
        alt.X("predicted:Q", title=x, scale=scale, axis=axis),
        alt.Y("observed:Q", title=y, scale=scale, axis=axis),
    ]
    diagonal = alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners}))
    line = alt.Chart(rows).mark_line(point=True, strokeWidth=1.5)
    return layered(
        diagonal.mark_line(**DASHED).encode(*channels),
        line.encode(*channels, tooltip=_tooltip(rows)),
    )


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
    base = alt.Chart(rows).encode(y, tooltip=_tooltip(rows))
    if colour is not None:
        base = base.encode(colour)
    interval = alt.X("low:Q", title=title, scale=CLOSE, axis=alt.Axis(tickCount=7))
    zeros = [dashed(alt.X("zero:Q"), "zero", [0.0])] * zero
    return layered(
        *zeros,
        base.mark_rule(strokeWidth=2).encode(interval, alt.X2("high:Q")),
        base.mark_circle(size=75, opacity=1).encode(alt.X("value:Q")),
        height=alt.Step(24),
    )


def dots_of_policies(rows: Iterable[Row], metric: str, title: str) -> alt.LayerChart:
    """Draw a number of each policy with its interval, in the colours of the policies.

    Args:
        rows: policy, the metric and its interval, of each.
        metric: the key of the number.
        title: of the horizontal axis.
    """
    names = []
    drawn = []
    for row in rows:
        names.append(policy_name(row["policy"]))
        drawn.append([names[-1], row[metric], *row[f"{metric}_ci95"]])
    frame = pl.DataFrame(drawn, schema=["name", "value", "low", "high"], orient="row")
    return dots(frame, title, colour_of(names, "name").legend(None))


def by_dataset(judged: Sequence[Row]) -> list[alt.LayerChart]:
    """Draw mean utility and its interval for the most important policies, a chart for each data
    set."""
    figure = []
    for dataset, rows in itertools.groupby(judged, key=operator.itemgetter("dataset")):
        chart = dots_of_policies(rows, "utility", "utility (0 to 1)")
        figure.append(chart.properties(title=dataset))
    return figure


# -- latencies -------------------------------------------------------------------------------------


def timeline(requests: pl.DataFrame) -> list[alt.LayerChart]:
    """Draw latency / budget of requests in their order, and below it the tracked level.

    Args:
        requests: latency_ms, budget_ms, and the `level` that a tracker expects: latency here /
            latency predicted.
    """
    share = pl.col("latency_ms") / pl.col("budget_ms")
    rows = requests.with_row_index("request", 1).with_columns(share=share)
    chart = alt.Chart(rows).encode(alt.X("request:Q"), tooltip=_tooltip(rows))
    y = alt.Y("share:Q", title="latency / budget", scale=alt.Scale(type="log", padding=8))
    level = alt.Y("level:Q", title="tracked level", scale=CLOSE)
    circles = chart.mark_circle(size=14, opacity=0.7).encode(y)
    return [
        layered(circles, dashed(y, "share", [1.0]), height=240),
        layered(chart.mark_line(strokeWidth=1.5).encode(level), height=110),
    ]


# -- knobs -----------------------------------------------------------------------------------------


def knob_usage(
    runs: Sequence[tuple[str, str, Results]], unit: str = "ms", outlined: str = ""
) -> list[alt.LayerChart]:
    """Draw the share of the requests that gets each value of a knob, by budget: for each knob a
    chart for each run. [] where no usage is known.

    Args:
        runs: label, policy and results of each.
        unit: of the budgets.
        outlined: the policy whose most frequent values are outlined, in every run.
    """
    shares = []
    for label, policy, results in runs:
        for row in results.get("knob_usage", []):
            if row["policy"] in (policy, outlined):
                cell = {"run": label, "budget": quantity(row["budget_ms"], "")}
                cell |= {"outlined": row["policy"] == outlined, "value": str(row["value"])}
                shares.append(row | cell)
    if not shares:
        return []
    figure = []
    frame = pl.DataFrame(shares, infer_schema_length=None)
    for (knob,), rows in frame.group_by("knob", maintain_order=True):
        usage = _most_used(rows)
        values = sorted(usage["value"].unique(), key=in_order, reverse=True)
        x = alt.X("budget:O", title=f"latency budget ({unit})", sort=alt.SortField("budget_ms"))
        # above the cells, since a long name is higher than a few of them
        y = alt.Y("value:O", title=None, sort=values, scale=alt.Scale(domain=values))
        for label, _, _ in runs:
            title = f"{knob}, {label}" if len(runs) > 1 else knob
            cells = alt.Chart(usage.filter(pl.col("run") == label))
            layers = _usage_cells(cells, x.axis(labelAngle=0), y, policy_name(outlined))
            figure.append(layered(*layers, height=alt.Step(24), title=title))
    return figure


def _most_used(usage: pl.DataFrame) -> pl.DataFrame:
    """Return the usage of one knob, with rare values joined as "other"."""
    usage = usage.unique(maintain_order=True)
    share = pl.col("share")
    shares = usage.group_by("value").agg(share.sum())
    rare = shares.sort("share", descending=True)["value"][MOST_VALUES:]
    value = pl.col("value").replace(rare, "other")
    keys = ("run", "outlined", "budget_ms", "budget", "value")
    cells = usage.with_columns(value).group_by(*keys, maintain_order=True)
    most = share == share.max().over("run", "outlined", "budget_ms")
    return cells.agg(share.sum()).with_columns(most=most)


def _usage_cells(chart: alt.Chart, x: alt.X, y: alt.Y, outlined: str) -> list[alt.Chart]:
    """Draw a cell for each budget and value, the darker the larger its share, with the share in it;
    and a frame around the most frequent values of the policy named `outlined`."""
    share = alt.Tooltip("share:Q", format=".1%")
    chart = chart.encode(x, y, tooltip=[alt.Tooltip("budget:O"), alt.Tooltip("value:O"), share])
    cells = chart.transform_filter("!datum.outlined")
    opacity = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0, 0.6]), legend=None)
    text = cells.transform_filter(alt.datum.share >= 0.005).mark_text()
    # the palette is that of all policies, in light and dark
    frames = chart.transform_filter("datum.outlined && datum.most")
    frames = frames.transform_calculate(policy=repr(outlined))
    stroke = alt.Stroke("policy:N", scale=alt.Scale(domain=domain([outlined])), legend=None)
    return [
        cells.mark_rect().encode(opacity),
        text.encode(alt.Text("share:Q", format=".0%")),
        frames.mark_rect(filled=False, strokeWidth=2).encode(stroke),
    ]


def in_order(value: str) -> tuple[bool, bool, float, str]:
    """Return a sort key for knob values written as text: numbers by size, then names, then
    "other"."""
    try:
        return False, False, float(value), ""
    except ValueError:
        return value == "other", True, 0.0, value


def knob_effects(knobs: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[alt.LayerChart]:
    """Draw mean accuracy, then latency, for each value of each knob.

    Args:
        knobs: name → values, and the mean accuracy and latency_ms of each.
    """
    titles = {"accuracy": "mean accuracy", "latency_ms": "mean latency (ms)"}
    heights = []
    for key, title in titles.items():
        # one scale for all knobs, so that a knob which does little looks like it
        means = list(itertools.chain(*(knob[key] for knob in knobs.values())))
        scale = alt.Scale(domain=[min(means), max(means)], nice=True, zero=False, padding=6)
        heights.append(alt.Y(f"{key}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=4)))
    figure = []
    for name, knob in knobs.items():
        values = list(map(str, knob["values"]))
        rows = pl.DataFrame({"value": values} | {key: knob[key] for key in titles})
        names = any(isinstance(value, str) for value in knob["values"])
        axis = alt.Axis(labelAngle=-40 if names else 0, labelLimit=90, labelOverlap=True)
        x = alt.X("value:O", title=name, sort=values, axis=axis)
        base = alt.Chart(rows).encode(x, tooltip=_tooltip(rows))
        # names have no order that a line could follow
        line = base.mark_line(strokeWidth=0 if names else 2, point={"size": 50})
        figure += [layered(line.encode(height), height=140) for height in heights]
    return figure


def coverage(rows: pl.DataFrame) -> alt.LayerChart:
    """Draw how much was profiled; white is nothing.

    Args:
        rows: a column for each of one or two knobs, under its name, and share (0 to 1).
    """
    names = [name for name in rows.columns if name != "share"]
    x = alt.X(f"{names[0]}:O", axis=SPARSE).axis(labelAngle=0)
    y = [alt.Y(f"{name}:O", sort="descending") for name in names[1:]]
    scale = alt.Scale(domain=[0, 1])
    colour = alt.Color("share:Q", title="profiled", scale=scale, legend=alt.Legend(format="%"))
    cells = alt.Chart(rows).mark_rect().encode(x, *y, colour, tooltip=_tooltip(rows))
    return layered(cells, height=170 if y else 30)

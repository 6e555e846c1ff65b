"""The charts of all pages, drawn with Altair. A function takes a frame or rows and returns a chart,
or a list of charts that make up a figure.

A chart is as wide as its place on the page; what all share is `CONFIG` in
`knobwise.experiments.report.page`. Channels are objects such as `alt.X("name:N")`, not strings:
Altair would look up each string in its schema, which takes longer than all the rest.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.statistics import pareto_front
from knobwise.experiments.evidence.task import Row
from knobwise.experiments.report.page import HUES, colours_of
from knobwise.experiments.wording.words import policy_name

GREY = HUES["grey"]
DASHED = {"color": GREY, "strokeWidth": 1.5, "strokeDash": [5, 4]}
"""The style of lines that mark a reference."""
CLOSE = alt.Scale(zero=False, nice=False, padding=12)
"""A scale that begins near the smallest number, not at 0."""
FARTHEST = 6
"""The largest residual in a chart, in expected spreads."""
SPARSE = alt.Axis(labelOverlap=True, labelAngle=0)
"""An axis that leaves out labels rather than print one over another."""


def layered(
    *layers: alt.Chart | alt.LayerChart, height: int | alt.Step = 320, **properties: Any
) -> alt.LayerChart:
    """Return one chart of these layers, as wide as its place on the page."""
    # arguments of alt.layer: .properties() would copy all layers
    return alt.layer(*layers, width="container", height=height, **properties)


def colour_of(colours: Mapping[str, str], field: str = "policy") -> alt.Color:
    """Return the colour channel of a column, by label → colour, with its legend."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", scale=scale)


def dashed(channel: alt.X | alt.Y, column: str, values: Sequence[float | None]) -> alt.Chart:
    """Draw a dashed line across the chart at each of these values of a channel."""
    return alt.Chart(pl.DataFrame({column: values})).mark_rule(**DASHED).encode(channel)


# -- lines -----------------------------------------------------------------------------------------


def lines(
    rows: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    colour: alt.Color | None = None,
    *detail: alt.Detail,
    size: int = 60,
) -> list[alt.Chart]:
    """Return the layers of lines with their points, and a band where there are columns low and
    high.

    Args:
        rows: the points, with the columns of the channels; `budget_ms`, if there is such a column,
            is the order of the points of a line.
        x: the horizontal axis.
        y: the vertical axis.
        colour: see `colour_of`; by default that of the column policy, each of which has its points
            a little aside, since equal numbers would hide each other.
        detail: what tells lines of the same colour apart.
        size: of the points.
    """
    aside: float | alt.ExprRef = 0
    if colour is None:
        labels = rows["policy"].unique(maintain_order=True).to_list()
        colour = colour_of(colours_of(labels))
        middle = (len(labels) - 1) / 2
        aside = alt.ExprRef(f"5 * (indexof({json.dumps(labels)}, datum.policy) - {middle})")
    order = [alt.Order("budget_ms:Q")] * ("budget_ms" in rows.columns)
    base = alt.Chart(rows).encode(x, colour, *detail)
    points = base.mark_circle(size=size, opacity=1, xOffset=aside)
    layers = [base.mark_line().encode(y, *order), points.encode(y)]
    if "low" in rows.columns:
        # an area has no order: it would be cut into one for each point
        low = alt.Y("low:Q", title=y["title"], scale=y["scale"])
        layers.insert(0, base.mark_area(opacity=0.13).encode(low, alt.Y2("high:Q")))
    return layers


def plane(
    configurations: Sequence[Row],
    paths: pl.DataFrame | None = None,
    unit: str = "ms",
    y: str = "accuracy",
) -> alt.LayerChart:
    """Draw mean accuracy or utility against mean latency.

    Args:
        configurations: label, latency_ms and `y` of each: drawn as dots, with a dashed line through
            those that no other beats.
        paths: columns policy, budget_ms, latency_ms and `y`: a line for each policy.
        unit: of the latencies.
        y: "accuracy" or "utility".
    """
    rows = pl.DataFrame(configurations, schema=["label", y, "latency_ms"])
    title = in_words(f"mean latency ({unit})", unit)
    x = alt.X("latency_ms:Q", title=title, scale=CLOSE, axis=SPARSE)
    # without padding, which could begin the axis below 0
    height = alt.Y(f"{y}:Q", title=f"mean {y} (0 to 1)", scale=alt.Scale(zero=False))

    # the configurations, and the line through those that no other beats
    front = rows.filter(pareto_front(rows[y].to_numpy(), rows["latency_ms"].to_numpy()))
    steps = alt.Chart(front).mark_line(interpolate="step-after", **DASHED)
    circles = alt.Chart(rows).mark_circle(color=GREY, size=36)
    layers = [circles.encode(x, height, alt.Detail("label:N")), steps.encode(x, height)]
    if paths is not None:
        layers += lines(paths.drop("low", "high", strict=False), x, height)
    return layered(*layers, height=360)


def by_budget(
    rows: pl.DataFrame,
    y: str,
    title: str,
    *,
    percent: bool = False,
    level: float | None = None,
    unit: str = "ms",
) -> alt.LayerChart:
    """Draw a number against the budget.

    Args:
        rows: policy, budget_ms, `y`, and low and high where the interval is to be drawn.
        y: the column of the number.
        title: of the vertical axis.
        percent: whether the number is a share.
        level: the height of a dashed line, if any.
        unit: of the budgets.
    """
    # a wide range of budgets is drawn on a logarithmic axis
    budgets = rows["budget_ms"].to_list()
    scale = CLOSE
    if 0 < 20 * min(budgets) < max(budgets):
        scale = alt.Scale(type="log")
    limit = in_words(f"latency budget ({unit})", unit)
    x = alt.X("budget_ms:Q", title=limit, scale=scale, axis=SPARSE)
    height = alt.Y(f"{y}:Q", title=title, scale=CLOSE)
    if percent:
        height = height.axis(format="%")
    layers = lines(rows, x, height)
    if level is not None:
        layers.append(dashed(alt.Y("level:Q"), "level", [level]))
    return layered(*layers)


def by_shots(rows: pl.DataFrame, trained: int) -> alt.LayerChart:
    """Draw accuracy against the number of demonstrations.

    Args:
        rows: columns policy, shots, accuracy, low, high.
        trained: the number of demonstrations in training, marked by a dashed line.
    """
    axis = alt.Axis(values=sorted(rows["shots"].unique()), format="d", grid=False)
    x = alt.X("shots:Q", title="demonstrations (shots)", axis=axis, scale=CLOSE)
    height = alt.Y("accuracy:Q", title="accuracy (0 to 1)", scale=CLOSE)
    return layered(dashed(x, "shots", [trained]), *lines(rows, x, height))


def curves(
    points: pl.DataFrame,
    colours: Mapping[str, str],
    field: str,
    begins: Sequence[int],
    *detail: alt.Detail,
) -> list[alt.LayerChart]:
    """Draw numbers against the training step, a chart for each panel.

    Args:
        points: panel, step, value and the columns of the channels; low and high for a band.
        colours: label → colour.
        field: the column of the labels; a legend names those that its chart draws.
        begins: the steps where GRPO begins, marked by dashed lines.
        detail: what tells lines of the same colour apart.
    """
    scale = alt.Scale(zero=False)
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=scale)
    y = alt.Y("value:Q", title=None, scale=scale, axis=alt.Axis(tickCount=4))
    marks = [dashed(alt.X("grpo:Q"), "grpo", begins)] * bool(begins)
    drawn = []
    # each panel has its own data
    for (panel,), rows in points.group_by("panel", maintain_order=True):
        labels = set(rows[field])
        colour = colour_of({k: hue for k, hue in colours.items() if k in labels}, field)
        layers = lines(rows, x, y, colour, *detail, size=9)
        drawn.append(layered(*marks, *layers, height=170, title=panel))
    return drawn


def predictions(rows: pl.DataFrame, x: str, y: str, *colour: alt.Color) -> alt.LayerChart:
    """Draw observed shares against predicted probabilities, and a dashed diagonal, on which the two
    are equal.

    Args:
        rows: columns predicted and observed, and the column of the colour.
        x: the title of the horizontal axis.
        y: the title of the vertical axis.
        colour: of the lines, if there are several.
    """
    corners = [min(*rows["predicted"], *rows["observed"]), 1.0]
    axis = alt.Axis(format="%", tickCount=5)
    channels = [
        alt.X("predicted:Q", title=x, scale=alt.Scale(zero=False), axis=axis),
        alt.Y("observed:Q", title=y, scale=alt.Scale(zero=False), axis=axis),
    ]
    diagonal = alt.Chart(pl.DataFrame({"predicted": corners, "observed": corners}))
    line = alt.Chart(rows).mark_line(point=True, strokeWidth=1.5)
    return layered(diagonal.mark_line(**DASHED).encode(*channels), line.encode(*channels, *colour))


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
    return layered(
        *zeros,
        base.mark_rule(strokeWidth=2).encode(interval, alt.X2("high:Q")),
        base.mark_circle(size=75, opacity=1).encode(alt.X("value:Q")),
        height=alt.Step(24),
    )


def dots_of_policies(
    rows: Iterable[Row], metric: str, title: str, results: RunResults | None = None
) -> alt.LayerChart:
    """Draw a number of each policy with its interval, in the colours of the policies.

    Args:
        rows: policy, the metric and its interval, of each.
        metric: the key of the number.
        title: of the horizontal axis.
        results: that the rows belong to, where their budgets may be no times.
    """
    drawn = [
        [row["policy"], policy_name(row["policy"], results), row[metric], *row[f"{metric}_ci95"]]
        for row in rows
    ]
    frame = pl.DataFrame(drawn, schema=["policy", "name", "value", "low", "high"], orient="row")
    return dots(frame, title, colour_of(colours_of(frame["policy"].to_list())).legend(None))


def by_dataset(results: RunResults) -> list[alt.LayerChart]:
    """Draw mean utility and its interval for the most important policies, a chart for each data
    set."""
    figure = []
    for dataset, rows in itertools.groupby(
        results["by_dataset"], key=operator.itemgetter("dataset")
    ):
        chart = dots_of_policies(rows, "utility", "utility (0 to 1)", results)
        figure.append(chart.properties(title=dataset))
    return figure


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
        layered(dots, dashed(y, "share", [1.0]), height=240),
        layered(chart.mark_line(strokeWidth=1.5).encode(level), height=110),
    ]


def residuals(requests: pl.DataFrame) -> alt.LayerChart:
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
    return layered(
        chart.mark_bar(color=HUES["blue"]).encode(x, y, alt.X2("to:Q")),
        chart.mark_line(**DASHED).encode(alt.X("middle:Q"), alt.Y("normal:Q")),
        height=220,
    )


# -- knobs -----------------------------------------------------------------------------------------


def knob_usage(
    runs: Sequence[tuple[str, str, RunResults]], unit: str = "ms"
) -> list[alt.LayerChart]:
    """Draw the share of the requests that gets each value of a knob, by budget: for each knob a
    chart for each run. [] where no usage is known.

    Args:
        runs: label, policy and results of each.
        unit: of the budgets.
    """
    shares = []
    for label, policy, results in runs:
        for row in results.get("knob_usage", []):
            if row["policy"] == policy:
                shares.append(row | {"run": label, "value": str(row["value"])})
    if not shares:
        return []
    figure = []
    axis = alt.Axis(labelAngle=0, format=".4~r")
    frame = pl.DataFrame(shares, infer_schema_length=None).unique(maintain_order=True)
    frame = frame.with_row_index("rank")  # values in their order, not as texts
    x = alt.X("budget_ms:O", title=in_words(f"latency budget ({unit})", unit), axis=axis)
    # a sum of shares may be a little more than 1, for which a free scale would add a step
    whole = alt.Scale(domain=[0, 1])
    y = alt.Y("share:Q", title=None, axis=alt.Axis(format="%"), scale=whole)
    for (knob, run), rows in frame.group_by("knob", "run", maintain_order=True):
        values = alt.Scale(
            domain=rows["value"].unique(maintain_order=True).to_list(), scheme="viridis"
        )
        colour = alt.Color("value:O", scale=values)
        bars = alt.Chart(rows).mark_bar().encode(x, y, colour, alt.Order("rank:Q"))
        figure.append(layered(bars, height=170, title=f"{knob}, {run}"))
    return figure


def knob_effects(
    knobs: Mapping[str, Mapping[str, Sequence[Any]]], unit: str = "ms"
) -> list[alt.LayerChart]:
    """Draw mean accuracy, then latency, for each value of each knob.

    Args:
        knobs: name → values, and the mean accuracy and latency_ms of each.
        unit: of the latencies.
    """
    latency = in_words(f"mean latency ({unit})", unit)
    titles = {"accuracy": "mean accuracy", "latency_ms": latency}
    figure = []
    for name, knob in knobs.items():
        values = list(map(str, knob["values"]))
        rows = pl.DataFrame({"value": values} | {key: knob[key] for key in titles})
        x = alt.X("value:O", title=name, sort=values, axis=SPARSE)
        for key, title in titles.items():
            # one scale for all knobs, so that a knob which does little looks like it
            means = list(itertools.chain(*(each[key] for each in knobs.values())))
            scale = alt.Scale(domain=[min(means), max(means)], padding=6)
            y = alt.Y(f"{key}:Q", title=title, scale=scale)
            dots = alt.Chart(rows).mark_circle(size=60, opacity=1)
            figure.append(layered(dots.encode(x, y), height=140))
    return figure


def coverage(
    knobs: Mapping[str, Mapping[str, Sequence[Any]]], configurations: Sequence[Row], samples: int
) -> list[alt.LayerChart]:
    """Draw how much was profiled, a chart for every pair of the first three knobs, or one for a
    single knob; blank is nothing.

    Args:
        knobs: name → values.
        configurations: the knobs of each, and how many samples it was profiled for.
        samples: how many there are.
    """
    figure = []
    scale = alt.Scale(domain=[0, 1])
    colour = alt.Color(
        "share:Q", title="profiled", scale=scale, legend=alt.Legend(format="%", tickCount=3)
    )
    names = list(knobs)[:3]
    for pair in itertools.combinations(names, min(2, len(names))):
        counts = Counter[tuple[str, ...]]()
        for row in configurations:
            counts[tuple(str(row["knobs"][name]) for name in pair)] += row["samples"]
        # how often two values could have been profiled together
        others = [len(knob["values"]) for name, knob in knobs.items() if name not in pair]
        most = samples * math.prod(others)
        rows = []
        for values, count in counts.items():
            rows.append(dict(zip("xy", values, strict=False)) | {"share": count / most})
        channels = [alt.X("x:O", axis=SPARSE), alt.Y("y:O", scale=alt.Scale(reverse=True))]
        for i, name in enumerate(pair):
            channels[i] = channels[i].title(name).sort(list(map(str, knobs[name]["values"])))
        cells = alt.Chart(pl.DataFrame(rows)).mark_rect()
        cells = cells.encode(*channels[: len(pair)], colour)
        figure.append(layered(cells, height=170))
    return figure

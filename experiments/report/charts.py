"""The charts (Altair) of all pages: frame → chart, or the charts of a figure. Each is as wide as
its place on the page; colours come from the page (`knobwise.experiments.report.page`). Channels are
objects, not `"name:N"`: Altair would search its schema for what each string means, which takes
longer than all else."""

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
Figure = alt.LayerChart | list[alt.LayerChart]


def layered(
    *layers: alt.Chart | alt.LayerChart, height: int | alt.Step = 320, **properties: Any
) -> alt.LayerChart:
    """Layers as wide as their place on the page."""
    return alt.layer(
        *layers, width="container", height=height, **properties
    )  # .properties() would copy all of them


def colour_of(labels: Sequence[str] | Mapping[str, str], field: str = "policy") -> alt.Color:
    """Colour by policy: every policy has one colour, on this page and on all others. Other labels
    name their hues: hue → label."""
    values = list(labels.values() if isinstance(labels, Mapping) else labels)
    longest = 6 * max(map(len, values), default=1) + 40
    # of the chart's place, which stays the same while axes take their part of the width: a legend
    # that wraps after the layout is cut off; in a picture, which has no place, of its width
    place = "(containerSize()[0] || width + 60) - 60 + 0 * width"
    columns = alt.ExprRef(f"max(1, floor(({place}) / {longest}))")
    legend = alt.Legend(
        orient="top", title=None, labelLimit=340, columns=columns, symbolOpacity=1, values=values
    )
    scale = alt.Scale(domain=by_hue(labels) if isinstance(labels, Mapping) else domain(labels))
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


def _tooltip(rows: pl.DataFrame) -> list[alt.Tooltip]:
    return [
        alt.Tooltip(f"{name}:{'Q' if dtype.is_numeric() else 'N'}")
        for name, dtype in rows.schema.items()
    ]


# -- lines -----------------------------------------------------------------------------------------


def _thin_and_named(lines: alt.Chart, width: float, size: int = 0) -> list[alt.Chart]:
    """The policies that have a colour, with dots of some size, and all others thin."""
    thin, named = (
        lines.transform_filter(test)
        for test in (alt.datum.policy == OTHER, alt.datum.policy != OTHER)
    )
    if size:
        dots = [named.mark_circle(size=size, opacity=1)]
    else:
        dots = []
    return [thin.mark_line(strokeWidth=1), named.mark_line(strokeWidth=width), *dots]


def plane(
    configurations: Sequence[Mapping[str, Any]],
    paths: pl.DataFrame | None = None,
    policies: Sequence[str] = (),
    unit: str = "ms",
    y: str = "accuracy",
) -> alt.LayerChart:
    """Mean accuracy or utility against mean latency: configurations (label, latency_ms, `y`,
    perhaps samples) as dots, those that no other beats on a dashed line, and one path (policy,
    name, budget_ms, latency_ms, `y`) a policy."""
    x = alt.X(
        "latency_ms:Q",
        title=f"mean latency ({unit})",
        scale=CLOSE,
        axis=alt.Axis(labelOverlap=True),
    )
    shares = [cell[y] for cell in configurations]
    near_zero = min(shares) < max(shares) / 5  # padding would begin the axis below 0
    height = alt.Y(
        f"{y}:Q", title=f"mean {y} (0 to 1)", scale=alt.Scale(zero=True) if near_zero else CLOSE
    )
    columns = ("label", y, "latency_ms", "samples")
    dots = pl.DataFrame(
        [{key: cell[key] for key in columns if key in cell} for cell in configurations]
    )
    front = dots.filter(pareto_front(dots[y].to_numpy(), dots["latency_ms"].to_numpy()))
    steps = alt.Chart(front).mark_line(
        style="quiet", strokeWidth=1.5, interpolate="step-after", strokeDash=[4, 3]
    )
    circles = alt.Chart(dots).mark_circle(style="quiet", size=36, opacity=0.55)
    layers = [circles.encode(x, height, tooltip=_tooltip(dots)), steps.encode(x, height)]
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
    """One number against the budget: the policies named are coloured, all others thin and grey.

    Args:
        rows: policy, name, budget_ms, `y`, and low and high where the interval is to be drawn.
        level: draws a line at this height.
    """
    positive = [budget for budget in rows["budget_ms"] if budget > 0] or [1.0]
    wide = max(positive) > 20 * min(positive)
    if wide:
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
        layers.append(
            alt.Chart(pl.DataFrame({"level": [level]})).mark_rule(**DASHED).encode(alt.Y("level:Q"))
        )
    return layered(*layers)


def by_shots(rows: pl.DataFrame, policies: Sequence[str], trained: int) -> alt.LayerChart:
    """Accuracy against the number of demonstrations: the policies named are coloured, all others
    thin and grey. Columns: policy, name, shots, accuracy, low, high. A dashed line stands at the
    number trained with."""
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
    """Lines over x, with a band where the interval is known (low, high)."""
    if percent:
        axis = alt.Axis(format="%")
    else:
        axis = alt.Axis()
    if percent:
        scale = alt.Scale(zero=False, nice=False, padding=8)
    else:
        scale = alt.Scale(zero=False)
    height = alt.Y(f"{y}:Q", title=title, axis=axis, scale=scale)
    value = alt.Tooltip(f"{y}:Q", format=".1%" if percent else ".3f")
    tooltip = [alt.Tooltip("name:N"), alt.Tooltip(x.shorthand), value]
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
    """Numbers against the training step, with a dashed line where GRPO begins: a chart for each
    number.

    Args:
        points: panel, `colour`, `line`, step, `y`; low and high for a band; grpo, the step where
            GRPO begins; alone, whether it is the only point of its line.
        labels: policies in order, all others being thin and grey, or hue → label.
    """
    x = alt.X(
        "step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=alt.Scale(zero=False)
    )
    number = alt.Y(f"{y}:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4))
    tooltip = [
        *(alt.Tooltip(f"{name}:N") for name in (colour, line) if name != "policy"),
        alt.Tooltip("step:Q"),
    ]
    figure = []
    for panel in panels:
        rows = points.filter(pl.col("panel") == panel)
        base = alt.Chart(rows).encode(x, colour_of(labels, colour), alt.Detail(f"{line}:N"))
        drawn = base.encode(number, tooltip=[*tooltip, alt.Tooltip(f"{y}:Q", format=".4~g")])
        if colour == "policy":
            layers = _thin_and_named(drawn, width=2)
        else:
            layers = [drawn.mark_line(strokeWidth=1.5)]
        if "low" in points.columns:
            band = base.transform_filter(alt.datum.policy != OTHER).mark_area(opacity=0.15)
            layers.insert(
                0, band.encode(alt.Y("low:Q", scale=alt.Scale(zero=False)), alt.Y2("high:Q"))
            )
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
    """Numbers with their intervals, one below the other: name, value, low, high, the column of the
    colour, in order; perhaps beside, words behind the interval. The axis begins where the numbers
    do; `zero` draws a line at 0."""
    base = alt.Chart(rows).encode(
        alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=230))
    )
    marks = base.encode(tooltip=_tooltip(rows))
    if colour is not None:
        marks = marks.encode(colour)
    scale = CLOSE
    axis = alt.Axis()
    if "beside" in rows.columns:  # room for the words
        bounds = rows.select(pl.col("low", "high").fill_null(pl.col("value"))).to_numpy()
        low = float(bounds.min())
        high = float(bounds.max())
        axis = alt.Axis(labelExpr=f"datum.value > {high} ? '' : datum.label", tickCount=8)
        scale = alt.Scale(domain=[low, low + 1.2 * (high - low or 1.0)])
    start, value = (
        alt.X(f"{end}:Q", title=title, scale=scale, axis=axis) for end in ("low", "value")
    )
    layers = [
        marks.mark_rule(strokeWidth=2).encode(start, alt.X2("high:Q")),
        marks.mark_circle(size=75, opacity=1).encode(value),
    ]
    if zero:
        line = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(style="quiet", strokeDash=[5, 4])
        layers.insert(0, line.encode(alt.X("zero:Q")))
    if "beside" in rows.columns:
        words = base.mark_text(style="quiet", align="left", dx=8)
        layers.append(words.encode(alt.X("high:Q"), alt.Text("beside:N")))
    return layered(*layers, height=alt.Step(24))


def by_dataset(judged: Sequence[Mapping[str, Any]]) -> list[alt.LayerChart]:
    """Mean utility and its interval, of the most important policies: a chart for each data set."""
    figure: dict[str, list[dict[str, Any]]] = {}
    for row in judged:
        name = policy_name(row["policy"] if row["policy"] in SAME_EVERYWHERE else "best_other")
        span = dict(zip(("low", "high"), row["utility_ci95"], strict=True))
        figure.setdefault(row["dataset"], []).append({"name": name, "value": row["utility"]} | span)
    return [
        dots(
            pl.DataFrame(rows),
            "utility (0 to 1)",
            colour_of([r["name"] for r in rows], "name").legend(None),
        ).properties(title=dataset)
        for dataset, rows in figure.items()
    ]


# -- latencies -------------------------------------------------------------------------------------


def timeline(requests: pl.DataFrame) -> list[alt.LayerChart]:
    """Requests in order, with their latency_ms and budget_ms, and the `level` that a tracker
    expects: latency here / latency predicted."""
    rows = requests.with_row_index("request", 1).with_columns(
        share=pl.col("latency_ms") / pl.col("budget_ms")
    )
    chart = alt.Chart(rows)
    x = alt.X("request:Q")
    share = alt.Y("share:Q", title="latency / budget", scale=alt.Scale(type="log", padding=8))
    requests_ = chart.mark_circle(size=14, opacity=0.7).encode(x, share, tooltip=_tooltip(rows))
    budget = alt.Chart(pl.DataFrame({"share": [1.0]})).mark_rule(**DASHED).encode(share)
    level = chart.mark_line(strokeWidth=1.5).encode(
        x, alt.Y("level:Q", title="tracked level", scale=CLOSE)
    )
    return [layered(requests_, budget, height=240), layered(level, height=110)]


# -- knobs -----------------------------------------------------------------------------------------


def knob_usage(
    runs: Sequence[tuple[str, str, Mapping[str, Any]]], unit: str = "ms", outlined: str = ""
) -> list[alt.LayerChart]:
    """Which share of the requests gets which value of a knob, by budget: for each knob a chart a
    run, [] where no usage is known.

    Args:
        runs: label, policy and results of each.
        outlined: the policy whose most frequent values are outlined, in every run.
    """
    shares = [
        row | {"run": label, "value": str(row["value"])}
        for label, policy, results in runs
        for row in results.get("knob_usage", [])
        if row["policy"] in (policy, outlined)
    ]
    if not shares:
        return []
    usage = pl.DataFrame(shares, infer_schema_length=None).unique(maintain_order=True)
    names = {budget: quantity(budget, "").strip() for budget in usage["budget_ms"].unique()}
    usage = usage.with_columns(
        pl.col("budget_ms").replace_strict(names, return_dtype=pl.String).alias("budget")
    )
    figure = []
    for knob in usage["knob"].unique(maintain_order=True):
        part = usage.filter(pl.col("knob") == knob)
        used = (
            part.group_by("value")
            .agg(pl.col("share").sum())
            .sort("share", descending=True)["value"]
        )
        values = sorted(used.head(MOST_VALUES).to_list(), key=in_order)
        if len(used) > MOST_VALUES:
            rare = pl.col("value").is_in(values).not_()
            part = part.with_columns(
                pl.when(rare).then(pl.lit("other")).otherwise(pl.col("value")).alias("value")
            )
            values.append("other")
        keys = ("run", "policy", "budget_ms", "budget", "value")
        part = part.group_by(*keys, maintain_order=True).agg(pl.col("share").sum())
        x = alt.X("budget:O", title=f"latency budget ({unit})", sort=alt.SortField("budget_ms"))
        x = x.axis(labelAngle=0)
        y = alt.Y("value:O", title=knob, sort=values[::-1], scale=alt.Scale(domain=values[::-1]))
        opacity = alt.Opacity(
            "share:Q", scale=alt.Scale(domain=[0, 1], range=[0, 0.6]), legend=None
        )
        share = alt.Text("share:Q", format=".0%")
        for label, policy, _ in runs:
            rows = part.filter(pl.col("run") == label)
            tooltip = [
                alt.Tooltip("budget:O"),
                alt.Tooltip("value:O"),
                alt.Tooltip("share:Q", format=".1%"),
            ]
            cells = alt.Chart(rows.filter(pl.col("policy") == policy)).encode(x, y, tooltip=tooltip)
            words = cells.transform_filter(alt.datum.share >= 0.005).mark_text().encode(share)
            layers = [cells.mark_rect().encode(opacity), words]
            most = pl.col("share") == pl.col("share").max().over("budget_ms")
            if len(edges := rows.filter(pl.col("policy") == outlined).filter(most)):
                edges = edges.with_columns(policy=pl.lit(policy_name(outlined)))
                colour = colour_of([policy_name(outlined)])
                stroke = alt.Stroke("policy:N", scale=colour["scale"], legend=None)
                layers.append(
                    alt.Chart(edges).mark_rect(filled=False, strokeWidth=2).encode(x, y, stroke)
                )
            if len(runs) > 1:
                title = {"title": label.split(", ")}
            else:
                title = {}
            figure.append(layered(*layers, height=alt.Step(24), **title))
    return figure


def in_order(value: object) -> tuple[bool, float, str]:
    """Sort key for knob values written as words: numbers by size, then names."""
    try:
        return False, float(str(value)), ""
    except ValueError:
        return True, 0.0, str(value)


def knob_effects(knobs: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[alt.LayerChart]:
    """Mean accuracy, then latency, for each value of each knob: name → values, accuracy,
    latency_ms."""
    figure = []
    # one scale for all knobs, so that a knob which does little looks like it
    domains = {
        y: np.concatenate([knob[y] for knob in knobs.values()]) for y in ("accuracy", "latency_ms")
    }
    scales = {
        y: alt.Scale(
            domain=[float(means.min()), float(means.max())], nice=True, zero=False, padding=6
        )
        for y, means in domains.items()
    }
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
            line = base.encode(
                alt.Y(f"{y}:Q", title=title, scale=scales[y], axis=alt.Axis(tickCount=4))
            )
            # a line says that values are in order, which names are not
            if names:
                layers = []
            else:
                layers = [line.mark_line(strokeWidth=2)]
            figure.append(layered(*layers, line.mark_circle(size=50, opacity=1), height=140))
    return figure


def coverage(frames: Iterable[pl.DataFrame]) -> list[alt.LayerChart]:
    """How much was profiled: one or two columns named after knobs, and share (0 to 1); white is
    nothing."""
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

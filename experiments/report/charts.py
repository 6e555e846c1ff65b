"""The charts (Altair) of reports and inspections. Colours come from the page (`knobwise.experiments.report.page`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from knobwise.experiments.report.colours import OTHERS as OTHER
from knobwise.experiments.report.colours import by_hue, domain
from knobwise.experiments.report.words import quantity

DASHED: dict[str, Any] = {"style": "quiet", "strokeWidth": 1.5, "strokeDash": [5, 4]}
MOST_VALUES = 12
"""A knob with more values than this is drawn with its most used ones and "other"."""


def _colour(policies: Sequence[str]) -> dict[str, Any]:
    """Colour by policy: every policy has one colour, on this page and on all others."""
    # long names, as of runs, stand in fewer columns, so that the legend is no wider than the chart
    columns = max(1, min(5, 820 // (6 * max(map(len, policies), default=1) + 34)))
    values = list(policies)
    legend = alt.Legend(orient="top", title=None, labelLimit=340, columns=columns, symbolOpacity=1, values=values)
    return {"color": alt.Color("policy:N", scale=alt.Scale(domain=domain(policies)), legend=legend)}


def _budget_axis(budgets: Iterable[float], ticks: int, unit: str = "ms") -> alt.X:
    positive = [b for b in budgets if b > 0] or [1.0]
    scale = (
        alt.Scale(type="log") if max(positive) > 20 * min(positive) else alt.Scale(zero=False, nice=False, padding=12)
    )
    return alt.X("budget_ms:Q", title=f"latency budget ({unit})", scale=scale, axis=alt.Axis(tickCount=ticks))


def plane(
    configurations: pl.DataFrame,
    paths: pl.DataFrame | None = None,
    policies: Sequence[str] = (),
    unit: str = "ms",
    references: pl.DataFrame | None = None,
) -> alt.LayerChart:
    """Mean accuracy against mean latency: configurations as dots, the Pareto front, one path over the budgets a policy.

    Args:
        configurations: label, accuracy, latency_ms, and whatever else the tooltip shall say.
        paths: policy, budget_ms, accuracy, latency_ms; perhaps name, where several policies have one colour.
        policies: the order of the policies, which gives their colours.
        references: what the policies are seen against, drawn without colour: as `paths`.
    """
    axis = alt.Axis(tickCount=10)
    x = alt.X("latency_ms:Q", title=f"mean latency ({unit})", scale=alt.Scale(zero=False, padding=12), axis=axis)
    y = alt.Y("accuracy:Q", title="mean accuracy (0 to 1)", scale=alt.Scale(zero=False, padding=12))
    base = alt.Chart(configurations).encode(x, y)
    front = configurations.filter(
        pareto_front(configurations["accuracy"].to_numpy(), configurations["latency_ms"].to_numpy())
    )
    layers = [
        base.mark_circle(style="quiet", size=36, opacity=0.55).encode(tooltip=_tooltip(configurations)),
        alt.Chart(front)
        .mark_line(style="quiet", strokeWidth=1.5, interpolate="step-after", strokeDash=[4, 3])
        .encode(x, y),
    ]
    if paths is not None and len(paths):
        line = alt.Chart(paths).encode(x, y, order="budget_ms:Q", tooltip=_tooltip(paths), **_colour(policies))
        if "name" in paths.columns:
            line = line.encode(detail="name:N")
        layers += _thin_and_named(line, width=2, size=60)
    if references is not None:
        layers.append(_quiet(references, x, y, "budget_ms"))
    return alt.layer(*layers).properties(width=820, height=360)


def _tooltip(rows: pl.DataFrame) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{name}:{'Q' if dtype.is_numeric() else 'N'}") for name, dtype in rows.schema.items()]


def _thin_and_named(lines: alt.Chart, width: float, size: int) -> list[alt.Chart]:
    """The policies that have a colour with dots, all others thin."""
    thin, named = alt.datum.policy == OTHER, alt.datum.policy != OTHER
    return [
        lines.transform_filter(thin).mark_line(strokeWidth=1),
        lines.transform_filter(named).mark_line(strokeWidth=width),
        lines.transform_filter(named).mark_circle(size=size, opacity=1),
    ]


def with_spans(marks: alt.Chart, base: alt.Chart, width: float = 2) -> alt.LayerChart:
    """Bars with their intervals (low, high)."""
    return alt.layer(marks, base.mark_rule(style="quiet", strokeWidth=width).encode(alt.X("low:Q"), alt.X2("high:Q")))


def _quiet(references: pl.DataFrame, x: alt.X, y: alt.Y, order: str) -> alt.Chart:
    """The references of a chart: without colour, distinguished by their dashes."""
    names = references["policy"].unique(maintain_order=True).to_list()
    scale = alt.Scale(domain=names, range=[[1, 3], [7, 3], [1, 0]][: len(names)])
    legend = alt.Legend(orient="bottom", title=None, labelLimit=340, symbolSize=900)
    dash = alt.StrokeDash("policy:N", scale=scale, legend=legend)
    return alt.Chart(references).mark_line(style="quiet", strokeWidth=2).encode(x, y, dash, order=f"{order}:Q")


def pareto_front(accuracy: np.ndarray, latency_ms: np.ndarray) -> np.ndarray:
    """The configurations that no other beats in accuracy without costing more: bool [C] from two float [C]."""
    order = np.lexsort((-accuracy, latency_ms))
    best = np.maximum.accumulate(accuracy[order])
    front = np.zeros(len(order), dtype=bool)
    front[order] = np.r_[True, best[1:] > best[:-1]]
    return front


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
        references: what they are seen against, drawn without colour: policy, budget_ms, `y`.
    """
    x = _budget_axis(rows["budget_ms"], size[0] // 80, unit)
    lines = _lines(rows, x, y, title, policies, percent, level)
    if references is not None:
        lines = alt.layer(lines, _quiet(references, x, alt.Y(f"{y}:Q", title=title), "budget_ms"))
    return lines.properties(width=size[0], height=size[1])


def by_shots(rows: pl.DataFrame, policies: Sequence[str], trained: int) -> alt.LayerChart:
    """Accuracy against the number of demonstrations: the policies named are coloured, all others thin and grey.

    Args:
        rows: policy, name, shots, accuracy, low, high.
        policies: the order of the policies, which gives their colours.
        trained: the number of shots that selectors were trained on; a dashed line stands there.
    """
    axis = alt.Axis(values=sorted(rows["shots"].unique()), format="d", grid=False)
    x = alt.X("shots:Q", title="demonstrations (shots)", axis=axis, scale=alt.Scale(padding=24, nice=False, zero=False))
    mark = alt.Chart(pl.DataFrame({"shots": [trained]})).mark_rule(**DASHED)
    lines = _lines(rows, x, "accuracy", "accuracy (0 to 1)", policies)
    return alt.layer(mark.encode(x), lines).properties(width=820, height=340)


def by_dataset(rows: pl.DataFrame, policies: Sequence[str]) -> alt.LayerChart:
    """Mean utility and its interval: a band for each data set, in it a line for each policy.

    Args:
        rows: dataset, policy, utility, low, high.
        policies: their order, which gives their colours.
    """
    y = alt.Y("dataset:N", title=None, axis=alt.Axis(labelLimit=200))
    offset = alt.YOffset("policy:N", scale=alt.Scale(domain=list(policies), paddingOuter=0.4))
    detail = [alt.Tooltip(f"{name}:{kind}") for name, kind in zip(rows.columns, "NNQQQ", strict=True)]
    base = alt.Chart(rows).encode(y, offset, tooltip=detail, **_colour(policies))
    x = alt.X("utility:Q", title="utility (0 to 1)", scale=alt.Scale(zero=False, padding=12))
    spans = base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title="utility (0 to 1)"), x2="high:Q")
    height = 18 * len(policies) * rows["dataset"].n_unique() + 20
    return alt.layer(spans, base.mark_circle(size=70, opacity=1).encode(x)).properties(width=720, height=height)


def _lines(
    rows: pl.DataFrame,
    x: alt.X,
    y: str,
    title: str,
    policies: Sequence[str],
    percent: bool = False,
    level: float | None = None,
) -> alt.LayerChart:
    """Lines over x, with a band where the interval is known (low, high)."""
    axis = alt.Axis(format="%") if percent else alt.Axis()
    scale = alt.Scale(zero=False, nice=False, padding=8) if percent else alt.Scale(zero=False)
    height = alt.Y(f"{y}:Q", title=title, axis=axis, scale=scale)
    tooltip = ["name:N", x.shorthand, alt.Tooltip(f"{y}:Q", format=".1%" if percent else ".3f")]
    line = alt.Chart(rows).encode(x, height, tooltip=tooltip, **_colour(policies))
    layers = []
    if "low" in rows.columns:
        band = alt.Chart(rows.filter(pl.col("policy") != OTHER)).mark_area(opacity=0.15)
        layers.append(band.encode(x, alt.Y("low:Q", title=title), y2="high:Q", **_colour(policies)))
    layers += _thin_and_named(line.encode(detail="name:N"), width=2.5, size=50)
    if level is not None:
        layers.append(alt.Chart(pl.DataFrame({"level": [level]})).mark_rule(**DASHED).encode(y="level:Q"))
    return alt.layer(*layers)


def differences(rows: pl.DataFrame, title: str) -> alt.LayerChart:
    """Differences with their intervals, one below the other, and a line where there is none.

    Args:
        rows: run, difference, low, high, shown (better, worse, no difference shown), in order.
        title: of the axis.
    """
    y = alt.Y("run:N", sort=None, title=None, axis=alt.Axis(labelLimit=400))
    hues = {"blue": "better", "orange": "worse", "grey": "no difference shown"}
    scale = alt.Scale(domain=by_hue(hues))
    legend = alt.Legend(orient="top", title=None, values=list(hues.values()), labelLimit=340)
    colour = alt.Color("shown:N", scale=scale, legend=legend)
    detail = ["run:N", *(alt.Tooltip(f"{name}:Q", format="+.3f") for name in ("difference", "low", "high")), "shown:N"]
    base = alt.Chart(rows).encode(y, colour, tooltip=detail)
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(style="quiet", strokeDash=[5, 4]).encode(x="zero:Q")
    spans = base.mark_rule(strokeWidth=2.5).encode(alt.X("low:Q", title=title), x2="high:Q")
    dots = base.mark_circle(size=80, opacity=1).encode(alt.X("difference:Q", title=title))
    return alt.layer(zero, spans, dots).properties(width=500, height=alt.Step(24))


def curves_of_runs(points: pl.DataFrame, panels: Sequence[str], runs: Sequence[str]) -> alt.FacetChart:
    """The means over seeds of several runs against the training step, shaded from the lowest to the highest seed: one
    panel a number, the runs named coloured, all others thin and grey.

    Args:
        points: panel, policy (a run named, or `OTHER`), name (the run), step, mean, low, high, grpo (the step at which
            GRPO begins; null where that is not known), alone (whether it is the only point of its line).
        panels, runs: their orders; that of the runs gives their colours.
    """
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=5), scale=alt.Scale(zero=False))
    axis, scale = alt.Axis(tickCount=5), alt.Scale(zero=False)
    y = alt.Y("mean:Q", title=None, scale=scale, axis=axis)
    named = alt.datum.policy != OTHER
    base = alt.Chart().encode(x, detail="name:N", **_colour(runs))
    band = base.transform_filter(named).mark_area(opacity=0.15).encode(alt.Y("low:Q", scale=scale), y2="high:Q")
    tooltip = ["name:N", "step:Q", alt.Tooltip("mean:Q", format=".4~g")]
    thin = base.transform_filter(alt.datum.policy == OTHER).mark_line(strokeWidth=1).encode(y, tooltip=tooltip)
    lines = base.transform_filter(named).mark_line(strokeWidth=2).encode(y, tooltip=tooltip)
    dots = base.transform_filter(alt.datum.alone).mark_circle(size=60, opacity=1).encode(y, tooltip=tooltip)
    begins = alt.Chart().transform_filter(alt.datum.grpo != None).transform_aggregate(groupby=["grpo"])  # noqa: E711
    mark = begins.mark_rule(**DASHED).encode(x="grpo:Q")
    layers = alt.layer(mark, band, thin, lines, dots).properties(width=360, height=180)
    facet = alt.Facet("panel:N", sort=list(panels), title=None)
    panels_of_runs = layers.facet(facet, data=points, columns=2, bounds="flush", spacing={"row": 74, "column": 70})
    return panels_of_runs.resolve_scale(x="independent", y="independent")


def policy_bars(policies: pl.DataFrame) -> alt.LayerChart:
    """Accuracy of each policy as a bar in its colour, with its interval and its number; controls are grey.

    Args:
        policies: name, kind, accuracy, low, high, in order. A kind other than "learned" is written beside the bar.
    """
    bars_of = policies.with_columns(
        colour=pl.when(pl.col("kind") == "control").then(pl.lit(OTHER)).otherwise(pl.col("name")),
        label=pl.col("accuracy").map_elements(lambda share: f"{share:.3f}", return_dtype=pl.String)
        + pl.when(pl.col("kind") == "learned").then(pl.lit("")).otherwise("  " + pl.col("kind")),
    )
    highest = max(1.0, *policies["high"])
    scale, axis = alt.Scale(domain=[0, highest * 1.25]), alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1])
    x = alt.X("accuracy:Q", title="accuracy (0 to 1)", scale=scale, axis=axis)
    y = alt.Y("name:N", sort=None, title=None, axis=alt.Axis(labelLimit=260))
    colour = alt.Color("colour:N", scale=alt.Scale(domain=domain([*bars_of["colour"].unique(maintain_order=True)])))
    tooltip = ["name:N", "kind:N", *(alt.Tooltip(f"{name}:Q", format=".3f") for name in ("accuracy", "low", "high"))]
    base = alt.Chart(bars_of).encode(y, tooltip=tooltip)
    bars = base.mark_bar(height=15, opacity=0.75).encode(x, colour.legend(None))
    words = base.mark_text(style="quiet", align="left", dx=6).encode(alt.X("high:Q"), alt.Text("label:N"))
    return alt.layer(with_spans(bars, base), words).properties(width=640, height=alt.Step(24))


def side_by_side(charts: Sequence[alt.LayerChart]) -> alt.HConcatChart:
    """Charts in one row, under one legend."""
    return alt.hconcat(*charts, spacing=40).resolve_scale(color="shared")


def knob_usage(usage: pl.DataFrame, policies: Sequence[str], unit: str = "ms", width: int = 200) -> alt.VConcatChart:
    """Which share of the requests gets which value of a knob, per budget: one row a knob, one column a policy.

    Args:
        usage: policy, budget_ms, knob, value, share.
        policies: the columns, in order.
        width: of a column, in pixels.
    """
    # the name of a run says several things, one below the other
    header = alt.Header(labelLimit=width + 20, labelExpr="split(datum.label, ', ')")
    rows = []
    for knob in usage["knob"].unique(maintain_order=True):
        part = usage.filter(pl.col("knob") == knob)
        used = part.group_by("value").agg(pl.col("share").sum()).sort("share", descending=True)["value"]
        kept = sorted(used.head(MOST_VALUES).to_list(), key=in_order)
        part = part.with_columns(
            pl.when(pl.col("value").is_in(kept)).then(pl.col("value")).otherwise(pl.lit("other")).alias("value"),
            pl.col("budget_ms")
            .map_elements(lambda budget: quantity(budget, unit), return_dtype=pl.String)
            .alias("budget"),
        )
        part = part.group_by("policy", "budget_ms", "budget", "value", maintain_order=True).agg(pl.col("share").sum())
        values = [*kept, "other"] if len(used) > MOST_VALUES else kept
        budgets = part.sort("budget_ms")["budget"].unique(maintain_order=True).to_list()
        part = part.with_columns(pl.col("value").replace_strict(values, range(len(values))).alias("place"))
        rows.append(
            alt.Chart(part)
            .mark_bar()
            .encode(
                alt.X("budget:O", title="latency budget", sort=budgets, axis=alt.Axis(labelAngle=-35)),
                alt.Y("share:Q", title="share of requests", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
                alt.Color("value:O", sort=values, title=knob, scale=alt.Scale(domain=values)),
                alt.Column("policy:N", sort=list(policies), title=None, header=header),
                order="place:Q",
                tooltip=["policy:N", "budget:O", "value:O", alt.Tooltip("share:Q", format=".1%")],
            )
            .properties(width=width, height=130)
        )
    return alt.vconcat(*rows).resolve_scale(color="independent")


def weights(members: pl.DataFrame) -> alt.LayerChart:
    """The weight of each member of a stack: a bar for the mean, a dot a seed.

    Args:
        members: member, seed, weight; in the order in which the members are to stand.
    """
    x = alt.X("weight:Q", title="weight in the stack", axis=alt.Axis(format="%", tickCount=8))
    y = alt.Y("member:N", sort=None, title=None)
    means = members.group_by("member", maintain_order=True).agg(pl.col("weight").mean())
    colour = alt.Color("member:N", scale=alt.Scale(domain=domain(means["member"].to_list())), legend=None)
    tooltip = ["member:N", alt.Tooltip("weight:Q", format=".1%")]
    bars = alt.Chart(means).mark_bar(height=14, opacity=0.75).encode(x, y, colour, tooltip=tooltip)
    dots = alt.Chart(members).mark_circle(style="quiet", size=36, opacity=1).encode(x, y, tooltip=[*tooltip, "seed:N"])
    return alt.layer(bars, dots).properties(width=680, height=alt.Step(26))


def curves(logged: pl.DataFrame, panels: Sequence[str], begins: int | None = None) -> alt.FacetChart:
    """Small line charts against the training step: one panel a metric, one line a seed.

    Args:
        logged: panel, part (train or validation), seed, step, value.
        begins: the step at which GRPO begins; a dashed line stands there.
    """
    parts = {"slate": "train", "blue": "validation"}
    legend = alt.Legend(orient="top", values=list(parts.values()))
    colour = alt.Color("part:N", title=None, scale=alt.Scale(domain=by_hue(parts)), legend=legend)
    # stages of training come one after the other, each in panels of its own
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=4), scale=alt.Scale(zero=False))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4))
    tooltip = ["part:N", "seed:N", "step:Q", "value:Q"]
    lines = alt.Chart().mark_line(strokeWidth=1.5, opacity=0.85).encode(x, y, colour, detail="seed:N", tooltip=tooltip)
    layers = [lines]
    if begins is not None:
        once = alt.Chart().transform_aggregate(lines="count()").transform_calculate(begins=str(begins))
        layers.insert(0, once.mark_rule(**DASHED).encode(x="begins:Q"))
    facet, spacing = alt.Facet("panel:N", sort=list(panels), title=None), {"row": 74, "column": 62}
    drawn = alt.layer(*layers).properties(width=225, height=130)
    drawn = drawn.facet(facet, data=logged, columns=3, bounds="flush", spacing=spacing)
    return drawn.resolve_scale(x="independent", y="independent")


def knob_effects(knobs: Mapping[str, Mapping[str, Sequence[Any]]]) -> alt.VConcatChart:
    """Mean accuracy (left) and mean latency (right) for each value of each knob.

    Args:
        knobs: name → values, accuracy, latency_ms, equally long.
    """
    rows = []
    # one scale for all knobs, so that a knob which does little looks like it
    ranges = {y: pl.Series([v for knob in knobs.values() for v in knob[y]]) for y in ("accuracy", "latency_ms")}
    scales = {
        y: alt.Scale(domain=[all_.min(), all_.max()], nice=True, zero=False, padding=6) for y, all_ in ranges.items()
    }
    for name, knob in knobs.items():
        frame = pl.DataFrame(
            {"value": [str(v) for v in knob["values"]], "accuracy": knob["accuracy"], "latency_ms": knob["latency_ms"]}
        )
        names = any(isinstance(value, str) for value in knob["values"])
        axis = alt.Axis(labelAngle=-40 if names else 0, labelLimit=90, labelOverlap=True)
        x = alt.X("value:O", title=name, sort=frame["value"].to_list(), axis=axis)
        base = alt.Chart(frame).encode(x, tooltip=["value:O", "accuracy:Q", "latency_ms:Q"])
        sides = []
        for y, title in (("accuracy", "mean accuracy"), ("latency_ms", "mean latency (ms)")):
            line = base.encode(alt.Y(f"{y}:Q", title=title, scale=scales[y], axis=alt.Axis(tickCount=4)))
            # a line says that values are in order, which names are not
            dots = line.mark_circle(size=50, opacity=1)
            layers = alt.layer(dots) if names else line.mark_line(strokeWidth=2) + dots
            sides.append(layers.properties(width=360, height=140))
        rows.append(alt.hconcat(*sides, spacing=40))
    return alt.vconcat(*rows)


def coverage(frames: Sequence[pl.DataFrame]) -> alt.ConcatChart:
    """How much was profiled, for pairs of knobs (or for one knob): white is nothing.

    Args:
        frames: one or two columns named after knobs, and share (0 to 1).
    """
    colour = alt.Color("share:Q", title="profiled", scale=alt.Scale(domain=[0, 1]), legend=alt.Legend(format="%"))
    panels = []
    for frame in frames:
        names = [name for name in frame.columns if name != "share"]
        orders = {name: sorted(frame[name].unique().to_list()) for name in names}
        x = alt.X(f"{names[0]}:O", sort=orders[names[0]], axis=alt.Axis(labelAngle=0, labelOverlap=True))
        y = [alt.Y(f"{name}:O", sort=orders[name]) for name in names[1:]]
        cells = (
            alt.Chart(frame).mark_rect().encode(x, *y, colour, tooltip=[*names, alt.Tooltip("share:Q", format=".1%")])
        )
        panels.append(cells.properties(width=210 if y else 760, height=170 if y else 30))
    return alt.concat(*panels, columns=3)


def in_order(value: object) -> tuple[bool, float, str]:
    """Sort key for knob values written as words: numbers by size, then names."""
    try:
        return False, float(str(value)), ""
    except ValueError:
        return True, 0.0, str(value)

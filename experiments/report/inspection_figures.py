"""The figures of the page about a profile."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import altair as alt
import numpy as np
import polars as pl
from markupsafe import Markup

from knobwise.common.words import join_words, quantity, spelled
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import KnobValue
from knobwise.experiments.evidence.schema import CurvePoint
from knobwise.experiments.evidence.task import Row
from knobwise.experiments.inspection.facts import Facts
from knobwise.experiments.report import charts
from knobwise.experiments.report.page import Figure
from knobwise.experiments.report.tables import Block
from knobwise.experiments.report.words import policy_name


def figures_of_inspection(facts: Facts) -> dict[str, list[Block]]:
    """Draw the figures of the page, heading → blocks; that of the coverage only where there are
    holes."""
    unit = facts["unit"]
    names = {name: policy_name(name) for name in ("budget_aware_static", "oracle")}
    titles = list(names.values())
    headroom = pl.DataFrame(facts["headroom"]).rename(names | {"budgets_ms": "budget_ms"})
    utility = headroom.unpivot(
        titles, index="budget_ms", variable_name="policy", value_name="utility"
    )
    utility = utility.unique(maintain_order=True)
    figures = {
        "Headroom": Figure(
            charts.by_condition(utility, "budget_ms", "utility", "utility (0 to 1)", unit=unit),
            "Utility is the accuracy of an answer that is on time, and 0 for a late one. Both "
            "lines are measured on the samples they were chosen on: a policy gets less than the "
            "oracle.",
        ),
        "Accuracy and latency": Figure(
            charts.plane(facts["configuration_means"], unit=facts["unit"]),
            "Each dot is one configuration; no other beats those on the dashed line.",
        ),
        "Latency distributions": Figure(
            charts.dots(_latencies_on_front(facts), in_words(f"latency ({unit})", unit)),
            "Of the configurations on the dashed line above, named by their "
            f"{join_words(list(facts['knobs']))}: the median over the samples, and a line from the "
            "fastest 5% to the slowest 5%.",
        ),
        "Effect of each knob": Figure(
            knob_effects(facts["knobs"], unit),
            "Means over all profiled cells with this value.",
            columns=2,
        ),
    }
    if facts["scattered"]:
        del figures["Headroom"]
    if facts["coverage"] < 1 or facts["grid"] > facts["configurations"]:
        figures["Coverage"] = Figure(
            coverage(facts["knobs"], facts["configuration_means"], facts["samples"]),
            "Share of all samples × combinations with these values that were profiled; blank: "
            "none.",
        )
    if facts["learning_curve"]:
        figures["How much to measure"] = Figure(
            learning_curve_chart(facts["learning_curve"]),
            "Utility of a simple predictor and of budget-aware static, both fitted on part of the "
            "cells and judged out of fold on all of them. Shaded: 95% intervals.",
        )
    return {"Samples": _pictures(facts)} | {name: [figures[name]] for name in figures}


def _latencies_on_front(facts: Facts) -> pl.DataFrame:
    """Return for each configuration on the front its `name`, the latency of its fastest (`low`) and
    slowest samples (`high`), and the median (`value`)."""
    rows = []
    for row in (facts["configuration_means"][i] for i in facts["pareto"]):
        low, median, high = row["latency_ms_quantiles"]
        values = " · ".join(map(str, map(spelled, row["knobs"].values())))
        name = f"{values}: accuracy {row['accuracy']:.1%}"
        rows.append({"name": name, "low": low, "value": median, "high": high})
    return pl.DataFrame(rows)


def _pictures(facts: Facts) -> list[Block]:
    """Return the examples as pictures with question and latency needed; only the built-in profile
    has any."""
    if facts["name"] != "builtin":
        return []
    from PIL import Image

    from knobwise.testbeds.elastic.adapter import builtin_input

    cells = []
    cell = Markup('<div><img src="{}" alt="{}"><small>{}<br>{}</small></div>')
    for example in facts["examples"]:
        question, pixels = builtin_input(example["sample_id"])
        file = io.BytesIO()
        Image.fromarray((255 * pixels).astype(np.uint8)).save(file, "PNG")
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        cells.append(cell.format(uri, question, question, quantity(example["needed_ms"])))
    return [
        "From easy to hard: below each picture its question and the latency of the cheapest "
        "configuration that answers it right.",
        Markup("<div class=samples>{}</div>").format(Markup("").join(cells)),
    ]


# -- charts ----------------------------------------------------------------------------------------


def learning_curve_chart(curve: Sequence[CurvePoint]) -> alt.LayerChart:
    """Draw the utility of the simple predictor and of static against the cells of a sample."""
    rows = []
    for point in curve:
        low, high = point["utility_ci95"]
        learned = {
            "policy": "simple predictor",
            "utility": point["utility"],
            "low": low,
            "high": high,
        }
        static = {"policy": policy_name("budget_aware_static"), "utility": point["static"]}
        rows += [{"cells": point["cells"], **row} for row in (learned, static)]
    counts = [point["cells"] for point in curve]
    axis = alt.Axis(values=counts, format="d", grid=False)
    x = alt.X("cells:Q", title="cells of a sample", scale=alt.Scale(type="log"), axis=axis)
    y = alt.Y("utility:Q", title="utility (0 to 1)", scale=charts.CLOSE)
    return charts.layer_charts(*charts.lines(pl.DataFrame(rows), x, y))


def knob_effects(
    knobs: Mapping[str, Mapping[str, Sequence[KnobValue]]], unit: str = "ms"
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
        values = [str(spelled(value)) for value in knob["values"]]
        rows = pl.DataFrame({"value": values} | {key: knob[key] for key in titles})
        x = alt.X("value:O", title=name, sort=values)
        for key, title in titles.items():
            # one scale for all knobs, so that a knob which does little looks like it
            means = list(itertools.chain(*(each[key] for each in knobs.values())))
            scale = alt.Scale(domain=[min(means), max(means)], padding=6)
            y = alt.Y(f"{key}:Q", title=title, scale=scale)
            dots = alt.Chart(rows).mark_circle(size=60, opacity=1)
            figure.append(charts.layer_charts(dots.encode(x, y), height=140))
    return figure


def coverage(
    knobs: Mapping[str, Mapping[str, Sequence[KnobValue]]],
    configurations: Sequence[Row],
    samples: int,
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
            counts[tuple(str(spelled(row["knobs"][name])) for name in pair)] += row["samples"]
        # how often two values could have been profiled together
        others = [len(knob["values"]) for name, knob in knobs.items() if name not in pair]
        most = samples * math.prod(others)
        rows = []
        for values, count in counts.items():
            rows.append(dict(zip("xy", values, strict=False)) | {"share": count / most})
        channels = [alt.X("x:O"), alt.Y("y:O", scale=alt.Scale(reverse=True))]
        for i, name in enumerate(pair):
            channels[i] = (
                channels[i]
                .title(name)
                .sort([str(spelled(value)) for value in knobs[name]["values"]])
            )
        cells = alt.Chart(pl.DataFrame(rows)).mark_rect()
        cells = cells.encode(*channels[: len(pair)], colour)
        figure.append(charts.layer_charts(cells, height=170))
    return figure

"""Show the facts about a profile: in sentences, on the terminal and as a page with charts."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from markupsafe import Markup
from rich.console import Console

from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.inspection.facts import Facts, mean_headroom
from knobwise.experiments.inspection.measured import CERTAIN, SURE
from knobwise.experiments.report.tables import (
    Content,
    Folded,
    print_lines,
    print_sections,
    reworded,
    table_of,
)
from knobwise.experiments.wording.sentences import learnable
from knobwise.experiments.wording.words import listed, number, points, policy_name, quantity


def lead(facts: Facts) -> str:
    """Say what a policy could gain over static: what looks predictable, and what an oracle has."""
    static, oracle = mean_headroom(facts)
    if facts["attainable"]:
        line = learnable(facts["attainable"])
    elif facts["features"]:
        line = "There are too few samples to tell what your features can predict"
    else:
        line = (
            "Nothing can be gained without features: a policy then sees only the budget, and "
            "cannot beat the best static choice"
        )
    most = points(oracle - static, ".1f")
    line += f". An oracle that knows every outcome would gain {most} points"
    halves = facts["oracle_of_halves"]
    if halves is None:
        return f"{line}; part of that is luck in single measurements."
    line += f", and {points(halves - static, '.1f')} points without luck in single latencies: it "
    line += "then chooses by one half of the repeats and is judged by the other"
    if facts["repeated_share"] < 0.995:
        once = number(1 - facts["repeated_share"], ".0%")
        line += f" ({once} of the cells were measured once, and keep their luck)"
    return f"{line}."


def _sentences(facts: Facts) -> list[str]:
    """Say what the profile holds, and what choosing per input could gain."""
    counts = ", ".join(f"{name} {count:,}" for name, count in facts["datasets"].items())
    widths = ", ".join(f"{name} ({width})" for name, width in facts["features"].items())
    lines = [
        f"{facts['samples']:,} samples × {facts['configurations']:,} configurations (of "
        f"{facts['grid']:,} combinations of knob values); {number(facts['coverage'], '.1%')} of "
        f"the cells are profiled. Samples by data set: {counts}.",
        f"{_differing(facts)} The median latency is "
        f"{quantity(facts['median_latency_ms'], facts['unit'])}; within one configuration latency "
        f"varies by {number(facts['latency_cv_within_configuration'], '.0%')} between samples "
        "(standard deviation / mean).",
    ]
    if facts["clusters"]:
        lines.append(
            f"The samples belong to {facts['clusters']:,} groups (profile.group), which no split "
            "parts."
        )
    # cells that were measured more than once show how much a measurement varies
    jitter = facts["latency_jitter_within_cell"]
    if jitter is not None:
        lines.append(
            "Measurements of the same sample and configuration vary by "
            f"{number(jitter, '.1%')} ({number(facts['repeated_share'], '.0%')} of the cells were "
            "measured repeatedly), the configurations of a sample by "
            f"{number(facts['latency_spread_between_configurations'], '.0%')} (standard deviation "
            "of ln latency, median)."
        )
    static, oracle = mean_headroom(facts)
    lines.append(
        "Mean over the default budgets: the best static choice has utility "
        f"{number(static, '.3f')}, the oracle {number(oracle, '.3f')}; both are measured on the "
        "samples that they were chosen on."
    )
    estimate = facts["attainable"]
    if estimate:
        decided = np.mean(estimate["learned"])
        lines.append(
            f"What looks predictable was judged out of fold on {estimate['samples']:,} of "
            f"{facts['samples']:,} samples{_narrowed(estimate)}. A quick policy decided at "
            f"{decided:.0%} of the budgets, static at the others. More samples or better features "
            "may give more."
        )
    return [*lines, f"Features: {widths or 'none'}."]


def _differing(facts: Facts) -> str:
    """Say how many samples have other accuracies under other settings."""
    share = number(facts["config_dependent_share"], ".1%")
    if not facts["fractional"]:
        return f"{share} of the samples are right under some settings and wrong under others."
    return (
        f"The accuracy of {share} of the samples depends on the setting; between the best and the "
        f"worst setting of a sample it differs by {points(facts['accuracy_range'], '.1f')} points "
        "(median)."
    )


def _narrowed(estimate: Facts) -> str:
    if "components" not in estimate:
        return ""
    return f", by the first {estimate['components']} principal components of the features"


def print_inspection(facts: Facts, console: Console) -> None:
    """Print the sentences and tables of the page; outside a terminal without colours and frames."""
    first = in_words(lead(facts), facts["unit"])
    print_lines(console, [f"{facts['name']}  {facts['digest']}", first])
    print_sections(console, _sections(facts, {}))


def _sections(facts: Facts, figures: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the page, heading → blocks, with these figures, or with none for a terminal."""
    budgets = [
        {
            "budget": quantity(row["budgets_ms"], facts["unit"]),
            "static": f"{row['budget_aware_static']:.3f}",
            "oracle": f"{row['oracle']:.3f}",
            "feasible": f"{row['feasible']:.1%}",
            "best static configuration": row["static_choice"],
        }
        for row in pl.DataFrame(facts["headroom"]).to_dicts()
    ]
    knobs = []
    for name, knob in facts["knobs"].items():
        for i, value in enumerate(knob["values"]):
            line = {"knob": name, "value": str(value), "accuracy": f"{knob['accuracy'][i]:.3f}"}
            knobs.append(line | {"latency": quantity(knob["latency_ms"][i], facts["unit"])})
    best = [
        {
            "configuration": mean["label"],
            "accuracy": f"{mean['accuracy']:.3f}",
            "latency": quantity(mean["latency_ms"], facts["unit"]),
            "samples": f"{mean['samples']:,}",
        }
        for mean in _front(facts)
    ]
    pareto = "Pareto front: no other configuration is more accurate without being slower"
    tables = {
        "Headroom": Folded("Headroom per budget", [table_of(budgets)]),
        "What the profile holds": _sentences(facts),
        **_noticed(facts),
        "Samples": None,
        "Accuracy and latency": Folded(pareto, [table_of(best)]),
        "Latency distributions": None,
        "Effect of each knob": Folded("Means over all profiled cells", [table_of(knobs)]),
        "Coverage": None,
    }
    # a figure stands above its numbers
    sections = {name: [*figures.get(name, []), block] for name, block in tables.items()}
    # findings and notes name columns, whatever these are called
    kept = {name: sections[name] for name in _noticed(facts)}
    return reworded(sections, facts["unit"]) | kept


def _noticed(facts: Facts) -> dict[str, list[str]]:
    """Return what was noticed: first what is certain, then what is likely, each with the most
    certain first, and the notes of the reader."""
    noticed: dict[str, list[str]] = {"Certain": [], "Likely": [], "Notes": facts["notes"]}
    for finding in sorted(facts["findings"], key=lambda each: SURE.index(each["sure"])):
        group = "Certain" if finding["sure"] in CERTAIN else "Likely"
        noticed[group].append(finding["text"])
    return noticed


def _front(facts: Facts) -> list[Facts]:
    """Return the facts about the configurations that no other beats."""
    return [facts["configuration_means"][i] for i in facts["pareto"]]


def write_inspection(facts: Facts, path: str | Path) -> Path:
    """Write the facts as a self-contained page with charts, and return its path."""
    from knobwise.experiments.report.page import render_page

    answer = in_words(lead(facts), facts["unit"])
    content = Content("knobwise profile", facts["name"], answer, facts=[facts["digest"]])
    return render_page(path, content, _sections(facts, _figures(facts)))


def _figures(facts: Facts) -> dict[str, list[Any]]:
    """Draw the figures of the page, heading → blocks; that of the coverage only where there are
    holes."""
    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import Figure

    unit = facts["unit"]
    names = {name: policy_name(name) for name in ("budget_aware_static", "oracle")}
    titles = list(names.values())
    headroom = pl.DataFrame(facts["headroom"]).rename(names | {"budgets_ms": "budget_ms"})
    utility = headroom.unpivot(
        titles, index="budget_ms", variable_name="policy", value_name="utility"
    )
    utility = utility.unique(maintain_order=True)
    spread = []
    # a line from the fastest to the slowest samples, a dot at the median
    for row in _front(facts):
        low, median, high = row["latency_ms_quantiles"]
        values = " · ".join(map(str, row["knobs"].values()))
        name = f"{values}: accuracy {row['accuracy']:.1%}"
        spread.append({"name": name, "low": low, "value": median, "high": high})
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
            charts.dots(pl.DataFrame(spread), in_words(f"latency ({unit})", unit)),
            "Of the configurations on the dashed line above, named by their "
            f"{listed(list(facts['knobs']))}: the median over the samples, and a line from the "
            "fastest 5% to the slowest 5%.",
        ),
        "Effect of each knob": Figure(
            charts.knob_effects(facts["knobs"], unit),
            "Means over all profiled cells with this value.",
            columns=2,
        ),
    }
    if facts["coverage"] < 1 or facts["grid"] > facts["configurations"]:
        figures["Coverage"] = Figure(
            charts.coverage(facts["knobs"], facts["configuration_means"], facts["samples"]),
            "Share of all samples × combinations with these values that were profiled; blank: "
            "none.",
        )
    return {"Samples": _pictures(facts)} | {name: [figures[name]] for name in figures}


def _pictures(facts: Facts) -> list[Any]:
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

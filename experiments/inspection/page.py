"""Show the facts about a profile: in sentences, on the terminal and as a page with charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console

from knobwise.common.progress import duration
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.units import MS
from knobwise.experiments.inspection.facts import Facts, mean_headroom
from knobwise.experiments.inspection.measured import CERTAIN, SURE
from knobwise.experiments.report.tables import (
    Content,
    Folded,
    Table,
    print_lines,
    print_sections,
    records,
    reworded,
)
from knobwise.experiments.wording.sentences import learnable
from knobwise.experiments.wording.words import number, points, quantity, span

ENOUGH = 0.01
"""Cells are enough if the policy that knows them is no more than this utility behind, at 95 %
confidence."""
SMALL_GRID = 16
"""With fewer configurations one cell of a sample is more than a sixteenth."""


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
    line += f". An oracle would gain {most} points at most"
    halves = facts["oracle_of_halves"]
    if round(oracle - static, 3) <= 0:
        # then nothing of it is noise
        return f"{line}."
    if halves is None:
        return f"{line}; part of that is measurement noise."
    line += f", or {points(halves - static, '.1f')} points with the noise in latency removed: it "
    line += "then chooses on half of the repeats and is scored on the other half"
    if facts["repeated_share"] < 0.995:
        once = number(1 - facts["repeated_share"], ".0%")
        line += f" ({once} of the cells have no repeats, so their noise remains)"
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
            f"The samples form {facts['clusters']:,} groups (profile.group); a split never "
            "divides one."
        )
    if facts["workers"]:
        lines.append(_machines(facts["workers"]))
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
        f"Mean utility over the default budgets: static {number(static, '.3f')}, oracle "
        f"{number(oracle, '.3f')}. Both are in-sample, so optimistic."
    )
    estimate = facts["attainable"]
    if estimate:
        decided = np.mean(estimate["learned"])
        lines.append(
            f"Predictable gain: cross-validated on {estimate['samples']:,} of "
            f"{facts['samples']:,} samples{_narrowed(estimate)}. A simple predictor decided at "
            f"{decided:.0%} of the budgets (over folds), static at the rest. More samples or "
            "better features may give more."
        )
    return [*lines, f"Features: {widths or 'none'}."]


def _machines(workers: Sequence[Facts]) -> str:
    """Say who measured, and how times compare on the cells that all workers measured."""
    machines = {(worker["host"], worker["accelerator"]) for worker in workers}
    line = f"Measured by {len(workers)} workers on {len(machines)} machines."
    if len(machines) == 1:
        line = f"Measured by {len(workers)} workers on one machine."
    factors = [worker["times"] for worker in workers if worker["times"] is not None]
    if not factors:
        return f"{line} They shared no cells, so their times cannot be compared."
    return (
        f"{line} For cells that they all measured, a worker took {min(factors):.2f} to "
        f"{max(factors):.2f} times as long as the others."
    )


def _differing(facts: Facts) -> str:
    """Say for how many samples the accuracy depends on the configuration."""
    share = number(facts["config_dependent_share"], ".1%")
    if not facts["fractional"]:
        return f"{share} of the samples are right under some configurations and wrong under others."
    return (
        f"The accuracy of {share} of the samples depends on the configuration; between the best "
        f"and the worst for a sample it differs by {points(facts['accuracy_range'], '.1f')} "
        "points (median)."
    )


def _narrowed(estimate: Facts) -> str:
    if "components" not in estimate:
        return ""
    return f", on the first {estimate['components']} principal components of the features"


def print_inspection(facts: Facts, console: Console) -> None:
    """Print the sentences and tables of the page; outside a terminal without colours and frames."""
    first = in_words(lead(facts), facts["unit"])
    print_lines(console, [f"{facts['name']}  {facts['digest']}", first])
    print_sections(console, _sections(facts, {}))


def _sections(facts: Facts, figures: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the page, heading → blocks, with these figures, or with none for a terminal."""
    unit = facts["unit"]
    budgets = pl.DataFrame(facts["headroom"]).to_dicts()
    front = [facts["configuration_means"][i] for i in facts["pareto"]]
    knobs = []
    for name, knob in facts["knobs"].items():
        for row in zip(*knob.values(), strict=True):
            knobs.append({"knob": name, **dict(zip(knob, row, strict=True))})
    pareto = "Pareto front (accuracy against mean latency)"
    tables = {
        "Headroom": Folded(
            "Gain of an oracle over static, per budget", [records(budgets, "headroom", unit)]
        ),
        "What the profile holds": _sentences(facts),
        **_how_much_to_measure(facts),
        **_noticed(facts),
        "Samples": None,
        "Accuracy and latency": Folded(
            pareto, [_with_costs(records(front, "front", unit), front, facts)]
        ),
        "Latency distributions": None,
        "Effect of each knob": Folded(
            "Means over all profiled cells",
            [_with_costs(records(knobs, "knobs", unit), knobs, facts)],
        ),
        "Coverage": None,
    }
    # a figure stands above its numbers
    sections = {name: [*figures.get(name, []), block] for name, block in tables.items()}
    # findings and notes name columns, whatever these are called
    kept = {name: sections[name] for name in _noticed(facts)}
    return reworded(sections, unit) | kept


def _with_costs(table: Table, rows: Sequence[Mapping[str, Any]], facts: Facts) -> Table:
    """Return a table of these rows with the means of further costs in its last columns."""
    cells = [list(row) for row in table.rows]
    for name, about in facts["costs"].items():
        for line, row in zip(cells, rows, strict=True):
            line.append(quantity(row[f"cost_{name}_mean"], about.get("unit", "")))
    means = [f"mean {name}" for name in facts["costs"]]
    return table._replace(header=[*table.header, *means], rows=cells)


def _how_much_to_measure(facts: Facts) -> dict[str, Any]:
    """Say which part of the cells would have been enough; nothing without a learning curve."""
    curve = facts["learning_curve"]
    if not curve:
        return {}
    rows = [point | {"effort": _effort(point, facts)} for point in curve]
    whole = rows[-1]
    enough = next(row for row in rows if row["behind_ci95"][1] <= ENOUGH)
    line = (
        f"{enough['cells']} of {whole['cells']} cells a sample are enough: a simple predictor that "
        f"knows no others is {points(enough['behind'], '.1f')} points"
        f"{span(enough['behind_ci95'])} of utility behind one that knows all, which gains "
        f"{points(whole['utility'] - whole['static'], '.1f')} over static. Enough is at most "
        f"{points(ENOUGH, '.0f')} point behind at the upper end of this interval. They took "
        f"{enough['effort']} to measure, all cells {whole['effort']}."
    )
    if enough is whole:
        line = (
            "No part of the cells is enough: a simple predictor that knows all of them may be more "
            f"than {points(ENOUGH, '.0f')} point of utility better."
        )
    if whole["cells"] < len(facts["configuration_means"]):
        line = _next_doubling(rows, facts)
    elif whole["cells"] < SMALL_GRID:
        line += (
            f" With {whole['cells']} configurations no part is smaller than one cell a sample; to "
            "measure less, take fewer samples."
        )
    curve_table = records(rows, "learning_curve")
    return {"How much to measure": Folded("Learning curve", [line, curve_table], open=True)}


def _next_doubling(rows: Sequence[Mapping[str, Any]], facts: Facts) -> str:
    """Say what measuring more of a profile would bring, of which part of the cells was measured."""
    last = rows[-1]
    line = f"{last['cells']} cells of a sample were measured; the others are predicted."
    if len(rows) < 2:
        return f"{line} That is too few for a curve: measure twice as many."
    before = rows[-2]
    line += (
        f" {last['cells']} instead of {before['cells']} brought a simple predictor "
        f"{points(before['behind'], '+.1f')} points of utility{span(before['behind_ci95'])}."
    )
    if before["behind_ci95"][0] <= 0:
        return f"{line} More cells would probably bring little."
    return (
        f"{line} The next doubling, {last['effort']} of measuring, may bring part of that again: "
        f"set knobs.per_sample={2 * last['cells']}."
    )


def _effort(point: Mapping[str, Any], facts: Facts) -> str:
    """Say what it takes to measure cells: the time, and further costs."""
    unit = facts["unit"]
    parts = [duration(point["cost"] / 1000) if unit == MS else quantity(point["cost"], unit)]
    for name, total in point["costs"].items():
        parts.append(quantity(total, facts["costs"][name].get("unit", name)))
    return ", ".join(parts)


def _noticed(facts: Facts) -> dict[str, list[str]]:
    """Return what was noticed: first what is certain, then what is likely, each with the most
    certain first, and the notes of the reader."""
    noticed: dict[str, list[str]] = {"Certain": [], "Likely": [], "Notes": facts["notes"]}
    for finding in sorted(facts["findings"], key=lambda each: SURE.index(each["sure"])):
        group = "Certain" if finding["sure"] in CERTAIN else "Likely"
        noticed[group].append(finding["text"])
    return noticed


def write_inspection(facts: Facts, path: str | Path) -> Path:
    """Write the facts as a self-contained page with charts, and return its path."""
    # altair is slow to load
    from knobwise.experiments.inspection.figures import figures_of
    from knobwise.experiments.report.page import render_page

    answer = in_words(lead(facts), facts["unit"])
    content = Content("knobwise profile", facts["name"], answer, facts=[facts["digest"]])
    return render_page(path, content, _sections(facts, figures_of(facts)))

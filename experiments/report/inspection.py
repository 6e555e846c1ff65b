"""What `inspect` shows: the facts about a profile, in sentences, on the terminal and as a page with
charts; what the log of a controller holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console

from knobwise.common.progress import duration
from knobwise.common.words import format_count, format_number, points, quantity, spelled
from knobwise.envs.tables.units import MS
from knobwise.experiments.evidence.schema import CurvePoint
from knobwise.experiments.evidence.task import Row
from knobwise.experiments.inspection.facts import Facts, mean_headroom
from knobwise.experiments.inspection.measured import CERTAIN, SURE
from knobwise.experiments.report.sentences import Sentence, write_sentences
from knobwise.experiments.report.tables import (
    Block,
    Content,
    Folded,
    Table,
    print_lines,
    print_sections,
    records,
    reword_costs,
)
from knobwise.experiments.report.verdict import learnable
from knobwise.experiments.report.words import span

ENOUGH = 0.01
"""Cells are enough if the policy that knows them is no more than this utility behind, at 95 %
confidence."""
SMALL_GRID = 16
"""With fewer configurations one cell of a sample is more than a sixteenth."""


def lead(facts: Facts) -> Sentence:
    """Say what a policy could gain over static: what looks predictable, and what an oracle has on
    the same samples over the same static choices; or that nobody can know."""
    if facts["scattered"]:
        count = format_count(facts["samples_of_setting"], "sample")
        return Sentence("scattered", count=count, samples=f"{facts['samples']:,}")
    static, oracle = mean_headroom(facts)
    gain = oracle - static
    ci95 = ""
    if estimate := facts["attainable"]:
        line = learnable(estimate)
        gain, ci95 = estimate["oracle"], span(estimate["oracle_ci95"])
    else:
        line = Sentence("few_samples" if facts["features"] else "no_features")
    noise: Sentence | str = ""
    if round(gain, 3) > 0:
        # else nothing of it is noise
        noise = _noise(facts, gain)
    return Sentence("headroom", learnable=line, most=points(gain, ".1f"), ci95=ci95, noise=noise)


def _noise(facts: Facts, gain: float) -> Sentence:
    """Say how much of what an oracle gains is noise in latency, as far as that is known."""
    halves = facts["oracle_of_halves"]
    if halves is None:
        return Sentence("part_is_noise")
    once: Sentence | str = ""
    if facts["repeated_share"] < 0.995:
        once = Sentence("measured_once", share=format_number(1 - facts["repeated_share"], ".0%"))
    _, oracle = mean_headroom(facts)
    left = gain - (oracle - halves)
    if facts["attainable"]:
        # half of the repeats tell an oracle less than all of them tell a policy
        left = max(left, facts["attainable"]["gain"])
    return Sentence("without_noise", points=points(left, ".1f"), once=once)


def contents(facts: Facts) -> list[Sentence]:
    """Say what the profile holds, and what choosing per input could gain."""
    lines = [
        Sentence(
            "holds",
            samples=f"{facts['samples']:,}",
            configurations=f"{facts['configurations']:,}",
            grid=f"{facts['grid']:,}",
            coverage=format_number(facts["coverage"], ".1%"),
            datasets=", ".join(f"{name} {count:,}" for name, count in facts["datasets"].items()),
        ),
        Sentence(
            "latency",
            differing=_differing(facts),
            median=quantity(facts["median_latency_ms"], facts["unit"]),
            varies=_varying(facts),
        ),
    ]
    if facts["clusters"]:
        lines.append(Sentence("groups", clusters=f"{facts['clusters']:,}"))
    if facts["workers"]:
        lines.append(_machines(facts["workers"]))
    # cells that were measured more than once show how much a measurement varies
    if facts["latency_jitter_within_cell"] is not None:
        lines.append(
            Sentence(
                "jitter",
                jitter=format_number(facts["latency_jitter_within_cell"], ".1%"),
                repeated=format_number(facts["repeated_share"], ".0%"),
                spread=format_number(facts["latency_spread_between_configurations"], ".0%"),
            )
        )
    if not facts["scattered"]:
        static, oracle = (format_number(value, ".3f") for value in mean_headroom(facts))
        lines.append(Sentence("mean_utility", static=static, oracle=oracle))
    if estimate := facts["attainable"]:
        narrowed: Sentence | str = ""
        if "components" in estimate:
            narrowed = Sentence("narrowed", components=estimate["components"])
        lines.append(
            Sentence(
                "estimate",
                judged=f"{estimate['samples']:,}",
                samples=f"{facts['samples']:,}",
                narrowed=narrowed,
                decided=f"{np.mean(estimate['learned']):.0%}",
            )
        )
    widths = ", ".join(f"{name} ({width})" for name, width in facts["features"].items())
    return [*lines, Sentence("features", features=widths or "none")]


def _machines(workers: Sequence[Facts]) -> Sentence:
    """Say who measured, and how times compare on the cells that all workers measured."""
    count = len({(worker["host"], worker["accelerator"]) for worker in workers})
    machines = Sentence("one_machine" if count == 1 else "machines", count=count)
    times = Sentence("no_shared_cells")
    factors = [worker["times"] for worker in workers if worker["times"] is not None]
    if factors:
        times = Sentence("times", least=f"{min(factors):.2f}", most=f"{max(factors):.2f}")
    return Sentence("workers", workers=len(workers), machines=machines, times=times)


def _differing(facts: Facts) -> Sentence:
    """Say for how many samples the accuracy depends on the configuration."""
    share = format_number(facts["config_dependent_share"], ".1%")
    if not facts["fractional"]:
        return Sentence("differing", share=share)
    return Sentence("differing_by", share=share, range=points(facts["accuracy_range"], ".1f"))


def _varying(facts: Facts) -> Sentence:
    """Say how much the latency of a configuration varies between samples."""
    varies = facts["latency_cv_within_configuration"]
    if varies is None:
        return Sentence("varying_unknown")
    return Sentence("varying", varies=format_number(varies, ".0%"))


def print_inspection(facts: Facts, console: Console) -> None:
    """Print the sentences and tables of the page; outside a terminal without colours and frames."""
    first = write_sentences([lead(facts)], facts["unit"])
    print_lines(console, [f"{facts['name']}  {facts['digest']}", *first])
    print_sections(console, _sections(facts, {}))


def _sections(facts: Facts, figures: Mapping[str, list[Block]]) -> dict[str, list[Block | None]]:
    """Return the page, heading → blocks, with these figures, or with none for a terminal."""
    unit = facts["unit"]
    budgets = pl.DataFrame(facts["headroom"]).to_dicts()
    front = [facts["configuration_means"][i] for i in facts["pareto"]]
    knobs = []
    for name, knob in facts["knobs"].items():
        for row in zip(*knob.values(), strict=True):
            knobs.append({"knob": name, **dict(zip(knob, map(spelled, row), strict=True))})
    pareto = "Pareto front (accuracy against mean latency)"
    headroom = Folded(
        "Gain of an oracle over static, per budget (in-sample)",
        [records(budgets, "headroom", unit)],
    )
    tables: dict[str, Block | None] = {
        "Headroom": None if facts["scattered"] else headroom,
        "What the profile holds": list(map(str, contents(facts))),
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
    return reword_costs(sections, unit) | kept


def _with_costs(table: Table, rows: Sequence[Mapping[str, object]], facts: Facts) -> Table:
    """Return a table of these rows with the means of further costs in its last columns."""
    cells = [list(row) for row in table.rows]
    for name, about in facts["costs"].items():
        for line, row in zip(cells, rows, strict=True):
            line.append(quantity(row[f"cost_{name}_mean"], about.get("unit", "")))
    means = [f"mean {name}" for name in facts["costs"]]
    return table._replace(header=[*table.header, *means], rows=cells)


def _how_much_to_measure(facts: Facts) -> dict[str, Folded]:
    """Say which part of the cells would have been enough; nothing without a learning curve."""
    curve = facts["learning_curve"]
    if not curve:
        return {}
    rows = [point | {"effort": _effort(point, facts)} for point in curve]
    about = str(enough(rows, len(facts["configuration_means"])))
    blocks: list[Block] = [about, records(rows, "learning_curve")]
    return {"How much to measure": Folded("Learning curve", blocks, open=True)}


def enough(rows: Sequence[Row], configurations: int) -> Sentence:
    """Say which part of the cells would have been enough; of a profile of which only part was
    measured, what measuring more would bring.

    Args:
        rows: of the learning curve, from few cells to all that were measured, with the `effort`
            of each in words.
        configurations: how many there are.
    """
    whole = rows[-1]
    if whole["cells"] < configurations:
        return _next_doubling(rows)
    small_grid: Sentence | str = ""
    if whole["cells"] < SMALL_GRID:
        small_grid = Sentence("small_grid", cells=whole["cells"])
    limit = points(ENOUGH, ".0f")
    least = next(row for row in rows if row["behind_ci95"][1] <= ENOUGH)
    if least is whole:
        return Sentence("not_enough", limit=limit, small_grid=small_grid)
    return Sentence(
        "enough",
        cells=least["cells"],
        all=whole["cells"],
        behind=points(least["behind"], ".1f"),
        ci95=span(least["behind_ci95"]),
        gain=points(whole["utility"] - whole["static"], ".1f"),
        limit=limit,
        effort=least["effort"],
        whole=whole["effort"],
        small_grid=small_grid,
    )


def _next_doubling(rows: Sequence[Row]) -> Sentence:
    """Say what measuring more of a profile would bring, of which part of the cells was measured."""
    last = rows[-1]
    if len(rows) < 2:
        return Sentence("part_measured", cells=last["cells"], more=Sentence("no_curve"))
    before = rows[-2]
    following = Sentence("no_more_cells")
    if before["behind_ci95"][0] > 0:
        following = Sentence("next_doubling", effort=last["effort"], cells=2 * last["cells"])
    doubled = Sentence(
        "last_doubling",
        cells=last["cells"],
        before=before["cells"],
        gain=points(before["behind"], "+.1f"),
        ci95=span(before["behind_ci95"]),
        next=following,
    )
    return Sentence("part_measured", cells=last["cells"], more=doubled)


def _effort(point: CurvePoint, facts: Facts) -> str:
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
    from knobwise.experiments.report.inspection_figures import figures_of_inspection
    from knobwise.experiments.report.page import render_page

    (answer,) = write_sentences([lead(facts)], facts["unit"])
    content = Content("knobwise profile", facts["name"], answer, facts=[facts["digest"]])
    return render_page(path, content, _sections(facts, figures_of_inspection(facts)))


def print_log(facts: Facts, console: Console) -> None:
    """Print what the log of a deployed controller holds, see `inspect_log`."""
    print_lines(console, write_sentences(log_sentences(facts), facts["unit"]))


def log_sentences(facts: Facts) -> list[Sentence]:
    """Return the sentences of `print_log`."""
    total = facts["requests"]
    accuracy = Sentence("right", share=format_number(facts["accuracy"], ".1%"))
    if facts["fractional"]:
        accuracy = Sentence("mean_accuracy", accuracy=format_number(facts["accuracy"], ".3f"))
    lines = [
        Sentence(
            "requests",
            log=facts["log"],
            requests=format_count(total, "request"),
            controllers=format_count(len(facts["controllers"]), "controller"),
        ),
        Sentence(
            "shares",
            on_time=f"{facts['on_time']:.1%}",
            labelled=f"{facts['labelled']:.1%}",
            accuracy=accuracy,
            explored=f"{facts['explored']:.1%}",
        ),
    ]
    if facts["abandoned"]:
        lines.append(Sentence("abandoned", requests=format_count(facts["abandoned"], "request")))
    lines += said_of_limits(facts["over_limit"])
    if facts["unlike"]:
        lines.append(Sentence("unlike", requests=format_count(facts["unlike"], "request")))
    for reason, count in sorted(facts["set_aside"].items()):
        lines.append(Sentence("skipped", rows=f"{count:,}", reason=reason))
    for label, count in facts["configurations"].items():
        requests = format_count(count, "request")
        share = f"{count / total:.1%}"
        lines.append(Sentence("chosen", configuration=label, requests=requests, share=share))
    lines += said_of_times(facts["times"], facts["unit"], facts["log"])
    return lines + said_of_faults(facts["without_answer"])


def said_of_limits(counts: Mapping[str, int]) -> list[Sentence]:
    """Return how many answers cost more than their limit, see `facts_of_limits`; nothing where that
    is not known of any."""
    if not counts["known"]:
        return []
    share = f"{counts['over'] / counts['known']:.1%}"
    return [Sentence("over_limit", share=share, answers=format_count(counts["known"], "answer"))]


def said_of_faults(faults: Sequence[Facts]) -> list[Sentence]:
    """Return how often settings gave no answer, see `facts_of_faults`."""
    return [
        Sentence(
            "no_answer",
            configuration=each["setting"],
            faults=f"{each['faults']:,}",
            requests=format_count(each["requests"], "request"),
            share=f"{each['faults'] / each['requests']:.1%}",
        )
        for each in faults
    ]


def said_of_times(
    times: Sequence[Facts], unit: str, log: str, learned: bool = False
) -> list[Sentence]:
    """Return what the answers of each setting took beside what was expected, and what to do next.

    Args:
        times: see `facts_of_times`.
        unit: of the times.
        log: the folder of the log.
        learned: whether an update has learned them already.
    """
    lines = []
    for each in times:
        since: Sentence | str = ""
        if each["since"] is not None:
            moment = datetime.fromtimestamp(each["since"], UTC)
            since = Sentence("changed_since", moment=f"{moment:%Y-%m-%d %H:%M}")
        lines.append(
            Sentence(
                "times_at_least" if each["at_least"] else "times_of_setting",
                configuration=each["setting"],
                took=quantity(each["took"], unit),
                factor=f"{each['factor']:.2g}",
                since=since,
                left=f"{each['left']:,}",
                answers=format_count(each["answers"], "answer"),
            )
        )
    for each in times:
        if each["more"] and each["off"]:
            answers = format_count(each["more"], "answer")
            lines.append(Sentence("more_answers", configuration=each["setting"], answers=answers))
    changed = [each for each in times if each["changed"]]
    if changed and not learned:
        far = Sentence("far") if any(each["far"] for each in changed) else ""
        count = format_count(len(changed), "setting")
        lines.append(Sentence("times_changed", count=count, log=log, far=far))
    return lines

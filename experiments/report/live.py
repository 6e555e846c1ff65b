"""Show the results of a live run on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.report.words import (
    LEARNED,
    STATIC,
    interval,
    number,
    policy_name,
    ranked,
    sentences,
)

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = {
    "on time": ("satisfaction", ".1%"),
    "on time (feasible)": ("satisfaction_feasible", ".1%"),
    "accuracy": ("accuracy", ".3f"),
    "utility": ("utility", ".3f"),
    "mean ms": ("latency_ms", ".2f"),
    "p95 ms": ("latency_ms_p95", ".2f"),
}
"""Heading → key and format of a column."""
REPLAYED = {"replay: on time": ("satisfaction", ".1%"), "replay: ms": ("latency_ms", ".2f")}
"""Heading → key and format of a column of the replay."""
WITH_INTERVAL = ("satisfaction", "accuracy", "utility")
"""The keys of numbers with an interval."""


def policies(results: Mapping[str, Any]) -> Table:
    """Return a row for every policy, the best utility first; the last two columns are those of the
    replay, if there was one."""
    rows = ranked(results)
    replay = {(row["policy"], row["what"]): row["replay"] for row in results["agreement"]}
    if replay:
        columns = COLUMNS
        replayed = REPLAYED
    else:
        columns = {name: column for name, column in COLUMNS.items() if column[0] in rows[0]}
        replayed = {}
    cells = []
    for row in rows:
        line = [name_of(results, row["policy"])]
        for key, how in columns.values():
            text = number(row[key], how)
            if key in WITH_INTERVAL:
                text += interval(row[f"{key}_ci95"], how)
            line.append(text)
        for key, how in replayed.values():
            line.append(number(replay[row["policy"], key], how))
        cells.append(line)
    strong = [i for i, row in enumerate(rows) if row["policy"] == LEARNED]
    return Table(["policy", *columns, *replayed], cells, strong)


def name_of(results: Mapping[str, Any], policy: str) -> str:
    """Return a policy in words; a fixed configuration with its knobs."""
    if policy not in results["configurations"]:
        return policy_name(policy)
    knobs = ", ".join(
        f"{name} {value}" for name, value in results["configurations"][policy].items()
    )
    return f"fixed, {policy_name(policy)}\n({knobs})"


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Say in sentences what the run shows."""
    latency = 0.0  # the largest differences between live run and replay
    share = 0.0
    for row in results["agreement"]:
        difference = abs(row["difference"])
        if row["what"] == "latency_ms":
            latency = max(latency, difference / row["replay"])
        elif row["what"] == "satisfaction":
            share = max(share, difference)
    return sentences("live.txt.j2", **results, latency=latency, share=share)


def print_live(results: Mapping[str, Any], console: Console) -> None:
    """Print the table and the sentences; without frames if this is no terminal."""
    table = policies(results)
    print_table(console, table.header, table.rows, (0, 1, 3, 4, 5), table.strong)
    print_lines(console, verdict(results))


def write_live_page(path: str | Path, results: Mapping[str, Any]) -> Path:
    """Write the page and return its path; it needs no network."""
    import polars as pl

    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import render_page

    table = policies(results)
    width = len(table.header)
    if results["agreement"]:  # the replay has its own table on the page
        width -= len(REPLAYED)
    shares = []
    for metric, title in (("satisfaction", "share on time"), ("utility", "utility (0 to 1)")):
        rows = []
        for row in ranked(results):
            low, high = row[f"{metric}_ci95"]
            dot = {"name": policy_name(row["policy"]), "value": row[metric]}
            rows.append(dot | {"low": low, "high": high})
        colour = charts.colour_of([row["name"] for row in rows], "name").legend(None)
        shares.append(charts.dots(pl.DataFrame(rows), title, colour))
    return render_page(
        path,
        "live.html.j2",
        results=results,
        verdict=verdict(results),
        shares=shares,
        run_columns=[policy_name(row["policy"]) for row in results["rows"]],
        timeline=charts.timeline(pl.DataFrame(results["timeline"])),
        learned=next(row for row in results["rows"] if row["policy"] == LEARNED),
        static=next(row for row in results["rows"] if row["policy"] == STATIC),
        policies=Table(table.header[:width], [row[:width] for row in table.rows], table.strong),
        name_of=name_of,
    )

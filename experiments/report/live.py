"""The results of a live run, on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.report.words import LEARNED, STATIC, Row, interval, number, policy_name, sentences

if TYPE_CHECKING:
    import altair as alt
    from rich.console import Console

METRICS = {"accuracy": "accuracy", "latency_ms": "mean ms", "satisfaction": "share on time", "utility": "utility"}
HEADER = ["policy", "on time", "on time (feasible)", "accuracy", "utility", "mean ms", "p95 ms"]
REPLAYED = ["replay: on time", "replay: ms"]


def cells(results: Mapping[str, Any]) -> list[list[str]]:
    """One row for each policy, the best utility first, under `HEADER` and `REPLAYED`."""
    replay = {(row["policy"], row["what"]): row["replay"] for row in results["agreement"]}
    return [
        [
            name_of(results, row["policy"]),
            _with_interval(row, "satisfaction", ".1%"),
            number(row["satisfaction_feasible"], ".1%"),
            _with_interval(row, "accuracy", ".3f"),
            _with_interval(row, "utility", ".3f"),
            number(row["latency_ms"], ".2f"),
            number(row["latency_ms_p95"], ".2f"),
            number(replay[row["policy"], "satisfaction"], ".1%"),
            number(replay[row["policy"], "latency_ms"], ".2f"),
        ]
        for row in _ranked(results)
    ]


def _ranked(results: Mapping[str, Any]) -> list[Row]:
    return sorted(results["rows"], key=lambda row: -float(row["utility"]))


def _with_interval(row: Row, metric: str, how: str) -> str:
    return number(row[metric], how) + interval(row[f"{metric}_ci95"], how)


def name_of(results: Mapping[str, Any], policy: str) -> str:
    """A policy in words; a fixed configuration with its knobs."""
    if policy in (LEARNED, STATIC):
        return policy_name(policy)
    knobs = ", ".join(f"{name} {value}" for name, value in results["configurations"][policy].items())
    return f"fixed, {policy_name(policy)}\n({knobs})"


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What the run shows, in sentences."""
    rows, agreement = {row["policy"]: row for row in results["rows"]}, results["agreement"]
    return sentences(
        "live.txt.j2",
        **results,
        learned=rows.pop(LEARNED),
        best=max(rows.values(), key=lambda row: float(row["utility"])),
        differing=[row for row in agreement if not row["agrees"]],
        metrics=METRICS,
        latency=max(abs(row["difference"]) / row["replay"] for row in agreement if row["what"] == "latency_ms"),
        share=max(abs(row["difference"]) for row in agreement if row["what"] == "satisfaction"),
    )


def print_live(results: Mapping[str, Any], console: Console) -> None:
    """The table and the sentences; without frames if this is no terminal."""
    print_table(console, HEADER + REPLAYED, cells(results), (0, 1, 3, 4, 5), policy_name(LEARNED))
    print_lines(console, verdict(results))


def write_live_page(path: str | Path, results: Mapping[str, Any]) -> Path:
    """Write the page and return its path; it needs no network."""
    from knobwise.experiments.report.page import render_page

    machine = f"{results['machine']['cpu']}, torch {results['machine']['torch']}, one thread"
    strong = [place for place, row in enumerate(_ranked(results)) if row["policy"] == LEARNED]
    compared = [
        [
            name_of(results, row["policy"]) if place % len(METRICS) == 0 else "",
            METRICS[row["what"]],
            number(row["live"], ".3f"),
            number(row["replay"], ".3f"),
            f"{row['difference']:+.4f}\n{row['ci95'][0]:+.4f} to {row['ci95'][1]:+.4f}",
            "yes" if row["agrees"] else "no",
        ]
        for place, row in enumerate(results["agreement"])
    ]
    return render_page(
        path,
        "live.html.j2",
        title="knobwise: live",
        name=results["kind"],
        facts=[machine, f"profile {results['profile']['name']}"],
        verdict=verdict(results),
        bars=bars(results),
        policies=Table(HEADER, [row[: len(HEADER)] for row in cells(results)], strong),
        replay=Table(["policy", "metric", "live", "replay", "difference", "agree"], compared),
    )


def bars(results: Mapping[str, Any]) -> alt.HConcatChart:
    """Share on time and utility of every policy."""
    import altair as alt
    import polars as pl

    from knobwise.experiments.report.charts import with_spans
    from knobwise.experiments.report.colours import domain

    names = [policy_name(row["policy"]) for row in _ranked(results)]
    colour = alt.Color("policy:N", legend=None, scale=alt.Scale(domain=domain(names)))
    panels: list[alt.LayerChart] = []
    for metric, title in (("satisfaction", "share on time"), ("utility", "utility")):
        rows = [
            {"policy": policy_name(row["policy"]), "value": row[metric]}
            | dict(zip(("low", "high"), row[f"{metric}_ci95"], strict=True))
            for row in results["rows"]
        ]
        x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, 1]))
        y = alt.Y("policy:N", sort=names, title=None, axis=alt.Axis(labels=not panels, ticks=False))
        base = alt.Chart(pl.DataFrame(rows)).encode(y)
        layers = with_spans(base.mark_bar(opacity=0.85).encode(x, colour), base)
        panels.append(layers.properties(width=340, height=28 * len(names)))
    return alt.hconcat(*panels)

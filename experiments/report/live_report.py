"""What a live run found: a table on the terminal, and a page with charts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.experiments.report.verdict import LEARNED, STATIC, interval, number, policy_name

if TYPE_CHECKING:
    import altair as alt
    from rich.console import Console

NAMES = {"best_static": "best static", "cheapest": "cheapest", "most_accurate": "most accurate"}
_CLOCKS = {"wall": "the wall's", "cpu": "the CPU time of the thread"}
BUSY = 1.5
"""A machine that takes so many times the profile's latencies is slow, or busy."""
LISTED = 3
"""Of the numbers in which live and replay differ, so many are named."""
WHAT = {"accuracy": ".3f", "latency_ms": ".3f", "satisfaction": ".3f", "utility": ".3f"}
HEADER = [
    "policy",
    "in time",
    "where possible",
    "accuracy",
    "utility",
    "mean ms",
    "p95 ms",
    "replay: in time",
    "replay: ms",
]


def cells(results: Mapping[str, Any]) -> list[list[str]]:
    """One row of words for each policy, the best utility first."""
    replay = {(row["policy"], row["what"]): row for row in results["agreement"]}
    return [
        [
            name_of(results, row["policy"]),
            number(row["satisfaction"], ".1%") + interval(row["satisfaction_ci95"], ".1%"),
            number(row["satisfaction_feasible"], ".1%"),
            number(row["accuracy"], ".3f") + interval(row["accuracy_ci95"], ".3f"),
            number(row["utility"], ".3f") + interval(row["utility_ci95"], ".3f"),
            number(row["latency_ms"], ".2f"),
            number(row["latency_ms_p95"], ".2f"),
            number(replay[row["policy"], "satisfaction"]["replay"], ".1%"),
            number(replay[row["policy"], "latency_ms"]["replay"], ".2f"),
        ]
        for row in sorted(results["rows"], key=lambda row: -row["utility"])
    ]


def name_of(results: Mapping[str, Any], policy: str) -> str:
    """A policy in words; a fixed configuration with its knobs."""
    if policy in (LEARNED, STATIC):
        return policy_name(policy)
    knobs = results["configurations"][policy]
    return f"fixed, {NAMES[policy]}\n({', '.join(f'{name} {value}' for name, value in knobs.items())})"


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What was found, in sentences."""
    rows = {row["policy"]: row for row in results["rows"]}
    own, overhead, speed = rows[LEARNED], results["overhead"], results["speed"]
    others = [row for name, row in rows.items() if name != LEARNED]
    best = max(others, key=lambda row: row["utility"])
    arrivals = "each after the one before" if results["rate"] is None else f"{results['rate']:g} a second"
    away = [row for row in results["agreement"] if not row["agrees"]]
    decisions, who = results["decisions"], "A student of the controller" if results["student"] else "The controller"
    said = [
        f"Simulated stream: {results['requests']} requests × {results['repeats']}, arriving {arrivals}; budgets "
        f"{', '.join(f'{b:.2f}' for b in results['budgets_ms'])} ms, drawn at random. Model and answers "
        f"are real, the clock is {_CLOCKS[results['clock']]}; {results['infeasible']:.1%} of the budgets no "
        "configuration can meet.",
        f"{who} answered {own['satisfaction']:.1%} in time with accuracy {own['accuracy']:.3f}: utility "
        f"{own['utility']:.3f}, against {best['utility']:.3f} of the best of the others "
        f"({policy_name(best['policy'])}), {best['behind']:+.3f} [{best['behind_ci95'][0]:+.3f}, "
        f"{best['behind_ci95'][1]:+.3f}].",
        f"It added {overhead['share']:.1%} to the model's mean inference of {overhead['inference_ms']:.2f} ms: "
        f"{overhead['overhead_us']:.0f} µs, in the median {overhead['decision_us_p50']:.0f} for a decision and "
        f"{overhead['features_and_knobs_us_p50']:.0f} for features and knobs.",
        f"This machine took {speed['during']:.3f} times the profile's latencies during the run ({speed['before']:.3f} "
        f"before). At the same limits a replay decides as the controller did in "
        f"{decisions['as_replayed_at_the_same_limit']:.1%} of the requests, at the whole budgets in "
        f"{decisions['as_replayed_at_the_whole_budget']:.1%}.",
    ]
    if speed["during"] > BUSY:
        said[-1] += " That is slow: other work on the machine also lengthens what the controller adds."
    relative = max(
        abs(row["difference"]) / row["replay"] for row in results["agreement"] if row["what"] == "latency_ms"
    )
    points = max(abs(row["difference"]) for row in results["agreement"] if row["what"] == "satisfaction")
    apart = f"Paired, mean latencies are up to {relative:.1%} apart, shares in time up to {100 * points:.1f} points."
    if not away:
        return [*said, f"Live and replay agree: accuracy exactly, the rest within the 95% intervals. {apart}"]
    listed = "; ".join(
        f"{_in_words(row['what'])} of {policy_name(row['policy'])} {row['live']:.3f} live, {row['replay']:.3f} replayed"
        for row in away[:LISTED]
    ) + (f"; and {len(away) - LISTED} more" if len(away) > LISTED else "")
    agreeing = len(results["agreement"]) - len(away)
    return [*said, f"Live and replay agree in {agreeing} numbers; not in these: {listed}. {apart}"]


def _in_words(what: str) -> str:
    return what.replace("latency_ms", "mean ms").replace("satisfaction", "share in time")


def print_live(results: Mapping[str, Any], console: Console) -> None:
    """The table and the sentences; without frames when this is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = console.is_terminal
    shown = Table(box=box.SIMPLE_HEAD if terminal else None, header_style="bold", pad_edge=False)
    for place, title in enumerate(HEADER):
        shown.add_column(title, justify="right" if place else "left", no_wrap=bool(place))
    for row in cells(results):
        shown.add_row(
            *(cell.replace("\n", " ") for cell in row), style="bold" if row[0] == policy_name(LEARNED) else None
        )
    wide = console if terminal else Console(file=console.file, width=220)
    wide.print(shown, markup=False, highlight=False)
    for words in verdict(results):
        console.print(words, markup=False, highlight=False, soft_wrap=not terminal)


# -- the page ----------------------------------------------------------------------------------------------------------


def write_live_page(path: str | Path, results: Mapping[str, Any]) -> Path:
    """Write the page, whole and without a network."""
    from knobwise.experiments.report import page

    rows = cells(results)
    strong = [i for i, row in enumerate(rows) if row[0] == policy_name(LEARNED)]
    compared = [
        ["" if place % len(WHAT) else name_of(results, row["policy"]), _in_words(row["what"])]
        + [number(row[key], WHAT[row["what"]]) for key in ("live", "replay")]
        + [
            f"{row['difference']:+.4f}\n{row['ci95'][0]:+.4f} to {row['ci95'][1]:+.4f}",
            "yes" if row["agrees"] else "no",
        ]
        for place, row in enumerate(results["agreement"])
    ]
    machine = f"{results['machine']['cpu']}, torch {results['machine']['torch']}, one thread"
    parts = [
        f"<p class=soft>knobwise live run</p><h1>{html.escape(results['kind'])}</h1>",
        f"<p class=soft>{html.escape(machine)} · profile {html.escape(results['profile']['name'])}</p>",
        f"<div class=verdict>{''.join(f'<p>{html.escape(words)}</p>' for words in verdict(results))}</div>",
        "<h2>Policies</h2>",
        page.figure(bars(results), "Share of requests answered in time, and utility; lines are 95% intervals."),
        page.table(HEADER[:-2], [row[:-2] for row in rows], strong),  # what is replayed has a table of its own
        "<h2>Live beside replay</h2><p>The same decisions, looked up in the profile; latencies times the speed of this "
        "machine. They agree where what is replayed lies in the 95% interval of what was served, accuracy where every "
        "answer is the same. Below a paired difference stands its own interval.</p>",
        page.table(["policy", "what", "live", "replay", "difference", "agree"], compared),
    ]
    return page.write_page(path, "knobwise: live", parts)


def bars(results: Mapping[str, Any]) -> alt.HConcatChart:
    """Share in time and utility of every policy."""
    import altair as alt
    import polars as pl

    order = [row["policy"] for row in sorted(results["rows"], key=lambda row: -row["utility"])]
    drawn: list[alt.LayerChart] = []
    for what, title in (("satisfaction", "answered in time"), ("utility", "utility")):
        rows = [
            {"policy": policy_name(row["policy"]), "kind": "controller" if row["policy"] == LEARNED else "others"}
            | {"value": row[what], "low": row[f"{what}_ci95"][0], "high": row[f"{what}_ci95"][1]}
            for row in results["rows"]
        ]
        names = [policy_name(policy) for policy in order]
        axis = alt.Y("policy:N", sort=names, title=None, axis=alt.Axis(labels=not drawn, ticks=False))
        base = alt.Chart(pl.DataFrame(rows)).encode(axis)
        colour = alt.Color("kind:N", legend=None, scale=alt.Scale(domain=["controller", "others"]))
        scale = alt.Scale(domain=[0, 1])
        drawn.append(
            alt.layer(
                base.mark_bar(opacity=0.85).encode(alt.X("value:Q", title=title, scale=scale), colour),
                base.mark_rule(style="quiet", strokeWidth=2).encode(alt.X("low:Q"), alt.X2("high:Q")),
            ).properties(width=340, height=28 * len(rows))
        )
    return alt.hconcat(*drawn)

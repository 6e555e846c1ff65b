"""The page of a live run: that of a run whose numbers were served, with what serving adds to it: a
timeline, residuals, the tracker, and the replay of the same decisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import Run
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.task import ACCURACY, ON_TIME
from knobwise.experiments.report.content import main_table
from knobwise.experiments.report.tables import (
    Content,
    Folded,
    Tile,
    gain_tile,
    print_content,
    records,
    texts,
)
from knobwise.experiments.wording.choice_sentences import setting
from knobwise.experiments.wording.sentences import verdict
from knobwise.experiments.wording.words import (
    LEARNED,
    STATIC,
    cell,
    number,
    policy_name,
)

LiveResults = Mapping[str, Any]
"""What `knobwise evaluate live=true` writes, see `knobwise.experiments.deploy.live_results`."""
METRICS = {
    "accuracy": "accuracy",
    "latency_ms": "mean ms",
    "satisfaction": "share on time",
    "utility": "utility",
}
"""What a live run compares with its replay, in words."""


def as_results(live: LiveResults) -> RunResults:
    """Return a live run as the results of a run: means over its requests."""
    rows = []
    for row in live["rows"]:
        mean = {"budget_ms": None, "latency_ms_mean": row["latency_ms"]}
        if row["policy"] == LEARNED:
            static = next(each for each in live["rows"] if each["policy"] == STATIC)
            gain = {"over_static": static["behind"], "over_static_ci95": static["behind_ci95"]}
            mean |= gain | {"infeasible": live["infeasible"]}
        rows.append(row | mean)
    results = {"rows": rows, "test_samples": live["requests"], "profile": live["profile"]}
    return cast(RunResults, results)


def print_live(live: LiveResults, console: Console) -> None:
    """Print the table and the sentences. What is not a terminal gets no frames."""
    print_content(console, content_of(live))


def write_live_page(path: str | Path, live: LiveResults) -> Path:
    """Write the page and return its path; it needs no network."""
    import polars as pl

    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import Figure, render_page

    timeline = pl.DataFrame(live["timeline"])
    captions = texts()["figures"]
    shares = []
    for key, title in (("satisfaction", "share on time"), ("utility", "utility (0 to 1)")):
        rows = [
            {"name": policy_name(row["policy"]), "value": row[key]}
            | dict(zip(("low", "high"), row[f"{key}_ci95"], strict=True))
            for row in live["rows"]
        ]
        shares.append(charts.dots_of_policies(pl.DataFrame(rows), title))
    sections = {
        "Share on time, and utility": [Figure(shares, captions["live_shares"])],
        "Latency against budget": [Figure(charts.timeline(timeline), captions["timeline"], 1)],
        "Residuals": [Figure(charts.residuals(timeline), captions["residuals"])],
    }
    return render_page(path, content_of(live), sections)


def content_of(live: LiveResults) -> Content:
    """Return what the page says, but for its figures."""
    results = as_results(live)
    lead, *sentences = verdict(results)
    machine = live["machine"]
    facts = (
        f"{machine['cpu']}, torch {machine['torch']}, one thread, load {machine['load']:.1f}, "
        f"jitter {number(machine['jitter'], '.1%')} · profile {live['profile']['name']}"
    )
    rows = {row["policy"]: row for row in live["rows"]}
    tiles = []
    for metric in (ON_TIME, ACCURACY):
        value, _, ci95 = cell(rows[LEARNED], metric).partition("\n")
        tiles.append(Tile(value, metric.name, ci95))
    gained = "of utility against static with the same tracker"
    tiles.append(gain_tile(gained, rows[STATIC]["behind"], rows[STATIC]["behind_ci95"]))
    table = main_table(Comparison([Run(results)]))
    overhead = number(live["overhead"]["share"], ".1%")
    sentences.append(f"The controller added {overhead} to the model's mean inference time.")
    sentences += _on_replay(live)
    name = live["kind"]
    return Content(
        "knobwise live run", name, lead, table, sentences, [facts], tiles, _details(live)
    )


def _on_replay(live: LiveResults) -> list[str]:
    """Say whether a replay on the profile fares as the live run did; [] without one."""
    agreement = live["agreement"]
    if not agreement:
        return []
    differing = [
        f"{METRICS[row['what']]} of {policy_name(row['policy'])}"
        for row in agreement
        if not row["agrees"]
    ]
    agree = "Live and replay agree: accuracy exactly, the rest within the 95% intervals"
    if differing:
        agree = (
            f"Live and replay agree in {len(agreement) - len(differing)} of {len(agreement)} "
            f"numbers; they differ in {', '.join(differing)}"
        )
    return [f"{agree}."]


def _details(live: LiveResults) -> list[Folded]:
    """Return the folded tables of the page."""
    about = texts()["about"]
    # what the tracker believed when the run ended
    tracker = [{"part": part, "factor": factor} for part, factor in live["tracker"].items()]
    fixed = {policy_name(name): setting(knobs) for name, knobs in live["configurations"].items()}
    served = {
        "requests": f"{live['requests']:,}",
        "budgets": ", ".join(f"{budget:.2f}" for budget in live["budgets_ms"]),
        "clock": {"wall": "wall time", "cpu": "CPU time of the thread"}[live["clock"]],
    }
    same = live["decisions"].get("as_replayed_at_the_same_limit")
    serving = records([live["overhead"] | live["speed"] | {"same": same}], "serving")
    ignored = about["tracker"].format(ignored=live["ignored"])
    details = [
        Folded("How it was served", [about["serving"].format(**served), serving], open=True),
        Folded("The tracker", [ignored, records(tracker, "tracker")]),
        Folded("The fixed configurations", [fixed]),
    ]
    if live["agreement"]:
        replay = records(live["agreement"], "replay")
        details.insert(0, Folded("Live and replay", [about["replay"], replay]))
    return details

"""Show the results of a live run on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from knobwise.experiments.evidence.results import value_of
from knobwise.experiments.evidence.task import (
    ACCURACY,
    FEASIBLE,
    ON_TIME,
    UTILITY,
    Metric,
)
from knobwise.experiments.report.tables import (
    Folded,
    Table,
    Tile,
    gain_tile,
    print_lines,
    print_table,
    table_of,
)
from knobwise.experiments.wording.choice_sentences import setting
from knobwise.experiments.wording.words import (
    COMPARED,
    LEARNED,
    STATIC,
    cell,
    counted,
    difference_words,
    interval,
    number,
    points,
    policy_name,
    sign_of,
)

LiveResults = Mapping[str, Any]
"""What `knobwise evaluate live=true` writes, see `knobwise.experiments.deploy.live_results`."""
COLUMNS = (
    ON_TIME,
    FEASIBLE,
    ACCURACY,
    UTILITY,
    Metric("latency_ms", "mean ms", ".2f"),
    Metric("latency_ms_p95", "p95 ms", ".2f"),
)
METRICS = {
    "accuracy": "accuracy",
    "latency_ms": "mean ms",
    "satisfaction": "share on time",
    "utility": "utility",
}
"""What a live run compares with its replay, in words."""


def _ranked(results: LiveResults) -> list[Mapping[str, Any]]:
    """Return the rows of the policies, the best utility first."""
    return sorted(results["rows"], key=lambda row: -value_of(row))


def policies(results: LiveResults) -> Table:
    """Return a row for every policy, the best utility first."""
    lines = []
    for row in _ranked(results):
        line = {"policy": name_of(results, row["policy"])}
        for metric in COLUMNS:
            if metric.key in row:  # a stream without a profile has no feasible requests
                line[metric.name] = cell(row, metric)
        lines.append(line)
    return table_of(lines, [policy_name(LEARNED)])


def name_of(results: LiveResults, policy: str) -> str:
    """Return a policy in words; a fixed configuration with its knobs."""
    if policy not in results["configurations"]:
        return policy_name(policy)
    return f"fixed, {policy_name(policy)}\n({setting(results['configurations'][policy])})"


# -- in sentences ----------------------------------------------------------------------------------


def verdict(results: LiveResults) -> list[str]:
    """Say in sentences what the run shows."""
    # the controller first
    learned, *others = sorted(results["rows"], key=lambda row: row["policy"] != LEARNED)
    best = max(others, key=lambda row: row["utility"])
    budgets = ", ".join(f"{budget:.2f}" for budget in results["budgets_ms"])
    clock = {"wall": "wall time", "cpu": "CPU time of the thread"}[results["clock"]]
    overhead = results["overhead"]
    gap = {"difference": best["behind"], "ci95": best["behind_ci95"]}
    lines = [
        f"The controller {COMPARED[sign_of(gap['ci95'])]} {policy_name(best['policy'])}: "
        f"{difference_words(gap)}, utility {number(learned['utility'], '.3f')} against "
        f"{number(best['utility'], '.3f')}. {number(learned['satisfaction'], '.1%')} of the "
        f"controller's answers were on time, with accuracy {number(learned['accuracy'], '.3f')}.",
        f"Served: {counted(results['requests'], 'request')}, one after the other, under budgets of "
        f"{budgets} ms, drawn at random. Model and answers are real, the clock is {clock}; "
        f"{number(results['infeasible'], '.1%')} of the requests are infeasible (–: the "
        "profile does not hold these samples).",
        f"The controller added {number(overhead['share'], '.1%')} to the model's mean inference "
        f"time of {number(overhead['inference_ms'], '.2f')} ms: "
        f"{number(overhead['overhead_us'], '.0f')} µs; the medians are "
        f"{number(overhead['decision_us_p50'], '.0f')} µs for a decision and "
        f"{number(overhead['features_and_knobs_us_p50'], '.0f')} µs for features and knobs.",
        f"Before the stream this machine took {number(results['speed']['before'], '.3f')} times "
        "the profile's latencies.",
    ]
    if not results["agreement"]:
        return lines
    return [*lines, *_on_replay(results)]


def _on_replay(results: LiveResults) -> list[str]:
    """Say whether a replay on the profile decides and fares as the live run did."""
    during = results["speed"]["during"]
    same = results["decisions"]["as_replayed_at_the_same_limit"]
    slow = " The machine is slow: other work on it also lengthens what the controller adds."
    agreement = results["agreement"]
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
    # latencies differ by a share, shares on time by points
    latencies = [
        abs(row["difference"]) / row["replay"] for row in agreement if row["what"] == "latency_ms"
    ]
    shares = [abs(row["difference"]) for row in agreement if row["what"] == "satisfaction"]
    return [
        f"During the run it took {number(during, '.3f')} times as long. A replay decides as the "
        f"controller did in {same:.1%} of the requests." + slow * (during > 1.5),
        f"{agree}. Paired, mean latencies differ by up to {number(max(latencies), '.1%')}, "
        f"shares on time by up to {points(max(shares), '.1f')} points.",
    ]


def print_live(results: LiveResults, console: Console) -> None:
    """Print the table and the sentences. What is not a terminal gets no frames."""
    print_table(console, policies(results))
    print_lines(console, verdict(results))


# -- as a page -------------------------------------------------------------------------------------


def write_live_page(path: str | Path, results: LiveResults) -> Path:
    """Write the page and return its path; it needs no network."""
    import polars as pl

    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import Figure, render_page

    timeline = pl.DataFrame(results["timeline"])
    shares = [
        charts.dots_of_policies(_ranked(results), metric, title)
        for metric, title in (("satisfaction", "share on time"), ("utility", "utility (0 to 1)"))
    ]
    sections = {
        "Policies": [
            Figure(
                shares,
                "Share of requests answered on time, and utility: the accuracy of an answer on "
                "time, 0 for a late one; the best policy first, lines are 95% intervals.",
            )
        ],
        "What the run shows": [verdict(results)],
        "Latency against budget": [
            Figure(
                charts.timeline(timeline),
                "Each dot is a request that the controller served; above the dashed line it was "
                "late. Below: latency here / latency predicted, as the tracker estimates it before "
                "each decision.",
                columns=1,
            )
        ],
        "Residuals": [
            Figure(
                charts.residuals(timeline),
                "What of ln(latency) the controller did not expect, in units of its expected "
                "spread, the tracked drift allowed for. Dashed: the normal distribution.",
            )
        ],
        "Tables": _tables(results),
    }
    machine = results["machine"]
    facts = (
        f"{machine['cpu']}, torch {machine['torch']}, one thread, load {machine['load']:.1f}, "
        f"jitter {number(machine['jitter'], '.1%')}"
    )
    return render_page(
        path,
        "knobwise live run",
        results["kind"],
        sections,
        facts=[f"{facts} · profile {results['profile']['name']}"],
        tiles=_tiles(results),
    )


def _tiles(results: LiveResults) -> list[Tile]:
    """Return the numbers to be seen first."""
    rows = {row["policy"]: row for row in results["rows"]}
    against = rows[STATIC]
    tiles = []
    for metric in (ON_TIME, ACCURACY):
        value, _, interval = cell(rows[LEARNED], metric).partition("\n")
        tiles.append(Tile(value, metric.name, interval))
    gained = "of utility against static with the same tracker"
    return [*tiles, gain_tile(gained, against["behind"], against["behind_ci95"])]


def _tables(results: LiveResults) -> list[Folded]:
    """Return the tables of the page, folded."""
    # what the tracker believed when the run ended
    parts = results["tracker"].items()
    tracker = [{"part": part, "factor": f"{factor:.3f}"} for part, factor in parts]
    tables = [
        Folded("Every policy", [policies(results)]),
        Folded(
            "The tracker",
            [
                "Latency here / latency predicted at the end of the run; “spread” is the factor on "
                f"the predicted spread. Answers ignored: {results['ignored']}.",
                table_of(tracker),
            ],
        ),
    ]
    if results["agreement"]:
        about = (
            "The same decisions, looked up in the profile, with latencies multiplied by the speed "
            "of this machine. They agree if the replay lies in the 95% interval of what was "
            "served, and for accuracy if every answer is the same. Differences are paired."
        )
        tables.append(Folded("Live and replay", [about, _replay(results)]))
    return tables


def _replay(results: LiveResults) -> Table:
    """Return the numbers of the live run beside those of the replay."""
    lines = []
    for row in results["agreement"]:
        line = {"policy": name_of(results, row["policy"]), "metric": METRICS[row["what"]]}
        line |= {side: f"{row[side]:.3f}" for side in ("live", "replay")}
        line["difference"] = number(row["difference"], "+.4f") + interval(row["ci95"], "+.4f")
        lines.append(line | {"agree": "yes" if row["agrees"] else "no"})
    return table_of(lines)

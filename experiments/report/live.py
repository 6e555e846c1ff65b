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
    points,
    policy_name,
    ranked,
    span,
)

if TYPE_CHECKING:
    from rich.console import Console

Results = Mapping[str, Any]
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
METRICS = {
    "accuracy": "accuracy",
    "latency_ms": "mean ms",
    "satisfaction": "share on time",
    "utility": "utility",
}
"""What a live run compares with its replay, in words."""


def policies(results: Results, replayed: bool = True) -> Table:
    """Return a row for every policy, the best utility first; the last two columns are those of the
    replay, if there was one and it is to be shown."""
    rows = ranked(results)
    # (policy, metric) → the number of the replay
    replay = {(row["policy"], row["what"]): row["replay"] for row in results["agreement"]}
    # a stream without a profile has no feasible requests
    columns = {name: column for name, column in COLUMNS.items() if column[0] in rows[0]}
    further = REPLAYED if replay and replayed else {}
    cells = []
    for row in rows:
        line = [name_of(results, row["policy"])]
        for key, how in columns.values():
            text = number(row[key], how)
            if key in WITH_INTERVAL:
                text += interval(row[f"{key}_ci95"], how)
            line.append(text)
        for key, how in further.values():
            line.append(number(replay[row["policy"], key], how))
        cells.append(line)
    strong = [i for i, row in enumerate(rows) if row["policy"] == LEARNED]
    return Table(["policy", *columns, *further], cells, strong)


def name_of(results: Results, policy: str) -> str:
    """Return a policy in words; a fixed configuration with its knobs."""
    if policy not in results["configurations"]:
        return policy_name(policy)
    knobs = ", ".join(
        f"{name} {value}" for name, value in results["configurations"][policy].items()
    )
    return f"fixed, {policy_name(policy)}\n({knobs})"


# -- in sentences ----------------------------------------------------------------------------------


def verdict(results: Results) -> list[str]:
    """Say in sentences what the run shows."""
    # the controller first
    learned, *others = sorted(results["rows"], key=lambda row: row["policy"] != LEARNED)
    best = max(others, key=lambda row: row["utility"])
    budgets = ", ".join(number(budget, ".2f") for budget in results["budgets_ms"])
    clock = {"wall": "wall time", "cpu": "CPU time of the thread"}[results["clock"]]
    infeasible = ". The profile does not hold these samples."
    if results["infeasible"] is not None:
        infeasible = f"; {number(results['infeasible'], '.1%')} of the requests are infeasible."
    overhead = results["overhead"]
    gap = f"{number(best['behind'], '+.3f')}{interval(best['behind_ci95'], '+.3f')}"
    lines = [
        f"Simulated stream: {results['requests']} requests × {results['repeats']}, each after the "
        f"previous one, budgets of {budgets} ms, drawn at random. Model and answers are real, the "
        f"clock is {clock}{infeasible}",
        f"The controller answered {number(learned['satisfaction'], '.1%')} on time with accuracy "
        f"{number(learned['accuracy'], '.3f')}: utility {number(learned['utility'], '.3f')}, "
        f"against {number(best['utility'], '.3f')} for the best other policy "
        f"({policy_name(best['policy'])}), a difference of {gap}.".replace("\n", " "),
        f"The controller added {number(overhead['share'], '.1%')} to the model's mean inference "
        f"time of {number(overhead['inference_ms'], '.2f')} ms: "
        f"{number(overhead['overhead_us'], '.0f')} µs; the medians are "
        f"{number(overhead['decision_us_p50'], '.0f')} µs for a decision and "
        f"{number(overhead['features_and_knobs_us_p50'], '.0f')} µs for features and knobs.",
    ]
    if results["agreement"]:
        return [*lines, *_on_replay(results)]
    before = number(results["speed"]["before"], ".3f")
    return [
        *lines,
        f"Before the stream, this machine took {before} times the profile's latencies.",
    ]


def _on_replay(results: Results) -> list[str]:
    """Say whether a replay on the profile decides and fares as the live run did."""
    speed = results["speed"]
    same, whole = (
        number(results["decisions"][f"as_replayed_at_the_{limits}"], ".1%")
        for limits in ("same_limit", "whole_budget")
    )
    line = (
        f"This machine took {number(speed['during'], '.3f')} times the profile's latencies during "
        f"the run ({number(speed['before'], '.3f')} before). A replay decides as the controller "
        f"did in {same} of the requests at the same limits, and in {whole} at the whole budgets."
    )
    if speed["during"] > 1.5:
        line += " The machine is slow: other work on it also lengthens what the controller adds."
    agreement = results["agreement"]
    differing = []
    largest = {"latency_ms": 0.0, "satisfaction": 0.0}
    for row in agreement:
        # latencies differ by a share, shares on time by points
        scale = row["replay"] if row["what"] == "latency_ms" else 1.0
        share = abs(row["difference"]) / scale
        largest[row["what"]] = max(share, largest.get(row["what"], 0.0))
        if not row["agrees"]:
            differing.append(
                f"{METRICS[row['what']]} of {policy_name(row['policy'])} "
                f"{number(row['live'], '.3f')} live, {number(row['replay'], '.3f')} replayed"
            )
    agree = "Live and replay agree: accuracy exactly, the rest within the 95% intervals."
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        agree = (
            f"Live and replay agree in {len(agreement) - len(differing)} of {len(agreement)} "
            f"numbers; they differ in {'; '.join(differing[:3])}{more}."
        )
    return [
        line,
        f"{agree} Paired, mean latencies differ by up to {number(largest['latency_ms'], '.1%')}, "
        f"shares on time by up to {points(largest['satisfaction'], '')} points.",
    ]


def print_live(results: Results, console: Console) -> None:
    """Print the table and the sentences; without frames if this is no terminal."""
    table = policies(results)
    print_table(console, table.header, table.rows, (0, 1, 3, 4, 5), table.strong)
    print_lines(console, verdict(results))


# -- as a page -------------------------------------------------------------------------------------


def write_live_page(path: str | Path, results: Results) -> Path:
    """Write the page and return its path; it needs no network."""
    import polars as pl

    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import Figure, Folded, render_page

    shares = [
        charts.dots_of_policies(ranked(results), metric, title)
        for metric, title in (("satisfaction", "share on time"), ("utility", "utility (0 to 1)"))
    ]
    timeline = charts.timeline(pl.DataFrame(results["timeline"]))
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
                timeline,
                "Each dot is a request of the first run that the controller served: above the "
                "dashed line it was late. Below: latency here / latency predicted, as the tracker "
                "estimates it before each decision.",
                columns=1,
            )
        ],
        "Tables": [
            Folded("Every policy", [policies(results, replayed=False)]),
            Folded(
                "Run by run",
                ["Utility of each run of the same requests.", _by_run(results)],
            ),
            Folded("The tracker", _tracker(results)),
            Folded("Live and replay", _replay(results)) if results["agreement"] else None,
        ],
    }
    machine = results["machine"]
    facts = f"{machine['cpu']}, torch {machine['torch']}, one thread"
    return render_page(
        path,
        "knobwise live run",
        results["kind"],
        sections,
        facts=[f"{facts} · profile {results['profile']['name']}"],
        tiles=_tiles(results),
    )


def _tiles(results: Results) -> list[tuple[str, str, str]]:
    """Return the numbers to be seen first."""
    rows = {row["policy"]: row for row in results["rows"]}
    learned = rows[LEARNED]
    static = rows[STATIC]
    overhead = results["overhead"]
    return [
        (
            f"{points(static['behind'])} points",
            "of utility against static with the same tracker",
            span(static["behind_ci95"]).strip(" ()"),
        ),
        (
            number(learned["satisfaction"], ".1%"),
            "on time",
            f"static: {number(static['satisfaction'], '.1%')}",
        ),
        (
            number(overhead["overhead_us"], ".0f", " µs"),
            "added to each request",
            number(overhead["share"], ".1%", " of the model's time"),
        ),
    ]


def _by_run(results: Results) -> Table:
    """Return the utility of every policy in each run."""
    of_policy = {row["policy"]: row["utility_per_run"] for row in results["rows"]}
    rows = []
    for run in range(results["repeats"]):
        utilities = [number(per_run[run], ".3f") for per_run in of_policy.values()]
        gain = of_policy[LEARNED][run] - of_policy[STATIC][run]
        rows.append([f"{run + 1}", *utilities, number(gain, "+.3f")])
    return Table(["run", *map(policy_name, of_policy), "controller − static"], rows)


def _tracker(results: Results) -> list[Any]:
    ignored = f" Answers ignored: {results['ignored']}." if results["ignored"] else ""
    text = (
        "Latency here / latency predicted at the end of the run; “spread” is the factor on the "
        f"predicted spread.{ignored}"
    )
    rows = [[part, number(factor, ".3f")] for part, factor in results["tracker"].items()]
    return [text, Table(["part", "factor"], rows)]


def _replay(results: Results) -> list[Any]:
    """Return the numbers of the live run beside those of the replay."""
    rows = []
    before = ""
    for row in results["agreement"]:
        name = name_of(results, row["policy"])
        sides = [number(row[side], ".3f") for side in ("live", "replay")]
        low, high = row["ci95"]
        difference = f"{row['difference']:+.4f}\n{low:+.4f} to {high:+.4f}"
        agrees = "yes" if row["agrees"] else "no"
        # the name stands in the first row of a policy
        title = "" if name == before else name
        rows.append([title, METRICS[row["what"]], *sides, difference, agrees])
        before = name
    text = (
        "The same decisions, looked up in the profile, with latencies multiplied by the speed of "
        "this machine. They agree if the replay lies in the 95% interval of what was served, and "
        "for accuracy if every answer is the same. Below each paired difference is its interval."
    )
    return [text, Table(["policy", "metric", "live", "replay", "difference", "agree"], rows)]

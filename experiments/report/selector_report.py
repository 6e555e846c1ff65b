"""What a run of the selector found, in words, tables and charts: what `report` and the terminal show of it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.selector_verdict import (
    KINDS,
    TERMS,
    WORDS,
    form_of,
    hidden_words,
    listed,
    names_of,
    points,
    policy_words,
    ranked,
    rows_at,
    shots_words,
    sign,
    with_interval,
)
from knobwise.experiments.report.selector_verdict import verdict as verdict
from knobwise.experiments.report.verdict import Row
from knobwise.experiments.results.selector_results import CONTROLS, LEARNED, shown_at

if TYPE_CHECKING:
    import altair as alt


def facts(results: Mapping[str, Any]) -> list[str]:
    """What was judged on what, for the line below the title."""
    profile, shots = results.get("profile", {}), ", ".join(map(str, results["shots"]))
    bank = f", their own bank of {results['test_candidates']:,} candidates" if "test_candidates" in results else ""
    return [
        f"trained on {profile.get('name', 'unnamed')}: {profile.get('samples', 0):,} queries, "
        f"{profile.get('candidates', 0):,} candidates",
        f"judged on {results['test_queries']:,} held-out queries{bank}",
        f"seeds {', '.join(map(str, results['seeds']))}",
        f"shots {shots}, trained at {results['trained_shots']}",
    ]


# -- tables ------------------------------------------------------------------------------------------------------------


def header(results: Mapping[str, Any]) -> list[str]:
    """Of the table of policies: one column a number of shots."""
    trained = results["trained_shots"]
    columns = [f"{shots_words(n)}{' (trained)' * (n == trained)}" for n in results["shots"]]
    return ["policy", *columns, "decision"]


def cells(results: Mapping[str, Any], rows: str = "rows") -> list[list[str]]:
    """Accuracy of every policy (or of `controls`) under `header`, the best at the trained shots first."""
    at = {(row["policy"], row["shots"]): row for row in results.get(rows, [])}
    return [
        [
            policy_words(policy, results),
            *(with_interval(at.get((policy, shots), {})) for shots in results["shots"]),
            page.quantity(at.get((policy, shown_at(results)), {}).get("decision_us_p50"), "µs"),
        ]
        for policy in ranked(results, rows)
    ]


def learned(results: Mapping[str, Any]) -> str:
    """The first cell of the row that stands for the run; "" where nothing was trained."""
    form = form_of(results)
    return "" if form is None else policy_words(form, results)


def few(results: Mapping[str, Any]) -> tuple[int, ...]:
    """The columns of `header` for a narrow terminal: the trained shots, and the most or fewest."""
    trained = 1 + results["shots"].index(shown_at(results))
    last = len(results["shots"])
    return tuple(dict.fromkeys((0, trained, last if trained != last else 1)))


def sections(results: Mapping[str, Any]) -> list[str]:
    """The parts of the report between the verdict and the training curves."""
    rows = cells(results)
    ordered = [name for names in KINDS.values() for name in names if name in names_of(results)]
    policies = [(policy_words(name, results), WORDS[name][1].format(hidden=hidden_words(results))) for name in ordered]
    terms = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in [*TERMS.items(), *policies])
    parts = [
        "<h2>Results</h2><p>Share of held-out queries answered right, by how many demonstrations are shown; the best "
        f"at {shots_words(shown_at(results))} come first.</p>",
        page.table(header(results), rows, [i for i, row in enumerate(rows) if row[0] == learned(results)]),
        page.folded("What the words mean", f"<dl>{terms}</dl>"),
    ]
    if left_out := _left_out(results):
        parts.append(f"<p>{html.escape(left_out)}</p>")
    for name, (caption, chart) in result_charts(results).items():
        parts += [f"<h2>{name}</h2>", page.figure(chart, caption)]
    against = {kind: [row for row in results["differences"] if row["against"] in KINDS[kind]] for kind in KINDS}
    trained = [row for row in against["learned"] if row["policy"] in LEARNED]
    if trained:
        parts += [
            "<h2>What differs</h2><p>Differences in points, on the same queries and seed by seed; the last column says "
            f"what they show at {shots_words(shown_at(results))}.</p>",
            _table_of_differences(results, trained),
            page.folded("Against the simple ways", _table_of_differences(results, against["simple way"])),
        ]
    if results.get("votes"):
        parts += [
            "<h2>The same without the model</h2><p>What the demonstrations that a selector chose answer themselves, by "
            "majority for each part of the question: how much of the accuracy is choosing, and how much the model.</p>",
            page.table(header(results)[:-1], [row[:-1] for row in cells(results, "votes")]),
        ]
    if results.get("controls"):
        parts += [
            "<h2>Controls</h2><p>What must not gain: GRPO on rewards that were shuffled inside each group, and "
            f"selectors that do not see the {html.escape(hidden_words(results))}, compared with each other.</p>",
            page.table(header(results)[:-1], [row[:-1] for row in cells(results, "controls")]),
            "<p>Their differences, in points:</p>",
            _table_of_differences(results, [row for row in results["differences"] if row["policy"] in CONTROLS]),
        ]
    return parts


def _table_of_differences(results: Mapping[str, Any], differences: Sequence[Row]) -> str:
    at = {(row["policy"], row["against"], row["shots"]): row for row in differences}
    rows = []
    for policy, against in dict.fromkeys((row["policy"], row["against"]) for row in differences):
        found = [at.get((policy, against, shots)) for shots in results["shots"]]
        shown = at.get((policy, against, shown_at(results)))
        words = "" if shown is None else ("worse", "no difference shown", "better")[sign(shown) + 1]
        name = f"{policy_words(policy, results)}\nover {policy_words(against, results)}"
        rows.append([name, *("–" if row is None else _difference(row) for row in found), words])
    return page.table(["policy", *header(results)[1:-1], f"at {shots_words(shown_at(results))}"], rows)


def _difference(row: Row) -> str:
    low, high = row["ci95"]
    return f"{points(row['difference'])}\n[{points(low)}, {points(high)}]"


def _left_out(results: Mapping[str, Any]) -> str:
    """Queries that were not judged, in words; "" where all were."""
    of = {row["shots"]: row.get("queries") or results["test_queries"] for row in results["rows"]}
    fewer = [f"{queries:,} at {shots}" for shots, queries in of.items() if queries < results["test_queries"]]
    if not fewer:
        return ""
    return (
        f"Not all of the {results['test_queries']:,} test queries could be judged at every number of shots, for want "
        f"of a record: {listed(fewer)}. Every policy was judged on the same ones."
    )


# -- charts ------------------------------------------------------------------------------------------------------------


def result_charts(results: Mapping[str, Any]) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """The charts that the results have numbers for: heading → (caption, chart)."""
    drawn: dict[str, tuple[str, alt.TopLevelMixin]] = {}
    every = [*results["rows"], *results.get("controls", [])]
    frame = pl.DataFrame(
        [
            {"policy": row["policy"], "name": policy_words(row["policy"], results), "shots": row["shots"]}
            | {"accuracy": row["accuracy"], "low": row["accuracy_ci95"][0], "high": row["accuracy_ci95"][1]}
            | {"kind": next((kind for kind, names in KINDS.items() if row["policy"] in names), "other")}
            for row in every
        ],
        infer_schema_length=None,
    )
    at = frame.filter(pl.col("shots") == shown_at(results)).sort("accuracy", descending=True, maintain_order=True)
    kinds = [*KINDS, "other"]
    drawn[f"Accuracy at {shots_words(shown_at(results))}"] = (
        "Every policy, with 95% intervals. Controls are what must not gain; what looks at the answer is no policy.",
        charts.policy_bars(at.drop("policy", "shots"), [kind for kind in kinds if kind in set(at["kind"])]),
    )
    if len(results["shots"]) > 1:
        found = rows_at(results, shown_at(results))
        simple = sorted((n for n in SIMPLE if n in found), key=lambda n: -float(found[n]["accuracy"]))
        kept = [name for name in (form_of(results), "rce", "sft", *simple[:1]) if name in found]
        named = {name: policy_words(str(name), results) for name in dict.fromkeys(kept)}
        lines = frame.filter(pl.col("kind") != "control")
        colours = pl.when(pl.col("policy").is_in(list(named))).then(pl.col("name")).otherwise(pl.lit(charts.OTHER))
        strongest = f" The strongest simple way is {policy_words(simple[0], results)}." if simple else ""
        drawn["Accuracy against shots"] = (
            f"Trained at {shots_words(results['trained_shots'])} (dashed), asked for others without retraining; "
            f"shaded: 95% intervals; grey: everything else in the table.{strongest}",
            charts.by_shots(
                lines.with_columns(colours.alias("policy")).drop("kind"),
                [*named.values(), charts.OTHER],
                results["trained_shots"],
            ),
        )
    return drawn


# -- the rows ----------------------------------------------------------------------------------------------------------

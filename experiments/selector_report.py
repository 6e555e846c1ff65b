"""What a run of the selector found, in words, tables and charts: what `report` and the terminal show of it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.agents.selector_baselines import SIMPLE
from knobwise.experiments import charts, page
from knobwise.experiments.selector_results import CONTROLS, LEARNED, UPPER, shown_at
from knobwise.experiments.verdict import Row, interval, number

if TYPE_CHECKING:
    import altair as alt

WORDS = {
    "grpo_live": ("GRPO on live draws", "after RCE: GRPO on the policy's own draws, scored as they are drawn"),
    "grpo_rounds": (
        "GRPO on rounds of draws",
        "after RCE: GRPO on recorded draws of the policy, several rounds of them",
    ),
    "grpo_recorded": (
        "GRPO on recorded groups",
        "after RCE: GRPO on groups of sequences that were scored once, before it began",
    ),
    "rce": ("RCE", "after SFT: cross-entropy to recorded sequences, weighted by their scores"),
    "sft": ("SFT", "imitates recorded beams"),
    "random": ("random", "drawn from the query's pool, each as likely"),
    "image_similarity": ("image similarity", "the demonstrations with the most similar images"),
    "question_similarity": ("question similarity", "those with the most similar questions"),
    "similarity": ("similarity of both", "those with the most similar images and questions together"),
    "part_similarity": (
        "similarity by parts",
        "for each part of the question in turn the demonstration that answers it with the most similar image",
    ),
    "careful_rule": (
        "careful-annotator rule",
        "similarity by parts among demonstrations of annotators that are known, from outside, to be careful",
    ),
    "vote": (
        "vote without a model",
        "the answer of most of the five most similar demonstrations of each part; the same for every number of shots",
    ),
    "best_recorded": (
        "best recorded beam",
        "of the recorded sequences the one that raises the right answer's probability most, so it looks at the answer",
    ),
    "oracle": ("oracle", "right wherever any recorded sequence of this length is right"),
    "shuffled_recorded": ("shuffled, recorded groups", "GRPO on recorded groups, rewards permuted inside each"),
    "shuffled_live": ("shuffled, live draws", "GRPO on live draws, rewards permuted inside each group"),
    "hidden_sft": ("SFT, {hidden} hidden", "SFT on embeddings without the {hidden}"),
    "hidden_rce": ("RCE, {hidden} hidden", "RCE on embeddings without the {hidden}"),
    "hidden_live": ("GRPO, {hidden} hidden", "GRPO on live draws, on embeddings without the {hidden}"),
}
KINDS = {"learned": LEARNED, "simple way": SIMPLE, "looks at the answer": UPPER, "control": CONTROLS}
TERMS = {
    "accuracy": "share of held-out queries answered right with the demonstrations that a policy chose",
    "shots": "how many demonstrations are shown; selectors are trained for one number and asked for others too",
    "brackets": "95% bootstrap interval over the test queries, and over the seeds where there are several; that of a "
    "difference is paired: both policies on the same queries, seed by seed",
    "points": "hundredths of accuracy",
    "decision": "median time that one choice takes, for one query, its pool encoded in it, on one thread",
}


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


# -- in words ----------------------------------------------------------------------------------------------------------


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What the run showed, in plain sentences, at the shots that were trained, and one on the others."""
    found, at = _at(results, shown_at(results)), _differences_at(results, shown_at(results))
    form = _form(found)
    sentences = []
    if results.get("judged_by") == "recorded":
        sentences.append(
            "No scorer was at hand: every policy was given the recorded sequence that it prefers, some of them perhaps "
            "found by looking at the answer. This compares policies; it is not what they would reach."
        )
    if form is None:
        simple = [name for name in SIMPLE if name in found]
        best = max(simple, key=lambda name: float(found[name]["accuracy"]), default=None)
        words = "" if best is None else f" The best simple way is {_with_accuracy(found[best], results)}."
        return [*sentences, f"No learned policy was judged.{words}"]
    queries = found[form].get("queries") or results["test_queries"]
    sentences.append(
        f"At {_shots(shown_at(results))} {policy_words(form, results)} gets {found[form]['accuracy']:.1%} of "
        f"{queries:,} held-out queries right{_span(found[form].get('accuracy_ci95'), '.1%')}."
    )
    for name in LEARNED:
        clauses = [_gain(at[name, other], results) for other in ("rce", "sft") if (name, other) in at]
        if clauses:
            sentences.append(f"{policy_words(name, results)} {'; it '.join(clauses)}.")
    sentences += _against_simple(form, found, at, results)
    sentences += _on_controls(form, at, results)
    more = [
        f"{_at(results, shots)[form]['accuracy']:.3f} at {shots}"
        for shots in results["shots"]
        if shots != results["trained_shots"] and form in _at(results, shots)
    ]
    if more:
        sentences.append(
            f"Trained at {_shots(results['trained_shots'])} alone, {policy_words(form, results)} has {_listed(more)}."
        )
    return sentences


def _gain(row: Row, results: Mapping[str, Any]) -> str:
    """What a policy adds to another, without naming it."""
    other, points, span = policy_words(row["against"], results), _points(row["difference"]), _span(row["ci95"])
    if _sign(row) == 0:
        return f"is not shown to differ from {other}: {points} points{span}"
    size = _points(abs(row["difference"]), "")
    return f"adds {size} points to {other}{span}" if _sign(row) > 0 else f"is {size} points worse than {other}{span}"


def _against_simple(
    form: str, found: Mapping[str, Row], at: Mapping[tuple[str, str], Row], results: Mapping[str, Any]
) -> list[str]:
    """Whether a simple way wins."""
    rivals = sorted((n for n in SIMPLE if (form, n) in at), key=lambda n: -float(found[n]["accuracy"]))
    if not rivals:
        return []
    ways = f"the {len(rivals)} simple ways"
    ours, best = policy_words(form, results), _with_accuracy(found[rivals[0]], results)
    difference = at[form, rivals[0]]
    beaten = [name for name in rivals if _sign(at[form, name]) > 0]
    winners = [name for name in rivals if _sign(at[form, name]) < 0]
    if winners:
        listed = "; ".join(
            f"{_with_accuracy(found[n], results)}, by {_points(-at[form, n]['difference'], '')} points" for n in winners
        )
        return [f"{len(winners)} of {ways} did better than {ours}: {listed}."]
    gap = f"{_points(difference['difference'])} points{_span(difference['ci95'])}"
    if len(beaten) == len(rivals):
        return [f"{ours} beats all of {ways}; over the strongest, {best}, it has {gap}."]
    open_ = _listed([_with_accuracy(found[n], results) for n in rivals if n not in beaten])
    return [f"It is not shown that {ours} beats {open_}; over the strongest of {ways} it has {gap}."]


def _on_controls(form: str, at: Mapping[tuple[str, str], Row], results: Mapping[str, Any]) -> list[str]:
    """Whether the controls behave as they should."""
    sentences = []
    for control in CONTROLS[:2]:
        row, start = at.get((control, "sft")), at.get((control, "rce"))
        if row is None:
            continue
        group = "recorded groups" if control == "shuffled_recorded" else "live draws"
        words = f"Control: shuffled rewards on {group} bring {_points(row['difference'])} points to SFT"
        words += _span(row["ci95"])
        if _sign(row) <= 0:
            words += ": no gain, as it should be."
        elif start is not None and _sign(start) <= 0:
            words += f", but {_points(start['difference'])} to RCE, where it starts: no gain, as it should be."
        else:
            words += ": a gain that should not be, so something other than the reward is at work."
        sentences.append(words)
    hidden, real = at.get(("hidden_live", "hidden_sft")), at.get((form, "sft"))
    if hidden is not None and real is not None:
        what, gain = _hidden(results), f"{_points(hidden['difference'])} points over SFT{_span(hidden['ci95'])}"
        words = f"Control: with the {what} hidden, GRPO has {gain}; with it, {_points(real['difference'])}"
        if _sign(real) <= 0:
            words += "; there was no gain that could vanish."
        elif _sign(hidden) <= 0:
            words += ": the gain vanishes, as it should where it comes from there."
        elif hidden["ci95"][1] < real["ci95"][0]:
            words += ": the gain shrinks, but part of it comes from elsewhere."
        else:
            words += f": the gain does not vanish, so it is not shown to come from the {what}."
        sentences.append(words)
    return sentences


# -- tables ------------------------------------------------------------------------------------------------------------


def header(results: Mapping[str, Any]) -> list[str]:
    """Of the table of policies: one column a number of shots."""
    trained = results["trained_shots"]
    columns = [f"{_shots(n)}{' (trained)' * (n == trained)}" for n in results["shots"]]
    return ["policy", *columns, "decision"]


def cells(results: Mapping[str, Any], rows: str = "rows") -> list[list[str]]:
    """Accuracy of every policy (or of `controls`) under `header`, the best at the trained shots first."""
    at = {(row["policy"], row["shots"]): row for row in results.get(rows, [])}
    return [
        [
            policy_words(policy, results),
            *(_with_interval(at.get((policy, shots), {})) for shots in results["shots"]),
            page.quantity(at.get((policy, shown_at(results)), {}).get("decision_us_p50"), "µs"),
        ]
        for policy in _ranked(results, rows)
    ]


def learned(results: Mapping[str, Any]) -> str:
    """The first cell of the row that stands for the run; "" where nothing was trained."""
    form = _form(_at(results, shown_at(results)))
    return "" if form is None else policy_words(form, results)


def few(results: Mapping[str, Any]) -> tuple[int, ...]:
    """The columns of `header` for a narrow terminal: the trained shots, and the most or fewest."""
    trained = 1 + results["shots"].index(shown_at(results))
    last = len(results["shots"])
    return tuple(dict.fromkeys((0, trained, last if trained != last else 1)))


def sections(results: Mapping[str, Any]) -> list[str]:
    """The parts of the report between the verdict and the training curves."""
    rows = cells(results)
    ordered = [name for names in KINDS.values() for name in names if name in _names(results)]
    policies = [(policy_words(name, results), WORDS[name][1].format(hidden=_hidden(results))) for name in ordered]
    terms = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in [*TERMS.items(), *policies])
    parts = [
        "<h2>Results</h2><p>Share of held-out queries answered right, by how many demonstrations are shown; the best "
        f"at {_shots(shown_at(results))} come first.</p>",
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
            f"what they show at {_shots(shown_at(results))}.</p>",
            _table_of_differences(results, trained),
            page.folded("Against the simple ways", _table_of_differences(results, against["simple way"])),
        ]
    if results.get("controls"):
        parts += [
            "<h2>Controls</h2><p>What must not gain: GRPO on rewards that were shuffled inside each group, and "
            f"selectors that do not see the {html.escape(_hidden(results))}, compared with each other.</p>",
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
        words = "" if shown is None else ("worse", "no difference shown", "better")[_sign(shown) + 1]
        name = f"{policy_words(policy, results)}\nover {policy_words(against, results)}"
        rows.append([name, *("–" if row is None else _difference(row) for row in found), words])
    return page.table(["policy", *header(results)[1:-1], f"at {_shots(shown_at(results))}"], rows)


def _difference(row: Row) -> str:
    low, high = row["ci95"]
    return f"{_points(row['difference'])}\n[{_points(low)}, {_points(high)}]"


def _left_out(results: Mapping[str, Any]) -> str:
    """Queries that were not judged, in words; "" where all were."""
    of = {row["shots"]: row.get("queries") or results["test_queries"] for row in results["rows"]}
    fewer = [f"{queries:,} at {shots}" for shots, queries in of.items() if queries < results["test_queries"]]
    if not fewer:
        return ""
    return (
        f"Not all of the {results['test_queries']:,} test queries could be judged at every number of shots, for want "
        f"of a record: {_listed(fewer)}. Every policy was judged on the same ones."
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
    drawn[f"Accuracy at {_shots(shown_at(results))}"] = (
        "Every policy, with 95% intervals. Controls are what must not gain; what looks at the answer is no policy.",
        charts.policy_bars(at.drop("policy", "shots"), [kind for kind in kinds if kind in set(at["kind"])]),
    )
    if len(results["shots"]) > 1:
        found = _at(results, shown_at(results))
        simple = sorted((n for n in SIMPLE if n in found), key=lambda n: -float(found[n]["accuracy"]))
        kept = [name for name in (_form(found), "rce", "sft", *simple[:1]) if name in found]
        named = {name: policy_words(str(name), results) for name in dict.fromkeys(kept)}
        lines = frame.filter(pl.col("kind") != "control")
        colours = pl.when(pl.col("policy").is_in(list(named))).then(pl.col("name")).otherwise(pl.lit(charts.OTHER))
        strongest = f" The strongest simple way is {policy_words(simple[0], results)}." if simple else ""
        drawn["Accuracy against shots"] = (
            f"Trained at {_shots(results['trained_shots'])} (dashed), asked for others without retraining; shaded: 95% "
            f"intervals; grey: everything else in the table.{strongest}",
            charts.by_shots(
                lines.with_columns(colours.alias("policy")).drop("kind"),
                [*named.values(), charts.OTHER],
                results["trained_shots"],
            ),
        )
    return drawn


# -- the rows ----------------------------------------------------------------------------------------------------------


def _at(results: Mapping[str, Any], shots: int) -> dict[str, Row]:
    return {row["policy"]: row for row in results["rows"] if row["shots"] == shots}


def _differences_at(results: Mapping[str, Any], shots: int) -> dict[tuple[str, str], Row]:
    return {(r["policy"], r["against"]): r for r in results.get("differences", []) if r["shots"] == shots}


def _names(results: Mapping[str, Any]) -> set[str]:
    return {row["policy"] for row in [*results["rows"], *results.get("controls", [])]}


def _form(found: Mapping[str, Row]) -> str | None:
    """The policy that stands for the run: the furthest trained."""
    return next((name for name in LEARNED if name in found), None)


def _ranked(results: Mapping[str, Any], rows: str = "rows") -> list[str]:
    """Policies by accuracy where sentences look; those not judged there last."""
    first = {row["policy"]: -1.0 for row in results.get(rows, [])}
    first |= {r["policy"]: r["accuracy"] for r in results.get(rows, []) if r["shots"] == shown_at(results)}
    return sorted(first, key=lambda policy: -first[policy])


def _hidden(results: Mapping[str, Any]) -> str:
    return _listed(results.get("hidden") or ["information"])


def policy_words(policy: str, results: Mapping[str, Any]) -> str:
    """A policy of these results in plain words."""
    words = WORDS[policy][0] if policy in WORDS else policy.replace("_", " ")
    return words.format(hidden=_hidden(results))


def _with_accuracy(row: Row, results: Mapping[str, Any]) -> str:
    return f"{policy_words(row['policy'], results)} ({row['accuracy']:.3f})"


def _with_interval(row: Row) -> str:
    return number(row.get("accuracy"), ".3f") + interval(row.get("accuracy_ci95"), ".3f")


def _sign(row: Row) -> int:
    """1 or −1 where the interval is above or below 0, else 0."""
    low, high = row["ci95"]
    return int(low > 0) - int(high < 0)


def _shots(count: int) -> str:
    return f"{count} shot{'s' * (count > 1)}"


def _points(share: float, sign: str = "+") -> str:
    """`sign` is "+", or "" to write it where it is negative only."""
    return f"{100 * share:{sign}z.1f}"


def _span(ends: Sequence[float] | None, how: str = "") -> str:
    """An interval in a sentence: of shares, or of points."""
    if not ends:
        return ""
    low, high = (f"{end:{how}}" if how else _points(end, "") for end in ends)
    return f" (95% interval {low} to {high})"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

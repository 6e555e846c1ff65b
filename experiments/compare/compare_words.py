"""What `knobwise compare` says: sentences and the cells of tables, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from knobwise.experiments.report.page import quantity
from knobwise.experiments.report.selector_verdict import points, policy_words, shots_words
from knobwise.experiments.report.verdict import Row, interval, known, number, policy_name
from knobwise.experiments.results.paired import CHANCE, Difference

if TYPE_CHECKING:
    from rich.console import Console

    from knobwise.experiments.compare.compare import Comparison

SPOKEN_OF = 6
"""So many runs have a sentence each; of more it is said how many are better."""
SIDE_BY_SIDE = 4
"""So many runs stand side by side, each with its settings in a column; more stand one below the other."""

# -- in words ----------------------------------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> list[str]:
    """Which run has most, and what is shown of each."""
    runs = comparison.runs
    best = comparison.best()
    top, row = runs[best[0]].label, comparison.means[best[0]]
    sentences = [
        f"The highest is {top}, with {_score_words(comparison, row)}." if known(row.get(comparison.score)) else ""
    ]
    reference = runs[0].label
    if len(runs) - 1 <= SPOKEN_OF:
        sentences += [_shown(one, comparison) for one in comparison.found]
    else:
        counts = {sign: sum(one.sign == sign for one in comparison.found) for sign in (1, -1, 0)}
        sentences.append(
            f"Tested against {reference}: {len(comparison.found)} runs, {counts[1]} better, {counts[-1]} worse, "
            f"{counts[0]} not shown to differ."
        )
        first = next((one for i in best for one in comparison.found if one.run == runs[i].label), None)
        if first is not None:
            sentences.append(_shown(first, comparison))
    if not comparison.found:
        sentences.append(f"Nothing could be tested against {reference}.")
    if not comparison.settings and all(run.settings for run in runs):
        sentences.append("The settings are the same: what differs is chance, the code or the machine.")
    return [sentence for sentence in sentences if sentence]


def method(comparison: Comparison) -> str:
    """What was compared, and how, in a sentence or two."""
    if not comparison.found:
        return ""
    kind, samples = comparison.kind, sorted({one.samples for one in comparison.found})
    count = f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}"
    what = {
        "deadline": f"mean utility over {len(comparison.places)} budgets",
        "mean": f"accuracy at equal mean latency over {len(comparison.places)} mean budgets (a ms more or less counts "
        "for what it brings the static mix)",
        "selector": f"answers right at {shots_words(int(comparison.main or 0))}",
    }[kind]
    of = "queries" if kind == "selector" else "samples"
    one_seed = any(len(run.results.get("seeds", [])) == 1 for run in comparison.runs)
    alone = " Of a run with one seed, what other seeds would give is not known, nor in the interval." * one_seed
    return (
        f"Compared with {comparison.runs[0].label}: {what}, on the same {count} test {of}. In brackets 95% intervals, "
        f"a paired bootstrap over {of} and seeds, wider where seeds are few; p: a sign-flip test over the {of} and, "
        f"where seeds differ, a t test with their spread, the larger of the two, corrected for {len(comparison.found)} "
        f"comparison{'s' * (len(comparison.found) > 1)} (Holm). Better or worse is said "
        f"where the interval excludes 0 and p is below {CHANCE:g}.{alone}"
    )


def _shown(one: Difference, comparison: Comparison) -> str:
    if one.nothing:
        return f"{one.run} got the same as {one.against} on every sample."
    says = {1: "is better than", -1: "is worse than", 0: "is not shown to differ from"}[one.sign]
    unit = {"selector": "points", "deadline": "of utility", "mean": "of accuracy"}[comparison.kind]
    gap, span = difference_words(one, comparison.kind)
    p = p_words(one.p_holm) if one.p_holm < 0.001 else f"= {p_words(one.p_holm)}"
    return f"{one.run} {says} {one.against}: {gap} {unit} {span}, p {p}."


def shown_words(one: Difference | None) -> str:
    """The last cell of a row of a table."""
    if one is None:
        return "not tested"
    return ("worse", "no difference shown", "better")[one.sign + 1]


def difference_words(one: Difference | None, kind: str) -> tuple[str, str]:
    """A difference and its interval; of answers in points."""
    if one is None:
        return "–", ""
    low, high = one.ci95
    if kind == "selector":
        return points(one.difference), f"[{points(low)}, {points(high)}]"
    return f"{one.difference:+z.3f}", f"[{low:+z.3f}, {high:+z.3f}]"


def p_words(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _score_words(comparison: Comparison, row: Row) -> str:
    value = row[comparison.score]
    if comparison.kind == "mean":
        return f"{value:+z.3f} of accuracy over the static mix of equal mean latency"
    if comparison.kind == "selector":
        return f"{value:.1%} of the answers right at {shots_words(int(comparison.main or 0))}"
    return f"a mean utility of {value:.3f}"


# -- tables ------------------------------------------------------------------------------------------------------------


def header(comparison: Comparison) -> list[str]:
    """Of the table of runs."""
    tested = ["difference", "p", "shown"]
    if comparison.kind == "selector":
        tested[0] += ", points"
        shots = [f"{shots_words(int(n))}{' (compared)' * (n == comparison.main)}" for n in comparison.places]
        return ["run", *tested, "policy", *shots]
    if comparison.kind == "mean":
        return ["run", "over static mix", *tested, "accuracy", "mean latency", "gap closed"]
    return ["run", "utility", *tested, "gap closed", "accuracy", "mean latency", "in time", "where possible"]


def cells(comparison: Comparison) -> list[list[str]]:
    """A line a run under `header`, in the order given; then, of controllers, what the first run was judged beside."""
    lines = []
    for i, run in enumerate(comparison.runs):
        one = comparison.difference(run.label)
        tested = ["\n".join(filter(None, difference_words(one, comparison.kind)))]
        tested += ["–" if one is None else p_words(one.p_holm), shown_words(one) if i else "reference"]
        if comparison.kind == "selector":
            policy = comparison.policies[i]
            at = [run.row(policy, place) for place in comparison.places]
            accuracies = [number(r.get("accuracy"), ".3f") + interval(r.get("accuracy_ci95"), ".3f") for r in at]
            lines.append([run.label, *tested, policy_words(policy, run.results), *accuracies])
        else:
            lines.append([run.label, *_cells(comparison, comparison.means[i], tested)])
    beside = [[policy_name(row["policy"]), *_cells(comparison, row, ["–", "–", ""])] for row in comparison.beside()]
    return [*lines, *beside]


def _cells(comparison: Comparison, row: Row, tested: Sequence[str]) -> list[str]:
    gap = number(row.get("gap_closed"), ".0%") + interval(row.get("gap_closed_ci95"), ".0%")
    accuracy, latency = number(row.get("accuracy"), ".3f"), quantity(row.get("latency_ms_mean"), comparison.unit)
    if comparison.kind == "mean":
        over = f"{row['over_static_mix']:+z.3f}" if known(row.get("over_static_mix")) else "–"
        return [over + interval(row.get("over_static_mix_ci95"), ".3f"), *tested, accuracy, latency, gap]
    utility = number(row.get("utility"), ".3f") + interval(row.get("utility_ci95"), ".3f")
    kept = [number(row.get(name), ".1%") for name in ("satisfaction", "satisfaction_feasible")]
    return [utility, *tested, gap, accuracy, latency, *kept]


def settings_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """What differs in the settings: header and lines, a setting a line for a few runs, else a run a line. A value that
    is that of the first run is not said again."""
    labels = [run.label for run in comparison.runs]
    said = {
        key: [words[0], *("same" if one == words[0] else one for one in words[1:])]
        for key, words in comparison.settings.items()
    }
    if len(labels) <= SIDE_BY_SIDE:
        return ["setting", *labels], [[key, *words] for key, words in said.items()]
    return ["run", *said], [[label, *(words[i] for words in said.values())] for i, label in enumerate(labels)]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The tables and the sentences; without colours and frames when this is no terminal."""
    from knobwise.experiments.report.report import print_table

    if comparison.settings and len(comparison.runs) <= SIDE_BY_SIDE:
        print_table(console, *settings_cells(comparison), range(len(comparison.runs) + 1), "")
    elif comparison.settings:
        values = {key: ", ".join(dict.fromkeys(words)) for key, words in comparison.settings.items()}
        _say(console, [f"differs: {key} ({words})" for key, words in values.items()])
    rows, few = cells(comparison), (0, 1, 2, 4) if comparison.kind != "selector" else (0, 1, 3, 4)
    print_table(console, header(comparison), rows, few, comparison.runs[0].label)
    _say(console, [*verdict(comparison), method(comparison), *comparison.notes])


def _say(console: Console, lines: Sequence[str]) -> None:
    for words in filter(None, lines):
        console.print(words, markup=False, highlight=False, soft_wrap=not console.is_terminal)

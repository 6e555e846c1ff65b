"""The sentences and tables of `knobwise compare`, for the terminal and the page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.report.words import (
    COMPARED,
    SIGN_WORDS,
    cell,
    difference_cell,
    known,
    policy_name,
    quantity,
    shots_words,
)
from knobwise.experiments.results.problem import ACCURACY, DECISION, OVER_SINGLE, Metric
from knobwise.experiments.results.statistics import CHANCE, Difference

if TYPE_CHECKING:
    from rich.console import Console

MOST_SENTENCES = 6
"""So many runs have a sentence each; more are counted."""
SIDE_BY_SIDE = 4
"""So many runs have a column each in the table of settings; more have a row each."""


def place_name(comparison: Comparison, place: float) -> str:
    """A budget or a number of shots in words."""
    return quantity(place, comparison.unit) if comparison.problem.averaged else shots_words(int(place))


def where(comparison: Comparison) -> str:
    """Where the main numbers are taken, in words."""
    if comparison.main is not None:
        return f"at {place_name(comparison, comparison.main)}"
    count = len(comparison.places)
    return f"mean over {count} {comparison.problem.place_words[count > 1]}"


# -- sentences ---------------------------------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> list[str]:
    """Which run has the highest score, and which runs differ from the first one."""
    sentences = []
    ranking, metric = comparison.ranking(), _metrics(comparison)[0]
    best, label = comparison.rows[ranking[0]], comparison.runs[ranking[0]].label
    if known(best.get(metric.key)):
        value = cell(best, metric).split("\n")[0]
        sentences.append(f"The highest is {label}: {metric.name} {value}, {where(comparison)}.")
    reference, tested = comparison.reference.label, comparison.differences
    if len(comparison.runs) - 1 <= MOST_SENTENCES:
        sentences += map(_sentence, tested)
    else:
        counts = {sign: sum(difference.sign == sign for difference in tested) for sign in (1, -1, 0)}
        sentences.append(
            f"Tested against {reference}: {len(tested)} runs, {counts[1]} better, {counts[-1]} worse, {counts[0]} not "
            "shown to differ."
        )
        best_first = (comparison.difference(comparison.runs[i].label) for i in ranking)
        sentences += [_sentence(difference) for difference in best_first if difference][:1]
    if not tested:
        sentences.append(f"Nothing could be tested against {reference}.")
    if not comparison.settings and all(run.settings for run in comparison.runs):
        sentences.append("The settings are the same: any difference comes from chance, the code or the machine.")
    return sentences


def method(comparison: Comparison) -> str:
    """What was compared, and how."""
    tested = comparison.differences
    if not tested:
        return ""
    counts = sorted({difference.samples for difference in tested})
    number = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    samples, score = comparison.problem.samples, comparison.problem.score
    equal_latency = ""
    if "static_hull" in comparison.reference.results:
        equal_latency = " at equal mean latency (a ms more or less counts for what it brings the static mix)"
    caveat = ""
    if any(len(run.results.get("seeds", [])) == 1 for run in comparison.runs):
        caveat = " A run with one seed does not show how much seeds differ, so its interval leaves that out."
    return (
        f"Compared with {comparison.reference.label}: {score}{equal_latency}, {where(comparison)}, on the same "
        f"{number} test {samples}. Differences are in points, hundredths of {score}; in brackets 95% intervals, a "
        f"paired bootstrap over {samples} and seeds, wider where seeds are few. p is the larger of a sign-flip test "
        f"over the {samples} and, where seeds differ, a t test with their spread, corrected for {len(tested)} "
        f"comparison{'s' * (len(tested) > 1)} (Holm). A run is called better or worse where the interval excludes 0 "
        f"and p is below {CHANCE:g}.{caveat}"
    )


def _sentence(difference: Difference) -> str:
    if difference.nothing:
        return f"{difference.run} got the same as {difference.against} on every sample."
    compared = f"{difference.run} {COMPARED[difference.sign]} {difference.against}"
    gap, interval = difference_cell(difference.difference, difference.ci95).split("\n")
    p = p_words(difference)
    return f"{compared}: {gap} points {interval}, p {p if p.startswith('<') else f'= {p}'}."


def p_words(difference: Difference) -> str:
    return "< 0.001" if difference.p_holm < 0.001 else f"{difference.p_holm:.3f}"


def _tested(difference: Difference) -> list[str]:
    """Three cells: the difference with its interval in points, p, and what they show."""
    cells = difference_cell(difference.difference, difference.ci95), p_words(difference)
    return [*cells, SIGN_WORDS[difference.sign]]


# -- tables ------------------------------------------------------------------------------------------------------------


def header(comparison: Comparison) -> list[str]:
    """The heads of the table of runs."""
    tested = ["difference, points", "p", "shown"]
    if comparison.problem.averaged:
        first, *others = (metric.name for metric in _metrics(comparison))
        return ["run", first, *tested, *others]
    marks = {comparison.main: " (compared)"}
    return ["run", *tested, "policy", *(place_name(comparison, n) + marks.get(n, "") for n in comparison.places)]


def cells(comparison: Comparison) -> list[list[str]]:
    """A row for each run under `header`, in the order given; then the reference policies of the first run."""
    metrics, lines = _metrics(comparison), []
    for i, run in enumerate(comparison.runs):
        difference, policy = comparison.difference(run.label), comparison.policies[i]
        tested = _tested(difference) if difference else ["–", "–", "not tested" if i else "reference"]
        if comparison.problem.averaged:
            first, *others = (cell(comparison.rows[i], metric, comparison.unit) for metric in metrics)
            lines.append([run.label, first, *tested, *others])
        else:
            rows = [cell(run.row(policy, place), ACCURACY) for place in comparison.places]
            lines.append([run.label, *tested, policy_name(policy, run.results), *rows])
    for row in comparison.reference_rows():
        first, *others = (cell(row, metric, comparison.unit) for metric in metrics)
        lines.append([policy_name(row["policy"]), first, "–", "–", "", *others])
    return lines


def _metrics(comparison: Comparison) -> list[Metric]:
    """The columns of numbers: first the one that runs are ranked by."""
    problem = comparison.problem
    metrics = [metric for metric in problem.metrics if metric not in (DECISION, OVER_SINGLE)]
    return sorted(metrics, key=lambda metric: metric.key != problem.ranked_by)


def by_place(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """At every place the score of each run, and below it the difference to the first run with its interval and p."""
    score = next(metric for metric in comparison.problem.metrics if metric.key == comparison.problem.score)
    at = {(difference.run, difference.place): difference for difference in comparison.by_place}
    lines = []
    for run, policy in zip(comparison.runs, comparison.policies, strict=True):
        line = [cell(run.row(policy, place), score) for place in comparison.places]
        for i, place in enumerate(comparison.places):
            if difference := at.get((run.label, place)):
                gap, interval = difference_cell(difference.difference, difference.ci95).split("\n")
                line[i] += f"\n{gap}{' *' if difference.sign else ''}, p {p_words(difference)}\n{interval}"
        lines.append([run.label, *line])
    return ["run", *(place_name(comparison, place) for place in comparison.places)], lines


def by_policy(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Every policy that both runs trained."""
    runs, lines = {run.label: run for run in comparison.runs}, []
    for difference in comparison.by_policy:
        run, policy = runs[difference.run], difference.policy
        rows = [side.row(policy, difference.place) for side in (comparison.reference, run)]
        scores = [cell(row, ACCURACY).split("\n")[0] for row in rows]
        lines.append([run.label, policy_name(policy, run.results), *scores, *_tested(difference)])
    return ["run", "policy", comparison.reference.label, "this run", "difference, points", "p", "shown"], lines


def settings_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The settings that differ: few runs have a column each, more a row each. A value equal to that of the first run
    reads "same"."""
    labels = [run.label for run in comparison.runs]
    table = {
        key: [values[0], *("same" if value == values[0] else value for value in values[1:])]
        for key, values in comparison.settings.items()
    }
    if len(labels) <= SIDE_BY_SIDE:
        return ["setting", *labels], [[key, *values] for key, values in table.items()]
    return ["run", *table], [[label, *(values[i] for values in table.values())] for i, label in enumerate(labels)]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The tables and the sentences; without colours and frames when this is no terminal."""
    if comparison.settings and len(comparison.runs) <= SIDE_BY_SIDE:
        print_table(console, *settings_cells(comparison), range(len(comparison.runs) + 1))
    elif comparison.settings:
        values = {key: ", ".join(dict.fromkeys(words)) for key, words in comparison.settings.items()}
        print_lines(console, [f"differs: {key} ({words})" for key, words in values.items()])
    few = (0, 1, 2, 4) if comparison.problem.averaged else (0, 1, 3, 4)
    print_table(console, header(comparison), cells(comparison), few, [0])
    print_lines(console, [*verdict(comparison), method(comparison), *comparison.notes])

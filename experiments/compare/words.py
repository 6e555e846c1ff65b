"""The tables of `knobwise compare`, for terminal and page alike; its sentences are in
`report/templates/compare*`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.report.words import (
    SIGN_WORDS,
    cell,
    difference_cell,
    policy_name,
    quantity,
    sentences,
    shots_words,
)
from knobwise.experiments.results.problem import ACCURACY, DECISION, OVER_SINGLE, Metric
from knobwise.experiments.results.statistics import CHANCE, Difference

if TYPE_CHECKING:
    from rich.console import Console

MOST_SENTENCES = 6
"""Up to this many runs have a sentence each; more are counted."""
SIDE_BY_SIDE = 4
"""Up to this many runs have a column each in the table of settings; more have a row each."""
Cells = tuple[list[str], list[list[str]]]
"""The heads of a table and its rows."""


def place_name(comparison: Comparison, place: float) -> str:
    """Return a budget or a number of shots in words."""
    if comparison.problem.averaged:
        return quantity(place, comparison.unit)
    return shots_words(int(place))


def place_names(comparison: Comparison) -> list[str]:
    return [place_name(comparison, place) for place in comparison.places]


def where(comparison: Comparison) -> str:
    """Say in words at which place the main numbers are taken."""
    if comparison.main is not None:
        return f"at {place_name(comparison, comparison.main)}"
    count = len(comparison.places)
    return f"mean over {count} {comparison.problem.place_words[count > 1]}"


def verdict(comparison: Comparison) -> list[str]:
    """Say which of the comparable runs has the highest score, and which runs differ from the first
    one."""
    ranking = comparison.ranking()
    tested = comparison.differences
    counted = len(comparison.runs) - 1 > MOST_SENTENCES
    if counted:  # only the best tested run has a sentence
        ranked = [comparison.difference(comparison.runs[i].label) for i in ranking]
        tested = [difference for difference in ranked if difference][:1]
    return sentences(
        "compare.txt.j2",
        best=comparison.runs[ranking[0]],
        best_row=comparison.rows[ranking[0]],
        metric=_metrics(comparison)[0],
        where=where(comparison),
        tested=tested,
        counted=counted,
        comparison=comparison,
        cell=cell,
        difference_cell=difference_cell,
        p_words=p_words,
    )


def method(comparison: Comparison) -> str:
    """Describe what was compared, and how; "" where nothing was."""
    samples = sorted({difference.samples for difference in comparison.differences})
    content = {
        "where": where(comparison),
        "samples": samples,
        "chance": CHANCE,
        "comparison": comparison,
    }
    return "".join(sentences("compare_method.txt.j2", **content))


def p_words(difference: Difference) -> str:
    if difference.p_holm < 0.001:
        return "< 0.001"
    return f"{difference.p_holm:.3f}"


def tested_cells(difference: Difference) -> list[str]:
    """Return three cells: the difference with its interval in points, p, and what they show."""
    cells = difference_cell(difference.difference, difference.ci95), p_words(difference)
    return [*cells, SIGN_WORDS[difference.sign]]


def results_cells(comparison: Comparison) -> Cells:
    """Return a row for each run in their order, then the reference policies of the first run."""
    metrics = _metrics(comparison)
    tested = ["difference, points", "p", "shown"]
    if comparison.problem.averaged:
        head = ["run", metrics[0].name, *tested, *(metric.name for metric in metrics[1:])]
    else:
        head = ["run", *tested, "policy"]
        for place in comparison.places:
            mark = " (compared)" if place == comparison.main else ""
            head.append(place_name(comparison, place) + mark)
    lines = []
    for i, run in enumerate(comparison.runs):
        difference = comparison.difference(run.label)
        if difference:
            tested = tested_cells(difference)
        else:
            tested = ["–", "–", "not tested" if i else "reference"]
        if comparison.problem.averaged:
            first, *others = (
                cell(comparison.rows[i], metric, comparison.unit) for metric in metrics
            )
            lines.append([run.label, first, *tested, *others])
        else:
            scores = [cell(run.row(run.policy, place), ACCURACY) for place in comparison.places]
            lines.append([run.label, *tested, policy_name(run.policy, run.results), *scores])
    for row in comparison.reference_rows():
        first, *others = (cell(row, metric, comparison.unit) for metric in metrics)
        lines.append([policy_name(row["policy"]), first, "–", "–", "", *others])
    return head, lines


def _metrics(comparison: Comparison) -> list[Metric]:
    """Return the columns of numbers, first the one that runs are ranked by."""
    problem = comparison.problem
    metrics = [metric for metric in problem.metrics if metric not in (DECISION, OVER_SINGLE)]
    return sorted(metrics, key=lambda metric: metric.key != problem.ranked_by)


def settings_cells(comparison: Comparison) -> Cells:
    """Return the settings that differ: few runs have a column each, more a row each. A value equal
    to that of the first run reads "same"."""
    labels = [run.label for run in comparison.runs]
    columns = []
    for key, (first, *others) in comparison.settings.items():
        same = ["same" if value == first else value for value in others]
        columns.append([key, first, *same])
    if len(labels) <= SIDE_BY_SIDE:
        return ["setting", *labels], columns
    head, *rows = zip(["run", *labels], *columns, strict=True)
    return list(head), list(map(list, rows))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tables and the sentences; without colours and frames when this is no terminal."""
    if comparison.settings and len(comparison.runs) <= SIDE_BY_SIDE:
        print_table(console, *settings_cells(comparison), range(len(comparison.runs) + 1))
    else:
        for key, values in comparison.settings.items():
            print_lines(console, [f"differs: {key} ({', '.join(dict.fromkeys(values))})"])
    if comparison.problem.averaged:
        few = (0, 1, 2, 4)
    else:
        few = (0, 1, 3, 4)
    print_table(console, *results_cells(comparison), few, [0])
    print_lines(console, [*verdict(comparison), method(comparison), *comparison.notes])

"""The tables and sentences of `knobwise compare`, for terminal and page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.report.words import (
    COMPARED,
    SIGN_WORDS,
    Row,
    cell,
    difference_cell,
    policy_name,
    quantity,
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


def place_name(comparison: Comparison, place: float) -> str:
    """Return a budget or a number of shots in words."""
    if comparison.problem.averaged:
        return quantity(place, comparison.unit)
    return shots_words(int(place))


def where(comparison: Comparison) -> str:
    """Say in words at which place the main numbers are taken."""
    if comparison.main is not None:
        return f"at {place_name(comparison, comparison.main)}"
    count = len(comparison.places)
    return f"mean over {count} {comparison.problem.place_words[count > 1]}"


# -- in sentences ----------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> list[str]:
    """Say which of the comparable runs has the highest score, which runs differ from the first one,
    and where nothing differs in the settings."""
    reference = comparison.reference.label
    tested = comparison.differences
    lines = [_highest(comparison)]
    if len(comparison.runs) - 1 > MOST_SENTENCES:  # only the best tested run has a sentence
        # of many runs only the count is said, and the best tested one
        signs = [difference.sign for difference in tested]
        lines.append(
            f"Tested against {reference}: {len(tested)} runs, {signs.count(1)} better, "
            f"{signs.count(-1)} worse, {signs.count(0)} not shown to differ."
        )
        ranks = {comparison.runs[i].label: rank for rank, i in enumerate(comparison.ranking())}
        tested = [difference for difference in tested if difference.run in ranks]
        tested = sorted(tested, key=lambda difference: ranks[difference.run])[:1]
    for difference in tested:
        if difference.nothing:
            lines.append(f"{difference.run} got the same as {reference} on every sample.")
            continue
        gap = difference_cell(difference.difference, difference.ci95).replace("\n", " points ")
        outcome = COMPARED[difference.sign]
        p = p_words(difference)
        lines.append(
            f"{difference.run} {outcome} {reference}: {gap}, p {p if '<' in p else f'= {p}'}."
        )
    if not comparison.differences:
        lines.append(f"Nothing could be tested against {reference}.")
    if not comparison.settings and all(run.settings for run in comparison.runs):
        lines.append(
            "The settings are the same: any difference comes from chance, the code or the machine."
        )
    return lines


def _highest(comparison: Comparison) -> str:
    """Name the run with the highest score of those that were judged like the first one."""
    reference = comparison.reference.label
    problem = comparison.problem
    data = f"test {problem.samples} at the same {problem.place_words[1]}"
    alike = len(comparison.comparable)
    if alike == 1:
        return (
            "No run is called the highest: no other run is known to have been judged on the same "
            f"{data} as {reference}."
        )
    best = comparison.ranking()[0]
    metric, score = ranked_score(comparison, best)
    of_these = "The"
    if alike < len(comparison.runs):
        of_these = f"Of the {alike} runs judged on the same {data} as {reference}, the"
    label = comparison.runs[best].label
    return f"{of_these} highest is {label}: {metric} {score}, {where(comparison)}."


def ranked_score(comparison: Comparison, run: int) -> tuple[str, str]:
    """Return the name of the metric that runs are ranked by, and its value for the run at an
    index."""
    metric = _metrics(comparison)[0]
    return metric.name, cell(comparison.rows[run], metric).split("\n")[0]


def method(comparison: Comparison) -> str:
    """Describe what was compared, and how; "" where nothing was."""
    count = len(comparison.differences)
    if not count:
        return ""
    problem = comparison.problem
    at_equal_latency = ""
    if "static_hull" in comparison.reference.results:
        at_equal_latency = (
            " at equal mean latency (a ms more or less counts as much as it gains the static mix)"
        )
    # runs may share different numbers of samples with the first one
    samples = sorted({difference.samples for difference in comparison.differences})
    numbers = " to ".join(f"{size:,}" for size in dict.fromkeys((samples[0], samples[-1])))
    text = (
        f"Compared with {comparison.reference.label}: {problem.score}{at_equal_latency}, "
        f"{where(comparison)}, on the same {numbers} test {problem.samples}. Differences are in "
        f"points, hundredths of {problem.score}; in brackets 95% intervals, a paired bootstrap "
        f"over {problem.samples} and seeds, wider where seeds are few. p is the larger of the "
        f"p-values of a sign-flip test over the {problem.samples} and, where seeds differ, of a t "
        f"test with their spread, corrected for {count} comparison{'s' * (count > 1)} (Holm). A "
        "run is called better or worse where the interval excludes 0 and p is below "
        f"{CHANCE:g}."
    )
    if any(len(run.results.get("seeds", [])) == 1 for run in comparison.runs):
        text += (
            " A run with one seed does not show how much seeds differ, so its interval leaves that "
            "out."
        )
    return text


def p_words(difference: Difference) -> str:
    if difference.p_holm < 0.001:
        return "< 0.001"
    return f"{difference.p_holm:.3f}"


# -- tables ----------------------------------------------------------------------------------------


def tested_cells(difference: Difference) -> list[str]:
    """Return three cells: the difference with its interval in points, p, and what they show."""
    cells = difference_cell(difference.difference, difference.ci95), p_words(difference)
    return [*cells, SIGN_WORDS[difference.sign]]


def results_cells(comparison: Comparison) -> Table:
    """Return a row for each run in their order, then the reference policies of the first run."""
    metrics = _metrics(comparison)
    averaged = comparison.problem.averaged
    header = ["difference, points", "p", "shown"]
    if averaged:
        header = ["run", metrics[0].name, *header, *(metric.name for metric in metrics[1:])]
    else:
        header = ["run", *header, "policy"]
        for place in comparison.places:
            mark = " (compared)" if place == comparison.main else ""
            header.append(place_name(comparison, place) + mark)
    lines = []
    # the first run is the reference
    for i, run in enumerate(comparison.runs):
        tested = ["–", "–", "not tested" if i else "reference"]
        if difference := comparison.difference(run.label):
            tested = tested_cells(difference)
        if averaged:
            first, *others = _cells(comparison, comparison.rows[i])
            lines.append([run.label, first, *tested, *others])
        else:
            scores = [cell(run.row(run.policy, place), ACCURACY) for place in comparison.places]
            lines.append([run.label, *tested, policy_name(run.policy, run.results), *scores])
    for row in comparison.reference_rows():
        first, *others = _cells(comparison, row)
        lines.append([policy_name(row["policy"]), first, "–", "–", "", *others])
    return Table(header, lines, [0])


def _cells(comparison: Comparison, row: Row) -> list[str]:
    return [cell(row, metric, comparison.unit) for metric in _metrics(comparison)]


def _metrics(comparison: Comparison) -> list[Metric]:
    """Return the columns of numbers, first the one that runs are ranked by."""
    problem = comparison.problem
    metrics = [metric for metric in problem.metrics if metric not in (DECISION, OVER_SINGLE)]
    return sorted(metrics, key=lambda metric: metric.key != problem.ranked_by)


def settings_cells(comparison: Comparison) -> Table:
    """Return the settings that differ: few runs have a column each, more a row each. A value equal
    to that of the first run reads "same"."""
    labels = [run.label for run in comparison.runs]
    columns = []
    for key, (first, *others) in comparison.settings.items():
        # repeated values hide what differs
        same = ["same" if value == first else value for value in others]
        columns.append([key, first, *same])
    if len(labels) <= SIDE_BY_SIDE:
        return Table(["setting", *labels], columns, wordy=range(1, len(labels) + 1))
    header, *rows = zip(["run", *labels], *columns, strict=True)
    return Table(list(header), list(map(list, rows)), wordy=range(1, len(header)))


def scores_by_place(comparison: Comparison) -> Table:
    """Return the score of every run at every place with its interval; below it the difference to
    the first run, p, and its interval."""
    metric = next(
        metric for metric in comparison.problem.metrics if metric.key == comparison.problem.score
    )
    # (run, place) → difference
    tested = {(difference.run, difference.place): difference for difference in comparison.by_place}
    rows = []
    for run in comparison.runs:
        line = [run.label]
        for place in comparison.places:
            text = cell(run.row(run.policy, place), metric)
            if difference := tested.get((run.label, place)):
                gap, interval = difference_cell(difference.difference, difference.ci95).split("\n")
                star = " *" if difference.sign else ""
                text += f"\n{gap}{star}, p {p_words(difference)}\n{interval}"
            line.append(text)
        rows.append(line)
    names = [place_name(comparison, place) for place in comparison.places]
    return Table(["run", *names], rows, [0])


def stages(comparison: Comparison) -> Table:
    """Return the differences between policies that both runs trained."""
    metric = comparison.problem.metrics[0]
    rows = []
    for difference in comparison.by_policy:
        run = next(run for run in comparison.runs if run.label == difference.run)
        line = [run.label, policy_name(difference.policy, run.results)]
        for side in (comparison.reference, run):
            score = cell(side.row(difference.policy, difference.place), metric)
            line.append(score.split("\n")[0])
        rows.append([*line, *tested_cells(difference)])
    sides = (comparison.reference.label, "this run")
    return Table(["run", "policy", *sides, "difference, points", "p", "shown"], rows)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tables and the sentences; without colours and frames when this is no terminal."""
    if comparison.settings and len(comparison.runs) <= SIDE_BY_SIDE:
        table = settings_cells(comparison)
        print_table(console, table.header, table.rows, range(len(table.header)))
    else:
        for key, values in comparison.settings.items():
            print_lines(console, [f"differs: {key} ({', '.join(dict.fromkeys(values))})"])
    table = results_cells(comparison)
    few = (0, 1, 2, 4) if comparison.problem.averaged else (0, 1, 3, 4)
    print_table(console, table.header, table.rows, few, table.strong)
    print_lines(console, [*verdict(comparison), method(comparison), *comparison.notes])

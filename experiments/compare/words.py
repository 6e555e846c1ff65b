"""The tables and sentences of `knobwise compare`, for terminal and page alike."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.report.tables import Table, print_lines, print_table, table_of
from knobwise.experiments.report.words import (
    COMPARED,
    SIGN_WORDS,
    cell,
    difference_cell,
    number,
    place_words,
    policy_name,
)
from knobwise.experiments.results.problem import DECISION, OVER_SINGLE, Metric, Row
from knobwise.experiments.results.statistics import CHANCE, Difference

MOST_SENTENCES = 6
"""Up to this many runs have a sentence each; of more the best tested one has."""
SIDE_BY_SIDE = 4
"""Up to this many runs have a column each in the table of settings; more have a row each."""


def place_name(comparison: Comparison, place: float | None) -> str:
    """Return a budget or a number of shots in words, or the mean over the budgets (None)."""
    if place is None:
        return f"mean over {len(comparison.places)} budgets"
    return place_words(comparison.reference.results, place)


# -- in sentences ----------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> list[str]:
    """Say which runs differ from the first one, which of the comparable runs has the highest score,
    and where nothing differs in the settings."""
    reference = comparison.reference.label
    tested = comparison.differences
    signs = [difference.sign for difference in tested]
    highest = [_highest(comparison)]
    summary = (
        f"Against {reference}, {len(tested)} runs were tested: {signs.count(1)} are better, "
        f"{signs.count(-1)} worse, and {signs.count(0)} show no difference."
    )
    if len(comparison.runs) - 1 > MOST_SENTENCES:
        # the best of those that were tested
        by_run = {difference.run: difference for difference in tested}
        ranks = [comparison.runs[i].label for i in comparison.ranking()]
        tested = [by_run[label] for label in ranks if label in by_run][:1]
    sentences = []
    for difference in tested:
        gap = difference_cell(asdict(difference)).replace("\n", " points ")
        outcome = COMPARED[difference.sign]
        if difference.nothing:
            outcome = "got the same on every sample as"
        sentences.append(f"{difference.run} {outcome} {reference}: {gap}, p {p_words(difference)}.")
    # the answer stands first
    if len(signs) == 1:
        lines = sentences + highest
    elif signs:
        lines = [summary, *highest, *sentences]
    else:
        lines = [*highest, summary]
    if not comparison.settings and all(run.settings for run in comparison.runs):
        lines.append(
            "The settings are the same: any difference comes from chance, the code or the machine."
        )
    return lines


def _highest(comparison: Comparison) -> str:
    """Name the run with the highest score of those that were judged like the first one."""
    reference = comparison.reference.label
    alike = len(comparison.comparable)
    if alike == 1:
        return (
            "No run is called the highest: no other run is known to have been judged on the same "
            f"test {comparison.problem.samples} at the same {comparison.problem.place_words[1]} as "
            f"{reference}."
        )
    best = comparison.ranking()[0]
    metric, score = ranked_score(comparison, best)
    return (
        f"Of the {alike} runs judged on the same test {comparison.problem.samples}, the highest is "
        f"{comparison.runs[best].label}: {metric} {score}, "
        f"{place_name(comparison, comparison.main)}."
    )


def ranked_score(comparison: Comparison, run: int) -> tuple[str, str]:
    """Return the name of the metric that runs are ranked by, and its value for the run at an
    index."""
    metric = _metrics(comparison)[0]
    return metric.name, cell(comparison.rows[run], metric).split("\n")[0]


def method(comparison: Comparison) -> str:
    """Describe what was compared, and how; "" where nothing was."""
    if not comparison.differences:
        return ""
    problem = comparison.problem
    equal = " at equal mean latency (a ms more or less counts as much as it gains the static mix)"
    # "" where latencies may differ
    at_equal_latency = equal * problem.equal_latency
    # runs may share different numbers of samples with the first one
    samples = sorted({difference.samples for difference in comparison.differences})
    return (
        f"Compared with {comparison.reference.label}: {problem.score}{at_equal_latency}, "
        f"{place_name(comparison, comparison.main)}, on the same "
        f"{' or '.join(f'{size:,}' for size in samples)} test {problem.samples}. Differences are "
        f"in points, hundredths of {problem.score}; in brackets 95% intervals, a paired bootstrap "
        f"over {problem.samples} and seeds, wider where seeds are few; one seed does not show how "
        "much seeds differ. p is the larger of the p-values of a sign-flip test over the "
        f"{problem.samples} and, where seeds differ, of a t test with their spread, corrected for "
        f"the number of comparisons ({len(comparison.differences)}, Holm). A run is called better "
        f"or worse where the interval excludes 0 and p is below {CHANCE:g}."
    )


def p_words(difference: Difference) -> str:
    if difference.p_holm < 0.001:
        return "< 0.001"
    return f"{difference.p_holm:.3f}"


# -- tables ----------------------------------------------------------------------------------------


def _tested(difference: Difference | None) -> dict[str, str]:
    """Return three cells: the difference with its interval in points, p, and what they show."""
    if difference is None:
        return {"difference, points": "–", "p": "–", "shown": "not tested"}
    return {
        "difference, points": difference_cell(asdict(difference)),
        "p": p_words(difference),
        "shown": SIGN_WORDS[difference.sign],
    }


def results_cells(comparison: Comparison) -> Table:
    """Return a row for each run in their order, then the reference policies of the first run."""
    tested = {difference.run: difference for difference in comparison.differences}
    lines = []
    for run, row in zip(comparison.runs, comparison.rows, strict=True):
        cells = _tested(tested.get(run.label))
        if run is comparison.reference:
            cells["shown"] = "reference"
        if comparison.problem.averaged:
            line = {"run": run.label} | cells | _cells(comparison, row)
            lines.append(line | _attained(comparison, row))
            continue
        line = {"run": run.label} | cells | {"policy": policy_name(run.policy, run.results)}
        for place in comparison.places:
            mark = " (compared)" * (place == comparison.main)
            score = _cells(comparison, run.row(run.policy, place))[comparison.problem.score]
            line[place_name(comparison, place) + mark] = score
        lines.append(line)
    for row in comparison.reference_rows():
        cells = _tested(None) | {"shown": ""}
        line = {"run": policy_name(row["policy"])} | cells | _cells(comparison, row)
        lines.append(line | _attained(comparison, row))
    return table_of(lines, [comparison.reference.label])


def _cells(comparison: Comparison, row: Row) -> dict[str, str]:
    return {metric.name: cell(row, metric, comparison.unit) for metric in _metrics(comparison)}


def _attained(comparison: Comparison, row: Row) -> dict[str, str]:
    """Return the share of what looked attainable that was gained; no cell where no run knows it."""
    if not any("attained" in each for each in comparison.rows):
        return {}
    return {"of attainable": number(row.get("attained"), ".0%")}


def _metrics(comparison: Comparison) -> list[Metric]:
    """Return the columns of numbers, first the one that runs are ranked by."""
    problem = comparison.problem
    metrics = [metric for metric in problem.metrics if metric not in (DECISION, OVER_SINGLE)]
    return sorted(metrics, key=lambda metric: metric.key != problem.ranked_by)


def settings_cells(comparison: Comparison) -> Table:
    """Return the settings that differ: few runs have a column each, more a row each. A value equal
    to that of the first run reads "same"."""
    columns = [["setting", *(run.label for run in comparison.runs)]]
    for key, (first, *others) in comparison.settings.items():
        # repeated values hide what differs
        same = ["same" if value == first else value for value in others]
        columns.append([key, first, *same])
    if len(comparison.runs) > SIDE_BY_SIDE:
        columns[0][0] = "run"
        columns = list(map(list, zip(*columns, strict=True)))
    header, *rows = columns
    return Table(header, rows, wordy=range(1, len(header)))


def scores_by_place(comparison: Comparison) -> Table:
    """Return the score of every run at every place with its interval; below it the difference to
    the first run, p, and its interval."""
    metric = comparison.problem.metrics[0]
    # (run, place) → difference
    tested = {(difference.run, difference.place): difference for difference in comparison.by_place}
    rows = []
    for run in comparison.runs:
        line = [run.label]
        for place in comparison.places:
            text = cell(run.row(run.policy, place), metric)
            if difference := tested.get((run.label, place)):
                gap, interval = difference_cell(asdict(difference)).split("\n")
                star = " *" if difference.sign else ""
                text += f"\n{gap}{star}, p {p_words(difference)}\n{interval}"
            line.append(text)
        rows.append(line)
    names = [place_name(comparison, place) for place in comparison.places]
    return Table(["run", *names], rows, [0])


def stages(comparison: Comparison) -> Table:
    """Return the differences between policies that both runs trained."""
    metric = comparison.problem.metrics[0]
    runs = {run.label: run for run in comparison.runs}
    lines = []
    for difference in comparison.by_policy:
        name = policy_name(difference.policy, runs[difference.run].results)
        line = {"run": difference.run, "policy": name}
        sides = {comparison.reference.label: difference.against, "this run": difference.run}
        for heading, label in sides.items():
            row = runs[label].row(difference.policy, difference.place)
            line[heading] = cell(row, metric).split("\n")[0]
        lines.append(line | _tested(difference))
    return table_of(lines)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tables and the sentences; without colours and frames when this is no terminal."""
    if comparison.settings and len(comparison.runs) <= SIDE_BY_SIDE:
        print_table(console, settings_cells(comparison))
    else:
        for key, values in comparison.settings.items():
            print_lines(console, [f"differs: {key} ({', '.join(dict.fromkeys(values))})"])
    table = results_cells(comparison)
    # the run, its difference, what that shows, and its score or policy
    print_table(console, table, (0, 1, 3, 4))
    print_lines(console, [*verdict(comparison), method(comparison), *comparison.notes])

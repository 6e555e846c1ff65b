"""The tables and sentences of `knobwise compare`, for terminal and page alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from rich.console import Console

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.evidence.statistics import CHANCE, Difference
from knobwise.experiments.evidence.task import ATTAINED, DECISION, OVER_SINGLE, Metric, Row
from knobwise.experiments.report.tables import Table, print_lines, print_table, reworded, table_of
from knobwise.experiments.wording.words import (
    COMPARED,
    LEANING,
    SIGN_WORDS,
    cell,
    condition_words,
    counted,
    difference_cell,
    difference_words,
    number,
    policy_name,
    shown_by,
    sign_of,
)


def condition_name(comparison: Comparison, condition: float | None) -> str:
    """Return a budget or a number of shots in words, or the mean over the budgets (None)."""
    if condition is None:
        return f"mean over {counted(len(comparison.conditions), 'budget')}"
    return condition_words(comparison.reference.results, condition)


# -- in sentences ----------------------------------------------------------------------------------


def verdict(comparison: Comparison) -> list[str]:
    """Say which runs differ from the first one, which of the comparable runs has the highest score,
    and where nothing differs in the settings."""
    reference = comparison.reference.label
    outcomes = Counter(map(shown_by, comparison.differences))
    count = outcomes.total()
    better, worse, nothing = (outcomes.pop(word, 0) for word in SIGN_WORDS.values())
    line = (
        f"Against {reference}, {count} runs were tested: {better} {_are(better)} better, {worse} "
        f"worse, and {nothing} {'shows' if nothing == 1 else 'show'} no difference"
    )
    if unsure := outcomes.total():
        line += f"; of {unsure} more the interval excludes 0, but p is not small enough"
    lines = [f"{line}."]
    if count == 1:
        (difference,) = comparison.differences
        sign = sign_of(difference.ci95)
        outcome = COMPARED[difference.sign]
        doubt = ""
        if sign and not difference.sign:
            outcome = LEANING[sign]
            doubt = ": the interval excludes 0, but p is not small enough"
        lines = [
            f"{difference.run} {outcome} {reference}: "
            f"{difference_words(asdict(difference))}, p {p_words(difference)}{doubt}."
        ]
    lines.append(_highest(comparison))
    if not comparison.settings and all(run.settings for run in comparison.runs):
        lines.append(
            "The settings are the same: any difference comes from chance, the code or the machine."
        )
    return lines


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _highest(comparison: Comparison) -> str:
    """Name the run with the highest score of those that were judged like the first one."""
    task = comparison.task
    alike = len(comparison.comparable)
    if alike == 1:
        return (
            "No run is called the highest: no other run is known to have been judged on the same "
            f"test {task.samples} at the same {task.condition_words[1]} as "
            f"{comparison.reference.label}."
        )
    best = comparison.ranking()[0]
    metric = _metrics(comparison)[0]
    score = number(comparison.rows[best].get(metric.key), metric.how)
    return (
        f"Of the {alike} runs judged on the same test {task.samples}, the highest is "
        f"{comparison.runs[best].label}: {metric.name} {score}, "
        f"{condition_name(comparison, comparison.main)}."
    )


def method(comparison: Comparison) -> str:
    """Describe what was compared, and how; "" where nothing was."""
    if not comparison.differences:
        return ""
    task = comparison.task
    gained = f"a {comparison.unit} more or less counts as much as it gains the static mix"
    equal = f" at equal mean latency ({gained})"
    # "" where latencies may differ
    at_equal_latency = equal * task.equal_latency
    # runs may share different numbers of samples with the first one
    samples = sorted({difference.samples for difference in comparison.differences})
    return (
        f"Compared with {comparison.reference.label}: {task.score}{at_equal_latency}, "
        f"{condition_name(comparison, comparison.main)}, on the same "
        f"{' or '.join(f'{size:,}' for size in samples)} test {task.samples}. Differences are "
        f"in points, hundredths of {task.score}; in brackets 95% intervals, a paired bootstrap "
        f"over {task.samples} and seeds, wider where seeds are few; one seed does not show how "
        "much seeds differ. p is the larger of the p-values of a sign-flip test over the "
        f"{task.samples} and, where seeds differ, of a t test with their spread, corrected for "
        f"the number of comparisons ({len(comparison.differences)}, Holm). A run is called better "
        f"or worse where the interval excludes 0 and p is below {CHANCE:g}, and perhaps so where "
        "only the interval says it."
    )


def p_words(difference: Difference) -> str:
    if difference.p_holm < 0.001:
        return "< 0.001"
    return f"{difference.p_holm:.3f}"


# -- tables ----------------------------------------------------------------------------------------


def _tested(difference: Difference | None) -> dict[str, str]:
    """Return two cells: the difference in points with its interval and p, and what they show."""
    if difference is None:
        return {"gain, points": "–", "shown": "–"}
    cell = f"{difference_cell(asdict(difference))}\np {p_words(difference)}"
    return {"gain, points": cell, "shown": shown_by(difference)}


def results_cells(comparison: Comparison) -> Table:
    """Return a row for each run in their order, then the reference policies of the first run."""
    tested = {difference.run: difference for difference in comparison.differences}
    lines = []
    for run, row in zip(comparison.runs, comparison.rows, strict=True):
        line = {"run": f"{run.label}\n{policy_name(run.policy, run.results)}"}
        lines.append(line | _tested(tested.get(run.label)) | _cells(comparison, row))
    for row in comparison.reference_rows():
        line = {"run": policy_name(row["policy"])}
        lines.append(line | _tested(None) | _cells(comparison, row))
    return table_of(lines)._replace(strong=[0])


def _cells(comparison: Comparison, row: Row) -> dict[str, str]:
    return {metric.name: cell(row, metric, comparison.unit) for metric in _metrics(comparison)}


def _metrics(comparison: Comparison) -> list[Metric]:
    """Return the columns of numbers, first the one that runs are ranked by."""
    task = comparison.task
    metrics = [metric for metric in task.metrics if metric not in (DECISION, OVER_SINGLE)]
    if any("attained" in row for row in comparison.rows):
        metrics.append(ATTAINED)
    return sorted(metrics, key=lambda metric: metric.key != task.ranked_by)


def settings_cells(comparison: Comparison) -> Table:
    """Return the settings that differ, with a column for each run."""
    rows = [[key, *values] for key, values in comparison.settings.items()]
    return Table(["setting", *(run.label for run in comparison.runs)], rows)


def scores_by_condition(comparison: Comparison) -> Table:
    """Return the score of every run at every condition with its interval; below it the difference
    to the first run."""
    metric = comparison.task.metrics[0]
    # (run, condition) → difference
    tested = {
        (difference.run, difference.condition): difference for difference in comparison.by_condition
    }
    lines = []
    for run in comparison.runs:
        line = {"run": run.label}
        for condition in comparison.conditions:
            text = cell(run.row(run.policy, condition), metric)
            if difference := tested.get((run.label, condition)):
                text += "\n" + "\n".join(_tested(difference).values())
            line[condition_name(comparison, condition)] = text
        lines.append(line)
    return table_of(lines)


def stages(comparison: Comparison) -> Table:
    """Return the differences between policies that both runs trained."""
    runs = {run.label: run.results for run in comparison.runs}
    return table_of(
        [
            {"run": difference.run, "policy": policy_name(difference.policy, runs[difference.run])}
            | _tested(difference)
            for difference in comparison.by_policy
        ]
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tables and the sentences; without colours and frames when this is no terminal."""
    if comparison.settings:
        print_table(console, settings_cells(comparison))
    unit = comparison.unit
    print_table(console, reworded(results_cells(comparison), unit))
    sentences = [*verdict(comparison), method(comparison)]
    print_lines(console, reworded(sentences, unit) + comparison.notes)

"""Say in sentences how runs differ from the first one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.evidence.statistics import CHANCE, Difference
from knobwise.experiments.wording.words import (
    COMPARED,
    LEANING,
    SIGN_WORDS,
    condition_words,
    counted,
    difference_words,
    number,
    shown_by,
    sign_of,
)


def condition_name(comparison: Comparison, condition: float | None) -> str:
    """Return a budget or a number of shots in words, or the mean over the budgets (None)."""
    if condition is None:
        return f"mean over {counted(len(comparison.conditions), 'budget')}"
    return condition_words(comparison.reference.results, condition)


def between_runs(comparison: Comparison) -> list[str]:
    """Say which runs differ from the first one, whether one is the best of those that can be
    ranked, and how that was tested; the most important first."""
    reference = comparison.reference.label
    outcomes = Counter(map(shown_by, comparison.differences))
    count = outcomes.total()
    better, worse, nothing = (outcomes.pop(word, 0) for word in SIGN_WORDS.values())
    line = (
        f"{counted(count, 'run')} against {reference}: {better} better, {worse} worse, {nothing} "
        "without a detectable difference"
    )
    if unsure := outcomes.total():
        line += f", {unsure} borderline (the interval excludes 0, but corrected p ≥ {CHANCE:g})"
    lines = [f"{line}."]
    if count == 1:
        (difference,) = comparison.differences
        leaning = sign_of(difference.ci95) if not difference.sign else 0
        outcome = LEANING[leaning] if leaning else COMPARED[difference.sign]
        lines = [
            f"{outcome.format(difference.run, reference)}: "
            f"{difference_words(asdict(difference))}, p {p_words(difference)}."
        ]
    lines += _on_best(comparison)
    if not comparison.settings and all(run.settings for run in comparison.runs):
        lines.append(
            "The options are the same: any difference comes from chance, the code or the machine."
        )
    return [*lines, *method(comparison)]


def _on_best(comparison: Comparison) -> list[str]:
    """Name the best of the runs that were judged like the first one, if it is shown to be."""
    task = comparison.task
    ranking = comparison.ranking()
    lines = []
    best = comparison.best() if len(ranking) > 2 else None
    if best is not None:
        score = number(comparison.rows[best].get(task.ranked_by), ".3f")
        rivals = counted(len(ranking) - 1, "other")
        lines.append(f"{comparison.runs[best].label} ({score}) is better than the {rivals}.")
    others = [run.label for i, run in enumerate(comparison.runs) if i not in ranking]
    if others:
        lines.append(
            f"Not ranked: {', '.join(others)}. They may have been judged on other test "
            f"{task.samples} or {task.condition_words[1]} than {comparison.reference.label}."
        )
    return lines


def method(comparison: Comparison) -> list[str]:
    """Describe what was compared, and how; [] where nothing was."""
    if not comparison.differences:
        return []
    task = comparison.task
    equal = ""
    if task.equal_latency:
        equal = (
            ", with latency differences converted to accuracy at the slope of the static mix "
            f"(accuracy per {comparison.unit})"
        )
    # runs may share different numbers of samples with the first one
    samples = sorted({difference.samples for difference in comparison.differences})
    return [
        f"Differences are in points of {task.score}{equal}, on the same "
        f"{' or '.join(f'{size:,}' for size in samples)} test {task.samples}. 95% intervals: "
        f"paired bootstrap over {task.samples} and seeds, widened for few seeds. p: the larger of "
        "a sign-flip test and, where seeds differ, a t test over seeds, Holm-corrected for "
        f"{counted(len(comparison.differences), 'comparison')}. A run is better or worse if the "
        f"interval excludes 0 and p < {CHANCE:g}."
    ]


def p_words(difference: Difference) -> str:
    """Return the corrected p in words."""
    if difference.p_holm < 0.001:
        return "< 0.001"
    return f"{difference.p_holm:.3f}"

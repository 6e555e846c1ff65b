"""How runs differ from the first one: which sentences are said of several, with which numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from knobwise.common.words import format_count, format_number
from knobwise.experiments.evidence.statistics import CHANCE, Difference, sign_of
from knobwise.experiments.report.comparison import Comparison
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.sentences import Sentence
from knobwise.experiments.report.verdict import COMPARED
from knobwise.experiments.report.words import (
    SIGN_WORDS,
    condition_words,
    difference_words,
    shown_by,
)

LEANING = {1: "looks_better", -1: "looks_worse"}
"""`sign_of` a difference whose interval excludes 0 while its p is not small → what it shows."""


def condition_name(comparison: Comparison, condition: float | None) -> str:
    """Return a budget or a number of shots in words, or the mean over the budgets (None)."""
    if condition is None:
        return f"mean over {format_count(len(comparison.conditions), 'budget')}"
    return condition_words(comparison.reference.results, condition)


def between_runs(comparison: Comparison) -> list[Sentence]:
    """Say which runs differ from the first one, whether one is the best of those that can be
    ranked, and how that was tested; the most important first."""
    lines = [_outcomes(comparison), *_on_best(comparison)]
    if not comparison.settings and all(run.settings for run in comparison.runs):
        lines.append(Sentence("same_options"))
    return [*lines, *method(comparison)]


def _outcomes(comparison: Comparison) -> Sentence:
    """Say how many runs are better or worse than the first one; of a single one, by how much."""
    reference = comparison.reference.label
    if len(comparison.differences) == 1:
        (difference,) = comparison.differences
        leaning = sign_of(difference.ci95) if not difference.sign else 0
        return Sentence(
            LEANING[leaning] if leaning else COMPARED[difference.sign],
            policy=difference.run,
            against=reference,
            gain=difference_words(asdict(difference)),
            more=Sentence("p", p=p_words(difference)),
        )
    outcomes = Counter(map(shown_by, comparison.differences))
    count = outcomes.total()
    better, worse, nothing = (outcomes.pop(word, 0) for word in SIGN_WORDS.values())
    borderline: Sentence | str = ""
    if unsure := outcomes.total():
        borderline = Sentence("borderline", count=unsure, chance=f"{CHANCE:g}")
    return Sentence(
        "outcomes",
        runs=format_count(count, "run"),
        reference=reference,
        better=better,
        worse=worse,
        nothing=nothing,
        borderline=borderline,
    )


def _on_best(comparison: Comparison) -> list[Sentence]:
    """Name the best of the runs that were judged like the first one, if it is shown to be."""
    task = comparison.task
    ranking = comparison.ranking()
    lines = []
    best = comparison.best() if len(ranking) > 2 else None
    if best is not None:
        lines.append(
            Sentence(
                "best_run",
                run=comparison.runs[best].label,
                score=format_number(comparison.rows[best].get(task.ranked_by), ".3f"),
                others=format_count(len(ranking) - 1, "other"),
            )
        )
    others = [run for i, run in enumerate(comparison.runs) if i not in ranking]
    # without decisions nobody knows what a run was judged on
    first = comparison.reference
    blind = [run for run in (first, *others) if run.decisions is None]
    if unknown := others if first in blind else blind:
        lines.append(Sentence("not_known", runs=_labels(unknown), blind=_labels(blind)))
    if elsewhere := [run for run in others if run not in unknown]:
        lines.append(
            Sentence(
                "not_ranked",
                runs=_labels(elsewhere),
                samples=task.samples,
                conditions=task.condition_words[1],
                reference=first.label,
            )
        )
    return lines


def _labels(runs: Sequence[Run]) -> str:
    return ", ".join(run.label for run in runs)


def method(comparison: Comparison) -> list[Sentence]:
    """Describe what was compared, and how; [] where nothing was."""
    if not comparison.differences:
        return []
    task = comparison.task
    # runs may share different numbers of samples with the first one
    sizes = sorted({difference.samples for difference in comparison.differences})
    return [
        Sentence(
            "method",
            score=task.score,
            equal=Sentence("converted", unit=comparison.unit) if task.equal_latency else "",
            sizes=" or ".join(f"{size:,}" for size in sizes),
            samples=task.samples,
            comparisons=format_count(len(comparison.differences), "comparison"),
            chance=f"{CHANCE:g}",
        )
    ]


def p_words(difference: Difference) -> str:
    """Return the corrected p in words."""
    if difference.p_holm < 0.001:
        return "< 0.001"
    return f"{difference.p_holm:.3f}"

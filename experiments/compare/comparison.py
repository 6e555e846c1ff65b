"""What several finished runs have in common, what they differ in, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import polars.selectors as cs

from knobwise.common.errors import InputError
from knobwise.experiments.compare.paired import differences, judged_alike
from knobwise.experiments.compare.runs import ComparedRun, differing, find_runs, place_of, read_runs
from knobwise.experiments.report.words import kept_before_grpo, unit_of, value_of
from knobwise.experiments.results.problem import Problem
from knobwise.experiments.results.statistics import Difference, holm


@dataclass(frozen=True)
class Comparison:
    """Several runs, each compared with the first one. Each list of differences is corrected for
    their number."""

    runs: list[ComparedRun]
    settings: dict[str, list[str]]
    """The settings that differ: key → the value in every run."""
    places: list[float]
    """The budgets in ms, or the numbers of shots, that are compared."""
    main: float | None
    """Where the main numbers are taken: None for the mean over the budgets, or a number of
    shots."""
    rows: list[Mapping[str, Any]]
    """The row at `main` of the policy that stands for the run, for each run."""
    differences: list[Difference]
    """At `main`."""
    by_place: list[Difference]
    """At every place."""
    by_policy: list[Difference]
    """At `main`, for every other policy that both runs trained (selectors)."""
    comparable: list[int]
    """The indices of the first run and of those judged like it (see `judged_alike`): only these
    have a highest."""
    notes: list[str]
    """What was left out or restricted, in sentences."""

    @property
    def reference(self) -> ComparedRun:
        return self.runs[0]

    @property
    def policies(self) -> list[str]:
        return [run.policy for run in self.runs]

    @property
    def problem(self) -> Problem:
        return self.reference.problem

    @property
    def unit(self) -> str:
        return unit_of(self.reference.results)

    def ranking(self) -> list[int]:
        """The indices of the comparable runs, the highest score first."""
        return sorted(
            self.comparable, key=lambda i: -value_of(self.rows[i], self.problem.ranked_by)
        )

    def reference_rows(self) -> list[Mapping[str, Any]]:
        """The rows of the policies that controllers are judged against, from the first run."""
        if self.problem.averaged:
            names: tuple[str, ...] = (self.problem.low, self.problem.high)
        else:
            names = ()
        return [row for name in names if (row := row_over(self.reference, name, self.places, None))]

    def difference(self, label: str) -> Difference | None:
        """The difference of a run at `main`; None if it was not tested."""
        return next(
            (difference for difference in self.differences if difference.run == label), None
        )


def comparison_of(folders: Sequence[str], budgets_ms: Sequence[float] | None = None) -> Comparison:
    """Read and compare runs.

    Args:
        folders: of runs, or with runs in them.
        budgets_ms: only these of the budgets that the first run was judged at; None for all.

    Raises:
        InputError: if folders hold no runs, fewer than two runs are finished, or runs are about
            different problems.
    """
    runs, notes = _read(folders)
    reference = runs[0]
    places = _places(runs[0], budgets_ms)
    main = place_of(reference.problem.main_place(reference.results))
    judged = places if main is None else [main]
    rows = [row_over(run, run.policy, places, main) for run in runs]
    every: list[Difference] = []
    by_policy: list[Difference] = []
    restrictions: dict[str, list[str]] = {}
    for run in runs[1:]:
        tested, note = differences(reference, run, (reference.policy, run.policy), places)
        every += tested
        if note:
            restrictions.setdefault(note.removeprefix(run.label), []).append(run.label)
        if main is not None and tested:
            for name in reference.trained:
                if name in run.trained and (name, name) != (reference.policy, run.policy):
                    by_policy += differences(reference, run, (name, name), [main])[0]
    notes += [_restriction(words, labels) for words, labels in restrictions.items()]
    elsewhere = [run.label for run in runs if not set(run.places) & set(places)]
    if main is None and elsewhere:
        notes.append(
            f"{', '.join(elsewhere)}: means are over budgets that {reference.label} was not "
            "judged at."
        )
    return Comparison(
        runs=runs,
        settings=differing([run.settings for run in runs]),
        places=places,
        main=main,
        rows=rows,
        differences=holm([difference for difference in every if difference.place == main]),
        by_place=holm([difference for difference in every if difference.place is not None]),
        by_policy=holm(by_policy),
        comparable=[
            i for i, run in enumerate(runs) if i == 0 or judged_alike(reference, run, judged)
        ],
        notes=notes + _before_grpo(runs),
    )


def _read(folders: Sequence[str]) -> tuple[list[ComparedRun], list[str]]:
    """The finished runs, and notes on what is missing."""
    if not folders:
        raise InputError(
            "compare: give runs, or a folder with runs in it, as in `knobwise compare runs/lean`"
        )
    finished, unfinished = find_runs(folders)
    if len(finished) < 2:
        if finished:
            count = f"{finished[0]} is the only finished run"
        else:
            count = "there is no finished run"
        if unfinished:
            rest = f"; not finished: {', '.join(unfinished)}"
        else:
            rest = ""
        raise InputError(f"compare: two runs are needed, {count} in {', '.join(folders)}{rest}")
    runs = read_runs(finished)
    notes = []
    if unfinished:
        notes.append(f"Left out because not finished: {', '.join(unfinished)}.")
    if bare := [run.label for run in runs if not run.settings]:
        notes.append(f"{', '.join(bare)}: without config.yaml the settings are unknown.")
    return runs, notes


def _places(reference: ComparedRun, budgets_ms: Sequence[float] | None) -> list[float]:
    if budgets_ms is None:
        return reference.places
    if not budgets_ms:
        raise InputError("budgets_ms=[]: give at least one budget, or leave it out for all")
    if not reference.problem.averaged:
        raise InputError(
            f"budgets_ms: {reference.problem.agents} are not judged at budgets; leave it out"
        )
    wanted = sorted({place_of(budget) for budget in budgets_ms})
    if missing := [budget for budget in wanted if budget not in reference.places]:
        absent, judged = (
            ", ".join(f"{budget:g}" for budget in budgets)
            for budgets in (missing, reference.places)
        )
        raise InputError(
            f"budgets_ms: {reference.folder} was not judged at {absent}, only at {judged}"
        )
    return wanted


def _restriction(words: str, labels: Sequence[str]) -> str:
    """The same restriction of several runs in one sentence."""
    if not words.startswith((" ", ":")):
        return f"{words}."
    if len(labels) > 1 and words.startswith(" "):
        each = ": each"
    else:
        each = ""
    return f"{', '.join(labels)}{each}{words}."


def _before_grpo(runs: Sequence[ComparedRun]) -> list[str]:
    """Where the best checkpoint is from before GRPO, in a sentence."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        if early := kept_before_grpo(run.results):
            seeds = len(run.results["chosen"])
            labels.setdefault("" if seeds == 1 else f" in {early} of {seeds} seeds", []).append(
                run.label
            )
    listed = "; ".join(f"{', '.join(names)}{where}" for where, names in labels.items())
    return [
        f"GRPO does not improve the policy; the best checkpoint is the one before GRPO: {listed}."
    ] * bool(labels)


def row_over(
    run: ComparedRun, policy: str, places: Sequence[float], main: float | None
) -> Mapping[str, Any]:
    """The row of a policy at `main`; where that is the mean over the budgets, over those of
    `places` only, or over its own where the run was judged at none of them. Intervals are known for
    the run's own mean only."""
    row = run.row(policy, main)
    problem = run.problem
    common = [place for place in places if place in run.places]
    if main is not None or not row or not common or set(run.places) <= set(places):
        return row
    number = cs.numeric().cast(pl.Float64).fill_nan(None)
    summary, low, high = (
        pl.DataFrame([run.row(name, place) for place in common], infer_schema_length=None)
        .select(number.mean())
        .row(0, named=True)
        for name in (policy, problem.low, problem.high)
    )
    if problem.score == problem.ranked_by:
        value, worst, best = (value_of(means, problem.score) for means in (summary, low, high))
        if math.isfinite(best - worst):
            if best > worst:
                summary["gap_closed"] = (value - worst) / (best - worst)
            else:
                summary["gap_closed"] = 0.0
    return {"policy": policy, **summary, problem.place: None}

"""What several finished runs have in common, what they differ in, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import polars.selectors as cs

from knobwise.common.errors import InputError
from knobwise.experiments.compare.paired import differences, other_measurements
from knobwise.experiments.compare.runs import ComparedRun, differing, find_runs, place_of, read_runs
from knobwise.experiments.report.words import kept_before_grpo, unit_of, value_of
from knobwise.experiments.results.problem import Problem
from knobwise.experiments.results.statistics import Difference, holm


@dataclass(frozen=True)
class Comparison:
    """Several runs, each compared with the first one."""

    runs: list[ComparedRun]
    settings: dict[str, list[str]]
    """The settings that differ: key → the value in every run."""
    places: list[float]
    """The budgets in ms, or the numbers of shots, that are compared."""
    main: float | None
    """Where the main numbers are taken: None for the mean over the budgets, or a number of shots."""
    policies: list[str]
    """The policy that stands for each run: the learned controller, or the selector that was best on validation."""
    rows: list[Mapping[str, Any]]
    """The row of that policy at `main`, for each run."""
    differences: list[Difference]
    """At `main`; corrected for their number."""
    by_place: list[Difference]
    """At every place; corrected for their number."""
    by_policy: list[Difference]
    """At `main`, for every other policy that both runs trained (selectors); corrected for their number."""
    notes: list[str]
    """What was left out or restricted, in sentences."""

    @property
    def reference(self) -> ComparedRun:
        return self.runs[0]

    @property
    def problem(self) -> Problem:
        return self.reference.problem

    @property
    def unit(self) -> str:
        return unit_of(self.reference.results)

    def ranking(self) -> list[int]:
        """The indices of the runs that were judged on the same data as the first one, the highest score first."""
        wanted = set(self.places if self.main is None else [self.main])
        complete = [i for i, run in enumerate(self.runs) if wanted <= set(run.places)]
        same_data = [i for i in complete if not other_measurements(self.reference, self.runs[i])]
        return sorted(same_data, key=lambda i: -value_of(self.rows[i], self.problem.ranked_by))

    def reference_rows(self) -> list[Mapping[str, Any]]:
        """The rows of the policies that controllers are judged against, from the first run."""
        if not self.problem.averaged:
            return []
        names = self.problem.low, self.problem.high
        return [row for name in names if (row := row_over(self.reference, name, self.places, None))]

    def difference(self, label: str) -> Difference | None:
        """The difference of a run at `main`; None if it was not tested."""
        return next((difference for difference in self.differences if difference.run == label), None)


def comparison_of(folders: Sequence[str], budgets_ms: Sequence[float] | None = None) -> Comparison:
    """Read and compare runs.

    Args:
        folders: of runs, or with runs in them.
        budgets_ms: only these of the budgets that the first run was judged at; None for all.

    Raises:
        InputError: if folders hold no runs, fewer than two runs are finished, or runs are about different problems.
    """
    runs, notes = _read(folders)
    reference = runs[0]
    places = _places(reference, budgets_ms)
    main = place_of(reference.problem.main_place(reference.results))
    policies = [_policy_of(run) for run in runs]
    at_main: list[Difference] = []
    by_place: list[Difference] = []
    by_policy: list[Difference] = []
    restrictions: dict[str, list[str]] = {}
    for run, policy in zip(runs[1:], policies[1:], strict=True):
        tested, note = differences(reference, run, (policies[0], policy), places)
        at_main += [difference for difference in tested if difference.place == main]
        by_place += [difference for difference in tested if difference.place is not None]
        if note:
            restrictions.setdefault(note.removeprefix(run.label), []).append(run.label)
        if main is not None and tested:
            for name in _trained(reference):
                if name in _trained(run) and (name, name) != (policies[0], policy):
                    by_policy += differences(reference, run, (name, name), [main])[0]
    notes += [_restriction(words, labels) for words, labels in restrictions.items()]
    elsewhere = [run.label for run in runs if not set(run.places) & set(places)]
    if main is None and elsewhere:
        notes.append(f"{', '.join(elsewhere)}: means are over budgets that {reference.label} was not judged at.")
    return Comparison(
        runs=runs,
        settings=differing([run.settings for run in runs]),
        places=places,
        main=main,
        policies=policies,
        rows=[row_over(run, policy, places, main) for run, policy in zip(runs, policies, strict=True)],
        differences=holm(at_main),
        by_place=holm(by_place),
        by_policy=holm(by_policy),
        notes=notes + _before_grpo(runs),
    )


def _read(folders: Sequence[str]) -> tuple[list[ComparedRun], list[str]]:
    """The finished runs, and notes on what is missing."""
    if not folders:
        raise InputError("compare: give runs, or a folder with runs in it, as in `knobwise compare runs/lean`")
    finished, unfinished = find_runs(folders)
    if len(finished) < 2:
        count = f"{finished[0]} is the only finished run" if finished else "there is no finished run"
        rest = f"; not finished: {', '.join(unfinished)}" if unfinished else ""
        raise InputError(f"compare: two runs are needed, {count} in {', '.join(folders)}{rest}")
    runs, notes = read_runs(finished), []
    if unfinished:
        notes.append(f"Left out, not finished: {', '.join(unfinished)}.")
    if bare := [run.label for run in runs if not run.settings]:
        notes.append(f"{', '.join(bare)}: without config.yaml the settings are unknown.")
    return runs, notes


def _places(reference: ComparedRun, budgets_ms: Sequence[float] | None) -> list[float]:
    places = reference.places
    if budgets_ms is None:
        return places
    if not budgets_ms:
        raise InputError("budgets_ms=[]: give at least one budget, or leave it out for all")
    if not reference.problem.averaged:
        raise InputError(f"budgets_ms: {reference.problem.agents} are not judged at budgets; leave it out")
    wanted = {place_of(budget) for budget in budgets_ms}
    if missing := sorted(wanted - set(places)):
        raise InputError(
            f"budgets_ms: {reference.folder} was not judged at {', '.join(f'{b:g}' for b in missing)}, only at "
            f"{', '.join(f'{b:g}' for b in places)}"
        )
    return sorted(wanted)


def _policy_of(run: ComparedRun) -> str:
    """The policy that stands for a run."""
    policy = run.problem.main_policy(run.results)
    if policy is None and run.problem.averaged:
        return run.problem.trained[0]
    if policy is None:
        raise InputError(f"{run.folder}: no trained selector was judged in it; leave it out")
    return policy


def _trained(run: ComparedRun) -> list[str]:
    """Every policy that was trained, in the order of the results."""
    names = {*run.problem.trained, *run.problem.controls, *(run.results.get("variants") or ())}
    judged = dict.fromkeys(row["policy"] for row in run.problem.rows(run.results))
    return [name for name in judged if name in names]


def _restriction(words: str, labels: Sequence[str]) -> str:
    """The same restriction of several runs in one sentence."""
    if not words.startswith((" ", ":")):
        return f"{words}."
    each = ": each" if len(labels) > 1 and words.startswith(" ") else ""
    return f"{', '.join(labels)}{each}{words}."


def _before_grpo(runs: Sequence[ComparedRun]) -> list[str]:
    """Where the best checkpoint is from before GRPO, in a sentence."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        if early := kept_before_grpo(run.results):
            seeds = len(run.results["chosen"])
            labels.setdefault("" if seeds == 1 else f" in {early} of {seeds} seeds", []).append(run.label)
    if not labels:
        return []
    listed = "; ".join(f"{', '.join(names)}{where}" for where, names in labels.items())
    return [f"GRPO does not improve the policy, and the best checkpoint is the one before it: {listed}."]


def row_over(run: ComparedRun, policy: str, places: Sequence[float], main: float | None) -> Mapping[str, Any]:
    """The row of a policy at `main`; where that is the mean over the budgets, over those of `places` only, or over its
    own where the run was judged at none of them. Intervals are known for the run's own mean only."""
    row = run.row(policy, main)
    common = [place for place in places if place in run.places]
    if main is not None or not row or not common or set(run.places) <= set(places):
        return row
    problem = run.problem
    names = (policy, problem.low, problem.high)
    frames = (pl.DataFrame([run.row(name, place) for place in common], infer_schema_length=None) for name in names)
    number = cs.numeric().cast(pl.Float64).fill_nan(None)
    summary, low, high = (frame.select(number.mean()).row(0, named=True) for frame in frames)
    if problem.score == problem.ranked_by:
        between = value_of(high, problem.score) - value_of(low, problem.score)
        gain = value_of(summary, problem.score) - value_of(low, problem.score)
        if math.isfinite(between):
            summary["gap_closed"] = gain / between if between > 0 else 0.0
    return {"policy": policy, **summary, problem.place: None}

"""Compare several finished runs: the settings and places they share, and the differences in their
scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
import polars.selectors as cs

from knobwise.common.errors import InputError
from knobwise.experiments.compare.paired import differences, judged_alike
from knobwise.experiments.compare.runs import ComparedRun, differing, find_runs, read_runs
from knobwise.experiments.report.words import kept_before_grpo, unit_of, value_of
from knobwise.experiments.results.problem import Row, place_of
from knobwise.experiments.results.statistics import holm


class Comparison:
    """Several runs, each compared with the first one. Each list of differences is corrected for
    their number.

    Args:
        folders: of runs, or with runs in them.
        budgets_ms: only these of the budgets that the first run was judged at; None for all.

    Attributes:
        runs: the finished runs; `reference` is the first one.
        settings: those that differ: key → the value in every run.
        places: the budgets in ms, or the numbers of shots, that are compared.
        main: where the main numbers are taken: None for the mean over the budgets, or a number of
            shots.
        rows: the row at `main` of the policy that stands for the run, for each run.
        differences: those at `main`.
        by_place: the differences at every place.
        by_policy: the differences at `main` for every other policy that both runs trained
            (selectors).
        comparable: the indices of the first run and of those judged like it (see `judged_alike`):
            only these have a highest.
        notes: sentences on everything that was left out or restricted.

    Raises:
        InputError: if folders hold no runs, fewer than two runs are finished, or runs are about
            different problems.
    """

    def __init__(self, folders: Sequence[str], budgets_ms: Sequence[float] | None = None) -> None:
        self.runs, self.notes = _read(folders)
        reference = self.reference = self.runs[0]
        self.problem = reference.problem
        self.unit = unit_of(reference.results)
        self.settings = differing([run.settings for run in self.runs])
        places = self.places = _places(reference, budgets_ms)
        main = self.main = place_of(self.problem.main_place(reference.results))
        self.rows = [row_over(run, run.policy, places, main) for run in self.runs]
        every = []
        by_policy = []
        # every run against the first one
        for run in self.runs[1:]:
            tested, note = differences(reference, run, (reference.policy, run.policy), places)
            every += tested
            if note and f"{note}." not in self.notes:
                self.notes.append(f"{note}.")
            if main is not None and tested:
                # stages that both runs went through
                for name in reference.trained:
                    if name in run.trained and (name, name) != (reference.policy, run.policy):
                        by_policy += differences(reference, run, (name, name), [main])[0]
        self.differences = holm([difference for difference in every if difference.place == main])
        self.by_place = holm([difference for difference in every if difference.place is not None])
        self.by_policy = holm(by_policy)
        # a highest needs means over the same samples
        judged = places if main is None else [main]
        self.comparable = [0]
        for i, run in enumerate(self.runs[1:], 1):
            if judged_alike(reference, run, judged):
                self.comparable.append(i)
        elsewhere = [run.label for run in self.runs if not set(run.places) & set(places)]
        if main is None and elsewhere:
            self.notes.append(
                f"{', '.join(elsewhere)}: means are over budgets that {reference.label} was not "
                "judged at."
            )
        self.notes += _before_grpo(self.runs)

    def ranking(self) -> list[int]:
        """Return the indices of the comparable runs, the highest score first."""
        scores = [value_of(row, self.problem.ranked_by) for row in self.rows]
        return sorted(self.comparable, key=lambda i: -scores[i])

    def reference_rows(self) -> list[Row]:
        """Return the rows of the policies that controllers are judged against, from the first
        run."""
        if not self.problem.averaged:
            return []
        names = (self.problem.low, self.problem.high)
        rows = [row_over(self.reference, name, self.places, None) for name in names]
        return list(filter(None, rows))


def _read(folders: Sequence[str]) -> tuple[list[ComparedRun], list[str]]:
    """Read the finished runs; also return notes on what is missing."""
    if not folders:
        raise InputError(
            "compare: give runs, or a folder with runs in it, as in `knobwise compare runs/lean`"
        )
    finished, unfinished = find_runs(folders)
    if len(finished) < 2:
        raise InputError(
            f"compare: two runs are needed in {', '.join(folders)}; finished: "
            f"{', '.join(map(str, finished)) or 'none'}; not finished: "
            f"{', '.join(unfinished) or 'none'}"
        )
    runs = read_runs(finished)
    notes = []
    if unfinished:
        notes.append(f"Left out because not finished: {', '.join(unfinished)}.")
    if bare := [run.label for run in runs if not run.settings]:
        notes.append(f"{', '.join(bare)}: without config.yaml the settings are unknown.")
    return runs, notes


def _places(reference: ComparedRun, budgets_ms: Sequence[float] | None) -> list[float]:
    """Return the places that are compared: those of the first run, or the budgets among them that
    the user wants."""
    if budgets_ms is None:
        return reference.places
    if not budgets_ms:
        raise InputError("budgets_ms=[]: give at least one budget, or leave it out for all")
    if not reference.problem.averaged:
        raise InputError(
            f"budgets_ms: {reference.problem.agents} are not judged at budgets; leave it out"
        )
    # files hold six figures of a budget
    wanted = sorted({place_of(budget) for budget in budgets_ms})
    if missing := [f"{budget:g}" for budget in wanted if budget not in reference.places]:
        judged = ", ".join(f"{budget:g}" for budget in reference.places)
        raise InputError(
            f"budgets_ms: {reference.folder} was not judged at {', '.join(missing)}, only at "
            f"{judged}"
        )
    return wanted


def _before_grpo(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence on the runs whose best checkpoint is from before GRPO; [] without any."""
    early = []
    for run in runs:
        if count := kept_before_grpo(run.results):
            early.append(f"{run.label} in {count} of {len(run.results['chosen'])} seeds")
    if not early:
        return []
    return [
        "GRPO does not improve the policy; the best checkpoint is the one before GRPO: "
        f"{', '.join(early)}."
    ]


def row_over(run: ComparedRun, policy: str, places: Sequence[float], main: float | None) -> Row:
    """Return the row of a policy at `main`. A mean over budgets (None) is over those of `places`
    only, or over all of the run's budgets where it was judged at none of them. Only a mean over all
    of them has intervals."""
    row = run.row(policy, main)
    problem = run.problem
    # a mean over budgets that both know
    common = [place for place in places if place in run.places]
    if main is not None or not row or not common or set(run.places) <= set(places):
        return row
    summary = _means(run, policy, common)
    if problem.score == problem.ranked_by:
        value, low, high = (
            value_of(_means(run, name, common), problem.score)
            for name in (policy, problem.low, problem.high)
        )
        if math.isfinite(high - low):
            summary["gap_closed"] = (value - low) / (high - low) if high > low else 0.0
    return {"policy": policy, **summary, problem.place: None}


def _means(run: ComparedRun, policy: str, places: Sequence[float]) -> dict[str, Any]:
    """Return the means of all numbers in the rows of a policy at these places."""
    rows = pl.DataFrame(run.rows_at(policy, places), infer_schema_length=None)
    return rows.select(cs.numeric().cast(pl.Float64).fill_nan(None).mean()).row(0, named=True)

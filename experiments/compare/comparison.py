"""Compare several finished runs: the settings and conditions they share, and the differences in
their scores."""

from __future__ import annotations

from collections.abc import Sequence

from knobwise.common.errors import InputError
from knobwise.experiments.compare.paired import differences, judged_alike
from knobwise.experiments.compare.runs import ComparedRun, differing, find_runs, read_runs
from knobwise.experiments.evidence.results import kept_before_grpo, unit_of, value_of
from knobwise.experiments.evidence.schema import PolicyRow
from knobwise.experiments.evidence.statistics import holm
from knobwise.experiments.evidence.task import condition_of

MOST_DRAWN = 4
"""So many lines can be told apart in a chart; the tables hold all runs."""


class Comparison:
    """Several runs, each compared with the first one. Each list of differences is corrected for
    their number.

    Args:
        folders: of runs, or with runs in them.

    Attributes:
        runs: the finished runs; `reference` is the first one.
        settings: those that differ: key → the value in every run.
        conditions: the budgets in ms, or the numbers of shots, that are compared.
        main: where the main numbers are taken: None for the mean over the budgets, or a number of
            shots.
        rows: the row at `main` of the policy that stands for the run, for each run.
        differences: those at `main`.
        by_condition: the differences at every condition.
        by_policy: the differences at `main` for every other policy that both runs trained
            (selectors).
        comparable: the indices of the first run and of those judged like it (see `judged_alike`):
            only these have a highest.
        notes: sentences on everything that was left out or restricted.

    Raises:
        InputError: if folders hold no runs, fewer than two runs are finished, or runs are about
            different tasks.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.runs, self.notes = _read(folders)
        reference = self.reference = self.runs[0]
        self.task = reference.task
        self.unit = unit_of(reference.results)
        self.settings = differing([run.settings for run in self.runs])
        conditions = self.conditions = reference.conditions
        main = self.main = condition_of(self.task.main_condition(reference.results))
        self.rows = [run.row(run.policy, main) for run in self.runs]
        every = []
        by_policy = []
        # every run against the first one
        for run in self.runs[1:]:
            tested, note = differences(reference, run, (reference.policy, run.policy), conditions)
            every += tested
            if note and f"{note}." not in self.notes:
                self.notes.append(f"{note}.")
            if main is not None and tested:
                # stages that both runs went through
                for name in reference.trained:
                    if name in run.trained and (name, name) != (reference.policy, run.policy):
                        by_policy += differences(reference, run, (name, name), [main])[0]
        self.differences = holm(
            [difference for difference in every if difference.condition == main]
        )
        self.by_condition = holm(
            [difference for difference in every if difference.condition is not None]
        )
        self.by_policy = holm(by_policy)
        # a highest needs means over the same samples
        self.comparable = [0]
        for i, run in enumerate(self.runs[1:], 1):
            if judged_alike(
                reference, run, [*conditions, *run.conditions] if main is None else [main]
            ):
                self.comparable.append(i)
        elsewhere = [run.label for run in self.runs if run.conditions != conditions]
        if main is None and elsewhere:
            self.notes.append(
                f"{', '.join(elsewhere)}: means are over other budgets than those of "
                f"{reference.label}."
            )
        self.notes += _before_grpo(self.runs)

    def ranking(self) -> list[int]:
        """Return the indices of the comparable runs, the highest score first."""
        scores = [value_of(row, self.task.ranked_by) for row in self.rows]
        return sorted(self.comparable, key=lambda i: -scores[i])

    def reference_rows(self) -> list[PolicyRow]:
        """Return the rows of the policies that controllers are judged against, from the first
        run."""
        if not self.task.averaged:
            return []
        names = (self.task.low, self.task.high)
        return [row for name in names if (row := self.reference.row(name, None))]

    @property
    def drawn(self) -> list[ComparedRun]:
        """The runs in charts: the first one and the best of the others, at most `MOST_DRAWN`."""
        if len(self.runs) <= MOST_DRAWN:
            return self.runs
        best = [i for i in self.ranking() if i][: MOST_DRAWN - 1]
        return [self.runs[i] for i in sorted([0, *best])]


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

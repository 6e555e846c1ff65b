"""One finished run or several as one thing to show: the settings and conditions they share, the
policies to draw, and the differences in their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from knobwise.common.errors import InputError
from knobwise.experiments.evidence.results import (
    baselines,
    kept_before_grpo,
    rank_rows,
    unit_of,
    value_of,
)
from knobwise.experiments.evidence.statistics import Difference, holm
from knobwise.experiments.evidence.task import LEARNED, condition_of
from knobwise.experiments.report.paired import differences, judged_alike
from knobwise.experiments.report.runs import (
    Run,
    differing_settings,
    find_runs,
    read_runs,
    shared_words,
)
from knobwise.experiments.report.sentences import Sentence

MAX_DRAWN = 4
"""So many lines can be told apart in a chart; the tables hold all runs."""


class Entry(NamedTuple):
    """A policy of a run: a line of a chart, or a row of the table."""

    run: Run
    policy: str
    stands_for_run: bool = False
    """Whether it goes by the label of its run, as among several runs."""


class Comparison:
    """One run, or several of which each is compared with the first. Each list of differences is
    corrected for their number.

    Args:
        runs: at least one, all of the same task.
        notes: on what was left out.

    Attributes:
        runs: `reference` is the first one.
        settings: those that differ: key → the value in every run.
        conditions: the budgets in ms, or the numbers of shots, that are compared.
        main: where the main numbers are taken: None for the mean over the budgets, or a number of
            shots.
        rows: the row at `main` of the policy that stands for the run, for each run.
        differences: those at `main`.
        by_condition: the differences at every condition.
        by_policy: the differences at `main` for every other policy that both runs trained
            (selectors).
        comparable: the indices of the first run and of those judged like it (see `judged_alike`).
        notes: on everything that was left out or restricted.
    """

    def __init__(self, runs: Sequence[Run], notes: Sequence[Sentence] = ()) -> None:
        self.runs = list(runs)
        self.notes = list(notes)
        reference = self.reference = self.runs[0]
        self.task = reference.task
        self.unit = unit_of(reference.results)
        self.settings = differing_settings([run.settings for run in self.runs])
        self.conditions = reference.conditions
        self.main = condition_of(self.task.main_condition(reference.results))
        self.rows = [run.row(run.policy, self.main) for run in self.runs]
        self.differences: list[Difference] = []
        self.by_condition: list[Difference] = []
        self.by_policy: list[Difference] = []
        self.comparable = [0]
        if len(self.runs) > 1:
            self._compare()

    @property
    def single(self) -> bool:
        """Whether there is one run only."""
        return len(self.runs) == 1

    def _compare(self) -> None:
        """Compare every run with the first one."""
        reference = self.reference
        conditions = self.conditions
        main = self.main
        every = []
        by_policy = []
        for i, run in enumerate(self.runs[1:], 1):
            tested, note = differences(reference, run, (reference.policy, run.policy), conditions)
            every += tested
            if note and str(note) not in map(str, self.notes):
                self.notes.append(note)
            if main is not None and tested:
                # stages that both runs went through
                for name in reference.trained:
                    if name in run.trained and (name, name) != (reference.policy, run.policy):
                        by_policy += differences(reference, run, (name, name), [main])[0]
            # scores are ranked only if they are means over the same samples
            judged_at = [*conditions, *run.conditions] if main is None else [main]
            if judged_alike(reference, run, judged_at):
                self.comparable.append(i)
        self.differences = holm([each for each in every if each.condition == main])
        self.by_condition = holm([each for each in every if each.condition is not None])
        self.by_policy = holm(by_policy)
        elsewhere = [run.label for run in self.runs if run.conditions != conditions]
        if main is None and elsewhere:
            others = ", ".join(elsewhere)
            self.notes.append(Sentence("other_budgets", runs=others, reference=reference.label))
        self.notes += _before_grpo(self.runs)

    def ranking(self) -> list[int]:
        """Return the indices of the comparable runs, the highest score first."""
        scores = [value_of(row, self.task.ranked_by) for row in self.rows]
        return sorted(self.comparable, key=lambda i: -scores[i])

    def best(self) -> int | None:
        """Return the index of the run that is shown to be better than each other comparable run,
        corrected for their number; None without one."""
        first, *others = self.ranking()
        best = self.runs[first]
        tested = []
        for run in (self.runs[i] for i in others):
            at_conditions, _ = differences(run, best, (run.policy, best.policy), self.conditions)
            tested += [each for each in at_conditions if each.condition == self.main]
        better = [each.sign > 0 for each in holm(tested)]
        return first if others and len(better) == len(others) and all(better) else None

    def drawn(self) -> list[Run]:
        """Return the runs in charts: the first one and the best of the others, at most
        `MAX_DRAWN`."""
        if len(self.runs) <= MAX_DRAWN:
            return self.runs
        best = [i for i in self.ranking() if i][: MAX_DRAWN - 1]
        return [self.runs[i] for i in sorted([0, *best])]

    def listed(self) -> list[Entry]:
        """Return the rows of the table: all policies of one run, the best first; else the runs and
        the policies that controllers are judged against, from the first run."""
        if self.single:
            results = self.reference.results
            # those that were not judged at the main condition come last
            judged = [row["policy"] for row in (*rank_rows(results), *results["rows"])]
            return [Entry(self.reference, policy) for policy in dict.fromkeys(judged)]
        return [*(Entry(run, run.policy, True) for run in self.runs), *self._references()]

    def lines(self) -> list[Entry]:
        """Return what charts draw: of one run the learned policy, the strongest baseline and the
        references; else the runs and the references."""
        run = self.reference
        if not self.single:
            return [*(Entry(each, each.policy, True) for each in self.drawn()), *self._references()]
        names = [run.policy, *LEARNED[-2:], *baselines(run.results)[:1]]
        if self.task.averaged:
            names = [run.policy, self.task.low, *baselines(run.results)[:1], self.task.high]
        judged = {row["policy"] for row in run.results["rows"]}
        return [Entry(run, name) for name in dict.fromkeys(names) if name in judged]

    def _references(self) -> list[Entry]:
        names = (self.task.low, self.task.high) if self.task.averaged else ()
        return [Entry(self.reference, name) for name in names if self.reference.row(name, None)]


def read_comparison(folders: Sequence[str]) -> Comparison:
    """Read the runs in these folders, or below them, and compare them.

    Raises:
        InputError: if folders hold no runs, fewer than two runs are finished, runs are about
            different tasks, or no learned policy was judged in one.
    """
    if not folders:
        raise InputError(
            "compare: give runs, or a folder with runs in it, as in `knobwise compare runs/lean`"
        )
    finished, unfinished = find_runs(folders)
    if len(finished) < 2:
        raise InputError(
            f"compare: needs two or more finished runs in {', '.join(folders)}; finished: "
            f"{', '.join(map(str, finished)) or 'none'}; not finished: "
            f"{', '.join(unfinished) or 'none'}. Add another run, or give a folder of runs"
        )
    runs = read_runs(finished)
    notes = []
    labels = [Path(run.label).name for run in runs]
    if labels != [folder.resolve().name for folder in finished]:
        notes.append(Sentence("shared_words", words=" ".join(shared_words(runs))))
    if unfinished:
        notes.append(Sentence("unfinished", runs=", ".join(unfinished)))
    if bare := [run.label for run in runs if not run.settings]:
        notes.append(Sentence("no_settings", runs=", ".join(bare)))
    for run in runs:
        if not run.policy:
            raise InputError(f"{run.folder}: no learned policy was judged in it; leave it out")
    return Comparison(runs, notes)


def _before_grpo(runs: Sequence[Run]) -> list[Sentence]:
    """Name the runs whose best checkpoint is from before GRPO; [] without any."""
    early = []
    for run in runs:
        if count := kept_before_grpo(run.results):
            seeds = len(run.results["chosen"])
            early.append(str(Sentence("of_seeds", run=run.label, count=count, seeds=seeds)))
    return [Sentence("no_better_checkpoint", runs=", ".join(early))] if early else []

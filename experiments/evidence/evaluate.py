"""Let policies decide on held-out samples: a row for each policy, seed, sample and condition.

An *evaluator* knows one kind of task: under which conditions policies decide, what their choices
get, and what they are compared with. Controllers, their teachers and every baseline go through the
same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.prices import (
    BestSingle,
    MixingPolicy,
    OracleAtMean,
    StaticMix,
    make_priced_baselines,
    mean_budgets,
)
from knobwise.agents.evaluation.baselines import (
    LookupTable,
    Oracle,
    StaticPerDataset,
    make_baselines,
    static_of,
)
from knobwise.agents.evaluation.budgets import judged_budgets
from knobwise.agents.evaluation.evaluation import judge
from knobwise.agents.evaluation.policy import Policy
from knobwise.agents.teacher.experts import Experts
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.divisions import budget_rows
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.evidence.decisions import decision_rows
from knobwise.experiments.evidence.equal_latency import Reference
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.summarise import with_references, with_score_of
from knobwise.experiments.evidence.task import DEADLINE, MEAN_BUDGET, Task

Policies = Mapping[str, Mapping[int | None, Any]]
"""Name → seed → policy; the seed is None where none changes the policy."""


class Evaluator(Protocol):
    """What `evaluate` needs to know of a task."""

    @property
    def task(self) -> Task: ...

    @property
    def samples(self) -> pl.DataFrame:
        """n rows: `sample`, `dataset` if there are several, `cluster` if there are any."""
        ...

    @property
    def conditions(self) -> list[float]:
        """B budgets or numbers of demonstrations."""
        ...

    def outcomes(self, policy: Any) -> Mapping[str, Any]:
        """Let a policy decide for all samples under all conditions: the columns of its decisions,
        each as `decision_rows` takes it."""
        ...


def evaluate(evaluator: Evaluator, policies: Policies) -> pl.DataFrame:
    """Return the decisions of all policies, see `knobwise.experiments.evidence.decisions`."""
    frames: list[pl.DataFrame] = []
    with progress("judging", sum(map(len, policies.values())), quiet_s=2) as tick:
        for name, of_seeds in policies.items():
            for seed, policy in of_seeds.items():
                columns = evaluator.outcomes(policy)
                about = evaluator.samples, evaluator.conditions
                frames.append(decision_rows(name, seed, *about, columns))
                tick(len(frames), name)
    return pl.concat(frames)


def alone(policies: Sequence[Any]) -> dict[str, dict[int | None, Any]]:
    """Return policies under their own names, which no seed changes."""
    return {policy.name: {None: policy} for policy in policies}


class _OnTable:
    """What the evaluators of a profile share.

    Args:
        split: policies are chosen on its training and validation samples, and judged on its test
            samples.
        budgets_ms: float [B].
    """

    def __init__(self, table: ProfileTable, split: Split, budgets_ms: Tensor) -> None:
        self.table = table
        self.split = split
        self.rows = split.test
        self.budgets_ms = budgets_ms
        self.conditions = budgets_ms.tolist()
        self.labels = pl.Series([table.label(c) for c in range(table.num_configurations)])
        names: dict[str, Any] = {"sample": table.sample_ids, "dataset": table.datasets or None}
        if table.clusters:
            names["cluster"] = table.clusters
        elif table.image_ids:
            # an image is known by its data set and id
            names["cluster"] = list(map("/".join, table.split_keys))
        self.samples = pl.DataFrame(names)[self.rows.numpy()]

    def of_rows(self, rows: Tensor) -> Self:
        """Return the evaluator of other test samples, int64 [n]."""
        return type(self)(self.table, self.split._replace(test=rows), self.budgets_ms)

    def chosen(self, configurations: Tensor) -> pl.Series:
        """Return the labels of configurations int64 [n, B], as a column."""
        return self.labels[configurations.flatten().numpy()]


class Deadlines(_OnTable):
    """Controllers under a deadline for each request.

    Args:
        rewards: that of the column `reward`; by default those of training.
    """

    task = DEADLINE

    def __init__(
        self,
        table: ProfileTable,
        split: Split,
        budgets_ms: Tensor,
        rewards: RewardTable | None = None,
    ) -> None:
        super().__init__(table, split, budgets_ms)
        self.rewards = rewards

    @staticmethod
    def budgets(table: ProfileTable, split: Split, wanted: Sequence[float] | None) -> Tensor:
        """Return the budgets to judge at, float [B]; by default those that suit the table."""
        return judged_budgets(table, wanted, budget_rows(table, split))

    @classmethod
    def budgets_for(
        cls,
        controller: DeployedController,
        table: ProfileTable,
        split: Split,
        wanted: Sequence[float] | None,
    ) -> Tensor:
        """Return the budgets to judge a trained controller at, see `budgets`."""
        return cls.budgets(table, split, wanted)

    @staticmethod
    def deadlines(budgets_ms: Tensor) -> Tensor:
        """Return the budgets that predictors learn to keep: these."""
        return budgets_ms

    @staticmethod
    def check(table: ProfileTable, splits: int) -> None:
        """Do nothing: there may be several splits, and a first look to pay for."""

    def outcomes(self, policy: Any) -> dict[str, Any]:
        """See `Evaluator`. A policy is a `Policy`; it may have `cost_ms`, the time [B] that it is
        charged, and further columns (`Charged.outcomes`)."""
        cost_ms = getattr(policy, "cost_ms", 0.0)
        judged = judge(policy, self.table, self.rows, self.budgets_ms, self.rewards, cost_ms)
        columns = dict(vars(judged))
        if hasattr(policy, "outcomes"):
            columns |= policy.outcomes(self.table, self.rows, judged.chosen, self.budgets_ms)
        columns["choice"] = self.chosen(columns.pop("chosen"))
        return columns

    @property
    def utility_budgets(self) -> list[float]:
        """The budgets that the utility of a single configuration is averaged over."""
        return self.conditions

    def compared(self, decisions: pl.DataFrame) -> pl.DataFrame:
        """Add to decisions the scores that they are compared with."""
        return with_references(self.task, decisions)

    def add_facts(self, results: RunResults, policies: Policies) -> None:
        """Do nothing: there are no facts about deadlines alone."""

    def baselines(self, experts: Experts, seed: int) -> list[Policy]:
        """Return every simple way to decide.

        Args:
            experts: of all families, fitted on all but the test samples.
            seed: of `random`.
        """
        about = self.table, self.split, seed, self.budgets_ms, experts
        policies: list[Any] = [*make_baselines(*about)]
        if len(rows_by_dataset(self.table, self.rows)) > 1:
            policies.insert(1, StaticPerDataset(self.table, self.split.fitted, self.rows))
        return policies

    def references(self) -> list[Policy]:
        """Return the ends of the oracle gap alone."""
        return [static_of(self.table, self.split.fitted), Oracle(self.table, self.rows)]

    def deployed(self, controller: DeployedController) -> Policy:
        """Return what decides of a controller."""
        return controller.decider

    def explained_by(self, controller: DeployedController) -> tuple[Tensor, Policy, Tensor | None]:
        """Return what decisions are explained with: the budgets [B], the static policy beside the
        controller, and the prices [B] of a ms, None where there are none."""
        return self.budgets_ms, static_of(self.table, self.split.fitted), None


class MeanBudgets(_OnTable):
    """Controllers whose latency must not exceed a budget on average. Policies are `MixingPolicy`;
    their outcomes are expectations, without the noise of draws."""

    task = MEAN_BUDGET

    def __init__(
        self,
        table: ProfileTable,
        split: Split,
        budgets_ms: Tensor,
        rewards: RewardTable | None = None,
    ) -> None:
        super().__init__(table, split, budgets_ms)
        self.reference = Reference(table, split.fitted, self.rows)

    @staticmethod
    def budgets(table: ProfileTable, split: Split, wanted: Sequence[float] | None) -> Tensor:
        """Return the budgets to judge at, float64 [B], see `mean_budgets`."""
        return mean_budgets(table, split.fitted, wanted)

    @staticmethod
    def budgets_for(
        controller: DeployedController,
        table: ProfileTable,
        split: Split,
        wanted: Sequence[float] | None,
    ) -> Tensor:
        """Return the budgets that a controller was calibrated for.

        Raises:
            InputError: another one is wanted.
        """
        mean = controller.decider.mean
        assert mean is not None
        try:
            mean.groups(np.array(wanted or mean.budgets_ms))
        except ValueError as error:
            raise InputError(f"budgets_ms: {error}") from error
        return torch.from_numpy(mean.budgets_ms)

    @staticmethod
    def deadlines(budgets_ms: Tensor) -> Tensor:
        """Return no budgets: under a mean budget predictors learn without a deadline."""
        return budgets_ms[:0]

    @staticmethod
    def check(table: ProfileTable, splits: int) -> None:
        """Raise InputError for several splits, and for a first look to pay for."""
        if table.first_look_ms is not None or splits > 1:
            raise InputError(
                "budget=mean: has one split, so leave out split.folds and split.repeats, and "
                f"no first stage to pay for, as {table.name!r} has if it names first_look_ms"
            )

    def outcomes(self, policy: Any) -> dict[str, Any]:
        """See `Evaluator`."""
        mixture = policy.mixture(self.table, self.rows)
        accuracy, latency_ms = mixture.expected(self.table, self.rows)
        drawn = ~mixture.share.isnan()
        second = mixture.second.where(drawn, -1)
        columns = {
            "choice": self.chosen(mixture.first),
            "second_choice": self.chosen(second).set(
                pl.Series((second < 0).flatten().numpy()), None
            ),
            "second_share": mixture.share,
            "accuracy": accuracy,
            "latency_ms": latency_ms + getattr(policy, "cost_ms", 0.0),
        }
        if hasattr(policy, "decision_us"):
            columns["decision_us"] = policy.decision_us
        return columns

    @property
    def utility_budgets(self) -> list[float]:
        """No budgets: a configuration has no utility."""
        return []

    def compared(self, decisions: pl.DataFrame) -> pl.DataFrame:
        """Add to decisions the scores that they are compared with, at equal mean latency."""
        at_budget = with_score_of(decisions, self.task.low, self.task.score, "of_mix_at_budget")
        return self.reference.at_equal_latency(at_budget)

    def add_facts(self, results: RunResults, policies: Policies) -> None:
        """Add the corners of the static mix, and to rows `price` (λ) and `worth_ms` (1/λ, None at
        price 0) where their policies have them."""
        results |= {"sense": "mean", "static_hull": self.reference.hull()}
        prices = {}
        for name, of_seeds in policies.items():
            worths = [policy.worths for policy in of_seeds.values() if hasattr(policy, "worths")]
            if worths:
                prices[name] = (1 / torch.stack(worths)).mean(0).tolist()
        for row in (*results["rows"], *results.get("by_dataset", [])):
            row |= {"price": None, "worth_ms": None}
            # a price belongs to a budget, so a mean over the budgets has none
            if row["policy"] in prices and row.get("budget_ms") is not None:
                by_budget = dict(zip(self.conditions, prices[row["policy"]], strict=True))
                row["price"] = by_budget[row["budget_ms"]]
                row["worth_ms"] = 1 / row["price"] if row["price"] else None

    def baselines(self, experts: Experts, seed: int) -> list[MixingPolicy]:
        """Return every simple way to decide, see `Deadlines.baselines`."""
        priced = make_priced_baselines(self.table, self.split, self.budgets_ms, experts)
        first, second, last = self.references()
        return [first, second, *priced, last]

    def references(self) -> list[MixingPolicy]:
        """Return the static policies and the upper bound alone."""
        about = *self.reference.averages, self.budgets_ms
        return [StaticMix(*about), BestSingle(*about), OracleAtMean(self.budgets_ms)]

    def deployed(self, controller: DeployedController) -> MixingPolicy:
        """Return what decides of a controller."""
        return controller.under_mean_budgets()

    def explained_by(self, controller: DeployedController) -> tuple[Tensor, Policy, Tensor | None]:
        """See `Deadlines.explained_by`."""
        prices = 1 / torch.from_numpy(controller.settled.mean["worths"])
        return self.budgets_ms, LookupTable(self.table, self.split.fitted, 0.0), prices


EVALUATORS: dict[str, type[Deadlines] | type[MeanBudgets]] = {
    "deadline": Deadlines,
    "mean": MeanBudgets,
}
"""What a budget limits → its evaluator."""

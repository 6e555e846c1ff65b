"""Let policies decide on held-out samples: a row for each policy, seed, sample and condition.

An *evaluator* knows one kind of task: under which conditions policies decide, what their choices
get, and what they are compared with. Controllers, their teachers and every baseline go through the
same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.mean_policies import MixingPolicy
from knobwise.agents.calibration.ways import WAYS
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.limits import further_costs
from knobwise.agents.evaluation.own_cost import OwnCost
from knobwise.agents.evaluation.policy import Baseline, Policy
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.experts import Experts
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.decisions import Columns, decision_rows
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.summarise import with_references
from knobwise.experiments.evidence.task import DEADLINE, PROMISED, Task

Policies = Mapping[str, Mapping[int | None, Any]]
"""Name → seed → policy; the seed is None where none changes the policy."""


class Evaluator(Protocol):
    """What `evaluate` needs to know of a task."""

    @property
    def task(self) -> Task: ...

    @property
    def samples(self) -> pl.DataFrame:
        """n rows: `sample`, and perhaps `dataset` and `cluster`."""
        ...

    @property
    def conditions(self) -> list[float]:
        """B budgets or numbers of demonstrations."""
        ...

    def outcomes(self, policy: Any, cost_ms: Tensor | float = 0.0) -> Columns:
        """Let a policy decide for all samples under all conditions: the columns of its decisions,
        each as `decision_rows` takes it.

        Args:
            cost_ms: [B], what a decision and its features are charged.
        """
        ...


def evaluate(
    evaluator: Evaluator,
    policies: Policies,
    costs: Mapping[str, Mapping[int | None, OwnCost]] | None = None,
) -> pl.DataFrame:
    """Return the decisions of all policies, see `knobwise.experiments.evidence.decisions`.

    Args:
        costs: what the decisions of some policies cost, by name and seed; others decide for free.
    """
    costs = costs or {}
    frames: list[pl.DataFrame] = []
    with progress("judging", sum(map(len, policies.values())), quiet_s=2) as tick:
        for name, of_seeds in policies.items():
            for seed, policy in of_seeds.items():
                if name in costs:
                    cost = costs[name][seed]
                    columns = dict(evaluator.outcomes(policy, cost.charged_ms))
                    columns["decision_us"] = cost.decision_us
                else:
                    columns = dict(evaluator.outcomes(policy))
                frames.append(
                    decision_rows(name, seed, evaluator.samples, evaluator.conditions, columns)
                )
                tick(len(frames), name)
    return pl.concat(frames)


def check_fits(name: str, agent: DeployedController, table: ProfileTable) -> None:
    """Raise InputError, with the name of a controller, for a table of another unit or of other
    configurations or features than it was trained for."""
    network = agent.controller
    if table.unit != network.unit:
        raise InputError(
            f"{name}: was trained for budgets in {network.unit}; profile {table.name!r} is in "
            f"{table.unit}"
        )
    # the same knobs, values and order of configurations
    knobs = [[knob.spelled for knob in each.knobs] for each in (table, network)]
    if knobs[0] != knobs[1] or not torch.equal(table.configurations, network.configurations):
        raise InputError(
            f"{name}: was trained for {len(network.configurations)} configurations of "
            f"{', '.join(knob.name for knob in network.knobs)}; profile {table.name!r} has others"
        )
    network.normaliser(table.features, table.num_samples)


def clusters_of(table: ProfileTable) -> list[str] | None:
    """Return the cluster or the image of each sample, N names; None where each stands alone."""
    if table.clusters:
        return list(table.clusters)
    if table.image_ids:
        # an image is known by its data set and id
        return list(map("/".join, table.split_keys))
    return None


def alone(
    policies: Sequence[Baseline | MixingPolicy],
) -> dict[str, dict[int | None, Baseline | MixingPolicy]]:
    """Map each policy's name to the policy, as one without a seed: {name: {None: policy}}."""
    return {policy.name: {None: policy} for policy in policies}


class OnTable:
    """What the evaluators of a profile share.

    Args:
        problem: policies are chosen on the training and validation samples of its split, and judged
            on its test samples.
        budgets_ms: float [B].
        rewards: that of the column `reward`; None for those of training.
    """

    task: Task

    def __init__(
        self, problem: Problem, budgets_ms: Tensor, rewards: RewardTable | None = None
    ) -> None:
        self.problem = problem
        self.rewards = rewards
        self.ways = WAYS[problem.rule.kind]
        # a trained controller may bring the policy that it was compared with, the first one
        self.references = self.ways.references(problem, budgets_ms)
        self.table = table = problem.facts
        self.rows = problem.split.test
        self.budgets_ms = budgets_ms
        self.conditions = budgets_ms.tolist()
        self.labels = pl.Series([table.label(c) for c in range(table.num_configurations)])
        names = {
            "sample": table.sample_ids,
            "dataset": table.datasets or None,
            "cluster": clusters_of(table),
        }
        self.samples = pl.DataFrame(names)[self.rows.numpy()]

    def add_facts(self, results: RunResults, policies: Policies) -> None:
        """Add to the results what they have for this task alone."""

    def of_rows(self, rows: Tensor) -> Self:
        """Copy the evaluator for other test samples, rows int64 [n]."""
        return type(self)(self.problem.judged_on(rows), self.budgets_ms)

    @property
    def judged_by(self) -> str:
        """What training was to raise: `utility`, or the `reward` if that is judged by itself."""
        if self.rewards is None:
            return self.task.judged_by
        return self.rewards.kind.judged_by

    def baselines(self, experts: Experts, seed: int) -> list[Any]:
        """Return every simple way to decide, see `Ways.baselines`."""
        first, *others, last = self.references
        return [
            first,
            *others,
            *self.ways.baselines(self.problem, self.budgets_ms, experts, seed),
            last,
        ]

    def explained_by(self, controller: DeployedController) -> tuple[Tensor, Policy, Tensor | None]:
        """Return what decisions are explained with: the budgets [B], the static policy beside the
        controller, and the prices [B] of a ms, None where there are none."""
        return self.budgets_ms, self.ways.static(self.problem), self.ways.prices(controller)

    def chosen(self, configurations: Tensor) -> pl.Series:
        """Label configurations int64 [n, B] by their knob values, as a column of n · B texts."""
        return self.labels[configurations.flatten().numpy()]


class Deadlines(OnTable):
    """Controllers under a deadline for each request."""

    task = DEADLINE

    def __init__(
        self, problem: Problem, budgets_ms: Tensor, rewards: RewardTable | None = None
    ) -> None:
        super().__init__(problem, budgets_ms, rewards)
        if problem.calibration is not None:
            self.task = PROMISED

    def outcomes(self, policy: Policy, cost_ms: Tensor | float = 0.0) -> Columns:
        """See `Evaluator`. A policy is a `Policy`; if it has a `teacher`, this one says what it
        expects."""
        judged = evaluate_policy(
            policy, self.problem, self.rows, self.budgets_ms, self.rewards, cost_ms=cost_ms
        )
        columns = dict(vars(judged))
        if self.problem.beliefs is not None:
            cells = self.rows.unsqueeze(1), judged.chosen
            columns["sampling_weight"] = self.problem.beliefs.weight[cells]
        if isinstance(policy, DeployedController) and policy.teacher is not None:
            left_ms = self.budgets_ms - cost_ms
            columns["expected_on_time"] = self._expected(policy, judged.chosen, left_ms)
        checked = not getattr(policy, "hindsight", False)
        columns |= further_costs(self.problem, self.rows, judged.chosen, checked)
        columns["choice"] = self.chosen(columns.pop("chosen"))
        return columns

    @torch.no_grad()
    def _expected(self, policy: DeployedController, chosen: Tensor, left_ms: Tensor) -> Tensor:
        """Return the probability of being on time that the teacher of a controller expects of
        choices int64 [n, B], float [n, B]; `left_ms` [B] is what its own cost leaves."""
        x = policy.controller.normaliser.of_rows(self.table, self.rows)
        moments = policy.teacher.moments(x)
        columns = []
        for limit, choice in zip(left_ms.float(), chosen.T, strict=True):
            meets = moments.meets(limit.expand(len(x)))
            columns.append(meets.gather(1, choice[:, None]))
        return torch.cat(columns, 1)

    @property
    def utility_budgets(self) -> list[float]:
        """The budgets that the utility of a single configuration is averaged over."""
        return self.conditions

    def compared(self, decisions: pl.DataFrame) -> pl.DataFrame:
        """Add to decisions the scores that they are compared with."""
        return with_references(self.task, decisions)

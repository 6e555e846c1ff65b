"""Controllers under mean budgets: the evaluator, and what others get at *equal mean latency*.

Under a mean budget a policy hardly ever spends exactly its budget. So it is compared with what the
static mix, the best single configuration and the oracle get with the latency that it spent, on the
same samples.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.calibration.mean_policies import (
    MixingPolicy,
    StaticMix,
    best_single_at,
    outcomes_of,
)
from knobwise.agents.calibration.prices import oracle_at_mean, static_hull
from knobwise.agents.evaluation.limits import further_costs
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.cells import averages
from knobwise.experiments.evidence.decisions import Columns, array_of
from knobwise.experiments.evidence.evaluate import OnTable, Policies
from knobwise.experiments.evidence.results import SINGLE
from knobwise.experiments.evidence.schema import ConfigurationRow, RunResults
from knobwise.experiments.evidence.summarise import with_score_of
from knobwise.experiments.evidence.task import MEAN_BUDGET


class Reference:
    """Policies that any other is compared with, by its spending on the test samples.

    Args:
        problem: static policies are chosen on the training and validation samples of its split, and
            judged on its test samples.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.test = problem.split.test
        self.mask = problem.mask[self.test]
        self.mean_accuracy, self.mean_cost = averages(problem.cells, problem.split.fitted)
        self.corners = static_hull(self.mean_accuracy, self.mean_cost)
        at_corners = StaticMix(
            self.mean_accuracy, self.mean_cost, budgets=self.mean_cost[self.corners]
        )
        self._accuracy, latency_ms = at_corners.expected(problem, self.test)
        # a dearer corner may turn out cheaper on the test samples; from there on the mix costs what
        # the dearest did
        self._means = latency_ms.mean(0).cummax(0).values

    def hull(self) -> list[ConfigurationRow]:
        """Return the corners of the static mix, from the cheapest to the most accurate."""
        labels = list(map(self.problem.facts.label, self.corners.tolist()))
        accuracies = self._accuracy.mean(0).tolist()
        corners: list[ConfigurationRow] = []
        for label, accuracy, latency_ms in zip(
            labels, accuracies, self._means.tolist(), strict=True
        ):
            corners.append({"label": label, "accuracy": accuracy, "latency_ms": latency_ms})
        return corners

    def static_mix(self, spent: Tensor) -> Tensor:
        """Return the accuracy of the static mix whose mean latency on the test samples is `spent`,
        float64 [B] ms → [n, B].

        It mixes two neighbours on the hull of the averages of `fitted`; only their shares are set
        on the test samples, and by latency alone. Below the cheapest corner it is this corner,
        above the dearest that one.
        """
        # of a single corner both neighbours are this one
        high = torch.searchsorted(self._means, spent).clamp(1, len(self._means) - 1)
        low = high - 1
        share = (spent - self._means[low]) / (self._means[high] - self._means[low])
        share = share.nan_to_num(0.0).clamp(0, 1)
        return torch.lerp(self._accuracy[:, low], self._accuracy[:, high], share)

    def best_single(self, spent: Tensor) -> Tensor:
        """Return the accuracy of the single configuration that was the most accurate on `fitted`
        among those whose mean latency on the test samples is at most `spent`, or up to 1 % more, so
        that no hair decides: float64 [B] ms → [n, B]."""
        cost = averages(self.problem.cells, self.test)[1]
        chosen = best_single_at(self.mean_accuracy, cost, 1.01 * spent, self.mask)
        return outcomes_of(self.problem, self.test, chosen)[0]

    def at_equal_latency(self, decisions: pl.DataFrame) -> pl.DataFrame:
        """Add to decisions what others would get with the mean latency that their policy spent
        under the same budget: the static mix (`of_reference`), the oracle (`of_upper_bound`) and
        the best single configuration (`of_best_single`)."""
        frames = []
        for (policy,), part in decisions.group_by("policy", maintain_order=True):
            latency_ms = array_of(decisions, str(policy), "latency_ms")
            spent = torch.from_numpy(latency_ms.mean((0, 1)))
            scores = {
                "of_reference": self.static_mix(spent),
                "of_upper_bound": self.oracle(spent * (1 + 1e-9)),
                "of_best_single": self.best_single(spent),
            }
            # the same for every seed
            seeds = len(latency_ms)
            columns = {name: np.tile(each.numpy().ravel(), seeds) for name, each in scores.items()}
            frames.append(part.with_columns(**{k: pl.Series(v) for k, v in columns.items()}))
        return pl.concat(frames)

    def oracle(self, budgets_ms: Tensor) -> Tensor:
        """Return the accuracy of the choices that are the most accurate at these mean latencies, in
        hindsight, float64 [B] ms → [n, B]."""
        cells = self.problem.cells
        chosen = oracle_at_mean(
            cells.accuracy[self.test], cells.latency_ms[self.test], self.mask, budgets_ms
        )
        return outcomes_of(self.problem, self.test, chosen, checked=False)[0]


class MeanBudgets(OnTable):
    """Controllers whose latency must not exceed a budget on average. Policies are `MixingPolicy`;
    their outcomes are expectations, without the noise of draws."""

    task = MEAN_BUDGET

    def __init__(
        self, problem: Problem, budgets_ms: Tensor, rewards: RewardTable | None = None
    ) -> None:
        super().__init__(problem, budgets_ms, rewards)
        self.reference = Reference(problem)

    def outcomes(self, policy: MixingPolicy, cost_ms: Tensor | float = 0.0) -> Columns:
        """See `Evaluator`."""
        checked = not getattr(policy, "hindsight", False)
        mixture = policy.mixture(self.problem, self.rows)
        accuracy, latency_ms = mixture.expected(self.problem, self.rows, checked)
        drawn = ~mixture.share.isnan()
        second = mixture.second.where(drawn, -1)
        columns = {}
        if self.problem.beliefs is not None:
            columns["sampling_weight"] = mixture.weight(self.problem.beliefs.weight[self.rows])
        # a further cost is the mean of both sides
        costs = further_costs(self.problem, self.rows, mixture.first, checked)
        other = mixture.second.where(drawn, mixture.first)
        of_second = further_costs(self.problem, self.rows, other, checked)
        share = mixture.share.nan_to_num(0.0)
        for name, cost in costs.items():
            costs[name] = torch.lerp(cost.to(share), of_second[name].to(share), share)
        return columns | {
            **costs,
            "choice": self.chosen(mixture.first),
            "second_choice": self.chosen(second).set(
                pl.Series((second < 0).flatten().numpy()), None
            ),
            "second_share": mixture.share,
            "accuracy": accuracy,
            "latency_ms": latency_ms + cost_ms,
        }

    @property
    def utility_budgets(self) -> list[float]:
        """No budgets: a configuration has no utility."""
        return []

    def compared(self, decisions: pl.DataFrame) -> pl.DataFrame:
        """Add to decisions the scores that they are compared with, at equal mean latency."""
        others = {
            "of_mix_at_budget": self.task.low,
            "of_reference": self.task.low,
            "of_upper_bound": self.task.high,
            "of_best_single": SINGLE,
        }
        # at another latency as many of their cells were measured as at the budget, nearly
        for column, policy in others.items():
            decisions = with_score_of(decisions, policy, self.task.score, column)
        return self.reference.at_equal_latency(decisions)

    def add_facts(self, results: RunResults, policies: Policies) -> None:
        """Add the corners of the static mix, and to rows `price` (λ) and `worth_ms` (1/λ, None at
        price 0) where their policies have them."""
        results |= {"sense": "mean", "static_hull": self.reference.hull()}
        prices = {}
        for name, of_seeds in policies.items():
            values_ms = [
                policy.values_ms for policy in of_seeds.values() if hasattr(policy, "values_ms")
            ]
            if values_ms:
                prices[name] = (1 / torch.stack(values_ms)).mean(0).tolist()
        for row in (*results["rows"], *results.get("by_dataset", [])):
            row |= {"price": None, "worth_ms": None}
            # a price belongs to a budget, so a mean over the budgets has none
            if row["policy"] in prices and row.get("budget_ms") is not None:
                by_budget = dict(zip(self.conditions, prices[row["policy"]], strict=True))
                row["price"] = by_budget[row["budget_ms"]]
                row["worth_ms"] = 1 / row["price"] if row["price"] else None

"""What decides under mean budgets: the static mix, policies that decide at a price, and
the oracle; and how such a policy is calibrated and compared with the mix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from knobwise.agents.calibration.guard import (
    CONFIDENCE,
    GuardRow,
    reason_for,
    unknown_row,
)
from knobwise.agents.calibration.prices import (
    calibrate_prices,
    choose_at_price,
    oracle_at_mean,
    static_hull,
)
from knobwise.agents.evaluation.baselines import PredictThenChoose
from knobwise.agents.evaluation.policy import Array, inputs_of_rows
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.experts import Experts, FittedExpert
from knobwise.agents.teacher.outcomes import pick
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.common.paired import is_better, standard_error
from knobwise.envs.bandit.budgets import value_range
from knobwise.envs.tables.cells import Cells, averages
from knobwise.envs.tables.measured_decisions import are_known
from knobwise.envs.tables.profile_table import ProfileTable

VALUES = 400
"""Prices that are tried for a policy whose predictions are not known."""
Features = dict[str, Array]
EVERYWHERE = torch.tensor(True)
"""Deployed at all mean budgets."""


class Mixture(NamedTuple):
    """What n requests get under B mean budgets: one configuration, or one of two at random."""

    first: Tensor
    """int64 [n, B]."""
    second: Tensor
    """int64 [n, B]; the first one again where there is no other."""
    share: Tensor
    """float64 [n, B], the chance of the second; NaN where nothing is drawn."""

    @classmethod
    def single(cls, chosen: Tensor) -> Mixture:
        """Make a mixture of one configuration for each sample and budget, int64 [n, B], with
        nothing to draw."""
        return cls(chosen, chosen, torch.full(chosen.shape, torch.nan, dtype=torch.float64))

    def expected(
        self, problem: Problem, rows: Tensor, checked: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return expected accuracy and latency (ms) of samples int64 [n], float64 [n, B] each,
        without the noise of draws; for `checked` see `outcomes_of`."""
        first_accuracy, first_ms = outcomes_of(problem, rows, self.first, checked)
        second_accuracy, second_ms = outcomes_of(problem, rows, self.second, checked)
        share = self.share.nan_to_num(0.0)
        accuracy = torch.lerp(first_accuracy, second_accuracy, share)
        return accuracy, torch.lerp(first_ms, second_ms, share)

    def weight(self, weight: Tensor) -> Tensor:
        """Return how many cells the measured ones among these stand for, float64 [n, B]; 0 where
        one of two that share the requests was not measured.

        Args:
            weight: [n, C], of each cell.
        """
        first = weight.double().gather(1, self.first)
        second = weight.double().gather(1, self.second)
        mean = torch.lerp(first, second, self.share.double().nan_to_num(0.0))
        return mean.where(self.measured(weight > 0), 0.0)

    def measured(self, mask: Tensor) -> Tensor:
        """Return whether all configurations of these were measured, bool [n, B].

        Args:
            mask: bool [n, C], the measured cells.
        """
        drawn = self.share.nan_to_num(0.0) > 0
        return mask.gather(1, self.first) & (mask.gather(1, self.second) | ~drawn)


class MixingPolicy(Protocol):
    """Whatever decides under mean budgets."""

    name: str

    def mixture(self, problem: Problem, rows: Tensor) -> Mixture:
        """Decide for samples int64 [n], under each of its budgets."""
        ...


def best_single_at(
    mean_accuracy: Tensor, mean_cost: Tensor, budgets: Tensor, mask: Tensor
) -> Tensor:
    """Return the most accurate configuration whose mean cost keeps the budget, else the cheapest.

    Args:
        mean_accuracy, mean_cost: averages [C].
        budgets: [B].
        mask: bool [n, C], what each request may get.

    Returns:
        configurations, int64 [n, B].
    """
    # without anything affordable all scores are equal, and `pick` takes the cheapest
    affordable = mean_accuracy.where(mean_cost <= budgets.to(mean_cost).unsqueeze(1), -torch.inf)
    return torch.stack([pick(scores, mean_cost, mask) for scores in affordable], 1)


class StaticMix:
    """The best random mixture of two configurations at each mean budget, for a policy to beat.

    The two are neighbours on the upper concave hull of a table's averages. Below the mean cost of
    the cheapest configuration the mixture is this configuration alone.

    If one of the two was not profiled for a request, the other replaces it; if neither was, the
    best single profiled configuration for this budget does. With many holes the mean latency can
    therefore differ from the budget: report it.

    Args:
        mean_accuracy, mean_cost: [C], of each configuration.
        budgets: [B], of the mean latency, in ms.

    Attributes:
        first, second: int64 [B], the cheaper and the costlier configuration.
        share: float64 [B], the probability of the costlier one.
    """

    name = "static_mix"

    def __init__(self, mean_accuracy: Tensor, mean_cost: Tensor, budgets: Tensor) -> None:
        self._mean_accuracy = mean_accuracy
        self._mean_cost = mean_cost
        self._budgets = budgets
        corners = static_hull(mean_accuracy, mean_cost)
        cost = mean_cost.double()[corners]
        budgets = budgets.double()
        # the neighbours on the hull whose mean costs enclose the budget
        low = (torch.searchsorted(cost, budgets, right=True) - 1).clamp_min(0)
        high = (low + 1).clamp_max(len(cost) - 1)
        share = ((budgets - cost[low]) / (cost[high] - cost[low])).clamp(0, 1)
        self.first = corners[low]
        self.second = corners[high]
        self.share = share.where(low < high, 0.0)

    @classmethod
    def fit(cls, cells: Cells, rows: Tensor, budgets: Tensor) -> StaticMix:
        """Fit the mix on mean accuracy and mean latency of the rows, int64 [n], for budgets [B] in
        ms."""
        mean_accuracy, mean_cost = averages(cells, rows)
        return cls(mean_accuracy, mean_cost, budgets)

    def arrays(self) -> dict[str, Array]:
        """Collect what `agents.deployed.calibrated.CalibratedMeanBudgets` reads: `first`, `second`,
        `share`, [B] each; `mean_accuracy`, `mean_cost`, [C] each."""
        return {
            "mean_accuracy": self._mean_accuracy.numpy(),
            "mean_cost": self._mean_cost.numpy(),
            "first": self.first.numpy(),
            "second": self.second.numpy(),
            "share": self.share.numpy(),
        }

    def both(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cheaper and the costlier configuration of each request at each budget:
        bool [n, C] → int64 [n, B] each."""
        instead = best_single_at(self._mean_accuracy, self._mean_cost, self._budgets, mask)
        has_first = mask[:, self.first]
        has_second = mask[:, self.second]
        first = self.first.where(has_first, self.second.where(has_second, instead))
        return first, self.second.where(has_second, first)

    def mixture(self, problem: Problem, rows: Tensor) -> Mixture:
        """Give samples int64 [n] the two configurations of each budget, and the share of the
        costlier, [n, B] each; what was not profiled for a sample is replaced, see `both`."""
        first, second = self.both(problem.mask[rows])
        return Mixture(first, second, self.share.expand(first.shape))

    def expected(self, problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute accuracy and latency in ms that samples int64 [n] get on average over draws,
        float64 [n, B] each."""
        return self.mixture(problem, rows).expected(problem, rows)


@dataclass
class BestSingle:
    """The most accurate configuration whose mean cost keeps the budget, see `best_single_at`."""

    mean_accuracy: Tensor
    mean_cost: Tensor
    budgets_ms: Tensor
    name = "best_single"

    def mixture(self, problem: Problem, rows: Tensor) -> Mixture:
        """Give samples int64 [n] the one configuration of each budget, [n, B], without draws."""
        chosen = best_single_at(
            self.mean_accuracy, self.mean_cost, self.budgets_ms, problem.mask[rows]
        )
        return Mixture.single(chosen)


@dataclass
class OracleAtMean:
    """The most accurate choices at each mean budget, in hindsight, see `oracle_at_mean`."""

    budgets_ms: Tensor
    name = "oracle"
    hindsight = True

    def mixture(self, problem: Problem, rows: Tensor) -> Mixture:
        """Choose for samples int64 [n] by their true outcomes, [n, B], without draws."""
        cells = problem.cells
        chosen = oracle_at_mean(
            cells.accuracy[rows], cells.latency_ms[rows], cells.mask[rows], self.budgets_ms
        )
        return Mixture.single(chosen)


def outcomes_of(
    problem: Problem, rows: Tensor, chosen: Tensor, checked: bool = True
) -> tuple[Tensor, Tensor]:
    """Return accuracy and latency (ms) of choices int64 [n, B] for samples int64 [n], float64
    [n, B] each.

    Args:
        checked: whether predictions are checked by what was measured, see `Beliefs.estimate`.
    """
    cells = rows.unsqueeze(1), chosen

    def look_up(version: ProfileTable, counted: Cells | None = None) -> Tensor:
        counted = problem.rule.counted(version) if counted is None else counted
        return torch.stack([version.accuracy[cells], counted.latency_ms[cells]]).double()

    if problem.beliefs is None or not checked:
        accuracy, latency_ms = look_up(problem.values, problem.cells)
    else:
        accuracy, latency_ms = problem.beliefs.estimate(cells, look_up)
    return accuracy, latency_ms


@dataclass
class MeanBudgetPolicy:
    """A policy conditioned on 1/λ (ms), with λ calibrated for each of B mean budgets.

    Args:
        name: of the policy.
        decide: takes feature blocks [n, d], the index of a budget and the mask bool [n, C], and
            gives configurations int64 [n].
        budgets_ms: float [B].
        values_ms: float [B], 1/price: the ms that a right answer may cost at each budget.
        deployed: bool [B], or a single one for all budgets.
        mix: decides where the policy does not.
    """

    name: str
    decide: Callable[[Features, int, Array], Array]
    budgets_ms: Tensor
    values_ms: Tensor
    deployed: Tensor = EVERYWHERE
    mix: StaticMix | None = None

    def decided(self, problem: Problem, rows: Tensor) -> Tensor:
        """Return the policy's own configurations for each sample at each calibrated budget, without
        the mix: int64 [n, B]."""
        features, mask = inputs_of_rows(problem, rows)
        groups = range(len(self.budgets_ms))
        columns = [torch.from_numpy(self.decide(features, group, mask)) for group in groups]
        return torch.stack(columns, 1)

    def mixture(self, problem: Problem, rows: Tensor) -> Mixture:
        """Return what samples int64 [n] get: the policy's own choice, or where it is not deployed
        that of the mix."""
        single = Mixture.single(self.decided(problem, rows))
        if self.mix is None:
            return single
        mixed = self.mix.mixture(problem, rows)
        return Mixture(
            first=single.first.where(self.deployed, mixed.first),
            second=single.second.where(self.deployed, mixed.second),
            share=single.share.where(self.deployed, mixed.share),
        )


def calibrated_values(
    decide: Callable[[Tensor], Tensor], problem: Problem, rows: Tensor, budgets_ms: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the lowest price of time at which a policy keeps each mean budget, among `VALUES` of
    them. A value is 1/price: the ms that a right answer may cost.

    Accuracies do not count: a price that was chosen by them would look better than it is on the
    rows that then tell whether the policy is deployed.

    Args:
        decide: takes a value in ms, and gives configurations int64 [n] for `rows`, by networks that
            were not fitted on them.
        rows: int64 [n].
        budgets_ms: float [B].

    Returns:
        values float64 [B], and the choices at them, int64 [n, B]. For a budget that no value keeps,
        the value with the lowest mean latency.
    """
    # predicted times tell well enough what keeps a budget
    cells = problem.cells
    low, high = value_range(cells.latency_ms[rows][cells.mask[rows]]).double().log()
    tried = torch.linspace(float(low), float(high), VALUES, dtype=torch.float64).exp()
    choices = torch.stack([decide(value) for value in tried], 1)
    cost = outcomes_of(problem, rows, choices, checked=False)[1].mean(0)
    keeps = cost <= budgets_ms.double().unsqueeze(1) * (1 + 1e-12)
    # the last value that keeps each budget: [B, values] → [B]
    last = VALUES - 1 - keeps.flip(1).int().argmax(1)
    index = last.where(keeps.any(1), cost.argmin())
    return tried[index], choices[:, index]


def compare_with_mix(
    accuracy: Tensor,
    cost: Tensor,
    mixed: Tensor,
    budgets_ms: Tensor,
    *,
    unit: str = "ms",
    clusters: Tensor | None = None,
    measured: tuple[Tensor, Tensor] | None = None,
) -> list[GuardRow]:
    """Compare a policy with the static mix at each budget.

    The policy is deployed if it keeps the budget and is more accurate than the mix, by more than
    chance.

    Args:
        accuracy, cost: of the policy, float [n, B], on samples that it was not fitted on.
        mixed: the mix's expected accuracy, likewise.
        unit: of costs and budgets, for the reasons.
        clusters: int64 [n], see `guard.cluster_numbers`; by default each sample is one.
        measured: how many of the n choices of the policy and of the mix are measured cells, int64
            [B] each; None where all are. Where these are too few, the mix is deployed.
    """
    rows: list[GuardRow] = []
    row: GuardRow
    samples = len(accuracy)
    whole = torch.full((len(budgets_ms),), samples)
    counts = torch.stack(measured or (whole, whole), 1).tolist()
    for (of_policy, of_mix), budget, right, ms, rival in zip(
        counts,
        budgets_ms.tolist(),
        accuracy.double().unbind(1),
        cost.double().unbind(1),
        mixed.double().unbind(1),
        strict=True,
    ):
        if not (are_known(of_policy, samples) and are_known(of_mix, samples)):
            row = unknown_row(budget, "static mix", (of_policy, of_mix), samples)
            known = are_known(of_mix, samples)
            rows.append({**row, "accuracy_static_mix": float(rival.mean()) if known else None})
            continue
        gains = right - rival
        spent = float(ms.mean())
        kept = spent <= budget * (1 + 1e-9)
        gain = float(gains.mean()), standard_error(gains, clusters)
        row = {
            "budget_ms": budget,
            "deployed": kept and is_better(gains, CONFIDENCE, clusters),
            "reason": "",
            "accuracy_policy": float(right.mean()),
            "accuracy_static_mix": float(rival.mean()),
            "latency_ms_mean": spent,
            "gain": gain[0],
            "gain_se": gain[1],
        }
        row["reason"] = reason_for(row["deployed"], gain, "static mix", "accuracy")
        if not kept:
            lowest = f"its lowest mean latency is {spent:.4g}"
            row["reason"] = (
                f"static mix deployed: no price makes the policy this cheap; {lowest} {unit}"
            )
        rows.append(row)
    return rows


def make_priced_baselines(
    problem: Problem, budgets_ms: Tensor, experts: Experts | None = None
) -> list[MeanBudgetPolicy]:
    """Return the baselines that read the request, for mean budgets [B].

    They are fitted on all but the test rows and calibrated out of fold.

    Args:
        experts: see `make_baselines`; None fits them with seed 0.
    """
    rows = problem.split.fitted
    experts = experts or Experts.fit(problem.facts, rows, budgets_ms[:0], tuple(FAMILIES), 0)
    measured, normaliser, fitted = experts
    latency_ms = problem.cells.latency_ms[measured.rows]
    allowed = problem.mask[measured.rows]

    def priced(name: str, family: FittedExpert) -> MeanBudgetPolicy:
        accuracy = None
        if name == "latency_only":
            accuracy = averages(problem.cells, rows)[0].float()
        predictor = PredictThenChoose(name, family.expert, normaliser, accuracy)
        held_out = predictor.counted(family.out_of_fold)
        prices = calibrate_prices(
            held_out.accuracy, held_out.latency_ms, latency_ms, allowed, budgets_ms
        )

        def decide(features: Features, group: int, mask: Array) -> Array:
            expected = predictor.predict(features, len(mask))
            allowed = torch.from_numpy(mask)
            return choose_at_price(
                expected.accuracy, expected.latency_ms, prices[group], allowed
            ).numpy()

        return MeanBudgetPolicy(name, decide, budgets_ms, 1 / prices)

    return [
        # the first family is ridge
        priced("latency_only", fitted[0]),
        *(priced(family.expert.name, family) for family in fitted),
    ]

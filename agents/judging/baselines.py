"""The simple ways of choosing a configuration, done as well as they can be: what a learned policy must beat.

Three read the table's averages only (`BudgetAwareStatic`, `BestStatic`, `LookupTable`); six predict accuracy and
latency from the features and take the best expected utility (`PredictThenChoose`); `Random` and `Oracle` mark the ends
of the scale. All are fitted on some rows of the table; only the oracle knows the outcomes that it chooses from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from knobwise.agents.judging.policy import Baseline
from knobwise.agents.predictors.experts import Expert, Experts, Prediction, pick
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import at_worths, expected_utility
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses.functional import even_weight

# -- from the table's averages -----------------------------------------------------------------------------------------


def averages(table: ProfileTable, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean accuracy and mean latency (ms) of each configuration over its profiled cells, float64 [C] each.

    A configuration never profiled in these rows counts as always wrong and as slow as the slowest of the others.
    """
    accuracy, latency = (values[rows].double().nanmean(0) for values in (table.accuracy, table.latency_ms))
    seen = table.mask[rows].any(0)
    return accuracy.where(seen, 0.0), latency.where(seen, latency[seen].amax())


def averages_with_cost(table: ProfileTable, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`averages`, and the mean further cost of each configuration, float64 [C] each."""
    cost = table.weighed_cost[rows].double().nanmean(0)
    return *averages(table, rows), cost.nan_to_num(float(cost.nan_to_num().amax()))


class Averages:
    """What is made from a table's averages and holds nothing but tensors."""

    def plain(self) -> dict[str, Any]:
        """Tensors, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Self:
        """The inverse of `plain`."""
        static = cls.__new__(cls)
        vars(static).update(plain)
        return static


class BudgetAwareStatic(Averages):
    """Per budget the one configuration with the best mean of accuracy·1[latency ≤ budget] over all measurements of the
    rows; where nothing ever met the budget all means are 0, and the one with the lowest mean latency is taken."""

    name = "budget_aware_static"

    def __init__(self, table: ProfileTable, rows: Tensor) -> None:
        table = table.without_first_look
        _, self.latency_ms = averages(table, rows)
        # With each configuration's cells in order of latency, a running sum of accuracy answers every budget exactly.
        # One after the other, because of large tables
        size = len(rows) * table.num_repeats
        self._sorted_ms, self._running = (
            torch.empty(table.num_configurations, n, dtype=torch.float64) for n in (size, size + 1)
        )
        for c in range(table.num_configurations):
            self._sorted_ms[c], self._running[c] = self._in_order(table, rows, c)

    @staticmethod
    def _in_order(table: ProfileTable, rows: Tensor, c: int) -> tuple[Tensor, Tensor]:
        """Of one configuration all measurements, ascending, [n·R], and the mean utility under a budget between them,
        [n·R + 1], float64 each. A measurement counts as its share of the cell."""
        measured = table.measurements_ms[:, c][rows]
        weight = even_weight(~measured.isnan()).double() * table.accuracy[rows, c].double().nan_to_num().unsqueeze(-1)
        sorted_ms, order = measured.double().nan_to_num(torch.inf).flatten().sort(stable=True)
        share = weight.flatten()[order].cumsum(0) / table.mask[rows, c].sum().clamp_min(1)
        return sorted_ms, torch.nn.functional.pad(share, (1, 0))

    def mean_utility(self, budgets_ms: Tensor) -> Tensor:
        """Mean utility of every configuration over the rows: [b] ms → float64 [b, C]."""
        wanted = budgets_ms.double().expand(len(self._sorted_ms), -1).contiguous()
        return self._running.gather(1, torch.searchsorted(self._sorted_ms, wanted, right=True)).T

    def scaled(self, factors: Tensor, accuracies: Tensor | None = None) -> Self:
        """The same where each configuration takes a factor of its time, and has a factor of its accuracy, [C] each."""
        scaled = {"latency_ms": self.latency_ms * factors, "_sorted_ms": self._sorted_ms * factors.unsqueeze(1)}
        if accuracies is not None:
            scaled["_running"] = self._running * accuracies.unsqueeze(1)
        return self.restored(self.plain() | scaled)

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        distinct, which = budgets_ms.unique(return_inverse=True)
        return pick(self.mean_utility(distinct)[which], self.latency_ms, mask)


class BestStatic:
    """The one configuration with the best mean utility over the rows and over the given budgets (float [b], ms)."""

    name = "best_static"

    def __init__(self, table: ProfileTable, rows: Tensor, budgets_ms: Tensor | None = None) -> None:
        static = BudgetAwareStatic(table, rows)
        self._scores = static.mean_utility(default_budgets(table) if budgets_ms is None else budgets_ms).mean(0)
        self._latency_ms = static.latency_ms

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        return pick(self._scores.expand(len(budgets_ms), -1), self._latency_ms, mask)


class LookupTable:
    """The best average accuracy among the configurations with a mean latency ≤ budget·(1 + tolerance); where there is
    none the nearest mean latency, which is the fastest."""

    name = "lookup_table"

    def __init__(self, table: ProfileTable, rows: Tensor, tolerance: float = 0.05) -> None:
        self._accuracy, self._latency_ms = averages(table.without_first_look, rows)
        self._tolerance = tolerance

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        fits = self._latency_ms <= budgets_ms.double().unsqueeze(1) * (1 + self._tolerance)
        return pick(self._accuracy.where(fits, -1.0), self._latency_ms, mask)


# -- from the features -------------------------------------------------------------------------------------------------


class PredictThenChoose:
    """Predicts accuracy and log-latency of every configuration, then takes the best expected utility Â·Φ((ln b − μ)/σ).
    Without `predict_accuracy` each configuration's mean accuracy counts for every sample."""

    def __init__(self, name: str, expert: Expert, normaliser: FeatureNormaliser, predict_accuracy: bool = True) -> None:
        self.name, self.expert, self.normaliser = name, expert, normaliser
        self._predict_accuracy = predict_accuracy

    def predict(self, features: Mapping[str, Tensor], n: int) -> Prediction:
        """What is expected of every configuration for n samples."""
        prediction = self.expert(self.normaliser(features, n))
        if self._predict_accuracy:
            return prediction
        return prediction._replace(accuracy=self.expert.mean_accuracy.expand_as(prediction.accuracy))

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        prediction = self.predict(features, len(budgets_ms))
        return pick(prediction.expected_utility(budgets_ms), prediction.log_latency, mask)


# -- the ends of the scale ---------------------------------------------------------------------------------------------


class Random:
    """Uniform over the mask; the same seed and the same request give the same choice."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            raise ValueError("the random policy draws from a mask, but none was given")
        return torch.multinomial(mask.float(), 1, generator=torch.Generator().manual_seed(self._seed)).squeeze(1)


class Oracle:
    """The best utility of each of these rows, of several measurements the mean; among equals the faster; the fastest
    where nothing fits.

    It knows the outcomes, so it can only choose for exactly the rows that it was given, in their order.

    Raises:
        ValueError: asked about another number of samples.
    """

    name = "oracle"

    def __init__(self, table: ProfileTable, rows: Tensor) -> None:
        table, self._mask = table.without_first_look, table.mask[rows]
        self._accuracy, self._latency_ms = table.accuracy[rows], table.latency_ms[rows]
        self._measurements_ms = table.measurements_ms[rows]

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        if len(budgets_ms) != len(self._mask):
            raise ValueError(f"the oracle knows {len(self._mask)} samples, but was asked about {len(budgets_ms)}")
        utility = expected_utility(self._accuracy, self._measurements_ms, budgets_ms.unsqueeze(1))
        return pick(utility, self._latency_ms, self._mask if mask is None else mask & self._mask)


class BestAtWorths:
    """Takes the best accuracy − latency/worth − cost/worth: of averages [C], the same for every request, or of each
    request's own outcomes [n, C], which it can choose for in their order only."""

    def __init__(self, accuracy: Tensor, latency_ms: Tensor, cost: Tensor) -> None:
        self.accuracy, self.latency_ms, self.cost = accuracy, latency_ms, cost

    def choose(self, features: Mapping[str, Tensor], worths: Tensor, mask: Tensor | None = None) -> Tensor:
        """Decisions for pairs of worths [n, 2]: int64 [n]."""
        scores = at_worths(self.accuracy, self.latency_ms, self.cost, worths.to(self.accuracy))
        return pick(scores, self.latency_ms, mask)


def make_baselines(
    table: ProfileTable,
    split: Split,
    seed: int = 0,
    budgets_ms: Tensor | None = None,
    experts: Experts | None = None,
) -> list[Baseline]:
    """All baselines, fitted on everything but the test rows, because the learned ones choose their settings out of
    fold; the oracle is for the test rows. They will be judged on `budgets_ms` [b], None for `default_budgets`.
    `experts`: of all families, fitted on the same rows for the same budgets; None fits them.

    A new baseline is listed here, and in `experiments/report/policies.json` with its name, colour and description. One
    that predicts is a family of `knobwise.agents.predictors.regressors` instead. Mean budgets have a list of their
    own: `make_priced_baselines` in `knobwise.agents.stack.priced_policy`.
    """
    rows = torch.cat([split.train, split.validation])
    budgets_ms = default_budgets(table) if budgets_ms is None else budgets_ms
    _, normaliser, fitted = experts or Experts.fit(table, rows, budgets_ms, tuple(FAMILIES), seed)
    named = {each.expert.name: each.expert for each in fitted}
    return [
        BudgetAwareStatic(table, rows),
        BestStatic(table, rows, budgets_ms),
        LookupTable(table, rows),
        PredictThenChoose("latency_only", named["ridge"], normaliser, predict_accuracy=False),
        *(PredictThenChoose(name, expert, normaliser) for name, expert in named.items()),
        Random(seed),
        Oracle(table, split.test),
    ]


class StaticPerDataset:
    """Budget-aware static, fitted on each data set for itself: what recognising the data set is worth without looking
    at the request. A data set without samples to fit on gets the static way of all.

    Like the oracle it can only choose for exactly the rows `test` (int64 [n]), in their order.

    Raises:
        ValueError: asked about another number of samples.
    """

    name = "static_per_dataset"

    def __init__(self, table: ProfileTable, fitted: Tensor, test: Tensor) -> None:
        parts, self._count = rows_by_dataset(table, fitted), len(test)
        self._parts = [
            (places, BudgetAwareStatic(table, fitted[parts[name]] if name in parts else fitted))
            for name, places in rows_by_dataset(table, test).items()
        ]

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        if len(budgets_ms) != self._count:
            raise ValueError(f"it knows {self._count} samples and was asked about {len(budgets_ms)}")
        chosen = torch.empty(len(budgets_ms), dtype=torch.int64)
        for places, static in self._parts:
            chosen[places] = static.choose({}, budgets_ms[places], None if mask is None else mask[places])
        return chosen

"""The simple ways of choosing a configuration, done as well as they can be: what a learned policy must beat.

Three read the table's averages only (`BudgetAwareStatic`, `BestStatic`, `LookupTable`); six predict accuracy and
latency from the features and take the best expected utility (`PredictThenChoose`); two are the ends of the scale
(`Random`, `Oracle`). All are fitted on the rows given; the oracle alone knows the outcomes of what it chooses for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from knobwise.agents.predictors.experts import Expert, Measured, fit_experts, inputs_of
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.prediction import Prediction, pick
from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable, Split

Statistic = Literal["mean", "median"]


class Chooser(Protocol):
    """Anything that picks one configuration per sample under its budget."""

    name: str

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        """Choose for n samples.

        Args:
            features: block name → float [n, d]; may be empty.
            budgets_ms: float [n].
            mask: bool [n, C], the configurations that may be chosen; at least one per sample.

        Returns:
            int64 [n], always inside `mask`.
        """


# -- from the table's averages -----------------------------------------------------------------------------------------


def averages(table: ProfileTable, rows: Tensor, statistic: Statistic = "mean") -> tuple[Tensor, Tensor]:
    """Mean or median accuracy and mean latency (ms) of each configuration over its profiled cells, float64 [C] each.

    A configuration never profiled in these rows counts as always wrong and as slow as the slowest of the others.
    """
    accuracy, latency = table.accuracy[rows].double(), table.latency_ms[rows].double().nanmean(0)
    # one configuration at a time: torch refuses quantiles of more than 16 M values
    middle = accuracy.nanmean(0) if statistic == "mean" else torch.stack([a.nanquantile(0.5) for a in accuracy.T])
    seen = table.mask[rows].any(0)
    return middle.where(seen, 0.0), latency.where(seen, latency[seen].amax())


class BudgetAwareStatic:
    """Per budget the one configuration with the best mean of accuracy·1[latency ≤ budget] over the rows.

    Where nothing ever met the budget all means are 0, and the one with the lowest mean latency is taken.
    """

    name = "budget_aware_static"

    def __init__(self, table: ProfileTable, rows: Tensor) -> None:
        _, self.latency_ms = averages(table, rows)
        # With each configuration's cells in order of latency, a running sum of accuracy answers every budget exactly.
        mask = table.mask[rows].T
        latency = table.latency_ms[rows].T.double().masked_fill(~mask, torch.inf)
        self._sorted_ms, order = latency.sort(dim=1, stable=True)
        accuracy = table.accuracy[rows].T.double().masked_fill(~mask, 0.0).gather(1, order)
        share = accuracy.cumsum(1) / mask.sum(1, keepdim=True).clamp_min(1)
        self._running = torch.nn.functional.pad(share, (1, 0))

    def mean_utility(self, budgets_ms: Tensor) -> Tensor:
        """Mean utility of every configuration over the rows: [b] ms → float64 [b, C]."""
        wanted = budgets_ms.double().expand(len(self._sorted_ms), -1).contiguous()
        return self._running.gather(1, torch.searchsorted(self._sorted_ms, wanted, right=True)).T

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        distinct, which = budgets_ms.unique(return_inverse=True)
        return pick(self.mean_utility(distinct)[which], self.latency_ms, mask)

    def plain(self) -> dict[str, Tensor]:
        """Tensors, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def restored(cls, plain: dict[str, Tensor]) -> BudgetAwareStatic:
        """The inverse of `plain`."""
        static = cls.__new__(cls)
        vars(static).update(plain)
        return static


class BestStatic:
    """The one configuration with the best mean utility over the rows and over the given budgets (float [b], ms)."""

    name = "best_static"

    def __init__(self, table: ProfileTable, rows: Tensor, budgets_ms: Tensor | None = None) -> None:
        static = BudgetAwareStatic(table, rows)
        self._scores = static.mean_utility(default_budgets(table) if budgets_ms is None else budgets_ms).mean(0)
        self._latency_ms = static.latency_ms

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        return pick(self._scores, self._latency_ms, mask)


class LookupTable:
    """The best average accuracy among the configurations whose mean latency fits, else the nearest mean latency.

    Fits: mean latency ≤ budget·(1 + tolerance). When none does, the nearest is the fastest.
    """

    name = "lookup_table"

    def __init__(
        self, table: ProfileTable, rows: Tensor, statistic: Statistic = "mean", tolerance: float = 0.05
    ) -> None:
        self._accuracy, self._latency_ms = averages(table, rows, statistic)
        self._tolerance = tolerance

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        fits = self._latency_ms <= budgets_ms.double().unsqueeze(1) * (1 + self._tolerance)
        return pick(self._accuracy.where(fits, -1.0), self._latency_ms, mask)


# -- from the features -------------------------------------------------------------------------------------------------


class PredictThenChoose:
    """Predicts accuracy and log-latency of every configuration, then takes the best expected utility Â·Φ((ln b − μ)/σ).

    Args:
        name: how the policy is called.
        expert: what predicts.
        normaliser: of the features.
        predict_accuracy: False takes each configuration's mean accuracy for every sample.
    """

    def __init__(self, name: str, expert: Expert, normaliser: FeatureNormaliser, predict_accuracy: bool = True) -> None:
        self.name, self.expert, self._normaliser = name, expert, normaliser
        self._predict_accuracy = predict_accuracy

    def predict(self, features: Mapping[str, Tensor], n: int) -> Prediction:
        """What is expected of every configuration for n samples."""
        prediction: Prediction = self.expert(inputs_of(self._normaliser, features, n))
        if self._predict_accuracy:
            return prediction
        return prediction._replace(accuracy=self.expert.mean_accuracy.expand_as(prediction.accuracy))

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        prediction = self.predict(features, len(budgets_ms))
        return pick(prediction.expected_utility(budgets_ms), prediction.log_latency, mask)


# -- the ends of the scale ---------------------------------------------------------------------------------------------


class Random:
    """Uniform over the mask; the same seed and the same request give the same choice."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        return torch.multinomial(mask.float(), 1, generator=torch.Generator().manual_seed(self._seed)).squeeze(1)


class Oracle:
    """The best measured utility of each of these rows, among equals the faster; the fastest where nothing fits.

    It knows the outcomes, so it can only choose for exactly the rows that it was given, in their order.

    Raises:
        ValueError: asked about another number of samples.
    """

    name = "oracle"

    def __init__(self, table: ProfileTable, rows: Tensor) -> None:
        self._mask = table.mask[rows]
        self._accuracy = table.accuracy[rows].masked_fill(~self._mask, 0.0)
        self._latency_ms = table.latency_ms[rows]

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        if len(mask) != len(self._mask):
            raise ValueError(f"the oracle knows {len(self._mask)} samples and was asked about {len(mask)}")
        utility = self._accuracy * (self._latency_ms <= budgets_ms.unsqueeze(1))
        return pick(utility, self._latency_ms, mask & self._mask)


def make_baselines(table: ProfileTable, split: Split, seed: int = 0, budgets_ms: Tensor | None = None) -> list[Chooser]:
    """All baselines, fitted on everything but the test rows; the oracle is for the test rows.

    Args:
        table: the profile.
        split: its parts. What the learned ones choose among they choose out of fold, so validation is fitted on too.
        seed: of folds, forests and random choices.
        budgets_ms: float [b], the budgets that the baselines will be judged on; None for `default_budgets`.
    """
    rows = torch.cat([split.train, split.validation])
    budgets_ms = default_budgets(table) if budgets_ms is None else budgets_ms
    normaliser = FeatureNormaliser.fit(table, rows)
    measured = Measured.of(table, rows, budgets_ms, seed)
    experts = {f.expert.name: f.expert for f in fit_experts(table, measured, normaliser, tuple(FAMILIES), seed)}
    return [
        BudgetAwareStatic(table, rows),
        BestStatic(table, rows, budgets_ms),
        LookupTable(table, rows),
        PredictThenChoose("latency_only", experts["ridge"], normaliser, predict_accuracy=False),
        *(PredictThenChoose(name, expert, normaliser) for name, expert in experts.items()),
        Random(seed),
        Oracle(table, split.test),
    ]

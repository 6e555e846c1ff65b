"""The simple ways of choosing a configuration, done as well as they can be: what a learned policy must beat.

Three read the table's averages only (`BudgetAwareStatic`, `BestStatic`, `LookupTable`); four predict accuracy and
latency from the features and take the best expected utility (`PredictThenChoose`); two are the ends of the scale
(`Random`, `Oracle`). All are fitted on the rows given; the oracle alone knows the outcomes of what it chooses for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from knobwise.agents.features import FeatureNormaliser
from knobwise.agents.regressors import Forest, Neighbours, Targets, folds_of
from knobwise.envs.budgets import default_budgets, log_ms
from knobwise.envs.table import ProfileTable, Split

SPREAD_FACTORS = (0.35, 0.5, 0.75, 1.0, 1.5, 2.2)
"""Factors on the residual spread of the log-latency: below 1 the predicted latency is trusted more, above 1 less."""
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


def pick(scores: Tensor, latency_ms: Tensor, mask: Tensor) -> Tensor:
    """The best score inside the mask; among equals the lowest latency.

    Args:
        scores, latency_ms: [n, C] or what expands to it, any monotone scale of time, finite inside the mask.
        mask: bool [n, C].

    Raises:
        ValueError: a sample without anything to choose from.
    """
    if not bool(mask.any(1).all()):
        raise ValueError("the mask leaves a sample without any configuration")
    scores = scores.expand(mask.shape).masked_fill(~mask, -torch.inf)
    best = mask & (scores == scores.amax(1, keepdim=True))
    return latency_ms.expand(mask.shape).masked_fill(~best, torch.inf).argmin(1)


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
    """Predicts accuracy and log-latency of every configuration, then takes the best expected utility.

    The expected utility is Â(x)·Φ((ln b − μ(x)) / (s·σ)): predicted accuracy times the probability that the latency
    meets the budget. Residuals of the log-latency are taken as normal; their spread σ per configuration comes from
    predictions out of fold. The regressor among the candidates and s are those with the best utility out of fold.
    "Features do not help" is always among the candidates, and is the only one without features.

    Args:
        name: how the policy is called.
        candidates: unfitted regressors for several outputs (scikit-learn's `fit` and `predict`).
        table: the profile.
        rows: int64 [n], the rows to fit on.
        budgets_ms: float [b], the budgets that the utility is averaged over; None for `default_budgets`.
        seed: of the division into folds. Samples of one image stay in one fold.
        predict_accuracy: False takes each configuration's mean accuracy for every sample.
    """

    def __init__(
        self,
        name: str,
        candidates: Sequence[Any],
        table: ProfileTable,
        rows: Tensor,
        budgets_ms: Tensor | None = None,
        seed: int = 0,
        predict_accuracy: bool = True,
    ) -> None:
        from sklearn.dummy import DummyRegressor

        self.name = name
        self._predict_accuracy = predict_accuracy
        self._normalise = FeatureNormaliser.fit(table, rows)
        x = self._inputs({block: values[rows] for block, values in table.features.items()}, len(rows))
        self._targets = Targets(table, rows, x)
        y = self._targets.values
        outcome = _Outcome(table, rows, default_budgets(table) if budgets_ms is None else budgets_ms)

        folds, most = folds_of(table, rows, seed), -1.0
        for candidate in (DummyRegressor(), *(candidates if self._normalise.width else ())):
            out_of_fold = torch.zeros(y.shape)
            for fit, held_out in folds:
                model = copy.deepcopy(candidate).fit(x[fit], y[fit])
                out_of_fold[held_out] = torch.from_numpy(model.predict(x[held_out])).float()
            accuracy, mean = self._read(out_of_fold)
            spread = outcome.spread(mean)
            if (utility := outcome.utility(accuracy, mean, spread)) > most:
                most, best = utility, (candidate, accuracy, mean, spread)
        self._model, (accuracy, mean, spread) = best[0].fit(x, y), best[1:]
        # 1 comes first, so that it stays where the factor does not matter
        factors = sorted(SPREAD_FACTORS, key=lambda factor: abs(factor - 1))
        self._spread = spread * max(factors, key=lambda factor: outcome.utility(accuracy, mean, factor * spread))

    def predict(self, features: Mapping[str, Tensor], n: int) -> tuple[Tensor, Tensor]:
        """Predicted accuracy and mean of the log-latency (ln ms) of n samples, float32 [n, C] each."""
        return self._read(torch.from_numpy(self._model.predict(self._inputs(features, n))).float())

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        accuracy, mean = self.predict(features, len(budgets_ms))
        return pick(expected_utility(accuracy, mean, self._spread, budgets_ms), mean, mask)

    def _inputs(self, features: Mapping[str, Tensor], n: int) -> Any:
        x = self._normalise(features)
        return (x if self._normalise.width else x.new_zeros(n, 1)).double().numpy()

    def _read(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        accuracy, mean = self._targets.unscale(predictions)
        return accuracy if self._predict_accuracy else self._targets.centre[0].expand_as(accuracy), mean


def expected_utility(accuracy: Tensor, mean: Tensor, spread: Tensor, budgets_ms: Tensor) -> Tensor:
    """Â·Φ((ln b − μ)/σ): accuracy and mean [n, C], spread [C] or [n, C], budgets [n] in ms → [n, C]."""
    margin = log_ms(budgets_ms).unsqueeze(1) - mean
    return accuracy.clamp(1e-3, 1.0) * torch.special.ndtr(margin / spread)


class _Outcome:
    """What choices by predicted accuracy and log-latency would have got on some rows."""

    def __init__(self, table: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> None:
        self.mask, self.budgets_ms = table.mask[rows], budgets_ms
        self.accuracy, self.latency_ms = table.accuracy[rows], table.latency_ms[rows]

    def utility(self, accuracy: Tensor, mean: Tensor, spread: Tensor) -> float:
        """Mean over rows and budgets of accuracy·1[latency ≤ budget]."""
        total = 0.0
        for budget in self.budgets_ms:
            scores = expected_utility(accuracy, mean, spread, budget.expand(len(mean)))
            chosen = pick(scores, mean, self.mask).unsqueeze(1)
            met = self.latency_ms.gather(1, chosen) <= budget
            total += float((self.accuracy.gather(1, chosen) * met).mean())
        return total / len(self.budgets_ms)

    def spread(self, mean: Tensor) -> Tensor:
        """Root mean square residual of each configuration, [C], as if five more of its cells had been average."""
        squares = (log_ms(self.latency_ms) - mean).square().masked_fill(~self.mask, 0.0)
        overall = squares.sum() / self.mask.sum()
        return ((squares.sum(0) + 5 * overall) / (self.mask.sum(0) + 5)).sqrt().clamp_min(1e-3)


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
    """All baselines, fitted on the training rows; the oracle is for the test rows.

    Args:
        table: the profile.
        split: its parts.
        seed: of folds, forests and random choices.
        budgets_ms: float [b], the budgets that the baselines will be judged on; None for `default_budgets`.
    """
    from sklearn.linear_model import Ridge

    rows = split.train
    ridges = [Ridge(alpha=share * len(rows)) for share in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)]
    neighbours = [Neighbours(k, weighted) for weighted in (False, True) for k in (5, 10, 20, 40, 80, 160)]
    forests = [Forest(leaf, apart, seed) for apart in (False, True) for leaf in (4, 15)]
    return [
        BudgetAwareStatic(table, rows),
        BestStatic(table, rows, budgets_ms),
        LookupTable(table, rows),
        PredictThenChoose("latency_only", ridges, table, rows, budgets_ms, seed, predict_accuracy=False),
        PredictThenChoose("knn", neighbours, table, rows, budgets_ms, seed),
        PredictThenChoose("ridge", ridges, table, rows, budgets_ms, seed),
        PredictThenChoose("random_forest", forests, table, rows, budgets_ms, seed),
        Random(seed),
        Oracle(table, split.test),
    ]

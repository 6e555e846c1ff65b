"""Experts: accuracy and log-latency of every configuration, predicted from the features without a
network.

Each is a family of regressors (`knobwise.agents.predictors.regressors`). The settings with the
smallest squared error out of fold are kept, one for accuracy and one for latency, and refitted on
all rows; trees are not, because their mean over the folds is better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.folds import FOLDS, Fold, Rows, Targets, folds_of
from knobwise.agents.predictors.outcomes import Prediction, pick
from knobwise.agents.predictors.regressors import FAMILIES, KINDS, Regressor, Trees, constant
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import log_measured
from knobwise.envs.configurations.reward import share_in_time
from knobwise.envs.tables.profile_table import ProfileTable

SPREAD_FACTORS = (0.35, 0.5, 0.75, 1.0, 1.5, 2.2)
"""Factors on the residual spread of the log-latency: below 1 the predicted latency is trusted more,
above 1 less."""


class Measured(NamedTuple):
    """The rows that experts are fitted on, int64 [n], their accuracies and median latencies [n, C],
    NaN where not profiled, every measured latency [n, C, R], budgets [B] that utility is averaged
    over, empty without deadlines, and folds: positions to fit on and to hold out."""

    rows: Tensor
    accuracy: Tensor
    latency_ms: Tensor
    measurements_ms: Tensor
    mask: Tensor
    budgets_ms: Tensor
    folds: list[Fold]

    @classmethod
    def from_table(
        cls, table: ProfileTable, rows: Tensor, budgets_ms: Tensor, seed: int, folds: int = FOLDS
    ) -> Measured:
        """Look up these rows (int64 [n]), and divide them into folds by image or sample."""
        cells = (
            table.accuracy[rows],
            table.latency_ms[rows],
            table.measurements_ms[rows],
            table.mask[rows],
        )
        return cls(rows, *cells, budgets_ms, folds_of(table, rows, seed, folds))

    def utility(self, scores: Sequence[Tensor], latency: Tensor) -> float:
        """Mean over rows and budgets of the utility of the best score: for each budget scores [n,
        C]; among equal ones `latency` [n, C], on any monotone scale, decides."""
        total = 0.0
        for budget, score in zip(self.budgets_ms, scores, strict=True):
            chosen = torch.arange(len(score)), pick(score, latency, self.mask)
            total += float(
                (self.accuracy[chosen] * share_in_time(self.measurements_ms[chosen], budget)).mean()
            )
        return total / len(self.budgets_ms)

    def residual_spread(self, log_latency: Tensor) -> Tensor:
        """Root mean square residual of the single measurements of each configuration, [C], as if it
        had five more average cells."""
        residuals = log_measured(self.measurements_ms) - log_latency.unsqueeze(-1)
        squares = residuals.square().nanmean(-1).masked_fill(~self.mask, 0.0)
        overall = squares.sum() / self.mask.sum()
        return ((squares.sum(0) + 5 * overall) / (self.mask.sum(0) + 5)).sqrt().clamp_min(1e-3)


class Expert(nn.Module):
    """Predicts from normalised features by two regressors to [n, C]; `spread` [C] is that of the
    log-latency, `mean_accuracy` [C] that of the rows it was fitted on, `settings` are those chosen,
    in words."""

    mean_accuracy: Tensor
    spread: Tensor

    def __init__(
        self,
        name: str,
        accuracy: nn.Module,
        log_latency: nn.Module,
        mean_accuracy: Tensor,
        spread: Tensor,
        settings: str,
    ) -> None:
        super().__init__()
        self.name = name
        self.settings = settings
        self.accuracy = accuracy
        self.log_latency = log_latency
        self.register_buffer("mean_accuracy", mean_accuracy)
        self.register_buffer("spread", spread)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Prediction:
        """Normalised features [n, d] → predictions for n requests; without features, all are the
        same."""
        inputs = padded(x)
        return Prediction(self.accuracy(inputs), self.log_latency(inputs), self.spread)

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        parts = {part: (type(r).__name__, r.state_dict()) for part, r in self.named_children()}
        values = {
            key: getattr(self, key) for key in ("name", "mean_accuracy", "spread", "settings")
        }
        return {**values, **parts}

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Expert:
        """The inverse of `plain`."""
        regressors = {
            part: KINDS[plain[part][0]](**plain[part][1]) for part in ("accuracy", "log_latency")
        }
        return cls(**{**plain, **regressors})


class Fitted(NamedTuple):
    """An expert, its out-of-fold predictions for the rows it was fitted on, and those of each fold,
    which made these predictions."""

    expert: Expert
    out_of_fold: Prediction
    of_folds: list[Expert]


class Experts(NamedTuple):
    """Experts for some rows, and what they were fitted on. The seeds of a run and its baselines
    share them."""

    measured: Measured
    normaliser: FeatureNormaliser
    fitted: list[Fitted]

    @classmethod
    def fit(
        cls,
        table: ProfileTable,
        rows: Tensor,
        budgets_ms: Tensor,
        families: Sequence[str],
        seed: int,
        normaliser: FeatureNormaliser | None = None,
        folds: int = FOLDS,
    ) -> Experts:
        """Fit an expert of each family on `rows`, int64 [n]; `budgets_ms` [B] are the deadlines
        that their spreads are chosen for, empty at a price; `seed` is that of folds and trees;
        without a normaliser one is fitted on the rows too; they are cut into so many `folds`."""
        measured = Measured.from_table(table, rows, budgets_ms, seed, folds)
        normaliser = normaliser or FeatureNormaliser.fit(table, rows)
        return cls(
            measured,
            normaliser,
            fit_experts(table, measured, normaliser, families, seed) if families else [],
        )

    def of_families(self, families: Sequence[str]) -> list[Fitted]:
        """Those of some families, in their order."""
        named = {each.expert.name: each for each in self.fitted}
        return [named[family] for family in families]


def padded(x: Tensor) -> Tensor:
    """Features [n, d]; where there are none a column of zeros, so that every regressor has an
    input."""
    if x.shape[-1]:
        return x
    return x.new_zeros(x.shape[0], 1)


def fit_experts(
    table: ProfileTable,
    measured: Measured,
    normaliser: FeatureNormaliser,
    families: Sequence[str],
    seed: int,
) -> list[Fitted]:
    """Fit an expert of each family.

    A constant is among the settings of every family, and the only one without features. The spread
    is that of the residuals out of fold, times the factor with the best utility out of fold (for
    deadlines only).

    Args:
        measured: the rows to fit on; the features' `normaliser` is fitted on the same.
        families: names in `FAMILIES`.
        seed: of trees.
    """
    rows = measured.rows
    x32 = padded(
        normaliser({name: block[rows] for name, block in table.features.items()}, len(rows))
    )
    x = x32.double().numpy()
    # the centres and the filled holes must not come from held-out rows
    folds = [
        (fit, hold, Targets(table, rows[torch.from_numpy(fit)], x[fit]))
        for fit, hold in measured.folds
    ]
    targets = Targets(table, rows, x)
    fits = itertools.count(1)
    with progress("fitting experts", len(families) * (len(folds) + 1), quiet_s=2) as tick:

        def done(name: str) -> None:
            tick(next(fits), name.replace("_", " "))

        return [
            _fit(name, x, x32, targets, folds, measured, seed, bool(normaliser.width), done)
            for name in families
        ]


def _fit(
    name: str,
    x: NDArray[np.float64],
    x32: Tensor,
    targets: Targets,
    folds: Sequence[tuple[Rows, Rows, Targets]],
    measured: Measured,
    seed: int,
    informed: bool,
    tick: Callable[[str], None],
) -> Fitted:
    """Fit a family; `tick` gets its name after each fold, and at the end."""
    family = FAMILIES[name]
    mask = measured.mask
    features = x.shape[1]
    settings = family.settings if informed else ()
    # [settings, n, 2C]; 0 is the constant
    held_out = torch.zeros(len(settings) + 1, *targets.values.shape)

    def fitted(fit: Rows, _: Rows, fold_targets: Targets) -> list[Regressor]:
        with threadpool_limits(
            1, user_api="openmp"
        ):  # what limits the caller does not limit this thread
            if informed:
                several = family.fit(x[fit], fold_targets.values, settings, seed)
            else:
                several = ()
        return [
            each.rescaled(*fold_targets.units)
            for each in (constant(fold_targets.values, features), *several)
        ]

    fitting = Parallel(n_jobs=-1, prefer="threads", return_as="generator")
    of_folds: list[list[Regressor]] = []
    for (_, hold, _), models in zip(
        folds, fitting(itertools.starmap(delayed(fitted), folds)), strict=True
    ):
        for number, model in enumerate(models):
            held_out[number, hold] = model(x32[hold])
        of_folds.append(models)
        tick(name)
    wanted = torch.cat([measured.accuracy, log_measured(measured.latency_ms)], 1)
    chosen = []
    for part in range(2):
        columns = slice(part * mask.shape[1], (part + 1) * mask.shape[1])
        residuals = held_out[..., columns] - wanted[:, columns]
        errors = residuals.square().masked_fill(~mask, 0.0).sum((1, 2))
        best = int(errors.argmin())
        in_folds = [models[best].outputs(columns) for models in of_folds]
        if isinstance(in_folds[0], Trees):
            regressor: Regressor = Trees.averaged(in_folds)
        else:
            block = targets.values[:, columns]
            refitted: Regressor = constant(block, features)
            if best:
                refitted = family.fit(x, block, [settings[best - 1]], seed)[0]
            regressor = refitted.rescaled(*(unit[columns] for unit in targets.units))
        if best:
            words = str(settings[best - 1])
        else:
            words = "constant"
        chosen.append((regressor, held_out[best, :, columns], words, in_folds))
    (accuracy, latency), (a, m), settled, parts = zip(*chosen, strict=True)
    spread = _spread(measured, a, m)
    tick(name)
    words = "accuracy {}, latency {}".format(*settled)
    experts = []
    for of_accuracy, of_latency, (_, _, fold_targets) in zip(*parts, folds, strict=True):
        experts.append(Expert(name, of_accuracy, of_latency, fold_targets.centre[0], spread, words))
    expert = Expert(name, accuracy, latency, targets.centre[0], spread, words)
    return Fitted(expert, Prediction(a, m, spread), experts)


def _spread(measured: Measured, accuracy: Tensor, log_latency: Tensor) -> Tensor:
    """Return the spread of predictions out of fold, [n, C] each: that of their residuals, under
    deadlines times the factor with the best utility."""
    spread = measured.residual_spread(log_latency)
    if not len(measured.budgets_ms):
        return spread

    def utility(factor: float) -> float:
        prediction = Prediction(accuracy, log_latency, factor * spread)
        limits = [budget.expand(len(accuracy)) for budget in measured.budgets_ms]
        return measured.utility([prediction.score(limit) for limit in limits], log_latency)

    # 1 comes first, so that it wins if the factor does not matter
    factors = sorted(SPREAD_FACTORS, key=lambda factor: abs(factor - 1))
    return spread * max(factors, key=utility)

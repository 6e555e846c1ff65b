"""Experts: accuracy and log-latency of every configuration, predicted from the features without a
network.

Each is a family of regressors (`knobwise.agents.teacher.regressors`). The settings with the
smallest squared error out of fold are kept, one for accuracy and one for latency, and refitted on
all rows; trees are not, because their mean over the folds is better.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher.outcomes import Prediction, pick
from knobwise.agents.teacher.regressors import (
    FAMILIES,
    KINDS,
    Family,
    Regressor,
    Trees,
    constant,
)
from knobwise.agents.teacher.targets import Targets
from knobwise.common.progress import progress, say
from knobwise.envs.bandit.budgets import log_measured, subsample
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import FOLDS, Fold, Rows, cluster_numbers, folds_of

MAX_SAMPLES = 1 << 14
"""Experts are fitted, and the teacher's weights chosen, on at most so many samples."""
MAX_CELLS = 1 << 21
"""And on at most so many cells."""
SPREAD_FACTORS = (0.35, 0.5, 0.75, 1.0, 1.5, 2.2)
"""Factors on the residual spread of the log-latency: below 1 the predicted latency is trusted more,
above 1 less."""


class MeasuredRows(NamedTuple):
    """The rows that experts are fitted on, of a large table a part, and what was measured of them.

    Attributes:
        rows: int64 [n].
        accuracy: [n, C], NaN where not profiled.
        latency_ms: medians [n, C], NaN where not profiled.
        measurements_ms: every measured latency, [n, C, R].
        mask: bool [n, C], what was profiled.
        budgets_ms: [B] that utility is averaged over; empty without deadlines.
        folds: positions to fit on and to hold out.
        rule: what decisions are worth under these budgets.
        clusters: int64 [n], see `cluster_numbers`; None if each sample is one.
    """

    rows: Tensor
    accuracy: Tensor
    latency_ms: Tensor
    measurements_ms: Tensor
    mask: Tensor
    budgets_ms: Tensor
    folds: Sequence[Fold] = ()
    rule: Rule = DEADLINES
    clusters: Tensor | None = None

    @classmethod
    def from_table(
        cls,
        table: ProfileTable,
        rows: Tensor,
        budgets_ms: Tensor,
        folds: Sequence[Fold] = (),
        rule: Rule = DEADLINES,
    ) -> MeasuredRows:
        """Look up these rows (int64 [n])."""
        return cls(
            rows=rows,
            accuracy=table.accuracy[rows],
            latency_ms=table.latency_ms[rows],
            measurements_ms=table.measurements_ms[rows],
            mask=table.mask[rows],
            budgets_ms=budgets_ms,
            folds=folds,
            rule=rule,
            clusters=cluster_numbers(table, rows),
        )

    def utility(self, scores: Sequence[Tensor], latency: Tensor) -> float:
        """Return the utility of taking the best score, as the mean over rows and budgets.

        Args:
            scores: [n, C] for each budget.
            latency: [n, C], on any monotone scale; it decides among equal scores.
        """
        total = 0.0
        # what the best score would have got at each budget
        for budget, score in zip(self.budgets_ms, scores, strict=True):
            chosen = torch.arange(len(score)), pick(score, latency, self.mask)
            cells = self.accuracy[chosen], self.measurements_ms[chosen]
            total += float(self.rule.mean_utility(*cells, budget).mean())
        return total / len(self.budgets_ms)

    def residual_spread(self, log_latency: Tensor) -> Tensor:
        """Return the root mean square residual of single measurements by configuration, [C].

        Each configuration counts five more cells with the average residual.
        """
        residuals = log_measured(self.measurements_ms) - log_latency.unsqueeze(-1)
        # configurations with few cells are drawn towards the average
        squares = residuals.square().nanmean(-1).masked_fill(~self.mask, 0.0)
        overall = squares.sum() / self.mask.sum()
        return ((squares.sum(0) + 5 * overall) / (self.mask.sum(0) + 5)).sqrt().clamp_min(1e-3)


class Expert(nn.Module):
    """Predicts outcomes from normalised features by two regressors, for accuracy and log-latency.

    Args:
        accuracy, log_latency: regressors from [n, d] to [n, C].
        spread: [C], the standard deviation of ln ms.
        settings: those that were chosen, in words.
    """

    spread: Tensor

    def __init__(
        self,
        name: str,
        accuracy: nn.Module,
        log_latency: nn.Module,
        spread: Tensor,
        settings: str,
    ) -> None:
        super().__init__()
        self.name = name
        self.settings = settings
        self.accuracy = accuracy
        self.log_latency = log_latency
        self.register_buffer("spread", spread)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Prediction:
        """Predict for n requests from normalised features [n, d].

        Without features all predictions are equal.
        """
        inputs = pad_features(x)
        return Prediction(self.accuracy(inputs), self.log_latency(inputs), self.spread)

    def plain(self) -> dict[str, Any]:
        """Pack settings, kinds and weights of both regressors into plain values, the part of a
        checkpoint that `restored` reads."""
        names = "name", "spread", "settings"
        plain = {name: getattr(self, name) for name in names}
        for part, regressor in self.named_children():
            plain[part] = type(regressor).__name__, regressor.state_dict()
        return plain

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Expert:
        """Build the expert from what `plain` packed."""
        regressors = {}
        for part in ("accuracy", "log_latency"):
            kind, state = plain[part]
            regressors[part] = KINDS[kind](**state)
        return cls(**plain | regressors)


class FittedExpert(NamedTuple):
    """An expert of all rows, and the experts of the folds.

    Attributes:
        of_all: fitted on all rows; None if it was not asked for.
        out_of_fold: predictions for these rows by the experts of the folds.
        of_folds: for each fold the expert that was fitted without it.
    """

    of_all: Expert | None
    out_of_fold: Prediction
    of_folds: list[Expert]

    @property
    def expert(self) -> Expert:
        """The expert of all rows."""
        assert self.of_all is not None
        return self.of_all


class Experts(NamedTuple):
    """Experts for some rows, and the data that they were fitted on.

    The seeds of a run and its baselines share them.
    """

    measured: MeasuredRows
    normaliser: FeatureNormaliser
    fitted: list[FittedExpert]

    @classmethod
    def fit(
        cls,
        table: ProfileTable,
        rows: Tensor,
        budgets_ms: Tensor,
        families: Sequence[str],
        seed: int,
        *,
        normaliser: FeatureNormaliser | None = None,
        folds: int = FOLDS,
        rule: Rule = DEADLINES,
        ways: Mapping[str, Family] = FAMILIES,
        on_all: bool = True,
    ) -> Experts:
        """Fit an expert of each family.

        A constant is among the settings of every family, and the only one without features. The
        spread is that of the residuals out of fold, times the factor with the best utility out of
        fold (for deadlines only).

        Of more rows than `sampled_positions` keeps the others are left out, and a message says so.

        Args:
            rows: int64 [n].
            budgets_ms: deadlines [B] that the spreads are chosen for; empty at a price.
            families: names in `ways`.
            seed: of folds and trees.
            normaliser: None fits one on the same rows.
            folds: how many the rows are cut into.
            rule: what decisions are worth under these budgets.
            ways: of fitting each family.
            on_all: whether to fit on all rows too, not in the folds alone.
        """
        division = folds_of(table, rows, seed, folds)
        normaliser = normaliser or FeatureNormaliser.fit(table, rows)
        kept = sampled_positions(len(rows), table.num_configurations)
        if len(kept) < len(rows):
            say(f"experts are fitted on a sample: {len(kept):,} of {len(rows):,} samples")
            # each stays in its fold, so that networks of the folds have not seen it either
            division = [(places(fit, kept), places(hold, kept)) for fit, hold in division]
            rows = rows[kept]
        measured = MeasuredRows.from_table(table, rows, budgets_ms, division, rule)
        if not families:
            return cls(measured, normaliser, [])
        x = pad_features(normaliser.of_rows(table, rows)).double().numpy()
        # the centres and the filled holes must not come from held-out rows
        by_fold = []
        for fit, hold in division:
            by_fold.append((hold, Targets(table, rows[torch.from_numpy(fit)], x[fit])))
        # those of all rows, for the final fit
        targets = Targets(table, rows, x)
        fitted = []
        with progress("fitting experts", len(families), quiet_s=2) as tick:
            for done, name in enumerate(families, 1):
                family = ways[name]
                # without features there is only padding to learn from
                if not normaliser.width:
                    family = family._replace(settings=())
                fitted.append(_fit(name, family, measured, targets, by_fold, seed, on_all))
                tick(done, name.replace("_", " "))
        return cls(measured, normaliser, fitted)

    def of_families(self, families: Sequence[str]) -> list[FittedExpert]:
        """Return the experts of these families, in their order."""
        named = {fitted.of_folds[0].name: fitted for fitted in self.fitted}
        return [named[family] for family in families]


def sampled_positions(samples: int, configurations: int) -> Tensor:
    """Return the positions of the samples that experts are fitted on, evenly spread: int64 [n]."""
    most = min(MAX_SAMPLES, max(MAX_CELLS // configurations, 1))
    return subsample(torch.arange(samples), most)


def places(positions: Rows, kept: Tensor) -> Rows:
    """Return the places in `kept` of those of the positions that are in it, both rising."""
    return np.flatnonzero(np.isin(kept.numpy(), positions))


def pad_features(x: Tensor) -> Tensor:
    """Return features [n, d], or a column of zeros where there are none.

    So every regressor has an input.
    """
    return x if x.shape[-1] else x.new_zeros(len(x), 1)


def _models(
    family: Family, targets: Targets, seed: int, columns: slice = slice(None)
) -> list[Regressor]:
    """Fit a constant and each setting of a family to some columns of targets."""
    values = targets.values[:, columns]
    models: list[Regressor] = [constant(values, targets.x.shape[1])]
    if family.settings:
        models += family.fit(targets.x, values, family.settings, seed)
    scale, offset = (unit[columns] for unit in targets.units)
    return [model.rescaled(scale, offset) for model in models]


def _fit(
    name: str,
    family: Family,
    measured: MeasuredRows,
    targets: Targets,
    by_fold: Sequence[tuple[Rows, Targets]],
    seed: int,
    on_all: bool,
) -> FittedExpert:
    """Fit a family, with its settings and a constant to choose from.

    `by_fold` are of each fold the positions that are held out, and the targets of the others.
    """
    of_folds, held_out = _fitted_out_of_fold(family, targets, by_fold, seed)
    # the first C columns are accuracies, the others log-latencies
    count = measured.mask.shape[1]
    log_latency = log_measured(measured.latency_ms)
    parts = {
        "accuracy": (slice(count), measured.accuracy),
        "latency": (slice(count, None), log_latency),
    }
    unseen = []
    regressors: list[list[Regressor]] = []
    words = []
    for part, (columns, wanted) in parts.items():
        # the setting with the smallest error out of fold, profiled cells only
        squares = (held_out[..., columns] - wanted).square().masked_fill(~measured.mask, 0.0)
        best = int(squares.sum((1, 2)).argmin())
        # a copy, which does not keep the predictions of the other settings
        unseen.append(held_out[best, :, columns].clone())
        words.append(f"{part} {('constant', *family.settings)[best]}")
        in_folds = [models[best].outputs(columns) for models in of_folds]
        of_all: Regressor | None = None
        # trees are not refitted: their mean over the folds is better
        if on_all and isinstance(in_folds[0], Trees):
            of_all = Trees.averaged(in_folds)
        elif on_all:
            # on all rows; where the first is best there is no setting but the constant
            chosen = family._replace(settings=family.settings[best - 1 : best])
            of_all = _models(chosen, targets, seed, columns)[-1]
        regressors.append(in_folds if of_all is None else [*in_folds, of_all])
    unseen_accuracy, unseen_latency = unseen
    spread = _spread(measured, unseen_accuracy, unseen_latency)
    # an expert of each fold, and perhaps of all rows
    of_accuracy, of_latency = regressors
    experts = []
    for right, fast in zip(of_accuracy, of_latency, strict=True):
        experts.append(Expert(name, right, fast, spread, ", ".join(words)))
    out_of_fold = Prediction(unseen_accuracy, unseen_latency, spread)
    return FittedExpert(experts.pop() if on_all else None, out_of_fold, experts)


def _fitted_out_of_fold(
    family: Family,
    targets: Targets,
    by_fold: Sequence[tuple[Rows, Targets]],
    seed: int,
) -> tuple[list[list[Regressor]], Tensor]:
    """Fit the constant and each setting of a family on each fold; arguments as in `_fit`.

    Returns:
        The models of each fold, the constant first, so that it wins where nothing is better; and
        what they predict for the samples that are held out of them, float32 [settings + 1, n, 2·C].
    """
    # float64 to fit on, float32 to predict from
    x = torch.from_numpy(targets.x).float()

    def fitted(_: Rows, known: Targets) -> list[Regressor]:
        # a limit on the caller's thread does not hold in this one
        with threadpool_limits(1, user_api="openmp"):
            return _models(family, known, seed)

    held_out = torch.zeros(len(family.settings) + 1, *targets.values.shape)
    of_folds: list[list[Regressor]] = []
    fitting = Parallel(n_jobs=-1, prefer="threads", return_as="generator")
    results = fitting(itertools.starmap(delayed(fitted), by_fold))
    for (hold, _), models in zip(by_fold, results, strict=True):
        for setting, model in enumerate(models):
            held_out[setting, hold] = model(x[hold])
        of_folds.append(models)
    return of_folds, held_out


def _spread(measured: MeasuredRows, accuracy: Tensor, log_latency: Tensor) -> Tensor:
    """Return the spread of predictions [n, C] that were made out of fold, [C].

    It is that of their residuals, under deadlines times the factor with the best utility.
    """
    spread = measured.residual_spread(log_latency)
    if not len(measured.budgets_ms):
        return spread

    def utility(factor: float) -> float:
        prediction = Prediction(accuracy, log_latency, factor * spread)
        limits = [budget.expand(len(accuracy)) for budget in measured.budgets_ms]
        scores = [prediction.score(limit, measured.rule) for limit in limits]
        return measured.utility(scores, log_latency)

    # 1 comes first, so that it wins if the factor does not matter
    factors = sorted(SPREAD_FACTORS, key=lambda factor: abs(factor - 1))
    return spread * max(factors, key=utility)

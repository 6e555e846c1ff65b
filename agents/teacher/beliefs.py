"""Beliefs about the cells that nobody measured, fitted on those that were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher.completion import Completion
from knobwise.agents.teacher.experts import MeasuredRows, pad_features
from knobwise.common.progress import progress
from knobwise.envs.bandit.budgets import log_measured, subsample
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.profile_table import ProfileTable, Split, median_of
from knobwise.envs.tables.splits import FOLDS, folds_of

DRAWS = 7
"""A predicted latency is a distribution: so many quantiles of it stand for measurements."""


def fit_beliefs(
    table: ProfileTable, split: Split, seed: int = 0, folds: int = FOLDS
) -> Beliefs | None:
    """Return what is believed of the cells of a table; None if all were measured.

    Args:
        split: predictions are fitted on its training and validation samples.
        seed: of folds and trees.
        folds: how many; in each, predictions for its samples are fitted on the others.
    """
    if table.mask.all():
        return None
    fitted = split.fitted
    normaliser = FeatureNormaliser.fit(table, fitted)
    x = pad_features(normaliser.of_rows(table, torch.arange(table.num_samples))).double().numpy()
    completion = Completion(table, x, seed)
    division = folds_of(table, fitted, seed, folds)
    held_out = [fitted[torch.from_numpy(hold)] for _, hold in division]
    # what samples to judge on hold is not used
    usable = torch.zeros(table.num_samples, 1, dtype=torch.bool)
    usable[fitted] = True
    seen = table.mask[fitted].any(0)
    outcomes = _outcomes(table, fitted, seen)
    filled = []
    cross_fitted = []
    holes = int((~table.mask).sum())
    fits = len(outcomes) * (1 + len(held_out))
    with progress(f"predicting {holes:,} cells that were not measured", fits, quiet_s=2) as tick:
        for index, (values, never_seen) in enumerate(outcomes):
            finished = index * (1 + len(held_out))
            known = values.where(usable, torch.nan)
            of_all = completion.complete(known)
            tick(finished + 1, "fits")
            predicted = of_all.clone()
            for number, rows in enumerate(held_out, 2):
                others = known.index_fill(0, rows, torch.nan)
                predicted[rows] = completion.complete(others)[rows]
                tick(finished + number, "fits")
            filled.append(of_all.where(seen, never_seen))
            cross_fitted.append(predicted.where(seen, never_seen))
    offsets = _error_quantiles(table, fitted, cross_fitted[1][fitted])
    return Beliefs(
        measured=table,
        filled=replace(table, **_or_measured(table, _values(table, filled, offsets))),
        predicted=replace(table, **_values(table, cross_fitted, offsets)),
        weight=_weight(table, usable.squeeze(1)),
    )


def _outcomes(table: ProfileTable, fitted: Tensor, seen: Tensor) -> list[tuple[Tensor, Any]]:
    """Return what is predicted: accuracy, ln ms and ln of each further cost, float64 [N, C].

    Each comes with its value for a configuration that no sample to fit on has: it is never right,
    and costs as much as the one that costs most.

    Args:
        table: the table with holes.
        fitted: int64 [n], the samples to fit on.
        seen: bool [C], the configurations that some of them have.
    """
    logs = log_measured(table.latency_ms.double())
    slowest = logs[fitted].nanmean(0)[seen].amax()
    outcomes: list[tuple[Tensor, Any]] = [(table.accuracy.double(), 0.0), (logs, slowest)]
    for cost in table.costs.values():
        log_cost = log_measured(cost.double())
        outcomes.append((log_cost, log_cost[fitted].nan_to_num(-torch.inf).amax()))
    return outcomes


def _or_measured(table: ProfileTable, predicted: dict[str, Any]) -> dict[str, Any]:
    """Return these fields with what was measured where it was, and the predictions elsewhere."""
    changed = dict(predicted)
    padded_ms = _padded(table.measurements_ms, table)
    changed["accuracy"] = table.accuracy.where(table.mask, predicted["accuracy"])
    changed["latency_ms"] = table.latency_ms.where(table.mask, predicted["latency_ms"])
    changed["repeats_ms"] = padded_ms.where(table.mask.unsqueeze(-1), predicted["repeats_ms"])
    if table.first_look_ms is not None:
        first_look_ms = table.first_look_ms.where(table.mask, predicted["first_look_ms"])
        changed["first_look_ms"] = first_look_ms
    changed["costs"] = {
        name: cost.where(~cost.isnan(), predicted["costs"][name])
        for name, cost in table.costs.items()
    }
    return changed


def _error_quantiles(table: ProfileTable, rows: Tensor, log_latency: Tensor) -> Tensor:
    """Return quantiles of the errors of predictions [n, C] of ln ms, float64 [C, DRAWS].

    Errors have one shape for all configurations, which may have long tails, and for each
    configuration a spread of their own.
    """
    measured = MeasuredRows.from_table(table, rows, log_latency.new_zeros(0))
    spread = measured.residual_spread(log_latency).double()
    errors = log_measured(measured.measurements_ms.double()) - log_latency.unsqueeze(-1)
    errors = subsample((errors / spread.unsqueeze(-1))[~errors.isnan()])
    shares = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    return spread.unsqueeze(-1) * torch.quantile(errors, shares)


def _values(table: ProfileTable, outcomes: Sequence[Tensor], offsets: Tensor) -> dict[str, Any]:
    """Return the fields of a table with these outcomes in all cells: accuracy, ln ms and ln of each
    further cost [N, C], and the offsets [C, DRAWS] of ln ms that stand for single measurements."""
    accuracy, log_latency, *log_costs = outcomes
    repeats_ms = _padded((log_latency.unsqueeze(-1) + offsets).exp().float(), table)
    changed: dict[str, Any] = {
        "accuracy": accuracy.clamp(0, 1).float(),
        "latency_ms": median_of(repeats_ms),
        "repeats_ms": repeats_ms,
        "mask": torch.ones_like(table.mask),
        "costs": {
            name: log_cost.exp().float()
            for name, log_cost in zip(table.costs, log_costs, strict=True)
        },
    }
    if table.first_look_ms is not None:
        looked_ms = table.first_look_ms.where(table.mask, torch.nan).nanmean(0).nan_to_num(0.0)
        changed["first_look_ms"] = looked_ms.minimum(repeats_ms.nan_to_num(torch.inf).amin(-1))
    return changed


def _padded(repeats_ms: Tensor, table: ProfileTable) -> Tensor:
    """Lengthen the axis of measurements by NaN, to the larger of `DRAWS` and the table's own."""
    missing = max(DRAWS, table.num_repeats) - repeats_ms.shape[-1]
    return functional.pad(repeats_ms, (0, missing), value=torch.nan)


def _weight(table: ProfileTable, fitted: Tensor) -> Tensor:
    """Return how many cells each measured cell stands for, [N, C], 0 where nothing was measured.

    Where the table does not say so, the cells of a configuration count as drawn at random from the
    samples to fit on (bool [N]), and from the others.
    """
    if table.sampling_weight is not None:
        return table.sampling_weight * table.mask
    share = torch.ones(table.mask.shape)
    for rows in (fitted, ~fitted):
        share[rows] = table.mask[rows].float().mean(0)
    return table.mask / share.where(table.mask, 1.0)

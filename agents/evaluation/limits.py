"""Limits on further costs, such as a price of 0.002 USD, beside the budget of each request.

A request may have only the configurations that are expected to keep each limit with a probability,
.9 by default; where there are none, the cheapest. What is expected of a request is predicted from
its features: the logarithm of each cost by ridge regression, plus the quantile of the errors of
such predictions for other samples. An answer that costs more than a limit counts as late, whoever
chose it.

All of this is in the table that policies learn from and are judged by, so nothing else knows of
limits: what a sample may not have is masked, as if it had not been profiled, and an answer above a
limit is as good as a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.deployed.arrays import Array
from knobwise.agents.deployed.calibrated import CostBounds
from knobwise.agents.teacher.completed import CompletedTable, completed, estimated, measured_of
from knobwise.agents.teacher.regressors import ridge
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import subsample
from knobwise.envs.bandit.cost_limits import over_limits, share_over
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import folds_of

FREE = 1e-3
"""What an answer that costs nothing counts as, as a share of the lowest cost above zero: zero has
no logarithm."""
MAX_WEIGHTS = 1 << 18
"""Most weights of the predictions of a cost; with more only the mean of each configuration counts,
and the spread around it."""
SHRINKAGE = 0.03
"""α of the ridge regression, as a share of the samples."""
EXACT = 1e-9
"""Smaller differences of logarithms are rounding."""
NEVER = 700.0
"""The margin of a configuration whose cost was never measured."""


class Limits(NamedTuple):
    """The limits that a table is judged by, `ProfileTable.limits`."""

    values: dict[str, float]
    """By the name of the cost."""
    probability: float
    """With which a choice is to keep each of them."""
    table: ProfileTable
    """The table without limits."""


def budget_with(limits: Mapping[str, Any]) -> BudgetConfig:
    """Return a budget with the limits of a training, as `Calibration.limits` has them."""
    if not limits:
        return BudgetConfig()
    return BudgetConfig(limits=limits["values"], limit_probability=limits["probability"])


def table_for(
    unprofiled: str, table: ProfileTable, split: Split, budget: BudgetConfig | None = None
) -> ProfileTable:
    """Return the table that policies learn from and are judged by: completed, or under `forbid` as
    it is, where what was not measured may not be chosen; with the limits of the budget, if any.

    Raises:
        InputError: `unprofiled` is another word, or see `check_limits`.
    """
    one_of("unprofiled", unprofiled, ("predict", "forbid"))
    if budget is not None:
        check_limits(table, budget)
    if unprofiled != "forbid":
        table = completed(table, split)
    if budget is None or not budget.limits:
        return table
    return _limited(table, split, Limits(dict(budget.limits), budget.limit_probability, table))


def _limited(table: ProfileTable, split: Split, limits: Limits) -> ProfileTable:
    """Return a table within limits, by what is expected of its samples."""
    # the same features as the controller's, so that the same may be chosen
    normaliser = FeatureNormaliser.fit(table, subsample(split.fitted))
    measured = measured_of(table)
    arrays = fit_bounds(measured, split.fitted, normaliser, limits.probability)
    bounds = CostBounds(arrays, [*measured.costs])
    x = normaliser.of_rows(table, torch.arange(table.num_samples)).numpy()
    allowed, _ = bounds.allowed(x, bounds.log_limits(limits.values), table.mask.numpy())
    return within_limits(table, torch.from_numpy(allowed), limits)


def within_limits(table: ProfileTable, allowed: Tensor, limits: Limits) -> ProfileTable:
    """Return a table of the cells that may be chosen, bool [N, C], in which an answer above a limit
    is wrong."""
    changed: dict[str, Any] = {"mask": allowed}
    for name in ("accuracy", "latency_ms", "repeats_ms", "first_look_ms"):
        values: Tensor | None = getattr(table, name)
        if values is not None:
            kept = allowed.unsqueeze(-1) if values.ndim == 3 else allowed
            missing = 0.0 if name == "first_look_ms" else torch.nan
            changed[name] = values.where(kept, missing)
    changed["accuracy"] = changed["accuracy"].masked_fill(over_limits(table, limits) & allowed, 0.0)
    if isinstance(table, CompletedTable):
        # what estimates are made of: they are about cells inside the mask alone
        for name in ("measured", "predicted"):
            version: ProfileTable = getattr(table, name)
            accuracy = version.accuracy.masked_fill(
                over_limits(version, limits) & version.mask, 0.0
            )
            of_version = limits._replace(table=version)
            changed[name] = replace(version, accuracy=accuracy, limits=of_version)
    return replace(table, limits=limits, **changed)


def fit_bounds(
    table: ProfileTable, rows: Tensor, normaliser: FeatureNormaliser, probability: float
) -> dict[str, Array]:
    """Return what the table's K further costs stay below with this probability, fitted on some rows
    (int64 [n]), as `CostBounds` takes it.

    The errors that the margin is a quantile of are those of predictions for other samples than they
    were fitted on; of m errors it is the ⌈(m + 1)·probability⌉-th smallest (split conformal
    prediction: Lei, G'Sell, Rinaldo, Tibshirani and Wasserman 2018, "Distribution-Free Predictive
    Inference for Regression", JASA), or the largest where there are fewer.

    Returns:
        `bias` and `margin` [K, C]; `floor` [K], the logarithm of what counts as no cost; and
        `weight` [K, width, C] unless no cost depends on the features or there are too many.
    """
    x = normaliser.of_rows(table, rows).double().numpy()
    division = folds_of(table, rows, 0)
    biases = []
    margins = []
    weights = []
    floors = []
    for cost in table.costs.values():
        of_rows = cost[rows].double()
        positive = of_rows[of_rows > 0]
        floor = FREE * float(positive.min()) if len(positive) else FREE
        logs = of_rows.clamp_min(floor).log().numpy()
        errors = np.full_like(logs, np.nan)
        for fit, hold in division:
            weight, bias = _linear(x[fit], logs[fit])
            errors[hold] = logs[hold] - (x[hold] @ weight + bias)
        weight, bias = _linear(x, logs)
        weights.append(weight)
        biases.append(bias)
        margins.append(_quantile(errors, probability))
        floors.append(math.log(floor))
    arrays = {"bias": np.stack(biases), "margin": np.stack(margins), "floor": np.array(floors)}
    if np.any(weights):
        arrays["weight"] = np.stack(weights)
    return arrays


def _linear(x: Array, logs: Array) -> tuple[Array, Array]:
    """Fit ln costs [n, C], NaN where unknown, by features [n, width]: weight [width, C] and bias
    [C]; a configuration without any gets 0."""
    known = ~np.isnan(logs)
    mean = np.where(known, logs, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    residual = np.where(known, logs - mean, 0.0)
    # a cost that is the same for all samples is known exactly
    residual[np.abs(residual) < EXACT] = 0.0
    weight = np.zeros((x.shape[1], logs.shape[1]))
    if not residual.any() or not 0 < weight.size <= MAX_WEIGHTS:
        return weight, mean
    fitted = ridge(x, residual, [SHRINKAGE], 0)[0]
    return fitted.weight.numpy(), mean + fitted.bias.numpy()


def _quantile(errors: Array, probability: float) -> Array:
    """Return the quantile of each column of errors [n, C], NaN where unknown: [C]; of none, a
    number that no cost stays below."""
    count = (~np.isnan(errors)).sum(0)
    place = np.ceil((count + 1) * probability - EXACT).astype(np.int64)
    # NaN is sorted to the end
    in_order = np.sort(errors, 0)
    place = np.minimum(place, count).clip(1) - 1
    quantile = np.take_along_axis(in_order, place[None], 0)[0]
    quantile[np.abs(quantile) < EXACT] = 0.0
    return np.where(count > 0, quantile, NEVER)


def check_limits(table: ProfileTable, budget: BudgetConfig) -> None:
    """Raise InputError for a limit on a cost that the table lacks, one that is not positive, one
    beside a mean budget, or a probability outside 0 … 1."""
    if not isinstance(budget.limits or {}, Mapping):
        raise InputError(f"budget.limits={budget.limits}: must be like {{usd: 0.002}}")
    known = ", ".join(table.costs) or "none; profile.costs=[…] names the columns that are"
    for name, limit in (budget.limits or {}).items():
        if name not in table.costs:
            raise InputError(
                f"budget.limits: {name}: profile {table.name!r} has no such cost; its further "
                f"costs are {known}"
            )
        number = isinstance(limit, Real) and not isinstance(limit, bool)
        if not (number and 0 < limit < math.inf):
            raise InputError(f"budget.limits: {name}={limit}: must be a positive number")
    if budget.limits and budget.constraint != "deadline":
        raise InputError(
            f"budget.limits: are for deadlines; budget={budget.constraint} has none, so leave them "
            "out"
        )
    if not 0 < budget.limit_probability < 1:
        raise InputError(
            f"budget.limit_probability={budget.limit_probability}: must lie between 0 and 1"
        )


def further_costs(
    table: ProfileTable, rows: Tensor, chosen: Tensor, hindsight: bool = False
) -> dict[str, Tensor]:
    """Return the further costs of choices int64 [n, B] for rows int64 [n], by column.

    Args:
        hindsight: the outcomes were known to whoever chose, so that they need no estimates.

    Returns:
        `cost_usd` and, with a limit on it, `over_usd`, the share above it: float [n, B], NaN where
        unknown.
    """
    cells = rows.unsqueeze(1), chosen

    def look_up(values_in: Callable[[ProfileTable], Tensor]) -> Tensor:
        return values_in(table) if hindsight else estimated(table, cells, values_in)

    def cost_in(version: ProfileTable, name: str) -> Tensor:
        return version.costs[name][cells]

    def over_in(version: ProfileTable, name: str) -> Tensor:
        return share_over(cost_in(version, name), version.limits.values[name])

    columns = {}
    for name in table.costs:
        columns[f"cost_{name}"] = look_up(partial(cost_in, name=name))
        if table.limits is not None and name in table.limits.values:
            columns[f"over_{name}"] = look_up(partial(over_in, name=name))
    return columns

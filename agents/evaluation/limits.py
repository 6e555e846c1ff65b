"""Limits on further costs, such as a price of 0.002 USD, beside the budget of each request.

A request may have only the configurations that are expected to keep each limit with a probability,
.9 by default; where there are none, the cheapest. What is expected of a request is predicted from
its features: the logarithm of each cost by ridge regression, plus the quantile of the errors of
such predictions for other samples. An answer that costs more than a limit counts as late, whoever
chose it.

What a sample may have is `Problem.allowed`; what an answer above a limit counts as is said by
`knobwise.envs.bandit.rules.Deadline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.deployed.arrays import Array
from knobwise.agents.deployed.limits import CostBounds
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.regressors import ridge
from knobwise.envs.bandit.budgets import subsample
from knobwise.envs.bandit.rules import Rule, share_over
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


def budget_with(rule: Rule, limits: Mapping[str, Any]) -> BudgetConfig:
    """Return the budget of a training under a rule, with its limits as `Calibration.limits` has
    them."""
    budget = BudgetConfig(constraint=rule.name, settings=rule.numbers or None)
    if not limits:
        return budget
    return replace(budget, limits=limits["values"], limit_probability=limits["probability"])


def within_limits(allowed: Tensor, facts: ProfileTable, split: Split, rule: Rule) -> Tensor:
    """Return which cells samples may have within the limits of a rule, by what is expected of them,
    bool [N, C].

    Args:
        allowed: those that they may have otherwise, bool [N, C].
        facts: what was measured.
    """
    # the same features as the controller's, so that the same may be chosen
    normaliser = FeatureNormaliser.fit(facts, subsample(split.fitted))
    arrays = fit_bounds(facts, split.fitted, normaliser, rule.probability)
    bounds = CostBounds(arrays, [*facts.costs])
    x = normaliser.of_rows(facts, torch.arange(facts.num_samples)).numpy()
    within, _ = bounds.allowed(x, bounds.log_limits(dict(rule.limits)), allowed.numpy())
    return torch.from_numpy(within)


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


def further_costs(
    problem: Problem, rows: Tensor, chosen: Tensor, checked: bool = True
) -> dict[str, Tensor]:
    """Return the further costs of choices int64 [n, B] for rows int64 [n], by column.

    Args:
        checked: see `Problem.outcomes`.

    Returns:
        `cost_usd` and, with a limit on it, `over_usd`, the share above it: float [n, B], NaN where
        unknown.
    """
    cells = rows.unsqueeze(1), chosen
    beliefs = problem.beliefs if checked else None

    def look_up(values_in: Callable[[ProfileTable], Tensor]) -> Tensor:
        if beliefs is None:
            return values_in(problem.values)
        return beliefs.estimate(cells, values_in)

    def cost_in(table: ProfileTable, name: str) -> Tensor:
        return table.costs[name][cells]

    def over_in(table: ProfileTable, name: str) -> Tensor:
        return share_over(cost_in(table, name), problem.rule.limits[name])

    columns = {}
    for name in problem.facts.costs:
        columns[f"cost_{name}"] = look_up(partial(cost_in, name=name))
        if name in problem.rule.limits:
            columns[f"over_{name}"] = look_up(partial(over_in, name=name))
    return columns

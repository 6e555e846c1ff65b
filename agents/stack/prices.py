"""The other sense of a budget: the *average* cost over the requests must not exceed it, so that easy ones pay for hard.

With a price λ ≥ 0 per unit of cost, each request takes argmax_c Â_c − λ·L̂_c: the Lagrangian of "most accuracy at this
mean cost". Raising λ moves every request down the upper concave hull of its (cost, accuracy) points, one step at each
of its breakpoints; all of what follows walks those steps exactly, none searches. Costs are latencies in ms here, but
may be anything that is not negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.judging.baselines import averages
from knobwise.agents.judging.evaluation import bootstrap
from knobwise.agents.predictors.prediction import pick
from knobwise.envs.configurations.budgets import DEFAULT_QUANTILES, judged_budgets
from knobwise.envs.tables.profile_table import ProfileTable

ROUNDING = 1e-9
"""Relative; a price is put this far above its breakpoint, where the rounding of Â − λ·L̂ does not decide."""


def mean_budgets(table: ProfileTable, rows: Tensor) -> Tensor:
    """The mean budgets that are judged: 10/25/50/75/90 % quantiles of the configurations' mean latencies.

    None is below the mean latency of the cheapest configuration, so that each can be kept by a single one.

    Returns: float64 [5], in ms.
    """
    cost = averages(table, rows)[1]
    return cost.quantile(torch.tensor(DEFAULT_QUANTILES, dtype=cost.dtype))


def judged_mean_budgets(table: ProfileTable, rows: Tensor, budgets_ms: Sequence[float] | None) -> Tensor:
    """The mean budgets asked for, in ms, or else `mean_budgets`: float64 [B].

    Raises:
        InputError: no budget, or one that is not positive.
    """
    return mean_budgets(table, rows) if budgets_ms is None else judged_budgets(table, budgets_ms).double()


# -- choosing by a price -----------------------------------------------------------------------------------------------


def choose_at_price(accuracy_hat: Tensor, cost_hat: Tensor, price: Tensor | float, mask: Tensor) -> Tensor:
    """argmax_c Â_c − λ·L̂_c inside the mask, among equals the cheaper: int64 [n].

    Args:
        accuracy_hat, cost_hat: float [n, C].
        price: λ, one for all or [n]; accuracy per unit of cost, ≥ 0.
        mask: bool [n, C].
    """
    price = torch.as_tensor(price, dtype=torch.float64, device=cost_hat.device).reshape(-1, 1)
    return pick(accuracy_hat.double() - price * cost_hat.double(), cost_hat.double(), mask)


def _hull(accuracy: Tensor, cost: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's upper concave hull, from its cheapest configuration up to its most accurate.

    Returns:
        Configurations int64 [n, H + 1], where the last one is repeated to the end, and the H breakpoints float64
        [n, H], falling: step k is taken at prices below it, at none where it is 0.
    """
    accuracy, cost = accuracy.double(), cost.double()
    corners, prices = [pick(-cost, -accuracy, mask)], []
    while True:
        here = corners[-1].unsqueeze(1)
        gain, extra = accuracy - accuracy.gather(1, here), cost - cost.gather(1, here)
        slope = (gain / extra).where(mask & (gain > 0) & (extra > 0), 0.0)
        steepest = slope.amax(1)
        if not (steepest > 0).any():
            break
        corners.append(pick(slope, -cost, mask).where(steepest > 0, corners[-1]))
        prices.append(steepest)
    return torch.stack(corners, 1), torch.stack(prices, 1) if prices else cost.new_zeros(len(cost), 0)


def calibrate_prices(accuracy_hat: Tensor, cost_hat: Tensor, cost: Tensor, mask: Tensor, budgets: Tensor) -> Tensor:
    """The lowest price at which `choose_at_price` keeps each mean budget on these rows, float64 [B].

    Exact: the mean cost really paid is followed through the breakpoints of all samples. Wrong predictions can make it
    rise with the price here and there; the lowest price still falls as budgets grow. A budget that no price keeps gets
    the highest breakpoint, from which on everyone takes what is predicted to be cheapest.

    Args:
        accuracy_hat, cost_hat: float [n, C], predicted by a model that was not fitted on these rows.
        cost: float [n, C], as measured; NaN where not profiled.
        mask: bool [n, C], what was profiled.
        budgets: float [B], of the mean cost.
    """
    corners, prices = _hull(accuracy_hat, cost_hat, mask)
    paid = cost.double().gather(1, corners)
    falling, order = prices.flatten().sort(descending=True)
    totals = torch.cat([paid[:, 0].sum().reshape(1), paid.diff(dim=1).flatten()[order]]).cumsum(0)
    # just above a breakpoint its steps are not taken, nor those of lower ones; at price 0 all are
    tried = torch.cat([falling * (1 + ROUNDING), falling.new_zeros(1)])
    means = totals[torch.searchsorted(-falling, -tried)] / len(paid)
    keeps = means <= budgets.double().unsqueeze(1) * (1 + 1e-12)
    return tried[torch.arange(len(tried), device=tried.device).where(keeps, 0).amax(1)]


def oracle_at_mean(accuracy: Tensor, cost: Tensor, mask: Tensor, budgets: Tensor) -> Tensor:
    """The most accuracy that any choice could have got at each mean budget, in hindsight: int64 [n, B].

    From everyone's cheapest configuration, steps along the hulls are taken in the order of accuracy per cost until the
    next one would exceed the budget: the Lagrangian solution, with the steps at its price taken one by one. It is
    optimal within one sample's exchange: the sum of accuracies is below that of the linear relaxation, an upper bound
    for every choice, by less than this next step brings. A budget below the cheapest choices gives just those.

    Args:
        accuracy, cost: float [n, C], as measured; NaN where not profiled.
        mask: bool [n, C], what was profiled.
        budgets: float [B], of the mean cost.
    """
    corners, prices = _hull(accuracy, cost, mask)
    paid = cost.double().gather(1, corners)
    order = prices.flatten().argsort(descending=True, stable=True)
    totals = paid[:, 0].sum() + paid.diff(dim=1).flatten()[order].cumsum(0)
    count = torch.searchsorted(totals, budgets.double() * len(paid) * (1 + 1e-12), right=True)
    rank = order.argsort().reshape(prices.shape)
    steps = (rank.unsqueeze(2) < count).sum(1)
    return corners.gather(1, steps)


# -- without looking at the request ------------------------------------------------------------------------------------


def best_single_at(mean_accuracy: Tensor, mean_cost: Tensor, budgets: Tensor, mask: Tensor) -> Tensor:
    """The most accurate configuration whose mean cost keeps the budget, else the cheapest.

    Args:
        mean_accuracy, mean_cost: float [C].
        budgets: float [B].
        mask: bool [n, C], what each request may be given.

    Returns: int64 [n, B].
    """
    affordable = mean_accuracy.where(mean_cost <= budgets.to(mean_cost).unsqueeze(1), -torch.inf)
    return torch.stack([pick(scores, mean_cost, mask) for scores in affordable], 1)


def static_hull(mean_accuracy: Tensor, mean_cost: Tensor) -> Tensor:
    """The configurations on the upper concave hull, from the cheapest to the most accurate: [C], [C] → int64 [H]."""
    everything = torch.ones(1, len(mean_cost), dtype=torch.bool, device=mean_cost.device)
    return _hull(mean_accuracy.unsqueeze(0), mean_cost.unsqueeze(0), everything)[0].squeeze(0)


def static_mix(mean_accuracy: Tensor, mean_cost: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best random mixture of two configurations at each mean budget: two neighbours on the upper concave hull.

    Args:
        mean_accuracy, mean_cost: float [C].
        budgets: float [B]; below the cheapest configuration's mean cost there is only this one.

    Returns:
        The cheaper int64 [B], the dearer int64 [B], and the share of requests that gets the dearer, float64 [B].
    """
    corners = static_hull(mean_accuracy, mean_cost)
    cost, budgets = mean_cost.double()[corners], budgets.double()
    low = (torch.searchsorted(cost, budgets, right=True) - 1).clamp_min(0)
    high = (low + 1).clamp_max(len(cost) - 1)
    share = ((budgets - cost[low]) / (cost[high] - cost[low])).clamp(0, 1)
    return corners[low], corners[high], share.where(low < high, 0.0)


class StaticMix:
    """`static_mix` of a table's averages: what a policy must beat at the same mean cost.

    Where one of the two was not profiled for a request the other stands in for it; where both were not, the best single
    configuration for this budget among those that were. With many holes the mean latency can therefore differ from the
    budget: report it.

    Args:
        table: the profile.
        rows: int64 [n], the samples that accuracy and latency are averaged over.
        budgets: float [B], of the mean latency, ms.
    """

    def __init__(self, table: ProfileTable, rows: Tensor, budgets: Tensor) -> None:
        self._means = (*averages(table, rows), budgets)
        self.first, self.second, self.share = static_mix(*self._means)

    def both(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The cheaper and the dearer of each request at each budget: bool [n, C] → int64 [n, B] each."""
        instead = best_single_at(*self._means, mask)
        has_first, has_second = mask[:, self.first], mask[:, self.second]
        first = self.first.where(has_first, self.second.where(has_second, instead))
        return first, self.second.where(has_second, first)

    def expected(self, table: ProfileTable, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Expected accuracy and latency (ms) of each sample, float64 [n, B] each; no draw, so no noise from one."""
        first, second = self.both(table.mask[rows])
        both = (values[rows].double() for values in (table.accuracy, table.latency_ms))
        accuracy, cost = (torch.lerp(v.gather(1, first), v.gather(1, second), self.share) for v in both)
        return accuracy, cost

    def choose(self, place: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        """Decisions by a number in [0, 1) for each request [n]; number of its budget int64 [n], mask [n, C] → [n]."""
        first, second = (side.gather(1, group.unsqueeze(1)).squeeze(1) for side in self.both(mask))
        return second.where(place < self.share[group], first)

    def plain(self) -> dict[str, Any]:
        """Tensors, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> StaticMix:
        """The inverse of `plain`."""
        mix = cls.__new__(cls)
        vars(mix).update(plain)
        return mix


def difference_ci95(policy: Tensor, other: Tensor) -> list[float]:
    """Paired bootstrap interval [2.5 %, 97.5 %] of mean(policy − other): [n] or, over S seeds, [S, n]; and [n]."""
    difference = (policy - other).reshape(-1, len(other))
    nothing = torch.zeros_like(other)
    return bootstrap(difference, nothing, nothing)["utility_ci95"]

"""Mean budgets: the *average* cost over the requests must not exceed the budget, so easy requests pay for hard ones.

With a price λ ≥ 0 per unit of cost, each request takes argmax_c Â_c − λ·L̂_c: the Lagrangian of "most accuracy at this
mean cost". Raising λ moves every request down the upper concave hull of its (cost, accuracy) points, one step at each
breakpoint. The functions here walk these steps exactly instead of searching. Costs are latencies in ms, but may be any
numbers ≥ 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knobwise.agents.judging.baselines import Averages, averages
from knobwise.agents.predictors.experts import pick
from knobwise.envs.configurations.budgets import DEFAULT_QUANTILES, judged_budgets
from knobwise.envs.tables.profile_table import ProfileTable

ROUNDING = 1e-9
"""Relative distance of a price above its breakpoint, so that rounding of Â − λ·L̂ does not matter."""


def mean_budgets(table: ProfileTable, rows: Tensor, budgets_ms: Sequence[float] | None = None) -> Tensor:
    """These mean budgets (see `judged_budgets`), by default the distinct 10/25/50/75/90 % quantiles of the
    configurations' mean latencies, so that a single configuration can keep each: float64 [B], ms."""
    if budgets_ms is not None:
        return judged_budgets(table, budgets_ms).double()
    cost = averages(table, rows)[1]
    return cost.quantile(torch.tensor(DEFAULT_QUANTILES, dtype=cost.dtype)).unique()


# -- choosing by a price -----------------------------------------------------------------------------------------------


def choose_at_price(accuracy_hat: Tensor, cost_hat: Tensor, price: Tensor | float, mask: Tensor | None) -> Tensor:
    """argmax_c Â_c − λ·L̂_c inside the mask, all [n, C], among equals the cheaper: int64 [n].

    The price λ ≥ 0, accuracy per unit of cost, is one for all or [n].
    """
    price = torch.as_tensor(price, dtype=torch.float64, device=cost_hat.device).reshape(-1, 1)
    return pick(accuracy_hat.double() - price * cost_hat.double(), cost_hat.double(), mask)


def _hull(accuracy: Tensor, cost: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's upper concave hull, from its cheapest configuration up to its most accurate: configurations int64
    [n, H + 1], padded with the last one, and the H breakpoints float64 [n, H] in falling order: step k is taken at
    prices below breakpoint k; 0 is padding."""
    accuracy, cost = accuracy.double(), cost.double()
    corners, prices = [pick(-cost, -accuracy, mask)], []
    while True:
        last = corners[-1].unsqueeze(1)
        gain, extra = accuracy - accuracy.gather(1, last), cost - cost.gather(1, last)
        slope = (gain / extra).where(mask & (gain > 0) & (extra > 0), 0.0)
        steepest = slope.amax(1)
        if not (steepest > 0).any():
            break
        corners.append(pick(slope, -cost, mask).where(steepest > 0, corners[-1]))
        prices.append(steepest)
    return torch.stack(corners, 1), torch.stack(prices, 1) if prices else cost.new_zeros(len(cost), 0)


def calibrate_prices(accuracy_hat: Tensor, cost_hat: Tensor, cost: Tensor, mask: Tensor, budgets: Tensor) -> Tensor:
    """The lowest price at which `choose_at_price` keeps each mean budget on these rows, float64 [B].

    Exact: it follows the actual mean cost through the breakpoints of all samples. Wrong predictions can make that cost
    rise with the price in places; the lowest price still falls as budgets grow. A budget that no price keeps gets the
    highest breakpoint, from which on every sample takes the configuration predicted to be cheapest. All but budgets [B]
    are [n, C]: predictions of a model that was not fitted on these rows; cost as measured, NaN where not profiled.
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
    """The configurations with the highest accuracy at each mean budget, in hindsight: int64 [n, B].

    From every sample's cheapest configuration, steps along the hulls are taken in order of accuracy per cost until the
    next one would exceed the budget: the Lagrangian solution, with the steps at its price taken one by one. It is
    optimal up to one step: the sum of accuracies is below that of the linear relaxation, an upper bound for any choice,
    by less than the gain of the next step. A budget below the cheapest choices gives these. Accuracy and cost [n, C]
    are as measured; NaN where not profiled.
    """
    corners, prices = _hull(accuracy, cost, mask)
    paid = cost.double().gather(1, corners)
    order = prices.flatten().argsort(descending=True, stable=True)
    totals = paid[:, 0].sum() + paid.diff(dim=1).flatten()[order].cumsum(0)
    count = torch.searchsorted(totals, budgets.double() * len(paid) * (1 + 1e-12), right=True)
    rank = order.argsort().reshape(prices.shape)
    steps = (rank.unsqueeze(2) < count).sum(1)
    return corners.gather(1, steps)


# -- the same for every request ------------------------------------------------------------------------------------


def best_single_at(mean_accuracy: Tensor, mean_cost: Tensor, budgets: Tensor, mask: Tensor) -> Tensor:
    """The most accurate configuration whose mean cost keeps the budget, else the cheapest: averages [C], budgets [B],
    mask [n, C] of what each request may be given → int64 [n, B]."""
    affordable = mean_accuracy.where(mean_cost <= budgets.to(mean_cost).unsqueeze(1), -torch.inf)
    return torch.stack([pick(scores, mean_cost, mask) for scores in affordable], 1)


def static_hull(mean_accuracy: Tensor, mean_cost: Tensor) -> Tensor:
    """The configurations on the upper concave hull, from the cheapest to the most accurate: [C], [C] → int64 [H]."""
    everything = torch.ones(1, len(mean_cost), dtype=torch.bool, device=mean_cost.device)
    return _hull(mean_accuracy.unsqueeze(0), mean_cost.unsqueeze(0), everything)[0].squeeze(0)


def static_mix(mean_accuracy: Tensor, mean_cost: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best random mixture of two configurations at each mean budget: two neighbours on the upper concave hull.

    Averages [C] and budgets [B] → the cheaper int64 [B], the dearer int64 [B], and the share of requests that gets the
    dearer, float64 [B]. Below the mean cost of the cheapest configuration the mixture is this one alone.
    """
    corners = static_hull(mean_accuracy, mean_cost)
    cost, budgets = mean_cost.double()[corners], budgets.double()
    low = (torch.searchsorted(cost, budgets, right=True) - 1).clamp_min(0)
    high = (low + 1).clamp_max(len(cost) - 1)
    share = ((budgets - cost[low]) / (cost[high] - cost[low])).clamp(0, 1)
    return corners[low], corners[high], share.where(low < high, 0.0)


class StaticMix(Averages):
    """`static_mix` of a table's averages, which a policy must beat at the same mean cost.

    If one of the two was not profiled for a request, the other replaces it; if neither was, the best single profiled
    configuration for this budget does. With many holes the mean latency can therefore differ from the budget: report
    it. Averages are those of `rows`, int64 [n]; budgets [B] of the mean latency are in ms.
    """

    def __init__(self, table: ProfileTable, rows: Tensor, budgets: Tensor) -> None:
        self._means = (*averages(table, rows), budgets)
        self.first, self.second, self.share = static_mix(*self._means)

    def both(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The cheaper and the dearer configuration of each request at each budget: bool [n, C] → int64 [n, B] each."""
        instead = best_single_at(*self._means, mask)
        has_first, has_second = mask[:, self.first], mask[:, self.second]
        first = self.first.where(has_first, self.second.where(has_second, instead))
        return first, self.second.where(has_second, first)

    def expected(self, table: ProfileTable, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Expected accuracy and latency (ms) of each sample, float64 [n, B] each, without the noise of draws."""
        first, second = self.both(table.mask[rows])
        both = (values[rows].double() for values in (table.accuracy, table.latency_ms))
        accuracy, cost = (torch.lerp(v.gather(1, first), v.gather(1, second), self.share) for v in both)
        return accuracy, cost

    def choose(self, place: Tensor, group: Tensor, mask: Tensor) -> Tensor:
        """Decisions from a number in [0, 1) and a budget's index int64 for each request [n], and mask [n, C]."""
        first, second = (side.gather(1, group.unsqueeze(1)).squeeze(1) for side in self.both(mask))
        return second.where(place < self.share[group], first)

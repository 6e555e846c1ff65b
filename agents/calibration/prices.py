"""Mean budgets: the *average* cost over the requests must not exceed the budget, so easy requests
pay for hard ones.

With a price λ ≥ 0 per unit of cost, each request takes argmax_c Â_c − λ·L̂_c: the Lagrangian of
"most accuracy at this mean cost". Raising λ moves every request down the upper concave hull of its
(cost, accuracy) points, one step at each breakpoint. The functions here walk these steps exactly
instead of searching. Costs are latencies in ms, but may be any numbers ≥ 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.agents.teacher.outcomes import pick

ROUNDING = 1e-9
"""Relative distance of a price above its breakpoint; rounding of Â − λ·L̂ then does not matter."""


def choose_at_price(
    accuracy_hat: Tensor, cost_hat: Tensor, price: Tensor | float, mask: Tensor | None
) -> Tensor:
    """Return argmax_c Â_c − λ·L̂_c inside the mask, among equals the cheaper: int64 [n].

    Args:
        accuracy_hat, cost_hat, mask: [n, C].
        price: λ ≥ 0, accuracy per unit of cost, one number for all requests or [n].
    """
    price = torch.as_tensor(price, dtype=torch.float64, device=cost_hat.device).reshape(-1, 1)
    return pick(accuracy_hat.double() - price * cost_hat.double(), cost_hat.double(), mask)


def _hull(accuracy: Tensor, cost: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's upper concave hull, from the cheapest to the most accurate corner.

    Returns:
        The configurations on it, int64 [n, H + 1], padded with the last one, and H breakpoints in
        falling order, float64 [n, H]. Step k is taken at prices below breakpoint k; 0 is padding.
    """
    accuracy = accuracy.double()
    cost = cost.double()
    corners = [pick(-cost, -accuracy, mask)]
    prices = []
    while True:
        # the steepest step from the last corner of each sample
        last = corners[-1].unsqueeze(1)
        gain = accuracy - accuracy.gather(1, last)
        extra = cost - cost.gather(1, last)
        slope = (gain / extra).where(mask & (gain > 0) & (extra > 0), 0.0)
        steepest = slope.amax(1)
        # 0 where a sample has no further step
        if not (steepest > 0).any():
            break
        corners.append(pick(slope, -cost, mask).where(steepest > 0, corners[-1]))
        prices.append(steepest)
    breakpoints = cost.new_zeros(len(cost), 0)
    if prices:
        breakpoints = torch.stack(prices, 1)
    return torch.stack(corners, 1), breakpoints


def calibrate_prices(
    accuracy_hat: Tensor, cost_hat: Tensor, cost: Tensor, mask: Tensor, budgets: Tensor
) -> Tensor:
    """Return the lowest price at which `choose_at_price` keeps each mean budget, float64 [B].

    This is exact: it follows the actual mean cost through the breakpoints of all samples. Wrong
    predictions can make that cost rise with the price in places. The lowest price still falls as
    budgets grow. A budget that no price keeps gets the highest breakpoint, from which on every
    sample takes the configuration predicted to be cheapest.

    Args:
        accuracy_hat, cost_hat: [n, C], predicted by a model that was not fitted on these rows.
        cost: [n, C] as measured, NaN where not profiled.
        mask: bool [n, C], what was profiled.
        budgets: [B].
    """
    corners, prices = _hull(accuracy_hat, cost_hat, mask)
    falling, order = prices.flatten().sort(descending=True, stable=True)
    totals = _totals(corners, cost, order)
    # just above a breakpoint its steps are not taken, nor those of lower ones; at price 0 all are
    tried = torch.cat([falling * (1 + ROUNDING), falling.new_zeros(1)])
    means = totals[torch.searchsorted(-falling, -tried)] / len(cost)
    keeps = means <= budgets.double().unsqueeze(1) * (1 + 1e-12)
    return tried[torch.arange(len(tried), device=tried.device).where(keeps, 0).amax(1)]


def _totals(corners: Tensor, cost: Tensor, order: Tensor) -> Tensor:
    """Return the total cost after each step along the hulls, from that of the cheapest choices:
    float64 [n·H + 1], in the order (int64 [n·H]) in which the steps are taken."""
    paid = cost.double().gather(1, corners)
    return torch.cat([paid[:, :1].sum(0), paid.diff(dim=1).flatten()[order]]).cumsum(0)


def oracle_at_mean(accuracy: Tensor, cost: Tensor, mask: Tensor, budgets: Tensor) -> Tensor:
    """Return the most accurate configurations at each mean budget, in hindsight: int64 [n, B].

    From every sample's cheapest configuration, steps along the hulls are taken in order of accuracy
    per cost until the next one would exceed the budget: the Lagrangian solution, with the steps at
    its price taken one by one. It is optimal up to one step: the sum of accuracies is below that of
    the linear relaxation, an upper bound for any choice, by less than the gain of the next step. A
    budget below the cheapest choices gives these. Accuracy and cost [n, C] are as measured; NaN
    where not profiled.
    """
    corners, prices = _hull(accuracy, cost, mask)
    order = prices.flatten().argsort(descending=True, stable=True)
    totals = _totals(corners, cost, order)[1:]
    count = torch.searchsorted(totals, budgets.double() * len(cost) * (1 + 1e-12), right=True)
    # a sample takes those of its steps that are among the first `count` of all
    rank = order.argsort().reshape(prices.shape)
    steps = (rank.unsqueeze(2) < count).sum(1)
    return corners.gather(1, steps)


def static_hull(mean_accuracy: Tensor, mean_cost: Tensor) -> Tensor:
    """Return the upper concave hull of averages [C]: configurations int64 [H] by rising cost."""
    everything = torch.ones(1, len(mean_cost), dtype=torch.bool, device=mean_cost.device)
    return _hull(mean_accuracy.unsqueeze(0), mean_cost.unsqueeze(0), everything)[0].squeeze(0)

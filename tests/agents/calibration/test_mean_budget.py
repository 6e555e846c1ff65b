"""Prices, mixtures and the oracle by hand; then what must hold of them on drawn tables, ties and
holes included."""

import itertools
import math

import pytest
import torch
from helpers import table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.calibration.mean_policies import StaticMix, best_single_at
from knobwise.agents.calibration.prices import (
    calibrate_prices,
    choose_at_price,
    oracle_at_mean,
)
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.budgets import mean_budgets

NAN = math.nan
# the first sample gains .5 for its first unit of cost and .125 for each of the next two; the second
# .25 for each of two
ACCURACY = torch.tensor([[0.25, 0.75, 1.0], [0.0, 0.25, 0.5]])
COST = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 3.0]])
EVERY = torch.ones(2, 3, dtype=torch.bool)


def drawn(seed, n, c, levels, holes=0.0):
    """Accuracy, cost and mask; with `levels` the values are coarse, so that there are ties."""
    torch.manual_seed(seed)
    accuracy, cost = torch.rand(2, n, c)
    if levels:
        accuracy, cost = (accuracy * levels).round() / levels, (cost * levels).round() / levels
    mask = torch.rand(n, c) >= holes
    mask[range(n), torch.randint(c, (n,))] = True
    return accuracy.masked_fill(~mask, NAN), (10 * cost + 1).masked_fill(~mask, NAN), mask


def taken(accuracy, cost, mask, prices):
    """What is chosen at these prices, [n, B]."""
    return torch.stack([choose_at_price(accuracy, cost, price, mask) for price in prices], 1)


def mean_of(values, chosen):
    """[n, C], [n, B] → [B]."""
    return values.double().gather(1, chosen).mean(0)


# -- by hand ---------------------------------------------------------------------------------------


def test_mean_budgets_are_quantiles_of_the_mean_latencies():
    table = table_of([[0.5] * 3] * 3, [[5.0, 20.0, 30.0], [15.0, 20.0, 50.0], [1000.0] * 3])
    assert mean_budgets(table, torch.tensor([0, 1])).tolist() == pytest.approx([12, 15, 20, 30, 36])
    same = table_of([[0.5] * 3], [[4.0, 4.0, 4.0]])
    assert mean_budgets(same, torch.tensor([0])).tolist() == [4]


def test_a_price_trades_accuracy_for_cost():
    # in a tie the cheaper
    prices = [0.0, 0.124, 0.125, 0.24, 0.25, 0.49, 0.5, 1e9]
    chosen = taken(ACCURACY, COST, EVERY, prices).T.tolist()
    assert chosen == [[2, 2], [2, 2], [1, 2], [1, 2], [1, 0], [1, 0], [0, 0], [0, 0]]
    # each request may have its own price and mask
    assert choose_at_price(ACCURACY, COST, torch.tensor([0.5, 0.0]), EVERY).tolist() == [0, 2]
    mask = torch.tensor([[False, True, True], [True, True, False]])
    assert choose_at_price(ACCURACY, COST, torch.tensor(9.0), mask).tolist() == [1, 0]
    assert choose_at_price(ACCURACY, COST, 0.0, mask).tolist() == [2, 1]


def test_the_lowest_price_that_keeps_the_budget():
    # mean cost 1 from .5 on, 1.5 from .25 on, 2.5 from .125 on, 3.5 at lower prices
    budgets = torch.tensor([0.5, 1, 1.4, 1.5, 2.4, 2.5, 3.4, 3.5, 9])
    prices = calibrate_prices(ACCURACY, COST, COST, EVERY, budgets)
    assert prices.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0, 0])
    # the cost really paid counts: predicted 1, 2, 4 but paid 5, 2, 4: 5 from .5 on, 2 from .125 on,
    # 4 below
    paid = torch.tensor([[5.0, 2.0, 4.0]])
    budgets = torch.tensor([1.0, 3.0, 4.0, 5.0])
    prices = calibrate_prices(ACCURACY[:1], COST[:1], paid, EVERY[:1], budgets)
    assert prices.tolist() == pytest.approx([0.5, 0.125, 0, 0])


def test_the_best_single_configuration():
    accuracy, cost = torch.tensor([0.2, 0.8, 0.6, 0.8]), torch.tensor([10.0, 40, 20, 30])
    budgets = torch.tensor([5.0, 10, 19, 20, 30, 99])
    masks = torch.tensor([[True] * 4, [True, True, True, False]])
    wanted = [[0, 0, 0, 2, 3, 3], [0, 0, 0, 2, 2, 1]]
    assert best_single_at(accuracy, cost, budgets, masks).tolist() == wanted


def test_the_best_mixture_of_two():
    # the hull runs from 0 over 2 to 1; 3 is below it, 4 is dearer and worse than 1
    accuracy, cost = torch.tensor([0.2, 0.8, 0.6, 0.65, 0.7]), torch.tensor([10.0, 40, 20, 30, 50])
    budgets = torch.tensor([5.0, 10, 15, 20, 25, 40, 60])
    mix = StaticMix(accuracy, cost, budgets)
    assert mix.first.tolist() == [0, 0, 0, 2, 2, 1, 1]
    assert mix.second.tolist() == [2, 2, 2, 1, 1, 1, 1]
    assert mix.share.tolist() == [0, 0, 0.5, 0, 0.25, 0, 0]


def test_the_expected_outcome_of_a_mixture():
    # means .25, .75, 1, .3125 and 10, 20, 40, 12 over the first two; the others have holes: the
    # dearer is missing, then both: the best single one in budget; the cheaper is missing; both are,
    # and nothing keeps the budget
    cells = [
        [[0.5, 0.5, 1.0, 0.25], [10.0, 10.0, 30.0, 12.0]],
        [[0.0, 1.0, 1.0, 0.375], [10.0, 30.0, 50.0, 12.0]],
        [[1.0, NAN, NAN, 0.5], [8.0, NAN, NAN, 9.0]],
        [[NAN, 0.5, 0.25, 1.0], [NAN, 16.0, 44.0, 9.0]],
        [[NAN, NAN, 0.5, NAN], [NAN, NAN, 64.0, NAN]],
    ]
    table = table_of(*torch.tensor(cells).unbind(1))
    # half 0 and 1; three quarters 1, else 2
    mix = StaticMix.fit(table, torch.tensor([0, 1]), torch.tensor([15.0, 25.0]))
    assert mix.share.tolist() == [0.5, 0.25]
    accuracy, cost = mix.expected(Problem.from_table(table), torch.arange(5))
    assert accuracy.tolist() == [[0.5, 0.625], [0.5, 1], [1, 0.5], [0.5, 0.4375], [0.5, 0.5]]
    assert cost.tolist() == [[10, 15], [20, 35], [8, 9], [16, 23], [64, 64]]


def test_the_oracle_spends_the_mean_budget_where_it_brings_most():
    # the steps: .5 for 1, then .5 for 2 (the second sample skips its middle, which is no better per
    # cost), .25 for 2
    budgets = torch.tensor([0.5, 1, 1.5, 2.4, 2.5, 3.4, 3.5, 9])
    chosen = oracle_at_mean(ACCURACY, COST, EVERY, budgets)
    assert chosen.T.tolist() == [[0, 0], [0, 0], [1, 0], [1, 0], [1, 2], [1, 2], [2, 2], [2, 2]]
    # below the cheapest possible everyone takes the fastest
    accuracy, cost = torch.tensor([[0.9, 0.1], [NAN, 0.5]]), torch.tensor([[3.0, 2.0], [NAN, 8.0]])
    assert oracle_at_mean(accuracy, cost, ~cost.isnan(), torch.tensor([1.0])).tolist() == [[1], [1]]


# -- on drawn tables -------------------------------------------------------------------------------

SEEDS, LEVELS = st.integers(0, 10**6), st.sampled_from([0, 3, 10])
HOLES = st.sampled_from([0.0, 0.4])
sizes = st.tuples(SEEDS, st.integers(1, 12), st.integers(1, 6), LEVELS, HOLES)


@settings(max_examples=60, deadline=None)
@given(sizes, st.booleans())
def test_calibrated_prices_keep_every_budget_that_a_price_keeps(size, wrong):
    accuracy, cost, mask = drawn(*size)
    budgets, others = torch.linspace(1, 11, 21), [0.0, *torch.logspace(-4, 4, 200).tolist(), 1e12]
    own = taken(accuracy, cost, mask, others)
    assert mask.gather(1, own).all()
    assert (mean_of(cost, own).diff() <= 1e-9).all()  # falls as the price rises
    seed, *shape = size
    hats = drawn(seed + wrong, *shape[:3])[:2]
    prices = calibrate_prices(*hats, cost, mask, budgets)
    assert (prices.diff() <= 0).all()
    paid = mean_of(cost, taken(*hats, mask, prices.tolist()))
    tried = mean_of(cost, taken(*hats, mask, others))
    assert (paid <= budgets + 1e-6)[budgets >= tried.min() + 1e-6].all()
    # and no lower price among those would do
    lower = torch.tensor(others) < prices[:, None] * (1 - 1e-6)
    assert ((tried > budgets[:, None] - 1e-6) | ~lower).all()


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 60))
def test_a_budget_that_is_just_kept_is_kept(size, n):
    accuracy, cost, mask = drawn(size[0], n, *size[2:])
    cost = cost.double() / 3  # so that sums depend on their order
    dearest = choose_at_price(accuracy, cost, 0.0, mask).unsqueeze(1)
    budgets = mean_of(cost, dearest)
    assert calibrate_prices(accuracy, cost, cost, mask, budgets).tolist() == [0]
    assert oracle_at_mean(accuracy, cost, mask, budgets).equal(dearest)


@settings(max_examples=25, deadline=None)
@given(SEEDS, LEVELS, HOLES)
def test_the_oracle_is_within_one_exchange_of_every_choice(seed, levels, holes):
    accuracy, cost, mask = drawn(seed, 4, 3, levels, holes)
    every = torch.tensor(list(itertools.product(range(3), repeat=4))).T
    allowed = mask.gather(1, every).all(0)
    totals, right = mean_of(cost, every), mean_of(accuracy, every)
    budgets = torch.linspace(1, 11, 11)
    chosen = oracle_at_mean(accuracy, cost, mask, budgets)
    assert mask.gather(1, chosen).all()
    exchange = accuracy.masked_fill(~mask, -1).amax(1) - accuracy.masked_fill(~mask, 2).amin(1)
    outcomes = budgets, mean_of(cost, chosen), mean_of(accuracy, chosen)
    for budget, spent, got in zip(*outcomes, strict=True):
        affordable = right[allowed & (totals <= budget)]
        if len(affordable):
            assert spent <= budget + 1e-6
            assert got >= affordable.max() - exchange.max() / 4 - 1e-9

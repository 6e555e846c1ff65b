"""Limits on further costs: an answer above one counts as late."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import identical, input_error, small_table, table_of

from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.limits import further_costs, table_for
from knobwise.agents.teacher.completed import CompletedTable
from knobwise.envs import BudgetConfig
from knobwise.profiling.design.cell_design import balanced_cells, with_cells

FAST_AND_SLOW = [[1.0, 2.0], [1.0, 2.0], [4.0, 2.0]]
PRICES = [[0.001, 0.003], [0.001, 0.002], [0.001, 0.003]]


class Always:
    """Takes one configuration."""

    def __init__(self, choice):
        self.choice = choice

    def choose(self, features, budgets_ms, mask=None):
        return np.full(len(budgets_ms), self.choice)


def priced(limit=None):
    """Three samples that the second configuration answers right, at prices in USD."""
    table = table_of([[0.0, 1.0]] * 3, FAST_AND_SLOW, costs={"usd": torch.tensor(PRICES)})
    if limit is None:
        return table
    return judged(table, usd=limit)


def judged(table, **limits):
    """The table with limits that are judged."""
    return table_for("predict", table, table.split(0.4, 0.3), BudgetConfig(limits=limits))


def test_an_answer_above_a_limit_is_late_by_hand():
    table = priced(0.002)
    rows = torch.arange(3)
    budgets = torch.tensor([2.0, 1.5])
    outcomes = evaluate_policy(Always(1), table.without_first_look, rows, budgets)
    # at 1.5 ms the second configuration is late anyway; 0.002 is not above the limit
    identical(outcomes.on_time, [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    identical(outcomes.utility, outcomes.on_time)
    # the accuracy and the time of an answer are its own
    identical(outcomes.accuracy, torch.ones(3, 2))
    identical(outcomes.latency_ms, torch.full((3, 2), 2.0))
    # the last sample has no configuration that is both quick and cheap
    identical(outcomes.feasible, [[True, True], [True, True], [False, False]])
    costs = further_costs(table, rows, outcomes.chosen)
    identical(costs["cost_usd"][:, 0], [0.003, 0.002, 0.003])
    identical(costs["over_usd"][:, 0], [1.0, 0.0, 1.0])


def test_without_limits_nothing_is_different():
    table = priced()
    assert judged(table) is table
    free = replace(table, costs={})
    rows, budgets = torch.arange(3), torch.tensor([2.0, 1.5])
    for choice in (0, 1):
        both = [evaluate_policy(Always(choice), each, rows, budgets) for each in (table, free)]
        for name, values in vars(both[0]).items():
            identical(values, getattr(both[1], name))
    assert further_costs(table, rows, torch.ones(3, 2, dtype=torch.int64)).keys() == {"cost_usd"}


def test_an_unknown_cost_is_not_above_a_limit_and_counts_nowhere():
    prices = torch.tensor(PRICES)
    prices[0, 1] = torch.nan
    table = judged(replace(priced(), costs={"usd": prices}), usd=0.002)
    outcomes = evaluate_policy(Always(1), table, torch.arange(1), torch.tensor([2.0]))
    assert outcomes.on_time.item() == 1
    assert further_costs(table, torch.arange(1), outcomes.chosen)["over_usd"].isnan().all()


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        ({"limits": {"eur": 1.0}}, "eur"),
        ({"limits": {"usd": 0.0}}, "usd"),
        ({"limits": {"usd": "much"}}, "usd"),
        ({"limits": {"usd": True}}, "usd"),
        ({"limits": [0.1]}, "budget.limits"),
        ({"limits": {"usd": 1.0}, "limit_probability": 1.0}, "limit_probability"),
        ({"limits": {"usd": 1.0}, "constraint": "mean"}, "mean"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(budget, named):
    table = priced()
    with input_error(named):
        table_for("predict", table, table.split(0.4, 0.3), BudgetConfig(**budget))


def test_in_a_profile_of_part_of_the_cells_costs_are_predicted_and_estimates_right_on_average():
    whole = small_table(60)
    price = 0.001 * (1 + whole.configurations.sum(1).float()).expand(whole.mask.shape)
    whole = replace(whole, costs={"usd": price.contiguous()})
    cells = balanced_cells(60, whole.num_configurations, 6, 0)
    part = with_cells(whole, cells)
    assert part.costs["usd"][~part.mask].isnan().all()
    table = judged(part, usd=0.003)
    assert isinstance(table, CompletedTable)
    identical(table.costs["usd"][part.mask], part.costs["usd"][part.mask])
    # a price that depends on the knobs alone is known where it was not measured
    torch.testing.assert_close(table.costs["usd"], whole.costs["usd"], rtol=0.25, atol=0.0)
    rows = torch.arange(60)
    dear = int(price[0].argmax())
    outcomes = evaluate_policy(Always(dear), table, rows, torch.tensor([1e6]))
    assert outcomes.utility.abs().max() < 1e-6
    chosen = torch.full((60, 1), dear)
    assert float(further_costs(table, rows, chosen)["over_usd"].mean()) == pytest.approx(1.0)

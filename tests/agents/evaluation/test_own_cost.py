"""What a policy itself costs: the decisions of what is deployed, and the features that they
read."""

import dataclasses

import pytest
import torch
from helpers import small_table
from replayed import untrained

from knobwise.agents.evaluation import own_cost
from knobwise.agents.evaluation.own_cost import decision_us, expected_cost_ms, own_costs
from knobwise.envs import default_budgets


def test_what_is_charged():
    """The decision, and the features where the policy reads them; nothing where costs are no
    times."""
    table = dataclasses.replace(small_table(40), features_ms=0.25)
    in_usd = dataclasses.replace(table, unit="USD")
    given = torch.arange(40), default_budgets(table)
    deploy = torch.arange(5) > 1
    controller = untrained(table, None, deploy.tolist()).decider
    ((took, charged_ms),) = own_costs([controller], table, *given)
    torch.testing.assert_close(charged_ms, took / 1e3 + 0.25 * deploy)
    assert took.tolist() == [30.0] * 5  # by the clock of the tests
    (cost,) = own_costs([controller], in_usd, *given)
    assert cost.charged_ms.tolist() == [0.0] * 5
    assert (cost.decision_us > 0).all()
    assert own_costs([], table, *given) == []
    # what training charges: 30 µs and the features
    charged = [expected_cost_ms(each) for each in (table, small_table(40), in_usd)]
    assert charged == pytest.approx([0.28, 0.03, 0])


def test_controllers_are_timed_in_turn_and_the_quickest_round_counts(
    monkeypatch,
):
    table = small_table(40)
    order = []
    slow = [1.0, 9.0, 2.0]  # the second round meets a busy machine

    def timed(controller, *about):
        order.append(controller)
        factor = 1 if controller == "a" else 3
        return torch.full((5,), slow[(len(order) - 1) // 2] * factor).double()

    monkeypatch.setattr(own_cost, "_round", timed)
    both = ["a", "b"]
    took = decision_us(both, table, torch.arange(40), default_budgets(table))
    assert order == both * 3
    assert [each.tolist() for each in took] == [[1.0] * 5, [3.0] * 5]

"""What a policy itself costs: the decisions of what is deployed, and the features that they
read."""

import dataclasses

import pytest
import torch
from helpers import small_table
from replayed import untrained

from knobwise.agents.serving import own_cost
from knobwise.agents.serving.own_cost import expected_cost_ms, own_costs
from knobwise.envs.configurations.budgets import default_budgets


def test_what_is_charged() -> None:
    table = dataclasses.replace(small_table(40), features_ms=0.25)
    rows, budgets = torch.arange(40), default_budgets(table)
    controller = untrained(table).decider
    ((took, charged_ms),) = own_costs([controller], table, rows, budgets)
    torch.testing.assert_close(charged_ms, took / 1e3 + 0.25)
    assert took.shape == budgets.shape
    assert (took > 0).all()
    in_usd = dataclasses.replace(table, unit="USD")
    (cost,) = own_costs([controller], in_usd, rows, budgets)
    assert cost.charged_ms.tolist() == [0.0] * len(budgets)
    assert (cost.decision_us > 0).all()
    assert own_costs([], table, rows, budgets) == []
    # what training charges: 30 µs and the features
    assert expected_cost_ms(table) == pytest.approx(0.28)
    assert expected_cost_ms(small_table(40)) == pytest.approx(0.03)
    assert expected_cost_ms(in_usd) == 0


def test_a_fall_back_is_not_charged_the_features() -> None:
    table = dataclasses.replace(small_table(40), features_ms=0.25)
    rows, budgets = torch.arange(40), default_budgets(table)
    deploy = torch.arange(5) > 1
    controller = untrained(table, None, [1.0] * 5, deploy.tolist()).decider
    ((took, charged_ms),) = own_costs([controller], table, rows, budgets)
    torch.testing.assert_close(charged_ms, took / 1e3 + 0.25 * deploy)


def test_controllers_are_timed_in_turn_and_the_quickest_round_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, order = small_table(40), []
    slow = {0: 1.0, 1: 9.0, 2: 2.0}  # the second round meets a busy machine

    def timed(controller: object, *about: object) -> torch.Tensor:
        order.append(controller)
        return torch.full(
            (2, 5), slow[(len(order) - 1) // 2] * (1 if controller == "a" else 3)
        ).double()

    monkeypatch.setattr(own_cost, "_round", timed)
    both: list[object] = ["a", "b"]
    costs = own_costs(both, table, torch.arange(40), default_budgets(table))  # type: ignore[arg-type]
    assert order == both * 3
    assert [cost.decision_us.tolist() for cost in costs] == [[1.0] * 5, [3.0] * 5]

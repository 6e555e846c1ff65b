"""What a policy itself costs: its deployed form decides as it does, and is what is charged."""

import dataclasses

import pytest
import torch
from helpers import small_table

from knobwise.agents import Controller, PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic, PredictThenChoose, Random, make_baselines
from knobwise.agents.serving import own_cost
from knobwise.agents.serving.own_cost import deployed_form, expected_cost_ms, own_costs
from knobwise.agents.stack.priced_policy import make_priced_baselines
from knobwise.agents.stack.prices import mean_budgets
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.envs.configurations.budgets import default_budgets


@pytest.mark.parametrize("priced", [False, True])
def test_the_deployed_form_of_every_baseline_decides_as_it_does(priced: bool) -> None:
    table = small_table(60)
    split = table.split()
    budgets = mean_budgets(table, split.train) if priced else default_budgets(table)
    baselines = make_priced_baselines(table, split, budgets) if priced else make_baselines(table, split)
    timed = [each for each in baselines if isinstance(getattr(each, "chooser", each), PredictThenChoose)]
    assert len(timed) == 6
    for policy in timed:
        deployed = deployed_form(policy, table)
        assert deployed is not None
        if policy.name == "latency_only":  # it is timed with the accuracies that it does not use
            continue
        features = {name: block[split.test] for name, block in table.features.items()}
        for budget in budgets:
            wanted = policy.choose(features, budget.expand(len(split.test))).tolist()
            samples = [{name: block[i].numpy() for name, block in features.items()} for i in range(len(wanted))]
            assert [deployed.decide_index(sample, float(budget)) for sample in samples] == wanted, policy.name


def test_what_is_charged() -> None:
    table = dataclasses.replace(small_table(40), features_ms=0.25)
    rows, budgets = torch.arange(40), default_budgets(table)
    controller = Controller.for_table(table, rows, PolicyConfig(hidden=8)).eval()
    ((took, charged_ms),) = own_costs([controller], table, rows, budgets)
    torch.testing.assert_close(charged_ms, took / 1e3 + 0.25)
    assert took.shape == budgets.shape
    assert (took > 0).all()
    nothing = [0.0] * len(budgets)
    look_ups = [BudgetAwareStatic(table, rows), Random()]
    assert [cost.charged_ms.tolist() for cost in own_costs(look_ups, table, rows, budgets)] == [nothing, nothing]
    in_usd = dataclasses.replace(table, unit="USD")
    assert own_costs([controller], in_usd, rows, budgets)[0].charged_ms.tolist() == nothing
    assert expected_cost_ms(table, experts=False) == pytest.approx(0.31)
    assert expected_cost_ms(table, experts=True) == pytest.approx(1.75)
    assert expected_cost_ms(in_usd, experts=True) == 0


def test_a_fall_back_is_not_charged_the_features() -> None:
    table = dataclasses.replace(small_table(40), features_ms=0.25)
    rows, budgets = torch.arange(40), default_budgets(table)
    config = PolicyConfig(structure="utility", members=2, hidden=8)
    stack = fit_stack(table, rows, Controller.for_table(table, rows, config).eval(), config, budgets, 0)
    assert stack.guard is not None
    stack.guard.deploy.copy_(torch.arange(len(budgets)) > 1)
    ((took, charged_ms),) = own_costs([stack], table, rows, budgets)
    torch.testing.assert_close(charged_ms, took / 1e3 + 0.25 * stack.guard.deploy)


def test_policies_are_timed_in_turn_and_the_quickest_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    table, order = small_table(40), []
    slow = {0: 1.0, 1: 9.0, 2: 2.0}  # the second round meets a busy machine

    def timed(deployed: object, *about: object) -> torch.Tensor:
        order.append(deployed)
        return torch.full((2, 5), slow[(len(order) - 1) // 2] * (1 if deployed == "a" else 3)).double()

    monkeypatch.setattr(own_cost, "deployed_form", lambda policy, table: policy)
    monkeypatch.setattr(own_cost, "_round", timed)
    costs = own_costs(["a", "b"], table, torch.arange(40), default_budgets(table))
    assert order == ["a", "b"] * 3
    assert [cost.decision_us.tolist() for cost in costs] == [[1.0] * 5, [3.0] * 5]

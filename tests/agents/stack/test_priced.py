"""Prices, guard and mixtures of policies for mean budgets: by hand where there is a formula, then on a trained one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers import Always, blocks, small_table
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.predictors.experts import Measured
from knobwise.agents.stack.priced_policy import (
    PricedChooser,
    compared,
    make_priced_baselines,
    price_stack,
    turns,
)
from knobwise.agents.stack.prices import StaticMix, calibrate_prices, choose_at_price, mean_budgets
from knobwise.agents.stack.stacked_controller import StackedController, _joined, fit_priced_stack
from knobwise.agents.stack.weights import HeldOut
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetEncoding
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable

SHORT = OptimiserConfig(warmup_iterations=10, iterations=4, contexts=32, minibatch=32, evaluate_every=4)
STACK = PolicyConfig(structure="utility", members=3, experts=("ridge", "knn"), hidden=16, dropout=0.0)


def trained(table: ProfileTable, policy: PolicyConfig) -> ControllerTrainer:
    trainer = ControllerTrainer(table, table.split(), policy=policy, optimiser=SHORT, budget=BudgetConfig(sense="mean"))
    trainer.run()
    return trainer


def fitted_rows(table: ProfileTable) -> Tensor:
    split = table.split()
    return torch.cat([split.train, split.validation])


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_at_a_price_a_network_scores_accuracy_minus_latency_over_worth_and_nothing_else() -> None:
    configurations = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    network = UtilityNetwork(3, configurations, BudgetEncoding(torch.ones(1)), STACK, True, bins=True)
    assert not {"residual", "modulation"} & {name.split(".")[0] for name, _ in network.named_parameters()}
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    outcomes = network.outcomes(torch.randn(3, 5, 3))
    worths = torch.linspace(1, 50, 5).expand(3, -1)
    mean = torch.exp(outcomes.log_latency + outcomes.spread.square() / 2)
    wanted = torch.sigmoid(outcomes.accuracy_logits) - mean / worths.unsqueeze(-1)
    torch.testing.assert_close(network.scores(outcomes, worths), wanted)


def test_the_guard_wants_the_budget_kept_and_a_gain_above_chance() -> None:
    mixed = torch.full((4, 3), 0.5)
    # gains of all three .25 on average; standard errors .25/√3 (0, 0, .5, .5 → deviation .2887/2), 0 and 0
    accuracy = torch.tensor([[0.5, 0.75, 0.75], [0.5, 0.75, 0.75], [1.0, 0.75, 0.75], [1.0, 0.75, 0.75]])
    cost = torch.tensor([2.0, 2.0, 3.0]).expand(4, -1)
    result = compared(accuracy, cost, mixed, torch.tensor([2.0, 2.0, 2.9]), confidence=0.8)
    assert [row["deployed"] for row in result] == [True, True, False]
    assert [row["gain"] for row in result] == pytest.approx([0.25] * 3)
    assert [row["gain_se"] for row in result] == pytest.approx([math.sqrt(0.25 / 12), 0, 0])
    assert [row["accuracy_static_mix"] for row in result] == [0.5] * 3
    assert "lowest is 3" in result[2]["reason"]
    # .25 is 1.73 standard errors: 95 % sure (1.64), but not 96 % (1.75)
    sure = [compared(accuracy, cost, mixed, torch.full((3,), 9.0), c)[0]["deployed"] for c in (0.95, 0.96)]
    assert sure == [True, False]
    # one held-out sample shows nothing
    cell = torch.ones(1, 1)
    assert not compared(cell, cell, 0 * cell, 2 * cell[0], confidence=0.8)[0]["deployed"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.73])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_turns_keep_a_share_in_any_stretch_of_requests(share: float, every: int) -> None:
    place = turns(1, 7000)[::every]
    assert ((place >= 0) & (place < 1)).all()
    assert turns(5, 3).equal(turns(1, 7)[4:])
    for stretch in place.split(100):
        assert float((stretch < share).double().mean()) == pytest.approx(share, abs=0.05)


def test_a_mixture_takes_its_dearer_side_for_its_share_of_the_requests() -> None:
    table = small_table(60, holes=0.3)
    mix = StaticMix(table, torch.arange(60), mean_budgets(table, torch.arange(60)))
    restored = StaticMix.restored(mix.plain())
    place = torch.arange(1000) / 1000
    every, holes = torch.ones(1000, 12, dtype=torch.bool), table.mask[torch.arange(1000) % 60]
    for b, share in enumerate(mix.share.tolist()):
        group = torch.full((1000,), b)
        chosen = mix.choose(place, group, every)
        assert (chosen == mix.second[b]).float().mean().item() == pytest.approx(share, abs=1e-3)
        assert set(chosen.tolist()) <= {int(mix.first[b]), int(mix.second[b])}
        assert holes.gather(1, mix.choose(place, group, holes).unsqueeze(1)).all()
        assert restored.choose(place, group, holes).equal(mix.choose(place, group, holes))


# -- around something that decides -------------------------------------------------------------------------------------


def always_with_fallback(table: ProfileTable) -> PricedChooser:
    budgets = torch.tensor([6.0, 9.0], dtype=torch.float64)
    guard = [{"deployed": True}, {"deployed": False}]
    mix = StaticMix(table, torch.arange(60), budgets)
    return PricedChooser("always", Always(3), budgets, torch.tensor([0.25, 0.0]), mix, guard)


@pytest.mark.parametrize("features", [True, False])
def test_where_it_was_not_shown_to_be_better_the_mixture_decides(features: bool) -> None:
    table = small_table(60, features=features)
    chooser = always_with_fallback(table)
    first = chooser.choose(table.features, torch.full((60,), 6.0), table.mask)
    assert chooser.chooser.limits.tolist() == [4.0] * 60
    assert first.tolist() == [3] * 60
    sides = torch.stack([chooser.mix.first[1], chooser.mix.second[1]])
    drawn = torch.cat([chooser.choose(table.features, torch.full((60,), 9.0), table.mask) for _ in range(30)])
    assert chooser.chooser.limits.isinf().all()
    assert torch.isin(drawn, sides).all()
    share = (drawn == sides[1]).float().mean().item()
    assert share == pytest.approx(float(chooser.mix.share[1]), abs=0.15 if features else 0.04)
    again = always_with_fallback(table).choose(table.features, torch.full((60,), 9.0), table.mask)
    assert again.equal(drawn[:60])
    # what is expected of it needs no draw
    accuracy, cost = chooser.expected(table, torch.arange(60))
    mixed, mixed_cost = chooser.mix.expected(table, torch.arange(60))
    assert accuracy[:, 0].equal(table.accuracy[:, 3].double())
    assert accuracy[:, 1].equal(mixed[:, 1])
    assert cost[:, 1].equal(mixed_cost[:, 1])
    with pytest.raises(InputError, match=r"7.*calibrated for 6, 9"):
        chooser.choose(table.features, torch.full((60,), 7.0), table.mask)


# -- trained -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [True, False])
def test_a_stack_is_priced_by_what_it_says_out_of_fold(tmp_path: Path, features: bool) -> None:
    table = small_table(120, holes=0.2, features=features)
    rows, budgets = fitted_rows(table), mean_budgets(table, fitted_rows(table))
    trainer = trained(table, STACK)
    arguments = (table, rows, trainer.agent, STACK, trainer.limits)
    stack, held_out = fit_priced_stack(*arguments, seed=0)
    assert float(stack.weights.sum()) == pytest.approx(1)
    priced = price_stack(*arguments, budgets, seed=0)
    assert priced.prices.equal(calibrate_prices(*held_out, table.latency_ms[rows], table.mask[rows], budgets))
    # the budgets are kept on what was held out, except where no price keeps them
    for row, budget in zip(priced.guard, budgets.tolist(), strict=True):
        assert row["latency_ms_mean"] <= budget * (1 + 1e-9) or "no price" in row["reason"]
    # what decides is Â − λ·L̂ of the whole, and its probabilities follow
    assert isinstance(priced.chooser, StackedController)
    requests, worths = blocks(table, rows), torch.full((len(rows),), 20.0)
    normal = stack.features(requests, len(rows))
    accuracy, cost = stack.predictions(normal).costs()
    chosen = priced.chooser.choose(requests, worths, table.mask[rows])
    assert chosen.equal(choose_at_price(accuracy, cost, 1 / 20, table.mask[rows]))
    assert stack(normal, worths, table.mask[rows]).argmax(-1).equal(chosen)
    # in and out of a checkpoint
    save_checkpoint(tmp_path / "best.pt", priced, table, {})
    again = load_checkpoint(tmp_path / "best.pt").controller
    assert isinstance(again, PricedChooser)
    assert again.guard == priced.guard
    for budget in budgets:
        limits = budget.expand(len(rows))
        fresh = price_stack(*arguments, budgets, seed=0)
        assert again.choose(requests, limits, table.mask[rows]).equal(fresh.choose(requests, limits, table.mask[rows]))
        again._turn = 1


def test_the_weights_of_a_fold_have_not_seen_it() -> None:
    table = small_table(100)
    measured = Measured.from_table(table, torch.arange(100), torch.ones(0), seed=0)
    scores = [torch.rand(2, 100, 12, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    worth = scores[0] + scores[1]
    changed, (_, hold) = worth.clone(), measured.folds[2]
    changed[:, hold] = scores[2][:, hold]
    # where member k says 1 and the others 0, the joined prediction is the weight of k in the sample's fold
    members = [[torch.full((100, 1), float(k == member)) for k in range(3)] for member in range(3)]
    before, after = (
        torch.cat(_joined(measured, HeldOut(scores, w, table.mask), torch.ones(3), *members), 1)
        for w in (worth, changed)
    )
    torch.testing.assert_close(before.sum(1), torch.ones(100))
    assert [torch.equal(before[hold], after[hold]) for _, hold in measured.folds] == [False, False, True, False, False]


def test_baselines_that_look_at_the_request_are_priced_out_of_fold() -> None:
    table = small_table(200)
    rows, budgets = fitted_rows(table), mean_budgets(table, fitted_rows(table))
    baselines = make_priced_baselines(table, table.split(), budgets)
    names = ["latency_only", "ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting"]
    assert [baseline.name for baseline in baselines] == names
    mixed = StaticMix(table, rows, budgets).expected(table, rows)[0].mean(0)
    for baseline in baselines:
        assert (baseline.prices.diff() <= 0).all()
        accuracy, cost = baseline.expected(table, rows)
        assert cost.mean(0).tolist() == pytest.approx(budgets.tolist(), rel=0.25)
        if baseline.name != "latency_only":
            assert accuracy.mean() > mixed.mean() + 0.03

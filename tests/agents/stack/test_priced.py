"""Worths, guard and mixtures for mean budgets: by hand where there is a formula, then on a trained
one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import TAUGHT, arrays, deployed, small_table, table_of
from torch import Tensor

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.policy.mean_budgets import MeanBudgets
from knobwise.agents.stack.prices import (
    WORTHS,
    MeanBudgetPolicy,
    StaticMix,
    compared,
    make_priced_baselines,
    mean_budgets,
    worths_for,
)
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.settle import deployed_by
from knobwise.envs.configurations.budgets import worths_range
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable

SHORT = OptimiserConfig(
    teacher_iterations=10,
    warmup_iterations=60,
    iterations=4,
    contexts=64,
    minibatch=64,
    evaluate_every=4,
)


def fitted_rows(table: ProfileTable) -> Tensor:
    split = table.split()
    return torch.cat([split.train, split.validation])


# -- by hand ---------------------------------------------------------------------------------------


def test_the_guard_wants_the_budget_kept_and_a_gain_above_chance() -> None:
    mixed = torch.full((4, 3), 0.5)
    # gains of all three .25 on average; standard errors .25/√3 (0, 0, .5, .5 → deviation .2887/2),
    # 0 and 0
    right = [[0.5, 0.75, 0.75], [0.5, 0.75, 0.75], [1.0, 0.75, 0.75], [1.0, 0.75, 0.75]]
    accuracy = torch.tensor(right)
    cost = torch.tensor([2.0, 2.0, 3.0]).expand(4, -1)
    result = compared(accuracy, cost, mixed, torch.tensor([2.0, 2.0, 2.9]), confidence=0.8)
    assert [row["deployed"] for row in result] == [True, True, False]
    assert [row["gain"] for row in result] == pytest.approx([0.25] * 3)
    assert [row["gain_se"] for row in result] == pytest.approx([math.sqrt(0.25 / 12), 0, 0])
    assert [row["accuracy_static_mix"] for row in result] == [0.5] * 3
    assert "lowest is 3" in result[2]["reason"]
    # .25 is 1.73 standard errors: 95 % sure (1.64), but not 96 % (1.75)
    sure = []
    for confidence in (0.95, 0.96):
        rows = compared(accuracy, cost, mixed, torch.full((3,), 9.0), confidence)
        sure.append(rows[0]["deployed"])
    assert sure == [True, False]
    # one held-out sample shows nothing
    cell = torch.ones(1, 1)
    assert not compared(cell, cell, 0 * cell, 2 * cell[0], confidence=0.8)[0]["deployed"]


def test_the_most_accurate_worth_within_each_mean_budget_is_found() -> None:
    # worths are tried from 4 ms up; the policy takes the dear one for the first sample from 20 ms
    # on, for both from 60 ms on; from 200 ms on it takes what is dearer still and no better
    table = table_of([[0.25, 1.0, 1.0], [0.5, 0.75, 0.5]], [[4.0, 10.0, 30.0]] * 2)
    rows = torch.arange(2)
    tried = []

    def decide(worth: Tensor) -> Tensor:
        tried.append(float(worth))
        for least, chosen in ((200, [2, 2]), (60, [1, 1]), (20, [1, 0]), (0, [0, 0])):
            if worth >= least:
                return torch.tensor(chosen)
        raise AssertionError

    budgets_ms = torch.tensor([3.0, 6.9, 7.0, 9.9, 10.0, 50.0])
    worths, choices = worths_for(decide, table, rows, budgets_ms)
    low, high = worths_range(table.latency_ms.flatten()).tolist()
    assert len(tried) == WORTHS
    assert (tried[0], tried[-1]) == (pytest.approx(low), pytest.approx(high))
    logs = torch.tensor(tried).log().diff()
    torch.testing.assert_close(logs, logs[:1].expand(WORTHS - 1), rtol=1e-3, atol=0)
    # means: 4 ms and .375; 7 ms and .75; 10 ms and .875; 30 ms and .75
    wanted = [[0, 0], [0, 0], [1, 0], [1, 0], [1, 1], [1, 1]]
    assert choices.T.tolist() == wanted
    for worth, chosen in zip(worths, wanted, strict=True):
        assert decide(worth).tolist() == chosen
    assert worths.dtype == torch.float64


def mixing(share: float, deployed_at: list[bool]) -> MeanBudgets:
    """Mean budgets of 6 and 9 ms, with a mix of the first and the second configuration at both."""
    mix = {"first": [0, 0], "second": [1, 1], "share": [share, share]}
    mix |= {"mean_accuracy": [0.2, 0.6, 0.4], "mean_cost": [4.0, 12.0, 8.0]}
    content = {"budgets_ms": [6.0, 9.0], "worths": [20.0, 40.0], "deployed": deployed_at}
    content |= {f"mix.{name}": values for name, values in mix.items()}
    return MeanBudgets({name: np.array(values) for name, values in content.items()})


@pytest.mark.parametrize("share", [0.1, 0.5, 0.73])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_turns_keep_a_share_in_any_stretch_of_requests(share: float, every: int) -> None:
    one_by_one, together = mixing(share, [False, False]), mixing(share, [False, False])
    chosen = np.array([one_by_one.fall_back(9.0) for _ in range(7000)])
    group = np.ones(7000, np.int64)
    assert (chosen == together.or_mix(np.full(7000, 7), group, None)).all()
    for stretch in torch.from_numpy(chosen[::every]).split(100):
        assert float(stretch.double().mean()) == pytest.approx(share, abs=0.05)


def test_a_mixture_takes_its_dearer_side_for_its_share_and_stays_in_the_mask() -> None:
    mean = mixing(0.25, [True, False])
    chosen = np.full(1000, 7)
    group = np.arange(1000) % 2
    mixed = mean.or_mix(chosen, group, None)
    assert (mixed[::2] == 7).all()  # there the policy decides
    assert np.mean(mixed[1::2]) == pytest.approx(0.25, abs=0.01)
    # the dearer is forbidden, the cheaper, and both, where the best that the budget affords is
    # taken
    masks = np.array([[True, False, True], [False, True, True], [False, False, True]])
    for _ in range(9):
        assert mean.or_mix(np.full(3, 7), np.ones(3, np.int64), masks).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"7.*calibrated for 6, 9"):
        mean.groups(np.array([7.0]))


def test_where_it_was_not_shown_to_be_better_the_mixture_is_expected_to_decide() -> None:
    table = small_table(60)
    rows, budgets_ms = torch.arange(60), torch.tensor([6.0, 9.0])
    mix = StaticMix.of_table(table, rows, budgets_ms)
    asked = []

    def decide(features: object, group: int, mask: np.ndarray) -> np.ndarray:
        asked.append(group)
        return np.full(len(mask), 3 + group)

    deployed_at = torch.tensor([True, False])
    worths = torch.tensor([4.0, 8.0])
    policy = MeanBudgetPolicy("always", decide, budgets_ms, worths, deployed_at, mix)
    assert policy.prices.tolist() == [0.25, 0.125]
    decided = policy.decided(table, rows)
    assert asked == [0, 1]
    assert decided.tolist() == [[3, 4]] * 60
    # what is expected of it needs no draw
    accuracy, cost = policy.expected(table, rows, decided)
    mixed, mixed_cost = mix.expected(table, rows)
    assert accuracy[:, 0].equal(table.accuracy[:, 3].double())
    assert cost[:, 0].equal(table.latency_ms[:, 3].double())
    assert accuracy[:, 1].equal(mixed[:, 1])
    assert cost[:, 1].equal(mixed_cost[:, 1])


# -- trained ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("cost_ms", [0.0, 0.5])
def test_worths_are_those_that_keep_the_budgets_on_what_was_held_out(
    features: bool, cost_ms: float
) -> None:
    table = small_table(120, holes=0.2, features=features)
    budgets_ms = mean_budgets(table, fitted_rows(table))
    trainer = ControllerTrainer(
        table,
        table.split(),
        policy=TAUGHT,
        optimiser=SHORT,
        budget=BudgetConfig(sense="mean"),
        cost_ms=cost_ms,
    )
    trainer.run()
    agent = deployed_by(trainer, budgets_ms)
    mean, rows = agent.settled.mean, trainer.judged_rows
    at = torch.arange(len(rows))
    for b, row in enumerate(agent.settled.guard):
        worth = torch.tensor(mean["worths"][b]).float()
        chosen = trainer.held_out_log_probs(worth).argmax(1)
        spent = float(table.latency_ms[rows, chosen].double().mean()) + cost_ms
        assert row["latency_ms_mean"] == pytest.approx(spent)
        accuracy = float(table.accuracy[rows, chosen].double().mean())
        assert row["accuracy_policy"] == pytest.approx(accuracy)
        assert spent <= float(budgets_ms[b]) * (1 + 1e-9) or "no worth" in row["reason"]
        assert table.mask[rows][at, chosen].all()
        assert mean["deployed"][b] == row["deployed"]
    assert agent.sense == "mean"
    # what decides is the network of all samples at that worth
    decider = agent.decider
    deployed_worth = decider.log_probs(arrays(table), np.full(120, float(budgets_ms[1])))
    x = agent.controller.features(table.features, 120)
    with torch.no_grad():
        wanted = agent.controller(x, torch.full((120,), float(mean["worths"][1])))
    np.testing.assert_allclose(deployed_worth, wanted, atol=1e-4)
    policy = agent.under_mean_budgets()
    everyone = torch.arange(120)
    greedy = wanted.masked_fill(~table.mask, -torch.inf).argmax(1)
    assert torch.equal(policy.decided(table, everyone)[:, 1], greedy)
    with pytest.raises(ValueError, match="was calibrated for"):
        agent.choose(arrays(table), np.full(120, 1e6))


def test_without_a_guard_the_policy_decides_at_every_mean_budget() -> None:
    table = small_table(80)
    budgets_ms = mean_budgets(table, fitted_rows(table))
    agent = deployed(table, PolicyConfig(hidden=8, guard=False), budgets_ms, "mean")
    assert agent.settled.guard == []
    assert agent.settled.mean["deployed"].all()
    assert agent.decider.mean is not None
    assert agent.decider.mean.mix == {}
    assert agent.reads_features(budgets_ms.numpy()).all()


def test_a_taught_policy_spends_more_where_it_may() -> None:
    table = small_table(300)
    budgets_ms = mean_budgets(table, fitted_rows(table))
    optimiser = OptimiserConfig(
        teacher_iterations=30, warmup_iterations=150, iterations=0, evaluate_every=30
    )
    settings = {"optimiser": optimiser}
    policy = PolicyConfig(teacher=True, members=2, experts=("ridge",), hidden=16, dropout=0.0)
    agent = deployed(table, policy, budgets_ms, "mean", **settings)
    under = agent.under_mean_budgets()
    test = table.split().test
    accuracy, cost = under.expected(table, test, under.decided(table, test))
    assert (under.worths.diff() >= 0).all()
    assert cost.mean(0).tolist() == pytest.approx(budgets_ms.tolist(), rel=0.25)
    mixed = StaticMix.of_table(table, fitted_rows(table), budgets_ms).expected(table, test)[0]
    assert accuracy.mean() > mixed.mean() + 0.03


def test_baselines_that_look_at_the_request_are_priced_out_of_fold() -> None:
    table = small_table(200)
    rows, budgets = fitted_rows(table), mean_budgets(table, fitted_rows(table))
    baselines = make_priced_baselines(table, table.split(), budgets)
    names = ["latency_only", "ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting"]
    assert [baseline.name for baseline in baselines] == names
    mixed = StaticMix.of_table(table, rows, budgets).expected(table, rows)[0].mean(0)
    for baseline in baselines:
        assert (baseline.prices.diff() <= 0).all()
        accuracy, cost = baseline.expected(table, rows, baseline.decided(table, rows))
        assert cost.mean(0).tolist() == pytest.approx(budgets.tolist(), rel=0.25)
        if baseline.name != "latency_only":
            assert accuracy.mean() > mixed.mean() + 0.03

"""Values, guard and mixtures for mean budgets: by hand where there is a formula, then on a trained
one."""

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import BRIEF, deployed, small_table, table_of, trained

from knobwise.agents.calibration import mean_policies
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.mean_policies import (
    VALUES,
    MeanBudgetPolicy,
    Mixture,
    StaticMix,
    calibrated_values,
    compare_with_mix,
    make_priced_baselines,
    outcomes_of,
)
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.problem import Problem
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.bandit.budgets import mean_budgets, value_range

# -- by hand ---------------------------------------------------------------------------------------


def test_the_guard_wants_the_budget_kept_and_a_gain_above_chance(monkeypatch):
    monkeypatch.setattr(mean_policies, "CONFIDENCE", 0.95)
    mixed = torch.full((4, 3), 0.5)
    # gains of all three .25 on average; standard errors .25/√3 (0, 0, .5, .5 → deviation .2887/2),
    # 0 and 0
    accuracy = torch.tensor([[0.5, 0.75, 0.75]] * 2 + [[1.0, 0.75, 0.75]] * 2)
    cost = torch.tensor([2.0, 2.0, 3.0]).expand(4, -1)
    budgets_ms = torch.tensor([2.0, 2.0, 2.9])
    result = compare_with_mix(accuracy, cost, mixed, budgets_ms)
    spread = math.sqrt(0.25 / 12)
    for row, gains, se in zip(result, (True, True, False), (spread, 0, 0), strict=True):
        wanted = {"deployed": gains, "gain": 0.25, "accuracy_static_mix": 0.5}
        assert row | wanted | {"gain_se": pytest.approx(se)} == row
    # the sums over two clusters are .5 below and above what they are on average: √(.5 · 2) / 4
    (row, *_) = compare_with_mix(
        accuracy, cost, mixed, budgets_ms, clusters=torch.tensor([0, 0, 1, 1])
    )
    assert (row["gain_se"], row["deployed"]) == (pytest.approx(0.25), False)
    # .25 is 1.73 standard errors: 95 % sure (1.64), but not 96 % (1.75); one sample shows nothing
    monkeypatch.setattr(mean_policies, "CONFIDENCE", 0.96)
    assert not compare_with_mix(accuracy, cost, mixed, budgets_ms)[0]["deployed"]
    alone = accuracy[:1], cost[:1], mixed[:1]
    assert not any(row["deployed"] for row in compare_with_mix(*alone, budgets_ms))


def test_the_mix_decides_where_too_few_choices_were_measured():
    accuracy, mixed = torch.full((40, 3), 1.0), torch.full((40, 3), 0.5)
    budgets_ms = torch.tensor([2.0, 3.0, 4.0])
    measured = torch.tensor([30, 29, 40]), torch.tensor([40, 40, 0])
    rows = compare_with_mix(accuracy, accuracy, mixed, budgets_ms, measured=measured)
    assert [row["deployed"] for row in rows] == [True, False, False]
    assert [row["gain"] for row in rows] == [0.5, None, None]
    assert [row["accuracy_static_mix"] for row in rows] == [0.5, 0.5, None]


def test_a_draw_was_measured_if_both_sides_were():
    first, second = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 0]])
    mixture = Mixture(first, second, torch.tensor([[math.nan, 0.5, 0.0]]).double())
    for mask, measured in (((1, 0), [1, 0, 0]), ((0, 1), [0, 0, 1]), ((1, 1), [1, 1, 1])):
        known = torch.tensor([mask]).bool()
        assert mixture.measured(known).tolist() == [list(map(bool, measured))]
        # how many cells a decision stands for is 0 where it was not measured
        assert (mixture.weight(2.0 * known) > 0).tolist() == mixture.measured(known).tolist()


def test_the_lowest_price_that_keeps_each_mean_budget_is_found():
    # values are tried from 4 ms up; the policy takes the dear one for the first sample from 20 ms
    # on, for both from 60 ms on; from 200 ms on it takes what is dearer still and no better
    table = table_of([[0.25, 1.0, 1.0], [0.5, 0.75, 0.5]], [[4.0, 10.0, 30.0]] * 2)
    rows = torch.arange(2)
    tried = []

    def decide(value):
        tried.append(float(value))
        steps = ((0, [0, 0]), (20, [1, 0]), (60, [1, 1]), (200, [2, 2]))
        return torch.tensor([chosen for least, chosen in steps if value >= least][-1])

    budgets_ms = torch.tensor([3.0, 6.9, 7.0, 9.9, 10.0, 50.0])
    values_ms, choices = calibrated_values(decide, Problem.from_table(table), rows, budgets_ms)
    ends = value_range(table.latency_ms.flatten()).tolist()
    np.testing.assert_allclose(tried, np.geomspace(*ends, VALUES), rtol=1e-5)
    # means: 4, 7, 10 and 30 ms; what is dearest is not the most accurate, which nobody looks at
    assert choices.T.tolist() == [[0, 0], [0, 0], [1, 0], [1, 0], [1, 1], [2, 2]]
    assert [decide(value).tolist() for value in values_ms] == choices.T.tolist()


def test_a_policy_that_gains_nothing_is_deployed_as_rarely_as_the_confidence_says():
    # on one line of cost and accuracy, so that any choice is worth what the mix is
    draws = torch.Generator().manual_seed(0)
    n, count = 300, 8
    latency_ms = torch.arange(1.0, count + 1).expand(n, -1)
    chance = 0.5 + 0.01 * torch.arange(count)
    budgets_ms = torch.tensor([2.0, 3.5, 5.0])
    rows = torch.arange(n)
    mix = StaticMix(chance.double(), latency_ms[0].double(), budgets_ms)
    deployed = []
    for _ in range(100):
        right = (torch.rand(n, count, generator=draws) < chance).float()
        problem = Problem.from_table(table_of(right, latency_ms))
        # what it believes is noise
        scores = chance + 0.1 * torch.randn(n, count, generator=draws)
        _, chosen = calibrated_values(
            lambda value, scores=scores: (scores - latency_ms / value.float()).argmax(1),
            problem,
            rows,
            budgets_ms,
        )
        mixed, _ = mix.expected(problem, rows)
        guard = compare_with_mix(*outcomes_of(problem, rows, chosen), mixed, budgets_ms)
        deployed.append([row["deployed"] for row in guard])
    # 20 % are allowed; 3 standard errors of 100 draws are 12 %
    assert np.mean(deployed, 0).max() < 0.2 + 0.12
    assert np.mean(deployed) < 0.25


def test_where_it_was_not_shown_to_be_better_the_mixture_is_expected_to_decide():
    table = small_table(60)
    rows, budgets_ms = torch.arange(60), torch.tensor([6.0, 9.0])
    mix = StaticMix.fit(table, rows, budgets_ms)
    problem = Problem.from_table(table)

    def decide(features, group, mask):
        return np.full(len(mask), 3 + group)

    values_ms, deployed_at = torch.tensor([4.0, 8.0]), torch.tensor([True, False])
    policy = MeanBudgetPolicy("always", decide, budgets_ms, values_ms, deployed_at, mix)
    # what is expected of it needs no draw
    expected = policy.mixture(problem, rows).expected(problem, rows)
    cells = table.accuracy, table.latency_ms
    for values, cell, mixed in zip(expected, cells, mix.expected(problem, rows), strict=True):
        assert values.equal(torch.stack([cell[:, 3].double(), mixed[:, 1]], 1))


# -- trained ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("features", "cost_ms"), [(True, 0.5), (False, 0.0)])
def test_prices_are_those_that_keep_the_budgets_on_what_was_held_out(features, cost_ms):
    table = small_table(120, holes=0.2, features=features)
    budgets_ms = mean_budgets(table, table.split().fitted)
    optimiser = replace(BRIEF, pretrain_iterations=60)
    trainer = trained(table, constraint="mean", optimiser=optimiser, cost_ms=cost_ms)
    agent = calibrate_controller(trainer.setup, budgets_ms)
    mean, rows = agent.calibration.mean, trainer.setup.held_out.rows
    values_ms = torch.from_numpy(mean["worths"]).float()
    chosen = torch.stack(
        [trainer.setup.held_out_log_probs(value).argmax(1) for value in values_ms], 1
    )
    assert table.mask[rows].gather(1, chosen).all()
    accuracy, spent = (
        values.mean(0) for values in outcomes_of(Problem.from_table(table), rows, chosen)
    )
    guard = pl.DataFrame(agent.calibration.guard)
    assert guard["latency_ms_mean"].to_list() == pytest.approx((spent + cost_ms).tolist())
    assert guard["accuracy_policy"].to_list() == pytest.approx(accuracy.tolist())
    kept = spent + cost_ms <= budgets_ms * (1 + 1e-9)
    assert (kept.numpy() >= mean["deployed"]).all()
    assert mean["deployed"].tolist() == guard["deployed"].to_list()
    # what decides is the network of all samples at that value
    x = agent.controller.normaliser(table.features, 120)
    greedy = agent.controller(x, values_ms[1].expand(120), table.mask).argmax(1)
    decided = agent.under_mean_budgets().decided(Problem.from_table(table), torch.arange(120))
    assert torch.equal(decided[:, 1], greedy)


def test_a_taught_policy_spends_more_where_it_may():
    table = small_table(300)
    split = table.split()
    test, budgets_ms = split.test, mean_budgets(table, split.fitted)
    steps = {"teacher_iterations": 30, "pretrain_iterations": 150, "evaluate_every": 30}
    optimiser = OptimiserConfig(iterations=0, **steps)
    policy = PolicyConfig(teacher=True, fold_networks=2, experts=("ridge",), hidden=16, dropout=0.0)
    agent = deployed(table, policy, budgets_ms, "mean", optimiser=optimiser)
    problem = Problem(table, split)
    policies = [agent.under_mean_budgets(), *make_priced_baselines(problem, budgets_ms)]
    assert [policy.name for policy in policies] == ["controller", "latency_only", *EXPERTS]
    mixed, _ = StaticMix.fit(table, split.fitted, budgets_ms).expected(problem, test)
    # baselines that look at the request are priced out of fold
    for policy in policies:
        accuracy, cost = policy.mixture(problem, test).expected(problem, test)
        assert (policy.values_ms.diff() >= 0).all()
        assert cost.mean(0).tolist() == pytest.approx(budgets_ms.tolist(), rel=0.25)
        assert policy.name == "latency_only" or accuracy.mean() > mixed.mean() + 0.03

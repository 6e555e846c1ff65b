"""Each rule on tables small enough to work out by hand; the fitted ones on tables where features do
or do not help."""

import functools
import math

import numpy as np
import pytest
import torch
from helpers import Always, arrays, otherwise, small_table, table_of, two_kinds

from knobwise.agents.judging.baselines import (
    BestStatic,
    LookupTable,
    Oracle,
    Random,
    make_baselines,
    static_of,
)
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.judging.policy import requests_of
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import Split

NAN = math.nan
LEARNED = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting")
NAMES = ["budget_aware_static", "best_static", "lookup_table", "latency_only", *LEARNED]
NAMES += ["random", "oracle"]

# mean accuracy .25, .75, 1 and mean latency 10, 20, 40; the middle one is slow on the second
# sample, where it is right
BY_HAND = table_of([[0.5, 0.5, 1.0], [0.0, 1.0, 1.0]], [[10.0, 10.0, 30.0], [10.0, 30.0, 50.0]])
ALL = torch.arange(2)


def chosen(policy, budgets_ms, allowed=(0, 1, 2)):
    mask = np.tile(np.isin(np.arange(3), allowed), (len(budgets_ms), 1))
    return policy.choose({}, np.array(budgets_ms), mask).tolist()


def asked(policy, table, rows, budget_ms):
    """What it chooses for these rows of a table under one budget."""
    features, mask = requests_of(table, rows)
    return policy.choose(features, np.full(len(rows), budget_ms), mask)


def utility_of(policy, table, rows):
    return float(judge(policy, table, rows, default_budgets(table)).utility.mean())


def fitted_to(table, split=None):
    budgets = default_budgets(table)
    baselines = make_baselines(table, split or table.split(), 0, budgets)
    return {baseline.name: baseline for baseline in baselines}


TELLING = two_kinds(200, shown=True)
HOLES = small_table(80, seed=1, holes=0.5)
cached = functools.cache(lambda name: fitted_to({"telling": TELLING, "holes": HOLES}[name]))


# -- the rules, by hand ----------------------------------------------------------------------------


def test_budget_aware_static_averages_profiled_cells_of_the_given_rows_only():
    accuracy = [[0.6, NAN, NAN], [0.6, 0.8, NAN], [0.0, 0.0, 1.0]]
    table = table_of(accuracy, [[5.0, NAN, NAN], [5.0, 8.0, NAN], [5.0, 8.0, 1.0]])
    static = static_of(table, ALL)
    np.testing.assert_allclose(static.mean_utility(np.array([8.0])), [[0.6, 0.8, 0.0]], rtol=1e-6)
    # the last configuration was never profiled in these rows: known to be good only to whoever
    # looks at the third
    assert chosen(static, [8.0, 7.0, 0.0]) == [1, 0, 0]
    assert chosen(static, [8.0], allowed=(2,)) == [2]


def test_best_static_is_one_configuration_for_all_budgets():
    # mean utility over budgets 10 and 30: .25, .5, .25
    best = BestStatic(BY_HAND, ALL, torch.tensor([10.0, 30.0]))
    assert chosen(best, [1.0, 50.0]) == [1, 1]
    assert chosen(best, [1.0, 50.0], allowed=(0, 2)) == [0, 0]  # equal: the faster
    assert chosen(BestStatic(BY_HAND, ALL, torch.tensor([50.0])), [1.0]) == [2]


def test_lookup_table_has_a_tolerance_and_falls_back_to_the_nearest_latency():
    lookup = LookupTable(BY_HAND, ALL)
    # mean latencies 10, 20, 40: 20 fits 19.1·1.05 = 20.055, not 19·1.05 = 19.95
    assert chosen(lookup, [19.0, 19.1, 38.0, 38.2, 1.0]) == [0, 1, 1, 2, 0]
    assert chosen(LookupTable(BY_HAND, ALL, tolerance=0.0), [19.1, 20.0]) == [0, 1]
    assert chosen(lookup, [19.0, 5.0, 100.0], allowed=(1, 2)) == [1, 1, 2]


def test_oracle_takes_the_best_utility_then_the_faster_then_the_fastest():
    table = table_of(
        [[0.5, 1.0, 1.0], [0.5, 1.0, 1.0], [0.0, 0.0, 1.0], [0.2, NAN, 1.0]],
        [[10.0, 30.0, 20.0], [10.0, 30.0, 40.0], [9.0, 8.0, 40.0], [10.0, NAN, 5.0]],
    )
    oracle = Oracle(table, torch.tensor([0, 1, 2, 3, 1]))
    mask, budgets = np.ones((5, 3), bool), np.array([30.0, 30.0, 30.0, 3.0, 5.0])
    assert oracle.choose({}, budgets, mask).tolist() == [2, 1, 1, 2, 0]
    assert oracle.choose({}, budgets).tolist() == [2, 1, 1, 2, 0]
    mask[0, 2] = mask[3, 2] = False
    assert oracle.choose({}, budgets, mask).tolist() == [1, 1, 1, 0, 0]


def test_random_is_uniform_over_the_mask():
    mask = np.tile([True, False, True, True], (6000, 1))
    counts = np.bincount(Random(seed=0).choose({}, np.ones(6000), mask), minlength=4)
    assert counts[1] == 0
    assert np.abs(counts[[0, 2, 3]] - 2000).max() < 150  # 4 standard deviations
    first, second = (Random(seed).choose({}, np.ones(99), mask[:99]) for seed in (0, 1))
    assert (first != second).any()


# -- the fitted ones -------------------------------------------------------------------------------


def test_all_baselines_are_listed_and_use_features_that_tell():
    assert list(cached("telling")) == NAMES
    test = TELLING.split().test
    got = {name: utility_of(policy, TELLING, test) for name, policy in cached("telling").items()}
    assert got["oracle"] > 0.75 > 0.6 > got["budget_aware_static"]
    # the fast one is the right one here, so that the latency alone tells which it is
    for name in ("latency_only", *LEARNED):
        assert got["oracle"] - 0.08 < got[name] <= got["oracle"], name


def test_latency_only_takes_the_mean_accuracy_for_every_sample():
    split = TELLING.split()
    latency_only = cached("telling")["latency_only"]
    predicted = latency_only.predict(arrays(TELLING, split.test), len(split.test))
    known = TELLING.accuracy[torch.cat([split.train, split.validation])]
    wanted = known.mean(0).expand_as(predicted.accuracy)
    torch.testing.assert_close(predicted.accuracy, wanted)
    # 1 to 4 times as slow: ln 4 = 1.39
    assert (predicted.log_latency - TELLING.latency_ms[split.test].log()).abs().max() < 0.3


def test_features_that_tell_nothing_do_no_harm():
    table = two_kinds(400, shown=False)
    test = table.split().test
    got = {name: utility_of(policy, table, test) for name, policy in fitted_to(table).items()}
    for name in ("latency_only", *LEARNED):
        assert abs(got[name] - got["budget_aware_static"]) < 0.1, name


def test_the_test_rows_are_not_looked_at():
    table = small_table(60)
    split = table.split()
    budgets = default_budgets(table)
    tables = (table, otherwise(table, split.test))
    for policies in zip(*(make_baselines(each, split, 0, budgets) for each in tables), strict=True):
        if policies[0].name != "oracle":
            alike = (asked(policy, table, split.test, float(budgets[2])) for policy in policies)
            assert np.array_equal(*alike), policies[0].name


def test_without_features_they_know_the_means_alone():
    table = small_table(60, features=False)
    test = table.split().test
    policies = fitted_to(table)
    for name in ("latency_only", *LEARNED):
        for budget in default_budgets(table):
            alike = asked(policies[name], table, test, float(budget))
            assert len(set(alike.tolist())) == 1  # no sample can be told from another


def test_a_latency_of_zero_is_fast_and_nothing_else():
    table = two_kinds(60, shown=True)
    table.latency_ms[:, 0] = 0.0
    # at budget 0 only the one that takes no time fits
    for name, policy in fitted_to(table).items():
        if name not in ("best_static", "random"):
            assert not asked(policy, table, table.split().test, 0.0).any(), name


@pytest.mark.parametrize("samples", [1, 7])
def test_few_samples(samples):
    table = small_table(samples + 2)
    split = Split(torch.arange(samples), torch.tensor([samples]), torch.tensor([samples + 1]))
    for policy in fitted_to(table, split).values():
        (choice,) = asked(policy, table, split.test, 10.0)
        assert 0 <= choice < 12


@pytest.mark.parametrize("name", NAMES)
def test_never_outside_the_mask_and_deterministic(name):
    rows = HOLES.split().test
    features, profiled = requests_of(HOLES, rows)
    generator = np.random.default_rng(0)
    for _ in range(9):
        mask = profiled & (generator.random((len(rows), 12)) < 0.5)
        empty = ~mask.any(1)
        mask[empty] = profiled[empty]
        request = features, generator.uniform(0, 100, len(rows)), mask
        choice = cached("holes")[name].choose(*request)
        assert mask[np.arange(len(rows)), choice].all()
        assert (choice == cached("holes")[name].choose(*request)).all()


# -- judging ---------------------------------------------------------------------------------------


def test_judged_by_hand():
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    judged = judge(Always(1), table, torch.arange(2), torch.tensor([15.0, 35.0]), rewards)
    assert judged.reward.tolist() == judged.in_time.tolist() == [[0, 1], [0, 0]]
    assert judged.feasible.tolist() == [[True, True], [False, True]]
    wanted = {"Utility": 0.25, "Reward_Mean": 0.25, "Accuracy_Mean": 0.875, "Latency_Mean": 30}
    wanted |= {"Budget_Violation_Rate": 0.75, "Satisfaction_Feasible": pytest.approx(1 / 3)}
    assert {name: value for name, value in judged.metrics().items() if name in wanted} == wanted


def test_an_answer_in_time_in_two_of_three_measurements_is_worth_two_thirds():
    repeats = torch.tensor(
        [[[10.0, 11.0, 12.0], [20.0, 22.0, 30.0]], [[5.0, NAN, NAN], [40.0, 41.0, 45.0]]]
    )
    table = table_of([[0.5, 0.75], [0.25, 1.0]], repeats)
    rows, budgets = torch.arange(2), torch.tensor([11.0, 25.0])
    judged = judge(Always(0), table, rows, budgets)
    torch.testing.assert_close(judged.in_time, torch.tensor([[2 / 3, 1], [1, 1]]))
    torch.testing.assert_close(judged.utility, torch.tensor([[1 / 3, 0.5], [0.25, 0.25]]))
    charged = judge(Always(0), table, rows, budgets, cost_ms=torch.full_like(budgets, 0.5))
    torch.testing.assert_close(charged.in_time, torch.tensor([[1 / 3, 1], [1, 1]]))
    assert charged.latency_ms.tolist() == [[11.5, 11.5], [5.5, 5.5]]
    # 0.75 in two of three measurements is worth as much as 0.5 in all, and the faster is taken
    for budget, choice in ((29.0, 0), (40.5, 1)):
        assert Oracle(table, rows).choose({}, np.full(2, budget)).tolist() == [choice] * 2


def test_a_policy_decides_for_what_its_own_cost_leaves():
    table = table_of([[0.5, 1.0]], [[10.0, 20.0]])
    row = torch.arange(1)
    static, budgets = static_of(table, row), torch.tensor([20.5])
    for cost_ms, choice, utility in ((0.0, 1, 1.0), (1.0, 0, 0.5), (30.0, 0, 0.0)):
        charged = judge(static, table, row, budgets, cost_ms=torch.tensor([cost_ms]))
        assert (charged.chosen.item(), charged.utility.item()) == (choice, utility)


def test_one_configuration_and_no_variation():
    table = table_of([[1.0]] * 12, [[5.0]] * 12, torch.arange(24.0).reshape(12, 2))
    for policy in fitted_to(table).values():
        assert not asked(policy, table, table.split().test, 5.0).any()

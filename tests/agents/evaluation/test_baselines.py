"""Each rule on tables small enough to work out by hand; the fitted ones on tables where features do
or do not help."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import words_of
from helpers import (
    Always,
    arrays,
    close,
    deployed,
    input_error,
    looked_at,
    otherwise,
    small_table,
    table_of,
    two_kinds,
)

from knobwise.agents.calibration.guard import calibrate
from knobwise.agents.calibration.ways import deadline_references
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.deployed import arrays as arrays_of
from knobwise.agents.deployed.arrays import pick
from knobwise.agents.evaluation.baselines import (
    BestStatic,
    LookupTable,
    Oracle,
    Random,
    fit_static,
    make_baselines,
)
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.policy import (
    choices_of,
    choose_each,
    inputs_of_rows,
    reads_features,
)
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.cells import unread
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import Split

NAN = math.nan
NAMES = words_of(
    "budget_aware_static best_static lookup_table",
    "latency_only ridge kernel_ridge gaussian_process knn random_forest gradient_boosting",
    "random oracle",
)
LEARNED = NAMES[3:10]
"""They predict."""

# mean accuracy .25, .75, 1 and mean latency 10, 20, 40; the middle one is slow on the second
# sample, where it is right
BY_HAND = table_of([[0.5, 0.5, 1.0], [0.0, 1.0, 1.0]], [[10.0, 10.0, 30.0], [10.0, 30.0, 50.0]])
ALL = torch.arange(2)


def chosen(policy, budgets_ms, allowed=(0, 1, 2)):
    mask = np.tile(np.isin(np.arange(3), allowed), (len(budgets_ms), 1))
    return policy.choose({}, np.array(budgets_ms), mask).tolist()


def asked(policy, table, rows, budget_ms):
    """What it chooses for these rows of a table under one budget."""
    features, mask = inputs_of_rows(Problem.from_table(table), rows)
    return policy.choose(features, np.full(len(rows), budget_ms), mask)


def fitted_to(table, split=None, budgets=None):
    budgets = default_budgets(table) if budgets is None else budgets
    problem = Problem(table, split or table.split())
    static, oracle = deadline_references(problem, budgets)
    baselines = static, *make_baselines(problem, budgets), oracle
    return {baseline.name: baseline for baseline in baselines}


def utilities_of(policies, table):
    """Return what each policy gets on the test rows, by its name."""
    about = table, table.split().test, default_budgets(table)
    return {
        name: evaluate_policy(policy, *about).utility.mean() for name, policy in policies.items()
    }


# -- the rules, by hand ----------------------------------------------------------------------------


def test_budget_aware_static_averages_profiled_cells_of_the_given_rows_only():
    accuracy = [[0.6, NAN, NAN], [0.6, 0.8, NAN], [0.0, 0.0, 1.0]]
    table = table_of(accuracy, [[5.0, NAN, NAN], [5.0, 8.0, NAN], [5.0, 8.0, 1.0]])
    static = fit_static(table, ALL)
    assert static.mean_utility(np.array([8.0]))[0] == pytest.approx([0.6, 0.8, 0.0])
    # the last configuration was never profiled in these rows: known to be good only to whoever
    # looks at the third
    assert chosen(static, [8.0, 7.0, 0.0]) == [1, 0, 0]
    assert chosen(static, [8.0], allowed=(2,)) == [2]


def test_best_static_is_one_configuration_for_all_budgets():
    # mean utility over budgets 10 and 30: .25, .5, .25
    static = fit_static(BY_HAND, ALL)
    best = BestStatic(static, torch.tensor([10.0, 30.0]))
    assert chosen(best, [1.0, 50.0]) == [1, 1]
    assert chosen(best, [1.0, 50.0], allowed=(0, 2)) == [0, 0]  # equal: the faster
    assert chosen(BestStatic(static, torch.tensor([50.0])), [1.0]) == [2]


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
    budgets = np.array([30.0, 30.0, 30.0, 3.0, 5.0])
    assert oracle.choose({}, budgets).tolist() == [2, 1, 1, 2, 0]
    mask = np.tile([True, True, False], (5, 1))
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
    table = two_kinds(200, shown=True)
    policies = fitted_to(table)
    assert list(policies) == NAMES
    got = utilities_of(policies, table)
    assert got["oracle"] > 0.75 > 0.6 > got["budget_aware_static"]
    # the fast one is the right one here, so that the latency alone tells which it is
    for name in LEARNED:
        assert got["oracle"] - 0.08 < got[name] <= got["oracle"], name
    # latency_only takes the mean accuracy for every sample
    train, validation, test = table.split()
    predicted = policies["latency_only"].predict(arrays(table, test), len(test))
    known = table.accuracy[torch.cat([train, validation])]
    close(predicted.accuracy, known.mean(0).expand_as(predicted.accuracy))
    # 1 to 4 times as slow: ln 4 = 1.39
    assert (predicted.log_latency - table.latency_ms[test].log()).abs().max() < 0.3


def test_features_that_tell_nothing_do_no_harm():
    table = two_kinds(400, shown=False)
    got = utilities_of(fitted_to(table), table)
    for name in LEARNED:
        assert abs(got[name] - got["budget_aware_static"]) < 0.1, name


def test_the_test_rows_are_not_looked_at():
    table = small_table(60)
    split = table.split()
    budgets = default_budgets(table)
    tables = table, otherwise(table, split.test)
    first, second = (fitted_to(each, split, budgets) for each in tables)
    for name in first.keys() - {"oracle"}:
        policy, other = first[name], second[name]
        about = table, split.test, float(budgets[2])
        assert (asked(policy, *about) == asked(other, *about)).all(), policy.name


def test_without_features_they_know_the_means_alone():
    table = small_table(60, features=False)
    policies = fitted_to(table)
    for name, budget in itertools.product(LEARNED, default_budgets(table).tolist()):
        alike = asked(policies[name], table, table.split().test, budget)
        assert np.ptp(alike) == 0  # no sample can be told from another


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


def test_never_outside_the_mask_and_deterministic():
    table = small_table(80, seed=1, holes=0.5)
    policies = fitted_to(table)
    rows = table.split().test
    features, profiled = inputs_of_rows(Problem.from_table(table), rows)
    generator = np.random.default_rng(0)
    for _ in range(9):
        mask = profiled & (generator.random((len(rows), 12)) < 0.5)
        empty = ~mask.any(1)
        mask[empty] = profiled[empty]
        request = features, generator.uniform(0, 100, len(rows)), mask
        for name, policy in policies.items():
            choice = policy.choose(*request)
            assert mask[np.arange(len(rows)), choice].all(), name
            assert (choice == policy.choose(*request)).all(), name


def test_one_prediction_for_all_limits_decides_as_one_for_each():
    table = small_table(80, seed=2, holes=0.5)
    rows = table.split().test
    features, mask = inputs_of_rows(Problem.from_table(table), rows)
    limits = default_budgets(table).numpy()
    at_once = set()
    for name, policy in fitted_to(table).items():
        at_once |= {name} if hasattr(policy, "choose_each") else set()
        for column, limit in zip(
            choose_each(policy, features, limits, mask).T, limits, strict=True
        ):
            alone = policy.choose(features, np.full(len(rows), limit), mask)
            assert (column == alone).all(), name
    assert {"oracle", "random", *LEARNED} <= at_once


@pytest.mark.parametrize("forms", itertools.product([False, True], repeat=3))
def test_the_best_is_found_a_block_at_a_time(forms, monkeypatch):
    one_row_of_scores, slow_of_all, masked = forms
    draws = np.random.default_rng(0)
    # few different scores, so that ties are broken
    scores = draws.integers(0, 3, (1 if one_row_of_scores else 50, 7)).astype(np.float32)
    slow = draws.permuted(np.tile(np.arange(7.0), (50, 1)), axis=1)
    slow = slow[0] if slow_of_all else slow
    mask = (draws.random((50, 7)) < 0.5) | (np.arange(7) == 3) if masked else None
    whole = pick(scores, slow, mask)
    monkeypatch.setattr(arrays_of, "CELLS_AT_ONCE", 40)
    for found in (pick(scores, slow, mask), whole):
        assert (found == [best_by_hand(scores, slow, mask, row) for row in range(len(whole))]).all()


def best_by_hand(scores, slow, mask, row):
    scores, slow = np.broadcast_to(scores, (50, 7))[row], np.broadcast_to(slow, (50, 7))[row]
    allowed = [c for c in range(7) if mask is None or mask[row, c]]
    return max(allowed, key=lambda c: (scores[c], -slow[c]))


# -- judging ---------------------------------------------------------------------------------------


def test_judged_by_hand():
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    metrics = evaluate_policy(Always(1), table, ALL, torch.tensor([15.0, 35.0])).metrics()
    wanted = {
        "Utility": 0.25,
        "Reward_Mean": (1 - 3 * 0.2) / 4,  # a miss costs .2
        "Accuracy_Mean": 0.875,
        "Latency_Mean": 30,
        "Budget_Violation_Rate": 0.75,
        "Satisfaction_Feasible": 1 / 3,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)


def test_an_answer_in_time_in_two_of_three_measurements_is_worth_two_thirds():
    repeats = torch.tensor(
        [[[10.0, 11.0, 12.0], [20.0, 22.0, 30.0]], [[5.0, NAN, NAN], [40.0, 41.0, 45.0]]]
    )
    table = table_of([[0.5, 0.75], [0.25, 1.0]], repeats)
    budgets = torch.tensor([11.0, 25.0])
    judged = evaluate_policy(Always(0), table, ALL, budgets)
    close(judged.on_time, [[2 / 3, 1], [1, 1]])
    close(judged.utility, [[1 / 3, 0.5], [0.25, 0.25]])
    charged = evaluate_policy(Always(0), table, ALL, budgets, cost_ms=torch.full_like(budgets, 0.5))
    close(charged.on_time, [[1 / 3, 1], [1, 1]])
    assert charged.latency_ms.tolist() == [[11.5, 11.5], [5.5, 5.5]]
    # 0.75 in two of three measurements is worth as much as 0.5 in all, and the faster is taken
    for budget, choice in ((29.0, 0), (40.5, 1)):
        assert Oracle(table, ALL).choose({}, np.full(2, budget)).tolist() == [choice] * 2


def test_a_policy_decides_for_what_its_own_cost_leaves():
    table = table_of([[0.5, 1.0]], [[10.0, 20.0]])
    row = ALL[:1]
    for cost_ms, choice, utility in ((0.0, 1, 1.0), (1.0, 0, 0.5), (30.0, 0, 0.0)):
        cost = torch.tensor([cost_ms])
        charged = evaluate_policy(
            fit_static(table, row), table, row, torch.tensor([20.5]), cost_ms=cost
        )
        assert (charged.chosen, charged.utility) == (choice, utility)


def test_one_configuration_and_no_variation():
    table = table_of([[1.0]] * 12, [[5.0]] * 12, torch.arange(24.0).reshape(12, 2))
    for policy in fitted_to(table).values():
        assert not asked(policy, table, table.split().test, 5.0).any()


# -- a first look that costs time, and that not every configuration continues from -----------------


def test_a_table_keeps_its_first_look_on_disk(tmp_path):
    plain = small_table(20, holes=0.2)
    table = looked_at(plain)
    table.save(tmp_path / "t.safetensors")
    again = ProfileTable.load(tmp_path / "t.safetensors")
    assert torch.equal(again.first_look_ms, table.first_look_ms)
    assert again.digest == table.digest
    assert table.digest not in (unread(table).digest, looked_at(plain, 2.0).digest)


def test_a_look_longer_than_the_answer_is_refused():
    with input_error("latency_ms"):
        unread(replace(BY_HAND, first_look_ms=BY_HAND.latency_ms + 1))


def test_decisions_without_features_do_not_pay_for_it():
    table, rows = small_table(60), torch.arange(60)
    paid, budgets = looked_at(table), default_budgets(table)
    close(default_budgets(paid), budgets)
    static, same = fit_static(paid, rows), fit_static(table, rows)
    limits = budgets.numpy()
    np.testing.assert_allclose(static.mean_utility(limits), same.mean_utility(limits))

    def best_static(table, rows):
        return BestStatic(fit_static(table, rows), budgets)

    for make in (best_static, LookupTable, Oracle):
        choices = (
            choices_of(make(each, rows), {}, limits, table.mask.numpy()) for each in (paid, table)
        )
        assert torch.equal(*choices)
    with_look, without = (evaluate_policy(same, each, rows, budgets) for each in (paid, table))
    for name in ("utility", "latency_ms", "reward", "on_time", "feasible"):
        close(getattr(with_look, name), getattr(without, name))


def test_decisions_by_features_pay_where_the_answer_does_not_continue_from_it():
    look = torch.tensor([[0.0, 2.5]])
    paid = table_of([[1.0, 1.0]], 4 + look, torch.zeros(1, 1), first_look_ms=look)
    budgets, row = torch.tensor([5.0]), ALL[:1]
    for choice, on_time, took in ((0, 1.0, 4.0), (1, 0.0, 6.5)):
        policy = Always(choice)
        assert evaluate_policy(policy, paid, row, budgets).latency_ms == 4.0
        policy.reads_features = lambda limits: np.ones(len(limits), bool)
        judged = evaluate_policy(policy, paid, row, budgets)
        assert (judged.utility, judged.latency_ms) == (on_time, took)


def test_a_guard_counts_the_look_and_falls_back_without_it():
    """A look of 30 ms makes the policy late, and static does without it."""
    table = small_table(80)
    paid, rows = looked_at(table, 30.0), torch.arange(80)
    budgets = default_budgets(paid)
    agent = deployed(paid, PolicyConfig(hidden=8))
    reads = reads_features(agent, budgets.numpy())
    assert reads.tolist() == [row["deployed"] for row in agent.calibration.guard]
    assert not reads[-1]
    static = fit_static(table, table.split().train)
    took, wanted = (
        evaluate_policy(policy, each, rows, budgets).latency_ms[:, ~reads]
        for policy, each in ((agent, paid), (static, table))
    )
    close(took, wanted)
    # static alone, calibrated by hand: the same with the look as without it
    choices = torch.full((80, len(budgets)), 11)
    first, second = (
        [
            row["utility_static"]
            for row in calibrate(Problem.from_table(each), rows, budgets, choices, choices)
        ]
        for each in (paid, table)
    )
    assert first == pytest.approx(second)
    assert max(first) > 0

"""Promises by hand, over many draws with a known truth, and on random tables."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import WITH_TEACHER, deployed, input_error, table_of, two_kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from knobwise.agents.calibration import promise as promises
from knobwise.agents.calibration.promise import (
    HELD_BACK,
    IndependentRequests,
    arrays_of,
    check_promise,
    deciding,
    in_order,
    late,
    least_share,
    passing,
    requests_needed,
    requests_of,
    trials_of,
    wanted_rows,
    with_smaller,
)
from knobwise.agents.deployed.promise import POLICY, Promise
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.policy import inputs_of_rows
from knobwise.agents.evaluation.problems import problem_of
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.rules import MeanBudget
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.divisions import hold_back
from knobwise.envs.tables.profile_table import Split

NAN = math.nan


def made(table, calibration, budgets, promise, held_out=None, deployed=None, rows=None, **options):
    """What is promised on samples of a table; candidates are put in order by `rows`, all samples by
    default."""
    rows = torch.arange(table.num_samples) if rows is None else rows
    problem = Problem.from_table(table)
    static = fit_static(table, rows)
    requests = requests_of(problem, calibration)
    about = problem, rows, requests, torch.tensor(budgets), static
    return [each.row(promise) for each in trials_of(*about, held_out, deployed, **options)]


# -- the bound -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("promise", "count"), [(0.95, 59), (0.99, 299), (0.9, 29)])
def test_so_many_requests_are_needed_if_all_are_on_time(promise, count):
    assert requests_needed(promise) == count
    assert least_share(count, count) >= promise > least_share(count - 1, count - 1)
    # .95^(1/n): a share below it would give n of n less often than 5 %
    assert least_share(count, count) == pytest.approx(0.05 ** (1 / count))


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (7, 10), (286, 300)])
def test_the_bound_is_where_as_many_hits_have_five_per_cent(hits, count):
    bound = least_share(hits, count)
    if not hits:
        assert bound == 0
        return
    assert binom.sf(hits - 1, count, bound) == pytest.approx(0.05)


def test_candidates_stand_from_the_safest_to_the_boldest_each_more_accurate():
    on_time = np.array([0.9, 1.0, 0.95, 1.0, 0.8])
    accuracy = np.array([0.5, 0.2, 0.1, 0.3, 0.5])
    latency = np.array([5.0, 1.0, 2.0, 3.0, 4.0])
    # 1 is as safe as 3 and less accurate; 2 is less accurate than 3; 4 no more than 0
    assert in_order(on_time, accuracy, latency) == [3, 0]
    # of what is never on time the fastest stands first
    never = np.zeros(5)
    assert in_order(never, accuracy, latency) == [1, 3, 4]
    assert in_order(np.array([0, 0, 0.1, 0, 0]), accuracy, latency) == [2, 1, 3, 4]
    assert passing([0.99, 0.96, 0.94, 0.97], 0.95) == 2
    assert passing([0.94, 0.99], 0.95) == 0


# -- requests --------------------------------------------------------------------------------------


def test_an_answer_is_late_by_the_measurement_that_was_drawn():
    times = torch.tensor([[[5.0, 20.0], [9.0, NAN]], [[5.0, 5.0], [NAN, NAN]]])
    table = table_of(torch.tensor([[1.0, 1.0], [1.0, NAN]]), times)
    problem = Problem.from_table(table)
    both = torch.tensor([[0, 1], [0, 1]])
    reads = torch.ones(2, dtype=torch.bool)
    for drawn, wanted in [(0.4, [[0, 0], [0, 1]]), (0.6, [[1, 0], [0, 1]])]:
        requests = IndependentRequests(
            torch.arange(2), torch.full((2,), drawn, dtype=torch.float64)
        )
        assert late(problem, requests, both, 10.0, reads).int().tolist() == wanted


def test_of_a_cluster_one_request_counts_as_often_as_it_is_large():
    sizes = torch.tensor([1, 2, 4, 4])
    names = tuple(str(i) for i in torch.arange(4).repeat_interleave(sizes).tolist())
    table = table_of(torch.ones(11, 1), torch.ones(11, 1), clusters=names)
    problem = Problem.from_table(table)
    rows = torch.arange(11)
    drawn = [requests_of(problem, rows, seed).rows for seed in range(600)]
    for each in drawn:
        of = [names[row] for row in each.tolist()]
        assert len(of) == len({*of})
        assert {"2", "3"} <= {*of}
    # a quarter of the draws have the single one, each sample equally often
    counts = torch.cat(drawn).bincount(minlength=11) / 600
    assert counts.numpy() == pytest.approx(0.25, abs=0.07)


def test_a_fifth_is_held_back_whole_clusters_and_nothing_else_changes():
    names = tuple(str(i // 4) for i in range(400))
    table = table_of(torch.ones(400, 1), torch.ones(400, 1), clusters=names)
    split = table.split(0.6, 0.2, 0)
    part, held = hold_back(table, split, HELD_BACK, 0)
    assert torch.equal(part.test, split.test)
    together = torch.cat([part.train, part.validation, held])
    assert torch.equal(together.sort().values, split.fitted.sort().values)
    assert len(held) == pytest.approx(0.2 * 320, abs=4)
    assert {names[row] for row in held}.isdisjoint(names[row] for row in part.fitted)
    alone = Split(torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    with input_error("too few"):
        hold_back(table, alone, HELD_BACK, 0)


# -- what is deployed ------------------------------------------------------------------------------


def test_the_most_accurate_that_passes_is_deployed_by_hand():
    """Of a hundred requests the first configuration is late for none, the second for one, the third
    for ten. One late request of a hundred shows .953, ten show .834."""
    latency = torch.full((100, 3), 5.0)
    latency[:1, 1] = 50.0
    latency[:10, 2] = 50.0
    accuracy = torch.tensor([0.2, 0.5, 0.8]).expand(100, 3).contiguous()
    table = table_of(accuracy, latency)
    rows = torch.arange(100)
    found = {}
    for promise in (0.8, 0.95, 0.97, 0.99):
        (row,) = made(table, rows, [10.0], promise)
        found[promise] = row["configuration"], row["kept"], row["passed"], row["requests"]
        assert row["budget_ms"] == 10
        assert row["planned_ms"] == pytest.approx(9.8)
    assert found[0.8] == (2, True, 3, 100)
    assert found[0.95] == (1, True, 2, 100)
    assert found[0.97] == (0, True, 1, 100)
    # no miss of a hundred shows .9705
    assert found[0.99] == (0, False, 0, 100)


def test_where_nothing_passes_the_promise_of_a_smaller_budget_goes_on():
    """The first configuration takes 5 ms, but of two fitted samples 30; the second 15, but 60 of ten
    of the hundred that are held back; the third 40."""
    latency = torch.tensor([[5.0, 15.0, 40.0]] * 200)
    latency[:2, 0] = 30.0
    latency[100:110, 1] = 60.0
    accuracy = torch.tensor([0.2, 0.5, 0.8]).expand(200, 3).contiguous()
    table = table_of(accuracy, latency)
    problem = Problem.from_table(table)
    fitted, held = torch.arange(200).split(100)
    static = fit_static(table, fitted)
    budgets = torch.tensor([1.0, 10.0, 20.0, 50.0])
    trials = trials_of(problem, fitted, requests_of(problem, held), budgets, static)
    rows = [each.row(0.95) for each in trials]
    # at 1 ms nothing is on time; at 20 ms the second is the safest of the fitted samples, and fails
    assert [row["configuration"] for row in rows] == [0, 0, 1, 2]
    assert [row["kept"] for row in rows] == [False, True, False, True]
    assert [row["budget_ms"] for row in deciding(rows)] == [1.0, 10.0, 10.0, 50.0]
    arrays = arrays_of(rows)
    promise = Promise(arrays, static)
    assert promise.budgets_ms.tolist() == [1.0, 10.0, 50.0]
    assert promise.trained_ms.tolist() == [1.0, 10.0, 20.0, 50.0]
    # a file of an earlier version knows no others
    del arrays["trained_ms"]
    assert Promise(arrays, static).trained_ms.tolist() == [1.0, 10.0, 50.0]
    limits = np.array([0.5, 5.0, 15.0, 25.0, 60.0])
    assert promise.shares_at(limits).tolist() == [0.0, 0.0, 0.95, 0.95, 0.95]
    undecided = np.zeros(5, np.int64)
    assert promise.with_fallback(undecided, limits, None)[2:].tolist() == [0, 0, 2]
    assert promise.promised(25.0) == (10.0, 0.95)


def test_a_budget_that_nothing_meets_does_not_decide_for_those_above_it():
    """The first configuration takes 6 to 8 ms, the second 28, and nothing is promised at 5 or 7 ms;
    at 7 ms the third is as often on time as the first, and later less often."""
    times = torch.linspace(6, 8, 101)
    latency = torch.stack([times, torch.full((101,), 28.0), times.clone()], 1)
    latency[times > 7, 2] = 60.0
    accuracy = torch.tensor([0.3, 0.9, 0.5]).expand(101, 3).contiguous()
    table = table_of(accuracy, latency)
    rows = made(table, torch.arange(101), [5.0, 7.0, 12.0], 0.9)
    assert [(row["configuration"], row["kept"]) for row in rows] == [
        (0, False),
        (2, False),
        (0, True),
    ]
    promise = Promise(arrays_of(rows), fit_static(table, torch.arange(101)))
    limits = np.array([4.0, 4.95, 6.5, 6.9, 7.0, 7.5, 11.7, 12.0])
    wanted = [0, 0, 0, 2, 2, 0, 0, 0]
    assert promise.with_fallback(np.zeros(8, np.int64), limits, None).tolist() == wanted
    assert [promise.single(limit)[0] for limit in limits.tolist()] == wanted
    mask = np.tile([False, True, True], (8, 1))
    # the second is faster on average than the third
    wanted = [1, 1, 2, 2, 2, 2, 2, 2]
    assert promise.with_fallback(np.zeros(8, np.int64), limits, mask).tolist() == wanted
    assert promise.shares_at(limits).tolist() == [0] * 7 + [0.9]


def test_a_budget_brings_smaller_ones_down_to_the_next_and_as_far_as_any_answer_is_in_time():
    table = table_of(torch.ones(3, 2), torch.tensor([[40.0, 49.0]] * 3))
    problem = Problem.from_table(table)
    rows = torch.arange(3)
    # of 100 ms the smaller ones down to 50, of which 49 are planned with; 70 is near 69
    budgets = with_smaller(problem, rows, torch.tensor([100.0]))
    assert [*budgets] == pytest.approx([50, 60, 70, 80, 85, 90, 95, 100])
    assert [*budgets.values()] == [False] * 7 + [True]
    budgets = with_smaller(problem, rows, torch.tensor([100.0, 69.0]))
    # 41.4 leaves 40.6, and 34.5 less than any answer takes
    smaller = [f * 69 for f in (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)]
    assert [*budgets] == pytest.approx([*smaller, 69, 80, 85, 90, 95, 100])
    assert [budget for budget, wanted in budgets.items() if wanted] == [69, 100]
    # what a decision takes is no time for an answer
    assert min(with_smaller(problem, rows, torch.tensor([100.0]), 25.0)) == pytest.approx(70)
    assert [*with_smaller(problem, rows, torch.tensor([20.0]))] == [20.0]


def test_smaller_budgets_have_rules_where_these_passed_and_are_no_trained_ones():
    table = table_of(torch.tensor([[0.3, 0.9]] * 100), torch.tensor([[5.0, 9.0]] * 100))
    problem = Problem.from_table(table)
    rows = torch.arange(100)
    static = fit_static(table, rows)
    budgets = with_smaller(problem, rows, torch.tensor([10.0]))
    requests = requests_of(problem, rows)
    trials = trials_of(problem, rows, requests, torch.tensor([*budgets]).double(), static)
    pairs = zip(trials, budgets.values(), strict=True)
    for promise, kept in ((0.95, [6, 7, 8, 8.5, 9, 9.5, 10]), (0.99, [10])):
        tried = [trial._replace(is_wanted=wanted).row(promise) for trial, wanted in pairs]
        assert [row["budget_ms"] for row in wanted_rows(tried)] == [10]
        deployed = Promise(arrays_of(tried), static)
        assert deployed.trained_ms.tolist() == [10]
        assert deployed.budgets_ms.tolist() == pytest.approx(kept)
        pairs = zip(trials, budgets.values(), strict=True)
    # a row of an earlier version was asked for
    del tried[-1]["is_wanted"]
    assert wanted_rows(tried) == tried[-1:]


def test_the_policy_pays_for_its_decisions_and_for_the_first_look():
    table = table_of(torch.tensor([[0.5, 1.0]] * 80), torch.tensor([[5.0, 9.7]] * 80))
    table = replace(table, first_look_ms=torch.full((80, 2), 1.0))
    rows = torch.arange(80)

    def decide(limit_ms, quantile):
        return torch.ones(80, dtype=torch.int64)

    # of 10 ms 9.8 are planned with: alone the second takes 8.7 ms, for the policy 9.7
    for cost_ms, configuration in [(0.0, 1), (0.5, 1), (1.2, 0)]:
        (row,) = made(table, rows, [10.0], 0.95, decide, decide, cost_ms=cost_ms)
        assert row["configuration"] == configuration
    assert made(table, rows, [9.0], 0.95, decide, decide)[0]["expected_accuracy"] == 1.0


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_of_a_price_nothing_is_kept_free_and_what_costs_exactly_a_budget_is_within_it(kind):
    """float32 has .0003 as .00030000001, which is above the double, and .0011 as .00109999997."""
    prices = torch.tensor([0.0003, 0.0011, 0.0023])
    accuracy = torch.tensor([0.4, 0.7, 0.9]).expand(100, 3).contiguous()
    table = table_of(accuracy, prices.expand(100, 3).contiguous(), unit="USD")
    problem = Problem.from_table(table)
    everyone = torch.arange(100)
    static = fit_static(table, everyone)
    typed = np.array([0.0003, 0.0011, 0.0023])
    about = problem, everyone, requests_of(problem, everyone), torch.tensor(typed, dtype=kind)
    rows = [each.row(0.95) for each in trials_of(*about, static)]
    assert [(row["configuration"], row["kept"]) for row in rows] == [
        (0, True),
        (1, True),
        (2, True),
    ]
    promise = Promise(arrays_of(rows), static)
    for limits in (typed, np.float32(typed).astype(float)):
        assert promise.with_fallback(np.zeros(3, np.int64), limits, None).tolist() == [0, 1, 2]
        assert [promise.single(limit)[0] for limit in limits.tolist()] == [0, 1, 2]
        assert [promise.promised(limit).share for limit in limits.tolist()] == [0.95] * 3
        assert promise.shares_at(limits).tolist() == [0.95] * 3


def test_a_request_that_limits_forbid_a_configuration_for_gets_the_safest():
    table = table_of(torch.tensor([[0.1, 0.9]] * 80), torch.full((80, 2), 5.0))
    allowed = torch.ones(80, 2, dtype=torch.bool)
    allowed[:40, 1] = False
    (row,) = made(table, torch.arange(80), [10.0], 0.95, allowed=allowed)
    assert (row["configuration"], row["kept"]) == (1, True)
    assert row["expected_accuracy"] == pytest.approx(0.5)


def test_what_was_not_measured_stays_the_choice_and_counts_as_late():
    """In service nothing is unmeasured, so that the second configuration would decide for all."""
    accuracy = torch.tensor([[0.1, 0.9]] * 100)
    latency = torch.full((100, 2), 5.0)
    for holes, rule in ((1, (1, True, 0.99)), (40, (0, True, 1.0))):
        accuracy[:holes, 1] = latency[:holes, 1] = NAN
        (row,) = made(table_of(accuracy, latency), torch.arange(100), [10.0], 0.95)
        assert (row["configuration"], row["kept"], row["on_time"]) == rule
    # .1 of all is less than .9 of sixty in a hundred: the second was tried, and failed
    assert (row["candidates"], row["passed"]) == (2, 1)


@pytest.mark.parametrize("limits", [None, {"usd": 0.002}])
def test_the_rules_that_are_tested_are_those_that_decide_in_service(limits, capfd):
    """In a table with holes, where training may choose only what was measured."""
    table = two_kinds(400, shown=True)
    holes = torch.rand(400, 3, generator=torch.Generator().manual_seed(0)) < 0.2
    holes[:, 0] = False
    # of the last configuration half of the samples cost more than 0.002
    price = torch.full((400, 3), 0.001)
    price[:, 2] = 0.002 * table.features["x"][:, 1].exp()
    table = replace(
        table,
        accuracy=table.accuracy.masked_fill(holes, NAN),
        latency_ms=table.latency_ms.masked_fill(holes, NAN),
        mask=~holes,
        costs={"usd": price.masked_fill(holes, NAN)},
    )
    split, held = hold_back(table, table.split(0.6, 0.2, 0), HELD_BACK, 0)
    problem = problem_of(table, split, BudgetConfig(limits=limits), "forbid")
    problem = replace(problem, calibration=held)
    check_promise(problem)
    assert f"{int(holes.sum())} of 1,200 cells" in capfd.readouterr().err
    agent = deployed(problem, replace(WITH_TEACHER, promise=0.5), torch.tensor([20.0, 100.0]))
    requests = requests_of(problem, held)
    features, mask = inputs_of_rows(problem, requests.rows)
    rows = [row for row in agent.calibration.promise if row["kept"]]
    assert POLICY in [row["configuration"] for row in rows]
    unmeasured = 0
    for row in rows:
        left = row["planned_ms"]
        # nothing is masked, as in service
        chosen = agent.decider.choose(features, np.full(len(mask), left))
        unmeasured += (~mask[np.arange(len(mask)), chosen]).sum()
        chosen = torch.from_numpy(chosen).unsqueeze(1)
        too_late = late(problem, requests, chosen, left, torch.ones(1, dtype=torch.bool))
        assert row["on_time"] == pytest.approx(1 - float(too_late.double().mean()))
    assert unmeasured


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(30, 400))
def test_a_higher_promise_never_deploys_a_bolder_candidate(seed, count):
    draws = np.random.default_rng(seed)
    size = draws.uniform(0, 1, 4)
    latency = np.exp(size + draws.uniform(0.1, 1) * draws.standard_normal((2 * count, 4)))
    accuracy = (draws.random((2 * count, 4)) < size).astype(np.float32)
    table = table_of(torch.tensor(accuracy), torch.tensor(latency).float())
    fitted, held = torch.arange(2 * count).split(count)

    def policy(rows):
        noise = torch.tensor(draws.standard_normal((len(rows), 4)))

        def decide(limit_ms, quantile):
            slack = math.log(limit_ms) - table.latency_ms[rows].log() + 0.3 * noise
            return (slack > max(quantile, -5) / 5).float().mul(torch.arange(1, 5)).argmax(1)

        return decide

    problem = Problem.from_table(table)
    requests = requests_of(problem, held)
    static = fit_static(table, fitted)
    rules = policy(fitted), policy(requests.rows)
    passed, kept = [], []
    about = problem, fitted, requests, torch.tensor([1.0, 2.0, 3.0]), static
    budgets = trials_of(*about, *rules)
    for promise in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999):
        rows = [each.row(promise) for each in budgets]
        passed.append([row["passed"] for row in rows])
        kept.append([(row["passed"], row["kept"], row["bound"] >= promise) for row in rows])
    assert (np.diff(passed, axis=0) <= 0).all()
    for number, is_kept, holds in np.array(kept).reshape(-1, 3).tolist():
        assert is_kept == (number > 0) == bool(holds)


@pytest.mark.parametrize(("count", "clusters"), [(59, 1), (300, 1), (300, 3)])
def test_a_promise_is_broken_no_more_often_than_its_confidence_allows(count, clusters):
    """Three configurations, of which the truth is known; those on time for .95 exactly and for a
    little less are what a careless rule would take."""
    shares = np.array([0.97, 0.95, 0.94])
    draws = np.random.default_rng(count + clusters)
    broken = []
    for _ in range(200):
        groups = count // clusters
        # all of a cluster are late together
        in_time = np.repeat(draws.random((groups, 1)) < shares, clusters, 0)
        names = tuple(str(i // clusters) for i in range(len(in_time)))
        latency = torch.tensor(np.where(in_time, 5.0, 50.0)).float()
        accuracy = torch.tensor([0.3, 0.5, 0.8]).expand(len(in_time), 3).contiguous()
        table = table_of(accuracy, latency, clusters=names)
        (row,) = made(table, torch.arange(len(in_time)), [10.0], 0.95)
        broken.append(row["kept"] and shares[row["configuration"]] < 0.95)
    assert np.mean(broken) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def policy_first(fitted, held, late_held):
    """Two single configurations and a policy, which has one of its own: of the fitted samples a
    tenth is late with either single one, and none with the policy, which is more accurate than the
    first and less than the second.

    Args:
        fitted, held: how many samples there are.
        late_held: bool [held, 3], which are late of those that are held back.
    """
    latency = torch.full((fitted + held, 3), 5.0)
    latency[: fitted // 10, :2] = 50.0
    latency[fitted // 10 : fitted // 5, 1] = 50.0
    latency[fitted:][torch.as_tensor(late_held)] = 50.0
    accuracy = torch.tensor([0.3, 0.8, 0.5]).expand(fitted + held, 3).clone()
    table = table_of(accuracy, latency)
    return table, *torch.arange(fitted + held).split([fitted, held])


def made_with_policy(table, fitted, held, promise):
    """What is promised where the policy chooses the third configuration, which no single rule is
    allowed to."""

    def decide(rows):
        return lambda limit_ms, quantile: torch.full((len(rows),), 2)

    allowed = torch.ones(table.num_samples, 3, dtype=torch.bool)
    allowed[:, 2] = False
    problem = Problem.from_table(table)
    static = fit_static(table, fitted)
    requests = requests_of(problem, held)
    about = problem, fitted, requests, torch.tensor([10.0]), static
    rules = decide(fitted), decide(requests.rows)
    (trial,) = trials_of(*about, *rules, allowed=allowed)
    (alone,) = trials_of(*about, allowed=allowed)
    return trial.row(promise), alone.row(promise)


@pytest.mark.parametrize(("held", "misses"), [(60, 1), (75, 1), (200, 20)])
def test_where_the_policy_stands_first_and_fails_static_under_the_promise_is_deployed(held, misses):
    """Of those that are held back the policy is late for some, the first configuration for none,
    and the second for half."""
    late_held = np.zeros((held, 3), bool)
    late_held[:misses, 2] = True
    late_held[::2, 1] = True
    table, *parts = policy_first(200, held, late_held)
    row, alone = made_with_policy(table, *parts, 0.95)
    assert (alone["configuration"], alone["kept"]) == (0, True)
    assert (row["configuration"], row["kept"]) == (0, True)
    assert row["on_time"] == 1
    assert row["bound"] == pytest.approx((0.05 if held == 60 else 0.025) ** (1 / held))


def test_where_the_policy_stands_first_and_passes_it_is_deployed_with_the_error_that_is_left():
    """Of 100 requests none late is enough for half of the error, one only for all of it."""
    for misses, wanted in ((0, POLICY), (1, 0)):
        late_held = np.zeros((100, 3), bool)
        late_held[:misses, 2] = True
        late_held[::2, 1] = True
        table, *parts = policy_first(200, 100, late_held)
        row, _ = made_with_policy(table, *parts, 0.95)
        assert (row["configuration"], row["kept"]) == (wanted, True)
        # all single configurations pass, and hand on their half
        late_held[:, 1] = False
        table, *parts = policy_first(200, 100, late_held)
        row, _ = made_with_policy(table, *parts, 0.95)
        assert (row["configuration"], row["kept"]) == (1, True)
        assert row["passed"] == row["candidates"]


def test_half_of_the_error_for_the_policy_and_half_for_single_ones_is_no_more_than_all_of_it():
    """All three are on time for a little less than promised, each by itself."""
    draws = np.random.default_rng(0)
    broken = []
    for _ in range(400):
        late_held = draws.random((150, 3)) >= 0.9499
        table, *parts = policy_first(200, 150, late_held)
        row, _ = made_with_policy(table, *parts, 0.95)
        broken.append(row["kept"])
    assert np.mean(broken) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_what_is_as_often_on_time_as_the_policy_stands_before_it():
    """All fitted samples are on time either way. Of those that are held back the policy is late for
    a tenth."""
    latency = torch.full((200, 2), 5.0)
    latency[100:110, 1] = 50.0
    accuracy = torch.tensor([0.5, 0.9]).expand(200, 2).contiguous()
    table = table_of(accuracy, latency)
    fitted, held = torch.arange(200).split(100)
    allowed = torch.tensor([[True, False]]).expand(200, 2).contiguous()

    def decide(limit_ms, quantile):
        return torch.ones(100, dtype=torch.int64)

    (row,) = made(table, held, [10.0], 0.95, decide, decide, rows=fitted, allowed=allowed)
    assert (row["configuration"], row["kept"], row["passed"]) == (0, True, 1)


@pytest.mark.parametrize("promise", [0.95, 0.99])
def test_forty_requests_promise_nothing(promise):
    table = table_of(torch.ones(40, 2), torch.full((40, 2), 5.0))
    (row,) = made(table, torch.arange(40), [10.0], promise)
    assert not row["kept"]


def test_a_policy_that_is_late_more_often_than_static_is_not_deployed_for_asking_for_more():
    """A policy on time for 76 %, where a single configuration is for 99 % and as accurate."""
    latency = torch.full((400, 2), 5.0)
    latency[:4, 0] = 50.0
    latency[:96, 1] = 50.0
    accuracy = torch.tensor([[0.6, 0.6]]).expand(400, 2).contiguous()
    table = table_of(accuracy, latency[torch.randperm(400, generator=torch.Generator())])

    def decide(limit_ms, quantile):
        return torch.ones(400, dtype=torch.int64)

    for promise in (0.95, 0.96):
        (row,) = made(table, torch.arange(400), [10.0], promise, decide, decide)
        assert (row["configuration"], row["kept"]) == (0, True)
        assert row["configuration"] != POLICY


def test_what_no_promise_can_be_made_for_is_refused():
    table = table_of(torch.ones(4, 2), torch.ones(4, 2))
    with input_error("deadlines"):
        check_promise(replace(Problem.from_table(table), rule=MeanBudget()))
    believed = replace(Problem.from_table(table), beliefs=object())
    with input_error("nobody measured"):
        check_promise(believed)
    assert promises.CONFIDENCE == 0.95

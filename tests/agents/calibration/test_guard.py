"""Fall-backs and reasons by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import table_of
from replayed import untrained

from knobwise.agents.calibration import guard
from knobwise.agents.calibration.guard import (
    arrays_of,
    calibrate,
    deployed_at,
    pools_budgets,
)
from knobwise.agents.deployed.calibrated import Guard
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.problem import Problem
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.profile_table import Split

NAN = math.nan
BUDGET = 10.0


def calibrated(policy, accuracy, latency_ms, static=0, cost_ms=0.0, **options):
    """The row of one budget of 10 ms; static takes one configuration for every request, the policy
    that of each request."""
    n = len(accuracy)
    table = table_of(torch.tensor(accuracy).float(), torch.tensor(latency_ms).float())
    about = Problem.from_table(table), torch.arange(n)
    judged = *about, torch.tensor([BUDGET]), torch.full((n, 1), static)
    chosen = torch.tensor(policy).unsqueeze(1)
    with mock.patch.multiple(guard, **{"CONFIDENCE": 0.8} | options):
        (row,) = calibrate(*judged, chosen, cost_ms=cost_ms)
    return row


def test_gain_share_on_time_and_reason_by_hand():
    """The policy is right and late for the first, right and on time for the others; static gets .5
    of all."""
    row = calibrated([1, 1, 1], [[0.5, 1]] * 3, [[5, 20], [5, 9], [5, 9]], CONFIDENCE=0.6)
    wanted = {"budget_ms": 10, "gain": 0.5 / 3, "utility_static": 0.5, "deployed": True}
    assert row | wanted == row
    # differences −.5, .5, .5
    assert row["gain_se"] == pytest.approx(math.sqrt(1 / 3 / 3))
    assert row["on_time"] == pytest.approx(2 / 3)
    assert row["reason"].startswith("policy")
    # less sure: static decides, which is never late
    row = calibrated([1, 1, 1], [[0.5, 1]] * 3, [[5, 20], [5, 9], [5, 9]], CONFIDENCE=0.9)
    assert (row["deployed"], row["on_time"]) == (False, 1)
    assert row["reason"].startswith("static")


def test_what_was_not_profiled_counts_as_late():
    # the last two are late anyway; the second of the others was profiled in one configuration only
    accuracy = [[0.5, 1], [0.5, NAN], [1, 1], [1, 1]]
    latency_ms = [[5, 5], [5, NAN], [20, 30], [20, 30]]
    row = calibrated([1, 0, 1, 1], accuracy, latency_ms, CONFIDENCE=0.5)
    assert (row["gain"], row["utility_static"]) == (0.5 / 4, 1 / 4)
    assert (row["on_time"], row["deployed"]) == (0.5, True)


def test_estimates_are_of_no_more_than_every_request_on_time():
    # of three requests two were measured; each stands for three, and none was expected on time
    table = table_of(torch.ones(3, 2), torch.full((3, 2), 5.0))
    late = replace(table, latency_ms=table.latency_ms * 10)
    weight = torch.tensor([[3.0, 3.0], [3.0, 3.0], [0.0, 0.0]])
    beliefs = Beliefs(measured=table, filled=table, predicted=late, weight=weight)
    known = replace(Problem.from_table(table), beliefs=beliefs)
    static = torch.zeros(3, 1, dtype=torch.int64)
    about = known, torch.arange(3), torch.tensor([BUDGET]), static
    (row,) = calibrate(*about, torch.ones_like(static))
    assert row["on_time"] == 1


def test_what_would_have_to_be_measured_is_counted():
    """Four samples, the last two of which are validated on; the policy takes the second and static
    the first configuration, of which the third sample lacks both and the fourth the second."""
    table = table_of(torch.ones(4, 3), torch.full((4, 3), 5.0))
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]).bool()
    beliefs = Beliefs(measured=table, filled=table, predicted=table, weight=mask.float())
    holes = torch.ones(4, 3).where(mask, NAN)
    facts = table_of(holes, 5 * holes)
    parts = Split(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([]).long())
    known = replace(Problem.from_table(table, parts), facts=facts, beliefs=beliefs)
    static = torch.zeros(4, 1, dtype=torch.int64)
    about = known, torch.arange(4), torch.tensor([BUDGET]), static

    def reason_in(problem):
        (row,) = calibrate(problem, *about[1:], torch.ones_like(static))
        assert not row["deployed"]  # all gain nothing
        return row["reason"]

    assert " 3 missing cells" in reason_in(known)
    # what was measured since is not counted
    assert "missing" not in reason_in(replace(known, facts=table))


def partly_measured(of_policy, of_static, budgets=1, n=60):
    """The rows of a guard that is asked about a policy that is always right and about static, which
    never is; so many choices of each were measured."""
    table = table_of(torch.tensor([[0.0, 1.0, 0.5]]).repeat(n, 1), torch.full((n, 3), 5.0))
    mask = torch.arange(n)[:, None] < torch.tensor([of_static, of_policy, n])
    holes = torch.ones(n, 3).where(mask, NAN)
    weight = mask.float() * n / mask.sum(0).clamp_min(1)
    beliefs = Beliefs(measured=table, filled=table, predicted=table, weight=weight)
    facts = table_of(table.accuracy * holes, 5 * holes)
    problem = replace(Problem.from_table(table), facts=facts, beliefs=beliefs)
    budgets_ms = BUDGET * torch.arange(1.0, budgets + 1)
    static = torch.zeros(n, budgets, dtype=torch.int64)
    about = problem, torch.arange(n), budgets_ms, static, torch.ones_like(static)
    return calibrate(*about, pooled=budgets > 1)


@pytest.mark.parametrize("budgets", [1, 3])
@pytest.mark.parametrize(
    ("of_policy", "of_static", "known"),
    [(30, 30, True), (29, 30, False), (30, 29, False), (1, 1, False), (60, 60, True)],
)
def test_static_decides_where_too_few_choices_were_measured(of_policy, of_static, known, budgets):
    for row in partly_measured(of_policy, of_static, budgets):
        assert row["deployed"] == known
        assert (row["gain"], row["gain_se"]) == ((1.0, 0.0) if known else (None, None))
        # nothing is said of static either where it was hardly measured
        static_known = of_static >= 30
        assert (row["utility_static"] is not None) == static_known
        assert (row["on_time"] is not None) == (known or static_known)


def test_a_budget_that_is_not_known_carries_no_other_and_is_not_carried():
    gains = torch.tensor([[-0.5, 5.0]]).repeat(10, 1).double()
    clusters = torch.arange(10)
    assert deployed_at(gains, clusters, [True, False], pooled=True) == [False, False]
    assert deployed_at(gains, clusters, [True, True], pooled=True) == [False, True]


@pytest.mark.parametrize(
    ("policy", "confidence", "deployed"),
    [
        # static gets 0; mean .5 ± .289 is 1.73 standard errors, confident to 95.8 %
        ([1.0, 1.0, 0.0, 0.0], 0.95, True),
        ([1.0, 1.0, 0.0, 0.0], 0.97, False),
        ([0.0] * 4, 0.5, False),  # as good as static, which is simpler
        ([0.5] * 4, 0.999, True),  # better by the same everywhere
        ([-1.0] * 4, 0.5, False),  # worse by the same everywhere
    ],
)
def test_deployed_where_better_by_more_than_chance(policy, confidence, deployed):
    accuracy = [[max(-value, 0.0), max(value, 0.0)] for value in policy]
    row = calibrated([1] * 4, accuracy, [[5.0, 5.0]] * 4, CONFIDENCE=confidence)
    assert (row["gain"], row["deployed"]) == (sum(policy) / 4, deployed)
    static = SimpleNamespace(single=lambda limit, mask: 7)
    # the whole of the budget is planned with
    assert Guard(arrays_of([row]), static).single(BUDGET) == (None if deployed else 7, BUDGET)


@pytest.mark.parametrize(
    ("belongs", "se", "deployed"),
    [({}, 0.0393, True), ({"clusters": 5}, 0.0946, False), ({"image_ids": 5}, 0.0946, False)],
)
def test_samples_of_one_cluster_or_image_are_no_more_than_one(belongs, se, deployed):
    # the gains of six clusters of five samples; their standard deviation is .2317, and ÷ √6 .0946
    gain = torch.tensor([0.4, 0.3, -0.2, 0.1, 0.2, -0.1]).repeat_interleave(5)
    accuracy = torch.stack([torch.full((30,), 0.5), 0.5 + gain], 1)
    names = {name: tuple(str(i // size) for i in range(30)) for name, size in belongs.items()}
    table = table_of(accuracy, torch.full((30, 2), 5.0), **names)
    by_static = torch.zeros(30, 1, dtype=torch.int64)
    judged = Problem.from_table(table), torch.arange(30), torch.tensor([BUDGET]), by_static
    with mock.patch.multiple(guard, CONFIDENCE=0.95):
        (row,) = calibrate(*judged, torch.ones_like(by_static))
    assert row["gain"] == pytest.approx(0.7 / 6)
    assert row["gain_se"] == pytest.approx(se, abs=1e-4)
    assert row["deployed"] == deployed
    # two samples of one cluster show nothing
    rows = torch.tensor([0, 1])
    about = Problem.from_table(table), rows, torch.tensor([BUDGET]), by_static[:2]
    (row,) = calibrate(*about, torch.ones(2, 1, dtype=torch.int64))
    assert row["deployed"] == (not belongs)


@pytest.mark.parametrize(("cost_ms", "gain"), [(0.0, 0.5), (1.0, 0.5), (1.001, 0.0), (5.5, -0.5)])
def test_the_policy_is_charged_what_it_costs_and_static_is_not(cost_ms, gain):
    # the policy takes the second, right for all; two requests have 1 ms left, two have 5; static is
    # right for half
    latency_ms = [[10, 9], [10, 9], [10, 5], [10, 5]]
    row = calibrated([1, 1, 1, 1], [[0.5, 1.0]] * 4, latency_ms, cost_ms=cost_ms)
    assert (row["gain"], row["deployed"], row["utility_static"]) == (gain, gain > 0, 0.5)


@pytest.mark.parametrize(
    ("means", "pooled", "deployed"),
    [
        # ± 1 by turns: SE 1.054 / √10 = 1/3, of the mean as well, since all budgets turn together;
        # 80 % confidence takes .842 SE = .281
        ([0.4, 0.2, -0.2, -0.3], False, [True, False, False, False]),
        # the mean of .025 is no gain
        ([0.4, 0.2, -0.2, -0.3], True, [True, False, False, False]),
        # that of .325 is one; −.2 is not measurably worse, −.3 is
        ([1.6, 0.2, -0.2, -0.3], False, [True, False, False, False]),
        ([1.6, 0.2, -0.2, -0.3], True, [True, True, True, False]),
    ],
)
def test_pooled_it_decides_where_it_is_not_worse_if_it_is_better_over_all(means, pooled, deployed):
    turns = torch.tensor([1.0, -1.0] * 5).double()
    gains = torch.tensor(means).double() + turns.unsqueeze(1)
    assert deployed_at(gains, torch.arange(10), pooled=pooled) == deployed
    # of twice as many samples in ten clusters no more is known
    twice = torch.arange(10).repeat_interleave(2)
    assert deployed_at(gains[twice], twice, pooled=pooled) == deployed


def test_the_reason_of_a_budget_that_others_carry_by_hand():
    """Right for all within 10 ms, where static is right for none; within 20 ms for half as it is."""
    right = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]] * 5)
    table = table_of(right, torch.full((10, 4), 5.0))
    rows, budgets_ms = torch.arange(10), torch.tensor([10.0, 20.0])
    static, chosen = (torch.tensor([pair]).repeat(10, 1) for pair in ([0, 2], [1, 3]))
    about = Problem.from_table(table), rows, budgets_ms, static, chosen
    apart, pooled = (calibrate(*about, pooled=each) for each in (False, True))
    assert [row["deployed"] for row in apart] == [True, False]
    assert [row["deployed"] for row in pooled] == [True, True]
    assert apart[0] == pooled[0]
    # gains of 1 and of ± 1 by turns: 1 or 0 on average
    assert "(+0.500 ± 0.167 utility, SE)" in pooled[1]["reason"]
    assert "(+0.000 ± 0.333)" in pooled[1]["reason"]


def test_budgets_are_pooled_after_imitation_where_cells_are_missing():
    table = table_of(torch.ones(3, 2), torch.full((3, 2), 5.0))
    whole = Problem.from_table(table)
    weight = torch.ones(3, 2)
    part = replace(whole, beliefs=Beliefs(table, table, table, weight))
    assert [pools_budgets(each, imitated=True) for each in (part, whole)] == [True, False]
    assert not pools_budgets(part, imitated=False)


def test_what_is_judged_is_what_the_guard_says_of_whole_budgets():
    # a decision with its features takes 28 of 300 and of 350 ms; √(300 · 350) is 324, more than is
    # left of 350. From 315 ms on the policy is right, else the fast configuration in half of all
    n, cost_ms = 40, 28.0
    right = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(n // 2, 1)
    table = table_of(right, torch.tensor([[290.0, 315.0]]).expand(n, -1), torch.zeros(n, 1))
    budgets_ms = torch.tensor([300.0, 350.0])
    rows = torch.arange(n)
    agent = untrained(table)
    agent.calibration.static = fit_static(table, rows).arrays()
    agent.calibration.guard = [
        {"budget_ms": 300.0, "deployed": False},
        {"budget_ms": 350.0, "deployed": True},
    ]
    decider = agent.decider
    assert decider.reads_features(budgets_ms.double().numpy()).tolist() == [False, True]
    costs = torch.tensor([0.0, cost_ms])
    scores = np.array([[0.0, 1.0]] * n)
    with mock.patch.object(NumpyController, "_scores", return_value=scores):
        judged = evaluate_policy(agent, table, rows, budgets_ms, cost_ms=costs)
    # static takes the fast one, the policy the other, which is in time: 315 + 28 < 350
    assert judged.chosen.T.tolist() == [[0] * n, [1] * n]
    assert judged.utility.mean(0).tolist() == [0.5, 0.5]

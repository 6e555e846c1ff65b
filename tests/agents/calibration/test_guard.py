"""Margins, fall-backs and reasons by hand; the level over many draws."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.calibration import guard
from knobwise.agents.calibration.guard import (
    MARGINS,
    OUT_OF_REACH,
    TOO_COSTLY,
    TOO_FEW,
    arrays_of,
    calibrate,
)
from knobwise.agents.deployed.calibrated import Guard
from knobwise.agents.problem import Problem
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.profile_table import Split

NAN = math.nan
BUDGET = 10.0


def calibrated(policy, accuracy, latency_ms, static=0, cost_ms=0.0, level=0.5, **options):
    """The row of one budget of 10 ms; static takes one configuration for every request.

    The policy has for each request the configurations by the margin that each is chosen from on,
    the smallest first; or it is a function. The level is 50 %, at any cost."""
    n = len(accuracy)

    def by_margin(limit_ms):
        margin = limit_ms / (BUDGET - cost_ms) + 1e-9
        chosen = []
        for steps in policy:
            chosen.append([c for least, c in steps.items() if least <= margin][-1])
        return torch.tensor(chosen)

    table = table_of(torch.tensor(accuracy).float(), torch.tensor(latency_ms).float())
    about = Problem.from_table(table), torch.arange(n)
    judged = *about, torch.tensor([BUDGET]), torch.full((n, 1), static)
    decide = by_margin if isinstance(policy, list) else policy
    with mock.patch.multiple(guard, **{"LEVEL_COST": math.inf} | options):
        (row,) = calibrate(*judged, decide, level, cost_ms=cost_ms)
    return row


def below(margin):
    """The widest margin that is tried below this one."""
    return max(tried for tried in MARGINS if tried < margin)


def three_requests(**options):
    """The second configuration is preferred, right, and slow for the first two requests; static
    takes the first. The first request turns to it at margins below .9, the second below .8, the
    third, which meets the budget anyway, below .6."""
    steps = [{0.0: 0, 0.9: 1}, {0.0: 0, 0.8: 1}, {0.0: 0, 0.6: 1}]
    return calibrated(steps, [[0.5, 1]] * 3, [[5, 20], [5, 20], [5, 9]], **options)


def misled(late, level):
    """A policy for which caution is wrong: of 24 requests what it takes below .6, as static does,
    is slow for all but `late`; what it takes above is slow for these."""
    latency_ms = [[5, 20] if i < late else [20, 5] for i in range(24)]
    return calibrated([{0.0: 0, 0.6: 1}] * 24, [[1, 1]] * 24, latency_ms, level=level)


def costly(level_cost, static_right=0.4):
    """Two choices of the policy: right for nine of ten requests and late for the tenth, or below .9
    never late and .8 right. Static is never late. By (misses + 1) / 11 ≤ .1 none may be."""
    cells = [[0.8, 1, static_right]] * 10, [[5, 20, 5]] + [[5, 9, 5]] * 9, 2
    return calibrated([{0.0: 0, 0.9: 1}] * 10, *cells, level=0.9, LEVEL_COST=level_cost)


def uncertain(static_right, level_cost):
    """Static is late for one of ten; the policy never is, and right for eight, partly others: no
    gain is certain."""
    accuracy = [[i > 1, i < static_right] for i in range(10)]
    options = {"level": 0.9, "CONFIDENCE": 0.99, "LEVEL_COST": level_cost}
    return calibrated([{0.0: 0}] * 10, accuracy, [[5, 9]] * 9 + [[5, 20]], 1, **options)


def wavering():
    """The first request is late between .75 and .85, the second from .6 on, and one may be: at all
    wider margins one is, and they would do, if it were not for the two that are late at .8."""
    steps = [{0.0: 2, 0.75: 1, 0.85: 0}, {0.0: 1, 0.6: 0}, {0.0: 0}]
    return calibrated(steps, [[1, 1, 1]] * 3, [[5, 20, 5], [20, 5, 5], [5, 5, 5]], static=2)


KEPT = {"missed": ""}
IMPOSSIBLE = {"missed": OUT_OF_REACH}
TOO_DEAR = {"missed": TOO_COSTLY}
UNSHOWN = {"missed": TOO_FEW}
THREE = {
    "margin": below(0.9),
    "level": 0.5,
    "feasible": 3,
    "satisfaction_deployed": 1,
    "utility_static": 0.5,
    "deployed": False,
    "budget_ms": 10,
    "gain": 0,
    "gain_se": pytest.approx(math.sqrt(0.5 / 2 / 3)),  # differences 0, −.5, .5
}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        # (misses + 1) / 4 ≤ 0.5 allows one miss: with the whole budget there are two, below .9 one
        (three_requests(), KEPT | THREE),
        # (misses + 1) / 4 ≤ 0.25 allows none; three requests cannot show 80 %
        (three_requests(level=0.75), {"margin": below(0.8)}),
        (three_requests(level=0.8), {"margin": 1}),
        # a narrower margin that misses more rules out the wider ones
        (wavering(), {"margin": below(0.75)}),
        # a level that is not possible forces nothing
        (misled(3, 0.9), IMPOSSIBLE | {"margin": 1, "deployed": True}),
        # below .6 one of 24 is on time, and above 23, which (1 + 1) / 25 ≤ .1 allows: kept without
        # the caution that would break it; 95 % is not guaranteed, but not impossible either
        (misled(1, 0.9), KEPT | {"margin": 1, "satisfaction_deployed": 23 / 24}),
        (misled(1, 0.95), UNSHOWN | {"margin": 1, "satisfaction_deployed": 23 / 24}),
        # the gain over static falls from .9 − .4 to .8 − .4, by a fifth of it
        (costly(0.19), TOO_DEAR | {"margin": 1, "deployed": True, "satisfaction_deployed": 0.9}),
        (costly(0.2), KEPT | {"margin": below(0.9), "deployed": True, "satisfaction_deployed": 1}),
        # late for one of ten at the utility of static, .9, which keeps the level: the margin costs .1
        (costly(0.5, static_right=0.9), KEPT | {"margin": 1, "deployed": False}),
        # where static misses the level, no worse is enough
        (uncertain(8, 0.0), KEPT | {"deployed": True, "satisfaction_deployed": 1}),
        # the level would cost something, and nothing is gained of which it could be a share
        (uncertain(9, 0.9), TOO_DEAR | {"deployed": False, "satisfaction_deployed": 0.9}),
    ],
)
def test_margins_and_fall_backs_by_hand(row, wanted):
    assert row | wanted == row
    # in words
    assert row["reason"].startswith("policy" if row["deployed"] else "static")
    assert row["missed"] in row["reason"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.sampled_from([0.5, 0.8, 0.9, 0.95]),
    st.sampled_from([0.1, math.inf]),
)
def test_what_is_said_of_the_level_agrees_with_the_shares(seed, n, level, level_cost):
    torch.manual_seed(seed)
    accuracy, latency_ms = torch.rand(2, n, 3)
    # often late
    latency_ms = 10 * latency_ms + 20 * (latency_ms > torch.rand(1))
    cells = accuracy.tolist(), latency_ms.tolist()
    options = {"level": level, "LEVEL_COST": level_cost}
    row = calibrated(lambda limit_ms: torch.randint(3, (n,)), *cells, **options)
    count, missed = row["feasible"], row["missed"]
    if count:
        deployed = row["satisfaction_deployed"]
        assert deployed < level or missed != IMPOSSIBLE["missed"]
        assert bool(missed) == ((count * (1 - deployed) + 1) / (count + 1) > 1 - level + 1e-9)


def test_infeasible_requests_do_not_count_nor_does_what_was_not_profiled():
    # the last two are infeasible; the second of the others was profiled in one configuration only
    accuracy = [[0.5, 1], [0.5, NAN], [1, 1], [1, 1]]
    latency_ms = [[5, 5], [5, NAN], [20, 30], [20, 30]]
    steps = [{0.0: 1}, {0.0: 0}, {0.0: 1}, {0.0: 1}]
    row = calibrated(steps, accuracy, latency_ms, CONFIDENCE=0.5)
    assert (row["gain"], row["utility_static"]) == (0.5 / 4, 1 / 4)
    assert (row["feasible"], row["satisfaction_deployed"], row["deployed"]) == (2, 1, True)
    # no feasible request asks for nothing
    row = calibrated([{0.0: 0}] * 2, [[1.0]] * 2, [[20.0]] * 2)
    wanted = KEPT | {"margin": 1, "feasible": 0, "satisfaction_deployed": None}
    assert row | wanted == row


def test_estimates_promise_no_more_than_every_request_on_time():
    # of three requests two were measured; each stands for three, and none was expected on time
    table = table_of(torch.ones(3, 2), torch.full((3, 2), 5.0))
    late = replace(table, latency_ms=table.latency_ms * 10)
    weight = torch.tensor([[3.0, 3.0], [3.0, 3.0], [0.0, 0.0]])
    beliefs = Beliefs(measured=table, filled=table, predicted=late, weight=weight)
    known = replace(Problem.from_table(table), beliefs=beliefs)
    static = torch.zeros(3, 1, dtype=torch.int64)
    about = known, torch.arange(3), torch.tensor([BUDGET]), static
    (row,) = calibrate(*about, lambda limit_ms: torch.ones(3, dtype=torch.int64), 0.9)
    assert row["satisfaction_deployed"] == 1
    # three requests cannot show nine tenths, however many they seem to be
    assert row["missed"] == TOO_FEW


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
        (row,) = calibrate(problem, *about[1:], lambda limit_ms: torch.ones_like(static)[:, 0], 0.5)
        assert not row["deployed"]  # all gain nothing
        return row["reason"]

    assert " 3 missing cells" in reason_in(known)
    # what was measured since is not counted
    assert "missing" not in reason_in(replace(known, facts=table))


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
    row = calibrated([{0.0: 1}] * 4, accuracy, [[5.0, 5.0]] * 4, CONFIDENCE=confidence)
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
        (row,) = calibrate(*judged, lambda limit_ms: torch.ones_like(by_static)[:, 0], 0.5)
    assert row["gain"] == pytest.approx(0.7 / 6)
    assert row["gain_se"] == pytest.approx(se, abs=1e-4)
    assert row["deployed"] == deployed
    # two samples of one cluster show nothing
    rows = torch.tensor([0, 1])
    about = Problem.from_table(table), rows, torch.tensor([BUDGET]), by_static[:2]
    (row,) = calibrate(*about, lambda limit_ms: torch.ones(2, dtype=torch.int64), 0.5)
    assert row["deployed"] == (not belongs)


@pytest.mark.parametrize(("cost_ms", "gain"), [(0.0, 0.5), (1.0, 0.5), (1.001, 0.0), (5.5, -0.5)])
def test_the_policy_is_charged_what_it_costs_and_static_is_not(cost_ms, gain):
    # the policy takes the second, right for all; two requests have 1 ms left, two have 5; static is
    # right for half
    decide = mock.Mock(return_value=torch.tensor([1, 1, 1, 1]))
    latency_ms = [[10, 9], [10, 9], [10, 5], [10, 5]]
    row = calibrated(decide, [[0.5, 1.0]] * 4, latency_ms, cost_ms=cost_ms, level=0.01)
    assert (row["gain"], row["deployed"], row["utility_static"]) == (gain, gain > 0, 0.5)
    # and it plans with a share of what its own cost leaves
    asked = [call.args[0] for call in decide.call_args_list]
    assert asked == pytest.approx([margin * (BUDGET - cost_ms) for margin in MARGINS])


def test_the_level_holds_over_many_draws(monkeypatch):
    """Overconfident predictions: with its whole budget the policy misses a fifth of the feasible
    requests, at its margin a tenth."""
    monkeypatch.setattr(guard, "LEVEL_COST", math.inf)
    shares, size = [], torch.arange(1.0, 6.0)
    budgets_ms = torch.tensor([10.0, 60.0])

    def choices(mean, limit_ms):
        meets = torch.special.ndtr((math.log(limit_ms) - mean) / 0.3)  # the spread is .63
        return (meets * size).argmax(1)

    for _ in range(150):
        known, hidden = torch.randn(2, 700, 1)
        mean = size + 0.5 * known
        latency = (mean + 0.6 * hidden + 0.2 * torch.randn(700, 5)).exp()
        table = table_of(torch.ones(200, 5), latency[:200])
        judged = Problem.from_table(table), torch.arange(200), budgets_ms, torch.full((200, 2), 4)
        for row in calibrate(*judged, functools.partial(choices, mean[:200]), 0.9):
            budget, planned = row["budget_ms"], torch.full((500,), 4)
            if row["deployed"]:
                planned = choices(mean[200:], row["margin"] * budget)
            both = torch.stack([choices(mean[200:], budget), planned], 1)
            met = (latency[200:] <= budget).double()
            shares.append(met.gather(1, both)[met.any(1)].mean(0))
    without, kept = torch.stack(shares).reshape(150, 2, 2).unbind(2)
    error = kept.std(0) / 150**0.5
    assert (without.mean(0) < 0.85).all()
    assert (kept.mean(0) > 0.9 - 2 * error).all()
    assert (kept.mean(0) < 0.94).all()  # and not by caution alone

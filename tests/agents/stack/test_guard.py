"""Margins, fall-backs and reasons by hand; the level over many draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.agents.policy.guard import Guard
from knobwise.agents.predictors.experts import Measured
from knobwise.agents.stack.guard import MARGINS, WHEN, Decide, GuardSettings, arrays_of, calibrate

NAN = math.nan
BUDGET = 10.0
Cells = list[list[float]]
Steps = dict[float, int]
"""From a margin on, the smallest first, which configuration is chosen."""
Row = dict[str, Any]


def by_margin(requests: list[Steps], cost_ms: float = 0.0) -> Decide:
    """A policy that chooses for each request by the share of its budget that it plans with."""

    def decide(limit_ms: float) -> Tensor:
        margin = limit_ms / (BUDGET - cost_ms) + 1e-9
        chosen = [[c for least, c in steps.items() if least <= margin][-1] for steps in requests]
        return torch.tensor(chosen)

    return decide


def calibrated(
    policy: list[Steps] | Decide,
    accuracy: Cells,
    latency_ms: Cells,
    static: list[int],
    cost_ms: float = 0.0,
    **options: float,
) -> Row:
    """The row of one budget of 10 ms."""
    right, latency = torch.tensor(accuracy).float(), torch.tensor(latency_ms).float()
    cells = right, latency, latency.unsqueeze(-1), ~latency.isnan()
    measured = Measured(torch.arange(len(static)), *cells, torch.tensor([BUDGET]), [])
    guard = GuardSettings(**{"level": 0.5, "level_cost": 1.0} | options)
    decide = by_margin(policy, cost_ms) if isinstance(policy, list) else policy
    (row,) = calibrate(measured, decide, torch.tensor([static]), guard, cost_ms)
    return row


def ruling(row: Row, **expected: object) -> str:
    """The reason; fails where the row is not as expected."""
    assert {name: row[name] for name in expected} == expected
    return row["reason"]


def widest_below(margin: float) -> float:
    """The widest margin that is tried below this one."""
    return max(tried for tried in MARGINS if tried < margin)


def three_requests(**options: float) -> Row:
    """The second configuration is preferred, right, and slow for the first two requests; static
    takes the first. The first request turns to it at margins below .9, the second below .8, the
    third, which meets the budget anyway, below .6."""
    return calibrated(
        [{0.0: 0, 0.9: 1}, {0.0: 0, 0.8: 1}, {0.0: 0, 0.6: 1}],
        accuracy=[[0.5, 1]] * 3,
        latency_ms=[[5, 20], [5, 20], [5, 9]],
        static=[0, 0, 0],
        **options,
    )


def test_margins_fall_from_the_whole_budget_by_three_hundredths_each_to_half() -> None:
    assert MARGINS[:3] == (1, 0.97, pytest.approx(0.9409))
    assert len(MARGINS) == 24
    assert MARGINS[-1] == pytest.approx(0.97**23)
    assert 0.49 < MARGINS[-1] < 0.5


def test_the_widest_margin_that_keeps_the_level() -> None:
    # (misses + 1) / 4 ≤ 0.5 allows one miss: with the whole budget there are two, below .9 one
    row = three_requests()
    ruling(row, budget_ms=10, level=0.5, feasible=3, margin=widest_below(0.9))
    ruling(row, satisfaction_before=1 / 3, satisfaction_after=2 / 3)
    ruling(row, satisfaction_cautious=1, satisfaction_static=1, satisfaction_deployed=1)
    ruling(row, utility_policy=0.5, utility_static=0.5, utility_deployed=0.5)
    ruling(row, utility_unconstrained=pytest.approx(1 / 3))
    # differences 0, −.5, .5
    ruling(row, gain=0, gain_se=pytest.approx(math.sqrt(0.5 / 2 / 3)))
    ruling(row, unattainable=False, too_dear=False, deployed=False)
    comparison = "+0.000 ± 0.289 on held-out samples is not above 0 with 80% confidence"
    assert ruling(row) == f"fell back to budget-aware static: {comparison}"


def test_a_stricter_level_needs_a_narrower_margin_and_more_requests() -> None:
    # (misses + 1) / 4 ≤ 0.25 allows none
    ruling(three_requests(level=0.75), margin=widest_below(0.8), satisfaction_after=1)
    flags = {"unshown": True, "unattainable": False, "margin": 1, "satisfaction_after": 1 / 3}
    reason = ruling(three_requests(level=0.8), **flags)
    few = "3 feasible requests are too few to show 80% on time, at least 4 are needed"
    assert reason.endswith(f"; {few}")


def test_rounding_of_the_level_does_not_decide() -> None:
    # 1 − .9 is a little below .1 in floating point; nine requests without a miss are just enough
    for n, unshown in ((9, False), (8, True)):
        row = calibrated([{0.0: 0}] * n, [[1.0]] * n, [[5.0]] * n, [0] * n, level=0.9)
        ruling(row, unshown=unshown, unattainable=False)


def test_a_narrower_margin_that_misses_more_rules_out_the_wider_ones() -> None:
    # the first request is late between .75 and .85, the second from .6 on, and one may be: at all
    # wider margins one is, and they would do, if it were not for the two that are late at .8
    row = calibrated(
        [{0.0: 2, 0.75: 1, 0.85: 0}, {0.0: 1, 0.6: 0}, {0.0: 0}],
        accuracy=[[1, 1, 1]] * 3,
        latency_ms=[[5, 20, 5], [20, 5, 5], [5, 5, 5]],
        static=[2, 2, 2],
    )
    shares = {"satisfaction_before": 2 / 3, "satisfaction_after": 2 / 3}
    ruling(row, margin=widest_below(0.75), **shares, satisfaction_cautious=1)


def misled(late: int, **options: float) -> Row:
    """A policy for which caution is wrong: of 24 requests what it takes below .6, as static does,
    is slow for all but `late`; what it takes above is slow for these."""
    latency_ms: Cells = [[5, 20] if i < late else [20, 5] for i in range(24)]
    return calibrated([{0.0: 0, 0.6: 1}] * 24, [[1, 1]] * 24, latency_ms, [0] * 24, **options)


def test_an_unattainable_level_forces_nothing() -> None:
    flags = {"unattainable": True, "too_dear": False, "unshown": False}
    reason = ruling(misled(late=3, level=0.9), margin=1, deployed=True, **flags)
    assert reason.endswith(
        "; 90% on time is unattainable at this budget: at best 87.5% are (21 of 24 feasible "
        "requests, 23 are needed); a margin does not help"
    )


def test_a_level_that_only_caution_breaks_is_kept_without_it() -> None:
    # below .6 one of 24 is on time, and above 23, which (1 + 1) / 25 ≤ .1 allows
    shares = {"satisfaction_before": 23 / 24, "satisfaction_cautious": 23 / 24}
    flags = {"unattainable": False, "too_dear": False, "unshown": False}
    row = misled(late=1, level=0.9)
    reason = ruling(row, margin=1, satisfaction_static=1 / 24, **shares, **flags)
    assert "; " not in reason


def test_a_share_above_the_level_that_few_requests_do_not_guarantee_is_not_called_unattainable() -> (
    None
):
    # 23 of 24 are 95.8 %, but (1 + 1) / 25 > .05
    flags = {"unattainable": False, "too_dear": False, "unshown": True}
    reason = ruling(misled(late=1, level=0.95), margin=1, **flags)
    assert reason.endswith(
        "; too few requests to guarantee 95% on time: at best 95.8% are (23 of 24 feasible "
        "requests, 24 are needed)"
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.sampled_from([0.5, 0.8, 0.9, 0.95]),
    st.sampled_from([0.1, 1.0]),
)
def test_what_is_said_of_the_level_agrees_with_the_shares(
    seed: int, n: int, level: float, level_cost: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    accuracy, latency_ms = torch.rand(2, n, 3, generator=generator)
    often_late = latency_ms.gt(torch.rand(1, generator=generator))
    latency_ms = 10 * latency_ms + 20 * often_late

    def decide(limit_ms: float) -> Tensor:
        return torch.randint(3, (n,), generator=generator)

    cells = accuracy.tolist(), latency_ms.tolist()
    row = calibrated(decide, *cells, [0] * n, level=level, level_cost=level_cost)
    flags = [row[name] for name in ("unattainable", "too_dear", "unshown")]
    assert sum(flags) <= 1
    if row["feasible"]:
        before, after, cautious = (row[f"satisfaction_{when}"] for when in WHEN[:3])
        deployed = row["satisfaction_deployed"]
        assert cautious >= max(before, after)
        assert not (row["unattainable"] and max(cautious, deployed) >= level)
        misses = row["feasible"] * (1 - deployed)
        assert any(flags) == ((misses + 1) / (row["feasible"] + 1) > 1 - level + 1e-9)


def costly(level_cost: float, static_right: float = 0.4) -> Row:
    """Two choices of the policy: right for nine of ten requests and late for the tenth, or below .9
    never late and .8 right. Static is never late. By (misses + 1) / 11 ≤ .1 none may be."""
    return calibrated(
        [{0.0: 0, 0.9: 1}] * 10,
        accuracy=[[0.8, 1, static_right]] * 10,
        latency_ms=[[5, 20 if i == 0 else 9, 5] for i in range(10)],
        static=[2] * 10,
        level=0.9,
        level_cost=level_cost,
    )


def test_a_level_that_is_too_dear_is_not_enforced_and_nothing_is_lost_where_nothing_is_gained() -> (
    None
):
    # the gain over static falls from .9 − .4 to .8 − .4, by a fifth of it
    enforced = {"margin": widest_below(0.9), "satisfaction_deployed": 1, "too_dear": False}
    dear = {"margin": 1, "satisfaction_deployed": 0.9, "too_dear": True}
    for cost in (0.1, 0.19):
        utility = {"utility_deployed": pytest.approx(0.9)}
        ruling(costly(cost), deployed=True, unattainable=False, **dear, **utility)
    for cost in (0.2, 0.21, 1.0):
        utility = {"utility_deployed": pytest.approx(0.8)}
        ruling(costly(cost), deployed=True, unattainable=False, **enforced, **utility)
    assert ruling(costly(0.1)) == (
        "deployed: better than budget-aware static by +0.500 ± 0.100 on held-out samples; a "
        "guarantee of 90% on time would cost more than 10% of the gain over static, so there is "
        "none (90.0% on time)"
    )
    # the policy is late for one of ten at the same utility as static, .9, which keeps the level;
    # the margin costs it .1
    row = costly(0.5, static_right=0.9)
    ruling(row, margin=1, deployed=False, too_dear=False, satisfaction_deployed=1)


@pytest.mark.parametrize(
    ("static_right", "level_cost", "deployed"),
    [
        (7, 0.0, True),
        (8, 0.0, True),
        (9, 0.0, False),  # the level would cost something
        (9, 0.9, False),  # and nothing is gained of which it could be a share
        (9, 1.0, True),  # at any cost
    ],
)
def test_where_static_misses_the_level_no_worse_is_enough(
    static_right: int, level_cost: float, deployed: bool
) -> None:
    # static is late for one of ten; the policy never is, and right for eight, partly others: no
    # gain is certain
    row = calibrated(
        [{0.0: 0}] * 10,
        accuracy=[[float(i > 1), float(i < static_right)] for i in range(10)],
        latency_ms=[[5, 20 if i == 9 else 9] for i in range(10)],
        static=[1] * 10,
        level=0.9,
        confidence=0.99,
        level_cost=level_cost,
    )
    on_time = 1 if deployed else 0.9
    flags = {"better": False, "deployed": deployed, "too_dear": not deployed}
    reason = ruling(row, satisfaction_deployed=on_time, **flags)
    if deployed:
        gain = (8 - static_right) / 10
        shares = "100.0% on time, budget-aware static 90.0%"
        assert reason.startswith(f"deployed: {shares}; utility {gain:+z.3f} ± ")
        assert reason.endswith(" on held-out samples")
    else:
        dear = "a guarantee of 90% on time would cost utility, so there is none (90.0% on time)"
        assert reason.endswith(f"; {dear}")


def test_at_any_cost_static_keeps_the_level_that_no_margin_reaches() -> None:
    # the policy's configurations are late for the first or for the second request, static's never
    latency_ms: Cells = [[20 if i == 1 else 5, 20 if i == 0 else 9, 5] for i in range(10)]
    cells = [{0.0: 0, 0.8: 1}] * 10, [[1, 1, 0.4]] * 10, latency_ms, [2] * 10
    at_any_cost = calibrated(*cells, level=0.9, level_cost=1.0)
    flags = {"deployed": False, "unattainable": False, "too_dear": False}
    reason = ruling(at_any_cost, satisfaction_deployed=1, **flags)
    wanted = "it is 100.0% on time, the policy reaches 90% at no margin"
    assert reason == f"fell back to budget-aware static: {wanted}"
    dear = calibrated(*cells, level=0.9, level_cost=0.9)
    ruling(dear, deployed=True, unattainable=False, too_dear=True, margin=1)


def test_infeasible_requests_do_not_count_nor_does_what_was_not_profiled() -> None:
    # the last two are infeasible; the second of the others was profiled in one configuration only
    row = calibrated(
        [{0.0: 1}, {0.0: 0}, {0.0: 1}, {0.0: 1}],
        accuracy=[[0.5, 1], [0.5, NAN], [1, 1], [1, 1]],
        latency_ms=[[5, 5], [5, NAN], [20, 30], [20, 30]],
        static=[0, 0, 0, 0],
        confidence=0.5,
    )
    utilities = {"utility_policy": 1.5 / 4, "utility_static": 1 / 4}
    reason = ruling(row, feasible=2, satisfaction_before=1, deployed=True, **utilities)
    gain = "+0.125 ± 0.125 on held-out samples"
    assert reason == f"deployed: better than budget-aware static by {gain}"


def test_no_feasible_request_asks_for_nothing() -> None:
    row = calibrated([{0.0: 0}] * 2, [[1.0]] * 2, [[20.0]] * 2, [0, 0])
    nothing = {"margin": 1, "unattainable": False, "too_dear": False, "feasible": 0}
    reason = ruling(row, **nothing, satisfaction_before=None, satisfaction_deployed=None)
    assert reason == (
        "fell back to budget-aware static: the policy has the same utility on every held-out "
        "sample; no held-out request can meet this budget"
    )


@pytest.mark.parametrize(
    ("policy", "confidence", "deployed"),
    [
        # static gets 0; mean .5 ± .289 is 1.73 standard errors, confident to 95.8 %
        ([1.0, 1.0, 0.0, 0.0], 0.95, True),
        ([1.0, 1.0, 0.0, 0.0], 0.97, False),
        ([1.0, 0.0, 0.0, 0.0], 0.8, True),  # exactly one standard error; 80 % are .84
        ([1.0, 0.0, 0.0, 0.0], 0.9, False),
        ([1.0, 0.0, 0.0, 0.0], 0.5, True),
        ([0.0, 0.0, 0.0, 0.0], 0.5, False),  # as good as static, which is simpler
        ([0.5, 0.5, 0.5, 0.5], 0.999, True),  # better by the same everywhere
        ([-1.0, -1.0, -1.0, -1.0], 0.5, False),  # worse by the same everywhere
    ],
)
def test_deployed_where_better_by_more_than_chance(
    policy: list[float], confidence: float, deployed: bool
) -> None:
    n = len(policy)
    accuracy = [[0.0, value] for value in policy]
    cells = accuracy, [[5.0, 5.0]] * n, [0] * n
    row = calibrated([{0.0: 1}] * n, *cells, confidence=confidence)
    ruling(row, gain=sum(policy) / n, deployed=deployed)
    assert Guard(arrays_of([row])).single(BUDGET) == (1.0, deployed)


@pytest.mark.parametrize(("cost_ms", "gain"), [(0.0, 0.5), (1.0, 0.5), (1.001, 0.0), (5.5, -0.5)])
def test_the_policy_is_charged_what_it_costs_and_static_is_not(cost_ms: float, gain: float) -> None:
    # the policy takes the second, right for all; two requests have 1 ms left, two have 5; static is
    # right for half
    asked: list[float] = []

    def decide(limit_ms: float) -> Tensor:
        asked.append(limit_ms)
        return torch.ones(4, dtype=torch.int64)

    latency_ms: Cells = [[10, 9], [10, 9], [10, 5], [10, 5]]
    cells = [[0.5, 1.0]] * 4, latency_ms, [0] * 4
    row = calibrated(decide, *cells, cost_ms=cost_ms, level=0.01)
    ruling(row, gain=gain, satisfaction_static=1.0, utility_static=0.5, deployed=gain > 0)
    # and it plans with a share of what its own cost leaves
    assert asked == pytest.approx([margin * (BUDGET - cost_ms) for margin in MARGINS])


def test_a_request_belongs_to_the_nearest_calibrated_budget_in_log_ms() -> None:
    rows: list[Row] = [
        {"budget_ms": 10.0, "margin": 0.97, "deployed": True},
        {"budget_ms": 1000.0, "margin": 0.5, "deployed": False},
    ]
    guard = Guard(arrays_of(rows))
    limits = np.array([0.1, 10, 99, 101, 1000, 1e6])
    assert guard.groups(limits).tolist() == [0, 0, 0, 1, 1, 1]
    singles = [guard.single(limit) for limit in limits.tolist()]
    assert singles == [(0.97, True)] * 3 + [(0.5, False)] * 3
    assert not guard.never_falls_back


def test_the_level_holds_over_many_draws() -> None:
    """Overconfident predictions: with its whole budget the policy misses a fifth of the feasible
    requests, at its margin a tenth."""
    generator, level = torch.Generator().manual_seed(0), 0.9
    kept, before, size = [], [], torch.arange(1.0, 6.0)
    budgets_ms = torch.tensor([10.0, 60.0])

    def choices(mean: Tensor, limit_ms: float) -> Tensor:
        meets = torch.special.ndtr((math.log(limit_ms) - mean) / 0.3)  # the spread is .63
        return (meets * size).argmax(1)

    for _ in range(150):
        known, hidden = torch.randn(2, 700, 1, generator=generator)
        mean = size + 0.5 * known
        noise = torch.randn(700, 5, generator=generator)
        latency = (mean + 0.6 * hidden + 0.2 * noise).exp()
        cells = torch.ones(200, 5), latency[:200], latency[:200, :, None]
        every = torch.ones(200, 5, dtype=torch.bool)
        measured = Measured(torch.arange(200), *cells, every, budgets_ms, [])
        static = torch.full((2, 200), 4)

        def decide(limit_ms: float, mean: Tensor = mean) -> Tensor:
            return choices(mean[:200], limit_ms)

        rows = calibrate(measured, decide, static, GuardSettings(level=level, level_cost=1))
        for row in rows:
            budget = row["budget_ms"]
            planned = choices(mean[200:], row["margin"] * budget)
            planned = planned if row["deployed"] else torch.full((500,), 4)
            feasible = (latency[200:] <= budget).any(1)
            for chosen, shares in ((planned, kept), (choices(mean[200:], budget), before)):
                met = latency[200:].gather(1, chosen.unsqueeze(1)).squeeze(1) <= budget
                shares.append(float(met[feasible].double().mean()))
    means, without = torch.tensor(kept).reshape(-1, 2), torch.tensor(before).reshape(-1, 2)
    error = means.std(0) / len(means) ** 0.5
    assert (without.mean(0) < level - 0.05).all()
    assert (means.mean(0) > level - 2 * error).all()
    assert (means.mean(0) < level + 0.04).all()  # and not by caution alone

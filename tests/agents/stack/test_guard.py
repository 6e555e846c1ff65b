"""Prices, fall-backs and reasons by hand; the level over many draws."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.predictors.experts import Measured
from knobwise.agents.stack.guard import PRICES, WHEN, Guard

NAN = math.nan
ZERO = torch.zeros(1, dtype=torch.int64)
Cells = list[list[float]]


def calibrated(
    score: Cells, meets: Cells, accuracy: Cells, latency_ms: Cells, static: list[int], **settings: float
) -> Guard:
    """One budget of 10 ms."""
    scores, likely, right, latency = (torch.tensor(cells).float() for cells in (score, meets, accuracy, latency_ms))
    measured = Measured(
        torch.arange(len(static)), right, latency, latency.unsqueeze(-1), ~latency.isnan(), torch.tensor([10.0]), []
    )
    settings = {"level": 0.5, "level_cost": 1.0, **settings}
    return Guard.calibrate(
        measured, score=scores[None], meets=likely[None], static_choice=torch.tensor([static]), **settings
    )


def ruling(guard: Guard, **expected: object) -> str:
    """The reason for its only budget; fails where the budget's row is not as expected."""
    (row,) = guard.rows()
    assert {name: row[name] for name in expected} == expected
    return row["reason"]


def three_requests(**settings: float) -> Guard:
    """The second configuration is preferred, right, and slow for the first two requests; static takes the first.

    At a price κ the first request turns to the first configuration from 1 + κ ≥ 2 + .1·κ on, κ ≥ 1.11; the second from
    κ ≥ 1.43 on; the third, which meets the budget anyway, from κ ≥ 2.5 on.
    """
    return calibrated(
        score=[[1, 2]] * 3,
        meets=[[1, 0.1], [1, 0.3], [1, 0.6]],
        accuracy=[[0.5, 1]] * 3,
        latency_ms=[[5, 20], [5, 20], [5, 9]],
        static=[0, 0, 0],
        **settings,
    )


def first_price_above(least: float) -> float:
    return float(PRICES[least < PRICES][0])


def test_the_prices_rise_from_nothing_by_a_fifth_each_to_where_only_the_budget_counts() -> None:
    assert PRICES[:3].tolist() == [0, 0.05, pytest.approx(0.06)]
    assert PRICES[2:-1].div(PRICES[1:-2]).allclose(torch.tensor(1.2).double())
    assert len(PRICES) == 45
    assert PRICES[-2:].tolist() == [pytest.approx(0.05 * 1.2**42), 1e6]


def test_the_lowest_price_that_keeps_the_level() -> None:
    # (misses + 1) / 4 ≤ 0.5 allows one miss: without a price there are two, from κ = 1.11 on there is one
    guard = three_requests()
    ruling(guard, budget_ms=10, level=0.5, feasible=3, miss_price=first_price_above(1 / 0.9))
    ruling(guard, satisfaction_before=1 / 3, satisfaction_after=2 / 3, satisfaction_cautious=1, satisfaction_static=1)
    ruling(guard, utility_unconstrained=1 / 3, utility_policy=0.5, utility_static=0.5)
    ruling(guard, gain=0, gain_se=pytest.approx(math.sqrt(0.5 / 2 / 3)))  # differences 0, −.5, .5
    ruling(guard, unattainable=False, too_dear=False, deployed=False, satisfaction_deployed=1, utility_deployed=0.5)
    comparison = "+0.000 ± 0.289 on held-out samples is not above 0 with 80% confidence"
    assert ruling(guard) == f"fell back to budget-aware static: {comparison}"


def test_a_stricter_level_needs_a_higher_price_and_more_requests() -> None:
    # (misses + 1) / 4 ≤ 0.25 allows none
    ruling(three_requests(level=0.75), miss_price=first_price_above(1 / 0.7), satisfaction_after=1)
    reason = ruling(three_requests(level=0.8), unshown=True, unattainable=False, miss_price=0, satisfaction_after=1 / 3)
    assert reason.endswith("; 3 feasible requests are too few to show 80% on time, at least 4 are needed")


def test_rounding_of_the_level_does_not_decide() -> None:
    # 1 − .9 is a little below .1 in floating point; nine requests without a miss are just enough
    for n, unshown in ((9, False), (8, True)):
        guard = calibrated([[1.0]] * n, [[1.0]] * n, [[1.0]] * n, [[5.0]] * n, [0] * n, level=0.9)
        ruling(guard, unshown=unshown, unattainable=False)


def test_a_higher_price_that_misses_more_rules_out_the_lower_ones() -> None:
    # the first request is late between κ = 2.57 and κ = 3, the second up to κ = 5, and one may be: at all lower prices
    # one is, and they would do, if it were not for the two that are late at κ = 2.76
    guard = calibrated(
        score=[[3, 2.1, 0.3], [5, 0, 0], [1, 0, 0]],
        meets=[[0.05, 0.4, 1], [0, 1, 1], [1, 1, 1]],
        accuracy=[[1, 1, 1]] * 3,
        latency_ms=[[5, 20, 5], [20, 5, 5], [5, 5, 5]],
        static=[2, 2, 2],
    )
    assert 0.9 / 0.35 < first_price_above(0.9 / 0.35) < 1.8 / 0.6
    price = first_price_above(1.8 / 0.6)
    ruling(guard, miss_price=price, satisfaction_before=2 / 3, satisfaction_after=2 / 3)


def misled(late: int, **settings: float) -> Guard:
    """Predictions that say the opposite: of 24 requests what is called sure is slow for all but `late`, and static
    takes it; what is called unlikely, and preferred without a price, is slow for these."""
    latency_ms: Cells = [[5, 20] if i < late else [20, 5] for i in range(24)]
    return calibrated([[1, 2]] * 24, [[1, 0.1]] * 24, [[1, 1]] * 24, latency_ms, [0] * 24, **settings)


def test_an_unattainable_level_forces_nothing() -> None:
    reason = ruling(misled(late=3, level=0.9), unattainable=True, too_dear=False, unshown=False, miss_price=0)
    assert reason.endswith(
        "; 90% on time is unattainable at this budget: at best 87.5% are (21 of 24 feasible requests, 23 are needed); "
        "a price of a miss does not help"
    )


def test_a_level_that_only_caution_breaks_is_kept_without_it() -> None:
    # at the highest price one of 24 is on time, and without a price 23, which (1 + 1) / 25 ≤ .1 allows
    shares = {"satisfaction_before": 23 / 24, "satisfaction_cautious": 23 / 24, "satisfaction_static": 1 / 24}
    reason = ruling(
        misled(late=1, level=0.9), unattainable=False, too_dear=False, unshown=False, miss_price=0, **shares
    )
    assert "; " not in reason


def test_a_share_above_the_level_that_few_requests_do_not_guarantee_is_not_called_unattainable() -> None:
    # 23 of 24 are 95.8 %, but (1 + 1) / 25 > .05
    reason = ruling(misled(late=1, level=0.95), unattainable=False, too_dear=False, unshown=True, miss_price=0)
    assert reason.endswith(
        "; too few requests to guarantee 95% on time: at best 95.8% are (23 of 24 feasible requests, 24 are needed)"
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([0.5, 0.8, 0.9, 0.95]), st.sampled_from([0.1, 1.0]))
def test_what_is_said_of_the_level_agrees_with_the_shares(seed: int, n: int, level: float, level_cost: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    score, meets, accuracy, latency_ms = torch.rand(4, n, 3, generator=generator)
    latency_ms = 10 * latency_ms + 20 * latency_ms.gt(torch.rand(1, generator=generator))
    cells = (part.tolist() for part in (score, meets, accuracy, latency_ms))
    guard = calibrated(*cells, [0] * n, level=level, level_cost=level_cost)
    (row,) = guard.rows()
    flags = [row[name] for name in ("unattainable", "too_dear", "unshown")]
    assert sum(flags) <= 1
    if row["feasible"]:
        before, after, cautious, deployed = (row[f"satisfaction_{when}"] for when in (*WHEN[:3], "deployed"))
        assert cautious >= max(before, after)
        assert not (row["unattainable"] and max(cautious, deployed) >= level)
        misses = row["feasible"] * (1 - deployed)
        assert any(flags) == ((misses + 1) / (row["feasible"] + 1) > 1 - level + 1e-9)


def costly(level_cost: float, static_right: float = 0.4) -> Guard:
    """Two choices of the policy: right for nine of ten requests and late for the tenth, or never late and .8 right.

    Static is never late. By (misses + 1) / 11 ≤ .1 none may be.
    """
    return calibrated(
        score=[[1, 2, 0]] * 10,
        meets=[[0.9, 0.3, 0]] * 10,
        accuracy=[[0.8, 1, static_right]] * 10,
        latency_ms=[[5, 20 if i == 0 else 9, 5] for i in range(10)],
        static=[2] * 10,
        level=0.9,
        level_cost=level_cost,
    )


def test_a_level_that_is_too_dear_is_not_enforced_and_nothing_is_lost_where_nothing_is_gained() -> None:
    # κ·(.9 − .3) ≥ 1 turns all; the gain over static falls from .9 − .4 to .8 − .4, a fifth of it
    enforced = {"miss_price": first_price_above(1 / 0.6), "satisfaction_deployed": 1, "too_dear": False}
    dear = {"miss_price": 0, "satisfaction_deployed": 0.9, "too_dear": True}
    for cost, expected, right in ((0.1, dear, 0.9), (0.19, dear, 0.9), *((c, enforced, 0.8) for c in (0.2, 0.21, 1.0))):
        utility = pytest.approx(right)
        ruling(costly(cost), deployed=True, unattainable=False, utility_deployed=utility, **expected)
    assert ruling(costly(0.1)) == (
        "deployed: better than budget-aware static by +0.500 ± 0.100 on held-out samples; a guarantee of 90% on time "
        "would cost more than 10% of the gain over static, so there is none (90.0% on time)"
    )
    # the policy is late for one of ten at the same utility as static, .9, which keeps the level; the price costs it .1
    guard = costly(0.5, static_right=0.9)
    ruling(guard, miss_price=0, deployed=False, too_dear=False, satisfaction_deployed=1)


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
def test_where_static_misses_the_level_no_worse_is_enough(static_right: int, level_cost: float, deployed: bool) -> None:
    # static is late for one of ten; the policy never is, and right for eight, partly others: no gain is certain
    guard = calibrated(
        score=[[2, 1]] * 10,
        meets=[[0.9, 0.3]] * 10,
        accuracy=[[float(i > 1), float(i < static_right)] for i in range(10)],
        latency_ms=[[5, 20 if i == 9 else 9] for i in range(10)],
        static=[1] * 10,
        level=0.9,
        confidence=0.99,
        level_cost=level_cost,
    )
    on_time = 1 if deployed else 0.9
    reason = ruling(guard, better=False, deployed=deployed, too_dear=not deployed, satisfaction_deployed=on_time)
    if deployed:
        gain = (8 - static_right) / 10
        assert reason.startswith(f"deployed: 100.0% on time, budget-aware static 90.0%; utility {gain:+z.3f} ± ")
        assert reason.endswith(" on held-out samples")
    else:
        assert reason.endswith("; a guarantee of 90% on time would cost utility, so there is none (90.0% on time)")


def test_at_any_cost_static_keeps_the_level_that_no_price_reaches() -> None:
    # the policy's configurations are late for the first or for the second request, static's for none
    latency_ms: Cells = [[20 if i == 1 else 5, 20 if i == 0 else 9, 5] for i in range(10)]
    cells = [[1, 2, -9]] * 10, [[0.9, 0.3, 0.1]] * 10, [[1, 1, 0.4]] * 10, latency_ms
    at_any_cost, dear = (calibrated(*cells, [2] * 10, level=0.9, level_cost=cost) for cost in (1.0, 0.9))
    reason = ruling(at_any_cost, deployed=False, unattainable=False, too_dear=False, satisfaction_deployed=1)
    assert reason == "fell back to budget-aware static: it is 100.0% on time, the policy reaches 90% at no price"
    ruling(dear, deployed=True, unattainable=False, too_dear=True, miss_price=0)


def test_infeasible_requests_do_not_count_and_holes_are_not_chosen() -> None:
    # the last two are infeasible; the second of the others has its best score where nothing was profiled
    guard = calibrated(
        score=[[1, 2], [1, 9], [1, 2], [1, 2]],
        meets=[[1, 0.9], [1, 1], [0.2, 0.1], [0, 0]],
        accuracy=[[0.5, 1], [0.5, NAN], [1, 1], [1, 1]],
        latency_ms=[[5, 5], [5, NAN], [20, 30], [20, 30]],
        static=[0, 0, 0, 0],
        confidence=0.5,
    )
    utilities = {"utility_policy": 1.5 / 4, "utility_static": 1 / 4}
    reason = ruling(guard, feasible=2, satisfaction_before=1, deployed=True, **utilities)
    assert reason == "deployed: better than budget-aware static by +0.125 ± 0.125 on held-out samples"


def test_no_feasible_request_asks_for_nothing() -> None:
    guard = calibrated([[1.0]] * 2, [[0.5]] * 2, [[1.0]] * 2, [[20.0]] * 2, [0, 0])
    nothing = {"miss_price": 0, "unattainable": False, "too_dear": False, "feasible": 0}
    assert ruling(guard, **nothing, satisfaction_before=None, satisfaction_deployed=None) == (
        "fell back to budget-aware static: the policy has the same utility on every held-out sample; no held-out "
        "request can meet this budget"
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
def test_deployed_where_better_by_more_than_chance(policy: list[float], confidence: float, deployed: bool) -> None:
    n = len(policy)
    accuracy = [[0.0, value] for value in policy]
    guard = calibrated([[1, 2]] * n, [[1, 1]] * n, accuracy, [[5, 5]] * n, [0] * n, confidence=confidence)
    ruling(guard, gain=sum(policy) / n, deployed=deployed)
    got = guard.choose(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), torch.tensor([10.0]), torch.ones(1, 2) > 0, ZERO)
    assert got.tolist() == [int(deployed)]


@pytest.mark.parametrize(("cost_ms", "gain"), [(0.0, 0.5), (1.0, 0.5), (1.001, 0.0), (5.5, -0.5)])
def test_the_policy_is_charged_what_it_costs_and_static_is_not(cost_ms: float, gain: float) -> None:
    # the policy takes the second, right for all; two requests have 1 ms left, two have 5; static is right for half
    latency_ms = [[10, 9], [10, 9], [10, 5], [10, 5]]
    guard = calibrated([[1, 2]] * 4, [[1, 1]] * 4, [[0.5, 1]] * 4, latency_ms, [0] * 4, cost_ms=cost_ms, level=0.01)
    ruling(guard, gain=gain, satisfaction_static=1.0, utility_static=0.5, deployed=gain > 0)


def test_a_request_belongs_to_the_nearest_calibrated_budget_in_log_ms() -> None:
    guard = Guard(2)
    guard.budgets_ms[:] = torch.tensor([10.0, 1000.0])
    guard.miss[:] = torch.tensor([1.0, 4.0])
    budgets = torch.tensor([0.1, 10, 99, 101, 1000, 1e6])
    n = len(budgets)
    # 1 + .9·κ against 2 + .5·κ: from κ = 2.5 on the surer one
    score, meets = torch.tensor([[1.0, 2.0]]).expand(n, -1), torch.tensor([[0.9, 0.5]]).expand(n, -1)
    everything = torch.ones(n, 2, dtype=torch.bool)
    static = torch.full((n,), 7)
    assert guard.choose(score, meets, budgets, everything, static).tolist() == [1, 1, 1, 0, 0, 0]
    guard.deploy[1] = False
    assert guard.choose(score, meets, budgets, everything, static).tolist() == [1, 1, 1, 7, 7, 7]


def test_what_can_hardly_be_met_gets_the_likeliest_and_what_cannot_gets_static() -> None:
    guard = Guard(1)
    score = torch.tensor([[3e-9, 1e-9, 2e-9], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    meets = torch.tensor([[3e-9, 4e-9, 5e-9], [1e-20, 3e-20, 2e-20], [0, 0, 0], [9, 0, 0]])
    mask = torch.tensor([[True] * 3] * 3 + [[False, True, True]])
    static = torch.tensor([0, 0, 2, 2])
    # without a price the first request goes by its score; equal scores by the probability
    assert guard.choose(score, meets, torch.ones(4), mask, static).tolist() == [0, 1, 2, 2]
    guard.miss[:] = 1e6
    assert guard.choose(score, meets, torch.ones(4), mask, static).tolist() == [2, 1, 2, 2]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_higher_price_never_takes_what_is_less_likely_in_time(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score, meets = torch.rand(2, 20, 6, generator=generator)
    guard, everything, static = Guard(1), torch.ones(20, 6, dtype=torch.bool), torch.zeros(20, dtype=torch.int64)
    before = torch.zeros(20)
    for price in PRICES:
        guard.miss[:] = price
        chosen = guard.choose(score, meets, torch.ones(20), everything, static)
        likely = meets.gather(1, chosen.unsqueeze(1)).squeeze(1)
        assert (likely >= before).all()
        before = likely
    assert before.equal(meets.amax(1))


def test_a_fresh_guard_lets_everything_through_and_nothing_to_choose_from_is_an_error() -> None:
    guard = Guard(3)
    score, meets = torch.rand(20, 4), torch.rand(20, 4)
    got = guard.choose(score, meets, torch.rand(20), torch.ones(20, 4) > 0, torch.zeros(20, dtype=torch.int64))
    assert got.equal(score.argmax(1))
    assert guard.rows() == []
    with pytest.raises(ValueError, match="without any configuration"):
        guard.choose(score[:1], meets[:1], torch.ones(1), torch.zeros(1, 4, dtype=torch.bool), ZERO)


def test_it_travels_in_a_checkpoint(tmp_path: Path) -> None:
    guard = three_requests()
    torch.save(guard.state_dict(), tmp_path / "guard.pt")
    restored = Guard(1, level=0.5, level_cost=1)
    restored.load_state_dict(torch.load(tmp_path / "guard.pt", weights_only=True))
    assert restored.rows() == guard.rows()
    assert not list(guard.parameters())


def test_the_level_holds_over_many_draws() -> None:
    """Overconfident predictions: without a price a fifth of the feasible requests miss, with it a tenth."""
    generator, level = torch.Generator().manual_seed(0), 0.9
    kept, before, size = [], [], torch.arange(1.0, 6.0)
    for _ in range(150):
        known, hidden = torch.randn(2, 700, 1, generator=generator)
        mean = size + 0.5 * known
        latency = (mean + 0.6 * hidden + 0.2 * torch.randn(700, 5, generator=generator)).exp()
        budgets = torch.tensor([10.0, 60.0])
        meets = torch.special.ndtr((budgets.log().reshape(2, 1, 1) - mean) / 0.3)  # the spread is .63
        score = meets * size
        every = torch.ones(700, 5, dtype=torch.bool)
        measured = Measured(
            torch.arange(200), torch.ones(200, 5), latency[:200], latency[:200, :, None], every[:200], budgets, []
        )
        held_out = {"score": score[:, :200], "meets": meets[:, :200], "static_choice": torch.full((2, 200), 4)}
        guard = Guard.calibrate(measured, **held_out, level=level, level_cost=1)
        for b, budget in enumerate(budgets):
            arguments = (score[b, 200:], meets[b, 200:], budget.expand(500), every[200:], torch.full((500,), 4))
            feasible = (latency[200:] <= budget).any(1)
            for each, shares in ((guard, kept), (Guard(1), before)):
                met = latency[200:].gather(1, each.choose(*arguments).unsqueeze(1)).squeeze(1) <= budget
                shares.append(float(met[feasible].double().mean()))
    means, without = torch.tensor(kept).reshape(-1, 2), torch.tensor(before).reshape(-1, 2)
    error = means.std(0) / len(means) ** 0.5
    assert (without.mean(0) < level - 0.05).all()
    assert (means.mean(0) > level - 2 * error).all()
    assert (means.mean(0) < level + 0.04).all()  # and not by caution alone

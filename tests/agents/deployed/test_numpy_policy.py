"""The parts of a decision in NumPy, by hand."""

from math import log, nan, pi

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.deployed.arrays import log_measured
from knobwise.agents.deployed.calibrated import CalibratedMeanBudgets, Static
from knobwise.agents.evaluation.baselines import FittedStatic
from knobwise.envs.bandit.budgets import log_measured as of_tensors

# -- static ----------------------------------------------------------------------------------------


def by_hand():
    """Four samples, three configurations, of which the last was measured in two samples only, in
    one of them twice.

           accuracy      latencies              mean utility
        0  1, 0, 0, 0    10, 10, 10, 10         ¼ from 10 ms on
        1  1, 1, 0, 1    20, 30, 20, 40         ¼ from 20, ½ from 30, ¾ from 40
        2  1, –, –, 1    20 and 60, –, –, 50    ¼ from 20, ¾ from 50, 1 from 60
    """
    accuracy = np.array([[1, 1, 1], [0, 1, nan], [0, 0, nan], [0, 1, 1]])
    measurements = np.full((4, 3, 2), nan)
    latency = np.array([[10, 20, 40], [10, 30, nan], [10, 20, nan], [10, 40, 50]])
    measurements[..., 0] = latency
    measurements[0, 2] = [60, 20]
    return FittedStatic.fit(accuracy, latency, measurements)


def test_static_takes_the_best_mean_under_each_budget():
    static = by_hand()
    budgets = np.array([9.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    assert static.mean_utility(budgets).T.tolist() == [
        [0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25],
        [0, 0, 0.25, 0.5, 0.75, 0.75, 0.75],
        [0, 0, 0.25, 0.25, 0.25, 0.75, 1],
    ]
    assert static.latency_ms.tolist() == [10.0, 27.5, 45.0]
    # among equals the one with the lower mean latency; where nothing is on time the fastest of all
    assert static.choose({}, budgets).tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert static.choices.tolist() == [0, 1, 2]
    assert static.starts.tolist() == [-np.inf, 30.0, 60.0]
    # inside a mask
    mask = np.tile([True, False, True], (7, 1))
    assert static.choose({}, budgets, mask).tolist() == [0] * 5 + [2] * 2
    with pytest.raises(ValueError, match="mask"):
        static.choose({}, budgets, np.zeros((7, 3), bool))


def test_a_configuration_that_was_never_measured_is_wrong_and_as_slow_as_the_slowest():
    accuracy = np.array([[nan, 1.0, 0.0]] * 2)
    latency = np.array([[nan, 5.0, 9.0], [nan, 7.0, 9.0]])
    static = FittedStatic.fit(accuracy, latency, latency[..., None])
    assert static.latency_ms.tolist() == [9.0, 6.0, 9.0]
    # mean and standard deviation of ln ms leave out what was not measured
    assert static.log_latency.tolist() == pytest.approx([0.0, log(35) / 2, log(9)])
    assert static.spread.tolist() == pytest.approx([0.0, log(7 / 5) / 2, 0.0])
    assert static.choose({}, np.array([1.0, 6.0, 1e9])).tolist() == [1, 1, 1]


def test_what_took_no_time_counts_as_a_tenth_of_the_shortest_time():
    """As where latencies are fitted: with 0, 4 and 8 ms, ln of 0.4, 4 and 8."""
    accuracy, latency = np.ones((3, 2)), np.array([[0.0, 5.0], [4.0, 5.0], [8.0, 5.0]])
    static = FittedStatic.fit(accuracy, latency, latency[..., None])
    logs = np.log([0.4, 4.0, 8.0])
    assert static.log_latency.tolist() == pytest.approx([logs.mean(), log(5)])
    assert static.spread.tolist() == pytest.approx([logs.std(), 0.0])
    assert log_measured(latency).tolist() == of_tensors(torch.tensor(latency)).tolist()
    # the 0 itself is within any budget
    assert static.choose({}, np.array([1.0, 6.0])).tolist() == [0, 1]


def test_static_on_a_slower_machine_and_with_other_accuracies():
    static = by_hand()
    same, budgets = np.ones(3), np.array([20.0, 40.0, 60.0])
    slower = static.scaled(np.array([4.0, 2.0, 1.0]), same)
    assert slower.mean_utility(budgets)[2].tolist() == [0.25, 0.5, 1.0]
    for each in (slower, Static(slower.arrays())):
        assert each.choose({}, budgets).tolist() == [2, 0, 2]
    worse = static.scaled(same, np.array([1.0, 1.0, 0.5]))
    assert worse.mean_utility(budgets[2:]).tolist() == [[0.25, 0.75, 0.5]]
    # in single precision where nothing is lost
    assert slower.arrays()["sorted_ms"].dtype == np.float32
    assert static.scaled(pi * same, same).arrays()["sorted_ms"].dtype == np.float64


def test_what_takes_exactly_a_limit_is_within_it_in_either_precision():
    """float32 has 16.7 as 16.70000076, which a double of 16.7 does not reach."""
    times = [10.1, 16.7, 33.4]
    latency = np.tile(np.float32(times), (4, 1))
    accuracy = np.tile(np.float32([0.4, 0.7, 0.9]), (4, 1))
    static = FittedStatic.fit(accuracy, latency, latency[..., None])
    both = np.array([times, np.float32(times).tolist()]).ravel()
    wanted = [0, 1, 2, 0, 1, 2]
    everything = np.ones((6, 3), bool)
    assert [static.single(limit) for limit in both.tolist()] == wanted
    assert [static.single(limit, everything[0]) for limit in both.tolist()] == wanted
    assert static.choose({}, both).tolist() == wanted
    assert static.choose({}, both, everything).tolist() == wanted
    assert [static.on_time(limit).sum() for limit in both.tolist()] == [1, 2, 3, 1, 2, 3]
    # a drift may take a budget beyond float32
    assert static.single(1e39) == 2
    assert static.choose({}, np.array([1e39])).tolist() == [2]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    holes=st.sampled_from([0.0, 0.5]),
    shape=st.tuples(st.integers(1, 9), st.integers(2, 6)),
)
def test_the_steps_of_static_are_what_it_chooses(seed, holes, shape):
    generator = np.random.default_rng(seed)
    # few values, so that equals are many
    accuracy = generator.integers(3, size=shape) / 2
    latency = generator.integers(1, 6, size=shape).astype(float)
    hole = generator.random(shape) < holes
    samples, count = shape
    one_hot = np.arange(max(shape))
    hole[one_hot % samples, one_hot % count] = False
    accuracy[hole] = latency[hole] = nan
    static = FittedStatic.fit(accuracy, latency, latency[..., None])
    budgets = np.linspace(0.25, 6.75, 27)
    of_masks = static.choose({}, budgets, np.ones((27, count), bool)).tolist()
    assert static.choose({}, budgets).tolist() == of_masks
    assert [static.single(budget) for budget in budgets.tolist()] == of_masks
    # by the definition
    mean_ms = np.nanmean(latency, 0)
    for budget, chosen in zip(budgets, of_masks, strict=True):
        utility = np.nansum(accuracy * (latency <= budget), 0) / (~hole).sum(0)
        best = np.isclose(utility, utility.max())
        assert best[chosen]
        assert mean_ms[chosen] == pytest.approx(mean_ms[best].min())


# -- mean budgets ----------------------------------------------------------------------------------


def mean_budgets(share=0.25):
    """At 9 ms the policy decides, at 12 ms a mix of configurations 1 and 3."""
    columns = {
        "budgets_ms": [9.0, 12.0],
        "worths": [20.0, 50.0],
        "deployed": [True, False],
        "mix.first": [0, 1],
        "mix.second": [1, 3],
        "mix.share": [0.5, share],
        "mix.mean_accuracy": [0.2, 0.4, 0.7, 0.9],
        "mix.mean_cost": [5.0, 10.0, 11.0, 20.0],
    }
    mean = CalibratedMeanBudgets({name: np.array(values) for name, values in columns.items()})
    mean.start_over(1)
    return mean


def test_turns_by_hand():
    """Multiples of 0.618 modulo 1: .618, .236, .854, .472, .090, .708, .326, .944, .562, .180."""
    wanted = [1, 3, 1, 1, 3, 1, 1, 1, 1, 3]
    mean = mean_budgets()
    assert [mean.single(12.0) for _ in wanted] == [(choice, 50.0) for choice in wanted]
    assert mean.single(9.0) == (None, 20.0)
    # a mask of all is none
    mean = mean_budgets()
    assert [mean.single(12.0, np.ones(4, bool))[0] for _ in wanted] == wanted


def test_processes_of_one_request_each_keep_the_shares():
    """A quarter gets configuration 3: of 400 some 100 ± 9."""
    mean = mean_budgets()
    chosen = []
    for _ in range(400):
        mean.start_over()
        chosen.append(mean.single(12.0)[0])
    assert 60 < chosen.count(3) < 140
    # any stretch of one process keeps them closely
    chosen = [mean.single(12.0)[0] for _ in range(400)]
    assert abs(chosen.count(3) - 100) <= 3


def test_a_side_of_the_mix_that_a_mask_forbids_is_replaced():
    """By the other one; both by the best that the budget affords, or else by the cheapest."""
    mask = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]]) > 0
    own = np.zeros(5, np.int64)
    for share, wanted in ((0.0, [1, 3, 1, 2, 0]), (1.0, [3, 3, 1, 2, 0])):
        mean = mean_budgets(share)
        assert mean.with_fallback(own, np.full(5, 12.0), mask).tolist() == wanted
        assert [mean.single(12.0, may) for may in mask] == [(choice, 50.0) for choice in wanted]
        # at 9 ms nothing but configuration 0 is affordable
        mean.deployed[:] = False
        only = np.array([[False, False, True, True]])
        assert mean.with_fallback(own[:1], np.array([9.0]), only).tolist() == [2]
        assert mean.mixed(9.0, only[0]) == 2


def test_a_mean_budget_must_be_calibrated():
    mean = mean_budgets()
    assert mean.groups(np.array([12.0, 9.0, 9.0089])).tolist() == [1, 0, 0]
    assert [mean.single(budget)[1] for budget in (12.0, 11.989, 9.0)] == [50, 50, 20]
    for decide in (mean.single, lambda budget: mean.groups(np.array([9.0, budget]))):
        with pytest.raises(ValueError, match=r"11: .*9, 12"):
            decide(11.0)

"""Fronts and their hypervolume, by hand and by properties."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from knobwise.agents.judging.baselines import BestAtWorths
from knobwise.agents.serving.own_cost import EXPECTED_US
from knobwise.envs.configurations.budgets import worth_pairs
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.fronts import MARGIN, STEPS, dominated, hypervolume, judge_fronts

POINTS = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.just(3)), elements=st.floats(0.01, 0.95)
)
BOX = np.ones(3)


def test_hypervolume_by_hand() -> None:
    box = np.array([2.0, 4.0])
    assert hypervolume(np.array([[1.0, 1.0]]), box) == pytest.approx(1 * 3 / 8)
    # (1, 1) and (0, 2): the rectangles of both and the triangle that mixtures add between them
    assert hypervolume(np.array([[1.0, 1.0], [0.0, 2.0]]), box) == pytest.approx((3 + 2 + 0.5) / 8)
    assert hypervolume(np.array([[1.0, 1.0], [1.0, 5.0], [2.0, 0.0]]), box) == pytest.approx(3 / 8)
    assert hypervolume(np.array([[2.0, 1.0], [2 - 1e-12, 1.0]]), box) == 0.0


def test_three_aims_by_hand() -> None:
    assert hypervolume(np.array([[0.5, 0.5, 0.5]]), BOX) == pytest.approx(1 / 8)
    # everything above the plane x + y + z = 1: all but a tetrahedron
    assert hypervolume(np.eye(3) * (1 - 1e-7), BOX) == pytest.approx(5 / 6, abs=1e-6)


@settings(deadline=None)
@given(POINTS, st.integers(0, 2**32 - 1))
def test_mixtures_and_worse_points_add_nothing(points: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixtures = rng.dirichlet(np.ones(len(points)), 5) @ points
    worse = np.minimum(points + 0.2 * rng.random(points.shape), 0.999)
    more = np.concatenate([points, mixtures, worse])
    assert hypervolume(more, BOX) == pytest.approx(hypervolume(points, BOX), abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(POINTS, st.integers(0, 2**32 - 1))
def test_the_volume_is_the_share_of_random_points_that_a_mixture_dominates(
    points: np.ndarray, seed: int
) -> None:
    from scipy.optimize import linprog

    for target in np.random.default_rng(seed).random((8, 3)):
        mixture = linprog(np.zeros(len(points)), points.T, target, np.ones((1, len(points))), [1.0])
        slack = dominated(points, BOX).equations @ np.append(target, 1.0)
        assert abs(slack.max()) < 1e-6 or mixture.success == (slack.max() < 0)


def by_hand(samples: int = 30) -> ProfileTable:
    """Configuration 0 is fast, 1 is cheap, 2 is right, and 3 is worse than 2 in everything."""
    rows = torch.ones(samples, 1)
    accuracy = torch.tensor([[0.4, 0.4, 0.9, 0.8]]) * rows
    table = table_of(accuracy, torch.tensor([[1.0, 4.0, 4.0, 5.0]]) * rows)
    return replace(table, cost=torch.tensor([[8.0, 1.0, 8.0, 9.0]]) * rows, cost_name="price")


def test_a_table_where_all_samples_are_alike_by_hand() -> None:
    table = by_hand()
    fitted, test = torch.arange(20), torch.arange(20, 30)
    policy = BestAtWorths(
        *(values[test] for values in (table.accuracy, table.latency_ms, table.weighed_cost))
    )
    results, decisions = judge_fronts(table, fitted, test, [policy, policy], [0, 1], charge=False)
    assert results["reference_point"] == pytest.approx([MARGIN * 0.6, MARGIN * 5, MARGIN * 9])
    corners = np.array([[0.6, 1.0, 8.0], [0.6, 4.0, 1.0], [0.1, 4.0, 8.0]])
    wanted = hypervolume(corners, np.array(results["reference_point"]))
    means = {row["policy"]: row for row in results["rows"] if row["weights"] is None}
    for row in means.values():
        assert row["hypervolume"] == pytest.approx(wanted)
        assert row["hypervolume_ci95"] == pytest.approx([wanted, wanted])
        assert (row["over_static_mix"], row["gap_closed"]) == (pytest.approx(0.0, abs=1e-9), 0.0)
    worths = worth_pairs(table, STEPS)
    assert torch.tensor(results["worths"]).equal(worths)
    last = next(
        row
        for row in results["rows"]
        if row["policy"] == "static_mix" and row["weights"] == len(worths) - 1
    )
    worth_ms, worth = worths[-1].tolist()
    assert last["reward"] == pytest.approx(0.9 - 4 / worth_ms - 8 / worth)
    assert [last[name] for name in ("accuracy", "latency_ms_mean", "cost_mean")] == pytest.approx(
        [0.9, 4.0, 8.0]
    )
    assert (last["worth_ms"], last["worth_cost"]) == (worth_ms, worth)
    # a row for each policy, seed, sample and pair: two seeds of the controller
    assert len(decisions) == (2 + 1 + 1) * 10 * len(worths)
    assert decisions["score"].to_numpy() == pytest.approx(decisions["reward"].to_numpy())


def test_what_a_decision_takes_is_charged_as_time() -> None:
    table = by_hand()
    policy = BestAtWorths(
        *(values[:10] for values in (table.accuracy, table.latency_ms, table.weighed_cost))
    )
    rows = torch.arange(10)
    results, _ = judge_fronts(table, rows, rows, [policy], [0])
    free, charged = (
        next(r for r in results["rows"] if (r["policy"], r["weights"]) == (name, 0))
        for name in ("oracle", "controller")
    )
    took_ms = EXPECTED_US / 1e3
    assert charged["latency_ms_mean"] == pytest.approx(free["latency_ms_mean"] + took_ms)
    assert charged["reward"] == pytest.approx(free["reward"] - took_ms / free["worth_ms"])


def test_looking_at_the_input_dominates_more_and_the_interval_says_so() -> None:
    """Half of the samples need configuration 0, the others 1; which one is random."""
    needs = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.5
    accuracy = torch.stack([needs, ~needs], 1).float()
    table = replace(
        table_of(accuracy, torch.ones(60, 2)), cost=torch.ones(60, 2), cost_name="price"
    )
    rows = torch.arange(60)
    oracle = BestAtWorths(table.accuracy, table.latency_ms, table.weighed_cost)
    results, _ = judge_fronts(table, rows, rows, [oracle], [0], charge=False)
    row = results["rows"][0]
    assert row["policy"] == "controller"
    assert row["gap_closed"] == pytest.approx(1.0)
    assert row["over_static_mix_ci95"][0] > 0

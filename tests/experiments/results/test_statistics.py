"""The one bootstrap: against a naive one, at its limits, and for several policies at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from knobwise.experiments.results import statistics
from knobwise.experiments.results.statistics import (
    Difference,
    mean_interval,
    mean_intervals,
    resampled_means,
    score_intervals,
)


def gap(score: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[float]:
    ends: list[float] = score_intervals([(score, low, high)])[0]["gap_closed_ci95"]
    return ends


def test_means_of_draws_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [np.random.default_rng(7).random((seeds, 5)) for seeds in (3, 1, 3)]
    generator = np.random.default_rng(4)
    samples = generator.multinomial(5, [0.2] * 5, 6)
    state = generator.bit_generator.state
    expected = []
    for array in values:
        generator.bit_generator.state = state
        seeds = generator.multinomial(len(array), [1 / len(array)] * len(array), 6)
        draws = zip(samples, seeds, strict=True)
        expected.append([np.repeat(np.repeat(array, s, 0), n, 1).mean() for n, s in draws])
    np.testing.assert_allclose(resampled_means(values, draws=6, seed=4), np.array(expected).T)
    monkeypatch.setattr(statistics, "BLOCK", 10)  # two draws at a time
    np.testing.assert_allclose(resampled_means(values, draws=6, seed=4), np.array(expected).T)


def test_intervals_hold_the_mean_and_shrink_with_the_samples() -> None:
    draws, widths = np.random.default_rng(0), []
    for n in (100, 1600):
        static = draws.random(n) * 0.5
        policy = np.tile(static + 0.1 + 0.05 * draws.standard_normal(n), (3, 1))
        (found,) = score_intervals([(policy, static, static + 0.4)])
        low, high = found["gap_closed_ci95"]
        assert low < 0.25 < high or abs(low - 0.25) < 0.03
        widths.append(found["score_ci95"][1] - found["score_ci95"][0])
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.35)


def test_seeds_are_drawn_too() -> None:
    static, best = np.zeros(50), np.ones(50)
    low, high = gap(np.array([0.2, 0.5, 0.8])[:, None] * np.ones((3, 50)), static, best)
    assert low < 0.35
    assert high > 0.65
    assert gap(np.full((3, 50), 0.5), static, best) == pytest.approx([0.5, 0.5])


def test_several_intervals_come_from_the_same_draws() -> None:
    values = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
    both = mean_intervals([*values, values[0] + 0.25])
    for array, (low, high) in zip(values, both, strict=False):
        assert mean_interval(array) == pytest.approx([low, high])
        assert low < array.mean() < high
        (found,) = score_intervals([(array, np.zeros(50), np.zeros(50), array + 1)])
        assert found["score_ci95"] == pytest.approx([low, high])
        assert found["differences_ci95"][0] == pytest.approx([low + 1, high + 1])
    assert both[2] == pytest.approx([end + 0.25 for end in both[0]])
    assert mean_intervals([]) == []


def test_the_interval_of_a_difference_is_paired() -> None:
    other = np.arange(200.0)
    assert mean_interval(other + 0.25 - other) == pytest.approx([0.25, 0.25])
    # a mean of 200 values 0 or 1: .5 ± 1.96 · .5 / √200
    assert mean_interval(np.repeat([0.0, 1.0], 100)) == pytest.approx([0.43, 0.57], abs=0.01)


def test_a_mean_lies_among_its_values_in_spite_of_rounding() -> None:
    assert [mean_interval(np.ones((3, n))) for n in range(1, 60)] == [[1, 1]] * 59


def test_where_nothing_can_be_gained_nothing_was_closed() -> None:
    static = np.random.default_rng(0).random(20)
    assert gap(np.tile(static, (2, 1)), static, static) == [0, 0]
    best = static.copy()
    best[0] += 0.5  # in about a third of the draws the only sample with a gain is missing
    assert gap(best[None], static, best) == pytest.approx([1, 1])


def test_a_difference_is_read_from_a_row() -> None:
    row = {"policy": "rce", "against": "sft", "shots": 2, "difference": 0.1, "ci95": [0.05, 0.2]}
    one = Difference.from_row(row)
    assert (one.policy, one.against_policy, one.place, one.ci95, one.p) == ("rce", "sft", 2, (0.05, 0.2), None)
    assert one.sign == 1
    assert not one.nothing

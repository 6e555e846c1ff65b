"""The range of training: by hand, what it refuses of new samples, and which columns have one."""

import numpy as np
import pytest
import torch
from helpers import small_table

from knobwise.agents.calibration.ranges import fit_ranges, widened_ranges
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.envs.tables.columns import Column


def ranges(values, groups=None):
    values = np.asarray(values, np.float32)
    return widened_ranges(values, np.arange(len(values)) if groups is None else groups)


def outside(values, low, high):
    values = np.asarray(values, np.float32)
    return (values < low) | (values > high)


def test_a_range_is_widened_by_a_tenth_of_itself_or_of_its_logarithm():
    evenly = np.linspace(-2.0, 8.0, 201)
    factors = np.exp(np.linspace(np.log(10), np.log(1000), 201))
    low, high, margin = ranges(np.stack([evenly, factors], 1))
    assert margin == pytest.approx(0.1)
    assert low.tolist() == pytest.approx([-3.0, 10 / 100**0.1], rel=1e-5)
    assert high.tolist() == pytest.approx([9.0, 1000 * 100**0.1], rel=1e-5)


def test_what_never_varied_has_its_value_and_a_positive_number_is_not_0():
    draws = np.random.default_rng(0)
    # as long a tail to 0 as this has keeps its own scale, in which 0 lies near
    unit = draws.random(400)
    low, high, _ = ranges(np.stack([unit, np.full(400, 0.1), np.zeros(400)], 1))
    assert outside([[0.0, 0.1, 0.0]], low, high).tolist() == [[True, False, False]]
    rounded = [[1e-4, np.float32(0.1) * (1 + 2e-7), -0.0]]
    assert not outside(rounded, low, high).any()
    assert outside([[0.5, 0.1001, 1e-6]], low, high).tolist() == [[False, True, True]]


def test_what_is_missing_or_says_nothing_of_the_next_sample_has_no_range():
    draws = np.random.default_rng(0)
    values = draws.normal(size=(400, 4))
    values[::3, 0] = np.nan
    values[:, 1] = np.nan
    # one wild number, and a mark that few samples have
    values[7, 2] = 1e9
    values[:, 3] = draws.random(400) < 0.01
    low, high, margin = ranges(values)
    assert margin < 0.2
    assert np.isfinite(low).tolist() == np.isfinite(high).tolist() == [True, False, False, False]
    assert not outside(np.full((1, 4), np.nan), low, high).any()


def test_where_many_samples_are_alone_in_something_what_never_varied_has_no_range():
    """Of 300 marks that one in 3,000 samples has, new samples have some that no sample had."""
    draws = np.random.default_rng(0)
    marks = draws.random((300, 300)) < 1 / 3000
    low, _, _ = ranges(np.c_[draws.normal(size=300), marks])
    assert np.isfinite(low[0])
    assert not np.isfinite(low[1:]).any()


MADE = {
    "normal": lambda draws, n: draws.normal(size=(n, 65)),
    "wide": lambda draws, n: draws.normal(size=(n, 384)),
    "lognormal": lambda draws, n: np.exp(2 * draws.normal(size=(n, 65))),
    "exponential": lambda draws, n: draws.exponential(size=(n, 65)),
    "uniform": lambda draws, n: draws.random((n, 65)),
    "tailed": lambda draws, n: draws.standard_t(3, size=(n, 65)),
    "counts": lambda draws, n: draws.poisson(0.3, size=(n, 65)),
    "one": lambda draws, n: np.exp(draws.normal(size=(n, 1))),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("count", [200, 300])
def test_hardly_any_new_sample_is_outside(name, count):
    shares = []
    for seed in range(3):
        draws = np.random.default_rng(seed)
        low, high, _ = ranges(MADE[name](draws, count))
        shares.append(outside(MADE[name](draws, 4000), low, high).any(1).mean())
    assert np.median(shares) < 0.01
    assert max(shares) < 0.02


@pytest.mark.parametrize("factor", [1e-3, 1e3, 0.0])
def test_lengths_in_another_unit_or_lost_are_outside(factor):
    draws = np.random.default_rng(0)
    words = np.exp(draws.normal(4, 0.7, (300, 1))).round() + 1
    even = draws.uniform(5, 100, (300, 1))
    for lengths in (words, even):
        assert outside(factor * lengths, *ranges(lengths)[:2]).all()


def test_samples_that_belong_together_do_not_vouch_for_each_other():
    draws = np.random.default_rng(0)
    values = np.repeat(draws.normal(size=(100, 30)), 6, 0)
    _, _, apart = ranges(values)
    _, _, together = ranges(values, np.repeat(np.arange(100), 6))
    assert apart == pytest.approx(0.1)
    assert together > 0.2


def test_words_and_texts_have_no_range():
    """An unseen word has a place of its own, and the encoder says which texts are unlike."""
    rows = torch.arange(60)
    kinds = torch.eye(3)[rows % 3]
    columns = Column("tokens", None, False), Column("kind", ("a", "b"), False)
    blocks = {
        "features": torch.cat([rows.unsqueeze(1).float(), kinds], 1),
        "prompt": torch.randn(60, 2),
        "dataset": torch.eye(2)[rows % 2],
        "image": torch.randn(60, 2),
    }
    normaliser = FeatureNormaliser(blocks)
    normaliser.columns = columns
    normaliser.datasets = ["x", "y"]
    table = small_table(60, features=blocks)
    found = fit_ranges(table, rows, normaliser, ["prompt"])
    assert np.isfinite(found["low"]).tolist() == [True, *[False] * 7, True, True]
    assert np.isfinite(found["high"]).tolist() == [True, *[False] * 7, True, True]
    assert fit_ranges(table, rows, FeatureNormaliser({}), []) == {}

"""The one vector that policies and baselines read, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.common.errors import InputError

NAN = math.nan


def test_blocks_are_joined_standardised_and_clipped() -> None:
    blocks = {"a": torch.tensor([[1.0], [3.0]]), "b": torch.tensor([[10.0, 7.0], [30.0, 7.0]])}
    normaliser = FeatureNormaliser(blocks)
    assert normaliser.width == 3
    assert normaliser(blocks).tolist() == [[-1, -1, 0], [1, 1, 0]]
    # order of the fit, not of the request; mean 2 ± 1 and 20 ± 10; a column that never varied says nothing
    far = {"b": torch.tensor([[40.0, 900.0]]), "a": torch.tensor([[-100.0]])}
    assert normaliser(far).tolist() == [[-5, 2, 0]]
    assert FeatureNormaliser(blocks, clip=0.5)(blocks).tolist() == [[-0.5, -0.5, 0], [0.5, 0.5, 0]]


def test_missing_values_become_the_median_and_an_indicator() -> None:
    blocks = {"a": torch.tensor([[0.0, 1.0], [0.0, NAN], [6.0, 5.0], [NAN, 3.0]])}
    normaliser = FeatureNormaliser({"a": blocks["a"][:3]})
    # the first column is 0, 0, 6 (2 ± √8), complete where fitted; the second 1, median 1 (the lower of two), 5 (7/3)
    got = normaliser(blocks)
    assert normaliser.width == got.shape[1] == 3
    torch.testing.assert_close(got[:, 0], torch.tensor([-2.0, -2.0, 4.0, -2.0]) / math.sqrt(8))
    spread = math.sqrt((16 / 9 + 16 / 9 + 64 / 9) / 3)
    torch.testing.assert_close(got[:, 1], torch.tensor([-4 / 3, -4 / 3, 8 / 3, 2 / 3]) / spread)
    assert got[:, 2].tolist() == [0, 1, 0, 0]


def test_a_column_without_any_value_says_nothing() -> None:
    normaliser = FeatureNormaliser({"a": torch.full((3, 1), NAN)})
    assert normaliser({"a": torch.tensor([[4.0], [NAN]])}).tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_units_do_not_matter(unit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.stack([torch.randn(400, generator=generator), torch.randn(400, generator=generator).mul(2).exp()], 1)
    normaliser = FeatureNormaliser({"a": values * unit})
    assert normaliser.heavy.tolist() == [False, True]
    torch.testing.assert_close(normaliser({"a": values * unit}), FeatureNormaliser({"a": values})({"a": values}))


def test_heavy_tails_are_drawn_in() -> None:
    # ±1 many times and one 1023: the unit is 1, and sign(x)·ln(1 + |x|) gives ±ln 2 and 10·ln 2
    values = torch.tensor([1.0, -1.0] * 10 + [1023.0]).unsqueeze(1)
    drawn_in = torch.tensor([1.0, -1.0] * 10 + [10.0]) * math.log(2)
    expected = (drawn_in - drawn_in.mean()) / drawn_in.std(correction=0)
    torch.testing.assert_close(FeatureNormaliser({"a": values})({"a": values}).squeeze(1), expected)


def test_a_constant_column_is_zero_whatever_its_value() -> None:
    for value in (0.0, 0.1, 1e-12, 123456.789, -3e30):
        normaliser = FeatureNormaliser({"a": torch.full((7, 1), value)})
        assert normaliser({"a": torch.full((2, 1), value)}).tolist() == [[0], [0]]


def test_without_features_the_width_is_zero() -> None:
    normaliser = FeatureNormaliser({})
    assert normaliser.width == 0
    assert normaliser({}, 4).shape == normaliser({"unused": torch.ones(4, 2)}, 4).shape == (4, 0)


def test_a_missing_or_misshapen_block_is_named() -> None:
    normaliser = FeatureNormaliser({"image": torch.randn(5, 3)})
    with pytest.raises(InputError, match="'image' must be 3 wide, got nothing"):
        normaliser({"text": torch.randn(5, 3)})
    with pytest.raises(InputError, match="'image' must be 3 wide, got 2"):
        normaliser({"image": torch.randn(5, 2)})


def test_a_restored_one_takes_the_buffers_of_a_saved_one() -> None:
    blocks = {"a": torch.tensor([[1.0, NAN], [2.0, 5.0], [9.0, 5.0]]), "b": torch.tensor([[1.0], [1.0], [1e9]])}
    saved = FeatureNormaliser(blocks)
    restored = FeatureNormaliser.restored(saved.sizes, saved.has_missing)
    restored.load_state_dict(saved.state_dict())
    assert restored.width == saved.width
    assert torch.equal(restored(blocks), saved(blocks))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_infinity=False), min_size=2, max_size=12))
def test_what_comes_out_is_finite_and_within_the_clip(values: list[float]) -> None:
    block = {"a": torch.tensor(values).unsqueeze(1)}
    normaliser = FeatureNormaliser({"a": block["a"][: len(values) // 2]})
    got = normaliser(block)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    assert got.abs().max() <= 5

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs.errors import InputError
from knobwise.envs.joint import join_tables
from knobwise.envs.splits import divide, k_folds, leave_one_out
from knobwise.envs.table import ProfileTable, Split


def three(*sizes: int, images: bool = False) -> ProfileTable:
    tables = [replace(small_table(n, seed=i), name=f"set {i}") for i, n in enumerate(sizes)]
    if images:  # two samples an image
        tables = [replace(t, image_ids=tuple(str(i // 2) for i in range(t.num_samples))) for t in tables]
    return join_tables(tables)


def names(table: ProfileTable, rows: torch.Tensor) -> set[str]:
    return {table.dataset_names[row] for row in rows.tolist()}


def disjoint(split: Split, samples: int | None = None) -> None:
    joined = torch.cat(list(split))
    assert len(joined.unique()) == len(joined)
    if samples is not None:
        assert len(joined) == samples


def test_the_data_set_left_out_is_judged_on_and_nothing_else_is() -> None:
    table = three(40, 20, 60)
    splits = leave_one_out(table)
    assert list(splits) == ["set 0", "set 1", "set 2"]
    for name, split in splits.items():
        disjoint(split, 120)
        assert names(table, split.test) == {name}
        assert names(table, split.train) == names(table, split.validation) == {"set 0", "set 1", "set 2"} - {name}
    # a quarter of 20 and a quarter of 60
    assert len(splits["set 0"].validation) == 5 + 15


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.booleans())
def test_folds_are_a_division_and_every_data_set_is_spread_evenly(k: int, seed: int, images: bool) -> None:
    table = three(24, 60, images=images)
    splits = k_folds(table, k, seed)
    assert torch.equal(torch.cat([split.test for split in splits]).sort().values, torch.arange(84))
    for split in splits:
        disjoint(split, 84)
        for name, size in (("set 0", 24), ("set 1", 60)):
            count = sum(table.dataset_names[row] == name for row in split.test.tolist())
            assert abs(count - size / k) <= (2 if images else 1)
        if images:
            units = [{table._units[row] for row in part.tolist()} for part in split]
            assert not units[0] & units[1]
            assert not units[2] & (units[0] | units[1])


def test_the_seed_decides() -> None:
    table = three(30, 30)
    first, again, other = (k_folds(table, 3, seed)[0].test for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_settings_say_which() -> None:
    table = three(20, 20)
    assert all(map(torch.equal, divide(table, 0.5, 0.3, 2), table.split(0.5, 0.3, 2)))
    left = divide(table, leave_out="set 1")
    assert all(map(torch.equal, left, leave_one_out(table)["set 1"]))
    assert all(map(torch.equal, divide(table, seed=3, folds=4, fold=2), k_folds(table, 4, 3)[2]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"leave_out": "set 7"}, "leave_out='set 7': must be one of set 0, set 1"),
        ({"folds": 3, "fold": 3}, "fold=3: must be in 0 … 2"),
        ({"folds": 1}, "folds=1: must be at least 2"),
        ({"folds": 100}, "too few samples"),
        ({"folds": 3, "leave_out": "set 0"}, "give one of them"),
    ],
)
def test_a_mistake_is_named(words: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        divide(three(20, 20), **words)  # type: ignore[arg-type]


def test_one_data_set_cannot_be_left_out() -> None:
    with pytest.raises(InputError, match="has one data set, 'small'"):
        leave_one_out(small_table())
    with pytest.raises(InputError, match="cannot be divided into training and validation"):
        k_folds(small_table(12), 2, validation=0.0)

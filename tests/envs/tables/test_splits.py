from dataclasses import replace

import pytest
import torch
from helpers import small_beams, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import budget_rows, divide, k_folds, leave_one_out


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


def images_of(kind: str, rows: int, images: int) -> tuple[ProfileTable | BeamTable, tuple[str, ...]]:
    """A table of samples or of queries that show so many images, in turn; 0 for unknown ones."""
    names = tuple(str(i % images) for i in range(rows)) if images else ()
    if kind == "samples":
        return replace(small_table(rows), image_ids=names), names
    return replace(small_beams(rows)[0], query_images=names or ("",) * rows), names


@given(
    kind=st.sampled_from(["samples", "queries"]), rows=st.integers(12, 60), seed=st.integers(0, 99), shown=st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_split_keeps_images_together_and_rows_apart(kind: str, rows: int, seed: int, shown: bool) -> None:
    table, images = images_of(kind, rows, rows // 2 if shown else 0)
    split = table.split(seed=seed)
    assert isinstance(split, Split)
    disjoint(split, rows)
    assert all(len(part) for part in split)
    if images:
        groups = [{images[i] for i in part.tolist()} for part in split]
        assert sum(map(len, groups)) == len(set.union(*groups)) == rows // 2
    assert all(map(torch.equal, split, table.split(seed=seed)))


@pytest.mark.parametrize("kind", ["samples", "queries"])
def test_shares_that_leave_a_part_empty(kind: str) -> None:
    table, _ = images_of(kind, 20, 0)
    assert [len(part) for part in table.split()] == [12, 4, 4]
    for shares in ((0.99, 0.005), (0.0, 0.5), (0.5, 0.0), (1.0, 0.0), (0.6, 0.6)):
        with pytest.raises(InputError, match=f"leave a part of its 20 {kind}"):
            table.split(*shares)
    with pytest.raises(InputError, match=f"leave a part of its 1 {kind}"):
        images_of(kind, 20, 1)[0].split()
    # what is not judged on its own queries may be judged on other beams
    assert len(images_of("queries", 20, 0)[0].split(0.9, 0.1).test) == 0
    with pytest.raises(InputError, match="leave a part of its 20 samples"):
        images_of("samples", 20, 0)[0].split(0.9, 0.1)


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
            shown = list(zip(table.dataset_names, table.image_ids, strict=True))
            units = [{shown[row] for row in part.tolist()} for part in split]
            assert not units[0] & units[1]
            assert not units[2] & (units[0] | units[1])


def test_the_seed_decides() -> None:
    table = three(30, 30)
    first, again, other = (k_folds(table, 3, seed)[0].test for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def coco(images: tuple[str, ...], other: tuple[str, ...], same: int) -> ProfileTable:
    """Two data sets with these image ids; the first `same` samples of both have the same image features."""
    one, two = (replace(small_table(len(ids), seed=i), name=f"set {i}") for i, ids in enumerate((images, other)))
    two.features["image_features"][:same] = one.features["image_features"][:same]
    return join_tables([replace(one, image_ids=images), replace(two, image_ids=other)])


def test_what_shows_an_image_of_the_test_part_is_not_trained_on() -> None:
    ids = tuple(map(str, range(20)))
    table = coco(ids, ids, same=8)  # the other ids are alike by chance
    for left, own in leave_one_out(table).items():
        others = [row for row in range(40) if table.dataset_names[row] != left and row % 20 >= 8]
        assert torch.cat(own[:2]).sort().values.tolist() == others
        assert len(own.test) == 20
    folds = k_folds(table, 4)
    assert torch.equal(torch.cat([split.test for split in folds]).sort().values, torch.arange(40))
    for split in (*folds, divide(table)):
        judged = {row % 20 for row in split.test.tolist() if row % 20 < 8}
        assert judged.isdisjoint(row % 20 for row in torch.cat(split[:2]).tolist())
    # equal features of other images, and features that are missing, say nothing
    assert len(torch.cat(leave_one_out(coco(ids, tuple(f"x{i}" for i in ids), 20))["set 0"][:2])) == 20
    unknown = {name: torch.full_like(block, torch.nan) for name, block in table.features.items()}
    assert len(torch.cat(leave_one_out(replace(table, features=unknown))["set 0"][:2])) == 20
    with pytest.raises(InputError, match="nothing is left to fit on"):
        leave_one_out(coco(ids, ids, 20))


def test_settings_say_which() -> None:
    table = three(20, 20)
    assert all(map(torch.equal, divide(table, 0.5, 0.3, 2), table.split(0.5, 0.3, 2)))
    left = divide(table, leave_out="set 1")
    assert all(map(torch.equal, left, leave_one_out(table)["set 1"]))
    # what a data set that is left out takes is not in the budgets
    assert budget_rows(table, left).sort().values.tolist() == list(range(20))
    assert torch.equal(budget_rows(table, divide(table)), torch.arange(40))
    assert all(map(torch.equal, divide(table, seed=3, folds=4, fold=2), k_folds(table, 4, 3)[2]))
    # half and half of what is not judged, by the seed
    for split in (divide(table, 0.4, 0.4, 1, leave_out="set 1"), divide(table, 0.4, 0.4, 1, folds=4)):
        assert abs(len(split.train) - len(split.validation)) <= 2
    assert all(map(torch.equal, divide(table, 0.4, 0.4, 1, leave_out="set 1"), leave_one_out(table, 0.5, 1)["set 1"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"leave_out": "set 7"}, "leave_out='set 7': must be one of set 0, set 1"),
        ({"folds": 3, "fold": 3}, "fold=3: must be in 0 … 2"),
        ({"folds": 1}, "folds=1: must be at least 2"),
        ({"folds": 100}, "too few samples"),
        ({"folds": 3, "leave_out": "set 0"}, "give only one of them"),
        ({"fold": 1}, "fold=1: give split.folds too"),
        ({"leave_out": "set 0", "train": 0.0, "validation": 0.0}, "both must be positive"),
    ],
)
def test_a_mistake_is_named(words: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        divide(three(20, 20), **words)  # type: ignore[arg-type]


def test_one_data_set_cannot_be_left_out() -> None:
    with pytest.raises(InputError, match="has one data set, 'small'"):
        leave_one_out(small_table())
    with pytest.raises(InputError, match="cannot be divided into training and validation"):
        k_folds(small_table(12), 2, validation=0.0)

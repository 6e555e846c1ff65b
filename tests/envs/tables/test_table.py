"""ProfileTable: what it refuses, its digest, the disk; how tables are divided, by images and by
data sets."""

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import input_error, small_beams, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from knobwise.common.errors import Damaged
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.tables.divisions import budget_rows, divide
from knobwise.envs.tables.profile_table import Knob, ProfileTable, Split

NAN = float("nan")


TINY = table_of(
    [[0.5, 1.0], [0.0, NAN]],
    [[10.0, 20.0], [0.0, NAN]],
    name="tiny",
    knobs=(Knob("top_k", (4, 8)),),
    sample_ids=("a", "b"),
)
"""Two samples, two configurations, one hole."""


def test_names_and_sizes():
    table = small_table(samples=5)
    assert (table.num_samples, table.num_configurations, table.knob_sizes) == (5, 12, [3, 2, 2])
    assert table.configuration(5) == {"max_crops": 6, "top_k": 4, "num_active_blocks": 16}
    assert table.label(5) == "max_crops=6 top_k=4 num_active_blocks=16"
    assert table.dataset_names == ("small",) * 5
    assert replace(table, datasets=tuple("xyxyx")).dataset_names == tuple("xyxyx")
    assert "75.0% profiled" in repr(TINY)
    assert "x 3 wide" in repr(replace(TINY, features={"x": torch.zeros(2, 3)}))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"latency_ms": torch.zeros(2, 3)}, "latency_ms has shape"),
        ({"mask": torch.ones(1, 2) > 0}, "mask has shape"),
        ({"configurations": torch.zeros(2, 2)}, "configurations has shape"),
        ({"sample_ids": ("a",)}, "sample_ids has shape"),
        ({"features": {"x": torch.zeros(3, 1)}}, "x. has shape"),
        ({"features": {"x": torch.zeros(2)}}, "x. has shape"),
        ({"parts": ("train",)}, "parts has shape"),
        ({"accuracy": torch.zeros(2)}, "accuracy has shape"),
        ({"accuracy": torch.tensor([[NAN, 1.0], [0.0, 0.0]])}, "1 × accuracy that is NaN"),
        ({"accuracy": torch.tensor([[0.5, 2.0], [-1.0, 0.0]])}, "2 × accuracy outside"),
        ({"latency_ms": torch.tensor([[10.0, torch.inf], [1.0, 1.0]])}, "1 × latency_ms"),
        ({"latency_ms": torch.tensor([[-1.0, 1.0], [1.0, 1.0]])}, "1 × negative"),
        ({"mask": torch.tensor([[True, True], [False, False]])}, "1 × samples without"),
        ({"mask": torch.tensor([[True, False], [True, False]])}, "1 × configurations without"),
        ({"accuracy": torch.tensor([[0.5, 1.0], [0.0, 0.0]])}, "1 × unprofiled"),
        ({"first_look_ms": torch.full((2, 2), -1.0)}, "4 × first_look_ms"),
        ({"sample_ids": ("a", "a")}, "not unique"),
        ({"configurations": torch.zeros(2, 1, dtype=torch.int64)}, "occurs twice"),
        (
            dict.fromkeys(("accuracy", "latency_ms", "mask"), torch.zeros(0, 2))
            | {"sample_ids": ()},
            "empty",
        ),
    ],
)
def test_what_is_refused(changes, what):
    with input_error(f"'tiny'.*{what}"):
        replace(TINY, **changes)


@given(
    chosen=st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=20, unique=True),
    asked=st.lists(st.tuples(*[st.integers(-1, 4)] * 3), min_size=1, max_size=20),
)
@settings(max_examples=30, deadline=None)
def test_find_is_the_inverse_of_configurations(chosen, asked):
    measured, knobs = [[0.0] * len(chosen)], tuple(Knob(name, (1, 2, 3)) for name in "xyz")
    table = table_of(measured, measured, knobs=knobs, configurations=torch.tensor(chosen))
    assert table.find(table.configurations).tolist() == list(range(len(chosen)))
    expected = [chosen.index(a) if a in chosen else -1 for a in asked]
    assert table.find(torch.tensor([asked])).tolist() == [expected]


def test_find_with_more_combinations_than_int64_can_number():
    """70 flags, none or one of them set."""
    flags = torch.cat([torch.zeros(1, 70), torch.eye(70)]).long()
    knobs = tuple(Knob(f"f{i}", (0, 1)) for i in range(70))
    table = table_of([[0.0] * 71], [[0.0] * 71], knobs=knobs, configurations=flags)
    assert table.find(flags).tolist() == list(range(71))
    assert table.find(1 - flags).tolist() == [-1] * 71


def test_images_of_different_data_sets_are_different():
    table = small_table(samples=6, image_ids=("1",) * 6, datasets=tuple("uvwxyz"))
    assert sum(len(part) for part in table.split()) == 6
    with input_error("1 samples"):
        replace(table, datasets=()).split()


def test_a_fixed_split_without_validation_takes_it_out_of_train():
    parts, images = ("train",) * 8 + ("test",) * 4, tuple(str(i // 2) for i in range(12))
    split = small_table(samples=12, parts=parts, image_ids=images).split()
    assert split.test.tolist() == [8, 9, 10, 11]
    assert len(split.train) == 6
    assert split.validation.tolist() == [first := int(split.validation[0]), first + 1]
    assert first % 2 == 0
    disjoint(split, 12)


@pytest.mark.parametrize(
    ("parts", "images", "what"),
    [
        (("train", "train", "validation", "train"), (), "test"),
        (("train", "test", "train", "validation"), tuple("aabc"), "1 images"),
    ],
)
def test_fixed_splits_that_are_refused(parts, images, what):
    with input_error(what):
        small_table(samples=4, parts=parts, image_ids=images).split()


def test_digest_tells_content_apart_and_nothing_else():
    table = TINY
    assert replace(table, notes=("read on a Monday",), name="another").digest == table.digest
    changed = [
        {"accuracy": torch.tensor([[0.5, 1.0], [0.25, NAN]])},
        {"latency_ms": torch.tensor([[10.0, 20.0], [0.5, NAN]])},
        {"knobs": (Knob("top_k", (4, 9)),)},
        {"sample_ids": ("a", "c")},
        {"datasets": ("x", "y")},
        {"image_ids": ("1", "2")},
        {"parts": ("train", "test")},
        {"features": {"x": torch.zeros(2, 1)}},
        {"features": {"y": torch.zeros(2, 1)}},
    ]
    assert len({table.digest, *(replace(table, **change).digest for change in changed)}) == 10


@pytest.mark.parametrize("features", [False, True])
def test_a_saved_table_loads_the_same(tmp_path, features):
    table = small_table(
        samples=7,
        holes=0.3,
        features=features,
        datasets=tuple("xyxyxyx"),
        image_ids=tuple("1122334"),
        parts=("train",) * 3 + ("validation", "test") * 2,
        notes=("2 rows skipped",),
        knobs=(
            Knob("tier", ("low", "medium", "high")),
            Knob("top_k", (4, 8.5)),
            Knob("num_active_blocks", (12, 16)),
        ),
    )
    table.save(tmp_path / "deep" / "t.safetensors")
    again = ProfileTable.load(tmp_path / "deep" / "t.safetensors")
    assert again.digest == table.digest
    assert (again.notes, again.knobs, list(again.features)) == (
        table.notes,
        table.knobs,
        list(table.features),
    )


def test_files_that_are_no_saved_table(tmp_path):
    path = tmp_path / "t.safetensors"
    with input_error("No such file"):
        ProfileTable.load(path)
    heads = [torch.tensor([*head], dtype=torch.uint8) for head in (b"{}", b'{"name": "t"}')]
    for content in (None, {"x": torch.zeros(1)}, *({"head": head} for head in heads)):
        path.write_text("hello") if content is None else save_file(content, path)
        with input_error("not a table") as refused:
            ProfileTable.load(path)
        assert not isinstance(refused.value, Damaged)


def test_fingerprints_know_an_input_again_by_its_features():
    table, rows = small_table(10), torch.arange(10)
    renamed = replace(table, sample_ids=tuple(f"s{i}" for i in range(10)))
    assert renamed.fingerprints(rows) == table.fingerprints(rows)
    assert len(set(table.fingerprints(rows))) == 10
    assert small_table(10, features=False).fingerprints(rows[:2]) == ["/0", "/1"]


def three(*sizes):
    tables = [small_table(n, seed=i, name=f"set {i}") for i, n in enumerate(sizes)]
    return join_tables(tables)


def names(table, rows):
    return {table.dataset_names[row] for row in rows.tolist()}


def disjoint(split, samples=None):
    joined = torch.cat(list(split))
    assert len(joined.unique()) == len(joined)
    if samples is not None:
        assert len(joined) == samples


def images_of(kind, rows, images):
    """A table of samples or of queries that show so many images, in turn; 0 for unknown ones."""
    names = tuple(str(i % images) for i in range(rows)) if images else ()
    if kind == "samples":
        return small_table(rows, image_ids=names), names
    return replace(small_beams(rows)[0], query_images=names or ("",) * rows), names


@given(
    kind=st.sampled_from(["samples", "queries"]),
    rows=st.integers(12, 60),
    seed=st.integers(0, 99),
    shown=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_split_keeps_images_together_and_rows_apart(kind, rows, seed, shown):
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
def test_shares_that_leave_a_part_empty(kind):
    table, _ = images_of(kind, 20, 0)
    assert [len(part) for part in table.split()] == [12, 4, 4]
    assert table.split(seed=0).test.tolist() != table.split(seed=1).test.tolist()
    for shares in ((0.99, 0.005), (0.0, 0.5), (0.5, 0.0), (1.0, 0.0), (0.6, 0.6)):
        with input_error(f"20 {kind}"):
            table.split(*shares)
    with input_error(f"1 {kind}"):
        images_of(kind, 20, 1)[0].split()
    # what is not judged on its own queries may be judged on other beams
    if kind == "queries":
        assert len(table.split(0.9, 0.1).test) == 0
    else:
        with input_error("20 samples"):
            table.split(0.9, 0.1)


def leave_one_out(table, validation=0.25, seed=0):
    """The split that leaves a data set out, by its name."""
    shares = (1 - validation, validation, seed)
    return {name: divide(table, *shares, name) for name in sorted({*table.dataset_names})}


def test_the_data_set_left_out_is_judged_on_and_nothing_else_is():
    table = three(40, 20, 60)
    splits = leave_one_out(table)
    assert list(splits) == ["set 0", "set 1", "set 2"]
    for name, split in splits.items():
        disjoint(split, 120)
        assert names(table, split.test) == {name}
        assert (
            names(table, split.train)
            == names(table, split.validation)
            == {"set 0", "set 1", "set 2"} - {name}
        )
    # a quarter of 20 and a quarter of 60
    assert len(splits["set 0"].validation) == 5 + 15


def coco(images, other, same):
    """Two data sets with these image ids; the first `same` samples of both have the same image
    features."""
    one, two = (
        small_table(len(ids), seed=i, name=f"set {i}") for i, ids in enumerate((images, other))
    )
    two.features["image_features"][:same] = one.features["image_features"][:same]
    return join_tables([replace(one, image_ids=images), replace(two, image_ids=other)])


def test_what_shows_an_image_of_the_test_part_is_not_trained_on():
    ids = tuple(map(str, range(20)))
    table = coco(ids, ids, same=8)  # the other ids are alike by chance
    for left, own in leave_one_out(table).items():
        others = [row for row in range(40) if table.dataset_names[row] != left and row % 20 >= 8]
        assert torch.cat(own[:2]).sort().values.tolist() == others
        assert len(own.test) == 20
    for seed in range(4):
        split = divide(table, seed=seed)
        judged = {row % 20 for row in split.test.tolist() if row % 20 < 8}
        assert judged.isdisjoint(row % 20 for row in torch.cat(split[:2]).tolist())
    # equal features of other images, and features that are missing, say nothing
    assert (
        len(torch.cat(leave_one_out(coco(ids, tuple(f"x{i}" for i in ids), 20))["set 0"][:2])) == 20
    )
    unknown = {name: torch.full_like(block, NAN) for name, block in table.features.items()}
    assert len(torch.cat(leave_one_out(replace(table, features=unknown))["set 0"][:2])) == 20
    with input_error("fit on"):
        leave_one_out(coco(ids, ids, 20))


def test_folds_are_disjoint_cover_all_and_spread_every_data_set_evenly():
    table = three(20, 40)
    splits = [divide(table, seed=3, folds=4, number=number) for number in range(4)]
    for split in splits:
        disjoint(split, 60)
        counted = Counter(table.dataset_names[row] for row in split.test.tolist())
        assert counted == {"set 0": 5, "set 1": 10}
        # of the other 45 samples a quarter, in each data set
        assert len(split.validation) == 11
    assert torch.cat([split.test for split in splits]).unique().tolist() == list(range(60))
    assert not torch.equal(divide(table, seed=4, folds=4).test, splits[0].test)


def test_an_image_is_in_one_fold_and_not_trained_on_there():
    table = small_table(30, image_ids=tuple(str(row // 3) for row in range(30)))
    for number in range(5):
        split = divide(table, folds=5, number=number)
        assert len(split.test) == 6
        assert sum(len((part // 3).unique()) for part in split) == 10


def test_settings_say_which():
    table = three(20, 20)
    assert all(map(torch.equal, divide(table, 0.5, 0.3, 2), table.split(0.5, 0.3, 2)))
    left = divide(table, leave_out="set 1")
    assert all(map(torch.equal, left, leave_one_out(table)["set 1"]))
    # what a data set that is left out takes is not in the budgets
    assert budget_rows(table, left).sort().values.tolist() == list(range(20))
    assert torch.equal(budget_rows(table, divide(table)), torch.arange(40))
    # half and half of what is not judged, by the seed
    split = divide(table, 0.4, 0.4, 1, leave_out="set 1")
    assert abs(len(split.train) - len(split.validation)) <= 2
    assert all(map(torch.equal, split, leave_one_out(table, 0.5, 1)["set 1"]))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"leave_out": "set 7"}, "leave_out='set 7'"),
        ({"leave_out": "set 0", "train": 0.0, "validation": 0.0}, "split.train"),
        ({"leave_out": "set 0", "validation": 0.0}, "split.validation"),
        ({"leave_out": "set 0", "folds": 2}, "split.folds"),
        ({"leave_out": "set 0", "repeats": 2}, "split.repeats"),
        ({"folds": 21}, "split.folds"),
    ],
)
def test_a_mistake_is_named(options, field):
    with input_error(field):
        divide(three(20, 20), **options)


def test_a_single_data_set_cannot_be_left_out():
    with input_error("'small'"):
        leave_one_out(small_table())
    with input_error("cannot be divided"):
        leave_one_out(three(12, 12), validation=0.01)


def test_a_saved_table_that_was_changed_or_cut_short_is_damaged(
    tmp_path,
):
    path, draw = tmp_path / "t.safetensors", random.Random(0)
    small_table(20).save(path)
    whole = path.read_bytes()
    for place in draw.sample(range(len(whole)), 60):
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with input_error(r"t\.safetensors: "):
            ProfileTable.load(path)
    for cut in (b"", whole[:-1], whole[: len(whole) // 2], whole[:-4096] + bytes(4096), bytes(99)):
        path.write_bytes(cut)
        with pytest.raises(Damaged) as damaged:
            ProfileTable.load(path)
        assert str(pickle.loads(pickle.dumps(damaged.value))) == str(damaged.value)


def test_a_table_without_a_digest_as_earlier_versions_saved_it_is_read(tmp_path):
    table = small_table(20)
    table.save(tmp_path / "t.safetensors")
    save_file(load_file(tmp_path / "t.safetensors"), tmp_path / "old.safetensors")
    assert ProfileTable.load(tmp_path / "old.safetensors").digest == table.digest

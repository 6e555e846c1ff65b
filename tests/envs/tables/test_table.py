"""ProfileTable: what it refuses, its digest, the disk; how tables are divided, by images and by
data sets."""

import json
import pickle
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import identical, input_error, small_beams, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from knobwise.common.errors import Damaged
from knobwise.envs import ProfileTable
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.tables.divisions import budget_rows, divide
from knobwise.envs.tables.profile_table import Knob, Split, median_of
from knobwise.envs.tables.splits import first_rows, joint_codes

NAN = float("nan")


TINY = table_of(
    [[0.5, 1.0], [0.0, NAN]],
    [[10.0, 20.0], [0.0, NAN]],
    name="tiny",
    knobs=(Knob("top_k", (4, 8)),),
    sample_ids=("a", "b"),
)
"""Two samples, two configurations, one hole."""


def test_a_table_without_samples_is_refused():
    with input_error("empty"):
        table_of(torch.zeros(0, 2), torch.zeros(0, 2))


def test_names_and_sizes():
    table = small_table(samples=5)
    assert (table.num_samples, table.num_configurations, table.knob_sizes) == (5, 12, [3, 2, 2])
    assert table.configuration(5) == {"max_crops": 6, "top_k": 4, "num_active_blocks": 16}
    assert table.label(5) == "max_crops=6 top_k=4 num_active_blocks=16"
    assert table.dataset_names == ("small",) * 5
    assert replace(table, datasets=tuple("xyxyx")).dataset_names == tuple("xyxyx")
    shown = repr(replace(TINY, features={"x": torch.zeros(2, 3)}))
    assert "75.0% profiled" in shown
    assert "x 3 wide" in shown


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
        ({"accuracy": [[NAN, 1.0], [0.0, 0.0]]}, "1 × accuracy that is NaN"),
        ({"accuracy": [[0.5, 2.0], [-1.0, 0.0]]}, "2 × accuracy outside"),
        ({"latency_ms": [[10.0, torch.inf], [1.0, 1.0]]}, "1 × latency_ms"),
        ({"latency_ms": [[-1.0, 1.0], [1.0, 1.0]]}, "1 × negative"),
        ({"mask": [[True, True], [False, False]]}, "1 × samples without"),
        ({"mask": [[True, False], [True, False]]}, "1 × configurations without"),
        ({"accuracy": [[0.5, 1.0], [0.0, 0.0]]}, "1 × unprofiled"),
        ({"first_look_ms": [[-1.0, -1.0]] * 2}, "4 × first_look_ms"),
        ({"sample_ids": ("a", "a")}, "not unique"),
        ({"configurations": [[0], [0]]}, "occurs twice"),
    ],
)
def test_what_is_refused(changes, what):
    for name, value in changes.items():
        if isinstance(value, list):
            changes = {name: torch.tensor(value)}
    with input_error(f"'tiny'.*{what}"):
        replace(TINY, **changes)


@given(
    chosen=st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=20, unique=True),
    asked=st.lists(st.tuples(*[st.integers(-1, 4)] * 3), min_size=1, max_size=20),
)
@settings(max_examples=30)
def test_find_is_the_inverse_of_configurations(chosen, asked):
    measured, knobs = [[0.0] * len(chosen)], tuple(Knob(name, (1, 2, 3)) for name in "xyz")
    table = table_of(measured, measured, knobs=knobs, configurations=torch.tensor(chosen))
    expected = [chosen.index(a) if a in chosen else -1 for a in asked]
    identical(table.find(torch.tensor([chosen + asked])), [[*range(len(chosen)), *expected]])


def test_find_with_more_combinations_than_int64_can_number():
    """70 flags, none or one of them set."""
    flags = torch.eye(71, 70).long()
    knobs = tuple(Knob(f"f{i}", (0, 1)) for i in range(70))
    measured = torch.zeros(1, 71)
    table = table_of(measured, measured, knobs=knobs, configurations=flags)
    identical(table.find(flags), torch.arange(71))
    identical(table.find(1 - flags), [-1] * 71)


def test_images_of_different_data_sets_are_different():
    table = small_table(samples=6, image_ids=("1",) * 6, datasets=tuple("uvwxyz"))
    disjoint(table.split(), 6)
    with input_error("1 samples"):
        replace(table, datasets=()).split()


def test_a_fixed_split_without_validation_takes_it_out_of_train():
    parts, images = ("train",) * 8 + ("test",) * 4, tuple("001122334455")
    split = small_table(samples=12, parts=parts, image_ids=images).split()
    identical(split.test, [8, 9, 10, 11])
    first, second = split.validation.tolist()
    assert (first % 2, second) == (0, first + 1)
    disjoint(split, 12)


@pytest.mark.parametrize(
    ("parts", "images", "what"),
    [
        (("train", "train", "validation", "train"), (), "test"),
        (("train", "test", "train", "validation"), tuple("aabc"), "1 images"),
        (("train", "test", "train", "train"), tuple("aabc"), "1 images"),
        (("train", "train", "train", "test"), tuple("aaab"), "training part"),
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
        {"question_types": ("x", "y")},
    ]
    assert len({table.digest, *(replace(table, **change).digest for change in changed)}) == 11


@pytest.mark.parametrize("features", [False, True])
def test_a_saved_table_loads_the_same(tmp_path, features):
    table = small_table(
        samples=7,
        holes=0.3,
        features=features,
        datasets=tuple("xyxyxyx"),
        image_ids=tuple("1122334"),
        parts=("train",) * 3 + ("validation", "test") * 2,
        question_types=tuple("ababbab"),
        notes=("2 rows skipped",),
        knobs=(
            Knob("tier", ("low", "medium", "high")),
            Knob("top_k", (4, 8.5)),
            Knob("cache", (False, True)),
        ),
    )
    path = tmp_path / "deep" / "t.safetensors"
    table.save(path)
    again = ProfileTable.load(path)
    for name in ("digest", "notes", "knobs", "question_types"):
        assert getattr(again, name) == getattr(table, name)
    assert [*again.features] == [*table.features]
    assert again.configuration(1)["cache"] is True


def test_files_that_are_no_saved_table(tmp_path):
    path = tmp_path / "t.safetensors"
    with input_error("No such file"):
        ProfileTable.load(path)
    contents = [b"hello", save({"x": torch.zeros(1)})]
    for head in (b"{}", b'{"name": "t"}'):
        contents.append(save({"head": torch.tensor([*head], dtype=torch.uint8)}))
    for content in contents:
        path.write_bytes(content)
        with input_error("not a table") as refused:
            ProfileTable.load(path)
        assert not isinstance(refused.value, Damaged)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_ids", [1] * 20),
        ("texts", 2.5),
        ("texts", {"question": "long"}),
        ("costs", [1.0]),
        ("datasets", True),
        ("unit", None),
        ("features_ms", "1"),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, field, value):
    path = tmp_path / "t.safetensors"
    small_table(20).save(path)
    tensors = load_file(path)
    head = json.loads(tensors["head"].numpy().tobytes())
    text = json.dumps(head | {field: value})
    tensors["head"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    save_file(tensors, path)
    with input_error(rf"t\.safetensors: .*{field}"):
        ProfileTable.load(path)


def test_fingerprints_know_an_input_again_by_its_features():
    table, rows = small_table(10), torch.arange(10)
    renamed = replace(table, sample_ids=tuple("abcdefghij"))
    assert renamed.fingerprints(rows) == table.fingerprints(rows)
    assert len(set(table.fingerprints(rows))) == 10
    assert small_table(10, features=False).fingerprints(rows[:2]) == ["/0", "/1"]


def three(*sizes):
    return join_tables([small_table(n, seed=i, name=f"set {i}") for i, n in enumerate(sizes)])


def names(table, rows):
    return {table.dataset_names[row] for row in rows.tolist()}


def disjoint(split, samples):
    identical(torch.cat(list(split)).sort().values, torch.arange(samples))


def images_of(kind, rows, images):
    """A table of samples or of queries that show so many images, in turn; 0 for unknown ones."""
    names = tuple(str(i % images) for i in range(rows)) if images else ()
    if kind == "samples":
        return small_table(rows, image_ids=names), names
    return replace(small_beams(rows)[0], query_images=names or ("",) * rows), names


@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 5, 10**6])] * 3), min_size=1))
def test_joint_codes_number_different_rows_in_their_order(rows):
    # counted where codes are small, sorted where they are not
    for width in (1, 2, 3):
        columns = np.array(rows)[:, :width]
        codes = joint_codes(*columns.T)
        _, first, number = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        assert codes.tolist() == number.reshape(-1).tolist()
        assert first_rows(codes).tolist() == first.tolist()


@given(
    kind=st.sampled_from(["samples", "queries"]),
    rows=st.integers(12, 60),
    seed=st.integers(0, 99),
    shown=st.booleans(),
)
@settings(max_examples=40)
def test_split_keeps_images_together_and_rows_apart(kind, rows, seed, shown):
    table, images = images_of(kind, rows, rows // 2 if shown else 0)
    split = table.split(seed=seed)
    assert isinstance(split, Split)
    disjoint(split, rows)
    assert all(map(len, split))
    if images:
        assert sum(len({images[i] for i in part}) for part in split) == rows // 2
    identical(split, table.split(seed=seed))


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
    for name, split in splits.items():
        disjoint(split, 120)
        own, *others = (names(table, split[part]) for part in (2, 0, 1))
        assert own == {name}
        assert others == [{*splits} - own] * 2
    # a quarter of 20 and a quarter of 60
    assert len(splits["set 0"].validation) == 5 + 15


def coco(images, other, same):
    """Two data sets with these image ids; the first `same` samples of both have the same image
    features."""
    one, two = (
        small_table(20, seed=i, name=f"set {i}", image_ids=ids)
        for i, ids in enumerate((images, other))
    )
    two.features["image_features"][:same] = one.features["image_features"][:same]
    return join_tables([one, two])


def test_what_shows_an_image_of_the_test_part_is_not_trained_on():
    def fitted_on(table, left="set 0"):
        return torch.cat(leave_one_out(table)[left][:2]).sort().values.tolist()

    ids = tuple(map(str, range(20)))
    table = coco(ids, ids, same=8)  # the other ids are alike by chance
    assert fitted_on(table, "set 0") == [*range(28, 40)]
    assert fitted_on(table, "set 1") == [*range(8, 20)]
    for seed in range(4):
        split = divide(table, seed=seed)
        judged = {row % 20 for row in split.test.tolist() if row % 20 < 8}
        assert judged.isdisjoint(row % 20 for row in torch.cat(split[:2]).tolist())
    # equal features of other images, and features that are missing, say nothing
    assert len(fitted_on(coco(ids, tuple("abcdefghijklmnopqrst"), 20))) == 20
    unknown = {name: torch.full_like(block, NAN) for name, block in table.features.items()}
    assert len(fitted_on(replace(table, features=unknown))) == 20
    with input_error("profile .joint."):
        leave_one_out(coco(ids, ids, 20))


def test_folds_are_disjoint_cover_all_and_spread_every_data_set_evenly():
    table = three(20, 40)
    splits = [divide(table, seed=3, folds=4, number=number) for number in range(4)]
    for split in splits:
        disjoint(split, 60)
        assert (split.test < 20).sum() == 5
        # of the other 45 samples a quarter, in each data set
        assert (len(split.test), len(split.validation)) == (15, 11)
    identical(torch.cat([split.test for split in splits]).unique(), torch.arange(60))
    assert not torch.equal(divide(table, seed=4, folds=4).test, splits[0].test)


def test_an_image_is_in_one_fold_and_not_trained_on_there():
    table = small_table(30, image_ids=tuple(str(row // 3) for row in range(30)))
    for number in range(5):
        split = divide(table, folds=5, number=number)
        assert len(split.test) == 6
        assert sum(len((part // 3).unique()) for part in split) == 10


def test_settings_say_which():
    table = three(20, 20)
    identical(divide(table, 0.5, 0.3, 2), table.split(0.5, 0.3, 2))
    left = divide(table, leave_out="set 1")
    identical(left, leave_one_out(table)["set 1"])
    # what a data set that is left out takes is not in the budgets
    identical(budget_rows(table, left).sort().values, torch.arange(20))
    identical(budget_rows(table, divide(table)), torch.arange(40))
    # half and half of what is not judged, by the seed
    split = divide(table, 0.4, 0.4, 1, leave_out="set 1")
    assert abs(len(split.train) - len(split.validation)) <= 2
    identical(split, leave_one_out(table, 0.5, 1)["set 1"])


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


def test_a_saved_table_that_was_changed_or_cut_short_is_damaged(tmp_path):
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


def test_a_table_without_a_digest_as_the_built_in_one_of_ocr_is_read(tmp_path):
    table = small_table(20)
    table.save(tmp_path / "t.safetensors")
    save_file(load_file(tmp_path / "t.safetensors"), tmp_path / "bare.safetensors")
    assert ProfileTable.load(tmp_path / "bare.safetensors").digest == table.digest


# -- cells that were measured repeatedly -----------------------------------------------------------


CELLS = [[[3.0, 1.0, 2.0], [8.0, 4.0, NAN]], [[5.0, NAN, NAN], [NAN, NAN, NAN]]]
REPEATED = table_of([[0.5, 1.0], [0.25, NAN]], CELLS)
REPEATS = REPEATED.repeats_ms


@settings(max_examples=100)
@given(st.lists(st.floats(0, 2**20, width=32), max_size=7), st.integers(1, 3))
def test_the_median_is_that_of_python(values, missing):
    median = median_of(torch.tensor([values + [NAN] * missing])).item()
    wanted = statistics.median(values) if values else NAN
    assert median == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def test_a_table_knows_all_measurements_and_their_medians():
    identical(REPEATED.latency_ms, [[2.0, 6.0], [5.0, NAN]])
    assert REPEATED.num_repeats == 3
    assert REPEATED.measurements_ms is REPEATED.repeats_ms
    assert "75.0% profiled, up to 3 times; " in repr(REPEATED)


def test_a_table_measured_once_holds_nothing_more():
    table = small_table()
    assert (table.repeats_ms, table.num_repeats) == (None, 1)
    assert table.measurements_ms.shape == (60, 12, 1)
    assert table.measurements_ms.data_ptr() == table.latency_ms.data_ptr()
    # its digest counts no repeats
    plain = table_of([[0.5, 1.0]], [[1.0, 2.0]])
    assert plain.digest == "sha256:1219ad662736af706c381415d001bb786d1d67a591a77f4d51d041323d28f70f"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"repeats_ms": torch.ones(2, 2)}, "repeats_ms has shape"),
        ({"repeats_ms": torch.ones(2, 3, 1)}, "repeats_ms has shape"),
        ({"repeats_ms": REPEATS.flip(-1)}, "repeats_ms after NaN"),
        ({"repeats_ms": -REPEATS}, "negative"),
        ({"repeats_ms": REPEATS * torch.inf}, "infinite"),
        ({"repeats_ms": REPEATS.nan_to_num(1.0)}, "3 × latency_ms"),
        ({"latency_ms": 2 * REPEATED.latency_ms}, "3 × latency_ms"),
    ],
)
def test_measurements_that_do_not_fit_are_refused(changes, what):
    with input_error(f"'by hand'.*{what}"):
        replace(REPEATED, **changes)


def test_repeats_are_part_of_the_digest_and_of_the_file(tmp_path):
    once = replace(REPEATED, repeats_ms=None)
    changed = REPEATS.clone()
    changed[0, 0, 0] = 4.0  # the median stays
    other = table_of(REPEATED.accuracy, changed)
    assert len({table.digest for table in (REPEATED, once, other)}) == 3
    for table in (REPEATED, once):
        table.save(tmp_path / "t.safetensors")
        assert ProfileTable.load(tmp_path / "t.safetensors").digest == table.digest

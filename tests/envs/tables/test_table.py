"""ProfileTable: what it refuses, how it splits, what its digest depends on, and that it survives the disk."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import Knob, ProfileTable

from helpers import small_table, table_of  # isort: skip

NAN = float("nan")


def tiny(**changes):
    """Two samples, two configurations, one hole."""
    parts = {
        "name": "tiny",
        "knobs": (Knob("top_k", (4, 8)),),
        "configurations": torch.tensor([[0], [1]]),
        "accuracy": torch.tensor([[0.5, 1.0], [0.0, NAN]]),
        "latency_ms": torch.tensor([[10.0, 20.0], [0.0, NAN]]),
        "mask": torch.tensor([[True, True], [True, False]]),
        "sample_ids": ("a", "b"),
    }
    return ProfileTable(**(parts | changes))


def test_names_and_sizes():
    table = small_table(samples=5)
    assert (table.num_samples, table.num_configurations, table.knob_sizes) == (5, 12, [3, 2, 2])
    assert table.configuration(5) == {"max_crops": 6, "top_k": 4, "num_active_blocks": 16}
    assert table.label(5) == "max_crops=6 top_k=4 num_active_blocks=16"
    assert table.dataset_names == ("small",) * 5
    assert replace(table, datasets=tuple("xyxyx")).dataset_names == tuple("xyxyx")
    message = "ProfileTable 'tiny': 2 samples × 2 configurations of top_k; 75.0% profiled; features: "
    assert repr(tiny(sample_ids=("a", "a"), datasets=("x", "y"))) == message + "none"  # not one sample twice
    assert repr(tiny(features={"x": torch.zeros(2, 3)})) == message + "x 3 wide"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_ms": torch.zeros(2, 3)}, r"latency_ms has shape \(2, 3\), expected \(2, 2\)"),
        ({"mask": torch.ones(1, 2) > 0}, r"mask has shape \(1, 2\)"),
        ({"configurations": torch.zeros(2, 2)}, r"configurations has shape \(2, 2\), expected \(2, 1\)"),
        ({"sample_ids": ("a",)}, r"sample_ids has shape \(1,\)"),
        ({"features": {"x": torch.zeros(3, 1)}}, r"features\[x\] has shape \(3, 1\)"),
        ({"features": {"x": torch.zeros(2)}}, r"features\[x\] has shape"),
        ({"parts": ("train",)}, r"parts has shape \(1,\)"),
        ({"accuracy": torch.zeros(2)}, r"accuracy has shape \(2,\), expected \[N, C\]"),
        ({"accuracy": torch.tensor([[NAN, 1.0], [0.0, 0.0]])}, "1 × accuracy that is NaN"),
        ({"accuracy": torch.tensor([[0.5, 2.0], [-1.0, 0.0]])}, r"2 × accuracy outside \[0, 1\]"),
        ({"latency_ms": torch.tensor([[10.0, torch.inf], [1.0, 1.0]])}, "1 × latency_ms that is NaN or infinite"),
        ({"latency_ms": torch.tensor([[-1.0, 1.0], [1.0, 1.0]])}, "1 × negative latency_ms"),
        ({"mask": torch.tensor([[True, True], [False, False]])}, "1 × samples without any profiled configuration"),
        ({"mask": torch.tensor([[True, False], [True, False]])}, "1 × configurations without any profiled sample"),
        ({"accuracy": torch.tensor([[0.5, 1.0], [0.0, 0.0]])}, "1 × cells not profiled that are not NaN"),
        ({"sample_ids": ("a", "a")}, "sample ids are not unique"),
        ({"configurations": torch.zeros(2, 1, dtype=torch.int64)}, "a configuration occurs twice"),
        ({**dict.fromkeys(("accuracy", "latency_ms", "mask"), torch.zeros(0, 2)), "sample_ids": ()}, "is empty: 0 sam"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, message):
    with pytest.raises(InputError, match=f"'tiny'.*{message}"):
        tiny(**changes)


@given(
    chosen=st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=20, unique=True),
    asked=st.lists(st.tuples(*[st.integers(-1, 4)] * 3), min_size=1, max_size=20),
)
@settings(max_examples=30, deadline=None)
def test_find_is_the_inverse_of_configurations(chosen, asked):
    measured, knobs = [[0.0] * len(chosen)], tuple(Knob(name, (1, 2, 3)) for name in "xyz")
    table = replace(table_of(measured, measured), knobs=knobs, configurations=torch.tensor(chosen))
    assert table.find(table.configurations).tolist() == list(range(len(chosen)))
    expected = [chosen.index(a) if a in chosen else -1 for a in asked]
    assert table.find(torch.tensor([asked])).tolist() == [expected]


def test_find_with_more_combinations_than_int64_can_number():
    """70 flags, none or one of them set."""
    flags = torch.cat([torch.zeros(1, 70), torch.eye(70)]).long()
    knobs = tuple(Knob(f"f{i}", (0, 1)) for i in range(70))
    table = replace(table_of([[0.0] * 71], [[0.0] * 71]), knobs=knobs, configurations=flags)
    assert table.find(flags).tolist() == list(range(71))
    assert table.find(1 - flags).tolist() == [-1] * 71


def test_split_follows_shares_and_seed():
    table = small_table(samples=50)
    assert [len(part) for part in table.split()] == [30, 10, 10]
    assert [len(part) for part in table.split(train=0.1, validation=0.1)] == [5, 5, 40]
    assert table.split(seed=0).test.tolist() != table.split(seed=1).test.tolist()


def test_images_of_different_data_sets_are_different():
    table = replace(small_table(samples=6), image_ids=("1",) * 6, datasets=tuple("uvwxyz"))
    assert sum(len(part) for part in table.split()) == 6
    with pytest.raises(InputError, match="leave a part of its 1 samples"):
        replace(table, datasets=()).split()


def test_a_fixed_split_without_validation_takes_it_out_of_train():
    parts, images = ("train",) * 8 + ("test",) * 4, tuple(str(i // 2) for i in range(12))
    table = replace(small_table(samples=12), parts=parts, image_ids=images)
    split = table.split()
    assert split.test.tolist() == [8, 9, 10, 11]
    assert len(split.train) == 6
    assert torch.cat([split.train, split.validation]).sort().values.tolist() == list(range(8))
    assert split.validation[0] % 2 == 0
    assert split.validation[1] == split.validation[0] + 1


@pytest.mark.parametrize(
    ("parts", "images", "message"),
    [
        (("train", "train", "validation", "train"), (), r"no sample is in: test\. Name the parts"),
        (("train", "test", "train", "validation"), tuple("aabc"), "1 images are in several parts of its split"),
    ],
)
def test_fixed_splits_that_are_refused(parts, images, message):
    with pytest.raises(InputError, match=message):
        replace(small_table(samples=4), parts=parts, image_ids=images).split()


def test_digest_tells_content_apart_and_nothing_else():
    table = tiny()
    assert table.digest.startswith("sha256:")
    assert replace(table, notes=("read on a Monday",), name="another").digest == table.digest
    changed = [
        replace(table, accuracy=torch.tensor([[0.5, 1.0], [0.25, NAN]])),
        replace(table, latency_ms=torch.tensor([[10.0, 20.0], [0.5, NAN]])),
        replace(table, knobs=(Knob("top_k", (4, 9)),)),
        replace(table, sample_ids=("a", "c")),
        replace(table, datasets=("x", "y")),
        replace(table, image_ids=("1", "2")),
        replace(table, parts=("train", "test")),
        replace(table, features={"x": torch.zeros(2, 1)}),
        replace(table, features={"y": torch.zeros(2, 1)}),
    ]
    assert len({table.digest, *(c.digest for c in changed)}) == 10


@pytest.mark.parametrize("features", [False, True])
def test_a_saved_table_loads_the_same(tmp_path, features):
    table = replace(
        small_table(samples=7, holes=0.3, features=features),
        datasets=tuple("xyxyxyx"),
        image_ids=tuple("1122334"),
        parts=("train",) * 3 + ("validation", "test") * 2,
        notes=("2 rows skipped",),
        knobs=(Knob("tier", ("low", "medium", "high")), Knob("top_k", (4, 8.5)), Knob("num_active_blocks", (12, 16))),
    )
    table.save(tmp_path / "deep" / "t.safetensors")
    again = ProfileTable.load(tmp_path / "deep" / "t.safetensors")
    assert again.digest == table.digest
    assert (again.notes, again.knobs, list(again.features)) == (table.notes, table.knobs, list(table.features))


def test_files_that_are_no_saved_table(tmp_path):
    path = tmp_path / "t.safetensors"
    with pytest.raises(InputError, match=r"t\.safetensors: no such file"):
        ProfileTable.load(path)
    heads = [torch.tensor(list(head), dtype=torch.uint8) for head in (b"{}", b'{"name": "t", "sample_ids": ["a"]}')]
    for content in (None, {"x": torch.zeros(1)}, *({"head": head} for head in heads)):
        path.write_text("hello") if content is None else save_file(content, path)
        with pytest.raises(InputError, match=r"t\.safetensors: not a table saved by knobwise"):
            ProfileTable.load(path)


def test_fingerprints_know_an_input_again_by_its_features() -> None:
    table, rows = small_table(10), torch.arange(10)
    renamed = replace(table, sample_ids=tuple(f"s{i}" for i in range(10)))
    assert renamed.fingerprints(rows) == table.fingerprints(rows)
    assert len(set(table.fingerprints(rows))) == 10
    assert small_table(10, features=False).fingerprints(rows[:2]) == ["/0", "/1"]

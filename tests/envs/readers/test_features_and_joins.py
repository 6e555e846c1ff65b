"""Feature files: four formats, matched to samples by id, all that can be wrong in them; and tables
joined into one."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import Harmful, close, identical, input_error, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from knobwise.envs import ProfileTable
from knobwise.envs.readers.feature_files import (
    Features,
    attach_features,
    read_features,
    write_features,
)
from knobwise.envs.readers.joint import join_tables, rows_by_dataset, with_dataset_input
from knobwise.envs.readers.long_table import read_long_table, write_long_table
from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.settings.profiles import JointProfile, read_profile

SUFFIXES = [".safetensors", ".npz", ".pt", ".parquet"]
NAN = float("nan")
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6
)


def bare(samples=3, **changes):
    return small_table(samples, **{"features": False} | changes)


def saved(path, ids=("0", "1", "2"), **blocks):
    np.savez(path, sample_id=np.array(ids), **(blocks or {"x": np.zeros((len(ids), 2))}))
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(
    ids=st.lists(NAMES, min_size=2, max_size=4, unique=True),
    values=st.lists(st.floats(-(2.0**90), 2.0**90, width=32) | st.just(NAN), min_size=4, max_size=4),
    width=st.integers(1, 4),
    datasets=st.booleans(),
)  # fmt: skip
@settings(max_examples=8)
def test_reading_gives_back_what_was_written(
    tmp_path_factory, suffix, ids, values, width, datasets
):
    n = len(ids)
    block = torch.tensor(values)[:n].unsqueeze(1)
    blocks = {"one": block, "several, of them": block.repeat(1, width)}
    origin = tuple("xyxy"[:n]) * datasets
    table = bare(n, sample_ids=tuple(ids), features=blocks, datasets=origin)
    path = tmp_path_factory.mktemp("features") / f"f{suffix}"
    if suffix in (".safetensors", ".npz"):
        write_features(table, path)
    else:
        rows = {"sample_id": ids, **({"dataset": origin} if datasets else {})}
        if suffix == ".pt":
            torch.save({**rows, **blocks}, path)
        else:
            arrays = {name: block.numpy() for name, block in blocks.items()}
            pl.DataFrame({**rows, **arrays}).write_parquet(path)
    again = attach_features(replace(table, features={}), path)
    assert list(again.features) == list(blocks)
    for name, written in blocks.items():
        identical(again.features[name], written)


def test_rows_are_matched_by_id_whatever_their_order(tmp_path):
    saved(tmp_path / "f.npz", ids=[2, 0, 1, 7], x=np.array([20.0, 0.0, 10.0, 70.0]))
    table = attach_features(bare(), tmp_path / "f.npz")
    identical(table.features["x"], [[0.0], [10.0], [20.0]])
    assert len(table.notes) == 1
    saved(tmp_path / "f.npz", ids=["0", "x", "y"])
    with input_error(r"f\.npz: .*1, 2;"):
        attach_features(bare(), tmp_path / "f.npz")


def test_rows_are_matched_by_data_set_where_both_name_it():
    features = Features(("0", "0"), {"x": torch.tensor([[1.0], [2.0]])}, ("b", "a"))
    both = bare(2, sample_ids=("0", "0"), datasets=("a", "b"))
    identical(attach_features(both, features).features["x"], [[2.0], [1.0]])
    one = table_of([[0.0]], [[1.0]], name="a")
    identical(attach_features(one, features).features["x"], [[2.0]])
    with input_error("features"):
        attach_features(replace(one, name="c"), features)
    with input_error("profile"):
        attach_features(both, Features(("0",), {"x": torch.zeros(1, 1)}))


def test_every_kind_of_number(tmp_path):
    for kind in (np.float16, np.float64, np.int8, np.uint16, bool):
        saved(tmp_path / "f.npz", x=np.array([[0], [1], [1]], kind))
        identical(read_features(tmp_path / "f.npz").blocks["x"], [[0.0], [1.0], [1.0]])
    blocks = {"x": torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16)}
    save_file({"sample_id": torch.tensor([4, 2]), **blocks}, tmp_path / "f.safetensors")
    torch.save({"sample_id": [4, 2], **blocks}, tmp_path / "f.pt")
    for suffix in (".safetensors", ".pt"):
        features = read_features(tmp_path / f"f{suffix}")
        assert features.sample_ids == ("4", "2")
        identical(features.blocks["x"], [[0.5], [2.0]])


def test_columns_of_a_table_file(tmp_path):
    columns = {"sample_id": [1, 2], "split": ["train", "test"], "width": [640, None]}
    data = pl.DataFrame({**columns, "dark": [True, False], "vision": [[1.0, 2.0], [3.0, None]]})
    data.write_parquet(tmp_path / "f.parquet")
    blocks = read_features(tmp_path / "f.parquet").blocks
    assert list(blocks) == ["vision", "features"]
    identical(blocks["vision"], [[1, 2], [3, NAN]])
    identical(blocks["features"], [[640, 1], [NAN, 0]])
    data.drop("vision", "split").write_csv(tmp_path / "f.csv")
    again = read_features(tmp_path / "f.csv").blocks["features"]
    close(again, blocks["features"])


IDS = ["0", "1"]


@pytest.mark.parametrize(
    ("ids", "block", "field"),
    [
        (["0", "0"], [[1], [2]], "ids"),
        (IDS, np.zeros((3, 2)), "'x'"),
        (IDS, np.zeros((2, 2, 2)), "'x'"),
        (IDS, 3.0, "'x'"),
        (IDS, ["1", "b"], "'x'"),
        (IDS, [1.0, np.inf], "'x'"),
        (IDS, [1.0, 1e300], "'x'"),
        (IDS, np.zeros((2, 0)), "'x'"),
        (IDS, np.array([{}, 1], object), "code"),
        ([["0"], ["1"]], [1, 2], "'sample_id'"),
        (np.array([], "U1"), np.zeros((0, 2)), ""),
        ([b"\xff", b"b"], [1, 2], ""),
        ([1j, 2], [1, 2], ""),
        (np.array(IDS, "S1").view("V1"), [1, 2], ""),
        (np.array([1, 2], "M8[s]"), [1, 2], ""),
    ],
)
def test_bad_blocks(tmp_path, ids, block, field):
    saved(tmp_path / "f.npz", ids=ids, x=np.array(block))
    with input_error(rf"f\.npz: .*{field}.*\Z"):
        read_features(tmp_path / "f.npz")


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"sample_id": [1, 2], "name": ["a", "b"]}, "'name'"),
        ({"sample_id": [1, 2], "x": [["a"], ["b"]]}, "'x'"),
        ({"sample_id": [1, 2], "x": [[1.0], [1.0, 2.0]]}, "'x'"),
        ({"sample_id": [1, 2], "x": [[1.0], None]}, "'x'"),
        ({"sample_id": [1, 2], "features": [[1.0], [2.0]], "y": [1, 2]}, "`features`"),
        ({"sample_id": [1, None], "x": [1, 2]}, "'sample_id'"),
        ({"sample_id": [1, 2]}, "block"),
        ({"x": [1, 2]}, "sample_id"),
    ],
)
def test_bad_columns(tmp_path, columns, field):
    pl.DataFrame(columns).write_parquet(tmp_path / "f.parquet")
    with input_error(rf"f\.parquet: .*{field}"):
        read_features(tmp_path / "f.parquet")


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({"sample_id": [1], "x": Harmful()}, tmp_path / "f.pt")
    with input_error(r"f\.pt: .*without executing code"):
        read_features(tmp_path / "f.pt")
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".bin"])
def test_files_of_another_kind(tmp_path, suffix):
    path = tmp_path / f"f{suffix}"
    for _ in range(2):
        with input_error(rf"f\{suffix}: "):
            read_features(path)
        path.write_text("hello")


def test_nothing_to_write_or_nowhere(tmp_path):
    with input_error("safetensors"):
        write_features(small_table(), tmp_path / "f.bin")
    with input_error("blocks"):
        write_features(bare(), tmp_path / "f.npz")
    assert list(tmp_path.iterdir()) == []


def table(name, knobs, configurations, **more):
    """Two samples; sample i under configuration c takes 10·i + c + 1 ms and is right with 0.1·c."""
    c = len(configurations)
    ms = 10.0 * torch.arange(2).unsqueeze(1) + torch.arange(c) + 1
    named = tuple(Knob(k, v) for k, v in knobs.items())
    cells = table_of([[0.1 * i for i in range(c)]] * 2, ms)
    return replace(
        cells, name=name, knobs=named, configurations=torch.tensor(configurations), **more
    )


def cells(t):
    """Return every profiled cell, with names instead of numbers."""
    found = set()
    for i, c in t.mask.nonzero().tolist():
        setting = sorted(t.configuration(c).items())
        found.add((t.dataset_names[i], t.sample_ids[i], *setting, float(t.latency_ms[i, c])))
    return found


FIRST = table("a", {"crops": (2, 6), "tier": ("low", "high")}, [[0, 0], [1, 1]])
OTHER = table("b", {"tier": ("medium", "high"), "crops": (2, 9)}, [[0, 1], [1, 0], [1, 1]])


def test_values_and_configurations_are_those_of_all_and_no_cell_is_lost_or_made_up():
    joint = join_tables([FIRST, OTHER])
    assert joint.knobs == (Knob("crops", (2, 6, 9)), Knob("tier", ("low", "medium", "high")))
    # (2, low), (6, high) of one; (9, medium), (2, high), (9, high) of the other
    identical(joint.configurations, [[0, 0], [0, 2], [1, 2], [2, 1], [2, 2]])
    assert (
        joint.mask.tolist()
        == [[True, False, True, False, False]] * 2 + [[False, True, False, True, True]] * 2
    )
    assert cells(joint) == cells(FIRST) | cells(OTHER)
    assert joint.dataset_names == ("a", "a", "b", "b")
    assert join_tables([replace(FIRST, unit="J"), replace(OTHER, unit="J")]).unit == "J"


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(13, 21), st.floats(0, 0.8)), min_size=1, max_size=3))
def test_whatever_is_joined_every_cell_is_kept(sizes):
    tables = [small_table(n, i, holes, name=f"t{i}") for i, (n, holes) in enumerate(sizes)]
    joint = join_tables(tables)
    assert cells(joint) == set().union(*map(cells, tables))
    features = torch.cat([table.features["image_features"] for table in tables])
    identical(joint.features["image_features"], features)


def test_the_rows_of_each_data_set():
    rows = rows_by_dataset(join_tables([OTHER, FIRST]), torch.tensor([3, 0, 2]))
    assert {name: places.tolist() for name, places in rows.items()} == {"a": [0, 2], "b": [1]}


def test_images_parts_and_question_types_are_kept():
    named = {"image_ids": ("7", "7"), "question_types": ("yes/no", "other"), "notes": ("odd",)}
    fixed = replace(FIRST, parts=("train", "train"), **named)
    joint = join_tables([fixed, replace(OTHER, parts=("validation", "test"))])
    assert joint.image_ids == ("7", "7", "0", "1")
    assert joint.parts == ("train", "train", "validation", "test")
    assert joint.question_types == ("yes/no", "other", "unknown", "unknown")
    assert "a: odd" in joint.notes


def test_a_profile_that_fixes_no_split_is_divided_when_another_one_does():
    free = small_table(20)
    fixed = small_table(20, seed=1, name="fixed", parts=("train", "test") * 10)
    joint = join_tables([free, fixed])
    split, of_free = joint.split(), free.split()
    identical(split.test, [*of_free.test.tolist(), *range(21, 40, 2)])
    # of `fixed` a quarter of the training part
    identical(split.validation[:4], of_free.validation)
    assert len(split.validation) == 4 + 3
    assert [note.split(":")[0] for note in joint.notes] == ["small", "fixed"]
    both = join_tables([fixed, replace(fixed, name="again")])
    assert set(both.parts) == {"train", "test"}
    assert len(both.split(0.5, 0.5, seed=3).validation) == 10


def test_blocks_must_agree_unless_missing_ones_are_filled_in():
    both = replace(FIRST, features={"image": torch.ones(2, 3), "text": torch.ones(2, 2)})
    lacks = replace(OTHER, features={"text": torch.zeros(2, 2)})
    with input_error(r"'b' .*image"):
        join_tables([both, lacks])
    joint = join_tables([lacks, both], missing_blocks=True)
    assert joint.features["image"].isnan().tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
    wide = replace(OTHER, features={"text": torch.ones(2, 5)})
    with input_error(r"'b' .*'text'"):
        join_tables([both, wide], missing_blocks=True)


WORDS_FOR_CROPS = table("b", {"crops": ("few", "many"), "tier": ("low",)}, [[0, 0], [1, 0]])


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ([], "'joint'"),
        ([FIRST, table("b", {"crops": (2, 6)}, [[0], [1]])], "crops"),
        ([FIRST, WORDS_FOR_CROPS], "'crops'"),
        ([FIRST, replace(OTHER, unit="J")], "J"),
        ([FIRST, replace(OTHER, name="a")], "unique"),
        ([FIRST, replace(OTHER, first_look_ms=torch.ones(2, 3))], "first_look_ms"),
    ],
)
def test_what_cannot_be_joined_is_named(tables, field):
    with input_error(field):
        join_tables(tables)


def test_several_files_are_one_profile(tmp_path):
    first = small_table(20, name="first")
    second = small_table(20, seed=1, name="second")
    paths = [str(tmp_path / name) for name in ("first.safetensors", "second.parquet", "second.npz")]
    first.save(paths[0])
    write_long_table(second, paths[1])
    write_features(second, paths[2])
    joint = read_profile(JointProfile(paths=paths[:2], features=[None, paths[2]]))
    assert cells(joint) == cells(first) | cells(second)
    language = joint.features["language_features"][20:]
    close(language, second.features["language_features"])
    filled = read_profile(JointProfile(paths=paths[:2], missing_blocks=True))
    assert filled.features["image_features"].isnan().all(1).tolist() == [False] * 20 + [True] * 20
    with input_error("1 files for 2 paths"):
        read_profile(JointProfile(paths=paths[:2], features=[paths[2]]))


def test_question_types_are_read_written_and_saved(tmp_path):
    typed = small_table(20, question_types=("yes/no", "number") * 10, features={})
    write_long_table(typed, tmp_path / "t.csv")
    again = read_long_table(tmp_path / "t.csv")
    assert again.question_types == typed.question_types
    assert [knob.name for knob in again.knobs] == [knob.name for knob in typed.knobs]
    again.save(tmp_path / "t.safetensors")
    assert ProfileTable.load(tmp_path / "t.safetensors").question_types == typed.question_types
    assert typed.digest != replace(typed, question_types=()).digest


@pytest.mark.parametrize("ids", ['["a", 1, null]', '{"a": 1}'])
def test_ids_of_mixed_types_in_metadata_are_refused(tmp_path, ids):
    save_file({"x": torch.ones(3, 2)}, tmp_path / "f.safetensors", metadata={"sample_id": ids})
    with input_error(r"f\.safetensors: "):
        read_features(tmp_path / "f.safetensors")


def test_ids_may_be_bytes(tmp_path):
    assert read_features(saved(tmp_path / "f.npz", ids=[b"a", b"b"])).sample_ids == ("a", "b")


def test_a_pt_file_may_be_keyed_by_sample(tmp_path):
    path = tmp_path / "f.pt"
    torch.save({7: {"x": torch.ones(1, 2)}, 3: {"x": torch.zeros(2)}}, path)
    features = read_features(path)
    assert (features.sample_ids, features.blocks["x"].tolist()) == (("7", "3"), [[1, 1], [0, 0]])
    torch.save({"sample_ids": torch.tensor([3, 7]), "x": torch.ones(2, 1)}, path)
    assert read_features(path).sample_ids == ("3", "7")
    for other in ({"y": torch.ones(2)}, {"x": torch.ones(3)}):
        torch.save({7: {"x": torch.ones(2)}, 3: other}, path)
        with input_error(r"f\.pt: "):
            read_features(path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image_feature": [9.0]}, "ids"),
        ({"image_feature": [1.0, 2.0]}, "features"),
        ({"latency_ms": 3.0}, "latency_ms"),
        ({"config": {"accuracy": 1}}, "accuracy"),
        ({"latency": -1.0}, "latency_ms"),
    ],
)
def test_training_data_that_cannot_be_used(tmp_path, change, field):
    cell = {"sample_id": 0, "accuracy": 1.0, "latency": 9.0, "latency_budget": 5.0}
    cell |= {"image_feature": [0.5], "config": {"top_k": 8}}
    examples = [cell, cell | {"latency_budget": 6.0} | change]
    (tmp_path / "t.json").write_text(json.dumps(examples))
    with input_error(rf"t\.json: .*{field}"):
        read_long_table(tmp_path / "t.json")


def test_the_data_set_is_a_block_with_a_column_for_each_and_zeros_for_others():
    table = bare(3, datasets=("b", "a", "b"))
    block = with_dataset_input(table).features["dataset"]
    identical(block, [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    block = with_dataset_input(table, ["c", "b"]).features["dataset"]
    identical(block, [[0, 1], [0, 0], [0, 1]])
    for one in (bare(3), with_dataset_input(table)):
        with input_error(r"policy\.dataset_input"):
            with_dataset_input(one)

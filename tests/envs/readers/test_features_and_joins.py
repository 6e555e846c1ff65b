"""Feature files: four formats, matched to samples by id, all that can be wrong in them; and tables
joined into one."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import Harmful, close, identical, input_error, repeated, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

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


def test_question_types_are_written_and_read(tmp_path):
    typed = small_table(20, question_types=("yes/no", "number") * 10, features={})
    write_long_table(typed, tmp_path / "t.csv")
    again = read_long_table(tmp_path / "t.csv")
    assert (again.question_types, again.knobs) == (typed.question_types, typed.knobs)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(13, 21), st.floats(0, 0.8), st.sampled_from([0, 2, 3])),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_is_joined_every_measurement_is_kept(sizes):
    tables = []
    for i, (n, holes, most) in enumerate(sizes):
        once = small_table(n, i, holes, name=f"t{i}")
        tables.append(repeated(once, most) if most else once)
    joint = join_tables(tables)
    wanted = {}
    for table in tables:
        wanted |= cells(table)
    assert cells(joint) == wanted
    assert (joint.repeats_ms is None) == all(table.repeats_ms is None for table in tables)
    features = torch.cat([table.features["image_features"] for table in tables])
    identical(joint.features["image_features"], features)


def bare(samples=3, **changes):
    return small_table(samples, **{"features": False} | changes)


def saved(path, ids, x):
    np.savez(path, sample_id=np.array(ids), x=np.array(x))
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
    rows = {"sample_id": ids, **({"dataset": origin} if datasets else {})}
    if suffix == ".pt":
        torch.save(rows | blocks, path)
    elif suffix == ".parquet":
        arrays = {name: block.numpy() for name, block in blocks.items()}
        pl.DataFrame(rows | arrays).write_parquet(path)
    else:
        write_features(table, path)
    again = attach_features(replace(table, features={}), path)
    assert list(again.features) == list(blocks)
    identical(again.features, blocks)


def test_rows_are_matched_by_id_whatever_their_order(tmp_path):
    path = saved(tmp_path / "f.npz", [2, 0, 1, 7], [20.0, 0.0, 10.0, 70.0])
    table = attach_features(bare(), path)
    identical(table.features["x"], [[0.0], [10.0], [20.0]])
    assert len(table.notes) == 1
    saved(path, ["0", "x", "y"], [[0.0]] * 3)
    with input_error(r"f\.npz: .*1, 2;"):
        attach_features(bare(), path)


def test_rows_are_matched_by_data_set_where_both_name_it():
    features = Features(("0", "0"), {"x": torch.tensor([[1.0], [2.0]])}, ("b", "a"))
    both = bare(2, sample_ids=("0", "0"), datasets=("a", "b"))
    identical(attach_features(both, features).features["x"], [[2.0], [1.0]])
    one = bare(1, name="a")
    identical(attach_features(one, features).features["x"], [[2.0]])
    with input_error("features"):
        attach_features(replace(one, name="c"), features)
    with input_error("profile"):
        attach_features(both, Features(("0",), {"x": torch.zeros(1, 1)}))


def test_every_kind_of_number(tmp_path):
    for kind in (np.float16, np.float64, np.int8, np.uint16, bool):
        path = saved(tmp_path / "f.npz", [0, 1, 2], np.array([[0], [1], [1]], kind))
        identical(read_features(path).blocks["x"], [[0.0], [1.0], [1.0]])
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
    identical(read_features(tmp_path / "f.csv").blocks["features"], blocks["features"])


IDS = ["0", "1"]


def npz(ids, block):
    return "f.npz", lambda path: saved(path, ids, block)


def parquet(**columns):
    rows = pl.DataFrame({"sample_id": [1, 2]} | columns)
    return "f.parquet", rows.write_parquet


def pt(content):
    return "f.pt", lambda path: torch.save(content, path)


def with_ids(metadata):
    """A file whose ids are these in its metadata."""
    ids = {"sample_id": metadata}
    return "f.safetensors", lambda path: save_file({"x": torch.ones(3, 2)}, path, metadata=ids)


def text(name):
    return name, lambda path: path.write_text("hello")


def absent(name):
    return name, lambda path: None


@pytest.mark.parametrize(
    ("file", "field"),
    [
        (npz(["0", "0"], [[1], [2]]), "ids"),
        (npz(IDS, np.zeros((3, 2))), "'x'"),
        (npz(IDS, np.zeros((2, 2, 2))), "'x'"),
        (npz(IDS, 3.0), "'x'"),
        (npz(IDS, ["1", "b"]), "'x'"),
        (npz(IDS, [1.0, np.inf]), "'x'"),
        (npz(IDS, [1.0, 1e300]), "'x'"),
        (npz(IDS, [[], []]), "'x'"),
        (npz(IDS, np.array([{}, 1], object)), "code"),
        (npz([["0"], ["1"]], [1, 2]), "'sample_id'"),
        (npz(np.array([], "U1"), np.zeros((0, 2))), ""),
        (npz([b"\xff", b"b"], [1, 2]), ""),
        (npz([1j, 2], [1, 2]), ""),
        (npz(np.array(IDS, "S1").view("V1"), [1, 2]), ""),
        (npz(np.array([1, 2], "M8[s]"), [1, 2]), ""),
        (parquet(name=["a", "b"]), "'name'"),
        (parquet(x=[["a"], ["b"]]), "'x'"),
        (parquet(x=[[1.0], [1.0, 2.0]]), "'x'"),
        (parquet(x=[[1.0], None]), "'x'"),
        (parquet(features=[[1.0], [2.0]], y=[1, 2]), "`features`"),
        (parquet(sample_id=[1, None], x=[1, 2]), "'sample_id'"),
        (parquet(), "block"),
        (("f.parquet", pl.DataFrame({"x": [1, 2]}).write_parquet), "sample_id"),
        (pt({"sample_id": [1], "x": Harmful()}), "without executing code"),
        (pt({7: {"x": torch.ones(1, 2)}, 3: {"y": torch.ones(2)}}), ""),
        (pt({7: {"x": torch.ones(1, 2)}, 3: {"x": torch.ones(3)}}), ""),
        # ids of mixed types
        (with_ids('["a", 1, null]'), ""),
        (with_ids('{"a": 1}'), ""),
        # files of another kind
        *((kind(f"f{suffix}"), "") for suffix in [*SUFFIXES, ".bin"] for kind in (text, absent)),
    ],
)
def test_bad_files(tmp_path, capsys, file, field):
    """Code in them is not run."""
    name, write = file
    write(tmp_path / name)
    with input_error(rf"{name}: .*{field}.*\Z"):
        read_features(tmp_path / name)
    assert "must not run" not in capsys.readouterr().out


def test_nothing_to_write_or_nowhere(tmp_path):
    with input_error("safetensors"):
        write_features(small_table(), tmp_path / "f.bin")
    with input_error("blocks"):
        write_features(bare(), tmp_path / "f.npz")
    assert list(tmp_path.iterdir()) == []


def table(name, knobs, configurations, **more):
    """Two samples; sample i under configuration c takes 10·i + c + 1 ms and is right with 0.1·c."""
    c = torch.arange(len(configurations))
    return table_of(
        0.1 * c.expand(2, -1),
        torch.tensor([[1.0], [11.0]]) + c,
        name=name,
        knobs=tuple(Knob(*knob) for knob in knobs.items()),
        configurations=torch.tensor(configurations),
        **more,
    )


def cells(t):
    """Return the measurements of every profiled cell, with names instead of numbers."""
    found = {}
    for i, c in t.mask.nonzero().tolist():
        setting = sorted(t.configuration(c).items())
        measured = [ms for ms in t.measurements_ms[i, c].tolist() if ms == ms]
        found[t.dataset_names[i], t.sample_ids[i], *setting] = measured
    return found


FIRST = table("a", {"crops": (2, 6), "tier": ("low", "high")}, [[0, 0], [1, 1]])
OTHER = table("b", {"tier": ("medium", "high"), "crops": (2, 9)}, [[0, 1], [1, 0], [1, 1]])


def test_values_and_configurations_are_those_of_all_and_no_cell_is_lost_or_made_up():
    joint = join_tables([FIRST, OTHER])
    assert joint.knobs == (Knob("crops", (2, 6, 9)), Knob("tier", ("low", "medium", "high")))
    # (2, low), (6, high) of one; (9, medium), (2, high), (9, high) of the other
    identical(joint.configurations, [[0, 0], [0, 2], [1, 2], [2, 1], [2, 2]])
    first, other = [True, False, True, False, False], [False, True, False, True, True]
    identical(joint.mask, [first, first, other, other])
    assert cells(joint) == cells(FIRST) | cells(OTHER)
    assert joint.dataset_names == ("a", "a", "b", "b")
    assert join_tables([replace(FIRST, unit="J"), replace(OTHER, unit="J")]).unit == "J"


def test_true_and_false_meet_their_spellings_but_no_other_names():
    first = replace(FIRST, knobs=(FIRST.knobs[0], Knob("tier", (False, True))))
    spelled = replace(OTHER, knobs=(Knob("tier", ("false", "true")), OTHER.knobs[1]))
    tier = join_tables([first, spelled]).knobs[1]
    assert [*map(repr, tier.values)] == ["False", "True"]
    for knob in (Knob("tier", ("false", "auto")), Knob("tier", (0, 1))):
        with input_error("tier"):
            join_tables([first, replace(OTHER, knobs=(knob, OTHER.knobs[1]))])


def test_cells_of_a_profile_without_sampling_weights_still_count_when_another_has_them():
    drawn = replace(FIRST, sampling_weight=torch.tensor([[2.0, 0.0], [3.0, 1.0]]))
    mask = torch.tensor([[True, True, True], [False, True, True]])
    holes = {"accuracy": OTHER.accuracy, "latency_ms": OTHER.latency_ms}
    holes = {name: values.where(mask, torch.nan) for name, values in holes.items()}
    joint = join_tables([drawn, replace(OTHER, mask=mask, **holes)])
    # half of (9, medium), and all of (2, high) and (9, high)
    of_other = [[0.0, 1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
    of_drawn = [[2.0, 0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 1.0, 0.0, 0.0]]
    identical(joint.sampling_weight, of_drawn + of_other)


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
    assert split.test.tolist() == [*of_free.test.tolist(), *range(21, 40, 2)]
    # of `fixed` a quarter of the training part
    assert len(split.validation) == 4 + 3
    identical(split.validation[:4], of_free.validation)
    assert [note.split(":")[0] for note in joint.notes] == ["small", "fixed"]
    both = join_tables([fixed, replace(fixed, name="again")])
    assert set(both.parts) == {"train", "test"}
    assert len(both.split(0.5, 0.5, seed=3).validation) == 10


BOTH = replace(FIRST, features={"image": torch.ones(2, 3), "text": torch.ones(2, 2)})
LACKS = replace(OTHER, features={"text": torch.zeros(2, 2)})
WIDE = replace(OTHER, features={"text": torch.ones(2, 5)})


def test_missing_blocks_are_filled_in_on_request():
    joint = join_tables([LACKS, BOTH], missing_blocks=True)
    identical(joint.features["image"].isnan(), [[True] * 3] * 2 + [[False] * 3] * 2)


WORDS_FOR_CROPS = table("b", {"crops": ("few", "many"), "tier": ("low",)}, [[0, 0], [1, 0]])


@pytest.mark.parametrize(
    ("tables", "options", "field"),
    [
        ([], {}, "'joint'"),
        ([FIRST, table("b", {"crops": (2, 6)}, [[0], [1]])], {}, "crops"),
        ([FIRST, WORDS_FOR_CROPS], {}, "'crops'"),
        ([FIRST, replace(OTHER, unit="J")], {}, "J"),
        ([FIRST, replace(OTHER, name="a")], {}, "unique"),
        ([FIRST, replace(OTHER, first_look_ms=torch.ones(2, 3))], {}, "first_look_ms"),
        ([BOTH, LACKS], {}, "'b' .*image"),
        ([BOTH, WIDE], {"missing_blocks": True}, "'b' .*'text'"),
    ],
)
def test_what_cannot_be_joined_is_named(tables, options, field):
    with input_error(field):
        join_tables(tables, **options)


def test_several_files_are_one_profile(tmp_path):
    first = small_table(20, name="first")
    second = small_table(20, seed=1, name="second")
    paths = [str(tmp_path / name) for name in ("first.safetensors", "second.parquet")]
    features = str(tmp_path / "second.npz")
    first.save(paths[0])
    write_long_table(second, paths[1])
    write_features(second, features)
    joint = read_profile(JointProfile(paths=paths, features=[None, features]))
    assert cells(joint) == cells(first) | cells(second)
    close(joint.features["language_features"][20:], second.features["language_features"])
    filled = read_profile(JointProfile(paths=paths, missing_blocks=True))
    identical(filled.features["image_features"].isnan().all(1), [False] * 20 + [True] * 20)
    with input_error("1 files for 2 paths"):
        read_profile(JointProfile(paths=paths, features=[features]))


def test_ids_may_be_bytes(tmp_path):
    assert read_features(saved(tmp_path / "f.npz", [b"a", b"b"], [1, 2])).sample_ids == ("a", "b")


def test_a_pt_file_may_be_keyed_by_sample(tmp_path):
    path = tmp_path / "f.pt"
    torch.save({7: {"x": torch.ones(1, 2)}, 3: {"x": torch.zeros(2)}}, path)
    features = read_features(path)
    assert (features.sample_ids, features.blocks["x"].tolist()) == (("7", "3"), [[1, 1], [0, 0]])
    torch.save({"sample_ids": torch.tensor([3, 7]), "x": torch.ones(2, 1)}, path)
    assert read_features(path).sample_ids == ("3", "7")


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
    path = tmp_path / "t.json"
    path.write_text(json.dumps([cell, cell | {"latency_budget": 6.0} | change]))
    with input_error(rf"t\.json: .*{field}"):
        read_long_table(path)


def test_the_data_set_is_a_block_with_a_column_for_each_and_zeros_for_others():
    table = bare(3, datasets=("b", "a", "b"))
    both = with_dataset_input(table)
    identical(both.features["dataset"], [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    identical(with_dataset_input(table, ["c", "b"]).features["dataset"], [[0, 1], [0, 0], [0, 1]])
    for wrong in (bare(3), both):
        with input_error(r"policy\.dataset_input"):
            with_dataset_input(wrong)

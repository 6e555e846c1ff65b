from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.envs.readers.joint import join_tables, rows_by_dataset, with_dataset_input
from knobwise.envs.readers.long_table import read_long_table, write_features, write_long_table
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.settings.profiles import read_profile


def table(name: str, knobs: dict[str, tuple[Any, ...]], configurations: list[list[int]], **more: Any) -> ProfileTable:
    """Two samples; sample i under configuration c takes 10·i + c + 1 ms and is right with 0.1·c."""
    c = len(configurations)
    ms = 10.0 * torch.arange(2).unsqueeze(1) + torch.arange(c) + 1
    cells = table_of([[0.1 * i for i in range(c)]] * 2, ms.tolist())
    named = tuple(Knob(k, v) for k, v in knobs.items())
    return replace(cells, name=name, knobs=named, configurations=torch.tensor(configurations), **more)


def cells(of: ProfileTable) -> set[tuple[Any, ...]]:
    """Every profiled cell, in words."""
    return {
        (of.dataset_names[i], of.sample_ids[i], *sorted(of.configuration(c).items()), float(of.latency_ms[i, c]))
        for i, c in of.mask.nonzero().tolist()
    }


ONE = table("a", {"crops": (2, 6), "tier": ("low", "high")}, [[0, 0], [1, 1]])
OTHER = table("b", {"tier": ("medium", "high"), "crops": (2, 9)}, [[0, 1], [1, 0], [1, 1]])


def test_values_and_configurations_are_those_of_all_and_no_cell_is_lost_or_made_up() -> None:
    joint = join_tables([ONE, OTHER])
    assert joint.knobs == (Knob("crops", (2, 6, 9)), Knob("tier", ("low", "medium", "high")))
    # (2, low), (6, high) of one; (9, medium), (2, high), (9, high) of the other
    assert joint.configurations.tolist() == [[0, 0], [0, 2], [1, 2], [2, 1], [2, 2]]
    assert joint.mask.tolist() == [[True, False, True, False, False]] * 2 + [[False, True, False, True, True]] * 2
    assert cells(joint) == cells(ONE) | cells(OTHER)
    assert joint.dataset_names == ("a", "a", "b", "b")
    assert join_tables([replace(ONE, unit="J"), replace(OTHER, unit="J")]).unit == "J"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 0.8)), min_size=1, max_size=3), st.booleans())
def test_whatever_is_joined_every_cell_is_kept(sizes: list[tuple[int, float]], told: bool) -> None:
    tables = [
        replace(small_table(12 + samples, seed=number, holes=holes), name=f"t{number}")
        for number, (samples, holes) in enumerate(sizes)
    ]
    joint = join_tables(tables, dataset_input=told)
    assert cells(joint) == set().union(*map(cells, tables))
    features = torch.cat([one.features["image_features"] for one in tables])
    assert torch.equal(joint.features["image_features"], features)
    assert ("dataset" in joint.features) == told


def test_the_dataset_as_an_input() -> None:
    joint = with_dataset_input(join_tables([OTHER, ONE]))
    assert joint.features["dataset"].tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert "the columns of block 'dataset' are a, b" in joint.notes[-1]
    for_another = with_dataset_input(ONE, ["c", "a", "b"])
    assert for_another.features["dataset"].tolist() == [[0, 1, 0]] * 2
    assert with_dataset_input(ONE, ["c"]).features["dataset"].tolist() == [[0], [0]]
    with pytest.raises(InputError, match="has a feature block 'dataset' already"):
        with_dataset_input(joint)
    rows = rows_by_dataset(joint, torch.tensor([3, 0, 2]))
    assert {name: places.tolist() for name, places in rows.items()} == {"a": [0, 2], "b": [1]}


def test_images_parts_and_question_types_are_kept() -> None:
    fixed = replace(ONE, image_ids=("7", "7"), parts=("train", "train"), question_types=("yes/no", "other"))
    joint = join_tables([fixed, replace(OTHER, parts=("validation", "test")), replace(fixed, name="c", notes=("odd",))])
    assert joint.image_ids == ("7", "7", "0", "1", "7", "7")
    assert joint.parts == ("train", "train", "validation", "test", "train", "train")
    assert joint.question_types == ("yes/no", "other", "unknown", "unknown", "yes/no", "other")
    assert "c: odd" in joint.notes


def test_a_profile_that_fixes_no_split_is_divided_when_another_one_does() -> None:
    free, fixed = small_table(20), replace(small_table(20, seed=1), name="fixed", parts=("train", "test") * 10)
    joint = join_tables([free, fixed])
    split, places = joint.split(), free.split()
    assert split.test.tolist() == [*places.test.tolist(), *range(21, 40, 2)]
    # of `fixed` a quarter of the training part
    assert split.validation[:4].tolist() == places.validation.tolist()
    assert len(split.validation) == 4 + 3
    assert any("small: fixes no split" in note for note in joint.notes)
    assert any("fixed: fixes no validation part" in note for note in joint.notes)
    both = join_tables([fixed, replace(fixed, name="again")])
    assert set(both.parts) == {"train", "test"}
    assert len(both.split(0.5, 0.5, seed=3).validation) == 10


def test_blocks_must_agree_unless_missing_ones_are_filled_in() -> None:
    shown = replace(ONE, features={"image": torch.ones(2, 3), "text": torch.ones(2, 2)})
    lacks = replace(OTHER, features={"text": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="profile 'b' has no block image"):
        join_tables([shown, lacks])
    joint = join_tables([lacks, shown], missing_blocks=True)
    assert joint.features["image"].isnan().tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
    with pytest.raises(InputError, match="block 'text' is 5 wide in profile 'b' and 2"):
        join_tables([shown, replace(OTHER, features={"text": torch.ones(2, 5)})], missing_blocks=True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (None, "no tables to join"),
        (table("b", {"crops": (2, 6)}, [[0], [1]]), "profile 'b' has the knobs crops"),
        (table("b", {"crops": ("few", "many"), "tier": ("low", "high")}, [[0, 0], [1, 1]]), "knob 'crops' is a number"),
        (replace(OTHER, unit="J"), "profile 'b' is in J, but 'a' is in ms"),
        (replace(OTHER, name="a"), "sample ids are not unique inside a data set"),
    ],
)
def test_what_cannot_be_joined_is_named(other: ProfileTable | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        join_tables([ONE, other] if other else [])


def test_several_files_are_one_profile(tmp_path: Path) -> None:
    tables = [replace(small_table(20, seed=seed), name=name) for seed, name in enumerate(("first", "second"))]
    tables[0].save(tmp_path / "first.safetensors")
    write_long_table(replace(tables[1], features={}), tmp_path / "second.parquet")
    write_features(tables[1], tmp_path / "second.npz")
    words = [
        "profile=joint",
        f"profile.paths=[{tmp_path}/first.safetensors,{tmp_path}/second.parquet]",
        f"profile.features=[null,{tmp_path}/second.npz]",
        "profile.dataset_input=true",
    ]
    joint = read_profile(read_settings("train", words).profile)
    assert cells(joint) == cells(tables[0]) | cells(tables[1])
    assert joint.features["dataset"].sum(0).tolist() == [20, 20]
    torch.testing.assert_close(joint.features["language_features"][20:], tables[1].features["language_features"])
    words[2] = "profile.missing_blocks=true"
    filled = read_profile(read_settings("train", words).profile)
    assert filled.features["image_features"].isnan().all(1).tolist() == [False] * 20 + [True] * 20
    words[2] = f"profile.features=[{tmp_path}/second.npz]"
    with pytest.raises(InputError, match="1 files for 2 paths"):
        read_profile(read_settings("train", words).profile)


def test_question_types_are_read_written_and_saved(tmp_path: Path) -> None:
    typed = replace(small_table(20), question_types=("yes/no", "number") * 10, features={})
    write_long_table(typed, tmp_path / "t.csv")
    again = read_long_table(tmp_path / "t.csv")
    assert again.question_types == typed.question_types
    assert [knob.name for knob in again.knobs] == [knob.name for knob in typed.knobs]
    again.save(tmp_path / "t.safetensors")
    assert ProfileTable.load(tmp_path / "t.safetensors").question_types == typed.question_types
    assert typed.digest != replace(typed, question_types=()).digest

"""Objects inside the rows of JSON and Parquet, reached by dotted names."""

import json

import polars as pl
import pytest
from helpers import identical, input_error

import knobwise
from knobwise.envs.readers.frames import read_frame
from knobwise.envs.readers.nested import MOST_COLUMNS, unnest

ROWS = [
    {
        "id": f"q{n}",
        "setup": {"model": model, "depth": depth},
        "result": {"score": {"exact": (n + depth) % 2}, "usage": {"seconds": n + depth}},
        "about": {"kind": f"k{n % 3}"},
    }
    for n in range(12)
    for model in ("small", "large")
    for depth in (1, 2)
]
OPTIONS = {
    "id": "id",
    "accuracy": "result.score.exact",
    "latency": "result.usage.seconds",
    "unit": "s",
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_dotted_names_reach_into_objects(tmp_path, suffix):
    path = tmp_path / f"t.{suffix}"
    if suffix == "parquet":
        pl.DataFrame(ROWS).write_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    made = knobwise.read(path, features="auto", **OPTIONS)
    assert {knob.name for knob in made.knobs} == {"setup.model", "setup.depth"}
    assert [column.name for column in made.columns] == ["about.kind"]
    assert made.mask.all()
    identical(made.latency_ms[made.sample_ids.index("q3")].unique(), [4000.0, 5000.0])


def test_scores_of_each_model_in_one_object(tmp_path):
    rows = [{"id": f"q{n}", "scores": {"small": n % 2, "large": 1}} for n in range(4)]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(rows))
    wide = ["scores.small", "scores.large"]
    made = knobwise.read(path, id="id", wide=wide, wide_latency=[1, 9])
    assert made.num_configurations == 2
    identical(made.accuracy.mean(0).sort().values, [0.5, 1.0])


def test_message_names_what_is_inside(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(ROWS))
    with input_error("no column accuracy.*result.score.exact"):
        knobwise.read(path, id="id")


def test_names_that_exist_and_objects_with_many_keys_stay():
    both = pl.DataFrame({"a.b": [1], "a": [{"b": 2}]})
    assert unnest(both).columns == ["a.b", "a"]
    many = pl.DataFrame({"a": [{f"id{n}": n for n in range(MOST_COLUMNS)}]})
    assert unnest(many).columns == ["a"]


# -- lists of mixed types --------------------------------------------------------------------------

STATS = [
    [{"name": {"name": "em"}, "count": 1}, {"name": "em", "count": "1"}],
    [1, "a"],
    [[1, "a"], ["b", 2]],
    {"a": [1, "a"]},
]


@pytest.mark.parametrize("stats", STATS)
def test_a_column_of_mixed_lists_that_nobody_uses_is_noted(tmp_path, stats):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([row | {"stats": stats} for row in ROWS]))
    made = knobwise.read(path, features="auto", **OPTIONS)
    plain = knobwise.read(pl.DataFrame(ROWS), features="auto", **OPTIONS)
    assert {knob.name for knob in made.knobs} == {"setup.model", "setup.depth"}
    identical(made.accuracy, plain.accuracy)
    identical(made.features["features"], plain.features["features"])
    assert any(note.startswith("stats") and "mixed" in note for note in made.notes)


@pytest.mark.parametrize("option", ["accuracy", "latency", "id", "knobs", "features", "costs"])
def test_a_column_of_mixed_lists_that_is_used_is_named(tmp_path, option):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([row | {"stats": [1, "a"]} for row in ROWS]))
    several = option in ("knobs", "features", "costs")
    with input_error("t.json.*stats"):
        knobwise.read(path, **OPTIONS | {option: ["stats"] if several else "stats"})


def test_parts_of_an_object_stay_apart_where_one_is_mixed(tmp_path):
    path = tmp_path / "t.json"
    rows = [
        {"id": row["id"], "all": row | {"stats": [1, "a"]}, "kind": row["about"]["kind"]}
        for row in ROWS
    ]
    path.write_text(json.dumps(rows))
    names = {"accuracy": "all.result.score.exact", "latency": "all.result.usage.seconds"}
    made = knobwise.read(path, id="id", unit="s", **names)
    assert {knob.name for knob in made.knobs} == {"all.setup.model", "all.setup.depth"}


@pytest.mark.parametrize("whole", [[1, 0.5], [[1, 0.5], [0.25, 1]]])
def test_whole_numbers_beside_fractions_in_a_list_are_numbers(tmp_path, whole):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"sample_id": n, "x": whole}) for n in range(2)))
    notes = []
    frame = read_frame(path, notes)
    assert frame["x"].to_list() == [whole] * 2
    assert notes == []

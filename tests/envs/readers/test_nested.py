"""Objects inside the rows of JSON and Parquet, reached by dotted names."""

import json

import polars as pl
import pytest
from helpers import identical, input_error

import knobwise
from knobwise.envs.readers.nested import MOST_COLUMNS, unnested

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
    assert unnested(both).columns == ["a.b", "a"]
    many = pl.DataFrame({"a": [{f"id{n}": n for n in range(MOST_COLUMNS)}]})
    assert unnested(many).columns == ["a"]

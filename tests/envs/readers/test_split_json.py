"""JSON that names its columns beside its rows."""

import json

import pytest
from helpers import identical, input_error

import knobwise
from knobwise.envs.readers.frames import read_frame

COLUMNS = ["sample_id", "model", "accuracy", "latency_ms"]
ROWS = [
    ["a", "small", 0, 10.0],
    ["a", "large", 1, 30.0],
    ["b", "small", 1, 11.0],
    ["b", "large", 1, 31],
]
NAN = float("nan")


def write(path, columns=COLUMNS, rows=ROWS, **more):
    path.write_text(json.dumps({"columns": columns, "data": rows} | more))
    return path


@pytest.mark.parametrize("more", [{}, {"index": [0, 1, 2, 3]}, {"ncols": 4, "nrows": 4}])
def test_tables_of_wandb_and_pandas_are_read(tmp_path, more):
    made = knobwise.read(write(tmp_path / "t.table.json", **more))
    assert [knob.name for knob in made.knobs] == ["model"]
    identical(made.accuracy, [[1.0, 0.0], [1.0, 1.0]])
    identical(made.latency_ms, [[30.0, 10.0], [31.0, 11.0]])


BY_PANDAS = """{"columns":["model","accuracy","latency_ms","kind"],"index":["q0","q0","q1","q1"],\
"data":[["small",0.0,10.5,"\\u00e9"],["large",1.0,30.5,"\\u00e9"],["small",1.0,11.5,"b"],\
["large",null,31.5,"b"]]}"""
"""What pandas 3.1.1 wrote with `frame.set_index("sample_id").to_json(path, orient="split")`."""


def test_the_index_of_pandas_may_hold_the_ids(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(BY_PANDAS)
    notes = []
    frame = read_frame(path, notes)
    assert frame["index"].to_list() == ["q0", "q0", "q1", "q1"]
    assert frame["kind"].to_list() == ["é", "é", "b", "b"]
    made = knobwise.read(path, id="index", knobs=["model"])
    assert made.sample_ids == ("q0", "q1")
    assert made.mask.tolist() == [[True, True], [False, True]]
    identical(made.latency_ms[0], [30.5, 10.5])


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [["a", 0], ["a", 1], ["b", 0], ["b", 1]], [0]])
def test_numbers_of_rows_and_levels_are_no_column(tmp_path, index):
    notes = []
    frame = read_frame(write(tmp_path / "t.json", index=index), notes)
    assert frame.columns == COLUMNS
    assert notes == []


def test_nan_is_an_empty_cell(tmp_path):
    """W&B writes a missing number, and one in a column of text, as NaN."""
    notes = []
    first = [[*ROWS[0], "x"], [*ROWS[1][:2], NAN, 30.0, NAN]]
    rows = [*first, *([*row, "y"] for row in ROWS[2:])]
    frame = read_frame(write(tmp_path / "t.json", [*COLUMNS, "note"], rows), notes)
    assert frame["accuracy"].to_list() == [0, None, 1, 1]
    assert frame["note"].to_list() == ["x", None, "y", "y"]
    assert any("2 cells are NaN" in note for note in notes)
    made = knobwise.read(tmp_path / "t.json", knobs=["model"])
    assert made.mask.tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize(
    ("columns", "rows", "words"),
    [
        (COLUMNS, [*ROWS, ["c"]], ("row 5", "1 values", "4 columns")),
        (["a", "a"], [[1, 2]], ("occur twice: a",)),
        ([["a", "x"], ["a", "y"]], [[1, 2]], ("several names",)),
    ],
)
def test_other_shapes_are_refused(tmp_path, columns, rows, words):
    with input_error(".*".join(words)):
        read_frame(write(tmp_path / "t.json", columns, rows))

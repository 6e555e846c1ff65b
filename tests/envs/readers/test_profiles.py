"""Long tables: what becomes a knob, what a hole, what an error; and that writing and reading give
the table back."""

import gzip
import json
import math

import numpy as np
import polars as pl
import pytest
import torch
from helpers import identical, input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs.readers.long_table import (
    long_frame,
    read_long_table,
    table_from_frame,
    write_long_table,
)


def frame(**columns):
    """Return two samples under two configurations, changed or extended by columns."""
    rows = {
        "sample_id": ["a", "a", "b", "b"],
        "top_k": [8, 4, 8, 4],
        "accuracy": [1.0, 0.5, 0.25, 0.0],
        "latency_ms": [20.0, 10.0, 40.0, 30.0],
    }
    return pl.DataFrame(rows | columns)


def table(data=None, **choices):
    return table_from_frame(frame() if data is None else data, name="t", **choices)


def test_rows_become_cells():
    made = table()
    assert (made.sample_ids, made.notes) == (("a", "b"), ())
    assert [made.configuration(c) for c in range(2)] == [{"top_k": 4}, {"top_k": 8}]
    identical(made.accuracy, [[0.5, 1.0], [0.0, 0.25]])
    identical(made.latency_ms, [[10.0, 20.0], [30.0, 40.0]])
    assert made.accuracy.dtype == made.latency_ms.dtype == torch.float32
    assert made.configurations.dtype == torch.int64
    made = table(frame(sample_id=["a"] * 4, dataset=["x", "x", "y", "y"]))  # two samples
    assert (made.datasets, made.sample_ids) == (("x", "y"), ("a", "a"))
    data = frame(dataset=["y", "x", "x", "y"])  # the order of the rows does not matter
    assert table(data.reverse()).digest == table(data).digest


@pytest.mark.parametrize(
    "times",
    [
        [4.0, 3.5, 1.0, 9.0],
        ["4", "3.5", "1", "9"],
        [
            "2026-01-31T12:00:04",
            "2026-01-31T12:00:03",
            "2025-12-31T12:00:01",
            "2026-02-01T00:00:00",
        ],
        pl.Series([4, 3, 1, 9]).cast(pl.Datetime),
    ],
    ids=["numbers", "text", "dates", "datetimes"],
)
def test_samples_stand_in_the_order_of_their_first_times(times):
    made = table(frame(at=times), time="at")
    assert made.sample_ids == ("b", "a")
    identical(made.accuracy, [[0.0, 0.25], [0.5, 1.0]])
    assert [knob.name for knob in made.knobs] == ["top_k"]


@pytest.mark.parametrize("times", [[1, None, 2, 3], ["1", "soon", "2", "3"], ["x"] * 4])
def test_what_is_no_time_is_refused(times):
    with input_error("time=at"):
        table(frame(at=times), time="at")
    with input_error("no column then"):
        table(frame(at=times), time="then")


@pytest.mark.parametrize(
    ("ids", "order"),
    [
        ([10, 9, 100], ("9", "10", "100")),
        (["b", "10", "9", "007"], ("007", "9", "10", "b")),
        ([2.0, 1.0], ("1", "2")),
    ],
)
def test_samples_are_sorted(ids, order):
    n = len(ids)
    data = pl.DataFrame(
        {"sample_id": ids, "k": [1] * n, "accuracy": [1.0] * n, "latency_ms": [1.0] * n}
    )
    assert table(data).sample_ids == order


def test_missing_rows_and_empty_cells_are_holes():
    data = frame(accuracy=[1.0, 0.5, None, 0.0], latency_ms=[20.0, None, 40.0, 30.0])
    made = table(data)
    identical(made.mask, [[False, True], [True, False]])
    assert made.accuracy[0, 0].isnan()
    assert made.latency_ms[1, 1].isnan()
    assert made.notes == ("2 rows without accuracy or latency: not profiled",)
    assert table(data[[0, 3]]).digest == made.digest


@pytest.mark.parametrize(
    ("changes", "accuracy", "latency"),
    [
        ({"latency_ms": [0, 0, 0, 1]}, [[0.5, 1], [0, 0.25]], [[0, 0], [1, 0]]),
        ({"accuracy": [1 + 1e-9, -1e-9, 0.25, 0.0]}, [[0, 1], [0, 0.25]], [[10, 20], [30, 40]]),
        # a configuration that was never profiled is not there
        ({"latency_ms": [20.0, None, 40.0, None]}, [[1], [0.25]], [[20], [40]]),
        *(
            ({"accuracy": right}, [[1, 1], [0, 0]], [[10, 20], [30, 40]])
            for right in ([True, True, False, False], ["true", "TRUE", "false", "0"], [1, 1, 0, 0])
        ),
    ],
)
def test_what_becomes_of_numbers(changes, accuracy, latency):
    made = table(frame(**changes))
    assert made.accuracy.tolist() == accuracy
    assert made.latency_ms.tolist() == latency


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ([10, 9, 10, 9], (9, 10)),
        ([10.0, 2.5, 10.0, 2.5], (2.5, 10)),
        (["10", "9", "10.0", "9"], (9, 10)),
        (["01", "1", "01", "1"], ("01", "1")),
        (["8", "all", "8", "all"], ("8", "all")),
        (["-O2", "-O1", "-O2", "-O1"], ("-O1", "-O2")),
        (["low", "high", "low", "high"], ("low", "high")),
        (["medium", "low", "medium", "low"], ("low", "medium")),
        (["low", "huge", "low", "huge"], ("huge", "low")),
        ([True, False, True, False], ("false", "true")),
        (pl.Series(["z", "y", "z", "y"], dtype=pl.Categorical), ("y", "z")),
        (["", "-g", "", "-g"], ("", "-g")),
    ],
)
def test_knob_values(column, values):
    (knob,) = table(frame(top_k=column)).knobs
    assert knob.values == values
    assert [type(v) for v in knob.values] == [type(v) for v in values]


def test_any_number_of_knobs_in_the_order_of_the_columns():
    data = frame(preset=["slow", "fast"] * 2, codec=["x", "y"] * 2)
    made = table(data)
    identical(made.configurations, [[0, 0, 1], [1, 1, 0]])
    assert made.label(0) == "top_k=4 preset=fast codec=y"
    chosen = table(data, knobs=["codec", "top_k"])
    assert chosen.label(0) == "codec=x top_k=8"
    identical(chosen.accuracy, [[1.0, 0.5], [0.25, 0.0]])


def test_columns_that_cannot_be_knobs_are_named_in_the_notes():
    columns = {"width": [640, 640, 800, 800], "config_id": [1, 0, 1, 0], "device": ["gpu"] * 4}
    made = table(frame(boxes=[[1], [2], [3], [4]], **columns))
    assert [knob.name for knob in made.knobs] == ["top_k", "device"]
    assert [note.split(": ")[1] for note in made.notes] == ["boxes", "width", "config_id"]


KNOWN = ("fold", "score", "soft_score", "prefill_ms", "pred", "question_id", "image_id")
"""Measurements and keys."""


@pytest.mark.parametrize(
    ("data", "knobs"),
    [
        # a label is a knob where nothing else is, or where it tells more
        (frame(configuration=["x", "y"] * 2).drop("top_k"), ["configuration"]),
        (frame(top_k=8, config_id=[1, 0] * 2), ["top_k", "config_id"]),
        (frame(**dict.fromkeys(KNOWN, 1), split="train"), ["top_k"]),
        # sparse
        (frame(sample_id=list("aaba"), top_k=[8, 4, 8, 2], width=[6, 6, 8, 6]), ["top_k"]),
        # one row for each sample tells nothing about knobs
        (frame()[[0, 3]], ["top_k"]),
    ],
)
def test_which_columns_are_knobs(data, knobs):
    assert [knob.name for knob in table(data).knobs] == knobs


def test_a_measurement_taken_for_a_knob_is_refused():
    data = pl.DataFrame({"sample_id": np.arange(60) // 2, "k": [0, 1] * 30, "energy": range(60)})
    data = data.with_columns(accuracy=1.0, latency_ms=2.0)
    with input_error("energy"):
        table(data)
    assert table(data, knobs=["k"]).num_configurations == 2


def test_accuracy_and_latency_are_a_choice():
    data = frame(soft_score=[0.1, 0.2, 0.3, 0.4], cost=[4, 3, 2, 1])
    made = table(data, accuracy="soft_score", latency="cost", knobs=["top_k"])
    assert made.accuracy[0].tolist() == pytest.approx([0.2, 0.1])
    identical(made.latency_ms, [[3, 4], [1, 2]])
    assert [k.name for k in table(data.drop("cost"), accuracy="soft_score").knobs] == ["top_k"]
    # a score serves as accuracy
    assert table(frame().rename({"accuracy": "score"})).digest == table().digest
    assert table(frame(score=[0.0] * 4)).accuracy[0, 1] == 1


def in_parts(*parts):
    """Return rows of samples in these parts, of which two at a time show the same image."""
    ids = np.arange(len(parts))
    return pl.DataFrame({"sample_id": ids, "image_id": ids // 2, "split": parts}).with_columns(
        k=1, accuracy=1.0, latency_ms=1.0
    )


def test_spellings_of_parts(tmp_path):
    made = table(in_parts("train", "Training", "val", "valid", "test", "test"))
    assert made.parts == ("train", "train", "validation", "validation", "test", "test")
    assert made.image_ids == ("0", "0", "1", "1", "2", "2")
    write_long_table(made, tmp_path / "t.csv")
    assert read_long_table(tmp_path / "t.csv").digest == made.digest
    again = table(in_parts("train", "train", "dev", "validation", "test", "testing"))
    assert again.digest == made.digest
    assert table(frame(image_id=None)).image_ids == ()


def test_splits_that_do_not_divide_samples():
    for data in (in_parts("train", "minival"), frame(split=["train", "test", "test", "test"])):
        with input_error("split"):
            table(data)
    # this is where they come from
    made = table(in_parts("validation", "validation"))
    assert made.parts == ()
    assert len(made.notes) == 1


@pytest.mark.parametrize(
    ("column", "values", "fault"),
    [
        ("latency_ms", [20.0, 10.0, math.nan, 30.0], "1 rows .* b"),
        ("latency_ms", [20.0, -10.0, -1.0, 30.0], "2 rows .* a"),
        ("latency_ms", [20.0, 10.0, 40.0, math.inf], "1 rows"),
        ("latency_ms", ["20", "10", "fast", "30"], "'fast'"),
        ("latency_ms", [[20.0]] * 4, "List"),
        ("latency_ms", None, "no row"),
        ("accuracy", [50.0, 100.0, 0.0, 0.0], "2 rows"),
        ("accuracy", [1.0, math.nan, 0.0, 0.0], "1 rows"),
        ("first_look_ms", [-1.0, 0.0, 0.0, 0.0], "1 rows"),
        ("sample_id", ["a", None, "b", "b"], "1 rows"),
        ("sample_id", [[1]] * 4, "List"),
        ("top_k", [8, None, 8, 4], "1 "),
        ("top_k", [8.0, math.nan, 8.0, 4.0], "finite"),
    ],
)
def test_bad_values(column, values, fault):
    with input_error(rf"^t\.csv: (?=.*{column}).*{fault}"):
        table(frame(**{column: values}), source="t.csv")


@pytest.mark.parametrize(
    ("data", "choices", "column"),
    [
        (frame().drop("latency_ms"), {}, "latency_ms"),
        (frame().drop("accuracy"), {}, "accuracy"),
        (frame(), {"accuracy": "fluency"}, "fluency"),
        (frame().drop("sample_id"), {}, "sample_id"),
        (frame().drop("top_k"), {}, "knob"),
        (frame(), {"knobs": ["blocks"]}, "blocks"),
        (frame(), {"knobs": ["top_k", "sample_id"]}, "sample_id"),
        (frame(), {"knobs": []}, "knob"),
        (frame().clear(), {}, "no row"),
        (pl.DataFrame(), {}, "none"),
    ],
)
def test_bad_columns(data, choices, column):
    with input_error(rf"^t\.csv: .*{column}"):
        table(data, source="t.csv", **choices)


def is_number(text):
    """Texts like 0E0 are read as numbers, so they may equal others."""
    try:
        float(text)
    except ValueError:
        return False
    return True


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6
).filter(lambda text: not is_number(text))
VALUES = st.one_of(
    st.integers(-(10**6), 10**6),
    st.floats(-1e6, 1e6, width=32).filter(lambda v: v % 1 != 0),
    st.just("x"),
    NAMES,
)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["x", "y"]),
            st.one_of(NAMES, st.integers(0, 99).map(str)),
            VALUES.map(str),
            st.sampled_from(["low", "high", "medium"]),
            st.floats(0, 1, width=32),
            st.floats(0, 1e6, width=32),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda row: row[:4],
    )
)
@settings(max_examples=40)
def test_any_table_survives_every_format(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("round")
    names = ["dataset", "sample_id", "knob, one", "tier", "accuracy", "latency_ms"]
    data = pl.DataFrame(rows, schema=names, orient="row")
    knobs = data.columns[2:4]
    made = table_from_frame(data, name="t", knobs=knobs)
    assert int(made.mask.sum()) == len(rows)
    assert table_from_frame(long_frame(made), name="t", knobs=knobs).digest == made.digest
    for suffix in (".csv", ".parquet", ".jsonl"):
        write_long_table(made, folder / f"t{suffix}")
        again = read_long_table(folder / f"t{suffix}", knobs=knobs)
        assert (again.name, again.digest) == ("t", made.digest)


def test_texts_zipped_and_plain(tmp_path):
    with input_error("csv"):
        write_long_table(table(), tmp_path / "t.xlsx")
    assert list(tmp_path.iterdir()) == []
    texts = {"t.csv.gz": frame().write_csv(), "t.jsonl.gz": frame().write_ndjson()}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert read_long_table(tmp_path / name).digest == table().digest
    # brackets in a name are no pattern: without the second file there is nothing to read
    for suffix in (".csv", ".parquet"):
        write_long_table(table(), tmp_path / f"t1{suffix}")
        other = table(frame(accuracy=[0.0] * 4))
        write_long_table(other, tmp_path / f"t[1]{suffix}")
        assert read_long_table(tmp_path / f"t[1]{suffix}").digest == other.digest
    # the ids of a CSV stay text
    (tmp_path / "t.csv").write_text("\ufeffsample_id,k,accuracy,latency_ms\n007,1,1,2\n7,1,0,3\n")
    assert read_long_table(tmp_path / "t.csv").sample_ids == ("007", "7")


def test_json_lines_with_nan_where_it_does_not_matter(tmp_path):
    rows = [row | {"prefill_ms": math.nan} for row in frame().to_dicts()]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_long_table(tmp_path / "t.jsonl").digest == table().digest
    with input_error(r"t\.jsonl: 4 rows .*prefill_ms"):
        read_long_table(tmp_path / "t.jsonl", latency="prefill_ms")


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("t.csv", "", "csv"),
        ("t.csv", "sample_id,k,accuracy,latency_ms\n", "no row"),
        ("t.csv", "sample_id,k,accuracy,latency_ms\n1,2,3,4,5\n", "csv"),
        ("t.csv", "sample_id,k,k,accuracy,latency_ms\n1,2,3,1,4\n", "'k'"),
        ("t.csv", "sample_id,k,accuracy,latency_ms\n1,2,1,true\n", "'latency_ms'"),
        ("t.csv.gz", "sample_id", ""),
        ("t.parquet", "sample_id", "parquet"),
        ("t.xlsx", "", "csv"),
        ("t.jsonl", "", "none"),
        ("t.jsonl", '{"sample_id": ', "jsonl"),
        ("t.jsonl", "[" * 100_000, "nested"),
        ("t.jsonl", '{"k": 2}\n[1, 2]', "row 2"),
        ("t.jsonl", '{"k": 2, "k": 3}', "'k'"),
        ("t.jsonl", '{"k": 123456789012345678901234567890}', "'k'"),
        ("t.jsonl", '{"k": true}\n{"k": 3}', "'k'"),
        ("t.jsonl", '{"k": "1"}\n{"k": Infinity}', "'k'"),
        ("t.jsonl", '{"sample_id": 1, "k": 2, "accuracy": 1, "latency_ms": true}', "'latency_ms'"),
        ("t.jsonl", '{"sample_id": NaN, "k": 2, "accuracy": 1, "latency_ms": 2}', "'sample_id'"),
    ],
)
def test_bad_table_files(tmp_path, name, content, fault):
    with input_error(rf"{name}: no such file"):
        read_long_table(tmp_path / name)
    (tmp_path / name).write_text(content)
    with input_error(rf"{name}: .*{fault}"):
        read_long_table(tmp_path / name)


def test_a_large_table_is_made_in_seconds():
    """Make 1.6 million cells, as in the largest grid in use.

    It takes a second or two; a test that runs for minutes says that rows are taken one by one.
    """
    n, c = 6800, 240
    knobs = pl.DataFrame({"top_k": range(4, 64, 4)}).join(
        pl.DataFrame({"max_crops": range(16)}), how="cross"
    )
    data = pl.DataFrame({"sample_id": range(n)}).join(knobs, how="cross")
    made = table(data.with_columns(accuracy=np.linspace(0, 1, n * c), latency_ms=np.arange(n * c)))
    assert made.accuracy.shape == (n, c)
    assert made.latency_ms[3, 5] == 3 * c + 5

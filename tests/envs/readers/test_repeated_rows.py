"""Rows that measure a cell again: read, refused where they are copies, and written back."""

import polars as pl
import pytest
from helpers import identical, input_error, repeated, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

import knobwise
from knobwise.envs.readers.exp_files import read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.long_table import (
    long_frame,
    read_long_table,
    table_from_frame,
    write_long_table,
)


def frame(**columns):
    """One sample under two configurations, of which the first was measured three times."""
    return pl.DataFrame(
        {
            "sample_id": ["a"] * 4,
            "top_k": [4, 4, 8, 4],
            "accuracy": [1.0, 1.0, 0.5, 1.0],
            "latency_ms": [12.0, 10.0, 20.0, 14.0],
        }
        | columns
    )


def table(**columns):
    return table_from_frame(frame(**columns), name="t", source="t.csv")


def cells(profile):
    """The measurements of each cell of the first sample."""
    return [[ms for ms in cell if ms == ms] for cell in profile.measurements_ms[0].tolist()]


def test_rows_with_a_repeat_are_the_measurements_of_a_cell_in_its_order():
    made = table(repeat=[2, 0, 0, 7])
    assert [knob.name for knob in made.knobs] == ["top_k"]
    assert cells(made) == [[10.0, 12.0, 14.0], [20.0]]
    identical(made.latency_ms, [[12.0, 20.0]])
    assert made.notes == ()
    # as text, from a CSV
    backwards = table_from_frame(frame(repeat=["2", "0", "0", "7"]).reverse(), name="t")
    assert backwards.digest == made.digest
    assert cells(table(repeat=[0, 1, 0, 2])) == [[12.0, 10.0, 14.0], [20.0]]


def test_rows_without_a_repeat_are_measurements_too_and_a_note_counts_them():
    made = table()
    assert cells(made) == [[10.0, 12.0, 14.0], [20.0]]
    assert "1 cells occur up to 3 times" in made.notes[0]
    assert table_from_frame(frame().reverse(), name="t").digest == made.digest
    assert table(repeat=[None] * 4).digest == made.digest


def test_accuracies_that_differ_are_averaged_and_a_note_counts_them():
    made = table(accuracy=[1.0, 0.0, 0.5, 0.5], repeat=[0, 1, 0, 2])
    identical(made.accuracy, [[0.5, 0.5]])
    assert "1 cells differ in accuracy" in made.notes[0]
    # a measurement without accuracy or latency is none
    made = table(accuracy=[1.0, None, 0.5, 0.0], repeat=[0, 1, 0, 2])
    assert (cells(made), made.accuracy[0, 0]) == ([[12.0, 14.0], [20.0]], 0.5)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"latency_ms": [12.0, 12.0, 20.0, 14.0]}, "latency.* sample a"),
        ({"repeat": [1, 1, 0, 2]}, "repeat.* sample a"),
        ({"repeat": [None, 1, 0, None]}, "repeat.* sample a"),
        ({"repeat": ["first", "1", "2", "3"]}, "'repeat' .*'first'"),
    ],
)
def test_copies_are_refused(columns, fault):
    with input_error(rf"^t\.csv: .*{fault}"):
        table(**columns)


def test_repeat_is_never_a_knob():
    with input_error("repeat"):
        table_from_frame(frame(repeat=[0, 1, 0, 2]), name="t", knobs=["top_k", "repeat"])


def test_a_repeat_column_of_cells_measured_once_costs_nothing():
    data = frame(latency_ms=[12.0, None, 20.0, None])
    once = table_from_frame(data, name="t")
    numbered = table_from_frame(data.with_columns(repeat=3), name="t")
    assert numbered.repeats_ms is None
    assert numbered.digest == once.digest


@pytest.mark.parametrize("once", [False, True])
def test_a_first_look_is_added_to_times_and_written_apart_again(once, tmp_path):
    data = frame(sample_id=list("aaab"), first_look_ms=[1.5, 1.5, 0.0, 2.0])[once:]
    made = table_from_frame(data, name="t")
    identical(made.first_look_ms, [[1.5, 0.0], [2.0, 0.0]])  # 0 where not profiled
    first = 11.5 if once else 12.5
    identical(made.latency_ms, [[first, 20.0], [16.0, float("nan")]])
    written = long_frame(made)
    assert sorted(written["latency_ms"]) == sorted(data["latency_ms"])
    assert sorted(written["first_look_ms"]) == sorted(data["first_look_ms"])
    write_long_table(made, tmp_path / "t.parquet")
    assert read_long_table(tmp_path / "t.parquet").digest == made.digest


@settings(max_examples=15)
@given(
    st.integers(0, 2**16),
    st.integers(2, 5),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([".csv", ".parquet", ".jsonl"]),
    st.booleans(),
)
def test_what_is_written_is_read_again(tmp_path_factory, seed, most, holes, suffix, shuffled):
    profile = repeated(small_table(12, seed, holes, features=False), most, seed)
    path = tmp_path_factory.mktemp("rows") / f"small{suffix}"
    write_long_table(profile, path)
    assert read_long_table(path).digest == profile.digest
    rows = long_frame(profile)
    assert len(rows) == int((~profile.repeats_ms.isnan()).sum())
    rows = rows.sample(fraction=1, shuffle=True, seed=seed) if shuffled else rows
    assert knobwise.read(rows).digest == profile.digest
    if not holes:
        write_exp5_exp6(rows, path.parent / "exp5", path.parent / "exp6", "small")
        again = read_exp5_exp6(path.parent / "exp5", path.parent / "exp6", "small")
        assert again.digest == profile.digest
        assert again.notes == ()

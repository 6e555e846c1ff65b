"""Long tables: what becomes a knob, what a hole, what an error; and that writing and reading give
the table back."""

import gzip
import math

import numpy as np
import polars as pl
import pytest
import torch
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

NAN = math.nan


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
    return table_from_frame(frame() if data is None else data, name="t", source="t.csv", **choices)


SECONDS = [1_769_860_000 + row for row in range(4)]
"""Times since 1970."""


def test_rows_become_cells():
    made = table()
    assert (made.sample_ids, made.notes) == (("a", "b"), ())
    assert [made.label(c) for c in range(2)] == ["top_k=4", "top_k=8"]
    identical(made.accuracy, torch.tensor([[0.5, 1.0], [0.0, 0.25]]))
    identical(made.latency_ms, torch.tensor([[10.0, 20.0], [30.0, 40.0]]))
    assert made.configurations.dtype == torch.int64
    made = table(frame(sample_id="a", dataset=["x", "x", "y", "y"]))  # two samples
    assert (made.datasets, made.sample_ids) == (("x", "y"), ("a", "a"))
    data = frame(dataset=["y", "x", "x", "y"])  # the order of the rows does not matter
    assert table(data.reverse()).digest == table(data).digest


@pytest.mark.parametrize(
    "times",
    [
        [4.0, 3.5, 1.0, 9.0],
        ["4", "3.5", "1", "9"],
        ["2026-01-31T12:00:04", "2026-01-31T12:00:03", "2025-12-31T12:00:01", "2026-02-01T00:00:00"],
        pl.Series([4, 3, 1, 9]).cast(pl.Datetime),
    ],
    ids=["numbers", "text", "dates", "datetimes"],
)  # fmt: skip
def test_samples_stand_in_the_order_of_their_first_times(times):
    made = table(frame(at=times), time="at")
    assert made.sample_ids == ("b", "a")
    identical(made.accuracy, [[0.0, 0.25], [0.5, 1.0]])
    assert [knob.name for knob in made.knobs] == ["top_k"]
    assert len(table(frame(at=SECONDS), time="at").sample_ids) == 2


@pytest.mark.parametrize(
    ("ids", "order"),
    [
        ([10, 9, 100], ("9", "10", "100")),
        (["b", "10", "9", "007"], ("007", "9", "10", "b")),
        ([2.0, 1.0], ("1", "2")),
    ],
)
def test_samples_are_sorted(ids, order):
    data = pl.DataFrame({"sample_id": ids}).with_columns(k=1, accuracy=1.0, latency_ms=1.0)
    assert table(data).sample_ids == order


def test_missing_rows_and_empty_cells_are_holes():
    data = frame(accuracy=[1.0, 0.5, None, 0.0], latency_ms=[20.0, None, 40.0, 30.0])
    made = table(data)
    identical(made.accuracy, [[NAN, 1.0], [0.0, NAN]])
    identical(made.latency_ms, [[NAN, 20.0], [30.0, NAN]])
    assert made.notes[0] == "2 rows without accuracy or latency: not profiled"
    assert made.notes[1].startswith("1 of them lack accuracy")
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
        (["minimal", "high", "none", "xhigh"], ("none", "minimal", "high", "xhigh")),
        (["max", "medium", "minimal", "low"], ("minimal", "low", "medium", "max")),
        (["low", "huge", "low", "huge"], ("huge", "low")),
        ([True, False, True, False], (False, True)),
        (["true", "false", "true", "false"], ("false", "true")),
        ([1, 0, 1, 0], (0, 1)),
        (pl.Series(["z", "y", "z", "y"], dtype=pl.Categorical), ("y", "z")),
        (["", "-g", "", "-g"], ("", "-g")),
    ],
)
def test_knob_values(column, values):
    (knob,) = table(frame(top_k=column)).knobs
    assert knob.values == values
    assert [type(v) for v in knob.values] == [type(v) for v in values]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_true_and_false_come_back_from_files(tmp_path, suffix):
    # numbers beside them stay numbers
    made = table(frame(top_k=[1, 0, 1, 0], cache=[True, False] * 2), features=None)
    write_long_table(made, tmp_path / f"t{suffix}")
    again = read_long_table(tmp_path / f"t{suffix}", name="t")
    for each in (made, again):
        assert {knob.name: [*map(repr, knob.values)] for knob in each.knobs} == {
            "top_k": ["0", "1"],
            "cache": ["False", "True"],
        }
        # in words as in the files, and as in those of earlier versions
        assert each.label(1) == "top_k=1 cache=true"
    assert (
        made.digest
        == again.digest
        == table(frame(top_k=[1, 0, 1, 0], cache=["true", "false"] * 2)).digest
    )


def test_text_of_a_file_with_types_stays_text_and_pandas_spells_true_with_a_capital(tmp_path):
    spelled = frame(top_k=["True", "False", "true", "FALSE"])
    spelled.write_parquet(tmp_path / "t.parquet")
    spelled.write_csv(tmp_path / "t.csv")
    (knob,) = read_long_table(tmp_path / "t.parquet").knobs
    assert knob.values == ("FALSE", "False", "True", "true")
    (knob,) = read_long_table(tmp_path / "t.csv").knobs
    assert [*map(repr, knob.values)] == ["False", "True"]
    frame(top_k=["true", "false", "true", "auto"]).write_csv(tmp_path / "t.csv")
    (knob,) = read_long_table(tmp_path / "t.csv").knobs
    assert knob.values == ("auto", "false", "true")


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


def test_a_measurement_is_no_knob():
    data = pl.DataFrame({"sample_id": np.arange(60) // 2, "k": [0, 1] * 30, "energy": range(60)})
    data = data.with_columns(accuracy=1.0, latency_ms=2.0)
    made = table(data.with_columns(pl.col("energy") * 7))
    assert ([knob.name for knob in made.knobs], made.num_configurations) == (["k"], 2)
    assert "energy" in made.notes[0]
    assert table(data, knobs=["k"]).num_configurations == 2


def test_accuracy_and_latency_are_a_choice():
    data = frame(soft_score=[0.1, 0.2, 0.3, 0.4], cost=[4, 3, 2, 1])
    made = table(data, accuracy="soft_score", latency="cost", knobs=["top_k"])
    identical(made.accuracy, [[0.2, 0.1], [0.4, 0.3]])
    identical(made.latency_ms, [[3, 4], [1, 2]])
    assert [k.name for k in table(data.drop("cost"), accuracy="soft_score").knobs] == ["top_k"]
    # a score serves as accuracy
    assert table(frame().rename({"accuracy": "score"})).digest == table().digest
    assert table(frame(score=0.0)).accuracy[0, 1] == 1


def in_parts(*parts):
    """Return rows of samples in these parts, of which two at a time show the same image."""
    ids = np.arange(len(parts))
    data = pl.DataFrame({"sample_id": ids, "image_id": ids // 2, "split": parts})
    return data.with_columns(k=1, accuracy=1.0, latency_ms=1.0)


def test_spellings_of_parts(tmp_path):
    made = table(in_parts("train", "Training", "val", "valid", "test", "test"))
    assert made.parts == ("train", "train", "validation", "validation", "test", "test")
    assert made.image_ids == tuple("001122")
    write_long_table(made, tmp_path / "t.csv")
    assert read_long_table(tmp_path / "t.csv").digest == made.digest
    again = table(in_parts("train", "train", "dev", "validation", "test", "testing"))
    assert again.digest == made.digest
    assert table(frame(image_id=None)).image_ids == ()


def test_a_split_with_one_part_is_where_the_samples_come_from():
    made = table(in_parts("validation", "validation"))
    assert (made.parts, len(made.notes)) == ((), 1)


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
VALUES = (
    st.integers(-(10**6), 10**6)
    | st.floats(-1e6, 1e6, width=32).filter(lambda v: v % 1 != 0)
    | st.just("x")
    | NAMES
)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["x", "y"]),
            NAMES | st.integers(0, 99).map(str),
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
    knobs = names[2:4]
    # a second setting of a sample, since one for each is no profile
    rows.append((*rows[0][:2], "another", *rows[0][3:]))
    made = table(pl.DataFrame(rows, schema=names, orient="row"), knobs=knobs)
    assert int(made.mask.sum()) == len(rows)
    assert table(long_frame(made), knobs=knobs).digest == made.digest
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
    other = table(frame(accuracy=0.0))
    for suffix in (".csv", ".parquet"):
        write_long_table(table(), tmp_path / f"t1{suffix}")
        write_long_table(other, tmp_path / f"t[1]{suffix}")
        assert read_long_table(tmp_path / f"t[1]{suffix}").digest == other.digest
    # the ids of a CSV stay text
    (tmp_path / "t.csv").write_text("\ufeffsample_id,k,accuracy,latency_ms\n007,1,1,2\n7,1,0,3\n")
    assert read_long_table(tmp_path / "t.csv").sample_ids == ("007", "7")


def test_json_lines_with_nan_where_it_does_not_matter(tmp_path):
    path = tmp_path / "t.jsonl"
    frame(prefill_ms=NAN).write_ndjson(path)
    path.write_text(path.read_text().replace("null", "NaN"))
    assert read_long_table(path).digest == table().digest
    with input_error(r"t\.jsonl: prefill_ms .*4 rows"):
        read_long_table(path, latency="prefill_ms")


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
    path = tmp_path / name
    with input_error(rf"{name}: no such file"):
        read_long_table(path)
    path.write_text(content)
    with input_error(rf"{name}: .*{fault}"):
        read_long_table(path)


def test_a_large_table_is_made_in_seconds():
    """Make 1.6 million cells, as in the largest grid in use.

    It takes a second or two; a test that runs for minutes says that rows are taken one by one.
    """
    n, c = 6800, 240
    data = pl.DataFrame({"top_k": range(4, 64, 4)})
    for name, size in (("max_crops", 16), ("sample_id", n)):
        data = pl.DataFrame({name: range(size)}).join(data, how="cross")
    made = table(data.with_columns(accuracy=np.linspace(0, 1, n * c), latency_ms=np.arange(n * c)))
    assert made.accuracy.shape == (n, c)
    assert made.latency_ms[3, 5] == 3 * c + 5


# -- rows that measure a cell again ----------------------------------------------------------------


def again(**columns):
    """One sample under two configurations, of which the first was measured three times."""
    rows = {"sample_id": "a", "top_k": [4, 4, 8, 4], "accuracy": [1.0, 1.0, 0.5, 1.0]}
    return frame(**rows | {"latency_ms": [12.0, 10.0, 20.0, 14.0]} | columns)


def measured(profile):
    """The measurements of each cell of the first sample."""
    return [[ms for ms in cell if ms == ms] for cell in profile.measurements_ms[0].tolist()]


def test_rows_with_a_repeat_are_the_measurements_of_a_cell_in_its_order():
    made = table(again(repeat=[2, 0, 0, 7]))
    assert [knob.name for knob in made.knobs] == ["top_k"]
    assert measured(made) == [[10.0, 12.0, 14.0], [20.0]]
    identical(made.latency_ms, [[12.0, 20.0]])
    (note,) = made.notes
    assert note.startswith("repeats that lack a row: top_k=8: 2 of 3. ")
    # as text, from a CSV
    backwards = table(again(repeat=["2", "0", "0", "7"]).reverse())
    assert backwards.digest == made.digest
    assert measured(table(again(repeat=[0, 1, 0, 2]))) == [[12.0, 10.0, 14.0], [20.0]]


def test_rows_without_a_repeat_are_measurements_too_and_a_note_counts_them():
    made = table(again())
    assert measured(made) == [[10.0, 12.0, 14.0], [20.0]]
    assert "1 cells occur up to 3 times" in made.notes[0]
    assert table(again().reverse()).digest == made.digest
    assert table(again(repeat=[None] * 4)).digest == made.digest


def test_accuracies_that_differ_are_averaged_and_a_note_counts_them():
    made = table(again(accuracy=[1.0, 0.0, 0.5, 0.5], repeat=[0, 1, 0, 2]))
    identical(made.accuracy, [[0.5, 0.5]])
    assert "1 cells differ in accuracy" in made.notes[0]
    # a measurement without accuracy or latency is none
    made = table(again(accuracy=[1.0, None, 0.5, 0.0], repeat=[0, 1, 0, 2]))
    assert (measured(made), made.accuracy[0, 0]) == ([[12.0, 14.0], [20.0]], 0.5)


def test_copies_of_a_row_are_left_out_and_named():
    copied = again(latency_ms=[12.0, 12.0, 20.0, 12.0])
    made = table(copied)
    assert made.digest == table(copied.unique(maintain_order=True)).digest
    (note,) = made.notes
    assert "copies" in note
    assert "2, such as of sample a (top_k=4)" in note
    # numbers say which are repeats, and which are copies
    numbered = again(repeat=[0, 1, 0, 2])
    twice = table(pl.concat([numbered, numbered]))
    assert twice.digest == table(numbered).digest
    assert "4, such as" in twice.notes[0]


def test_another_accuracy_at_the_same_latency_is_named():
    made = table(again(accuracy=[1.0, 0.0, 0.5, 1.0], latency_ms=[12.0, 12.0, 20.0, 14.0]))
    assert made.accuracy[0, 0] == pytest.approx(2 / 3)
    averaged, doubtful = made.notes[1:3]
    assert "1 cells differ" in averaged
    for note in (averaged, doubtful):
        assert "sample a (top_k=4)" in note
    assert "same latency" in doubtful


def test_a_repeat_column_of_cells_measured_once_costs_nothing():
    data = again(latency_ms=[12.0, None, 20.0, None])
    numbered = table(data.with_columns(repeat=3))
    assert (numbered.repeats_ms, numbered.digest) == (None, table(data).digest)


@pytest.mark.parametrize("once", [False, True])
def test_a_first_look_is_added_to_times_and_written_apart_again(once, tmp_path):
    data = again(sample_id=list("aaab"), first_look_ms=[1.5, 1.5, 0.0, 2.0])[once:]
    made = table(data)
    identical(made.first_look_ms, [[1.5, 0.0], [2.0, 0.0]])  # 0 where not profiled
    identical(made.latency_ms, [[11.5 if once else 12.5, 20.0], [16.0, NAN]])
    written = long_frame(made)
    for name in ("latency_ms", "first_look_ms"):
        assert sorted(written[name]) == sorted(data[name])
    write_long_table(made, tmp_path / "t.parquet")
    assert read_long_table(tmp_path / "t.parquet").digest == made.digest
    # it is in ms whatever the name and the unit of the latency
    seconds = data.with_columns(runtime=pl.col("latency_ms") / 1000).drop("latency_ms")
    of_seconds = table(seconds, latency="runtime", unit="s")
    torch.testing.assert_close(of_seconds.latency_ms, made.latency_ms, equal_nan=True)
    identical(of_seconds.first_look_ms, made.first_look_ms)


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
    folder = tmp_path_factory.mktemp("rows")
    path = folder / f"small{suffix}"
    write_long_table(profile, path)
    assert read_long_table(path).digest == profile.digest
    rows = long_frame(profile)
    assert len(rows) == int((~profile.repeats_ms.isnan()).sum())
    rows = rows.sample(fraction=1, shuffle=True, seed=seed) if shuffled else rows
    assert knobwise.read(rows).digest == profile.digest
    if not holes:
        write_exp5_exp6(rows, folder / "exp5", folder / "exp6", "small")
        again = read_exp5_exp6(folder / "exp5", folder / "exp6", "small")
        assert again.digest == profile.digest
        # cells have one to `most` repeats
        assert all(note.startswith("repeats that lack a row") for note in again.notes)


# -- what is refused -------------------------------------------------------------------------------


def measured_often():
    """Each row was measured three times, and its energy each time."""
    data = pl.DataFrame({"sample_id": np.arange(180) // 6, "k": [0, 0, 0, 1, 1, 1] * 30})
    data = data.with_columns(accuracy=1.0, latency_ms=pl.int_range(180), repeat=pl.lit(None))
    return data.with_columns(energy=pl.int_range(180) * 13 % 101)


COPIED = [12.0, 12.0, 20.0, 12.0]


@pytest.mark.parametrize(
    ("data", "choices", "named"),
    [
        # values
        (frame(latency_ms=[20.0, 10.0, NAN, 30.0]), {}, "latency_ms.*1 row .* b"),
        (frame(latency_ms=[20.0, -10.0, -1.0, 30.0]), {}, "latency_ms.*2 rows .* a"),
        (frame(latency_ms=[20.0, 10.0, 40.0, math.inf]), {}, "latency_ms.*1 row"),
        (frame(latency_ms=["20", "10", "fast", "30"]), {}, "latency_ms.*'fast'"),
        (frame(latency_ms=[[20.0]] * 4), {}, "latency_ms.*List|List.*latency_ms"),
        (frame(latency_ms=None), {}, "no row.*latency_ms"),
        (frame(accuracy=[50.0, 100.0, 0.0, 0.0]), {}, "accuracy.*2 rows"),
        (frame(accuracy=[1.0, NAN, 0.0, 0.0]), {}, "accuracy.*1 row"),
        (frame(first_look_ms=[-1.0, 0.0, 0.0, 0.0]), {}, "first_look_ms.*1 row"),
        (frame(sampling_weight=[2.0, None, 2.0, 2.0]), {}, "sampling_weight.*empty"),
        (frame(sample_id=["a", None, "b", "b"]), {}, "sample_id.*1 row"),
        (frame(sample_id=[[1]] * 4), {}, "sample_id.*List"),
        (frame(top_k=[8, None, 8, 4]), {}, "top_k.*1 "),
        (frame(top_k=[8.0, NAN, 8.0, 4.0]), {}, "top_k.*finite"),
        # columns
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
        # knobs, repeats and copies
        (measured_often(), {}, "energy"),
        (again(repeat=[0, 1, 0, 2]), {"knobs": ["top_k", "repeat"]}, "repeat"),
        (again(latency_ms=[12.0, 12.0, 20.0, 14.0]), {}, "latency.* sample a"),
        (again(repeat=[1, 1, 0, 2]), {}, "repeat.* sample a"),
        (again(repeat=[None, 1, 0, None]), {}, "repeat.* sample a"),
        (again(repeat=["first", "1", "2", "3"]), {}, "'repeat' .*'first'"),
        # rows that differ in another column are no copies
        (
            again(latency_ms=COPIED, note=[[x] for x in "xyyx"]),
            {},
            r"latency.* sample a \(top_k=4\)",
        ),
        # splits
        (in_parts("train", "minival"), {}, "split"),
        (frame(split=["train", "test", "test", "test"]), {}, "split"),
        # times
        (frame(at=[1, None, 2, 3]), {"time": "at"}, "time=at"),
        (frame(at=["1", "soon", "2", "3"]), {"time": "at"}, "time=at"),
        (frame(at=["x"] * 4), {"time": "at"}, "time=at"),
        (frame(at=[1, 2, 3, 4]), {"time": "then"}, "no column then"),
        (frame(at=[*SECONDS[:3], 1000 * SECONDS[3]]), {"time": "at"}, "time=at: 1 .*1769860003000"),
    ],
)
def test_bad_tables(data, choices, named):
    with input_error(rf"^t\.csv: .*({named})"):
        table(data, **choices)

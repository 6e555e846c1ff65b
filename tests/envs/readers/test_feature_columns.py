"""Columns of a table as features: which are taken, how values become numbers, what is missing."""

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from helpers import identical, input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.deployed.arrays import encode_request
from knobwise.envs import ProfileTable
from knobwise.envs.readers.feature_columns import encode, fit_column
from knobwise.envs.readers.feature_files import read_features
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.readers.long_table import read_long_table, table_from_frame
from knobwise.envs.tables.columns import Column

KINDS = ("ocr", "form", "ocr", "form", "chart", " ocr ")
"""The kind of each sample; the chart is the only one, so that it has no place of its own."""
TOKENS = (33, 40, 51, 62, 73, 84)
SIZES = [i * i % 601 for i in range(60)]
"""The tokens of each of more samples."""
NAN = float("nan")
COLUMNS = (Column("kind", ("form", "ocr"), False), Column("tokens", None, False))
BLOCK = [
    # form, ocr, (other), tokens
    [0, 1, 0, 33],
    [1, 0, 0, 40],
    [0, 1, 0, 51],
    [1, 0, 0, 62],
    [0, 0, 1, 73],
    [0, 1, 0, 84],
]


def test_keys_and_features_that_are_not_used_are_named():
    (note,) = read(wide()).notes
    assert "profile.features=auto" in note
    assert note.endswith("kind, tokens")
    frame = wide(fold=range(6))
    table = read(frame, features="auto")
    assert table.columns == COLUMNS
    for notes in (table.notes, read(frame).notes):
        assert any(note.endswith("fold") for note in notes)


def wide(kinds=KINDS, tokens=TOKENS, **columns):
    """A row for each of these samples and two settings of a knob."""
    per_sample = {"sample_id": range(len(kinds)), "kind": kinds, "tokens": tokens, **columns}
    crops = pl.DataFrame({"crops": [1, 4], "accuracy": [0, 1]})
    rows = pl.DataFrame(per_sample, strict=False).join(crops, how="cross")
    return rows.with_columns(latency_ms=10.0 + pl.int_range(pl.len()))


def read(frame, **options):
    return table_from_frame(frame, name="wide", **options)


@pytest.mark.parametrize("features", ["auto", ["kind", "tokens"]])
@pytest.mark.parametrize("empty", [None, "", " "])
def test_an_empty_cell_is_filled_from_the_other_rows_of_its_sample(features, empty):
    samples = len(SIZES)
    kinds = [("ocr", "form", "chart")[i % 3] for i in range(samples)]
    whole = wide(kinds, SIZES)
    want = read(whole, features=features)
    kind = whole["kind"].to_list()
    tokens = whole["tokens"].cast(pl.String).to_list()
    kind[3], kind[50], tokens[7] = empty, empty, empty
    holes = whole.with_columns(kind=pl.Series(kind), tokens=pl.Series(tokens))
    table = read(holes, features=features)
    assert (table.digest, table.columns) == (want.digest, want.columns)
    assert [note for note in table.notes if "filled" in note] == [
        "kind: empty in 2 rows, filled from others of the same sample",
        "tokens: empty in 1 row, filled from others of the same sample",
    ]
    # a sample that has none stays without
    kind[2] = empty
    lacks = read(holes.with_columns(kind=pl.Series(kind)), features=features)
    assert [column.gaps for column in lacks.columns] == [True, False]


def test_what_is_mostly_empty_is_no_property_of_the_sample():
    samples = len(SIZES)
    frame = wide(["ocr", "form"] * 30, SIZES)
    # an answer that failed says why; a setting may be none
    failed = ["late" if i % 9 == 4 else "cut" if i % 9 == 7 else None for i in range(2 * samples)]
    draft = ["tiny" if crops == 4 else None for crops in frame["crops"]]
    frame = frame.with_columns(trouble=pl.Series(failed), draft=pl.Series(draft))
    table = read(frame, features="auto", knobs=["crops"])
    assert [column.name for column in table.columns] == ["kind", "tokens"]
    assert not [note for note in table.notes if "filled" in note]
    with input_error("trouble is empty in "):
        read(frame, features=["trouble"], knobs=["crops"])


@pytest.mark.parametrize("features", ["auto", ["kind", "tokens"]])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_the_same_file_are_features(tmp_path, suffix, features):
    path = tmp_path / f"wide.{suffix}"
    getattr(wide(), f"write_{suffix}")(path)
    table = read_long_table(path, features=features)
    assert table.columns == COLUMNS
    identical(table.features["features"], BLOCK)
    labels = [column.labels for column in table.block_columns("features")]
    assert labels == [["kind=form", "kind=ocr", "kind=(other)"], ["tokens"]]
    assert [knob.name for knob in table.knobs] == ["crops"]
    table.save(path)
    again = ProfileTable.load(path)
    assert (again.columns, again.digest) == (COLUMNS, table.digest)


def test_the_order_of_rows_does_not_matter():
    shuffled = wide().sample(fraction=1.0, shuffle=True, seed=0)
    assert read(shuffled, features="auto").digest == read(wide(), features="auto").digest


def test_auto_leaves_out_what_cannot_be_a_feature():
    text = [f"question {i}" for i in range(6)]
    table = read(wide(title=text, boxes=[[1]] * 6, audio_ms=range(6)), features="auto")
    assert table.columns == COLUMNS
    assert any("'title'" in note for note in table.notes)
    # with the knobs named, one row for each sample is enough
    single = wide().gather_every(2)
    assert read(single, features="auto", knobs=["crops"]).columns == COLUMNS


NAMED = {"features": ["kind", "column"]}
SHIFTED = wide(["ocr", "form"] * 3).with_columns(pl.col("kind").shift())


@pytest.mark.parametrize(
    ("frame", "options", "named"),
    [
        (wide(column=["1", "2", "three", "4", "5", "6"]), NAMED, "column.*mixes.*'three'"),
        (wide(column=[None] * 6), NAMED, "column.*empty"),
        (wide(column=[f"text {i}" for i in range(6)]), NAMED, "column.*6 different values"),
        (wide(column=["1", "2", "3", "4", "5", "inf"]), NAMED, "column.*finite number: inf"),
        (wide(), {"features": ["kind", "size"]}, "features: size"),
        (wide(), {"features": ["kind", "sample_id"]}, "features: sample_id"),
        (wide(), {"features": ["kind", "accuracy"]}, "features: accuracy"),
        (wide(), {"features": []}, "features: no column"),
        (wide().drop("kind", "tokens"), {"features": "auto"}, "features: no column"),
        # what varies inside a sample
        (wide(), {"features": ["crops"], "knobs": ["kind"]}, "features: crops "),
        (SHIFTED, {"features": ["kind"], "knobs": ["crops"]}, "kind.*differs"),
        (wide().gather_every(2), {"features": "auto"}, "log of decisions"),
        (wide().drop("tokens"), {"features": "auto", "columns": COLUMNS}, "features: tokens"),
    ],
)
def test_what_cannot_be_a_feature_is_named(frame, options, named):
    with input_error(named):
        read(frame, **options)


@pytest.mark.parametrize("gap", ["n/a", "#N/A", "NaN", "?", "null"])
def test_a_missing_number_is_nan_and_a_missing_text_is_a_value(gap):
    kinds = ["ocr", "", "ocr", "form", "form", None]
    table = read(wide(kinds, ["33", "", gap, "1e1", "-.5", " 7 "]), features="auto")
    kind = Column("kind", ("form", "ocr", ""), True)
    assert table.columns == (kind, Column("tokens", None, True))
    block = table.features["features"]
    identical(block[:, 4], [33, NAN, NAN, 10, -0.5, 7])
    identical(block[:, :4].argmax(1), [1, 2, 1, 0, 0, 2])
    assert kind.labels[2] == "kind=(missing)"


def test_a_checkpoint_keeps_its_own_values():
    """On another profile the columns are those of the training, whatever the profile holds."""
    other = wide(["form", "new", "new", "", "ocr", "ocr"], [1, 2, None, 4, 5, 6])
    table = read(other, features="auto", columns=COLUMNS)
    assert table.columns == COLUMNS
    block = table.features["features"]
    identical(block[:, :3].argmax(1), [0, 2, 2, 2, 1, 1])
    identical(block[:, 3], [1, 2, NAN, 4, 5, 6])


def test_a_feature_file_may_hold_numbers_and_text(tmp_path):
    path = tmp_path / "f.csv"
    samples = pl.DataFrame({"sample_id": range(6), "kind": KINDS, "tokens": TOKENS, "split": "x"})
    samples.write_csv(path)
    features = read_features(path)
    assert features.notes == ("keys that are no features: split",)
    table = read(wide().drop("kind", "tokens"), features=path)
    assert features.columns == table.columns == COLUMNS
    for blocks in (features.blocks, table.features):
        identical(blocks["features"], BLOCK)
    samples.with_columns(features=1).write_csv(path)
    with input_error("rename"):
        read_features(path)


def test_joined_profiles_have_the_same_columns():
    table = read(wide(), features="auto")

    def joined(other, **changes):
        return join_tables([table, replace(other, name="b", **changes)]).columns

    gappy = read(wide(tokens=[1, 2, 3, 4, 5, None]), features="auto")
    assert joined(gappy) == (COLUMNS[0], COLUMNS[1]._replace(gaps=True))
    other = read(wide(["form", "new"] * 3), features="auto")
    with input_error("kind"):
        joined(other, features=table.features)
    assert joined(table, columns=()) == ()


def test_few_features_do_not_identify_an_input():
    table = read(wide(["ocr"] * 2 + ["form"] * 4, [1] * 6), features=["kind", "tokens"])
    rows = np.arange(6)
    assert len(set(table.fingerprints(rows))) == 6
    assert len(set(replace(table, columns=()).fingerprints(rows))) == 2


VALUES = st.one_of(
    st.none(),
    st.floats(width=32),
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.sampled_from(["ocr", " form", "new", "", "  "]),
)


@given(kind=VALUES, tokens=VALUES, gaps=st.booleans())
@settings(max_examples=200)
def test_numpy_encodes_a_request_as_the_table_was_read(kind, tokens, gaps):
    """The two encoders agree, also in what they refuse. Text that spells a number is a number in a
    file and refused in Python, so there is none here."""
    columns = [column._replace(gaps=gaps) for column in COLUMNS]
    request = {"kind": kind, "tokens": tokens, "other": 1}
    block, (fault, *_) = encode(pl.DataFrame([request], strict=False), columns)
    # a file does not tell the number 3 from the text 3
    is_number = not isinstance(kind, str) and kind is not None and kind == kind
    if fault is not None or is_number:
        with pytest.raises(ValueError, match=r"^features: '(kind|tokens)' "):
            encode_request(columns, request)
    else:
        np.testing.assert_array_equal(encode_request(columns, request), block[0])


def test_a_category_that_is_a_number_is_found_in_a_column_that_pandas_made_a_float():
    column = Column("kind", ("1", "2.0", "2.5", "a", ""), True)
    # 3 is another one
    for dtype in (pl.Float64, pl.Float32, pl.Decimal(9, 1)):
        numbers = pl.Series("kind", [1.0, 2.0, 2.5, None, 3.0]).cast(dtype)
        block, _ = encode(numbers.to_frame(), [column])
        assert block.argmax(1).tolist() == [0, 1, 2, 4, 5]
    odd = pl.Series("kind", [math.inf, math.nan, 1e30])
    assert encode(odd.to_frame(), [column])[0].argmax(1).tolist() == [5, 4, 5]


def test_only_the_most_frequent_texts_get_a_place():
    names = [f"k{i:02}" for i in range(60)]
    column = fit_column(pl.Series("kind", [*names, *names, "k59", "rare"]))
    assert column.categories == (*names[:49], "k59")

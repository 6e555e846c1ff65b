"""Ids: what is one, what has lost digits, and that an id is the same in files of any type."""

import json
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
import torch
from helpers import identical, input_error
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import knobwise
from knobwise.envs.readers.column_values import name_column
from knobwise.envs.readers.feature_files import attach_features, read_features
from knobwise.envs.readers.long_table import read_long_table, table_from_frame
from knobwise.profiling.measuring.questions import read_vqa_data


def measured(ids, **columns):
    """Two configurations of each id."""
    rows = {
        "sample_id": np.repeat(np.array(ids), 2),
        "mode": ["fast", "full"] * len(ids),
        "accuracy": [0, 1] * len(ids),
        "latency_ms": [10.0, 20.0] * len(ids),
    }
    return pl.DataFrame(rows | columns)


def read(frame, **choices):
    return table_from_frame(frame, name="t", **choices)


LOST = {
    "2^53 and more": [2.0**53 + 2, 5.0],
    "beyond int64": [1e19, 5.0],
    "negative": [-1e17, 5.0],
    "float32": np.array([2**24 + 2, 5], np.float32),
    "float16": np.array([4096, 5], np.float16),
    "spreadsheet": ["1.23456E+11", "5"],
    "decimal comma": ["1,2E+11", "5"],
    "spaces": [" 1.23456E+11 ", "5"],
    "R": ["1e+05", "99999"],
    "a float as text": ["9007199254740994.0", "5.0"],
}


@pytest.mark.parametrize("ids", LOST.values(), ids=LOST)
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_ids_that_lost_digits_are_refused_in_every_table(tmp_path, ids, suffix):
    path = tmp_path / f"t.{suffix}"
    frame = measured(ids)
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, frame.to_dicts())))
        exact = frame["sample_id"].dtype in (pl.Float16, pl.Float32)
    else:
        getattr(frame, f"write_{suffix}")(path)
        # text has the digits of a float that is narrower than float64
        exact = suffix == "csv" and frame["sample_id"].dtype in (pl.Float16, pl.Float32)
    if exact:
        assert knobwise.read(path).num_samples == 2
        return
    with input_error(rf"t\.{suffix}: .*sample_id"):
        knobwise.read(path)


@pytest.mark.parametrize("ids", LOST.values(), ids=LOST)
def test_ids_that_lost_digits_are_refused_in_features(tmp_path, ids):
    np.savez(tmp_path / "f.npz", sample_id=np.array(ids), x=[0.0, 1.0])
    pl.DataFrame({"sample_id": ids, "x": [0.0, 1.0]}).write_parquet(tmp_path / "f.parquet")
    names = ["f.npz", "f.parquet"]
    if not isinstance(ids[0], str):
        tensors = {"sample_id": torch.tensor(ids), "x": torch.zeros(2)}
        torch.save(tensors, tmp_path / "f.pt")
        save_file(tensors, tmp_path / "f.safetensors")
        names += ["f.pt", "f.safetensors"]
    for name in names:
        with input_error(rf"{name}: .*sample_id"):
            read_features(tmp_path / name)
    for column in ("image_id", "user"):
        rows = measured(["a", "b"]).with_columns(
            pl.Series(np.repeat(np.array(ids), 2)).alias(column)
        )
        with input_error(column):
            read(rows, group="user" if column == "user" else None)


def test_ids_of_half_a_float_are_refused(tmp_path):
    ids = torch.tensor([1, 2], dtype=torch.bfloat16)
    save_file({"sample_id": ids, "x": torch.zeros(2)}, tmp_path / "f.safetensors")
    with input_error("sample_id"):
        read_features(tmp_path / "f.safetensors")


@given(st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=5, unique=True))
def test_whole_numbers_of_any_type_are_the_same_ids(ids):
    names = [str(number) for number in ids]
    floats = [float(number) for number in ids]
    whole = pl.Series(ids, dtype=pl.Int64)
    written = [f"{number:.18e}" for number in floats]
    for series in (
        whole,
        pl.Series(floats),
        pl.Series([repr(number) for number in floats if abs(number) < 1e16]),
        pl.Series(written),
        whole.cast(pl.Decimal(20, 0)),
        whole.cast(pl.Decimal(22, 2)),
        pl.Series(names),
    ):
        assert name_column(series).to_list() == names


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["007", "7"], ["007", "7"]),
        (["7.0", "x"], ["7.0", "x"]),
        (["5e10", "12E4", "1.5"], ["5e10", "12E4", "1.5"]),
        ([7.0, 7.5], ["7", "7.5"]),
        ([2**63, 1], [str(2**63), "1"]),
        ([2**63 - 1, 1], [str(2**63 - 1), "1"]),
        ([Decimal(10**30), Decimal(1)], [str(10**30), "1"]),
    ],
)
def test_other_names_stay_as_they_are(ids, names):
    assert name_column(pl.Series(ids)).to_list() == names


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint64, str])
def test_a_float_id_in_one_file_is_the_whole_number_in_the_other(tmp_path, kind):
    np.savez(tmp_path / "f.npz", sample_id=np.array([12, 7]).astype(kind), x=[12.0, 7.0])
    for ids in ([7.0, 12.0], [7, 12], ["7", "12"], ["7.0", "12.0"]):
        table = attach_features(read(measured(ids)), tmp_path / "f.npz")
        identical(table.features["x"], [[7.0], [12.0]])


def test_an_empty_id_is_refused_by_the_name_of_its_column():
    """A row without a measurement, as below a table of a spreadsheet, needs no id."""
    frame = measured(["a", "b"]).rename({"sample_id": "uid"})
    with input_error("uid"):
        read(frame.with_columns(uid=pl.Series(["a", "a", "b", None])), id="uid")
    below = pl.DataFrame([{"uid": None}], schema=frame.schema)
    assert read(pl.concat([frame, below]), id="uid").num_samples == 2


def test_the_index_of_pandas_is_no_feature_of_a_file(tmp_path):
    rows = pl.DataFrame({"": [0, 1], "sample_id": ["a", "b"], "x": [0.5, 0.1]})
    rows.write_csv(tmp_path / "f.csv")
    table = read(measured(["a", "b"]), features=tmp_path / "f.csv")
    identical(table.features["features"], [[0.5], [0.1]])


def test_decimals_are_numbers(tmp_path):
    """As databases export them: accuracy, latency, knob, feature and a list of features."""
    money = pl.Decimal(12, 4)
    frame = measured([1, 2]).with_columns(
        pl.col("accuracy", "latency_ms", "sample_id").cast(money),
        effort=pl.Series(["0.2500", "4.0000"] * 2).cast(money),
        size=pl.Series(["1.5", "1.5", "20", "20"]).cast(money),
    )
    frame.drop("mode").write_parquet(tmp_path / "t.parquet")
    table = read_long_table(tmp_path / "t.parquet", features="auto")
    assert table.sample_ids == ("1", "2")
    assert table.knobs[0].values == (0.25, 4)
    identical(table.accuracy, [[0.0, 1.0], [0.0, 1.0]])
    identical(table.latency_ms, [[10.0, 20.0], [10.0, 20.0]])
    identical(table.features["features"], [[1.5], [20.0]])
    blocks = {"x": [["1.5", "2"], ["3", "4"]], "sample_id": ["1", "2"]}
    columns = {"x": pl.List(money), "sample_id": pl.Decimal(5, 0)}
    pl.DataFrame(blocks).cast(columns).write_parquet(tmp_path / "f.parquet")
    identical(read_features(tmp_path / "f.parquet").blocks["x"], [[1.5, 2.0], [3.0, 4.0]])


def test_questions_whose_ids_a_spreadsheet_shortened(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("id,question,answer\n1.2E+11,why?,so\n")
    with input_error(r"q\.csv: .*'id'"):
        read_vqa_data(path, images=False)

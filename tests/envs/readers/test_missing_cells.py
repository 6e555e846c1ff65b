"""Cells without a row that count as failures."""

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error, small_table

from knobwise.envs.readers.long_table import long_frame, table_from_frame
from knobwise.envs.readers.missing_cells import cells_as_failed
from knobwise.experiments.settings.profiles import TableProfile, read_profile

ROWS = [
    ("a", 0, "small", 1.0, 10.0),
    ("a", 0, "large", 1.0, 40.0),
    ("a", 1, "small", 0.0, 12.0),
    ("a", 2, "small", 1.0, 11.0),
    ("a", 2, "large", None, None),
    ("b", 0, "small", 1.0, 90.0),
    ("b", 1, "small", 0.0, 13.0),
]
NAMES = ["dataset", "sample_id", "model", "accuracy", "latency_ms"]


def frame_of(rows=ROWS):
    return pl.DataFrame(rows, NAMES, orient="row")


def test_cells_without_a_row_are_late_and_wrong_where_the_setting_ran():
    plain = table_from_frame(frame_of(), name="t")
    table = table_from_frame(frame_of(), name="t", missing="failed")
    assert plain.mask.sum() == 6
    # large was measured for no sample of b
    assert table.mask.tolist() == [[True, True]] * 3 + [[False, True]] * 2
    assert table.accuracy[:3].tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    assert table.latency_ms[:3, 0].tolist() == [40.0, 90.0, 90.0]
    assert torch.equal(table.accuracy[plain.mask], plain.accuracy[plain.mask])
    (note,) = [note for note in table.notes if "without a row" in note]
    assert "1 of model=large" in note


def test_a_sample_that_no_setting_answered_counts_if_it_has_rows():
    rows = [*ROWS, ("a", 9, "small", None, None), ("a", 9, "large", None, None)]
    table = table_from_frame(frame_of(rows), name="t", missing="failed")
    place = table.sample_ids.index("9")
    assert table.accuracy[place].tolist() == [0.0, 0.0]
    assert table.latency_ms[place].tolist() == [90.0, 90.0]


def test_a_failed_repeat_is_one_of_its_cell():
    sound = small_table(20)
    frame = long_frame(sound).with_columns(repeat=pl.lit(0))
    lost = frame.with_columns(repeat=pl.lit(1), accuracy=pl.lit(None, pl.Float32))
    rows = pl.concat([frame[:-1], lost])
    table = table_from_frame(rows, name="t", missing="failed")
    assert table.num_repeats == 2
    accuracy = table.accuracy.flatten()
    assert torch.equal(accuracy[:-1], sound.accuracy.flatten()[:-1] / 2)
    assert accuracy[-1] == 0


def test_drawn_cells_did_not_fail():
    frame = frame_of().with_columns(sampling_weight=2.0)
    with input_error("missing=failed.*drawn"):
        table_from_frame(frame, name="t", missing="failed")
    with input_error("missing='lost'.*failed"):
        table_from_frame(frame, name="t", missing="lost")


@pytest.mark.parametrize("suffix", ["csv", "safetensors"])
def test_the_setting_reaches_every_kind_of_file(tmp_path, suffix):
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        frame_of().write_csv(path)
    else:
        table_from_frame(frame_of(), name="t").save(path)
    table = read_profile(TableProfile(path=str(path), missing="failed"))
    assert table.mask.sum() == 8
    assert np.isclose(table.accuracy.nanmean(0).tolist(), [1 / 3, 3 / 5]).all()


def test_tables_without_gaps_stay_as_they_are():
    table = small_table(20)
    assert cells_as_failed(table) is table

"""Cells and repeats without a row, and rows that crashed at once, which count as failures."""

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error, small_table

from knobwise.envs.bandit.reward import expected_utility
from knobwise.envs.readers.failures import cells_as_failed
from knobwise.envs.readers.long_table import long_frame, table_from_frame
from knobwise.experiments.inspection.checks import findings_by_check
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
    assert "model=large: 1 of 3" in note


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


# -- repeats without a row -------------------------------------------------------------------------


def flaky_rows(samples=40):
    """Three repeats of each cell. Of `flaky`, always right, those of even samples lack one, and
    those of every fourth all; `steady` is right in half of the samples, and always answers."""
    rows = []
    for n in range(samples):
        kept = 0 if n % 4 == 0 else 2 if n % 2 == 0 else 3
        rows += [(n, "flaky", repeat, 1.0, 30.0 + repeat) for repeat in range(kept)]
        rows += [(n, "steady", repeat, float(n % 2), 50.0 + repeat) for repeat in range(3)]
    return pl.DataFrame(
        rows, ["sample_id", "model", "repeat", "accuracy", "latency_ms"], orient="row"
    )


def test_repeats_without_a_row_are_late_and_wrong():
    plain = table_from_frame(flaky_rows(), name="t")
    table = table_from_frame(flaky_rows(), name="t", missing="failed")
    # of four samples 0, 3, 2 and 3 of 3 repeats came
    assert plain.accuracy.nanmean(0).tolist() == [1.0, 0.5]
    assert table.accuracy.mean(0).tolist() == pytest.approx([8 / 12, 0.5])
    assert table.measurements_ms[0, 0].tolist() == [52.0] * 3
    assert table.measurements_ms[2, 0].tolist() == [30.0, 31.0, 52.0]
    assert table.latency_ms[2].tolist() == [31.0, 51.0]
    assert torch.equal(table.measurements_ms[1], plain.measurements_ms[1])
    late, right = expected_utility(table.accuracy, table.measurements_ms, torch.tensor(49.0)).T
    assert (late[1::2] == 1).all()
    assert (right == 0).all()
    # 10 samples lack three and 10 lack one
    for made, words in ((plain, "repeats that lack a row"), (table, "missing=failed: 40 measurem")):
        (note,) = [note for note in made.notes if words in note]
        assert "model=flaky: 40 of 120" in note
        assert "steady" not in note


def test_a_table_with_the_rows_of_what_failed_is_the_same():
    """As if the tool had written a row for each failure, wrong and as late as the slowest."""
    frame = flaky_rows()
    asked = pl.DataFrame(
        [(n, m, r) for n in range(40) for m in ("flaky", "steady") for r in range(3)],
        ["sample_id", "model", "repeat"],
        orient="row",
    )
    whole = asked.join(frame, on=asked.columns, how="left").with_columns(
        pl.col("accuracy").fill_null(0.0), pl.col("latency_ms").fill_null(52.0)
    )
    expected = table_from_frame(whole, name="t")
    table = table_from_frame(frame, name="t", missing="failed")
    assert torch.allclose(table.accuracy, expected.accuracy)
    assert torch.equal(table.measurements_ms, expected.measurements_ms)
    assert torch.equal(table.latency_ms, expected.latency_ms)
    assert not any("lack a row" in note for note in expected.notes)


def test_repeats_of_another_data_set_or_of_an_id_that_occurs_twice_are_not_lacking():
    once = flaky_rows().filter(repeat=0).with_columns(dataset=pl.lit("once"))
    frame = pl.concat([once, flaky_rows().filter(model="steady").with_columns(dataset=pl.lit("b"))])
    assert not any("lack a row" in note for note in table_from_frame(frame, name="t").notes)
    table = table_from_frame(frame, name="t", missing="failed")
    (note,) = [note for note in table.notes if "missing=failed" in note]
    assert "10 measurements" in note
    # of 40 samples one has its steady answers twice
    twice = pl.concat([once.drop("dataset"), flaky_rows().filter(sample_id=1, model="steady")[1:2]])
    table = table_from_frame(twice, name="t", missing="failed")
    assert table.num_repeats == 2
    assert (table.accuracy[1::2] == 1).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_cells_that_nobody_meant_to_measure_raise_no_note(weighted):
    """As knobwise measures a part of the cells, each equally often."""
    drawn = (pl.col("sample_id") + pl.col("model").str.len_chars()) % 3 > 0
    frame = flaky_rows().filter(drawn, pl.col("sample_id") % 2 == 1)
    if weighted:
        frame = frame.with_columns(sampling_weight=1.5)
    table = table_from_frame(frame, name="t")
    assert not table.mask.all()
    assert not any("lack a row" in note for note in table.notes)


# -- rows that crashed at once ---------------------------------------------------------------------


def crashed_rows(words=("SUCCESS", "CRASHED"), column="status", cost="latency_ms", score=1.0):
    """20 samples × (small, large), of which large crashes at every fifth, in no time and with this
    score."""
    rows = []
    for n in range(20):
        for model, usual in (("small", 10.0), ("large", 40.0)):
            failed = model == "large" and n % 5 == 0
            rows.append(
                {
                    "sample_id": n,
                    "model": model,
                    "accuracy": score if failed else float(n % 2 == 0 or model == "large"),
                    cost: 0.0 if failed else usual + n,
                    column: words[failed],
                }
            )
    return pl.DataFrame(rows)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("status", ("SUCCESS", "CRASHED")),
        # SMAC numbers what happened: 1 is success, 2 a crash
        ("status", (1, 2)),
        ("http_status", (200, 503)),
        ("error", ("", "connection refused")),
        ("is_error", (False, True)),
    ],
)
@pytest.mark.parametrize("score", [1.0, 0.5, 0.0])
def test_what_crashed_at_once_is_wrong_whatever_its_score(column, words, score):
    frame = crashed_rows(words, column, score=score)
    table = table_from_frame(frame, name="t", knobs=["model"])
    assert table.mask.all()
    failed = table.latency_ms == 0
    assert failed.sum() == 4
    assert (table.accuracy[failed] == 0).all()
    assert table.accuracy[:, 0].mean() == pytest.approx(0.8)
    # as late as the slowest, too
    late = table_from_frame(frame, name="t", knobs=["model"], missing="failed")
    assert (late.latency_ms[failed] == 59).all()
    assert (late.accuracy == table.accuracy).all()


def test_what_crashed_before_it_cost_anything_is_wrong_too():
    frame = crashed_rows(cost="usd")
    table = table_from_frame(frame, name="t", knobs=["model"], latency="usd", unit="USD")
    assert table.accuracy[:, 0].mean() == pytest.approx(0.8)
    checks = findings_by_check(table)
    (fault,) = checks.pop("costs_of_zero")
    assert fault.what.startswith("4 ")
    assert "model=large" in fault.what


@pytest.mark.parametrize(
    ("column", "words"),
    [
        # answered in no time, by a coarse timer
        ("status", ("ok", "ok")),
        # most answers have it
        ("status", ("partial", "partial")),
        # a measure, not a message
        ("error", (0.25, 0.125)),
    ],
)
def test_answers_of_no_time_keep_their_score(column, words):
    table = table_from_frame(crashed_rows(words, column), name="t", knobs=["model"])
    assert (table.accuracy[table.latency_ms == 0] == 1).all()
    assert not any("failed" in note for note in table.notes)


def test_a_crash_after_some_time_keeps_what_it_was_given():
    """Only what took nothing is judged by its status alone."""
    frame = crashed_rows().with_columns(pl.col("latency_ms").clip(1.0))
    table = table_from_frame(frame, name="t", knobs=["model"])
    assert (table.accuracy[table.latency_ms == 1] == 1).all()

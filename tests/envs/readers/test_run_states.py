"""Columns that say how runs ended, as in tables of Optuna and MLflow."""

import math
from pathlib import Path

import polars as pl
import pytest
from helpers import close, input_error

import knobwise
from knobwise.envs.readers.failures import states_among
from knobwise.envs.readers.long_table import table_from_frame

DATA = Path(__file__).parents[2] / "data"


def names_of(table):
    return [knob.name for knob in table.knobs]


def test_trials_of_optuna_that_failed_are_late_and_wrong_and_pruned_ones_are_noted():
    table = knobwise.read(
        DATA / "optuna.csv.gz", id="params_sample", accuracy="value", latency="duration"
    )
    assert names_of(table)[:2] == ["params_depth", "params_mode"]
    assert "state" not in names_of(table)
    # 12 samples: with depth 1, n·7 mod 5 < 2 is right, and with mode b every fourth sample, too;
    # with depth 3, sample 5 failed, and sample 4 was pruned at an accuracy of 0.3
    right = [
        [float(7 * n % 5 < 2 or (mode == "b" and n % 4 == 0)) for n in range(12)] for mode in "ab"
    ]
    deep = [
        float(7 * n % 5 < 4 or (mode == "b" and n % 4 == 0)) for mode in "ab" for n in range(12)
    ]
    deep[4] = deep[16] = 0.3
    deep[5] = deep[17] = 0.0
    wanted = [*right[0], *right[1], *deep]
    order = [int(name) for name in table.sample_ids]
    read = table.accuracy.T.reshape(4, 12)[:, [order.index(n) for n in range(12)]]
    close(read.flatten(), wanted, 1e-6)
    # 10 ms × depth × (1 + n mod 3 / 5), and what the rest of a trial takes
    row = order.index(0)
    assert 10 < table.latency_ms[row, 0] < 30 < table.latency_ms[row, 3] < 60
    assert any("2 rows" in note and "PRUNED" in note for note in table.notes)


def test_answers_of_mlflow_that_failed_are_no_setting_of_their_own():
    table = knobwise.read(
        DATA / "mlflow.csv.gz", id="request", accuracy="exact/value", latency="execution_duration"
    )
    assert [(knob.name, knob.values) for knob in table.knobs] == [("model", ("large", "small"))]
    # one of 22 right answers of `large` failed
    close(table.accuracy.mean(0), [21 / 24, 15 / 24], 1e-6)


@pytest.mark.parametrize(
    ("values", "is_state"),
    [
        (["COMPLETE", "FAIL"], True),
        (["OK", "ERROR", None], True),
        (["ok", "timeout", "memout", "crash"], True),
        (["done", "Out of memory"], True),
        (["", None, *[""] * 100, "FAILED", "RUNNING"], True),
        ([*["ok"] * 100, "Ohio"], False),
        (["", None], False),
        (["fast", "full"], False),
        (["none", "cache"], False),
    ],
)
def test_a_state_is_known_by_its_values(values, is_state):
    assert states_among(pl.DataFrame({"any": values, "number": 1})) == ["any"] * is_state


@pytest.mark.parametrize("features", [None, "auto"])
def test_a_state_is_neither_knob_nor_feature(features):
    """Not either if it never varies, or belongs to a sample that failed under each setting."""
    rows = [
        {
            "sample_id": f"q{n}",
            "mode": mode,
            "level": n % 3,
            "how": "FAIL" if n == 2 else "COMPLETE",
            "also": "finished",
            "accuracy": float(n % 2),
            "latency_ms": 1.0 + n,
        }
        for n in range(12)
        for mode in ("fast", "full")
    ]
    table = table_from_frame(pl.DataFrame(rows), name="t", features=features)
    assert names_of(table) == ["mode"]
    if features:
        assert [column.name for column in table.columns] == ["level"]


def test_rows_that_failed_without_a_time_need_one():
    rows = [
        ("a", "x", 1.0, 5.0, "DONE"),
        ("a", "y", None, None, "KILLED"),
        ("b", "x", 0.0, 6.0, "DONE"),
    ]
    frame = pl.DataFrame(rows, ["sample_id", "mode", "accuracy", "latency_ms", "end"], orient="row")
    table = table_from_frame(frame, name="t")
    assert table.mask.sum() == 2
    assert any("missing=failed" in note for note in table.notes)
    counted = table_from_frame(frame, name="t", missing="failed")
    assert counted.accuracy[0].tolist() == [1.0, 0.0]
    assert counted.latency_ms[0].tolist() == [5.0, 6.0]


@pytest.mark.parametrize("unit", [1, 1e3, 1e9])
@pytest.mark.parametrize("text", [False, True])
def test_when_an_answer_was_made_is_no_setting(unit, text):
    """Three values in 24 rows, as `created` of a quick batch has."""
    frame = pl.DataFrame(
        {
            "sample_id": [n // 2 for n in range(24)],
            "mode": ["fast", "full"] * 12,
            "created": [int((1795885536 + n // 9) * unit) for n in range(24)],
            "accuracy": [0.0, 1.0] * 12,
            "latency_ms": [10.0, 20.0] * 12,
        }
    )
    if text:
        frame = frame.with_columns(pl.col("created").cast(pl.String))
    assert names_of(table_from_frame(frame, name="t")) == ["mode"]
    sizes = frame.with_columns(created=pl.Series([1_500_000_000, 7_000_000_000] * 12))
    assert names_of(table_from_frame(sizes.drop("mode"), name="t")) == ["created"]


def test_an_infinite_accuracy_is_said_to_be_one_of_an_answer_that_failed():
    rows = {"sample_id": ["a", "a"], "mode": ["x", "y"], "accuracy": [1.0, -math.inf]}
    with input_error("infinite.*sample_id a.*failed has 0"):
        table_from_frame(pl.DataFrame(rows | {"latency_ms": [1.0, 0.0]}), name="t")

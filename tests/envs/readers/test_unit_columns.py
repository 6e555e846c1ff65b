"""Units that the values of a column, or a column beside it, tell."""

import datetime

import polars as pl
import pytest
from helpers import identical, input_error

from knobwise.envs.readers.long_table import table_from_frame


def rows_of(times, **columns):
    rows = {"sample_id": ["a", "a", "b", "b"], "mode": ["x", "y"] * 2, "accuracy": [0, 1, 1, 1]}
    return pl.DataFrame(rows | {"took": times} | columns)


@pytest.mark.parametrize(
    "times",
    [
        ["0 days 00:00:00.020500", "0 days 00:01:00", "1 days 00:00:00", "0 days 02:00:00.1"],
        ["0:00:00.020500", "0:01:00", "1 day, 0:00:00", "2:00:00.100000"],
        [
            datetime.timedelta(microseconds=20500),
            datetime.timedelta(minutes=1),
            datetime.timedelta(days=1),
            datetime.timedelta(hours=2, milliseconds=100),
        ],
    ],
)
def test_spans_of_time_are_read_in_ms(times):
    table = table_from_frame(rows_of(times), name="t", latency="took")
    identical(table.latency_ms, [[20.5, 60_000.0], [86_400_000.0, 7_200_100.0]])
    assert table.unit == "ms"
    with input_error("unit=USD"):
        table_from_frame(rows_of(times), name="t", latency="took", unit="USD")


def test_spans_may_be_missing_but_not_beside_other_text():
    table = table_from_frame(rows_of(["0:00:01", "NaT", "", "0:00:02"]), name="t", latency="took")
    identical(table.mask, [[True, False], [False, True]])
    for odd in ("12:30", "-1 days +23:59:59", "7"):
        with input_error("took"):
            table_from_frame(rows_of(["0:00:01", odd, "0:00:01", odd]), name="t", latency="took")


def test_what_has_a_unit_beside_it_was_measured():
    """In a few samples an outcome that varies seldom looks like a knob."""
    sizes = {"bytes.value": [7, 7, 7, 8], "bytes.unit": ["KB"] * 4, "level.value": [1, 2, 1, 2]}
    table = table_from_frame(rows_of([1, 2, 3, 4], **sizes), name="t", latency="took")
    assert [knob.name for knob in table.knobs] == ["mode", "level.value"]

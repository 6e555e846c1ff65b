"""The measurements in rows as numbers: accuracies from 0 to 1, costs, repeats and times."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import list_columns
from knobwise.envs.readers.column_values import as_share, check_range, id_column, number_column
from knobwise.envs.readers.dense_table import COST, TIME, WEIGHT
from knobwise.envs.readers.failures import failures, is_crashed, rows_as_failed
from knobwise.envs.readers.layouts import Layout

EPOCH = 1e9
"""Times of today, in seconds or smaller units since 1970, are larger."""


def profiled_rows(
    frame: pl.DataFrame,
    ids: str,
    accuracy: str,
    accuracy_unit: str,
    latency: str,
    timed: bool,
    missing: str,
    notes: list[str],
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows that have an accuracy and a latency, of any size, or raise InputError.

    Args:
        ids: the column of the ids, for messages.
        timed: whether that latency is a time.
        missing: what rows are that lack one of the two.

    Returns:
        All columns of these rows as they were read; and their ids as `id_column` returns them
        (`dataset`, if there is one, and `sample_id`), accuracy, latency, and if there are such
        columns `repeat`, `first_look` and `weight`.
    """
    measured = _as_numbers(frame, accuracy, accuracy_unit, latency, timed, notes)
    shares = measured["accuracy"].alias(accuracy)
    at_once = is_crashed(frame, shares, measured["latency"], notes)
    if missing == "failed":
        # the time of nothing is none
        timed_rows = pl.when(~at_once).then("latency").alias("latency")
        measured = rows_as_failed(measured.with_columns(timed_rows), notes)
    # what failed is late and wrong, not unmeasured
    shares = measured["accuracy"].alias(accuracy)
    failed = at_once | failures(frame, shares, measured["latency"], notes)
    has_time = measured["latency"].is_not_null()
    wrong = pl.when(failed & has_time).then(0.0).otherwise("accuracy")
    measured = measured.with_columns(accuracy=wrong)
    # a row that lacks one of the two says nothing
    profiled = measured["accuracy"].is_not_null() & has_time
    if not profiled.all():
        _note_not_profiled(profiled, failed, has_time, accuracy, notes)
        frame = frame.filter(profiled)
        measured = measured.filter(profiled)
    if frame.is_empty():
        raise InputError(f"no row with both {accuracy} and {latency}")
    keys = [id_column(frame[ids]).alias("sample_id")]
    if "dataset" in frame.columns:
        keys.insert(0, id_column(frame["dataset"]))
    return frame, measured.with_columns(keys)


def _as_numbers(
    frame: pl.DataFrame,
    accuracy: str,
    accuracy_unit: str,
    latency: str,
    timed: bool,
    notes: list[str],
) -> pl.DataFrame:
    """Return the measurements of rows as numbers: accuracy and latency, null where unknown, and
    perhaps `repeat`, `first_look` and `weight`; see `profiled_rows`."""
    shares = as_share(number_column(frame[accuracy]), accuracy_unit, notes)
    measured = pl.DataFrame({"accuracy": shares, "latency": number_column(frame[latency], False)})
    if "repeat" in frame.columns and not frame["repeat"].is_null().all():
        repeat = number_column(frame["repeat"], False).fill_null(0.0)
        measured = measured.with_columns(repeat=repeat)
    # a first look is a time, so it cannot be added to another cost
    if timed and "first_look_ms" in frame.columns:
        first_look = number_column(frame["first_look_ms"], False).fill_null(0.0)
        measured = measured.with_columns(first_look=first_look)
    if WEIGHT in frame.columns:
        measured = measured.with_columns(weight=number_column(frame[WEIGHT], False))
    return measured


def _note_not_profiled(
    profiled: pl.Series, failed: pl.Series, has_time: pl.Series, accuracy: str, notes: list[str]
) -> None:
    """Note how many rows lack an accuracy or a latency, and what those need that failed."""
    notes.append(f"{(~profiled).sum()} rows without accuracy or latency: not profiled")
    if untimed := (failed & ~has_time).sum():
        notes.append(
            f"{untimed} of them failed: give them the time after which they were given up, or "
            "missing=failed (on the command line profile.missing=failed) counts them as wrong and "
            "as late as the slowest"
        )
    if unscored := (has_time & ~profiled).sum():
        notes.append(
            f"{unscored} of them lack {accuracy} alone: if they failed or timed out, they were "
            f"late and wrong; give them {accuracy} 0"
        )


def check_ranges(rows: pl.DataFrame, accuracy: str, latency: str) -> None:
    """Raise InputError for accuracies out of range, impossible times, and unknown weights."""
    check_range(rows, "accuracy", accuracy)
    check_range(rows, "latency", latency)
    if "first_look" in rows.columns:
        check_range(rows, "first_look", "first_look_ms")
    if "weight" not in rows.columns:
        return
    check_range(rows, "weight", WEIGHT)
    if rows["weight"].null_count():
        raise InputError(f"{WEIGHT} is empty in some rows; write 1 where all cells were measured")


def times_of_rows(column: pl.Series) -> pl.Series:
    """Return when each row was measured, float64 on any scale. Raises InputError for a value that
    is no time, and for times since 1970 in several units."""
    times = column
    # text may hold numbers, or dates and times
    if column.dtype == pl.String and column.cast(pl.Float64, strict=False).is_null().any():
        with contextlib.suppress(pl.exceptions.PolarsError):
            times = column.str.to_datetime(strict=False)
    if times.dtype.is_temporal():
        times = times.cast(pl.Int64)
    times = times.cast(pl.Float64, strict=False)
    if times.null_count():
        wrong = column.filter(times.is_null())
        raise InputError(
            f"time={column.name}: {len(wrong)} values are neither numbers nor dates and times, "
            f"as 2026-01-31 12:00:05 is: {wrong[0]!r}, …"
        )
    # seconds since 1970 have ten digits; each smaller unit has three more
    units = (times.log10() // 3).filter(times >= EPOCH).value_counts(sort=True)
    if len(units) > 1:
        other = column.filter((times >= EPOCH) & (times.log10() // 3 != units.row(0)[0]))
        raise InputError(
            f"time={column.name}: {len(other)} times since 1970 are in another unit than the "
            f"others (seconds beside milliseconds?), such as {other[0]}; write all in the same unit"
        )
    return times.alias(TIME)


def refuse_costs(
    costs: Sequence[str], frame: pl.DataFrame, used: Sequence[str], layout: Layout
) -> None:
    """Raise InputError if a further cost is no column of measurements, or has another role."""
    if costs and layout.wide is not None:
        raise InputError(
            f"costs={', '.join(costs)}: a table with wide= has no rows for single configurations; "
            "write one row for each sample and configuration"
        )
    wrong = [name for name in costs if name not in frame.columns or name in (*used, "repeat")]
    if wrong:
        raise InputError(
            f"costs={', '.join(wrong)}: no column with a further cost in each row; its columns are "
            f"{list_columns(frame.columns)} (of these {', '.join(used)} are in use)"
        )


def costs_of_rows(
    frame: pl.DataFrame, rows: pl.DataFrame, costs: Sequence[str], notes: list[str]
) -> list[pl.Series]:
    """Return further costs as numbers, float64, null where unknown.

    Args:
        frame, rows: what `profiled_rows` returns.
        costs: columns of the frame.
        notes: what is noticed.
    """
    columns = []
    for name in costs:
        values = number_column(frame[name], False).alias(f"{COST}{name}")
        check_range(rows.with_columns(values), values.name, name)
        if values.null_count() == len(values):
            raise InputError(f"costs={name}: no row has a value in this column; leave it out")
        if unknown := values.null_count():
            notes.append(f"{name}: unknown in {unknown} rows, which its means leave out")
        columns.append(values)
    return columns

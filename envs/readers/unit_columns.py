"""In which unit a column is: as another one says, such as `time_unit` beside `real_time`, or as its
own values do."""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import glimpse, number_column
from knobwise.envs.readers.outcome_columns import UNITS, list_columns, named_like, plain_name
from knobwise.envs.tables.units import MS, TIMES, kept_as, own_unit

OF_ANY_TIME = ("", "time", "latency", "duration", "runtime", "cost")
"""What stands before `unit` in the name of a column that may be about any cost."""
SPAN = (
    r"^(?:(?P<days>\d+) days?,? )?"
    r"(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d(?:\.\d+)?)$"
)
"""A span of time as pandas and Python write it, such as `0 days 00:00:01.25`."""
PARTS_MS = {"days": 8.64e7, "hours": 3.6e6, "minutes": 6e4, "seconds": 1e3}
"""The parts of a span of time, in ms."""
NS_PER_MS = 1e6


def in_one_unit(
    frame: pl.DataFrame, cost: str, unit: str, notes: list[str]
) -> tuple[pl.DataFrame, str]:
    """Return the rows with the cost in one unit, and that unit: the one that is given, unless a
    column names the unit of each row, or the cost holds spans of time.

    Args:
        frame: rows with the column `cost`.
        cost: the column that the budget limits.
        unit: the unit that was asked for; `ms` may mean that nothing was.
        notes: what is noticed.

    Raises:
        InputError: the column contradicts `unit` or the name of the cost, is empty beside a cost,
            or names several units that cannot be converted; or spans of time have no unit of time.
    """
    spans = _spans_in_ms(frame[cost])
    if spans is not None:
        if kept_as(unit)[0] != MS:
            raise InputError(f"unit={unit}: {cost} holds spans of time; leave unit= out")
        notes.append(f"{cost}: spans of time, kept in ms; budgets are in ms")
        return frame.with_columns(spans), MS
    name = _unit_column(frame, cost)
    if name is None:
        return frame, unit
    words = frame[name].cast(pl.String).str.strip_chars()
    numbers = number_column(frame[cost], False).fill_nan(None)
    known = words.filter(numbers.is_not_null())
    units = known.drop_nulls().unique().sort().to_list()
    factors = {word: TIMES.get(word.casefold()) for word in units}
    times = [word for word in units if factors[word] is not None]
    in_name = own_unit(cost)
    if not units or (in_name and not times):
        return frame, unit
    listing = list_columns(units)
    if known.null_count():
        raise InputError(
            f"column {name} names the unit of {cost}, but is empty in {known.null_count()} rows; "
            "fill it in"
        )
    if len(units) > 1 and len(times) < len(units):
        raise InputError(
            f"column {name}: {cost} is in {listing}, which cannot be converted into each other; "
            "keep the rows of one unit"
        )
    wanted = unit if unit != MS else in_name
    if wanted and {_length(wanted)} != {_length(word) for word in units}:
        raise InputError(
            f"{cost} is in {wanted}, but column {name} says {listing}; rename the column that is "
            "wrong"
        )
    if not times:
        notes.append(f"{cost}: in {listing}, as column {name} says")
        return frame, units[0]
    notes.append(f"{cost}: read in {listing}, as column {name} says, kept in ms; budgets are in ms")
    factor = words.replace_strict(factors, default=None, return_dtype=pl.Float64)
    return frame.with_columns((numbers * factor).alias(cost)), MS


def _spans_in_ms(column: pl.Series) -> pl.Series | None:
    """Return spans of time in ms, float64, null where there is none; None if these are no spans."""
    if column.dtype == pl.Duration:
        return column.dt.total_nanoseconds().cast(pl.Float64) / NS_PER_MS
    if column.dtype != pl.String or not glimpse(column).str.contains(":", literal=True).any():
        return None
    text = column.str.strip_chars()
    text = text.set(text.is_in(["", "NaT"]), None)
    is_span = text.str.contains(SPAN)
    if not is_span.any() or not is_span.drop_nulls().all():
        return None
    parts = text.str.extract_groups(SPAN).struct.unnest().cast(pl.Float64)
    lengths = [pl.col(part).fill_null(0.0) * ms for part, ms in PARTS_MS.items()]
    whole = parts.select(pl.sum_horizontal(lengths).alias(column.name)).to_series()
    return whole.set(is_span.is_null(), None)


def measures_with_units(columns: Sequence[str]) -> list[str]:
    """Return those of these columns that another one gives a unit, as `latency.unit` does to
    `latency.value`: whoever writes so has measured."""
    stems = {name: re.sub(r"(?<=[./|])values?$", "", name) for name in columns}
    return [name for name, stem in stems.items() if stem != name and f"{stem}unit" in columns]


def _length(unit: str) -> tuple[str, float]:
    """Return what tells two units apart."""
    kept, factor = kept_as(unit)
    return kept.casefold(), factor


def _unit_column(frame: pl.DataFrame, cost: str) -> str | None:
    """Return the text column that names the unit of a cost: the one whose name has most in common
    with it."""
    best = None
    longest = -1
    for name in named_like(frame.columns, UNITS):
        about = plain_name(name).removesuffix("s").removesuffix("unit").rstrip("_")
        fits = about in OF_ANY_TIME or plain_name(cost).startswith(about)
        if fits and frame[name].dtype == pl.String and len(about) > longest:
            best = name
            longest = len(about)
    return best

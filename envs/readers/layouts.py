"""How files lay out measurements: under which names, and in which columns.

What is read here has the columns that `long_table.table_from_frame` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import (
    holds_no_text,
    number_column,
    number_repeats,
    refuse_lost_digits,
)

CONFIGURATION = "configuration"
"""The knob of a wide table."""


class Layout(NamedTuple):
    """How a table is laid out; all are options of `table_from_frame`."""

    id: str | None = None
    """The column of the ids; None for `sample_id`."""
    repeat: str | None = None
    """The column that numbers repeated measurements; None for `repeat`, if there is one."""
    right: Any = None
    """The value of the accuracy column, or several, that counts as 1, where all others are 0; None
    where the column holds numbers."""
    wide: Sequence[str] | None = None
    """The columns of a table with one row per sample that hold the accuracies, one for each
    configuration, which is named after it; None for one row per measurement."""
    wide_latency: Sequence[str | float] | None = None
    """A latency for each of these columns: a number, or the name of the column that holds it. Where
    no unit is given, that of time in which all these names end holds."""

    @property
    def names(self) -> set[str]:
        """The columns that have another name than ours."""
        return {name for name in (self.id, self.repeat) if name is not None}


PLAIN = Layout()
"""Our own names."""


def long_form(
    frame: pl.DataFrame, layout: Layout, accuracy: str, latency: str, notes: list[str]
) -> pl.DataFrame:
    """Return the rows with the columns `sample_id`, `repeat`, accuracy and latency.

    The columns that have another name stay, too.

    Args:
        frame: as it was read.
        accuracy, latency: the names of these columns; those of a wide table are made.
        notes: what is noticed.

    Raises:
        InputError: a column does not exist, holds what it may not, or is in the way.
    """
    frame = with_ids(frame, layout, notes)
    if layout.wide is not None:
        return _melted(frame, layout, accuracy, latency, notes)
    if layout.wide_latency is not None:
        raise InputError("wide_latency needs wide=, the columns with the accuracies")
    if layout.right is not None:
        _refuse_unknown("accuracy", [accuracy], frame)
        return _judged(frame, [accuracy], layout.right, notes)
    if accuracy in frame.columns and not frame[accuracy].dtype.is_numeric():
        _refuse_words(frame[accuracy])
    return frame


def with_ids(frame: pl.DataFrame, layout: Layout, notes: list[str]) -> pl.DataFrame:
    """Return the rows with `sample_id` and `repeat`, taken from the columns that the layout names.

    Raises InputError if one does not exist, or ids have lost digits.
    """
    columns = []
    for name, column, known in (
        ("id", layout.id, "sample_id"),
        ("repeat", layout.repeat, "repeat"),
    ):
        if column is None:
            continue
        _refuse_unknown(name, [column], frame)
        if known in frame.columns and column != known:
            notes.append(f"column {known}: not used, since {name}={column}")
        values = frame[column]
        if name == "id":
            refuse_lost_digits(values)
        else:
            values = number_repeats(values)
        columns.append(values.alias(known))
    return frame.with_columns(columns)


def _refuse_unknown(option: str, columns: Sequence[str], frame: pl.DataFrame) -> None:
    """Raise InputError if a table lacks a column that an option names."""
    if unknown := [column for column in columns if column not in frame.columns]:
        raise InputError(
            f"{option}={', '.join(unknown)}: there is no such column, but "
            f"{', '.join(name or 'one without a name' for name in frame.columns)}"
        )


def _refuse_words(accuracy: pl.Series) -> None:
    """Raise InputError, with the option that reads them, if accuracies are words."""
    if holds_no_text(accuracy.dtype):
        return
    try:
        number_column(accuracy.unique())
    except InputError as error:
        raise InputError(
            f"{error} (if it holds words such as ok and timeout, right=… says which counts as "
            "right, on the command line profile.right=…)"
        ) from error


def _judged(
    frame: pl.DataFrame, columns: Sequence[str], right: Any, notes: list[str]
) -> pl.DataFrame:
    """Return the rows with 1 where one of these columns has a value that counts as right, 0 where
    it has another, and null where it is empty. Raises InputError if no row is right."""
    if odd := [column for column in columns if holds_no_text(frame.schema[column])]:
        raise InputError(f"right={right}: column {odd[0]} holds {frame.schema[odd[0]]}, not words")
    values = right if isinstance(right, (list, tuple)) else [right]
    words = pl.Series([str(value) for value in values], dtype=pl.String).to_frame("value")
    wanted = words.select(_plain("value"))["value"]
    text = frame.select(_plain(column) for column in columns)
    judged = text.select(pl.all().is_in(wanted.implode()).cast(pl.Float64))
    if not (judged.sum_horizontal() > 0).any():
        raise InputError(f"right={right}: no row has it in column {', '.join(columns)}")
    if "true" in wanted:
        refuted = text.select(pl.any_horizontal(pl.all().str.starts_with("false("))).to_series()
        if refuted.any():
            notes.append(
                f"right={right}: {refuted.sum()} rows say false(…), which counts as wrong: if "
                "these are verdicts, of which a task may expect either, judge by a column that "
                "says whether they are correct"
            )
    return frame.with_columns(judged)


def _plain(column: str) -> pl.Expr:
    """Return values as text, true and 1.0 like True and 1; null is empty."""
    text = pl.col(column).cast(pl.String).str.strip_chars().str.to_lowercase()
    text = text.str.replace(r"^(-?\d+)\.0+$", "$1")
    return pl.when(~text.is_in(["", "?"])).then(text).alias(column)


def _melted(
    frame: pl.DataFrame, layout: Layout, accuracy: str, latency: str, notes: list[str]
) -> pl.DataFrame:
    """Return a row for each row and configuration of a wide table."""
    wide = list(layout.wide or ())
    costs = list(layout.wide_latency or ())
    if not wide or len(set(wide)) < len(wide):
        raise InputError(f"wide={wide}: give the columns of the configurations, each once")
    if len(costs) != len(wide):
        raise InputError(
            f"wide_latency={costs}: give a time (or a price, with unit=) for each of the "
            f"{len(wide)} columns of wide=, as a number or the name of a column"
        )
    _refuse_unknown("wide", wide, frame)
    columns = [str(cost) for cost in costs if not _is_number(cost)]
    _refuse_unknown("wide_latency", columns, frame)
    rest = frame.drop(wide, columns)
    made = (CONFIGURATION, accuracy, latency)
    if in_the_way := [name for name in made if name in rest.columns]:
        raise InputError(
            f"column {', '.join(in_the_way)}: a table of rows has it; leave out wide=, or rename it"
        )
    if "sample_id" not in rest.columns:
        notes.append("no column sample_id: each row is a sample, by its number from 0")
        rest = rest.with_row_index("sample_id")
    if layout.right is not None:
        frame = _judged(frame, wide, layout.right, notes)
    parts = []
    for name, cost in zip(wide, costs, strict=True):
        if _is_number(cost):
            times = pl.repeat(float(cost), len(frame), dtype=pl.Float64, eager=True)
        else:
            times = number_column(frame[str(cost)], False)
        parts.append(
            rest.with_columns(
                pl.lit(name).alias(CONFIGURATION),
                number_column(frame[name]).fill_nan(None).alias(accuracy),
                times.fill_nan(None).alias(latency),
            )
        )
    rows = pl.concat(parts)
    # an empty cell was not measured; in a table of measurements it might have failed
    measured = rows[accuracy].is_not_null()
    if not measured.all():
        notes.append(f"{(~measured).sum()} cells without accuracy: not profiled")
    return rows.filter(measured)


def _is_number(value: Any) -> bool:
    """Return whether this is a number, not the name of a column."""
    return isinstance(value, Real) and not isinstance(value, bool)

"""Columns of a table as numbers, names and knob values, read strictly.

Errors name the column that is wrong.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import polars as pl

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import Knob

DECIMAL = "; write a decimal comma as a point, and nothing between thousands"
GROUPED = r"[-+]?[\d.]*,[\d.,]*"
"""A number with a comma, which parts thousands or decimals."""
NO_NUMBER = ("", "?", "null", "none", "na", "n/a", "#n/a")
"""Spellings of a number that is missing, in lower case; nan is none of them."""
PERCENT = " (those in per cent need accuracy_unit=percent; bring any other scale to 0 … 1)"
TIERS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Knob values that have an order of their own, such as the reasoning efforts of APIs."""
NUMERAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
FRACTION = re.compile(r"-?\d+\.0*[1-9]\d*$")
"""A number with digits behind the point, of which the last may be zeros."""
MANTISSA_BITS: dict[Any, int] = {pl.Float16: 11, pl.Float32: 24, pl.Float64: 53}
"""Whole numbers below 2 to this power are exact in a float; larger ones may share a value."""
POWER_OF_TEN = r"^\s*[+-]?\d+(?:[.,](\d+))?[eE]\+(\d+)\s*$"
"""A number as spreadsheets and R shorten it, such as 1.23E+11: its decimals, and its exponent."""
TRUTH = "^(?i:true|false)$"
"""True or false, as files without types spell them."""
SEVERAL = 0.5
"""Names are kept apart from rows if there are at most so many for each."""
SMALL = 1 << 30
"""Whole numbers below this, of which two make no more than 32 bits."""
SEEN = 20
"""So many values are looked at before all are."""
FLOAT_AS_TEXT = r"^[+-]?\d+(\.0+|\.\d+[eE]\+\d+)$"
"""A whole number that was a float when it was written, such as 7.0."""


def holds_no_text(dtype: pl.DataType) -> bool:
    """Return whether values of this type are neither numbers nor text, nor written as text."""
    return dtype.is_nested() or dtype in (pl.Binary, pl.Duration, pl.Object)


def keys_of(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the ids of rows: `dataset`, if there is one, and `sample_id`."""
    # the columns themselves, where `select` may copy them
    return pl.DataFrame([rows[c] for c in ("dataset", "sample_id") if c in rows.columns])


def glimpse(series: pl.Series) -> pl.Series:
    """Return the first few values that are not empty, which mostly show what a column holds."""
    first = _without_blanks(series.head(SEEN))
    return _without_blanks(series).head(SEEN) if first.is_empty() else first


def _without_blanks(series: pl.Series) -> pl.Series:
    """Return the values that are neither null nor empty text."""
    known = series.drop_nulls()
    return known.filter(known != "") if known.dtype == pl.String else known


def blanks_as_null(frame: pl.DataFrame) -> pl.DataFrame:
    """Return columns of numbers and text with null in all cells that are empty."""
    text = pl.selectors.string()
    blank = text.str.strip_chars().is_in(["", "?"])
    # most columns have no NaN, and need no copy
    gappy = [c.name for c in frame if c.dtype.is_float() and c.is_nan().any()]
    return frame.with_columns(pl.when(~blank).then(text), pl.col(gappy).fill_nan(None))


def number_column(series: pl.Series, logical: bool = True) -> pl.Series:
    """Return the column as Float64.

    Text is parsed; empty text and `?` are null. If `logical`, true and false are 1 and 0. Raises
    InputError for anything else.
    """
    if series.dtype.is_numeric() or series.dtype == pl.Null:
        return series.cast(pl.Float64)
    spellings: dict[str, str | None] = dict.fromkeys(NO_NUMBER)
    if logical:
        spellings |= {"true": "1", "false": "0"}
    if series.dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Boolean):
        raise InputError(f"column {series.name!r} holds {series.dtype}, expected numbers")
    written = series.cast(pl.String).str.strip_chars()
    text = written.str.to_lowercase().replace(spellings)
    numbers = text.cast(pl.Float64, strict=False)
    if len(wrong := written.filter(numbers.is_null() & text.is_not_null())):
        raise InputError(
            f"column {series.name!r} has values that are not numbers: {wrong[0]!r}, …"
            f"{DECIMAL * bool(re.fullmatch(GROUPED, wrong[0]))}"
        )
    return numbers


def as_share(accuracy: pl.Series, unit: str, notes: list[str]) -> pl.Series:
    """Return accuracies from 0 to 1; those in per cent are divided by 100, and a note says so.

    Raises:
        InputError: an unknown unit, or per cent where no value is above 1.
    """
    one_of("accuracy_unit", unit, ("share", "percent"))
    if unit == "share":
        return accuracy
    if not (accuracy > 1).any():
        raise InputError("accuracy_unit=percent, but no accuracy is above 1")
    notes.append("accuracy is in per cent: it is divided by 100")
    return accuracy / 100


def check_range(rows: pl.DataFrame, column: str, name: str) -> None:
    """Raise InputError, with the first of them, for accuracies out of range or impossible times.

    Args:
        rows: `sample_id`, optionally `dataset` and the `file` that a row is from, and the column.
        column: `accuracy`, or any time or weight; null is none.
        name: of the column in its file.
    """
    if column == "accuracy":
        valid = pl.col(column).is_between(-1e-6, 1 + 1e-6)
        fault = f"outside [0, 1]{PERCENT}"
    else:
        valid = pl.col(column).is_between(0, 3.4e38)
        fault = "negative, NaN or infinite"
    # most are, and need no copy
    if rows.select(valid.all()).item():
        return
    bad = rows.filter(~valid)
    advice = ""
    # NaN is neither out of range nor in per cent
    if (nan := bad.filter(pl.col(column).is_nan())).height:
        bad = nan
        fault = "NaN"
        advice = ", or leave the cell empty: it counts as not measured"
    elif column == "accuracy" and (odd := bad.filter(pl.col(column).is_infinite())).height:
        bad = odd
        fault = "infinite"
        advice = "; an answer that failed has 0"
    first = bad.row(0, named=True)
    at = ", ".join(f"{key} {first[key]}" for key in ("dataset", "sample_id") if key in first)
    file = f"{first['file']}: " if "file" in first else ""
    where = f"{bad.height} row{'s' * (bad.height > 1)} (first: {at})"
    raise InputError(f"{file}{name} is {fault} in {where}; fix or remove it{advice}")


def name_column(series: pl.Series) -> pl.Series:
    """Return the column as text; the float 7.0 is the id 7.

    Raises InputError if a row is empty, NaN, infinite, or neither a name nor a number, or if
    numbers have lost digits.
    """
    wrong = series.is_null()
    if series.dtype.is_float():
        wrong |= ~series.is_finite().fill_null(False)
    if wrong.any() or holds_no_text(series.dtype):
        raise InputError(
            f"column {series.name!r} must hold a name or a finite number in every row: "
            f"{wrong.sum()} rows do not, and its type is {series.dtype}"
        )
    refuse_lost_digits(series)
    # other programs write whole numbers as 7.0 where a column had gaps
    if series.dtype == pl.String and series.str.contains(FLOAT_AS_TEXT).all():
        series = series.cast(pl.Float64)
        refuse_lost_digits(series)
    text = series.cast(pl.String)
    if series.dtype.is_float() or series.dtype.is_decimal():
        whole = series.cast(pl.Int128, strict=False).cast(pl.String)
        text = whole.zip_with(series % 1 == 0, text)
    return text


def id_column(series: pl.Series) -> pl.Series:
    """Return the names of `name_column`; as an Enum, in the order of the alphabet, where each is
    that of several rows, so that a row takes four bytes and is compared in no time."""
    if series.null_count() or series.n_unique() > SEVERAL * len(series):
        return name_column(series)
    values = series.unique()
    if series.dtype.is_integer():
        names = name_column(values)
        return _renamed(series, values, names.cast(pl.Enum(names.sort())))
    text = name_column(series)
    return text.cast(pl.Enum(text.unique().sort()))


def _renamed(series: pl.Series, values: pl.Series, names: pl.Series) -> pl.Series:
    """Return a column of whole numbers with each of its values replaced by its name."""
    low: Any = values.min()
    high: Any = values.max()
    if series.dtype in (pl.Int128, pl.UInt64) or high - low >= len(series):
        return series.replace_strict(values, names)
    # each number has a place in a list, which holds its name
    places = np.zeros(high - low + 1, np.uint32)
    places[values.to_numpy().astype(np.int64) - low] = np.arange(len(values), dtype=np.uint32)
    which = series if low == 0 else series.cast(pl.Int64) - low
    return names.gather(pl.Series(places)).gather(which).alias(series.name)


def narrowed(column: pl.Series) -> pl.Series:
    """Return a column with whole numbers in half the bytes, if they are so small that sums and
    differences of two fit too."""
    if column.dtype == pl.Int64 and column.null_count() < len(column):
        low: Any = column.min()
        high: Any = column.max()
        if low > -SMALL and high < SMALL:
            return column.cast(pl.Int32)
    return column


def refuse_lost_digits(series: pl.Series) -> None:
    """Raise InputError, with the column's name, if its numbers cannot tell ids apart any more.

    These are floats that are too large to be exact, and text that a spreadsheet shortened.
    """
    lost = pl.repeat(False, len(series), dtype=pl.Boolean, eager=True)
    cause = "a spreadsheet shortened them"
    if series.dtype.is_float():
        bits = MANTISSA_BITS[series.dtype.base_type()]
        lost = series.is_finite() & (series.abs() >= 2.0**bits)
        cause = f"a {series.dtype} holds whole numbers exactly only below 2^{bits}"
    elif series.dtype == pl.String and series.str.contains(POWER_OF_TEN).any():
        parts = series.str.extract_groups(POWER_OF_TEN).struct.unnest()
        decimals = parts["1"].str.len_chars().fill_null(0)
        # all digits of a whole number are written if it has as many decimals as its exponent
        lost = decimals < parts["2"].cast(pl.Int64, strict=False)
    # null is no id
    if lost.any():
        values = series.filter(lost)
        raise InputError(
            f"column {series.name!r} holds {len(values)} numbers that have lost digits, such as "
            f"{values[0]}, so that different ids look alike: {cause}. Write ids as text, or as "
            "whole numbers (int64)"
        )


def knob_column(series: pl.Series) -> tuple[Knob, pl.Series]:
    """Return the knob of a column, and the index of each row's value.

    Text such as `8` is a number, `08` is not; nor are 3.1 and 3.10 where both occur, which may be
    versions. Text such as `true` stays text, see `spelled_truths`. Raises InputError if a row has
    no value, or one that is neither a finite number, nor true or false, nor a name.
    """
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    if series.dtype == pl.Int128 or series.dtype.is_decimal():
        series = series.cast(pl.Float64)
    if series.dtype in (pl.Float16, pl.Float32):
        # the shortest decimal that is read as the same number: 0.1, not 0.10000000149
        series = series.cast(pl.String).cast(pl.Float64)
    known = series.dtype.is_numeric() or series.dtype in (pl.String, pl.Boolean)
    # each spelling is parsed once; text that spells numbers throughout is numbers
    written: list[Any] = series.unique().to_list() if known else [None]
    read = written
    if series.dtype == pl.String and all(NUMERAL.fullmatch(value or "") for value in written):
        numbers = [json.loads(value) for value in written]
        fractions = [n for n, value in zip(numbers, written, strict=True) if FRACTION.match(value)]
        read = numbers if len({*fractions}) == len(fractions) else written
    if None in read or any(isinstance(value, float) and not math.isfinite(value) for value in read):
        raise InputError(
            f"knob {series.name!r} must be a finite number or a name in every row; "
            f"{series.null_count()} are empty, and its type is {series.dtype}. Fill them (with "
            "none, if that is a setting), or name the knobs with knobs="
        )
    read = [
        int(value) if isinstance(value, float) and value.is_integer() else value for value in read
    ]
    order = TIERS.index if {*read} <= {*TIERS} else None
    knob = Knob(series.name, tuple(sorted(set(read), key=order)))
    # several spellings may have the same value, such as 1 and 1.0
    index = {value: i for i, value in enumerate(knob.values)}
    codes = series.replace_strict(written, [index[value] for value in read], return_dtype=pl.UInt32)
    return knob, codes


def spelled_truths(series: pl.Series) -> pl.Series:
    """Return text that is true or false in every row, in any capitals, as these, and any other
    column as it is.

    It is for columns of files without types, such as CSV. Where a column could have held true and
    false, as in Parquet, and holds text, a server or a function was given this text.
    """
    # most columns are told by their first value
    for values in (series.head(1), series):
        if values.dtype != pl.String or not values.str.contains(TRUTH).all():
            return series
    return series.str.to_lowercase() == "true"


def whole_words(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the cells with images and question types in all rows, if any row has them.

    A row without one gets that of another row of its sample; else the image has the sample's id,
    and the question type is `unknown`.
    """
    keys = [column for column in ("dataset", "sample_id") if column in cells.columns]
    defaults = {"image_id": pl.col("sample_id"), "question_type": pl.lit("unknown")}
    for name, default in defaults.items():
        if name in cells.columns and not cells[name].is_null().all():
            of_sample = pl.col(name).drop_nulls().first().over(keys)
            cells = cells.with_columns(pl.coalesce(name, of_sample, default))
    return cells


def number_repeats(series: pl.Series) -> pl.Series:
    """Return numbers of repeated measurements; names are numbered in the order of the alphabet."""
    try:
        return number_column(series, False)
    except InputError:
        if holds_no_text(series.dtype):
            raise
        return series.cast(pl.String).rank("dense")

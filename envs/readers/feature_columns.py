"""Columns of a table as features: which columns they are, and how values become numbers.

Numbers stay numbers; NaN is missing. Each text gets a place for every value that several samples
have, and one for all others, see `knobwise.envs.tables.columns`. Free text, such as a prompt, stays
text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import NO_NUMBER
from knobwise.envs.tables.columns import Column

AUTO = "auto"
"""The setting that makes features of all columns that are constant inside each sample."""
MISSING = (*NO_NUMBER, "nan")
"""Spellings of a feature that is missing, in lower case."""
MAX_VALUES = 50
"""The most values of a text that get a place."""
WORDS = r"\S\s+\S+\s+\S|[^\x00-\x7f]{6}"
"""A text that holds this has several words, or is in a script that may not part them."""
MIN_SAMPLES = 2
"""A value of a text gets a place if so many samples have it."""
KINDS = (pl.Null, pl.Boolean, pl.String, pl.Categorical, pl.Enum)
"""Types of columns that may be features, beside numbers."""
LARGEST = 3.4e38
"""The largest float32."""


def fit_column(series: pl.Series) -> Column:
    """Return what a column is: numbers, text with its values, or free text.

    Args:
        series: a value for each sample.

    Raises:
        InputError: the column is empty, mixes numbers and text, is neither of them, or is a text
            with too many values to learn from, most of them single words.
    """
    what = f"the feature {series.name!r}"
    dtype = series.dtype
    if not (dtype.is_numeric() or dtype in KINDS):
        raise InputError(f"{what} holds {dtype}; give numbers or text, or leave it out")
    frame = series.alias("x").to_frame()
    read = frame.select(text=_text("x"), number=numbers_in("x", dtype), missing=_missing("x"))
    present = read.filter(~pl.col("missing"))
    if present.is_empty():
        raise InputError(f"{what} is empty in every sample; leave it out")
    no_numbers = present.filter(pl.col("number").is_null())["text"]
    if no_numbers.is_empty():
        return Column(series.name, None, len(present) < len(read))
    if 2 * len(no_numbers) <= len(present):
        raise InputError(
            f"{what} mixes numbers and text: {len(no_numbers)} of its values are not numbers, such "
            f"as {no_numbers[0]!r}; mend them, or leave it out"
        )
    # the most frequent values get a place
    present = read.filter(pl.col("text") != "")
    counts = present["text"].value_counts().sort("count", "text", descending=[True, False])
    frequent = counts.filter(pl.col("count") >= MIN_SAMPLES).head(MAX_VALUES)
    common = 2 * frequent["count"].sum() >= len(present)
    if not (common and len(counts) <= MAX_VALUES):
        with_words = counts["text"].str.contains(WORDS).sum()
        if 2 * with_words >= len(counts):
            return Column(series.name, (), True)
    if not common:
        raise InputError(
            f"{what} is text with {len(counts)} different values in {len(read)} samples, too many "
            "to learn from; group them, or leave it out"
        )
    categories = sorted(frequent["text"])
    gaps = len(present) < len(read)
    if gaps:
        categories.append("")
    return Column(series.name, tuple(categories), gaps)


def free_texts(columns: Sequence[Column]) -> list[str]:
    """Return the names of the columns that are free text."""
    return [column.name for column in columns if column.categories == ()]


def in_block(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that are no free text."""
    return [column for column in columns if column.categories != ()]


def texts_in(frame: pl.DataFrame, columns: Sequence[Column]) -> dict[str, list[str]]:
    """Return the values of the columns that are free text by name, "" where there are none."""
    names = free_texts(columns)
    frame = frame.select(pl.col(names).cast(pl.String).fill_null(""))
    return {name: frame[name].to_list() for name in names}


def encode(frame: pl.DataFrame, columns: Sequence[Column]) -> tuple[np.ndarray, pl.Series]:
    """Turn named columns into the block of features.

    Args:
        frame: n rows with these columns; it may have others.
        columns: as fitted.

    Returns:
        The block, float32 [n, d]; and for each row what is wrong with it, null for nothing. A
        number that is wrong is NaN.

    Raises:
        InputError: a column is missing, or holds lists.
    """
    known = {*frame.columns}
    blocks = []
    fault = pl.repeat(None, len(frame), dtype=pl.String, eager=True)
    # column by column: polars plans hundreds together for minutes
    for column in columns:
        if column.name not in known or frame.schema[column.name].is_nested():
            raise InputError(
                f"there is no column {column.name!r} of numbers or text; the controller needs "
                f"{', '.join(each.name for each in columns)}. Leave a field empty where its "
                "value is unknown"
            )
        places, wrong = _encode_column(frame[column.name], column)
        blocks.append(places)
        fault = fault.zip_with(fault.is_not_null() | wrong.is_null(), wrong)
    block = np.concatenate(blocks, 1) if blocks else np.zeros((len(frame), 0), np.float32)
    return block, fault.alias("fault")


def _encode_column(series: pl.Series, column: Column) -> tuple[np.ndarray, pl.Series]:
    """Return the places of a column, float32 [n, places], and what is wrong with each row."""
    name = column.name
    # NaN is missing, also where text is expected
    frame = series.to_frame().with_columns(pl.selectors.float().fill_nan(None))
    faults: list[pl.Expr] = []
    if column.categories is None:
        value = numbers_in(name, series.dtype)
        missing = _missing(name)
        # null is NaN in an array
        valid = value.abs() <= LARGEST
        places: list[pl.Expr] = [pl.when(valid).then(value)]
        wrong = pl.format("{} is not a finite number: {}", pl.lit(name), _text(name))
        faults.append(pl.when(~missing & ~valid.fill_null(False)).then(wrong))
    else:
        text = _text(name)
        if series.dtype.is_float() or series.dtype.is_decimal():
            # other programs write whole numbers as 7.0 where a column had gaps
            whole = pl.col(name).cast(pl.Int128, strict=False).cast(pl.String)
            is_whole = (pl.col(name) % 1 == 0) & ~text.is_in(list(column.categories))
            text = pl.when(is_whole).then(whole).otherwise(text)
        missing = text == ""
        places = [text == value for value in column.categories]
        places.append(~text.is_in(list(column.categories)))
    if not column.gaps:
        absent = f"{name} is missing, but no training sample lacks it"
        faults.append(pl.when(missing).then(pl.lit(absent)))
    numbered = [place.cast(pl.Float32).alias(f"place {i}") for i, place in enumerate(places)]
    fault = pl.coalesce(pl.lit(None, pl.String), *faults).alias("fault")
    # lazily, so that polars computes what several places share once
    encoded = frame.lazy().select(*numbered, fault).collect()
    return encoded.drop("fault").to_numpy(order="c"), encoded["fault"]


def encode_samples(samples: pl.DataFrame, columns: Sequence[Column]) -> np.ndarray:
    """Return the block of a profile's samples, float32 [n, d], in which any value may be missing.

    Raises:
        InputError: as `encode`, or a value is not a finite number.
    """
    forgiving = [column._replace(gaps=True) for column in columns]
    block, faults = encode(samples, forgiving)
    wrong = faults.drop_nulls()
    if len(wrong):
        raise InputError(
            f"features: {wrong[0]} (in {len(wrong)} samples); leave empty what is missing"
        )
    return block


def _text(name: str) -> pl.Expr:
    """Return a column as text without spaces around it; "" is missing, as `?` is in ARFF."""
    return pl.col(name).cast(pl.String).str.strip_chars().replace("?", "").fill_null("")


def numbers_in(name: str, dtype: pl.DataType) -> pl.Expr:
    """Return a column as numbers; null is missing, or no number."""
    value = pl.col(name)
    if not dtype.is_numeric():
        value = _text(name).str.to_lowercase().replace({"true": "1", "false": "0"})
    return value.cast(pl.Float64, strict=False).fill_nan(None)


def _missing(name: str) -> pl.Expr:
    """Return where a number is missing."""
    return _text(name).str.to_lowercase().is_in(MISSING)

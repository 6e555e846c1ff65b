"""Columns of objects inside objects, such as `scores: {small: 1}`, as plain columns; and of lists
that no column of one type can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import polars as pl

MOST_COLUMNS = 1000
"""Objects with more keys are left as they are: their keys are values, such as ids."""
NO_COLUMN = (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError)
"""What polars raises for values that cannot stand in one column."""


def unnest(frame: pl.DataFrame) -> pl.DataFrame:
    """Return rows with a column for each value inside an object, named as pandas does:
    `scores.small`. Lists stay lists."""
    while True:
        nested = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Struct)]
        parts = {name: [f"{name}.{part}" for part in _parts(frame, name)] for name in nested}
        # a plain column of that name goes first
        parts = {
            name: inside
            for name, inside in parts.items()
            if inside and not {*inside} & {*frame.columns}
        }
        if not parts or frame.width + sum(map(len, parts.values())) > MOST_COLUMNS:
            return frame
        columns: list[pl.Series] = []
        for column in frame:
            if column.name in parts:
                fields = column.struct.unnest()
                fields.columns = parts[column.name]
                columns += fields.get_columns()
            else:
                columns.append(column)
        frame = pl.DataFrame(columns)


def _parts(frame: pl.DataFrame, name: str) -> list[str]:
    """Return the names of the values in a column of objects."""
    dtype = frame.schema[name]
    return [field.name for field in dtype.fields] if isinstance(dtype, pl.Struct) else []


def mixed_column(name: str, values: Sequence[Any], notes: list[str]) -> list[pl.Series]:
    """Return the column of these values, or where these are objects whose parts are not of one
    type, a column for each part, named as `unnest` does.

    Whole numbers beside fractions in a list are fractions. Lists of other mixed types, such as
    numbers beside names, become lists of JSON, which are noted: they can be neither measurements
    nor features, and nobody may need them.

    Raises:
        PolarsError: the values are no lists or objects, and cannot stand in one column.
    """
    for each in (values, [_with_fractions(value) for value in values]):
        with suppress(*NO_COLUMN):
            records = [{name: value} for value in each]
            return pl.DataFrame(records, infer_schema_length=None).get_columns()
    known = [value for value in values if value is not None]
    parts = list(dict.fromkeys(part for each in known if isinstance(each, dict) for part in each))
    if len(parts) <= MOST_COLUMNS and all(isinstance(each, dict) for each in known):
        columns = []
        for part in parts:
            inside = [None if each is None else each.get(part) for each in values]
            columns += mixed_column(f"{name}.{part}", inside, notes)
        return columns
    if not any(isinstance(each, (list, dict)) for each in known):
        return [pl.Series(name, values)]
    texts = []
    for value in values:
        parts = value if isinstance(value, list) else [value]
        texts.append(None if value is None else [json.dumps(part) for part in parts])
    notes.append(f"{name}: holds lists of mixed types, which are kept as text, and not used")
    return [pl.Series(name, texts, pl.List(pl.String))]


def _with_fractions(value: Any) -> Any:
    """Return a value whose lists that hold a fraction hold no whole numbers."""
    if not isinstance(value, list):
        return value
    if any(type(part) is float for part in value):
        return [float(part) if type(part) is int else part for part in value]
    return [_with_fractions(part) for part in value]

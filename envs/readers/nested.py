"""Columns of objects inside objects, such as `scores: {small: 1}`, as plain columns."""

from __future__ import annotations

import polars as pl

MOST_COLUMNS = 1000
"""Objects with more keys are left as they are: their keys are values, such as ids."""


def unnested(frame: pl.DataFrame) -> pl.DataFrame:
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

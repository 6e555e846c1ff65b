"""Tables in JSON with the names of the columns beside the rows: pandas' `orient="split"`, and the
table files of W&B."""

from __future__ import annotations

import math
from typing import Any

INDEX = "index"
"""The key of the index of pandas, and the name of its column."""


def is_split(document: dict[str, Any]) -> bool:
    """Return whether an object holds `columns`, a list of names, and `data`, a list of rows."""
    columns = document.get("columns")
    data = document.get("data")
    if not isinstance(columns, list) or not isinstance(data, list) or not columns:
        return False
    return all(isinstance(row, list) for row in data)


def rows_of_split(document: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    """Return the rows as objects; NaN, which W&B writes for an empty cell, is null, and noted.

    An index of pandas that is more than the numbers of rows becomes a column `index`: pandas does
    not write its name.

    Raises:
        ValueError: names of columns that are no text or occur twice, or a row of another length.
    """
    names = [_name(column) for column in document["columns"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"columns occur twice: {', '.join(twice)}; rename them")
    rows = []
    empty = 0
    for number, values in enumerate(document["data"], 1):
        if len(values) != len(names):
            raise ValueError(
                f"row {number} of data has {len(values)} values, but there are {len(names)} columns"
            )
        row = {}
        for name, value in zip(names, values, strict=True):
            if isinstance(value, float) and math.isnan(value):
                value = None
                empty += 1
            row[name] = value
        rows.append(row)
    if empty:
        notes.append(f"{empty} cells are NaN, which is how W&B writes empty ones: they are empty")
    index = document.get(INDEX)
    if INDEX not in names and isinstance(index, list) and len(index) == len(rows):
        # an index of several levels is one of lists
        levels = any(isinstance(each, list) for each in index)
        if index != list(range(len(rows))) and not levels:
            notes.append(f"the index of pandas is the column {INDEX!r}; if it has ids, id={INDEX}")
            return [row | {INDEX: each} for row, each in zip(rows, index, strict=True)]
    return rows


def _name(column: Any) -> str:
    """Return the name of a column. Raises ValueError for a level of several names."""
    if isinstance(column, (list, dict)):
        raise ValueError(
            f"the column {column} has several names; give each column one name, as "
            "frame.columns = [...] does in pandas"
        )
    return str(column)

"""Reading ARFF, the tables of Weka, OpenML and ASlib; scipy reads no attributes of type string."""

import re
from collections import Counter

import polars as pl

from knobwise.envs.readers.column_names import refuse_width

QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
DECLARATION = re.compile(rf"@attribute\s+(?P<name>{QUOTED}|\S+)\s+\S", re.IGNORECASE)
VALUE = re.compile(rf"\s*(?:(?P<quoted>{QUOTED})|(?P<plain>(?:[^,'\"][^,]*?)?))\s*(?:,|$)")
"""A value, and the comma that ends it."""


def arff_frame(text: str) -> pl.DataFrame:
    """Return the rows of an ARFF file; all columns are text, and `?` is null.

    Raises:
        ValueError: it declares no attributes, too many or one twice, has no data, a row has another
            number of values, or rows are sparse.
    """
    names: list[str] = []
    lines = iter(text.removeprefix("\ufeff").split("\n"))
    for line in lines:
        words = line.strip()
        keyword = words[:10].lower()
        if keyword.startswith("@data"):
            break
        if keyword == "@attribute":
            declared = DECLARATION.match(words)
            if declared is None:
                raise ValueError(f"not an attribute with a name and a type: {words[:60]}")
            names.append(_unquoted(declared["name"]))
            refuse_width(len(names))
    else:
        raise ValueError("has no @data")
    twice = {name for name, count in Counter(names).items() if count > 1}
    if not names or twice:
        raise ValueError(f"no attributes, or twice: {', '.join(sorted(twice))}")
    # columns are filled row by row
    columns: list[list[str | None]] = [[] for _ in names]
    for number, line in enumerate(lines, 1):
        words = line.strip()
        if not words or words.startswith("%"):
            continue
        if words.startswith("{"):
            raise ValueError(f"line {number} after @data is sparse; write all values")
        values = _values(words)
        if len(values) != len(names):
            raise ValueError(
                f"line {number} after @data has {len(values)} values for {len(names)} attributes"
            )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return pl.DataFrame(dict(zip(names, columns, strict=True)), dict.fromkeys(names, pl.String))


def _values(line: str) -> list[str | None]:
    """Return the values of a row; null for `?` without quotes."""
    if "'" not in line and '"' not in line:
        plain = [value.strip() for value in line.split(",")]
        return [None if value == "?" else value for value in plain]
    values: list[str | None] = []
    place = 0
    while True:
        part = VALUE.match(line, place)
        if part is None:
            raise ValueError(f"quotes that do not close: {line[place : place + 60]}")
        quoted = part["quoted"]
        value = part["plain"] if quoted is None else _unquoted(quoted)
        values.append(None if quoted is None and value == "?" else value)
        place = part.end()
        if not part[0].endswith(","):
            return values


def _unquoted(name: str) -> str:
    """Return a name without the quotes around it and the backslashes in it."""
    if name[:1] in ("'", '"'):
        return re.sub(r"\\(.)", r"\1", name[1:-1])
    return name

"""Text that spreadsheets and other programs write: its encoding, its separator, and decimal
commas."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

import polars as pl

SEPARATORS = ",;\t|"
"""What may stand between the values of a row; of several that fit, the first."""
NAMED = re.compile(r"\"?sep=(.)\"?[,;\t|]*", re.IGNORECASE)
"""A first line that names the separator, as spreadsheets read it."""
LOOKED_AT = 20
"""The number of lines that show the separator."""
COMMA = r"^\s*[-+]?\d*,\d+(?:[eE][-+]?\d+)?\s*$"
POINT = r"^\s*[-+]?\d*\.\d+(?:[eE][-+]?\d+)?\s*$"
NUMBER = r"(?i)^\s*(?:[-+]?(?:\d+|\d*,\d+)(?:e[-+]?\d+)?|nan|na|null|none|\?|)\s*$"
"""A number that may have a decimal comma, or nothing."""
THOUSANDS = r"^\s*[-+]?[1-9]\d{0,2},\d{3}\s*$"
"""A number whose comma may also part thousands."""


def form_of(lines: Sequence[str]) -> tuple[str, int]:
    """Return the separator in the first lines of delimited text, and the number of lines before
    the header: 1 if the first line only names the separator, as in `sep=;`."""
    if lines and (named := NAMED.fullmatch(lines[0].strip("\r\n"))):
        return named[1], 1
    several = []
    for separator in SEPARATORS:
        try:
            widths = [len(row) for row in csv.reader(lines, delimiter=separator) if row]
        except csv.Error:  # such as a value that is too long
            continue
        if widths and widths[0] > 1:
            several.append((len({*widths}) > 1, separator))
    # one that gives rows of the same length, else any that parts the header
    return min(several, key=lambda choice: choice[0], default=(True, ","))[1], 0


def with_points(frame: pl.DataFrame, separator: str, notes: list[str]) -> pl.DataFrame:
    """Return columns of text with a point for a decimal comma, where that is certain: another
    character separates values, and no number has a point. Ids stay as they are.

    Raises:
        ValueError: the commas may as well part thousands.
    """
    if separator == ",":
        return frame
    columns = []
    clear = False
    for column in frame:
        if column.name.endswith("_id") or column.dtype != pl.String:
            continue
        if column.str.contains(POINT).any():
            return frame
        commas = column.filter(column.str.contains(COMMA).fill_null(False))
        if len(commas) and column.str.contains(NUMBER).all():
            columns.append(column.name)
            clear |= not commas.str.contains(THOUSANDS).all()
    if not columns:
        return frame
    if not clear:
        raise ValueError(
            f"the commas in column {columns[0]!r} may be decimal commas or part thousands; write "
            "a point for decimals, and nothing between thousands"
        )
    notes.append(f"decimal commas are read as points: {', '.join(columns)}")
    return frame.with_columns(pl.col(columns).str.replace(",", ".", literal=True))


def rows_of_text(text: str, separator: str) -> pl.DataFrame:
    """Return the rows of delimited text whose lines end in line feeds: `line`, counted from 1, that
    each begins in; its `text`; and how many `values` it has. Empty lines are no rows; a value in
    quotes may go on over several lines.

    Raises:
        ValueError: a quote inside a value hides where rows end.
    """
    rows = pl.Series("text", [text]).str.split("\n").explode().to_frame().with_row_index("line", 1)
    quotes = rows["text"].str.count_matches('"', literal=True).cum_sum()
    # after an odd number of quotes a line goes on with the row above
    begins = quotes.shift(1, fill_value=0) % 2 == 0
    if not begins.all():
        rows = rows.group_by(row=begins.cum_sum(), maintain_order=True).agg(
            pl.col("line").first(), pl.col("text").str.join("\n")
        )
    part = rf"\x{{{ord(separator):x}}}"
    value = rf'(?:"(?:[^"]|"")*"|[^"{part}]*)'
    several = rows.filter(pl.col("text").str.contains("\n", literal=True))
    wrong = several.filter(~pl.col("text").str.contains(f"^{value}(?:{part}{value})*$"))
    if len(wrong):
        raise ValueError(f"line {wrong['line'][0]} has a quote that does not close, or in a value")
    bare = pl.col("text").str.replace_all('"[^"]*"', "")
    rows = rows.with_columns(values=bare.str.count_matches(separator, literal=True) + 1)
    return rows.select("line", "text", "values").filter(pl.col("text") != "")

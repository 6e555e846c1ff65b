"""Text that spreadsheets and other programs write: its encoding, its separator, and decimal
commas."""

from __future__ import annotations

import csv
import itertools
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
NUMBER_WITH_POINT = r"^\s*[-+]?\d*[.,]?\d+(?:[eE][-+]?\d+)?\s*$"
NUMBER = r"(?i)^\s*(?:[-+]?(?:\d+|\d*,\d+)(?:e[-+]?\d+)?|nan|na|null|none|\?|)\s*$"
"""A number that may have a decimal comma, or nothing."""
THOUSANDS = r"^\s*[-+]?[1-9]\d{0,2},\d{3}\s*$"
"""A number whose comma may also part thousands."""
THOUSANDS_BY_POINT = r"^\s*[-+]?[1-9]\d{0,2}\.\d{3}\s*$"
"""A number whose point may do so."""
WHOLE_BELOW_THOUSAND = r"^\s*[-+]?\d{1,3}\s*$"


def form_of(lines: Sequence[str]) -> tuple[str, int]:
    """Return the separator in the first lines of delimited text, and the number of lines before
    the header: 1 if the first line only names the separator, as in `sep=;`; more if a comment or
    what a tool says of its run stands there, and it is certain where the header is."""
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
    uneven, separator = min(several, key=lambda choice: choice[0], default=(True, ","))
    if uneven:
        for other in SEPARATORS:
            if before := _lines_before_header(lines, other):
                return other, before
    # one that gives rows of the same length, else any that parts the header
    return separator, 0


def _lines_before_header(lines: Sequence[str], separator: str) -> int:
    """Return how many lines stand before the header, 0 where that is not certain: all rows from it
    on are of the same length, which those before it are not; it has names, all different and none
    of them a number, and below it a column holds numbers alone."""
    reader = csv.reader(lines, delimiter=separator)
    rows = []
    before = 0
    try:
        for row in reader:
            if row:
                rows.append((before, row))
            before = reader.line_num
    except csv.Error:
        return 0
    width = len(rows[-1][1]) if rows else 0
    even = list(itertools.takewhile(lambda numbered: len(numbered[1]) == width, reversed(rows)))
    before, names = even.pop() if even else (0, [])
    below = list(zip(*(row for _, row in even), strict=True))
    named = all(name.strip() and not re.match(NUMBER, name) for name in names)
    numbers = any(all(re.match(NUMBER_WITH_POINT, value) for value in column) for column in below)
    certain = named and numbers and width > 1 and len(even) > 1 and len({*names}) == width
    return before if certain else 0


def where_rows_differ(text: str, separator: str, skipped: int) -> str:
    """Say which row of delimited text is longer than the header, and which line may be the header;
    "" if none is longer.

    Args:
        text: its lines end in line feeds.
        skipped: how many lines stand before the header.

    Raises:
        ValueError: see `rows_of_text`.
    """
    rows = rows_of_text(text, separator).filter(pl.col("line") > skipped)
    width = rows["values"][0]
    longer = rows.filter(pl.col("values") > width)
    if longer.is_empty():
        return ""
    first = longer.row(0, named=True)
    words = f"line {first['line']} has {first['values']} values, but the header (line "
    words += f"{rows['line'][0]}: {rows['text'][0][:40]!r}) has {width}"
    # the last rows are alike from the header on
    others = (rows["values"] != rows["values"][-1]).arg_true()
    even = rows[others[-1] + 1 :]
    if len(even) > 2:
        words += f"; if line {even['line'][0]} is the header, remove what stands above it"
    return words


def with_points(frame: pl.DataFrame, separator: str, notes: list[str]) -> pl.DataFrame:
    """Return columns of text with a point for a decimal comma, where that is certain: another
    character separates values, and no number has a point. Ids stay as they are.

    Raises:
        ValueError: the commas may as well part thousands, or points do.
    """
    if separator == ",":
        return frame
    if separator == ";":
        _refuse_thousands(frame)
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


def _refuse_thousands(frame: pl.DataFrame) -> None:
    """Raise ValueError if points part thousands, as `1.250` beside `850` where spreadsheets write
    decimal commas: whoever writes decimals leaves out a last 0, or writes `850.000`."""
    for column in frame:
        if column.name.endswith("_id") or column.dtype != pl.String:
            continue
        points = column.filter(column.str.contains(POINT).fill_null(False))
        # most columns have none
        if points.is_empty() or not points.str.contains(THOUSANDS_BY_POINT).all():
            continue
        ends_in_0 = points.filter(points.str.contains(r"0\s*$"))
        others = column.filter(column.str.contains(NUMBER).fill_null(False)).str.strip_chars()
        others = others.filter(others.str.contains(r"\d"))
        hundreds = others.filter(others.str.contains(r"^[-+]?[1-9]\d\d$"))
        whole = others.str.contains(WHOLE_BELOW_THOUSAND).all()
        if len(ends_in_0) and len(hundreds) and whole:
            raise ValueError(
                f"the points in column {column.name!r} seem to part thousands, as in "
                f"{ends_in_0[0].strip()} beside {hundreds[0]}; write nothing between thousands, or "
                f"{hundreds[0]}.000 if these are decimals"
            )


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

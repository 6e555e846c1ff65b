"""Table files and their columns, read strictly.

Errors name the column that is wrong.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.files import check_unpacked, most_unpacked
from knobwise.common.json_text import decoded, encoding_of, text_of
from knobwise.common.parquet import read_parquet
from knobwise.common.text_files import LOOKED_AT, form_of, rows_of_text, with_points
from knobwise.envs.readers.arff import arff_frame
from knobwise.envs.tables.profile_table import Knob

KEYS = frozenset(
    {"sample_id", "question_id", "image_id", "dataset", "split", "fold", "question_type"}
)
DECIMAL = "; write a decimal comma as a point, and nothing between thousands"
GROUPED = r"[-+]?[\d.]*,[\d.,]*"
"""A number with a comma, which parts thousands or decimals."""
NO_NUMBER = ("", "?", "null", "none", "na", "n/a", "#n/a")
"""Spellings of a number that is missing, in lower case; nan is none of them."""
PERCENT = " (those in per cent need accuracy_unit=percent; bring any other scale to 0 … 1)"
TIERS = ("low", "medium", "high")
"""Knob values that have an order of their own."""
NUMERAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
FRACTION = re.compile(r"-?\d+\.0*[1-9]\d*$")
"""A number with digits behind the point, of which the last may be zeros."""
MANTISSA_BITS: dict[Any, int] = {pl.Float16: 11, pl.Float32: 24, pl.Float64: 53}
"""Whole numbers below 2 to this power are exact in a float; larger ones may share a value."""
MESSAGE = frozenset({"role", "content"})
"""What each message of a chat has."""
POWER_OF_TEN = r"^\s*[+-]?\d+(?:[.,](\d+))?[eE]\+(\d+)\s*$"
"""A number as spreadsheets and R shorten it, such as 1.23E+11: its decimals, and its exponent."""
FLOAT_AS_TEXT = r"^[+-]?\d+(\.0+|\.\d+[eE]\+\d+)$"
"""A whole number that was a float when it was written, such as 7.0."""


@dataclass
class Lines:
    """Where the rows of a file stand, and which are left out."""

    numbers: Sequence[int] = ()
    """The line of text that each row begins in, counted from 1; of files without lines, or where
    one document holds all rows, the number of the row."""
    refused: dict[int, str] = field(default_factory=dict)
    """What is wrong with the rows that cannot be read, by the same numbers."""


def read_frame(
    path: Path, notes: list[str] | None = None, lines: Lines | None = None
) -> pl.DataFrame:
    """Read one table file, of the format that its suffix says.

    The columns of a CSV stay text: `007` is an id, not a number. Long tables, feature files,
    questions, image names and requests are all read by this, so a new format here is one for each
    of them.

    Args:
        path: of the file.
        notes: takes what is noticed.
        lines: if given, takes where rows stand. A row of text that cannot be read is then left out
            and named there, and a column may mix types; else the file is refused.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    frame = _read(path, [] if notes is None else notes, lines)
    if lines is not None and not lines.numbers:
        lines.numbers = range(1, len(frame) + 1)
    return frame


def _read(path: Path, notes: list[str], lines: Lines | None) -> pl.DataFrame:
    """Read a file as `read_frame` does; of files without lines, these stay empty."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    name = path.name.removesuffix(".gz")
    try:
        if path.suffix == ".gz":
            content: bytes | Path = _unpacked(path)
        else:
            content = path
        # the name without .gz decides the format
        if name.endswith((".csv", ".tsv")):
            return _delimited(content, notes, lines)
        if name.endswith((".json", ".jsonl", ".ndjson")):
            text = text_of(content if isinstance(content, bytes) else path.read_bytes())
            return _frame(_rows(text, not name.endswith(".json"), notes, lines), lines)
        if name.endswith(".arff"):
            text = text_of(content if isinstance(content, bytes) else path.read_bytes())
            return arff_frame(text)
        if name.endswith((".parquet", ".pq")):
            return read_parquet(path)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        kind = name.rpartition(".")[2]
        raise InputError(
            f"{path}: cannot be read as {kind} ({str(error).partition(chr(10))[0]})"
        ) from error
    raise InputError(
        f"{path}: not a table; known are .csv, .tsv, .parquet, .json, .jsonl, .ndjson and .arff; "
        "text may also end in .gz"
    )


def _delimited(content: bytes | Path, notes: list[str], lines: Lines | None) -> pl.DataFrame:
    """Read delimited text, whatever separates its values.

    Raises:
        ValueError: it is not UTF-8 or marked UTF-16, or its commas may mean two things.
        PolarsError: a row is longer than the header, and no `lines` are given.
    """
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        head = list(itertools.islice(file, LOOKED_AT))
        # polars reads UTF-8, and lines that end in a line feed
        encoding = encoding_of(head[0] if head else b"")
        old = len(head) == 1 and b"\r" in head[0].rstrip()
        if lines is not None or old or not encoding.startswith("utf-8"):
            file.seek(0)
            content = text_of(file.read()).replace("\r\n", "\n").replace("\r", "\n").encode()
            head = content.splitlines(keepends=True)[:LOOKED_AT]
    begin = [line.decode("utf-8-sig", errors="replace") for line in head]
    separator, skipped = form_of(begin)
    if lines is not None and isinstance(content, bytes):
        content = _even_rows(content, separator, skipped, lines)
        skipped = 0
    try:
        # the parser would give a second column of a name another one, as if it were a knob
        frame = pl.read_csv(
            content if isinstance(content, bytes) else content.absolute(),
            has_header=False,
            infer_schema=False,
            glob=False,
            separator=separator,
            skip_lines=skipped,
        )
    except pl.exceptions.PolarsError:
        # another encoding is the true cause
        text_of(content if isinstance(content, bytes) else content.read_bytes())
        raise
    names = [name or "" for name in frame.row(0)]
    frame = frame.slice(1).rename(dict(zip(frame.columns, names, strict=True)))
    return with_points(frame, separator, notes)


def _even_rows(content: bytes, separator: str, skipped: int, lines: Lines) -> bytes:
    """Return delimited text, in UTF-8, without the rows that are longer or shorter than the header;
    `lines` take these, and where the others stand.

    Args:
        skipped: how many lines stand before the header.
    """
    rows = rows_of_text(content.decode(), separator)
    rows = rows.filter(pl.col("line") > skipped)
    if rows.is_empty():
        raise ValueError("it is empty")
    width = rows["values"][0]
    even = rows["values"] == width
    for row in rows.filter(~even).iter_rows(named=True):
        lines.refused[row["line"]] = f"has {row['values']} values, but the header {width}"
    rows = rows.filter(even)
    lines.numbers = rows["line"][1:].to_list()
    return "\n".join(rows["text"]).encode()


def _rows(text: str, by_line: bool, notes: list[str], lines: Lines | None) -> dict[int, Any]:
    """Return the rows of JSON: an array, lines of objects, or the only list of rows in a document,
    which is noted.

    Args:
        by_line: whether the file is named as lines, not as one document. Either may hold the other.
        lines: if given, a line that is not JSON is refused there.

    Returns:
        The rows by the lines they stand in, or in a document by their number.

    Raises:
        ValueError: it is neither, or holds no list of rows, or several.
    """
    readings: dict[bool, Callable[[str], Any]] = {True: _lines, False: decoded}
    content: Any
    try:
        content = readings[by_line](text)
        if by_line and isinstance(next(iter(content.values()), None), list):
            by_line = False
            content = decoded(text)
    except ValueError as error:
        by_line = not by_line
        try:
            content = readings[by_line](text)
        except ValueError:
            # it may still be lines of which some are broken
            if by_line or lines is None:
                raise error from None
            by_line = True
            content = _lines(text, lines.refused)
            if not any(isinstance(row, dict) for row in content.values()):
                raise error from None
    return content if by_line else dict(enumerate(_rows_in(content, notes), 1))


def _lines(text: str, refused: dict[int, str] | None = None) -> dict[int, Any]:
    """Decode JSON lines, by their numbers.

    Raises:
        ValueError: a line is not JSON, and there is no dictionary that takes what is wrong with it.
    """
    rows = {}
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        if line.strip():
            try:
                rows[number] = decoded(line)
            except ValueError as error:
                if refused is None:
                    raise ValueError(f"line {number}: {error}") from None
                refused[number] = f"is not JSON ({error})"
    return rows


def _rows_in(document: Any, notes: list[str]) -> list[Any]:
    """Return a list of rows, or the only one in an object, which is noted.

    Raises:
        ValueError: an object holds no list of rows, or several.
    """
    if not isinstance(document, dict):
        return document
    lists = _lists(document)
    if len(lists) > 1:
        raise ValueError(
            f"it has several lists of rows ({', '.join(list(lists)[:5])}); write one of them to a "
            "file"
        )
    if not lists:
        raise ValueError(
            f"it is one object with {', '.join(list(document)[:5])}, and no list of rows; write a "
            "list of objects, as pandas does with orient='records'"
        )
    ((key, rows),) = lists.items()
    notes.append(f"the rows are those of {key!r} in the file")
    return rows


def _lists(document: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the lists of objects in a document, by their dotted keys."""
    lists = {}
    inside = [("", document)]
    while inside:
        prefix, values = inside.pop()
        for name, value in values.items():
            if isinstance(value, dict):
                inside.append((f"{prefix}{name}.", value))
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                lists[f"{prefix}{name}"] = value
    return lists


def _frame(rows: dict[int, Any], lines: Lines | None) -> pl.DataFrame:
    """Return rows, by their numbers, as a frame; `lines`, if given, take the numbers and what is
    wrong with single rows.

    Raises:
        ValueError: without `lines` for what polars would turn into something else: lines that are
            no objects, true among numbers, fractions among names, and whole numbers that 64 bits do
            not hold.
    """
    # the first row of each type of value
    kinds: dict[str, dict[type, int]] = defaultdict(dict)
    sound = {}
    for number, row in rows.items():
        try:
            _check_row(row)
        except ValueError as error:
            if lines is None:
                raise ValueError(f"row {number} {error}") from None
            lines.refused[number] = str(error)
            continue
        sound[number] = row = {name: _plain(value) for name, value in row.items()}
        for name, value in row.items():
            if value is not None:
                kinds[name].setdefault(type(value), number)
    if lines is None:
        _refuse_mixed(kinds, rows)
    else:
        lines.numbers = list(sound)
    return pl.DataFrame(list(sound.values()), infer_schema_length=None)


def _plain(value: Any) -> Any:
    """Return a chat, a list of messages whose contents may be of several types, as JSON; anything
    else as it is."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict) and first.keys() >= MESSAGE:
        return json.dumps(value, ensure_ascii=False)
    return value


def with_chats(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame whose columns of chats, lists of messages, are JSON."""
    chats = []
    for name, dtype in frame.schema.items():
        inner: Any = getattr(dtype, "inner", None)
        if isinstance(inner, pl.Struct) and {part.name for part in inner.fields} >= MESSAGE:
            texts = [_plain(value) for value in frame[name].to_list()]
            chats.append(pl.Series(name, texts, pl.String, strict=False))
    return frame.with_columns(chats)


def _check_row(row: Any) -> None:
    """Raise ValueError if a row is not an object, or holds a whole number of more than 64 bits."""
    if not isinstance(row, dict):
        raise ValueError(f"is not an object, but {str(row)[:20]}")
    for name, value in row.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"has {value} in {name!r}, more than 64 bits; write ids as text")


def _refuse_mixed(kinds: dict[str, dict[type, int]], rows: dict[int, Any]) -> None:
    """Raise ValueError for a column whose values are of types, each with the first row that has it,
    that polars would turn into each other: true is 1 to it, and a fraction becomes text."""
    for name, types in kinds.items():
        mixed = bool in types and len(types) > 1
        if mixed or (float in types and types.keys() - {int, float}):
            held = [f"{rows[number][name]!r} in row {number}" for number in types.values()]
            raise ValueError(
                f"the column {name!r} holds {' and '.join(held[:3])}; write numbers alone, null "
                "where there is none, or text alone"
            )


def _unpacked(path: Path) -> bytes:
    """Return the content of a gzipped file. Raises InputError if it is longer than the limit."""
    with gzip.open(path) as file:
        content = file.read(most_unpacked() + 1)
    check_unpacked(path, len(content))
    return content


def holds_no_text(dtype: pl.DataType) -> bool:
    """Return whether values of this type are neither numbers nor text, nor written as text."""
    return dtype.is_nested() or dtype in (pl.Binary, pl.Duration, pl.Object)


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
    bad = rows.filter(~valid)
    if bad.is_empty():
        return
    advice = ""
    # NaN is neither out of range nor in per cent
    if (nan := bad.filter(pl.col(column).is_nan())).height:
        bad = nan
        fault = "NaN"
        advice = ", or leave the cell empty: it counts as not measured"
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
    versions. Raises InputError if a row has no value, or one that is neither a finite number nor a
    name.
    """
    if series.dtype in (pl.Boolean, pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    if series.dtype == pl.Int128 or series.dtype.is_decimal():
        series = series.cast(pl.Float64)
    if series.dtype in (pl.Float16, pl.Float32):
        # the shortest decimal that is read as the same number: 0.1, not 0.10000000149
        series = series.cast(pl.String).cast(pl.Float64)
    known = series.dtype.is_numeric() or series.dtype == pl.String
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

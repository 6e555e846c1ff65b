"""Table files, read strictly into frames of text and numbers.

Errors name the line or the column that is wrong.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError, naming
from knobwise.common.files import check_unpacked, most_unpacked
from knobwise.common.json_text import decode_json, decode_text, encoding_of
from knobwise.common.parquet import read_parquet
from knobwise.common.text_files import (
    LOOKED_AT,
    NAMED,
    form_of,
    rows_of_text,
    where_rows_differ,
    with_points,
)
from knobwise.envs.readers.arff import arff_frame
from knobwise.envs.readers.column_names import refuse_width
from knobwise.envs.readers.folders import TABLES, is_table, refuse_folder
from knobwise.envs.readers.nested import NO_COLUMN, mixed_column
from knobwise.envs.readers.split_json import is_split, rows_of_split

KEYS = frozenset(
    {"sample_id", "question_id", "image_id", "dataset", "split", "fold", "question_type"}
)
MESSAGE = frozenset({"role", "content"})
"""What each message of a chat has."""


@dataclass
class Lines:
    """Where the rows of a file stand, and which are left out."""

    numbers: Sequence[int] = ()
    """The line of text that each row begins in, counted from 1; of files without lines, or where
    one document holds all rows, the number of the row."""
    refused: dict[int, str] = field(default_factory=dict)
    """What is wrong with the rows that cannot be read, by the same numbers."""


def read_frame(
    path: Path,
    notes: list[str] | None = None,
    lines: Lines | None = None,
    narrow: Callable[[pl.Series], pl.Series] | None = None,
) -> pl.DataFrame:
    """Read one table file, of the format that its suffix says.

    The columns of a CSV stay text: `007` is an id, not a number. Long tables, feature files,
    questions, image names and requests are all read by this, so a new format here is one for each
    of them.

    Args:
        path: of the file.
        notes: takes what is noticed. Without it a column of lists of mixed types, which would be
            noted and kept as text, is refused.
        lines: if given, takes where rows stand. A row of text that cannot be read is then left out
            and named there, and a column may mix types; else the file is refused.
        narrow: what each column of a long Parquet file is kept as.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    with naming(path):
        frame = _read(path, notes, lines, narrow)
        refuse_width(frame.width)
    if lines is not None and not lines.numbers:
        lines.numbers = range(1, len(frame) + 1)
    return frame


def _read(
    path: Path, noted: list[str] | None, lines: Lines | None, narrow: Any = None
) -> pl.DataFrame:
    """Read a file as `read_frame` does; of files without lines, these stay empty."""
    if path.is_dir():
        refuse_folder(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if not is_table(path.name):
        raise InputError(
            f"{path}: not a table; known are {', '.join(TABLES)}; text may also end in .gz"
        )
    name = path.name.removesuffix(".gz")
    notes = [] if noted is None else noted
    try:
        if path.suffix == ".gz":
            content: bytes | Path = unpack_gzip(path)
        else:
            content = path
        # the name without .gz decides the format
        if name.endswith((".csv", ".tsv")):
            return _delimited(content, notes, lines)
        if name.endswith((".json", ".jsonl", ".ndjson")):
            text = decode_text(content if isinstance(content, bytes) else path.read_bytes())
            return _frame(_rows(text, not name.endswith(".json"), notes, lines), noted, lines)
        if name.endswith(".arff"):
            text = decode_text(content if isinstance(content, bytes) else path.read_bytes())
            return arff_frame(text)
        # what is left of TABLES
        return read_parquet(path, narrow=narrow)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        kind = name.rpartition(".")[2]
        raise InputError(
            f"{path}: cannot be read as {kind} ({str(error).partition(chr(10))[0]})"
        ) from error


def _delimited(content: bytes | Path, notes: list[str], lines: Lines | None) -> pl.DataFrame:
    """Read delimited text, whatever separates its values.

    Raises:
        ValueError: it is not UTF-8 or marked UTF-16, its commas may mean two things, or two
            columns have the same name.
        PolarsError: a row is longer than the header, and no `lines` are given.
    """
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        head = list(itertools.islice(file, LOOKED_AT))
        # polars reads UTF-8, and lines that end in a line feed
        encoding = encoding_of(head[0] if head else b"")
        old = len(head) == 1 and b"\r" in head[0].rstrip()
        if lines is not None or old or not encoding.startswith("utf-8"):
            file.seek(0)
            content = decode_text(file.read()).replace("\r\n", "\n").replace("\r", "\n").encode()
            head = content.splitlines(keepends=True)[:LOOKED_AT]
    begin = [line.decode("utf-8-sig", errors="replace") for line in head]
    separator, skipped = form_of(begin)
    # before the parser takes memory for each
    refuse_width(1 + sum(line.count(separator) for line in begin[skipped : skipped + 1]))
    if skipped and not NAMED.fullmatch(begin[0].strip("\r\n")):
        notes.append(f"the header is in line {skipped + 1}; what stands above it is not read")
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
    except pl.exceptions.PolarsError as error:
        # another encoding is the true cause
        text = decode_text(content if isinstance(content, bytes) else content.read_bytes())
        if words := where_rows_differ(text, separator, skipped):
            raise ValueError(words) from error
        raise
    names = [name or "" for name in frame.row(0)]
    _refuse_twice(names)
    frame = frame.slice(1).rename(dict(zip(frame.columns, names, strict=True)))
    return with_points(frame, separator, notes)


def _refuse_twice(names: Sequence[str]) -> None:
    """Raise ValueError if columns have the same name, as under a header of several lines."""
    if twice := [repr(name) for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"columns occur twice: {', '.join(twice)}; rename them or leave all but one out. If "
            "the header has several lines, make one of them, with a name of its own for each column"
        )


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
    readings: dict[bool, Callable[[str], Any]] = {True: decode_lines, False: decode_json}
    content: Any
    try:
        content = readings[by_line](text)
        if by_line and isinstance(next(iter(content.values()), None), list):
            by_line = False
            content = decode_json(text)
    except ValueError as error:
        by_line = not by_line
        try:
            content = readings[by_line](text)
        except ValueError:
            # it may still be lines of which some are broken
            if by_line or lines is None:
                raise error from None
            by_line = True
            content = decode_lines(text, lines.refused)
            if not any(isinstance(row, dict) for row in content.values()):
                raise error from None
    return content if by_line else dict(enumerate(_rows_in(content, notes), 1))


def decode_lines(text: str, refused: dict[int, str] | None = None) -> dict[int, Any]:
    """Decode JSON lines, by their numbers.

    Raises:
        ValueError: a line is not JSON, and there is no dictionary that takes what is wrong with it.
    """
    rows = {}
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        if line.strip():
            try:
                rows[number] = decode_json(line)
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
    if is_split(document):
        return rows_of_split(document, notes)
    lists = _lists(document)
    if len(lists) > 1:
        # what lies inside a list of one may be meant
        lists = _lists(document, into_one=True)
        longest = sorted(lists, key=lambda key: len(lists[key]), reverse=True)
        raise ValueError(
            f"it has several lists of rows ({', '.join(longest[:5])}); write one of them to a "
            f"file, such as the {len(lists[longest[0]])} that jq .{longest[0]} prints"
        )
    if not lists:
        raise ValueError(
            f"it is one object with {', '.join(list(document)[:5])}, and no list of rows; write a "
            "list of objects, as pandas does with orient='records'"
        )
    ((key, rows),) = lists.items()
    notes.append(f"the rows are those of {key!r} in the file")
    return rows


def _lists(document: dict[str, Any], into_one: bool = False) -> dict[str, list[Any]]:
    """Return the lists of objects in a document, by their dotted keys; if `into_one`, those inside
    a list of one object, too."""
    lists = {}
    inside = [("", document)]
    while inside:
        prefix, values = inside.pop()
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict):
                inside.append((f"{key}.", value))
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                lists[key] = value
                if into_one and len(value) == 1:
                    inside.append((f"{key}[0].", value[0]))
    return lists


def _frame(rows: dict[int, Any], notes: list[str] | None, lines: Lines | None) -> pl.DataFrame:
    """Return rows, by their numbers, as a frame; `lines`, if given, take the numbers and what is
    wrong with single rows. Columns of lists of mixed types are noted, or without notes refused.

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
    records = list(sound.values())
    try:
        return pl.DataFrame(records, infer_schema_length=None)
    except NO_COLUMN:
        if notes is None:
            raise
        columns = []
        for name in dict.fromkeys(name for row in records for name in row):
            columns += mixed_column(name, [row.get(name) for row in records], notes)
        return pl.DataFrame(columns)


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


def unpack_gzip(path: Path) -> bytes:
    """Return the content of a gzipped file. Raises InputError if it is longer than the limit."""
    with gzip.open(path) as file:
        content = file.read(most_unpacked() + 1)
    check_unpacked(path, len(content))
    return content

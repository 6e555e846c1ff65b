"""Reading Parquet that others wrote."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.files import check_unpacked

Fields = dict[int, Any]
"""A structure of Thrift: its values by the numbers of their fields."""
SCHEMA, ROWS, ROW_GROUPS = 2, 3, 4
"""Fields of the footer, https://github.com/apache/parquet-format (parquet.thrift)."""
COLUMNS = 1
"""The field of a row group with its columns."""
META_DATA = 3
"""The field of a column with what follows."""
TYPE, NUM_VALUES, UNCOMPRESSED = 1, 5, 6
WIDTHS = (1, 4, 8, 12, 4, 8, 16, 16)
"""Bytes of a decoded value of each type; of text and binary these are the views."""
MAX_TIMES = 16
"""A file may always unpack to so many times its size; tables of measurements reach 8."""
LONG = 1 << 20
"""A file of so many rows is read column by column, if each is to be kept as something smaller."""
BINARY = 6
"""From this type on values are bytes of any length, which stand beside their views."""


def read_parquet(
    path: Path, limited: bool = True, narrow: Callable[[pl.Series], pl.Series] | None = None
) -> pl.DataFrame:
    """Read a file, without the lines that polars writes to stderr when it panics.

    Args:
        limited: whether a small file may not unpack to much, see `refuse_unpacked`.
        narrow: what each column of a long file is kept as. It is then read column by column, so
            that no column is there in both forms but the last.

    Raises:
        InputError: it unpacks to too much.
        ValueError: it is damaged.
        OSError, PolarsError: polars refuses the file.
    """
    size, rows = decoded_size(path)
    if limited:
        refuse_unpacked(path, size)
    frame = _read_quietly(path, narrow if rows >= LONG else None)
    if limited and frame.width:
        # equal texts share their bytes until something changes them
        lengths = frame.select(pl.selectors.string().str.len_bytes().cast(pl.Int64))
        refuse_unpacked(path, sum(int(column.sum()) for column in lengths))
    return frame


def refuse_unpacked(path: Path, size: int) -> None:
    """Raise InputError if a file unpacks to so many bytes, and these are too many.

    A small file may hold billions of equal values, but large tables of measurements are large
    files.
    """
    if size > MAX_TIMES * path.stat().st_size:
        check_unpacked(path, size)


def _read_quietly(path: Path, narrow: Any) -> pl.DataFrame:
    """Read a file; what polars would write to stderr goes nowhere."""
    # closed before Python began: 2 is another file's number, perhaps one of polars' own
    if sys.__stderr__ is None:
        return _read(path, narrow)
    try:
        kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # it was closed since
        return _read(path, narrow)
    try:
        # Rust writes to the file descriptor, not to sys.stderr
        os.dup2(nowhere, 2)
        return _read(path, narrow)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _read(path: Path, narrow: Any) -> pl.DataFrame:
    # a path is the name of one file, not a pattern, and ~ in front is no home
    whole = path.absolute()
    try:
        if narrow is None:
            return pl.read_parquet(whole, glob=False)
        columns = []
        for name in pl.read_parquet_schema(whole):
            columns.append(narrow(pl.read_parquet(whole, columns=[name], glob=False).to_series()))
        return pl.DataFrame(columns)
    except pl.exceptions.PanicException as error:
        raise ValueError(f"damaged: {error}") from None


def decoded_size(path: Path) -> tuple[int, int]:
    """Return how many bytes the columns of a file take in memory, and its number of rows, as its
    footer says.

    Raises:
        ValueError: the footer is damaged.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        # the last 8 bytes are the length of the footer, and PAR1
        file.seek(max(path.stat().st_size - 8, 0))
        length = int.from_bytes(file.read(4), "little")
        if file.read(4) != b"PAR1":
            raise ValueError("not Parquet, or cut off")
        file.seek(max(path.stat().st_size - 8 - length, 0))
        footer = file.read(length)
    try:
        fields, _ = _structure(footer, 0)
        size = 0
        for group in fields[ROW_GROUPS]:
            for column in group[COLUMNS]:
                chunk = column[META_DATA]
                size += chunk[NUM_VALUES] * WIDTHS[chunk[TYPE]]
                if chunk[TYPE] >= BINARY:
                    size += chunk[UNCOMPRESSED]
        return size, fields[ROWS]
    except Exception as error:  # whatever a damaged footer makes of it
        raise ValueError(f"its footer is damaged ({error!r})") from error


# -- the compact protocol of Thrift, https://github.com/apache/thrift ------------------------------


def _structure(data: bytes, at: int) -> tuple[Fields, int]:
    """Return the structure that begins at a place, and where it ends."""
    fields: Fields = {}
    number = 0
    while data[at]:
        # the type, and how far the number is from that of the field before
        step, kind = divmod(data[at], 16)
        at += 1
        if step:
            number += step
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, kind)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Return the value of a type, and where it ends; of some types None, and of booleans True."""
    match kind:
        case 1 | 2:
            return kind == 1, at
        case 4 | 5 | 6:
            return _integer(data, at)
        case 8:
            length, at = _number(data, at)
            return data[at : at + length], at + length
        case 9 | 10:
            return _list(data, at)
        case 12:
            return _structure(data, at)
        # a byte, a double, a UUID
        case 3 | 7 | 13:
            return None, at + {3: 1, 7: 8, 13: 16}[kind]
    raise ValueError(f"unknown type {kind}")


def _list(data: bytes, at: int) -> tuple[list[Any], int]:
    """Return the values of a list, and where it ends."""
    length, kind = divmod(data[at], 16)
    at += 1
    if length == 15:
        length, at = _number(data, at)
    values = []
    for _ in range(length):
        # in a list a boolean takes a byte
        value, at = _value(data, at, 3 if kind in (1, 2) else kind)
        values.append(value)
    return values, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a whole number ≥ 0, in groups of 7 bits, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        number |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            return number, at
    raise ValueError("a number of more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """Return a whole number whose sign is its last bit, and where it ends."""
    number, at = _number(data, at)
    return number >> 1 ^ -(number & 1), at

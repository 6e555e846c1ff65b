"""Text of files, and how it begins, for readers that know what is inside."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError
from knobwise.common.json_text import decode_json, decode_text
from knobwise.envs.readers.frames import decode_lines, unpack_gzip

BEGIN = 65_536
"""So many bytes show which tool wrote a file."""


def beginning(path: Path) -> str:
    """Return how a file of text begins, unpacked; "" for a folder, and a file of another suffix."""
    if not path.name.removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson", ".csv")):
        return ""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return packed.read(BEGIN).decode("utf-8-sig", errors="replace").lstrip()
        with path.open("rb") as file:
            return file.read(BEGIN).decode("utf-8-sig", errors="replace").lstrip()
    except (OSError, EOFError, zlib.error):
        # whoever reads it whole says what is wrong
        return ""


def json_in(path: Path) -> Any:
    """Return the content of a file of JSON, which may be gzipped.

    Raises:
        InputError: it cannot be read, or is not JSON.
    """
    try:
        return decode_json(text_in(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error


def json_lines_in(path: Path) -> list[Any]:
    """Return the content of each line of a file of JSON lines, which may be gzipped.

    Raises:
        InputError: it cannot be read, or a line is not JSON.
    """
    try:
        return [*decode_lines(text_in(path)).values()]
    except ValueError as error:
        raise InputError(f"{path}: not JSON lines ({error})") from error


def text_in(path: Path) -> str:
    """Return the text of a file, unpacked. Raises InputError if it cannot be read."""
    try:
        return decode_text(unpack_gzip(path) if path.suffix == ".gz" else path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error

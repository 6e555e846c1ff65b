"""Text in UTF-8 or with a mark, and JSON, read and written strictly."""

from __future__ import annotations

import codecs
import gc
import itertools
import json
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError

MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    # before UTF-16, whose mark begins it
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""What text may begin with → its encoding."""


def encoding_of(begin: bytes) -> str:
    """Return the encoding of text that begins so: UTF-8 unless a mark says otherwise."""
    return next((name for mark, name in MARKS.items() if begin.startswith(mark)), "utf-8")


def decode_text(content: bytes) -> str:
    """Decode text in UTF-8, or in what a mark at its beginning says.

    Raises:
        ValueError: it is in another encoding; the message says in which line that shows.
    """
    try:
        return content.decode(encoding_of(content[:4]))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is not {error.encoding.upper()} ({error.reason}); save it as UTF-8"
        ) from error


class RepeatedKeyError(ValueError):
    """A key occurs twice in one object, of which parsers silently take the last."""


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file.

    Raises InputError if there is no such file, it is not JSON or cut off, or an object has a key
    twice.
    """
    try:
        return decode_json(Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON, or cut off ({error}); write the file again") from error


def decode_json(text: bytes | str) -> Any:
    """Decode JSON as Python writes it: NaN and Infinity are numbers.

    Raises:
        ValueError: not JSON in UTF-8, or in UTF-16 with its mark; nested too deeply, or
            (`RepeatedKeyError`) a key twice in one object; the message is one line.
    """
    collecting = gc.isenabled()
    gc.disable()  # JSON has no cycles, and looking for them takes a third of the time
    try:
        if isinstance(text, bytes):
            text = decode_text(text)
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    finally:
        if collecting:
            gc.enable()


def is_deeper(content: object, levels: int) -> bool:
    """Return True if decoded JSON has lists and objects inside each other on more than so many
    levels."""
    inside = _containers([content])
    for _ in range(levels):
        inside = list(itertools.chain.from_iterable(map(_containers, inside)))
    return bool(inside)


def _containers(content: Any) -> list[Any]:
    """Return the lists and objects directly inside of a list or an object."""
    values = content.values() if isinstance(content, dict) else content
    return [value for value in values if isinstance(value, (dict, list))]


def encode_json(content: object, source: object) -> str:
    """Return content as JSON. Raises InputError, with the name `source`, for what JSON cannot
    hold, such as NaN."""
    try:
        return json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: metadata that JSON cannot hold ({error})") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object as a dictionary. Raises RepeatedKeyError."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in record if names.count(name) > 1)
        raise RepeatedKeyError(f"the key {twice!r} occurs twice in one object")
    return record

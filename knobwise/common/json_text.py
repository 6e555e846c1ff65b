"""JSON that others wrote, read strictly."""

from __future__ import annotations

import json
from typing import Any


def decoded(text: bytes | str) -> Any:
    """Decode JSON as Python writes it: NaN and Infinity are numbers.

    Raises:
        ValueError: not JSON in UTF-8, nested too deeply, or a key twice in one object, of which
            parsers silently take the last; the message is one line.
    """
    try:
        if isinstance(text, bytes):
            # Windows puts a mark at the beginning
            content = text.decode("utf-8-sig")
        else:
            content = text
        return json.loads(content, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as a dictionary. Raises ValueError: a key occurs twice."""
    record: dict[str, Any] = {}
    repeated = set()
    for key, value in pairs:
        if key in record:
            repeated.add(key)
        record[key] = value
    if repeated:
        first = next(key for key in record if key in repeated)
        raise ValueError(f"the key {first!r} occurs twice in one object")
    return record

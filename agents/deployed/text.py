"""Texts as numbers: words and short runs of characters, hashed, weighted and projected.

Training and serving read a text by this same code, so they get the same numbers to the bit. A text
is seen as its UTF-8 bytes, so that any script will do, and of a long one only both ends are read.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, Arrays, short

LONGEST = 4096
"""The most bytes that are read at each end of a text."""
RUN = 3
"""The length of runs of characters."""
BITS = 17
"""There are 2 to this power hashes."""
SURFACE = ("characters", "words", "digits")
"""What the first numbers are: ln(1 + count), or for digits their share."""
BENEFIT = 5
"""So many parts of any text count as known, since little can be said of a short one."""
MESSAGES = ("last", "user", "all")
"""What is read of a chat: the last message of the user, all of the user's, or all messages."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
# odd numbers have an inverse modulo 2^64
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_POWERS = np.cumprod(np.full(2 * LONGEST + 16, _BASE))
_INVERSES = np.cumprod(np.full(2 * LONGEST + 16, _INVERSE))
_MIX = np.uint64(0xD6E8FEB86659FD93)
_OF_WORDS = np.uint64(0xA0761D6478BD642F)
"""Added to the hash of a word, which so differs from that of an equal run of characters."""
_SHIFT = np.uint64(64 - BITS)
# letters and digits of ASCII, and every byte of a longer character
_IN_WORDS = np.array([byte > 127 or chr(byte).isalnum() for byte in range(256)])
_DIGITS = np.array([chr(byte).isdigit() and byte < 128 for byte in range(256)])


def text_of(value: Any, messages: str = "last") -> str:
    """Return the text of a value: itself, or what is read of a chat, "" for None and NaN.

    A chat is a list of messages with `role` and `content`, or JSON of one. Contents may be lists of
    parts, of which those of text count. Raises a ValueError for anything else.

    Args:
        messages: what is read of a chat, of `MESSAGES`.
    """
    if isinstance(value, str):
        if not value.startswith(("[{", "[ {", "[\n")):
            return value
        try:
            return text_of(json.loads(value), messages)
        except ValueError:
            # a text that begins like a chat
            return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if not isinstance(value, (list, tuple)) or not all(map(_is_message, value)):
        raise ValueError(f"must be text, or a list of messages, not {short(value)}")
    chosen = [m for m in value if messages == "all" or m["role"] == "user"]
    if messages == "last":
        chosen = chosen[-1:]
    return "\n".join(_content_of(message["content"]) for message in chosen)


def is_text(value: Any) -> bool:
    """Tell a text, a chat, or what is neither from a block of numbers."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(part, Mapping) for part in value)
    return not hasattr(value, "shape")


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _content_of(content: Any) -> str:
    """Return the text of a message, whose parts may be images too."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def bytes_of(text: str) -> bytes:
    """Return what is read of a text, in lower case, with single spaces, as UTF-8: all of it, or the
    first and the last `LONGEST` bytes, in whole characters."""
    if len(text) > 2 * LONGEST:
        text = f"{text[:LONGEST]} {text[-LONGEST:]}"
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    data = " ".join(text.lower().split()).encode("utf-8", "replace")
    if len(data) > 2 * LONGEST:
        ends = data[:LONGEST], data[-LONGEST:]
        data = b" ".join(end.decode("utf-8", "ignore").encode() for end in ends)
    return data


class Parts(NamedTuple):
    """What a text consists of."""

    hashes: Array
    """int64 [m], below 2^`BITS`: of its words, pairs of neighbours, and runs of characters."""
    characters: int
    """Its length, also of what is not read."""
    words: int
    digits: float
    """Their share of the bytes."""

    @property
    def surface(self) -> list[float]:
        """The numbers `SURFACE`."""
        return [math.log1p(self.characters), math.log1p(self.words), self.digits]


def parts_of(value: Any, messages: str = "last") -> Parts:
    """Take a text or a chat apart, see `text_of`, which raises a ValueError for anything else.

    The hash of the bytes b is Σ bᵢ·Bⁱ modulo 2^64, of which the best mixed bits are taken. Sums
    from the beginning of the text give it for all parts at once.
    """
    text = text_of(value, messages)
    values = np.frombuffer(bytes_of(text), np.uint8)
    n = len(values)
    sums = np.zeros(n + 1, np.uint64)
    (_POWERS[:n] * values).cumsum(out=sums[1:])
    # where words begin and end
    inside = np.zeros(n + 2, np.int8)
    inside[1:-1] = _IN_WORDS[values]
    change = inside[1:] - inside[:-1]
    first = (change == 1).nonzero()[0]
    after = (change == -1).nonzero()[0]
    # where characters begin: at all bytes but those that continue one
    places = np.arange(n + 1)
    if not text.isascii():
        places = places[np.append((values & 0xC0) != 0x80, True)]
    begin = np.concatenate([first, first[:-1], places[:-RUN]])
    end = np.concatenate([after, after[1:], places[RUN:]])
    hashes = (sums[end] - sums[begin]) * _INVERSES[begin]
    hashes[: 2 * len(first)] += _OF_WORDS
    hashes *= _MIX
    hashes >>= _SHIFT
    digits = np.count_nonzero(_DIGITS[values]) / max(1, n)
    return Parts(hashes.view(np.int64), len(text), len(first), digits)


class TextEncoder:
    """Turns a text into numbers: `SURFACE`, then k projected counts of its parts.

    Counts of parts that training knows are taken logarithmically, weighted, and brought to length
    1; then they are projected. What is unlike any text of training gives NaN: a text of which too
    few parts are known, such as one in another language, or one that is far longer.

    Attributes:
        arrays: what it was made of.
        messages: what it reads of a chat, of `MESSAGES`.
        width: k + the number of `SURFACE`.

    The arrays are `slots` [2^BITS], the number of a part by its hash, 0 for one that is not known;
    `weights` [V] and `projection` [V, k], of which row 0 is not used; `limits`, the least share of
    known parts and the most characters; and `messages`, an index into `MESSAGES`.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.messages = MESSAGES[int(arrays["messages"])]
        self.width = len(SURFACE) + arrays["projection"].shape[1]
        self._slots = arrays["slots"]
        self._weights = arrays["weights"]
        self._projection = arrays["projection"]
        self._least, self._most = arrays["limits"].tolist()

    def __call__(self, value: Any) -> Array:
        """Return the numbers of a text or chat, float32 [width]; all NaN if it is unlike training.
        Raises a ValueError if it is neither."""
        parts = parts_of(value, self.messages)
        slots = self._slots[parts.hashes]
        known = np.count_nonzero(slots)
        if known + BENEFIT < self._least * (len(slots) + BENEFIT) or parts.characters > self._most:
            return np.full(self.width, np.nan, np.float32)
        block = np.empty(self.width, np.float32)
        present, weights = self.weighted(slots)
        block[: len(SURFACE)] = parts.surface
        np.dot(weights, self._projection[present], out=block[len(SURFACE) :])
        return block

    def weighted(self, slots: Array) -> tuple[Array, Array]:
        """Return which known parts there are, int64 [p], and their weights, float32 [p] of length
        1, for the numbers of all parts [m]."""
        counts = np.bincount(slots, minlength=1)
        counts[0] = 0
        present = counts.nonzero()[0]
        weights = np.log1p(counts[present], dtype=np.float32)
        weights *= self._weights[present]
        weights /= math.sqrt(weights.dot(weights)) or 1.0
        return present, weights

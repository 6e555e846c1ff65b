"""Texts as numbers: words and short runs of characters, hashed, weighted and projected.

Training and serving read a text by this same code, so they get the same numbers to the bit. Any
script will do, and of a long text only both ends are read. Right after a model has run, a NumPy
call costs microseconds whatever the size of its arrays, so there are few of them.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

import numpy as np

from .arrays import Array, Arrays, short

LONGEST = 4096
"""The most characters that are read at each end of a text."""
BITS = 17
"""There are 2 to this power hashes."""
SURFACE = ("characters", "words", "digits")
"""What the first numbers are: ln(1 + count), or for digits their share."""
BENEFIT = 2
"""So many runs and words of any text count as known, since little can be said of a short one."""
MESSAGES = ("last", "user", "all")
"""What is read of a chat: the last message of the user, all of the user's, or all messages."""

# random odd numbers: the upper bits of a sum of products with them depend on all lower ones
_FIRST, _SECOND, _THIRD, _OF_WORDS, _OF_PAIRS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
    ],
    np.uint64,
)
_SHIFT = np.uint64(64 - BITS)
_DIGITS = b"0123456789"
# every byte of ASCII that is no letter or digit parts words; the others are of longer characters
_PARTED = bytes(byte if byte > 127 or chr(byte).isalnum() else 32 for byte in range(256))


def text_of(value: object, messages: str = "last") -> str:
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


def is_text(value: object) -> bool:
    """Tell a text, a chat, or what is neither from a block of numbers."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(part, Mapping) for part in value)
    return not hasattr(value, "shape")


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _content_of(content: object) -> str:
    """Return the text of a message, whose parts may be images too."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def read_of(text: str) -> str:
    """Return what is read of a text, in lower case and with single spaces: all of it, or the first
    and the last `LONGEST` characters."""
    if len(text) > 2 * LONGEST:
        text = f"{text[:LONGEST]} {text[-LONGEST:]}"
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(text.lower().split())


class Parts(NamedTuple):
    """What a text consists of."""

    hashes: Array
    """int64 [m], below 2^`BITS`: of its runs of three characters, of its words, and of pairs of
    neighbours."""
    characters: int
    """Its length, also of what is not read."""
    runs: int
    words: int
    digits: float
    """Their share of the bytes."""

    @property
    def surface(self) -> list[float]:
        """The numbers `SURFACE`."""
        return [math.log1p(self.characters), math.log1p(self.words), self.digits]


def parts_of(value: object, messages: str = "last") -> Parts:
    """Take a text or a chat apart, see `text_of`, which raises a ValueError for anything else.

    A run is hashed by its three code points, and a word by the CRC of its UTF-8: the sum of their
    products with odd numbers, modulo 2^64, of which the upper bits are taken.
    """
    text = text_of(value, messages)
    read = read_of(text)
    # what cannot be encoded, half of a pair of surrogates, becomes a question mark
    points = np.frombuffer(read.encode("utf-32-le", "replace"), np.uint32)
    data = read.encode("utf-8", "replace")
    words = data.translate(_PARTED).split()
    # of few words a loop is faster than NumPy
    named = np.array([crc32(word) for word in words], np.uint64)
    named *= _OF_WORDS
    runs = points[:-2] * _FIRST
    runs += points[1:-1] * _SECOND
    runs += points[2:] * _THIRD
    pairs = named[:-1] * _OF_PAIRS
    pairs += named[1:]
    hashes = np.concatenate([runs, named, pairs])
    hashes >>= _SHIFT
    digits = len(data) - len(data.translate(None, _DIGITS))
    share = digits / max(1, len(data))
    return Parts(hashes.view(np.int64), len(text), len(runs), len(words), share)


def known_shares(parts: Parts, slots: Array) -> tuple[float, float]:
    """Return the shares of runs and of words that are known, by the number of each part [m], 0 for
    one that is not."""
    runs = np.count_nonzero(slots[: parts.runs]) + BENEFIT
    words = np.count_nonzero(slots[parts.runs : parts.runs + parts.words]) + BENEFIT
    return runs / (parts.runs + BENEFIT), words / (parts.words + BENEFIT)


class TextEncoder:
    """Turns a text into numbers: `SURFACE`, then k projected counts of its parts.

    Counts of parts that training knows are taken logarithmically, weighted, and brought to length
    1; then they are projected. What is unlike any text of training gives NaN: a text of which too
    few runs or words are known, such as one in another language, or one that is far longer.

    Attributes:
        arrays: what it was made of.
        messages: what it reads of a chat, of `MESSAGES`.
        width: k + the number of `SURFACE`.

    The arrays are `slots` [2^BITS], the number of a part by its hash, 0 for one that is not known;
    `weights` [V] and `projection` [V, k], of which row 0 is not used; `limits`, the least shares of
    known runs and words, and the most characters; and `messages`, an index into `MESSAGES`.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.messages = MESSAGES[int(arrays["messages"])]
        self.width = len(SURFACE) + arrays["projection"].shape[1]
        self._slots = arrays["slots"]
        self._weights = arrays["weights"]
        self._projection = arrays["projection"]
        self._least_runs, self._least_words, self._most = arrays["limits"].tolist()

    def __call__(self, value: object) -> Array:
        """Return the numbers of a text or chat, float32 [width]; all NaN if it is unlike training.
        Raises a ValueError if it is neither."""
        parts = parts_of(value, self.messages)
        slots = self._slots[parts.hashes]
        runs, words = known_shares(parts, slots)
        if runs < self._least_runs or words < self._least_words or parts.characters > self._most:
            return np.full(self.width, np.nan, np.float32)
        present, weights = self.weighted(slots)
        block = np.empty(self.width, np.float32)
        block[: len(SURFACE)] = parts.surface
        np.dot(weights, self._projection[present], out=block[len(SURFACE) :])
        return block

    def weighted(self, slots: Array) -> tuple[Array, Array]:
        """Return which known parts there are, int64 [p], and their weights, float32 [p] of length
        1, by the number of each part [m]."""
        counts = np.bincount(slots, minlength=1)
        counts[0] = 0
        # much faster than nonzero of numbers
        present = (counts > 0).nonzero()[0]
        weights = np.log1p(counts[present], dtype=np.float32)
        weights *= self._weights[present]
        weights *= 1 / (math.sqrt(weights.dot(weights)) or 1.0)
        return present, weights

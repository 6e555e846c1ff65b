"""From a question and detected boxes to the order in which they are read, and from what was read to
an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

ASPECTS = ("title", "phone", "code", "total", "beside", "below")
"""What a question can ask for."""
_CUES = {
    "phone": "phone|call",
    "code": "code",
    "total": "total",
    "below": "below",
    "beside": "price|next to",
}
_PATTERNS = {
    "phone": r"\+?\d[\d\- ().]{6,}\d",
    "code": r"[A-Z]{1,4}[ \-–—]?\d{2,}",
    "total": r"\d+[.,]\s?\d{2}",
}
_LENGTHS = {"phone": 6.5, "code": 4.5, "total": 2.5}
"""Width of such a text divided by its height, roughly."""
_SIMILAR = 0.6
"""How much the beginning of a line must read like the name that is looked for, 0 to 1."""


@dataclass(frozen=True)
class Line:
    """A detected box of text, with what was read in it."""

    box: int
    """The index of its box."""
    text: str | None
    """None where it was not read."""
    x: float
    y: float
    """The middle of its box; of a picture seen upside down, as if it were turned."""
    width: float
    height: float


def aspect_of(question: str) -> str:
    """Return what a question asks for, one of `ASPECTS`, by the words in it; `title` if by none."""
    for aspect, cues in _CUES.items():
        if re.search(cues, question, re.IGNORECASE):
            return aspect
    return "title"


def shapes(boxes: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute the shapes [B, 5]: the middle (x, y), width, height and angle (degrees) of boxes [B,
    4, 2], whose corners are in reading order."""
    corners = boxes.astype(np.float64)
    along = (corners[:, 1] - corners[:, 0] + corners[:, 2] - corners[:, 3]) / 2
    across = (corners[:, 3] - corners[:, 0] + corners[:, 2] - corners[:, 1]) / 2
    sizes = np.hypot(along[:, 0], along[:, 1]), np.hypot(across[:, 0], across[:, 1])
    angles = np.degrees(np.arctan2(along[:, 1], along[:, 0]))
    return np.stack([*corners.mean(1).T, *sizes, angles], 1)


def reading_order(question: str, boxes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the boxes (`shapes` [B, 5]) in the order in which they are worth reading: for a title
    the tallest first, for a number those first whose length suits it, else the largest first."""
    width = boxes[:, 2]
    height = boxes[:, 3].clip(1)
    aspect = aspect_of(question)
    unlike = -width * height
    if aspect == "title":
        unlike = -height
    elif aspect in _LENGTHS:
        unlike = np.abs(np.log(width.clip(1) / height / _LENGTHS[aspect]))
    return np.argsort(unlike, kind="stable")


def find_answer(question: str, boxes: Sequence[Line], read: Callable[[int], str]) -> str:
    """Return the answer to a question among the texts that were read; empty where there is none.
    What stands beside or below a text is read if it was not, by `read` with the index of its
    box."""
    # unread boxes have no text, and some that were read have none either
    lines = [line for line in boxes if line.text and line.text.strip()]
    if not lines:
        return ""
    aspect = aspect_of(question)
    if aspect == "title":
        return _title(lines)
    unread = [line for line in boxes if line.text is None]
    if aspect in ("beside", "below"):
        sought = re.split(r"\b(?:of|to|below)\b", question.rstrip("?. "))[-1].strip()
        return _neighbour(sought, lines, unread, aspect, read)
    if aspect == "total" and (total := _neighbour("total", lines, unread, "beside", read)):
        return _matched(_PATTERNS["total"], total) or total
    # by their form: a number with a point, capitals with digits
    matches = [match for line in lines if (match := _matched(_PATTERNS[aspect], str(line.text)))]
    if aspect == "total":
        return max(matches, key=lambda text: float(re.sub(r"[^\d]", "", text)), default="")
    return max(matches, key=len, default="")


def _title(lines: Sequence[Line]) -> str:
    """Return the tallest line, with what stands in the same row and is nearly as tall."""
    # a heading may be split into several boxes
    tallest = max(lines, key=lambda line: line.height)
    row = [
        n
        for n in lines
        if abs(n.y - tallest.y) < 0.5 * tallest.height and n.height > 0.7 * tallest.height
    ]
    return " ".join(str(line.text) for line in sorted(row, key=lambda line: line.x))


def _neighbour(
    name: str, lines: Sequence[Line], unread: Sequence[Line], where: str, read: Callable[[int], str]
) -> str:
    """Return the text beside or below the line whose beginning reads most like a name; empty if
    none does."""
    sought = name.lower()
    texts = [str(line.text) for line in lines]
    likeness = [SequenceMatcher(None, sought, text.lower()[: len(name)]).ratio() for text in texts]
    best = int(np.argmax(likeness))
    if likeness[best] < _SIMILAR:
        return ""
    anchor = lines[best]
    candidates = [*lines, *unread]
    if where == "beside":
        rest = texts[best][len(name) :].strip(" :.-")
        if rest and len(texts[best]) > len(name) + 2:  # one box holds both
            return rest
        # the nearest to the right in the same row
        right = [
            n for n in candidates if abs(n.y - anchor.y) < 0.6 * anchor.height and n.x > anchor.x
        ]
        line = min(right, key=lambda n: n.x, default=None)
    else:
        # the nearest below that begins at the same margin
        margin = anchor.x - anchor.width / 2
        edge = anchor.y + 0.5 * anchor.height
        below = [
            n for n in candidates if abs(n.x - n.width / 2 - margin) < anchor.width and n.y > edge
        ]
        line = min(below, key=lambda n: n.y, default=None)
    if line is None:
        return ""
    if line.text is None:
        return read(line.box)
    return line.text


def _matched(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[0].strip() if match else ""

"""Scenes: grids of coloured handwritten digits with templated questions and answer token sequences.

Colours survive any down-scaling, digits do not: so which questions need image crops depends on the
question *and* on the size of the grid, and both can be read off the features before a configuration
is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CELL = 8  # pixels; the side of scikit-learn's digit images
MAX_SIDE = 8  # cells
SEED = 1  # of the scenes of the built-in profile
ANSWER_TOKENS = MAX_SIDE + 1  # the longest answer is a row or a column, then <end>
PROMPT_TOKENS = 6  # question word, up to four positions, <answer>

COLOURS = {
    "red": (1.0, 0.15, 0.15),
    "green": (0.15, 1.0, 0.15),
    "blue": (0.15, 0.15, 1.0),
    "yellow": (1.0, 1.0, 0.15),
}
QUESTIONS = (
    "digit",
    "colour",
    "row",
    "column",
    "row_colours",
    "match",
    "sum",
    "compare",
    "largest",
)
WORDS = (
    "·", "<end>", "<answer>", *map(str, range(19)), "blank", *COLOURS,
    "first", "second", "same", "other", *(f"{name}?" for name in QUESTIONS),
    *(f"r{i}" for i in range(MAX_SIDE)), *(f"c{i}" for i in range(MAX_SIDE)),
)  # fmt: skip
TOKEN = {word: i for i, word in enumerate(WORDS)}
FILLER = TOKEN["·"]
END = TOKEN["<end>"]
_BLANK = 10  # the digit class of an empty cell
_COLOUR_NAMES = tuple(COLOURS)

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Digits(NamedTuple):
    """Digit images: ``images`` [n, 8, 8] in 0–1, ``labels`` [n]."""

    images: Floats
    labels: Ints


@dataclass(frozen=True)
class Scenes:
    """Scenes of one grid size, with one question each. A cell of 8 × 8 pixels is blank or holds one
    image of scikit-learn's digits in one of four colours.

    ``images`` [B, 3, 8·rows, 8·columns] in 0–1; ``digits`` [B, rows, columns] with 10 for blank;
    ``prompts`` [B, 6] and ``answers`` [B, 9] token ids, answers closed by ``<end>`` and filled up
    with ``·``; ``questions`` [B] names.
    """

    images: Floats
    digits: Ints
    prompts: Ints
    answers: Ints
    questions: tuple[str, ...]


@cache
def load_digits() -> Digits:
    """Load the third of scikit-learn's 1,797 digit images that training never saw, by a fixed
    permutation."""
    from sklearn.datasets import load_digits as read

    # training used the other two thirds
    bunch = read()
    order = np.random.default_rng(20).permutation(len(bunch.target))
    chosen = order[: len(order) // 3]
    return Digits(
        (bunch.images[chosen] / 16).astype(np.float32), bunch.target[chosen].astype(np.int64)
    )


def draw_scenes(
    rng: np.random.Generator, digits: Digits, rows: int, columns: int, questions: tuple[str, ...]
) -> Scenes:
    """Draw one scene per entry of ``questions`` on a ``rows × columns`` grid."""
    if not (2 <= rows <= MAX_SIDE and 2 <= columns <= MAX_SIDE):
        raise ValueError(f"a grid has 2 to {MAX_SIDE} rows and columns, not {rows} × {columns}")
    shape = (len(questions), rows, columns)
    # a digit, a colour, and whether it is left blank, for each cell
    pick = rng.integers(len(digits.labels), size=shape)
    colour = rng.integers(len(COLOURS), size=shape)
    blank = rng.random(shape) < 0.15
    ink = np.where(blank[..., None, None], 0, digits.images[pick])  # [B, rows, columns, 8, 8]
    palette = np.array(list(COLOURS.values()), np.float32)[colour]  # [B, rows, columns, 3]
    images = np.einsum("brcyx,brcp->bprycx", ink, palette)
    images = images.reshape(len(questions), 3, rows * CELL, columns * CELL).astype(np.float32)
    labels = np.where(blank, _BLANK, digits.labels[pick])
    # a question and its answer for each scene
    prompts = np.full((len(questions), PROMPT_TOKENS), FILLER)
    answers = np.full((len(questions), ANSWER_TOKENS), FILLER)
    for i, question in enumerate(questions):
        positions, texts = _ask(rng, question, labels[i], colour[i])
        prompts[i, : 1 + len(positions)] = [TOKEN[word] for word in (f"{question}?", *positions)]
        prompts[i, -1] = TOKEN["<answer>"]
        answers[i, : len(texts) + 1] = [TOKEN[word] for word in (*texts, "<end>")]
    return Scenes(images, labels, prompts, answers, questions)


def draw_samples(count: int, seed: int) -> list[Scenes]:
    """Draw the single-scene samples 0 to ``count`` − 1."""
    return [draw_sample(row, seed) for row in range(count)]


def draw_sample(row: int, seed: int) -> Scenes:
    """Draw one single-scene sample, sides and question type uniform; it depends on (seed, row)
    alone."""
    rng = np.random.default_rng((seed, row))
    rows, columns = rng.integers(2, MAX_SIDE + 1, size=2).tolist()
    return draw_scenes(rng, load_digits(), rows, columns, (str(rng.choice(QUESTIONS)),))


def share_of_right(answer: Sequence[str], right: Sequence[str]) -> float:
    """Return the share of right words, position by position, over the longer of the two answers."""
    hits = sum(a == b for a, b in zip(answer, right, strict=False))
    return hits / max(len(answer), len(right), 1)


def to_words(tokens: NDArray[np.integer]) -> list[str]:
    """Return the words up to ``<end>``."""
    return [WORDS[token] for token in takewhile(lambda token: token != END, tokens.tolist())]


def _ask(
    rng: np.random.Generator, question: str, labels: Ints, colour: Ints
) -> tuple[list[str], list[str]]:
    """Draw the positions that the question names; return them and the words of its answer."""
    rows, columns = labels.shape
    r = int(rng.integers(rows))
    c = int(rng.integers(columns))

    def words_of(kind: str, *cells: tuple[int, int]) -> list[str]:
        texts = []
        for cell in cells:
            name = str(labels[cell])
            if kind == "colour":
                name = _COLOUR_NAMES[colour[cell]]
            texts.append("blank" if labels[cell] == _BLANK else name)
        return texts

    # a cell, a row or a column
    if question in ("digit", "colour"):
        return [f"r{r}", f"c{c}"], words_of(question, (r, c))
    if question == "column":
        return [f"c{c}"], words_of("digit", *((i, c) for i in range(rows)))
    row = [(r, j) for j in range(columns)]
    if question in ("row", "row_colours"):
        return [f"r{r}"], words_of("digit" if question == "row" else "colour", *row)
    if question == "largest":
        return [f"r{r}"], [max(words_of("digit", *row), key=lambda name: (name != "blank", name))]
    if question not in ("match", "sum", "compare"):
        raise ValueError(f"unknown question {question!r}; known: {', '.join(QUESTIONS)}")
    # two cells; these show their work: the cells first, a blank counting as nothing
    r2 = int(rng.integers(rows))
    c2 = int(rng.integers(columns))
    pair = ((r, c), (r2, c2))
    positions = [f"r{r}", f"c{c}", f"r{r2}", f"c{c2}"]
    if question == "match":
        seen = words_of("colour", *pair)
        return positions, [*seen, "same" if seen[0] == seen[1] else "other"]
    a, b = (int(labels[cell] % _BLANK) for cell in pair)
    last = str(a + b)
    if question == "compare":
        last = ("same", "first", "second")[np.sign(a - b)]
    return positions, [*words_of("digit", *pair), last]

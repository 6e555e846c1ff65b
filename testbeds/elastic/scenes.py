"""Scenes: grids of coloured handwritten digits with templated questions and their answers.

Colours survive any down-scaling, digits do not: so which questions need image crops depends on the
question *and* on the size of the grid, and both can be read off the features before a configuration
is chosen.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CELL = 8  # pixels; the side of scikit-learn's digit images
MAX_SIDE = 8  # cells
MIN_SIDE = 3  # cells
SEED = 1  # of the scenes of the built-in profile
BLANK = 10  # stands for a blank cell among the digits
ANSWER_TOKENS = MAX_SIDE + 1  # the longest answer is a row or a column, then <end>
PROMPT_TOKENS = 6  # question word, up to four positions, <answer>

COLOURS = {
    "red": (1.0, 0.15, 0.15),
    "green": (0.15, 1.0, 0.15),
    "blue": (0.15, 0.15, 1.0),
    "yellow": (1.0, 1.0, 0.15),
}
QUESTIONS = (
    "digit", "colour", "row", "column", "row_colours", "match", "sum", "compare", "largest",
)  # fmt: skip
WORDS = (
    "·", "<end>", "<answer>", *map(str, range(19)), "blank", *COLOURS,
    "first", "second", "same", "other", *(f"{name}?" for name in QUESTIONS),
    *(f"r{i}" for i in range(MAX_SIDE)), *(f"c{i}" for i in range(MAX_SIDE)),
)  # fmt: skip
TOKEN = {word: i for i, word in enumerate(WORDS)}
FILLER = TOKEN["·"]
END = TOKEN["<end>"]

Floats = NDArray[np.float32]


class Digits(NamedTuple):
    """Images of handwritten digits."""

    images: Floats
    """[n, 8, 8] in 0–1."""
    labels: NDArray[np.int64]
    """[n]."""


class Scene(NamedTuple):
    """A grid of cells with a question about it. A cell of 8 × 8 pixels is blank or holds one image
    of scikit-learn's digits in one of four colours."""

    image: Floats
    """[1, 3, 8·rows, 8·columns] in 0–1."""
    question: str
    """Such as `digit? r1 c2`: at row 1, column 2, both counted from 0."""
    answer: str
    """The words of the right answer."""
    digits: NDArray[np.int64]
    """[rows, columns]; `BLANK` for a blank cell."""


@cache
def load_digits(held_out: bool = True) -> Digits:
    """Load scikit-learn's 1,797 digit images: by a fixed permutation, the third that training never
    saw, or the other two thirds."""
    from sklearn.datasets import load_digits as read

    bunch = read()
    order = np.random.default_rng(20).permutation(len(bunch.target))
    third = len(order) // 3
    chosen = order[:third] if held_out else order[third:]
    return Digits((bunch.images[chosen] / 16).astype(np.float32), bunch.target[chosen])


def draw_samples(count: int, seed: int) -> list[Scene]:
    """Draw the samples 0 to ``count`` − 1."""
    return [draw_sample(row, seed) for row in range(count)]


def draw_sample(row: int, seed: int) -> Scene:
    """Draw one sample, kind of question and sides uniform; it depends on (seed, row) alone."""
    rng = np.random.default_rng((seed, row))
    rows, columns = rng.integers(MIN_SIDE, MAX_SIDE + 1, size=2).tolist()
    question = str(rng.choice(QUESTIONS))
    return draw_scene(rng, rows, columns, question, load_digits())


def draw_scene(
    rng: np.random.Generator, rows: int, columns: int, question: str, digits: Digits
) -> Scene:
    """Draw a scene of ``rows × columns`` cells for one kind of question."""
    shape = (rows, columns)
    # a digit, a colour, and whether it is left blank, for each cell
    pick = rng.integers(len(digits.labels), size=shape)
    colour = rng.integers(len(COLOURS), size=shape)
    blank = rng.random(shape) < 0.15
    ink = np.where(blank[..., None, None], 0, digits.images[pick])  # [rows, columns, 8, 8]
    palette = np.array(list(COLOURS.values()), np.float32)[colour]  # [rows, columns, 3]
    pixels = np.einsum("rcyx,rcp->prycx", ink, palette)
    labels = digits.labels[pick]
    names = {"digit": labels.astype(str), "colour": np.array(list(COLOURS))[colour]}
    kind = "colour" if question in ("colour", "row_colours", "match") else "digit"
    positions, answer = _ask(rng, question, np.where(blank, "blank", names[kind]))
    image = pixels.reshape(1, 3, rows * CELL, columns * CELL)
    labels = np.where(blank, BLANK, labels)
    return Scene(image, " ".join([f"{question}?", *positions]), " ".join(answer), labels)


def _ask(
    rng: np.random.Generator, question: str, grid: NDArray[np.str_]
) -> tuple[list[str], list[str]]:
    """Draw the positions that the question names, of cells that show these words; return them and
    the words of its answer."""
    rows, columns = grid.shape
    r = int(rng.integers(rows))
    c = int(rng.integers(columns))
    # a cell, a row or a column
    if question in ("digit", "colour"):
        return [f"r{r}", f"c{c}"], [grid[r, c]]
    if question == "column":
        return [f"c{c}"], grid[:, c].tolist()
    row = grid[r].tolist()
    if question in ("row", "row_colours"):
        return [f"r{r}"], row
    if question == "largest":
        return [f"r{r}"], [max(row, key=lambda name: (name != "blank", name))]
    # two cells; these show their work: the cells first, a blank counting as nothing
    r2 = int(rng.integers(rows))
    c2 = int(rng.integers(columns))
    positions = [f"r{r}", f"c{c}", f"r{r2}", f"c{c2}"]
    pair = [str(grid[r, c]), str(grid[r2, c2])]
    if question == "match":
        return positions, [*pair, "same" if pair[0] == pair[1] else "other"]
    a, b = (int(name.replace("blank", "0")) for name in pair)
    last = ("same", "first", "second")[np.sign(a - b)]
    if question == "sum":
        last = str(a + b)
    return positions, [*pair, last]

"""The built-in task of the selector: canvases, small images with three questions each, and
annotators.

A canvas of 10 × 10 pixels shows a handwritten digit (scikit-learn's) before one of six textures, in
one of six frames. A demonstration is a canvas, one question (which digit, frame, texture?) and the
answer that an annotator stated. It *covers* a query's question when it asks the same and the true
answer is the same. Careless annotators work on clean canvases, so that theirs resemble the query
more, and are often wrong.

`numpy.random.RandomState`, whose streams NEP 19 freezes, draws everything, and pixels are multiples
of 1/256: canvases are drawn again instead of being stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

SIDE = 10  # pixels: a digit of 8 × 8 and the frame around it
PIXELS = SIDE * SIDE
QUESTIONS = ("digit", "frame", "texture")
VALUES = (10, 6, 6)
"""How many values each question's answer can have."""
LABELS = 10
"""Answers are shown as one of so many labels, which mean something else for every query."""
ANNOTATORS = 10
NOISE = (0.2, 0.05)
"""Standard deviation of the pixels' noise, of careful and careless annotators."""
WRONG = (0.02, 0.4)
"""How often the stated answer of careful and careless annotators is wrong."""
POOL = 48
"""Candidates of a query."""
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
_TRAINING_DIGITS = 900  # of 1,797; the others are held out
_QUERY_NOISE = 0.05
_FRAME_INK = 0.6
_TEXTURE_INK = 0.35
_CHUNK = 256  # queries whose pools are drawn at a time
_LEVELS = 256  # pixels are multiples of 1/256


@dataclass(frozen=True)
class CanvasVariant:
    """Who annotated, and what a pool is made of: per question asked so many covers, then
    look-alikes that cover nothing, then random items."""

    careless_annotators: int
    """Of the ten; an annotator is careful or careless in everything."""
    careful_covers: int
    """Covers of careful annotators, per question asked."""
    careless_covers: int
    careful_look_alikes: int
    """Of the careful annotators' items that cover nothing, the nearest to the query in pixels."""
    careless_look_alikes: int


VARIANTS = {"careless": CanvasVariant(6, 4, 6, 6, 8), "careful": CanvasVariant(0, 10, 0, 14, 0)}


@dataclass(frozen=True)
class Bank:
    """M items that can be demonstrations, a row each."""

    images: Floats  # [M, 100], about 0 to 1 (noise goes beyond)
    question: Ints  # index into `QUESTIONS`
    annotator: Ints  # 0 to 9
    careless: Bools  # whether the annotator is
    value: Ints  # the answer that the annotator stated
    true_value: Ints  # the right answer

    def __len__(self) -> int:
        return len(self.question)


@dataclass(frozen=True)
class Queries:
    """Q canvases, with one or two questions asked about each."""

    images: Floats  # [Q, 100]
    values: Ints  # [Q, 3]: the right answer to each question
    questions: Ints  # [Q, 2]: the questions asked, the second −1 where there is only one
    labels: Ints  # [Q, 3, 10]: the label of each value of each question, a permutation of 0 to 9

    def __len__(self) -> int:
        return len(self.questions)


def draw_bank(rng: RandomState, size: int, held_out: bool, variant: CanvasVariant) -> Bank:
    """Draw the items of a bank, values, questions and annotators uniform."""
    values = _draw_values(rng, size)
    question = rng.randint(len(QUESTIONS), size=size, dtype=np.int64)
    annotator = rng.randint(ANNOTATORS, size=size, dtype=np.int64)
    careless = annotator < variant.careless_annotators
    noise, rate = (np.array(pair)[careless.astype(int)] for pair in (NOISE, WRONG))
    images = _draw_images(rng, values, held_out, noise)
    # a wrong answer is any other, none more often
    right = values[np.arange(size), question]
    count = np.array(VALUES)[question]
    wrong = rng.random_sample(size) < rate
    other = (right + 1 + (rng.random_sample(size) * (count - 1)).astype(np.int64)) % count
    return Bank(images, question, annotator, careless, np.where(wrong, other, right), right)


def draw_queries(rng: RandomState, size: int, held_out: bool) -> Queries:
    """Draw queries, half of them with two questions."""
    values = _draw_values(rng, size)
    images = _draw_images(rng, values, held_out, np.full(size, _QUERY_NOISE))
    # the first two of a random order; half of the queries keep one
    questions = rng.random_sample((size, len(QUESTIONS))).argsort(1)[:, :2]
    questions[rng.random_sample(size) < 0.5, 1] = -1
    labels = rng.random_sample((size, len(QUESTIONS), LABELS)).argsort(2)
    return Queries(images, values, questions, labels)


def draw_covering_pools(
    rng: RandomState, queries: Queries, bank: Bank, variant: CanvasVariant
) -> Ints:
    """Draw each query's candidates, shuffled: [Q, 48] rows of the bank.

    A bank with too few covers or look-alikes gives more random items in their place; one with too
    few items altogether leaves −1 at the end.
    """
    pools = []
    careless = bank.careless
    bank_images = bank.images.astype(np.float64)
    bank_norm = (bank_images**2).sum(1)
    for start in range(0, len(queries), _CHUNK):
        rows = slice(start, start + _CHUNK)
        order = rng.random_sample((len(queries.questions[rows]), len(bank)))
        # squared distance, without the query's own norm; in multiples of 2⁻¹⁶, so exact whatever
        # computes it
        distance = bank_norm - 2 * queries.images[rows].astype(np.float64) @ bank_images.T
        free = np.ones(order.shape, bool)
        chosen = []
        for part in queries.questions[rows].T:
            right = np.take_along_axis(queries.values[rows], part[:, None].clip(0), 1)
            cover = (bank.question == part[:, None]) & (bank.true_value == right)
            free &= ~cover
            chosen.append(_lowest(order, cover & ~careless, variant.careful_covers))
            chosen.append(_lowest(order, cover & careless, variant.careless_covers))
        chosen.append(_lowest(distance, free & ~careless, variant.careful_look_alikes))
        chosen.append(_lowest(distance, free & careless, variant.careless_look_alikes))
        special = np.concatenate(chosen, 1)
        # the rest of a pool is drawn from candidates that are not in it yet
        query, column = np.nonzero(special >= 0)
        free[query, special[query, column]] = False
        pool = np.concatenate([special, _lowest(order, free, POOL)], 1)
        first = np.argsort(pool < 0, axis=1, kind="stable")[:, :POOL]
        pools.append(np.take_along_axis(pool, first, 1))
    pool = np.concatenate(pools)
    shuffled = np.where(pool < 0, np.inf, rng.random_sample(pool.shape)).argsort(1)
    return np.take_along_axis(pool, shuffled, 1)


def digest(queries: Queries, bank: Bank) -> str:
    """Compute `sha256:…` of everything drawn, the same on every machine."""
    sha = hashlib.sha256()
    for images in (queries.images, bank.images):
        sha.update(np.rint(images * _LEVELS).astype("<i2").tobytes())
    columns = [queries.values, queries.questions, queries.labels, bank.question, bank.annotator]
    for numbers in (*columns, bank.careless, bank.value, bank.true_value):
        sha.update(numbers.astype("<i2").tobytes())
    return f"sha256:{sha.hexdigest()}"


def paint(values: Ints, pick: Ints, held_out: bool) -> Floats:
    """Draw canvases without noise, [n, 100], of values [n, 3] (digit, frame, texture); `pick`, [n],
    chooses one of the digit's images, counted round and round; `held_out`, whether the digits are
    of the held-out half."""
    digits, counts = _digits(held_out)
    frames, textures = _patterns()
    # the frame, then inside it the darker of digit and texture
    canvas = frames[values[:, 1]] * np.float32(_FRAME_INK)
    digit = digits[values[:, 0], pick % counts[values[:, 0]]]
    canvas[:, 1:-1, 1:-1] = np.maximum(digit, np.float32(_TEXTURE_INK) * textures[values[:, 2]])
    return canvas.reshape(len(values), PIXELS)


def _draw_values(rng: RandomState, size: int) -> Ints:
    return np.stack([rng.randint(count, size=size, dtype=np.int64) for count in VALUES], 1)


def _draw_images(rng: RandomState, values: Ints, held_out: bool, noise: Doubles) -> Floats:
    clean = paint(values, rng.randint(1 << 30, size=len(values), dtype=np.int64), held_out)
    noisy = clean + noise[:, None] * rng.standard_normal(clean.shape)
    return (np.rint(noisy * _LEVELS) / _LEVELS).astype(np.float32)


@cache
def _digits(held_out: bool) -> tuple[Floats, Ints]:
    """Return the images of each digit, [10, most, 8, 8] in 0–1 and filled up with blanks, and their
    number, [10]."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = RandomState(0).permutation(len(bunch.target))
    chosen = order[:_TRAINING_DIGITS]
    if held_out:
        chosen = order[_TRAINING_DIGITS:]
    images = (bunch.images[chosen] / 16).astype(np.float32)
    labels = bunch.target[chosen]
    counts = np.bincount(labels)
    grouped = np.zeros((len(counts), counts.max(), 8, 8), np.float32)
    for digit, count in enumerate(counts):
        grouped[digit, :count] = images[labels == digit]
    return grouped, counts


@cache
def _patterns() -> tuple[Floats, Floats]:
    """Draw six frames [6, 10, 10], inside blank, and six textures [6, 8, 8]: fixed random black and
    white."""
    rng = RandomState(11)
    border = np.ones((SIDE, SIDE), bool)
    border[1:-1, 1:-1] = False
    frames = (rng.random_sample((VALUES[1], SIDE, SIDE)) < 0.5) & border
    textures = rng.random_sample((VALUES[2], SIDE - 2, SIDE - 2)) < 0.5
    return frames.astype(np.float32), textures.astype(np.float32)


def _lowest(key: Doubles, allowed: Bools, count: int) -> Ints:
    """Return the columns of the `count` lowest keys among those allowed, from the lowest on; −1
    where there are fewer."""
    count = min(count, key.shape[1])
    if count == 0:
        return np.zeros((len(key), 0), np.int64)
    keys = np.where(allowed, key, np.inf)
    # the lowest in any order, then in their own
    lowest = np.argpartition(keys, count - 1, axis=1)[:, :count]
    order = np.take_along_axis(keys, lowest, 1).argsort(1, kind="stable")
    lowest = np.take_along_axis(lowest, order, 1)
    return np.where(np.take_along_axis(allowed, lowest, 1), lowest, -1)

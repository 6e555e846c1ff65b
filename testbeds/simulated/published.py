"""What was published about a vision-language model with 16 blocks and the data sets that it was
measured on, and the choices for what was not published."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from knobwise.envs.tables.profile_table import Knob

BLOCK_LOSS = np.array([
    0.627, 0.055, 0.051, 0.046, 0.039, 0.034, 0.031, 0.028,
    0.027, 0.026, 0.026, 0.027, 0.030, 0.033, 0.037, 0.043,
])  # fmt: skip
"""Accuracy lost by removing one block. The value of block 0 was published, and no more can be
lost."""
TOTAL_BLOCKS = len(BLOCK_LOSS)
TIERS = {"low": (1, 3), "medium": (4, 8), "high": (9, 15)}
"""Fewest and most crops of a tier."""


def _grid(name: str, values: tuple[int | str, ...], *others: range) -> tuple[Knob, ...]:
    """Return a grid over a knob and the two that all grids have."""
    top_k, blocks = map(tuple, others)
    return Knob(name, values), Knob("top_k", top_k), Knob("num_active_blocks", blocks)


GRIDS = {
    "240": _grid("max_crops", tuple(range(2, 13, 2)), range(4, 33, 4), range(8, 17, 2)),
    "27": _grid("max_crops", (2, 6, 10), range(4, 13, 4), range(12, 17, 2)),
    "tiers": _grid("tier", tuple(TIERS), range(4, 9), range(12, 17)),
}
"""The knobs of each grid."""


class DataSet(NamedTuple):
    """What was published about a data set.

    The best tier of coco_vqa and the tokens of okvqa were not published. They are chosen so that
    the two, which show the same images, have about the same vision time.
    """

    worst: tuple[float, float]
    """Accuracy and mean total ms at the fast end of the Pareto front, which is tier low, top_k 4,
    12 blocks."""
    best: tuple[float, float]
    """The same at its accurate end, which is `best_tier`, top_k 8, 16 blocks."""
    best_tier: str
    tokens: tuple[float, int, int]
    """Generated tokens: their mean, least and most."""
    ratio: float
    """How often n + 1 tokens occur as a share of how often n do. A geometric distribution with this
    ratio, cut to least … most, has the mean."""
    medium_loss: float
    """Accuracy lost with 6 crops as a share of that lost with 2 (chosen)."""
    high_loss: float
    """The same with 12 crops."""
    other_vision: float
    """Vision time of the other of medium and high, relative to that of `best_tier` (chosen)."""


DATA_SETS = {
    "text_vqa": DataSet(
        worst=(0.378, 218.6),
        best=(0.768, 371.5),
        best_tier="high",
        tokens=(3.4, 2, 15),
        ratio=0.5846551129657738,
        medium_loss=0.25,
        high_loss=0.0,
        other_vision=0.6,
    ),
    "coco_vqa": DataSet(
        worst=(0.654, 166.5),
        best=(0.826, 294.7),
        best_tier="medium",
        tokens=(2.2, 2, 6),
        ratio=0.16711910435269167,
        medium_loss=0.0,
        high_loss=0.3,
        other_vision=1.3,
    ),
    "okvqa": DataSet(
        worst=(0.366, 177.9),
        best=(0.644, 289.2),
        best_tier="medium",
        tokens=(2.4, 2, 8),
        ratio=0.28627671836012936,
        medium_loss=0.0,
        high_loss=0.2,
        other_vision=1.3,
    ),
}

# -- prefill ---------------------------------------------------------------------------------------

PREFILL_MS = 135.0
"""At `REFERENCE`."""
REFERENCE = {"vision": 1000.0, "top_k": 15.0, "blocks": 11.7}
"""Vision tokens, experts and blocks."""
EFFECT = {"vision": 0.15, "top_k": 0.08, "blocks": 0.40}
"""The exponents of these."""
REFERENCE_TEXT = 40.0
"""Text tokens at which `PREFILL_MS` holds."""
TEXT_EFFECT = {"240": 0.18, "27": 0.18, "tiers": 0.37}
"""The exponent of text tokens, by grid."""
TEXT_SPREAD = 0.45
"""Standard deviation of the logarithm of text tokens."""
PREFILL_NOISE = 0.046
"""Standard deviation of the noise in the logarithm of the time."""
STALLS = 1e-4
"""Share of records that stall."""
STALL = 0.6
"""Mean relative delay of a stall."""

# -- answers ---------------------------------------------------------------------------------------

SCORES = np.array([0.3, 0.6, 0.9, 1.0])
"""Scores of a right answer."""
SHARES = np.array([0.05, 0.08, 0.07, 0.80])
"""How often each of them occurs."""
DIFFICULTY = 1.0
"""Standard deviation, before scaling, of how difficult a sample is."""
SUITS = 0.8
"""The same of how much a knob matters for a sample."""
ANSWER_NOISE = 0.5
"""The same of noise."""
NEW_LENGTHS = 0.1
"""Share of records in which the length of the answer is drawn anew."""
STEP_NOISE = 0.193
"""Standard deviation of the logarithm of a decoding step."""
COLUMN_NOISE = 2.0
"""Standard deviation of the noise in a feature column, where a latent has 1."""

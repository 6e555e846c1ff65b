"""The knobs and the size of the elastic model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Configuration(NamedTuple):
    """One value per knob."""

    max_crops: int
    """The most 16-pixel tiles of an image; a small image has fewer."""
    top_k: int
    """Experts per token."""
    num_active_blocks: int
    """Blocks that run; the first and the last always do."""


@dataclass
class ElasticSize:
    """The size of the model; the defaults give 0.70 M parameters."""

    width: int = 96
    """Width of a token."""
    heads: int = 4
    """Attention heads; the width is a multiple of their number."""
    blocks: int = 6
    """Transformer blocks."""
    experts: int = 8
    """Experts in each block."""
    expert_width: int = 48
    """Hidden width of an expert."""
    max_top_k: int = 4
    """The most experts per token, in training and when the model runs."""
    max_crops: int = 12
    """The most tiles per image in training."""
    stride: int = 1
    """Pixels between windows of 8 pixels: a tile is 81 tokens at 1, 25 at 2, 9 at 4, 4 at 8."""

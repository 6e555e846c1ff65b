"""The configuration and the size of the elastic model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Configuration(NamedTuple):
    """One value per knob."""

    max_crops: int
    """Cap on the number of 16-pixel tiles; a small image uses fewer."""
    top_k: int
    """Experts per token."""
    num_active_blocks: int
    """Blocks that run; the first and the last always do."""


@dataclass
class ElasticSize:
    """Widths of the model; the defaults give 0.70 M parameters."""

    width: int = 96
    """Width of a token."""
    heads: int = 4
    """Attention heads; they divide the width."""
    blocks: int = 6
    """Transformer blocks."""
    experts: int = 8
    """Experts in each block."""
    expert_width: int = 48
    """Hidden width of an expert."""
    max_top_k: int = 4
    """The most experts per token that the model is trained with, and may be run with."""
    max_crops: int = 12
    """The most tiles per image that the model is trained with."""

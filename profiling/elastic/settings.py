"""The settings of the elastic model and of its profile, each with its meaning."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from knobwise.common.checks import at_least, one_of
from knobwise.profiling.measuring.adaptive_model import CLOCKS


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

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.blocks < 2 or not 1 <= self.max_top_k <= self.experts:
            raise ValueError(f"need at least 2 blocks and 1 ≤ max_top_k ≤ experts, got {self}")


@dataclass
class ElasticProfileConfig:
    """What ``profile_elastic`` measures."""

    samples: int = 2000
    """Scenes, each with one question, made of digit images that training never saw."""
    repeats: int = 5
    """Measurements per (sample, configuration). The table keeps all of them; figures are those of their medians."""
    detrend: bool = True
    """Divide out how fast the machine was at the moment, which a deployed controller follows by its tracker; needs
    three repeats."""
    clock: str = "wall"
    """What latency_ms is: wall, the time that passes, or cpu, the CPU time of the thread, for a machine that others use
    too. cpu_ms is the CPU time in either case."""
    seed: int = 1
    """Seeds the scenes and the order of measuring."""
    max_crops: tuple[int, ...] = (2, 4, 8, 12)
    """Values of the first knob: caps on the tiles of an image."""
    top_k: tuple[int, ...] = (1, 2, 3, 4)
    """Values of the second knob: experts per token."""
    num_active_blocks: tuple[int, ...] = (3, 4, 5, 6)
    """Values of the third knob: blocks that run."""
    exp_json: bool = True
    """Whether to write exp5/exp6 files too; they are some hundred times larger than the table."""
    quick: bool = False
    """A trial run in a minute: at most 32 samples, 1 repeat. The figures mean nothing."""

    def __post_init__(self) -> None:
        at_least("elastic.samples", self.samples, 1)
        at_least("elastic.repeats", self.repeats, 1)
        one_of("elastic.clock", self.clock, CLOCKS)
        for name in Configuration._fields:
            values = tuple(int(v) for v in getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} needs at least one value and no value twice, not {values}")
            setattr(self, name, values)

    @property
    def configurations(self) -> list[Configuration]:
        """Every combination of the knobs' values."""
        return [Configuration(*c) for c in itertools.product(self.max_crops, self.top_k, self.num_active_blocks)]

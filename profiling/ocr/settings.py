"""The settings of the profile of RapidOCR, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import a_seed, at_least, one_of
from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import CLOCKS

SIDES = (288, 416, 576)
"""Values of the knob `side`."""
PASSES = ("plain", "classify", "second")
"""Values of the knob `passes`, from the cheapest on."""


@dataclass
class OCRProfileConfig:
    """What `profile_ocr` measures."""

    samples: int = 2000
    """Scenes, from number 0 on; more of them later are measured beside those that exist."""
    repeats: int = 1
    """How often each is measured."""
    seed: int = 1
    """Of the scenes."""
    side: tuple[int, ...] = SIDES
    """Values to measure: pixels of the longer side that the detector sees."""
    boxes: tuple[int, ...] = (2, 4, 7, 10)
    """Values to measure: detected boxes that are read."""
    passes: tuple[str, ...] = PASSES
    """Values to measure: plain, classify (a classifier turns boxes that stand upside down), second (boxes that were
    read with a low score are read again upside down)."""
    clock: str = "cpu"
    """cpu: CPU time of the thread. wall: the time that passes."""
    straight: int = 100
    """Scenes that are also answered straight through, at the end, to check the composed times and answers."""
    shard: int = 0
    """Which part of the scenes this process measures, from 0."""
    shards: int = 1
    """Number of parts that the scenes are divided into."""

    def __post_init__(self) -> None:
        for name, least in {"samples": 1, "repeats": 1, "straight": 0, "shards": 1}.items():
            at_least(f"ocr.{name}", getattr(self, name), least)
        a_seed("ocr.seed", self.seed)
        one_of("ocr.clock", self.clock, CLOCKS)
        if not 0 <= self.shard < self.shards:
            raise InputError(f"ocr.shard must be 0 to {self.shards - 1}, since ocr.shards={self.shards}")
        for name in ("side", "boxes", "passes"):
            values = tuple(getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise InputError(f"ocr.{name}={list(values)}: needs at least one value and none twice")
            setattr(self, name, values)

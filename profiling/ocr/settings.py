"""The settings of the profile of RapidOCR, each with its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least, one_of
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
    """Number of scenes; with a larger number later, only the new scenes are measured."""
    side: tuple[int, ...] = SIDES
    """Values to measure: pixels of the longer side that the detector sees."""
    boxes: tuple[int, ...] = (2, 4, 7, 10)
    """Values to measure: detected boxes that are read."""
    passes: tuple[str, ...] = PASSES
    """Values to measure: plain, classify (a classifier turns boxes that stand upside down), second
    (boxes that were read with a low score are read again upside down)."""
    clock: str = "cpu"
    """cpu: CPU time of the thread. wall: the time that passes."""

    def __post_init__(self) -> None:
        at_least("ocr.samples", self.samples, 1)
        one_of("ocr.clock", self.clock, CLOCKS)
        for name in ("side", "boxes", "passes"):
            values = tuple(getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise InputError(
                    f"ocr.{name}={list(values)}: needs at least one value and none twice"
                )
            setattr(self, name, values)

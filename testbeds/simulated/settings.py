"""Settings of the simulated profile."""

from __future__ import annotations

from dataclasses import dataclass

from knobwise.common.checks import at_least


@dataclass
class SimulatedConfig:
    """Simulated data sets of a vision-language model, calibrated to published numbers."""

    datasets: tuple[str, ...] = ("text_vqa", "coco_vqa", "okvqa")
    """Data sets, out of text_vqa, coco_vqa, okvqa."""
    samples: int = 2276
    """Number of samples of each data set. The default, with three data sets and 240 configurations,
    makes 1.64 million records, as many as were published."""
    grid: str = "240"
    """The configurations. 240: max_crops 2–12 × top_k 4–32 × blocks 8–16; 27: max_crops 2, 6, 10 ×
    top_k 4, 8, 12 × blocks 12, 14, 16; tiers: low, medium, high × top_k 4–8 × blocks 12–16."""
    latency: str = "total"
    """The time that the budget limits: total, prefill or vision_prefill."""
    image_width: int = 768
    """Width of the block image_features; 0 for none."""
    language_width: int = 2048
    """Width of the block language_features; 0 for none."""
    signal: float = 0.5
    """Share of the variance of difficulty, answer length and usefulness of each knob that the
    features explain."""
    seed: int = 0
    """Seed of all draws."""

    def __post_init__(self) -> None:
        at_least("profile.seed", self.seed, 0)

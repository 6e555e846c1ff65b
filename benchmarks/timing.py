"""A table of random values, for benchmarks."""

from __future__ import annotations

import torch

from knobwise.envs.tables.profile_table import Knob, ProfileTable


def random_table(name: str, knobs: tuple[Knob, ...], samples: int, **features: int) -> ProfileTable:
    """Random values of the right shapes, for all combinations of the knobs, with feature blocks of these widths."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(*(torch.arange(len(knob.values)) for knob in knobs)).view(-1, len(knobs))
    shape = (samples, len(grid))
    return ProfileTable(
        name=name,
        knobs=knobs,
        configurations=grid,
        accuracy=torch.rand(shape, generator=generator),
        latency_ms=10 * (1 + grid.sum(1)) * (0.5 + torch.rand(shape, generator=generator)),
        mask=torch.ones(shape, dtype=torch.bool),
        sample_ids=tuple(map(str, range(samples))),
        features={block: torch.randn(samples, width, generator=generator) for block, width in features.items()},
    )

"""Small tables for the tests, made in memory. Simulated, and only for testing."""

from __future__ import annotations

import torch

from knobwise.envs.table import Knob, ProfileTable


def small_table(samples: int = 60, seed: int = 0, holes: float = 0.0, features: bool = True) -> ProfileTable:
    """3 × 2 × 2 configurations; accuracy and latency depend on two hidden traits that the features show."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2))
    size = grid.float() @ torch.tensor([2.0, 1.0, 1.0])
    hard, large = torch.rand(2, samples, 1, generator=generator)
    latency = (4 + 2 * size) * (0.7 + large) * (1 + 0.05 * torch.rand(samples, len(grid), generator=generator))
    accuracy = (torch.rand(samples, len(grid), generator=generator) < torch.sigmoid(size - 8 * hard + 2)).float()
    mask = torch.rand(samples, len(grid), generator=generator) >= holes
    mask[torch.arange(samples), torch.arange(samples) % len(grid)] = True
    blocks = {}
    if features:
        noise = torch.randn(samples, 3, generator=generator)
        blocks = {"image_features": torch.cat([large, noise], 1), "language_features": torch.cat([hard, noise], 1)}
    return ProfileTable(
        name="small",
        knobs=(Knob("max_crops", (2, 6, 10)), Knob("top_k", (4, 8)), Knob("num_active_blocks", (12, 16))),
        configurations=grid,
        accuracy=accuracy.masked_fill(~mask, torch.nan),
        latency_ms=latency.masked_fill(~mask, torch.nan),
        mask=mask,
        sample_ids=tuple(str(i) for i in range(samples)),
        features=blocks,
    )

"""Small tables for the tests, made in memory. Simulated, and only for testing."""

from __future__ import annotations

import torch
from torch import Tensor

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


def table_of(
    accuracy: list[list[float]], latency_ms: list[list[float]], features: Tensor | None = None
) -> ProfileTable:
    """A table of one knob with these cells; NaN where not profiled."""
    a, ms = torch.tensor(accuracy), torch.tensor(latency_ms)
    n, c = a.shape
    return ProfileTable(
        name="by hand",
        knobs=(Knob("size", tuple(range(c))),),
        configurations=torch.arange(c).unsqueeze(1),
        accuracy=a,
        latency_ms=ms,
        mask=~a.isnan(),
        sample_ids=tuple(str(i) for i in range(n)),
        features={} if features is None else {"x": features},
    )


def two_kinds(samples: int, shown: bool, seed: int = 0) -> ProfileTable:
    """Two kinds of samples: one needs configuration 1, the other 2; the needed one is fast and the other is slow."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.rand(samples, generator=generator) < 0.5
    accuracy = torch.stack([torch.full((samples,), 0.3), kind.float(), 1 - kind.float()], 1)
    slow = torch.stack([torch.ones(samples), torch.where(kind, 1.0, 4.0), torch.where(kind, 4.0, 1.0)], 1)
    latency = 10 * slow * (1 + 0.05 * torch.rand(samples, 3, generator=generator))
    x = torch.randn(samples, 2, generator=generator)
    if shown:
        x[:, 0] = kind * 2.0 - 1
    return table_of(accuracy.tolist(), latency.tolist(), x)

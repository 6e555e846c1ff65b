"""Drift: machines on which some knob values are slower than in the profile, simulated for training.

What all configurations have in common, the level, is taken off the budget before a policy decides.
What is left is drawn here, so that a policy can learn to decide by what a tracker of latencies
knows of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable

COPIES = 4
"""Copies of each sample on other machines, fewer of large tables."""
MOST_CELLS = 1 << 24
"""Of the table and its copies together."""
RANGE = 3.0
"""Sizes reach from e^−RANGE times the largest to it."""
BY_ITSELF = 0.5
"""What a single value adds, as a share of what it does by its place."""


class Drift:
    """Draws how much slower configurations are than in the profile, beyond their common level.

    Half of the machines are as profiled. Of the others each knob slows down with its value, and
    each value by itself, by a size drawn evenly in logarithm.
    """

    def __init__(self, configurations: Tensor, size: float) -> None:
        self.configurations = configurations
        self.size = size

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Return offsets of ln ms, float [*shape, C], whose mean over configurations is 0; None
        without drift."""
        if not self.size:
            return None
        count, knobs = self.configurations.shape
        even = torch.rand((*shape, knobs, 1), generator=generator)
        drifts = torch.rand((*shape, 1, 1), generator=generator) < 0.5
        sizes = self.size * torch.exp(-RANGE * even) * drifts
        offset = torch.zeros(*shape, count)
        for k, column in enumerate(self.configurations.T):
            values = int(column.max()) + 1
            place = torch.linspace(0, 1, values)
            slope = torch.randn((*shape, 1), generator=generator)
            each = BY_ITSELF * torch.randn((*shape, values), generator=generator)
            effect = sizes[..., k, :] * (slope * place + each)
            offset += effect[..., column]
        return offset - offset.mean(-1, keepdim=True)


def drifted_copies(
    table: ProfileTable, size: float, seed: int
) -> tuple[ProfileTable, Tensor | None]:
    """Return a table and copies of it on machines that drift, one after the other.

    Returns:
        the table, row i + k·N of which is sample i in copy k, without features; and what latencies
        are off by, ln ms, float [N·(1 + copies), C]. The table itself and None without drift.
    """
    count = min(COPIES, MOST_CELLS // max(table.latency_ms.numel(), 1) - 1)
    if not size or count < 1:
        return table, None
    generator = torch.Generator().manual_seed(seed)
    drift = Drift(table.configurations, size)
    offsets = [torch.zeros(table.latency_ms.shape)]
    for _ in range(count):
        drawn = drift.draw((table.num_samples,), generator)
        assert drawn is not None
        offsets.append(drawn)
    offset = torch.cat(offsets)
    many = 1 + count
    factors = offset.exp()
    changed: dict[str, Any] = {
        "accuracy": table.accuracy.repeat(many, 1),
        "latency_ms": table.latency_ms.repeat(many, 1) * factors,
        "mask": table.mask.repeat(many, 1),
        "sample_ids": tuple(f"{name} {k}" for k in range(many) for name in table.sample_ids),
        "features": {},
    }
    for name in ProfileTable.WORDS:
        values = getattr(table, name)
        changed[name] = values * many if values else values
    if table.repeats_ms is not None:
        changed["repeats_ms"] = table.repeats_ms.repeat(many, 1, 1) * factors.unsqueeze(-1)
    for name in ("cost", "first_look_ms"):
        values = getattr(table, name)
        if values is None:
            changed[name] = None
        else:
            changed[name] = values.repeat(many, 1)
    return replace(table, **changed), offset


def rows_of_copies(rows: Tensor, table: ProfileTable, drifted: ProfileTable) -> Tensor:
    """Return the rows of a table with copies that belong to samples `rows`, int64 [n].

    As many are of the table itself as of all copies, so that half of what is drawn does not drift.
    """
    count = drifted.num_samples // table.num_samples - 1
    if count < 1:
        return rows
    copies = [rows + table.num_samples * k for k in range(1, 1 + count)]
    return torch.cat([rows.repeat(count), *copies])

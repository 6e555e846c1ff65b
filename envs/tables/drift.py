"""Copies of samples for training: on machines that drift, and with noise on their features.

On a machine that drifts some knob values are slower than in the profile. A slowdown that all
configurations share, the level, is taken off the budget before a policy decides. This module draws
what differs between configurations. A policy can then learn to use what a tracker of latencies
knows about these differences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable

COPIES = 4
"""Each sample has this many copies; fewer in large tables."""
MAX_CELLS = 1 << 24
"""The table and its copies together have at most this many cells."""
RANGE = 3.0
"""The smallest size of a drift is e^−RANGE times the largest."""
BY_ITSELF = 0.5
"""How much a knob value drifts by itself, relative to the slope over the knob's values."""


def drawn_drift(
    configurations: Tensor, size: float, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor | None:
    """Draw how much slower configurations are than in the profile, beyond their common level.

    Half of the machines are as profiled. On the others each knob has a slope over its values, and
    each value an effect of its own; their size is drawn for each knob, evenly in logarithm.

    Args:
        configurations: int64 [C, K], value indices.
        size: the largest size, in ln ms; 0 for no drift.
        shape: of the machines.

    Returns:
        offsets of ln ms, float [*shape, C], whose mean over configurations is 0; None without
        drift.
    """
    if not size:
        return None
    count, knobs = configurations.shape
    # the size for each knob, evenly in logarithm; 0 for half of the machines
    even = torch.rand((*shape, knobs, 1), generator=generator)
    drifts = torch.rand((*shape, 1, 1), generator=generator) < 0.5
    sizes = size * torch.exp(-RANGE * even) * drifts  # [*shape, K, 1]
    offset = torch.zeros(*shape, count)
    for k, column in enumerate(configurations.T):
        values = int(column.max()) + 1
        position = torch.linspace(0, 1, values)
        slope = torch.randn((*shape, 1), generator=generator)
        by_itself = BY_ITSELF * torch.randn((*shape, values), generator=generator)
        # the effect of each value, then of each configuration by its value
        effect = sizes[..., k, :] * (slope * position + by_itself)
        offset += effect[..., column]
    # the mean is the level, which is not drawn here
    return offset - offset.mean(-1, keepdim=True)


def copies_of(
    table: ProfileTable, drift: float, noisy: bool, seed: int
) -> tuple[ProfileTable, Tensor | None]:
    """Return a table and copies of it, one after the other.

    Args:
        table: the table.
        drift: the largest size of drift, in ln ms; 0 for copies on the same machine.
        noisy: whether there are copies without drift too, whose features will get noise.
        seed: of the drift.

    Returns:
        the table with its copies, without features and further costs: row i + k·N is sample i in
        copy k; and the offsets of latencies, in ln ms, float [N·(1 + copies), C], None without
        drift. The table itself if there are no copies: without drift and noise, or if it is too
        large.
    """
    count = min(COPIES, MAX_CELLS // table.latency_ms.numel() - 1)
    if not (drift or noisy) or count < 1:
        return table, None
    if not drift:
        return _repeated(table, torch.ones(1), 1 + count), None
    generator = torch.Generator().manual_seed(seed)
    offset = torch.zeros(table.latency_ms.shape)  # the table itself does not drift
    for _ in range(count):
        drawn = drawn_drift(table.configurations, drift, (table.num_samples,), generator)
        assert drawn is not None
        offset = torch.cat([offset, drawn])
    return _repeated(table, offset.exp(), 1 + count), offset


def _repeated(table: ProfileTable, factors: Tensor, copies: int) -> ProfileTable:
    """Return copies of a table below each other, latencies times factors, [N·copies, C]
    or [1]."""
    changed: dict[str, Any] = {"features": {}, "costs": {}}
    for name in ("accuracy", "latency_ms", "mask", *ProfileTable.OPTIONAL):
        values = getattr(table, name)
        if values is not None:
            changed[name] = torch.cat([values] * copies)
    changed["latency_ms"] *= factors
    if "repeats_ms" in changed:
        changed["repeats_ms"] *= factors.unsqueeze(-1)
    for name in ProfileTable.WORDS:
        changed[name] = getattr(table, name) * copies
    names = (f"{name} {k}" for k in range(copies) for name in table.sample_ids)
    return replace(table, **changed | {"sample_ids": tuple(names)})


def rows_of_copies(rows: Tensor, table: ProfileTable, copied: ProfileTable) -> Tensor:
    """Return the rows of these samples, int64 [n], in a table with copies.

    The samples themselves are repeated until they are as many as all copies, so that half of what
    is drawn has neither drift nor noise.
    """
    count = copied.num_samples // table.num_samples - 1
    if count < 1:
        return rows
    copies = [rows + table.num_samples * k for k in range(1, 1 + count)]
    return torch.cat([rows.repeat(count), *copies])

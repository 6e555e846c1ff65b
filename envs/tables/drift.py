"""Copies of samples for training, on machines that drift.

On a machine that drifts some knob values are slower than in the profile. A slowdown that all
configurations share, the level, is taken off the budget before a policy decides. This module draws
what differs between configurations. A policy can then learn to use what a tracker of latencies
knows about these differences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.envs.tables.cells import Cells, CountedCells
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


class Copied(NamedTuple):
    """A table and copies of it, one after the other."""

    table: ProfileTable
    """The table with its copies, without features, texts and further costs: row i + k·N is sample i
    in copy k."""
    cells: Cells
    """What counts of it."""
    offsets: Tensor | None
    """How the machines drift, in ln ms, float [N·(1 + copies), C]; None without drift."""


def copies_of(table: ProfileTable, drift: float, seed: int, cells: Cells | None = None) -> Copied:
    """Return a table and copies of it; the table itself if there are none: without drift, or if it
    is too large.

    Args:
        table: the table.
        drift: the largest size of drift, in ln ms; 0 for none.
        seed: of the drift.
        cells: what counts of the table; None for all that it has.
    """
    counted: Cells = table if cells is None else cells
    count = min(COPIES, MAX_CELLS // table.latency_ms.numel() - 1)
    if not drift or count < 1:
        return Copied(table, counted, None)
    generator = torch.Generator().manual_seed(seed)
    offset = torch.zeros(table.latency_ms.shape)  # the table itself does not drift
    for _ in range(count):
        drawn = drawn_drift(table.configurations, drift, (table.num_samples,), generator)
        assert drawn is not None
        offset = torch.cat([offset, drawn])
    return _repeated(table, counted, offset.exp(), 1 + count, offset)


def _repeated(
    table: ProfileTable, cells: Cells, factors: Tensor, copies: int, offsets: Tensor
) -> Copied:
    """Return copies of a table and its cells below each other, latencies times factors,
    [N·copies, C]."""
    changed: dict[str, Any] = _repeated_cells(table, factors, copies)
    if table.sampling_weight is not None:
        changed["sampling_weight"] = torch.cat([table.sampling_weight] * copies)
    for name in ProfileTable.WORDS:
        changed[name] = getattr(table, name) * copies
    names = (f"{name} {k}" for k in range(copies) for name in table.sample_ids)
    changed |= {"sample_ids": tuple(names), "features": {}, "texts": {}, "costs": {}}
    whole = replace(table, **changed)
    if cells is table:
        return Copied(whole, whole, offsets)
    return Copied(whole, CountedCells(**_repeated_cells(cells, factors, copies)), offsets)


def _repeated_cells(cells: Cells, factors: Tensor, copies: int) -> dict[str, Any]:
    """Return the tensors of cells and their copies, latencies times factors."""
    repeated: dict[str, Any] = {}
    for name in ("accuracy", "latency_ms", "mask", "repeats_ms", "first_look_ms"):
        values = getattr(cells, name)
        if values is not None:
            repeated[name] = torch.cat([values] * copies)
    repeated["latency_ms"] *= factors
    if "repeats_ms" in repeated:
        repeated["repeats_ms"] *= factors.unsqueeze(-1)
    return repeated


def rows_of_copies(rows: Tensor, table: ProfileTable, copied: ProfileTable) -> Tensor:
    """Return the rows of these samples, int64 [n], in a table with copies.

    The samples themselves are repeated until they are as many as all copies, so that half of what
    is drawn does not drift.
    """
    count = copied.num_samples // table.num_samples - 1
    if count < 1:
        return rows
    copies = [rows + table.num_samples * k for k in range(1, 1 + count)]
    return torch.cat([rows.repeat(count), *copies])

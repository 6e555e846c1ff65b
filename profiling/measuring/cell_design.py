"""Which cells of a profile to measure, where measuring all of them costs too much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable


def balanced_cells(samples: int, configurations: int, per_sample: int, seed: int = 0) -> Tensor:
    """Draw `per_sample` configurations for each sample at random, bool [samples, configurations].

    Of every C samples one after the other, C the number of configurations, each configuration is
    drawn for `per_sample`: the columns of a random Latin square. Every cell has the same
    probability, per_sample / C. With the same seed more cells include fewer.
    """
    draws = np.random.default_rng(seed)
    cells = np.zeros((samples, configurations), bool)
    for first in range(0, samples, configurations):
        # a cyclic square, its rows, columns and symbols in random order
        row = draws.permutation(configurations)[: samples - first, None]
        column = draws.permutation(configurations)[:per_sample]
        symbol = draws.permutation(configurations)
        drawn = symbol[(row + column) % configurations]
        np.put_along_axis(cells[first : first + configurations], drawn, True, axis=1)
    return torch.from_numpy(cells)


def with_cells(table: ProfileTable, cells: Tensor) -> ProfileTable:
    """Return a table without the measurements outside `cells`, bool [N, C].

    A sample or a configuration that would lose all of its measurements keeps them.
    """
    kept = cells & table.mask
    kept = kept | (table.mask & ~kept.any(1, keepdim=True))
    kept = kept | (table.mask & ~kept.any(0))
    repeats_ms = table.repeats_ms
    if repeats_ms is not None:
        repeats_ms = repeats_ms.where(kept.unsqueeze(-1), torch.nan)
    first_look_ms = table.first_look_ms
    if first_look_ms is not None:
        first_look_ms = first_look_ms.where(kept, 0.0)
    return replace(
        table,
        mask=kept,
        accuracy=table.accuracy.where(kept, torch.nan),
        latency_ms=table.latency_ms.where(kept, torch.nan),
        repeats_ms=repeats_ms,
        first_look_ms=first_look_ms,
    )

"""Histograms of what is logged of each step: as numbers in `histograms.csv`, and as TensorBoard and
W&B draw them.

A distribution becomes one number for each bin, `Val/Advantages[-0.5]` and so on: how many values
are from there to the next edge. The bins are the same in all steps, so a resumed run goes on in
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import wandb

EDGES = np.linspace(-5.0, 5.0, 21)
"""The edges of the bins; what lies outside counts in the first or the last one."""


def counts_in_bins(name: str, values: ArrayLike) -> dict[str, float]:
    """Return how many of the values, [n], are in each bin, by the name of the bin."""
    counts, _ = np.histogram(np.asarray(values).clip(EDGES[0], EDGES[-1]), EDGES)
    return {_bin(name, edge): float(count) for edge, count in zip(EDGES, counts, strict=False)}


def part_histograms(row: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the numbers of a row that are no bins, and the counts of each histogram, by name."""
    numbers = {name: value for name, value in row.items() if not name.endswith("]")}
    names = dict.fromkeys(name.partition("[")[0] for name in row if name not in numbers)
    return numbers, {name: [row[_bin(name, edge)] for edge in EDGES[:-1]] for name in names}


def for_wandb(row: Mapping[str, float]) -> dict[str, float | wandb.Histogram]:
    """Return a row with histograms as W&B takes them."""
    import wandb

    numbers, histograms = part_histograms(row)
    logged: dict[str, float | wandb.Histogram] = {**numbers}
    for name, counts in histograms.items():
        logged[name] = wandb.Histogram(np_histogram=(counts, EDGES))
    return logged


def values_from_counts(counts: list[float]) -> NDArray[np.float64]:
    """Return values with these counts, float [n]: each is the middle of its bin."""
    middles = (EDGES[:-1] + EDGES[1:]) / 2
    return np.repeat(middles, np.array(counts, int))


def _bin(name: str, edge: float) -> str:
    return f"{name}[{edge:g}]"

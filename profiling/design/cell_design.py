"""Which cells of a profile to measure, where measuring all of them costs too much.

Cells are drawn at random, balanced (`balanced_cells`). Each keeps the probability with which it was
drawn: weighted by its inverse, the cells that were drawn estimate a mean over all cells without
bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable

FEWEST = 5
"""A configuration that fewer samples were measured with tells too little to go on with."""


@dataclass(frozen=True)
class CellDesign:
    """The cells of a profile that are measured, [N, C] each."""

    probability: NDArray[np.float64]
    """With which a cell was drawn; 1 if certain, NaN if it is not measured."""
    sure: NDArray[np.bool_] | None = None
    """Cells that are measured whatever is drawn, and that stand for themselves alone."""

    @classmethod
    def draw(
        cls, whole: NDArray[np.bool_], configurations: int, per_sample: int, seed: int = 0
    ) -> CellDesign:
        """Draw `per_sample` cells of each sample, and all cells of those that are measured whole,
        bool [N]."""
        cells = balanced_cells(len(whole), configurations, per_sample, seed).numpy()
        probability = np.where(cells, per_sample / configurations, np.nan)
        probability[whole] = 1.0
        return cls(probability)

    @property
    def cells(self) -> NDArray[np.bool_]:
        """Mark the cells to measure, bool [N, C]."""
        return ~np.isnan(self.probability)

    @property
    def weight(self) -> NDArray[np.float64]:
        """How many cells each measured cell stands for, 0 where nothing is measured."""
        weights = np.nan_to_num(1 / self.probability)
        return weights if self.sure is None else np.where(self.sure, 1.0, weights)

    def with_sure(self, cells: NDArray[np.bool_]) -> CellDesign:
        """Return a design that measures these cells, bool [N, C], whatever is drawn: they depend on
        no outcome of their own samples, as the choices of a policy that was fitted on others."""
        probability = np.where(cells & ~self.cells, 1.0, self.probability)
        return CellDesign(probability, cells)


def cells_to_measure(
    parts: Sequence[str], samples: int, configurations: int, per_sample: int, whole_test: bool
) -> CellDesign:
    """Draw the cells of a profile: all, or `per_sample` of each sample.

    Args:
        parts: of each sample, train, validation or test; empty to measure all cells.
        samples, configurations: how many there are.
        per_sample: how many cells are drawn of a sample.
        whole_test: whether all cells of the samples to test on are measured.
    """
    whole = np.ones(samples, bool)
    if parts:
        whole = (np.array(parts) == "test") & whole_test
    return CellDesign.draw(whole, configurations, per_sample)


def part_of(
    design: CellDesign,
    sure: NDArray[np.bool_],
    done: NDArray[np.bool_],
    parts: Sequence[str],
    limit: str,
) -> CellDesign:
    """Return the part of a design that was measured before a limit was reached.

    Args:
        design: the cells that were drawn.
        sure: cells to measure whatever is drawn, bool [N, C].
        done: what has been measured, bool [N, C].
        parts: see `cells_to_measure`.
        limit: the setting and its value, such as `knobs.max_hours=1`.

    Raises:
        InputError: cells that were drawn are missing; or, where all cells were to be measured, some
            configuration was measured on fewer than `FEWEST` samples.
    """
    drawn = design.cells
    # cells were measured in random order, so that what is missing is missing at random
    enough = done[drawn].all() or (not parts and done.sum(0).min() >= FEWEST)
    if not enough:
        raise InputError(
            f"{limit}: is reached, with {done[drawn].sum()} of {drawn.sum()} cells measured. They "
            "are kept: repeat the command, with a higher limit if need be, to continue, or lower "
            "knobs.per_sample or knobs.samples"
        )
    wanted = design.with_sure(sure)
    return CellDesign(np.where(done, wanted.probability, np.nan), sure & done)


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
        costs={name: cost.where(kept, torch.nan) for name, cost in table.costs.items()},
    )

"""Cells: what N samples × C configurations get, as it was measured or as it counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable


@dataclass(frozen=True, eq=False)
class CountedCells:
    """What counts of a table under a rule, in the fields of `ProfileTable`."""

    accuracy: Tensor
    """How right an answer counts as, which may be less than it is; NaN where `mask` is False."""
    latency_ms: Tensor
    """Likewise."""
    mask: Tensor
    """True where a sample may have the configuration."""
    repeats_ms: Tensor | None = None
    first_look_ms: Tensor | None = None

    @property
    def measurements_ms(self) -> Tensor:
        """See `ProfileTable.measurements_ms`."""
        return self.latency_ms.unsqueeze(-1) if self.repeats_ms is None else self.repeats_ms


Cells = ProfileTable | CountedCells
"""Outcomes to learn from: of all that was measured, or of what counts."""
C = TypeVar("C", bound=Cells)


def cells_of(cells: Cells, rows: Any) -> CountedCells:
    """Return the cells of some samples, int64 [n] or a slice."""
    fields = cells.repeats_ms, cells.first_look_ms
    repeats_ms, first_look_ms = (None if values is None else values[rows] for values in fields)
    measured = cells.accuracy[rows], cells.latency_ms[rows], cells.mask[rows]
    return CountedCells(*measured, repeats_ms, first_look_ms)


def unread_ms(cells: Cells, rows: Any = ...) -> Tensor:
    """Return the latencies of requests that are not read for features, int64 [n] → [n, C]."""
    latency_ms = cells.latency_ms[rows]
    return latency_ms if cells.first_look_ms is None else latency_ms - cells.first_look_ms[rows]


def unread(cells: C) -> C:
    """Return what decisions without features meet: cells that are faster by the first look, of
    which nothing is left."""
    if cells.first_look_ms is None:
        return cells
    repeats_ms = cells.repeats_ms
    if repeats_ms is not None:
        repeats_ms = repeats_ms - cells.first_look_ms.unsqueeze(-1)
    return replace(cells, latency_ms=unread_ms(cells), repeats_ms=repeats_ms, first_look_ms=None)


def averages(cells: Cells, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean accuracy and mean latency (ms) of each configuration, float64 [C] each.

    A configuration never profiled in these rows counts as always wrong and as slow as the slowest
    of the others.
    """
    accuracy = cells.accuracy[rows].double().nanmean(0)
    latency = cells.latency_ms[rows].double().nanmean(0)
    seen = cells.mask[rows].any(0)
    return accuracy.where(seen, 0.0), latency.where(seen, latency[seen].amax())

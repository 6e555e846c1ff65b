"""Cells: what N samples × C configurations get, as it was measured or as it counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor


class Cells(Protocol):
    """The outcomes of N samples under C configurations: those of a table, or those that count under
    a rule. What does not count is NaN, and False in the mask."""

    @property
    def accuracy(self) -> Tensor:
        """float32 [N, C]."""
        ...

    @property
    def latency_ms(self) -> Tensor:
        """float32 [N, C]."""
        ...

    @property
    def repeats_ms(self) -> Tensor | None:
        """float32 [N, C, R], or None for one measurement of each cell."""
        ...

    @property
    def measurements_ms(self) -> Tensor:
        """float32 [N, C, R]."""
        ...

    @property
    def first_look_ms(self) -> Tensor | None:
        """float32 [N, C], the part of the latencies that reading a request adds."""
        ...

    @property
    def mask(self) -> Tensor:
        """bool [N, C]."""
        ...


C = TypeVar("C", bound=Cells)


@dataclass(frozen=True, eq=False)
class CountedCells:
    """What counts of a table under a rule, see `Cells`."""

    accuracy: Tensor
    """How right an answer counts as, which may be less than it is."""
    latency_ms: Tensor
    mask: Tensor
    """True where a sample may have the configuration."""
    repeats_ms: Tensor | None = None
    first_look_ms: Tensor | None = None

    @property
    def measurements_ms(self) -> Tensor:
        return self.latency_ms.unsqueeze(-1) if self.repeats_ms is None else self.repeats_ms


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
    changed: dict[str, Any] = {
        "latency_ms": cells.latency_ms - cells.first_look_ms,
        "repeats_ms": repeats_ms,
        "first_look_ms": None,
    }
    return cast("C", replace(cast("Any", cells), **changed))

"""When requests arrive: at random under a constant or changing load, or as recorded; and traces of such requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable

KINDS = {"poisson": 1, "ramp": 2, "steps": 2, "bursts": 2}
"""Kind of load → how many loads it has."""
BURST = 40
"""Mean number of requests before a burst begins or ends."""
HELP = "such as 0.75, ramp 0.3 1.3, steps 0.3 1.3, bursts 0.3 1.3, recorded FILE or recorded FILE 0.75"


@dataclass(frozen=True)
class Load:
    """How requests arrive. A load of 1 is one request per `gap_ms`, as many as the servers can serve.

    - `LOAD` or `poisson LOAD`: at random, independently of one another.
    - `ramp LOW HIGH`: the same, with a load that goes evenly from LOW to HIGH over the trace.
    - `steps LOW HIGH`: LOW in the first and the last third of the requests, HIGH in the second.
    - `bursts LOW HIGH`: between the two after `BURST` requests on average, each time at random: a Markov chain that
      moves with the requests.
    - `recorded FILE` or `recorded FILE LOAD`: windows of recorded arrivals, in ms, one per line, as they are or scaled
      to a mean load.
    """

    kind: str
    loads: tuple[float, ...]
    times_ms: Tensor | None = None
    """float64, recorded arrivals."""

    @classmethod
    def parse(cls, text: str | float) -> Load:
        """Read one of the forms above. Raises InputError: another form, a load that is not positive, or recorded
        arrivals that are missing, negative, not numbers, or go back in time."""
        kind, *rest = str(text).split() or [""]
        if kind not in (*KINDS, "recorded"):
            kind, rest = "poisson", [kind, *rest]
        times_ms = recorded_arrivals(rest.pop(0)) if kind == "recorded" and rest else None
        try:
            loads = tuple(map(float, rest))
        except ValueError:
            raise InputError(f"load {text!r}: is not known; give one {HELP}") from None
        counts = (0, 1) if kind == "recorded" else (KINDS[kind],)
        if len(loads) not in counts or (kind == "recorded" and times_ms is None):
            raise InputError(f"load {text!r}: is not known; give one {HELP}")
        if not all(0 < load < math.inf for load in loads):
            raise InputError(f"load {text!r}: must be positive; 1 is as much as the servers can serve")
        return cls(kind, loads, times_ms)

    def arrivals(self, requests: int, gap_ms: float, generator: torch.Generator) -> Tensor:
        """Arrivals of one trace, float64 [requests], in ms; `gap_ms` is the mean time between two at load 1. Raises
        InputError: fewer arrivals were recorded."""
        if self.times_ms is not None:
            last = len(self.times_ms) - requests
            if last < 0:
                raise InputError(f"requests={requests}: only {len(self.times_ms)} arrivals were recorded; take fewer")
            first = int(torch.randint(last + 1, (), generator=generator))
            times = self.times_ms[first : first + requests] - self.times_ms[first]
            if self.loads:
                mean = float(self.times_ms[-1] - self.times_ms[0]) / max(len(self.times_ms) - 1, 1)
                times = times * (gap_ms / self.loads[0] / mean if mean > 0 else 1.0)
            return times
        share = torch.arange(requests, dtype=torch.float64) / requests
        low, high = self.loads[0], self.loads[-1]
        if self.kind == "bursts":
            begins = torch.rand(requests, generator=generator) < 1 / BURST
            begins[0] = torch.rand((), generator=generator) < 0.5
            high_load = begins.cumsum(0) % 2 == 1
        else:
            high_load = (share >= 1 / 3) & (share < 2 / 3)
        load = low + (high - low) * (share if self.kind == "ramp" else high_load)
        gaps = torch.empty(requests, dtype=torch.float64).exponential_(generator=generator)
        return (gaps * gap_ms / load).cumsum(0)


def recorded_arrivals(path: str | Path) -> Tensor:
    """Arrivals in ms, one number per line, as float64 [n]. Raises InputError: the file cannot be read or is empty, a
    line is no number, an arrival is negative or NaN, or comes before the one above it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    try:
        times = torch.tensor([float(line) for line in lines], dtype=torch.float64)
    except ValueError as error:
        raise InputError(f"{path}: arrivals are numbers, in ms, one per line ({error})") from error
    check_arrivals(times, str(path))
    return times


def check_arrivals(times_ms: Tensor, name: str) -> None:
    """Raise InputError unless arrivals [*, n] are finite, not negative and in order, and there are any."""
    if not times_ms.numel():
        raise InputError(f"{name}: holds no arrivals; a trace needs at least one")
    problems = {
        "is not a finite number": ~times_ms.isfinite(),
        "is negative": times_ms < 0,
        "comes before the one above it": times_ms.diff(dim=-1, prepend=times_ms[..., :1]) < 0,
    }
    for words, wrong in problems.items():
        if wrong.any():
            raise InputError(f"{name}: arrival {int(wrong.nonzero()[0, -1]) + 1} {words}; sort the times, in ms")


class Traces(NamedTuple):
    """P traces of T requests, [P, T] each."""

    rows: Tensor
    """int64, rows of the table."""
    arrivals_ms: Tensor
    """float64, from the beginning of the trace, in order."""
    deadlines_ms: Tensor
    """float64, from arrival."""
    repeats: Tensor
    """int64 ≥ 0, which measurement of a cell is replayed, see `RewardTable.outcome`."""


def draw_traces(
    table: ProfileTable,
    loads: Sequence[str | float],
    count: int,
    *,
    requests: int,
    gap_ms: float,
    deadlines_ms: Tensor,
    rows: Tensor,
    seed: int,
) -> Traces:
    """`count` traces of `requests` requests: samples, deadlines and measurements evenly, arrivals by the loads in turn.

    Args:
        loads: each as `Load.parse` reads it; trace i has load i mod their number.
        gap_ms: mean time between arrivals at load 1.
        deadlines_ms: float [B], from arrival.
        rows: int64 [n], the samples to draw from.

    Raises:
        InputError: no load or a wrong one, no requests, a deadline that is not positive.
    """
    at_least("requests", requests, 1)
    if not loads:
        raise InputError(f"loads: at least one is needed, {HELP}")
    if not len(deadlines_ms) or not (deadlines_ms > 0).all():
        raise InputError(f"deadlines_ms={deadlines_ms.tolist()}: give at least one deadline, all positive")
    if not len(rows):
        raise InputError("traces: there are no samples to draw from")
    draw, shape = torch.Generator().manual_seed(seed), (count, requests)
    parsed = [Load.parse(each) for each in loads]
    arrivals = torch.stack([parsed[i % len(parsed)].arrivals(requests, gap_ms, draw) for i in range(count)])
    drawn = rows[torch.randint(len(rows), shape, generator=draw)]
    deadlines = deadlines_ms.double()[torch.randint(len(deadlines_ms), shape, generator=draw)]
    return Traces(drawn, arrivals, deadlines, torch.randint(1 << 62, shape, generator=draw))

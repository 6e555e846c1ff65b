"""What the benchmarks share: CPU time of functions that take turns, memory, and tables of random values."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from knobwise.envs.tables.profile_table import Knob, ProfileTable

Functions = Mapping[str, Callable[[], object]]


def milliseconds(function: Callable[[], object], calls: int = 1) -> float:
    """CPU time of one call, as a mean over several."""
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls * 1e3


def in_turns(functions: Functions, rounds: int, calls: int | Mapping[str, int]) -> dict[str, list[float]]:
    """CPU ms of one call of each function in every round. They take turns, so that whatever else the machine does meets
    all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(milliseconds(function, calls if isinstance(calls, int) else calls[name]))
    return times


def calls_of(functions: Functions, seconds: float) -> dict[str, int]:
    """How many calls of each function take about so many seconds, once it is warm."""
    counts = {}
    for name, function in functions.items():
        function()
        counts[name] = max(1, round(seconds * 1e3 / max(milliseconds(function), 1e-3)))
    return counts


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def memory(line: str) -> float:
    """MiB by the kernel's count: `RssAnon` belongs to this process alone, `VmHWM` is the peak with files' pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith(line)) / 1024


def in_a_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a process that does nothing else, for its memory; on one thread."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(work, *arguments).result()


def random_table(name: str, knobs: tuple[Knob, ...], samples: int, **features: int) -> ProfileTable:
    """Random values of the right shapes, for all combinations of the knobs, with feature blocks of these widths."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(*(torch.arange(len(knob.values)) for knob in knobs)).view(-1, len(knobs))
    shape = (samples, len(grid))
    return ProfileTable(
        name=name,
        knobs=knobs,
        configurations=grid,
        accuracy=torch.rand(shape, generator=generator),
        latency_ms=10 * (1 + grid.sum(1)) * (0.5 + torch.rand(shape, generator=generator)),
        mask=torch.ones(shape, dtype=torch.bool),
        sample_ids=tuple(map(str, range(samples))),
        features={block: torch.randn(samples, width, generator=generator) for block, width in features.items()},
    )

"""Timing ways to do the same thing, in turn, in CPU time on one thread.

Other work on a machine makes times longer, by an amount that changes from second to second. So the
ways take turns, a round of each after the other, and a line of a benchmark is a ratio: the median
over rounds of our time / theirs, with the quartiles.

A benchmark is a script of `Bench.line`s. Run it alone, or all of them by `make bench`:

    python benchmarks/environment.py [--ours] [--rounds=9]

With `--ours` nothing else is timed, as `benchmarks/compare.py` needs it. One round shows that a
script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

# before NumPy and torch are imported: idle threads wait, and their waiting counts as CPU time
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS"):
    os.environ[name] = "1"

Way = Callable[[], object]
MIN_SECONDS = 0.05
"""A round of a way lasts at least as long, by many calls if they are short."""
CALLS_ALONE = 20
"""Calls in a round where something runs before each."""
STARTER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
print(used.ru_maxrss)
sys.exit(process.returncode)
"""
UNITS = {"ns": 1e9, "µs": 1e6, "ms": 1e3, "s": 1.0}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def seconds_of(
    ways: Mapping[str, Way], rounds: int, before: Way | None = None
) -> dict[str, list[float]]:
    """Return the CPU seconds of a call of each way, one number a round.

    What runs `before` each call is not timed.
    """
    calls = {}
    for name, way in ways.items():
        way()
        start = time.perf_counter()
        way()
        calls[name] = max(1, round(MIN_SECONDS / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            if before is not None:
                alone = [_after(before, way) for _ in range(CALLS_ALONE)]
                seconds[name].append(statistics.median(alone))
                continue
            start = cpu_seconds()
            for _ in range(calls[name]):
                way()
            seconds[name].append((cpu_seconds() - start) / calls[name])
    return seconds


def _after(before: Way, way: Way) -> float:
    before()
    start = time.process_time()
    way()
    return time.process_time() - start


def run(*words: str) -> None:
    """Run Python in a process of its own."""
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


def peak_mb(*words: str) -> float:
    """Run Python in a process of its own, and return how much memory it had at most.

    A small process starts it: Linux counts the memory of whoever did as the new one's own.
    """
    command = [sys.executable, "-c", STARTER, sys.executable, *words]
    # of KiB, as Linux counts it
    return int(subprocess.check_output(command)) / 1024


class Bench:
    """The rows of a benchmark's table, printed in Markdown as they come.

    Options are read from the command line."""

    ours: bool
    rounds: int

    def __init__(self) -> None:
        parser = argparse.ArgumentParser(description="Time one part of knobwise beside its peers.")
        parser.add_argument("--ours", action="store_true", help="time nothing else")
        parser.add_argument("--rounds", type=int, default=9)
        parser.parse_args(namespace=self)
        # a script may have imported torch before this file
        import torch

        torch.set_num_threads(1)

    def line(
        self,
        what: str,
        unit: str,
        ours: Way,
        peers: Callable[[], Mapping[str, Way]] = dict,
        *,
        per: int = 1,
        target: str = "",
        before: Way | None = None,
    ) -> None:
        """Time our way beside what people would use instead.

        Args:
            what: what is done.
            unit: of the time, from ns to s, and of what: `ns a draw`.
            peers: builds other ways, by their names; not called under `--ours`.
            per: how many of the unit's things a call does.
            target: what the time, or the ratio to the first peer, should be.
            before: what runs before each call, untimed.
        """
        ways = {"": ours}
        if not self.ours:
            ways |= peers()
        seconds = seconds_of(ways, self.rounds, before)
        scale = UNITS[unit.split()[0]] / per
        mine = seconds.pop("")
        self.tell(what, unit, statistics.median(mine) * scale, target=target)
        for name, theirs in seconds.items():
            low, ratio, high = ratios(mine, theirs)
            value = statistics.median(theirs) * scale
            self.tell(f"… beside {name}", unit, value, f"{ratio:.3g} × [{low:.3g}, {high:.3g}]")

    def tell(self, what: str, unit: str, value: float, ratio: str = "", target: str = "") -> None:
        """Print a number with its unit, and what else belongs to it."""
        print(f"| {what} | {value:.4g} {unit} | {ratio} | {target} |", flush=True)


def ratios(times: list[float], others: list[float]) -> list[float]:
    """Return the quartiles of the ratios of times that were taken in turn."""
    values = [time / other for time, other in zip(times, others, strict=True)]
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")

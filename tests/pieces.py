"""Work for other processes, in a module of its own: importing it takes no torch, which each would
load for seconds."""

from __future__ import annotations

from knobwise.common.progress import progress


def work(number: int) -> int:
    with progress(f"worker {number}", total=3) as tick:
        for done in range(1, 4):
            tick(done, f"note {number}")
    return number

"""Which measurements are time-outs: a heap at the top of the times, whether they are equal to the
last digit or were stopped a little later."""

from __future__ import annotations

import math

import numpy as np

SHARE = 0.01
"""The heap holds more than this share of the measurements."""
RATIO = 5
"""It also holds more than this many times as many as lie just below it. Costs that depend on the
configuration alone repeat too, but evenly."""
WIDTHS = (1.001, 1.005, 1.02)
"""The longest time-out is so many times as long as the shortest, tried in this order."""
FEWEST = 10
"""Fewer that are not equal may be in a heap by chance."""
MOST_RIGHT = 0.1
"""Answers that are right may be as late by chance, but only this share of a heap."""

MOST = 0.9
"""A configuration with a larger share of its cells in the heap always takes that long."""


def time_outs(times: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Return which of these times are time-outs, bool of the same shape.

    They are the longest, where it occurs often, unless that is what right answers of a
    configuration always take, such as a price per request; or, of wrong answers alone, those that
    end within a 2 % of each other, with next to nothing just below and above.

    Args:
        times: float [n, C] or [n], ≥ 0, NaN where unknown.
        wrong: bool, whether the answer has accuracy 0, or none.
    """
    none = np.zeros(times.shape, bool)
    known = times[~np.isnan(times)]
    shorter = known[known < known.max(initial=0.0)]
    if not shorter.size:
        return none
    few = SHARE * known.size
    if known.size - shorter.size > max(few, RATIO * (shorter == shorter.max()).sum()):
        longest = times == known.max()
        right = (longest & ~wrong).sum()
        steady = right > MOST_RIGHT * longest.sum() and _is_usual(longest, times)
        return none if steady else longest
    # a few may be longer, as when a process could not be stopped
    place = math.ceil((1 - SHARE / 2) * known.size) - 1
    top = np.partition(known, place)[place]
    for width in WIDTHS:
        late = times >= top / width
        heap = late & wrong
        count = int(heap.sum())
        below = int(((known >= top / width**3) & (known < top / width)).sum())
        above = int((known > top * width).sum())
        sure = count > max(few, FEWEST, RATIO * (below + above))
        if sure and (late & ~wrong).sum() <= MOST_RIGHT * count and not _is_usual(heap, times):
            return heap
    return none


def _is_usual(heap: np.ndarray, times: np.ndarray) -> bool:
    """Return whether each configuration that is in the heap nearly always is, bool and float
    [n, C] or [n]: it is slow, and was not stopped. What took no time failed, and does not count."""
    count = heap.sum(0)
    measured = (times > 0).sum(0)
    return bool(np.all((count == 0) | (count > MOST * measured)))

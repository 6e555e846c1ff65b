"""Whether a promised share on time is kept by the answers of late, and what breaks it."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable

WINDOW = 200
"""Number of answers under a budget that a share is taken over."""
CHANCE = 0.05
"""A promise counts as broken where fewer answers on time than these are less likely than this."""
AGAIN = 0.1
"""It counts as kept again where as many answers in a row on time as the newest are less likely than
this at a share below the promise: 45 for .95."""
SLOWER = 1.1
"""From this factor on the latencies that the tracker follows, the machine is the cause."""
CAUSES = ("slower_machine", "other_requests")
"""Why a promise may be broken: latencies have drifted, or requests are unlike those of training."""


class PromiseWindow:
    """The last answers under one promised budget.

    Args:
        met: whether earlier answers were on time, the oldest first.
    """

    def __init__(self, met: Iterable[bool] = ()) -> None:
        self._met: deque[bool] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        for each in met:
            self.add(each)

    def add(self, met: bool) -> None:
        """Count an answer."""
        self._met.append(met)
        self._in_a_row = self._in_a_row + 1 if met else 0

    @property
    def met(self) -> list[bool]:
        """Whether the answers were on time, the oldest first."""
        return list(self._met)

    @property
    def share(self) -> float:
        """The share on time; NaN before the first answer."""
        return sum(self._met) / len(self._met) if self._met else math.nan

    def cause(self, promise: float, slower: float) -> str | None:
        """Return what breaks the promise of a share on time; None while it is kept.

        Args:
            slower: latencies here by those of the profile, as the tracker follows them.
        """
        if sum(self._met) >= fewest_kept(len(self._met), promise):
            return None
        if promise**self._in_a_row <= AGAIN:
            return None
        return CAUSES[0] if slower >= SLOWER else CAUSES[1]


@functools.cache
def fewest_kept(count: int, promise: float) -> int:
    """Return how many of so many answers have to be on time for a promise not to look broken: the
    lower `CHANCE` quantile of the binomial distribution."""
    below = 0.0
    for hits in range(count + 1):
        below += math.comb(count, hits) * promise**hits * (1 - promise) ** (count - hits)
        if below >= CHANCE:
            return hits
    return count

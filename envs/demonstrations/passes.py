"""Batches of rows, pass after pass."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor


class Passes:
    """Draws batches of `count` rows out of int64 [n], pass after pass.

    Every pass has each row once, in a new random order, the same on every device. A batch may end
    in the next pass. `drawn` counts the batches. The seed is ≥ 0.
    """

    def __init__(self, rows: Tensor, count: int, seed: int) -> None:
        self.rows = rows.cpu()
        self.count = count
        self.seed = seed
        self.drawn = 0
        self.before = 0  # `set_back` to it draws the last batch again

    def __call__(self) -> Tensor:
        n = len(self.rows)
        # the stretch of all passes, one after the other, that is next
        start = self.drawn * self.count
        self.before = self.drawn
        self.drawn += 1
        passes = range(start // n, (start + self.count - 1) // n + 1)
        orders = [_order(self.seed, number, n) for number in passes]
        return self.rows[torch.cat(orders)[start % n :][: self.count]]

    def set_back(self, before: int) -> None:
        """Return to an earlier value of `before`: the batches drawn after it come again."""
        self.drawn = before


@functools.lru_cache(maxsize=16)
def _order(seed: int, number: int, count: int) -> Tensor:
    """Draw the order of the rows in one pass."""
    return torch.from_numpy(np.random.default_rng([seed, number]).permutation(count))

"""What plain tensor code of the bandit would say in a line, faster.

Each function names that line. `tests/envs/bandit/test_faster.py` holds both equal to the bit.
Measured as CPU time of a step on one thread, 4,096 contexts × 16 draws: plain indexing makes it a
third slower, a plain sum a twentieth.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

FEW = 16
"""So many alternatives are few."""


def flat_index(first: Tensor, second: Tensor, size: int) -> Tensor:
    """Return the index of `values[first, second]` in the flattened values, whose second axis has
    this size. The arguments are int64 and broadcast. A third axis comes by a second call."""
    return torch.add(second, first, alpha=size)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return `values.flatten()[index]`, int64 from 0 on; twice as fast as `Tensor.take`."""
    return values.flatten().index_select(0, index.flatten()).view(index.shape)


def remainder(values: Tensor, divisor: int) -> Tensor:
    """Return `values % divisor`, int64 from 0 on, on the CPU. NumPy divides several numbers at once
    where it needs no remainder."""
    numbers = values.numpy().view(np.uint64)
    multiples = numbers // np.uint64(divisor)
    multiples *= np.uint64(divisor)
    return torch.from_numpy(np.subtract(numbers, multiples, out=multiples).view(np.int64))


def copy_when_changed(values: Tensor) -> Tensor:
    """Return `values.clone()`, of values whose memory no NumPy array shares. They are copied where
    either is changed in place, or its memory is asked for, as by `numpy()`, and else never."""
    return torch._lazy_clone(values)


def count_true(conditions: Tensor) -> Tensor:
    """Return `conditions.sum(-1)`, bool [*, R] → integers [*]."""
    if conditions.shape[-1] > FEW:
        return conditions.sum(-1, dtype=torch.int32)
    # bytes that are added up, which is much faster than a sum along an axis
    return functools.reduce(torch.add, conditions.view(torch.int8).unbind(-1))


def any_nan(values: Tensor) -> bool:
    """Return `values.isnan().any()`, of numbers that are not infinite and whose sum is not."""
    return math.isnan(values.sum())

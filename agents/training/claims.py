"""What a checkpoint claims, beside what its file holds.

An agent is built from settings, such as the number of its features, and then takes over weights. A
damaged or forged file may ask for billions of numbers that it does not hold; that is found out
before memory is taken for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from knobwise.common.errors import InputError

FREE = 1 << 24
"""So many numbers an agent may make beside those of its file, such as an index of its actions."""
TIMES = 4
"""It may make so many numbers for each byte of the file: in training a number has four bytes, and
is made once or twice."""
BY_SIZE = ("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided")
"""Operations of torch that make a tensor of the size that is their first argument."""
LIKE_ANOTHER = ("new_empty", "new_zeros", "new_ones", "new_full")
"""Those whose first argument is another tensor, and the second the size."""


class WithinFile(TorchDispatchMode):
    """Refuse to make tensors of more numbers, all together, than a file of so many bytes can ask
    for: `with WithinFile(size): …` raises InputError before they take memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._left = TIMES * size + FREE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.take(_numbers_made(func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def take(self, count: int) -> None:
        """Count so many numbers. Raises InputError if they are too many."""
        self._left -= count
        if self._left < 0:
            raise InputError(
                f"claims {count:,} numbers in one place, more than its {self.size:,} bytes can "
                "hold: it is damaged or forged; take another copy, or train again"
            )


def _numbers_made(name: str, args: Sequence[Any]) -> int:
    """Return how many numbers an operation of torch with these arguments makes from nothing."""
    if name in BY_SIZE:
        return math.prod(args[0])
    if name in LIKE_ANOTHER:
        return math.prod(args[1])
    if name == "arange":
        return int(max(args[:2]))
    return 0


def refuse_repeated(content: Any, size: int) -> None:
    """Raise InputError for a tensor, anywhere in what a file of so many bytes held, of more numbers
    than that: one number may stand for billions in it."""
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor) and part.numel() > size:
            WithinFile(size).take(part.numel() + TIMES * size + FREE)
        elif isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, (list, tuple)):
            waiting.extend(part)

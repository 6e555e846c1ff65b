"""Dropout controlled by a context manager instead of `train()` and `eval()`.

What is drawn, noted and judged never drops out, so it does not depend on `train()` and `eval()`,
which a trainer, a collector or a user may call. A loss may: in that of GRPO the old log-probs are
without dropout and the new ones with it, so their ratio is off 1 by what drops out, and the clip
bounds that. Masks drawn once for both (Hausknecht and Wagener 2022, "Consistent Dropout for Policy
Gradient Reinforcement Learning") would keep it at 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch.nn import functional

# of each thread its own, and torch.compile notices where it changes
_ASKED_FOR = ContextVar("dropout", default=False)


@contextmanager
def dropping_out(asked_for: bool = True) -> Iterator[None]:
    """Let the networks of this project drop out inside the block, as a loss needs it.

    Put nothing but the loss into the block: what is drawn or judged there would drop out too.
    """
    before = _ASKED_FOR.set(asked_for)
    try:
        yield
    finally:
        _ASKED_FOR.reset(before)


def drops_out() -> bool:
    """Return whether dropout is active; for third-party modules that use `train()` and `eval()`."""
    return _ASKED_FOR.get()


class Dropout(nn.Dropout):
    """Dropout that acts inside `dropping_out` alone. Shapes: [*] → [*]."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p, drops_out())

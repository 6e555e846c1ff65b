"""Where collections of garbage, which search all objects for cycles, would be in vain."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block without collections, since what it makes stays: imports of PyTorch take a fourth
    longer if the modules are searched for cycles again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

"""Imports that take long.

They come on demand, since reading a profile should not have to wait for TorchRL, and without
collections of garbage, which would search all objects for cycles in vain.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def lazy(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562), which imports a name's module on first use."""

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        # most names are of the package itself
        if not module.startswith("knobwise."):
            module = f"{package}.{module}"
        with uncollected():
            return getattr(importlib.import_module(module), name)

    return get


@contextmanager
def uncollected() -> Iterator[None]:
    """A block without collections, since what it makes stays: imports of PyTorch take a fourth
    longer if the modules are searched for cycles again and again.

    What it imported counts as old afterwards, or the next collection would search all of it at
    once.
    """
    collecting = gc.isenabled()
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # what others froze stays frozen; counting it takes time, and is for nothing without imports
        if collecting and len(sys.modules) > modules and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if collecting:
            gc.enable()

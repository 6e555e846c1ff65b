"""Imports on demand: reading a profile should not have to wait for TorchRL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from knobwise.common.garbage import uncollected


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

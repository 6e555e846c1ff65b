"""Imports on demand: reading a profile should not have to wait for TorchRL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562) that imports the module of a name when the name is first
    asked for."""

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        where = module_of[name]
        return getattr(
            importlib.import_module(
                where if where.startswith("knobwise.") else f"{package}.{where}"
            ),
            name,
        )

    return get

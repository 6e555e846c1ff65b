"""What is minimised: loss modules for TorchRL, and the pure formulae they are made of."""

# Parts are imported when they are first asked for: the formulae should not have to wait for TorchRL.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knobwise.losses.advantage import group_advantage
    from knobwise.losses.grpo import GRPOLoss
    from knobwise.losses.rce import RCELoss

_MODULE_OF = {"GRPOLoss": "grpo", "RCELoss": "rce", "group_advantage": "advantage"}

__all__ = ["GRPOLoss", "RCELoss", "group_advantage"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

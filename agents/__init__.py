"""What decides, what is learned, and how it is judged."""

# Parts are imported when they are first asked for: reading a profile should not have to wait for TorchRL.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
    from knobwise.agents.evaluation import judge
    from knobwise.agents.policy import Controller, make_actor
    from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
    from knobwise.agents.trainer import Trainer

_MODULE_OF = {
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "judge": "evaluation",
    "Controller": "policy",
    "make_actor": "policy",
    "LossConfig": "settings",
    "OptimiserConfig": "settings",
    "PolicyConfig": "settings",
    "Trainer": "trainer",
}

__all__ = [
    "Controller",
    "LossConfig",
    "OptimiserConfig",
    "PolicyConfig",
    "Trainer",
    "judge",
    "load_checkpoint",
    "make_actor",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

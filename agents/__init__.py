"""What decides, what is learned, and how it is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise._lazy import lazy

if TYPE_CHECKING:
    from knobwise.agents.actor import make_actor
    from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
    from knobwise.agents.evaluation import judge
    from knobwise.agents.policy import Controller
    from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
    from knobwise.agents.trainer import Trainer

__getattr__ = lazy(
    __name__,
    {
        "load_checkpoint": "checkpoint",
        "save_checkpoint": "checkpoint",
        "judge": "evaluation",
        "Controller": "policy",
        "make_actor": "actor",
        "LossConfig": "settings",
        "OptimiserConfig": "settings",
        "PolicyConfig": "settings",
        "Trainer": "trainer",
    },
)

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

"""What decides, what is learned, and how it is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise._lazy import lazy

if TYPE_CHECKING:
    from knobwise.agents.actor import make_actor
    from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
    from knobwise.agents.controller_trainer import ControllerTrainer
    from knobwise.agents.evaluation import judge
    from knobwise.agents.pointer import SelectorConfig
    from knobwise.agents.policy import Controller
    from knobwise.agents.selector import Selector, StoredEmbeddings
    from knobwise.agents.selector_settings import SelectorLossConfig, StageConfig
    from knobwise.agents.selector_trainer import SelectorTrainer
    from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig

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
        "ControllerTrainer": "controller_trainer",
        "Selector": "selector",
        "SelectorConfig": "pointer",
        "SelectorTrainer": "selector_trainer",
        "StoredEmbeddings": "selector",
        "SelectorLossConfig": "selector_settings",
        "StageConfig": "selector_settings",
    },
)

__all__ = [
    "Controller",
    "ControllerTrainer",
    "LossConfig",
    "OptimiserConfig",
    "PolicyConfig",
    "Selector",
    "SelectorConfig",
    "SelectorLossConfig",
    "SelectorTrainer",
    "StageConfig",
    "StoredEmbeddings",
    "judge",
    "load_checkpoint",
    "make_actor",
    "save_checkpoint",
]

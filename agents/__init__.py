"""What decides, what is learned, and how it is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
    from knobwise.agents.controller.actor import make_actor
    from knobwise.agents.controller.controller import Controller
    from knobwise.agents.judging.evaluation import judge
    from knobwise.agents.selector.networks import SelectorConfig
    from knobwise.agents.selector.selector import Selector, StoredEmbeddings
    from knobwise.agents.selector.settings import SelectorLossConfig, StageConfig
    from knobwise.agents.serving.adaptive_model import AdaptiveModel
    from knobwise.agents.serving.export import export_numpy, to_numpy
    from knobwise.agents.serving.numpy_controller import NumpyController
    from knobwise.agents.training.controller_trainer import ControllerTrainer
    from knobwise.agents.training.selector_trainer import SelectorTrainer
    from knobwise.agents.training.settings import LossConfig, OptimiserConfig, PolicyConfig

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
        "AdaptiveModel": "runtime",
        "NumpyController": "numpy_controller",
        "export_numpy": "export",
        "to_numpy": "export",
    },
)

__all__ = [
    "AdaptiveModel",
    "Controller",
    "ControllerTrainer",
    "LossConfig",
    "NumpyController",
    "OptimiserConfig",
    "PolicyConfig",
    "Selector",
    "SelectorConfig",
    "SelectorLossConfig",
    "SelectorTrainer",
    "StageConfig",
    "StoredEmbeddings",
    "export_numpy",
    "judge",
    "load_checkpoint",
    "make_actor",
    "save_checkpoint",
    "to_numpy",
]

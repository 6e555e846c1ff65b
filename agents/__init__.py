"""What decides, what is learned, and how it is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
    from knobwise.agents.controller.actor import make_actor
    from knobwise.agents.controller.controller import Controller
    from knobwise.agents.controller.settings import PolicyConfig
    from knobwise.agents.judging.evaluation import judge
    from knobwise.agents.selector.selector import Selector, StoredEmbeddings
    from knobwise.agents.selector.settings import SelectorConfig
    from knobwise.agents.serving.adaptive_model import AdaptiveModel
    from knobwise.agents.serving.export import export_numpy, to_numpy
    from knobwise.agents.serving.numpy_controller import NumpyController
    from knobwise.agents.training.controller_trainer import ControllerTrainer
    from knobwise.agents.training.selector_trainer import SelectorTrainer
    from knobwise.agents.training.settings import OptimiserConfig, StageConfig
    from knobwise.losses.settings import LossConfig, SelectorLossConfig

__getattr__ = lazy(
    __name__,
    {
        "load_checkpoint": "checkpoint",
        "save_checkpoint": "checkpoint",
        "judge": "judging.evaluation",
        "Controller": "controller.controller",
        "make_actor": "controller.actor",
        "LossConfig": "knobwise.losses.settings",
        "OptimiserConfig": "training.settings",
        "PolicyConfig": "controller.settings",
        "ControllerTrainer": "training.controller_trainer",
        "Selector": "selector.selector",
        "SelectorConfig": "selector.settings",
        "SelectorTrainer": "training.selector_trainer",
        "StoredEmbeddings": "selector.selector",
        "SelectorLossConfig": "knobwise.losses.settings",
        "StageConfig": "training.settings",
        "AdaptiveModel": "serving.adaptive_model",
        "NumpyController": "serving.numpy_controller",
        "export_numpy": "serving.export",
        "to_numpy": "serving.export",
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

"""Agents: controller and selector, how they are trained, judged and deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.agents.calibration.deployed_controller import (
        DeployedController as DeployedController,
    )
    from knobwise.agents.checkpoint import load_checkpoint as load_checkpoint
    from knobwise.agents.checkpoint import save_checkpoint as save_checkpoint
    from knobwise.agents.controller.actor import make_actor as make_actor
    from knobwise.agents.controller.controller import Controller as Controller
    from knobwise.agents.controller.settings import PolicyConfig as PolicyConfig
    from knobwise.agents.deployed.controller import NumpyController as NumpyController
    from knobwise.agents.evaluation.evaluation import judge as judge
    from knobwise.agents.selector.selector import Selector as Selector
    from knobwise.agents.selector.settings import SelectorConfig as SelectorConfig
    from knobwise.agents.serving.adaptive_model import AdaptiveModel as AdaptiveModel
    from knobwise.agents.training.controller_trainer import ControllerTrainer as ControllerTrainer
    from knobwise.agents.training.selector_trainer import SelectorTrainer as SelectorTrainer
    from knobwise.agents.training.settings import OptimiserConfig as OptimiserConfig
    from knobwise.agents.training.settings import StageConfig as StageConfig
    from knobwise.losses.settings import LossConfig as LossConfig
    from knobwise.losses.settings import SelectorLossConfig as SelectorLossConfig

MODULES = {
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "judge": "evaluation.evaluation",
    "Controller": "controller.controller",
    "make_actor": "controller.actor",
    "LossConfig": "knobwise.losses.settings",
    "OptimiserConfig": "training.settings",
    "PolicyConfig": "controller.settings",
    "ControllerTrainer": "training.controller_trainer",
    "Selector": "selector.selector",
    "SelectorConfig": "selector.settings",
    "SelectorTrainer": "training.selector_trainer",
    "SelectorLossConfig": "knobwise.losses.settings",
    "StageConfig": "training.settings",
    "AdaptiveModel": "serving.adaptive_model",
    "NumpyController": "deployed.controller",
    "DeployedController": "calibration.deployed_controller",
}
__getattr__ = lazy(__name__, MODULES)
__all__ = list(MODULES)

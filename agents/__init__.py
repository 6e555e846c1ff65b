"""Agents: controller and selector, how they are trained, judged and deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.agents.calibration.deployed_controller import (
        DeployedController as DeployedController,
    )
    from knobwise.agents.calibration.training import distillation_trainer as distillation_trainer
    from knobwise.agents.controller.actor import make_actor as make_actor
    from knobwise.agents.controller.controller import Controller as Controller
    from knobwise.agents.controller.settings import PolicyConfig as PolicyConfig
    from knobwise.agents.deployed.controller import NumpyController as NumpyController
    from knobwise.agents.evaluation.evaluation import evaluate_policy as evaluate_policy
    from knobwise.agents.selector.selector import Selector as Selector
    from knobwise.agents.selector.settings import SelectorConfig as SelectorConfig
    from knobwise.agents.selector.training import selector_trainer as selector_trainer
    from knobwise.agents.training.checkpoint import load_checkpoint as load_checkpoint
    from knobwise.agents.training.checkpoint import save_checkpoint as save_checkpoint
    from knobwise.agents.training.controllers import controller_trainer as controller_trainer
    from knobwise.agents.training.settings import OptimiserConfig as OptimiserConfig
    from knobwise.agents.training.settings import StageConfig as StageConfig
    from knobwise.agents.training.stage import Stage as Stage
    from knobwise.agents.training.trainer import Trainer as Trainer
    from knobwise.losses.settings import LossConfig as LossConfig
    from knobwise.losses.settings import SelectorLossConfig as SelectorLossConfig

MODULES = {
    "load_checkpoint": "training.checkpoint",
    "save_checkpoint": "training.checkpoint",
    "evaluate_policy": "evaluation.evaluation",
    "Controller": "controller.controller",
    "make_actor": "controller.actor",
    "LossConfig": "knobwise.losses.settings",
    "OptimiserConfig": "training.settings",
    "PolicyConfig": "controller.settings",
    "controller_trainer": "training.controllers",
    "distillation_trainer": "calibration.training",
    "Trainer": "training.trainer",
    "Stage": "training.stage",
    "Selector": "selector.selector",
    "SelectorConfig": "selector.settings",
    "selector_trainer": "selector.training",
    "SelectorLossConfig": "knobwise.losses.settings",
    "StageConfig": "training.settings",
    "NumpyController": "deployed.controller",
    "DeployedController": "calibration.deployed_controller",
}
__getattr__ = lazy(__name__, MODULES)
__all__ = list(MODULES)

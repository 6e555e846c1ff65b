"""What decides, what is learned, and how it is judged."""

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.evaluation import judge
from knobwise.agents.policy import Controller, make_actor
from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
from knobwise.agents.trainer import Trainer

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

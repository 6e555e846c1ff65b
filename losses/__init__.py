"""What is minimised: loss modules for TorchRL, and the pure formulae they are made of."""

from knobwise.losses.advantage import group_advantage
from knobwise.losses.grpo import GRPOLoss
from knobwise.losses.rce import RCELoss

__all__ = ["GRPOLoss", "RCELoss", "group_advantage"]

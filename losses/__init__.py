"""What is minimised: loss modules for TorchRL, and the pure formulae they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.losses.advantage import group_advantage
    from knobwise.losses.grpo import GRPOLoss
    from knobwise.losses.rce import RCELoss
    from knobwise.losses.regression import RegressionLoss

__getattr__ = lazy(
    __name__,
    {"GRPOLoss": "grpo", "RCELoss": "rce", "RegressionLoss": "regression", "group_advantage": "advantage"},
)

__all__ = ["GRPOLoss", "RCELoss", "RegressionLoss", "group_advantage"]

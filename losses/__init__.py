"""Losses: modules for TorchRL, and the pure formulae that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.losses.dropout import dropping_out
    from knobwise.losses.exact_grpo import ExactGRPOLoss
    from knobwise.losses.functional import ADVANTAGES, group_advantage
    from knobwise.losses.grpo import GRPOLoss
    from knobwise.losses.warm_up import RCELoss

__getattr__ = lazy(
    __name__,
    {
        "ADVANTAGES": "functional",
        "ExactGRPOLoss": "exact_grpo",
        "GRPOLoss": "grpo",
        "RCELoss": "warm_up",
        "dropping_out": "dropout",
        "group_advantage": "functional",
    },
)

__all__ = [
    "ADVANTAGES",
    "ExactGRPOLoss",
    "GRPOLoss",
    "RCELoss",
    "dropping_out",
    "group_advantage",
]

"""The optimiser of a stage, and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from knobwise.agents.training.settings import OptimiserConfig


def adamw(module: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """Return a fresh AdamW for the parameters that learn; biases do not decay."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups[name.endswith("bias")]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=0.0, fused=True)


def learning_rate(highest: float, share: float, settings: OptimiserConfig) -> float:
    """Return the learning rate at a point of a stage: a linear rise, then a cosine to 0.

    Args:
        highest: the largest learning rate.
        share: the share of the stage that is done, 0 to 1.
        settings: the schedule, and the share of the stage in which the rate rises.
    """
    if settings.schedule == "constant":
        return highest
    if share + 1e-2 < settings.rise:
        return highest * (share + 1e-2) / settings.rise
    return highest * 0.5 * (1 + math.cos(math.pi * share))

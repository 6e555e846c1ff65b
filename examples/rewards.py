"""Rewards for aims other than utility, to copy and to change.

    knobwise train experiment=reward_late_answers seeds=[0,1,2]
    knobwise train policy=utility reward=function reward.function=examples.rewards:late_answers

A reward gets accuracy, latency_ms, budget_ms, float tensors of one shape, and for each knob a tensor of its values, and
returns the reward of each of these decisions. docs/aims.md compares what training on these three gained.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

LONGEST = 4.0
"""An answer is given up, and counts as late by no more, this many budgets after its budget has run out."""
THRESHOLD = 0.25
WORST = 0.05
FLOOR = 0.8


def lateness(latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """The time after the budget, in budgets, 0 … `LONGEST`."""
    return (latency_ms / budget_ms - 1).clamp(0, LONGEST)


def late_answers(accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, knobs: Mapping[str, Tensor]) -> Tensor:
    """An answer counts however late it is, and each moment of waiting costs more than the one before."""
    late = lateness(latency_ms, budget_ms)
    return accuracy - 0.5 * late - 0.5 * late**2


def worst_lateness(accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, knobs: Mapping[str, Tensor]) -> Tensor:
    """Accuracy − the mean lateness of the latest 5 % of all answers ÷ 20, a conditional value at risk.

    That is min over τ of τ + E[max(0, lateness − τ)] ÷ 0.05 (Rockafellar and Uryasev 2000, "Optimization of Conditional
    Value-at-Risk", equation 4), with τ = `THRESHOLD`, for which it is an upper bound.
    """
    beyond = (lateness(latency_ms, budget_ms) - THRESHOLD).clamp_min(0)
    return accuracy - (THRESHOLD + beyond / WORST) / 20


def accuracy_floor(accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, knobs: Mapping[str, Tensor]) -> Tensor:
    """An answer is worth 1 if its accuracy is at least `FLOOR`, else nothing, less 0.3 for each budget of time."""
    return torch.where(accuracy >= FLOOR, 1.0, 0.0) - 0.3 * (latency_ms / budget_ms).clamp_max(1 + LONGEST)

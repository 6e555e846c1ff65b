"""Predicted outcomes of every configuration for a request, and choosing among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.envs.configurations.budgets import log_ms


class Prediction(NamedTuple):
    """Predicted outcomes of all C configurations for n requests."""

    accuracy: Tensor
    """[n, C]."""
    log_latency: Tensor
    """[n, C], mean of ln ms."""
    spread: Tensor
    """[C] or [n, C], standard deviation of ln ms."""

    def meets(self, budgets_ms: Tensor) -> Tensor:
        """P(latency ≤ budget) = Φ((ln b − μ)/σ) for normal residuals, budgets [n] in ms → [n, C]."""
        return torch.special.ndtr((log_ms(budgets_ms).unsqueeze(-1) - self.log_latency) / self.spread)

    def expected_utility(self, budgets_ms: Tensor) -> Tensor:
        """Â·Φ((ln b − μ)/σ), budgets [n] in ms → [n, C]: feasibility is soft, without a cut-off."""
        return self.accuracy.clamp(1e-3, 1.0) * self.meets(budgets_ms)

    @property
    def latency_ms(self) -> Tensor:
        """E[latency] in ms, [n, C], of a log-normal variable: exp(μ + σ²/2)."""
        return torch.exp(self.log_latency + self.spread.square() / 2)


def pick(scores: Tensor, latency_ms: Tensor, mask: Tensor | None) -> Tensor:
    """The best score inside the mask; among equals the lowest latency.

    Args:
        scores, latency_ms: [n, C] or what expands to it, any monotone scale of time, finite inside the mask.
        mask: bool [n, C]; None for everything, where `scores` is [n, C].

    Raises:
        ValueError: if a sample has no configuration to choose.
    """
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool)
    if not bool(mask.any(1).all()):
        raise ValueError("the mask leaves a sample without any configuration")
    scores = scores.expand(mask.shape).masked_fill(~mask, -torch.inf)
    best = mask & (scores == scores.amax(1, keepdim=True))
    return latency_ms.expand(mask.shape).masked_fill(~best, torch.inf).argmin(1)

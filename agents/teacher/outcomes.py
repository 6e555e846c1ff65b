"""The outcomes that a predictor expects of every configuration, and their scores."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.deployed import arrays
from knobwise.envs.bandit.budgets import log_ms
from knobwise.envs.bandit.rule_choice import as_rule
from knobwise.envs.bandit.rules import DEADLINES, Rule

HOPELESS = 0.01
"""Where no configuration is more likely than this to be on time, the fastest is chosen; under a
rule of one's own where none is expected to be worth more."""


class Prediction(NamedTuple):
    """Predicted outcomes of all C configurations, [*, C] each.

    Attributes:
        accuracy: expected.
        log_latency: the mean of ln ms.
        spread: the standard deviation of ln ms, which may be [C].
    """

    accuracy: Tensor
    log_latency: Tensor
    spread: Tensor

    def of_rows(self, rows: slice) -> Prediction:
        """Return what is predicted for some requests, of n."""
        accuracy, log_latency, spread = self
        spread = spread[rows] if spread.ndim > 1 else spread
        return Prediction(accuracy[rows], log_latency[rows], spread)

    @property
    def latency_ms(self) -> Tensor:
        """E[latency] in ms, [*, C], of a log-normal variable: exp(μ + σ²/2)."""
        return torch.exp(self.log_latency + self.spread.square() / 2)

    def meets(self, budgets_ms: Tensor) -> Tensor:
        """Return P(latency ≤ budget) = Φ((ln b − μ)/σ): budgets [*] in ms → [*, C]."""
        logs = log_ms(budgets_ms).unsqueeze(-1)
        return torch.special.ndtr((logs - self.log_latency) / self.spread)

    def quantile(self, share: float) -> Tensor:
        """Return the latency in ms that this share is below, [*, C]: exp(μ + σ·Φ⁻¹(share))."""
        z = NormalDist().inv_cdf(share)
        return torch.exp(self.log_latency + self.spread * z)

    def score(self, limits: Tensor, rule: Rule | str = DEADLINES) -> Tensor:
        """Score every configuration under limits: [*] → [*, C].

        Under a deadline b the score is the expected utility Â·Φ((ln b − μ)/σ): feasibility is soft,
        without a cut-off. Under a mean budget a limit is w = 1/price, the ms that a right
        answer may cost, and the score is Â − L̂/w. A rule of one's own has its expected utility.
        """
        accuracy = self.accuracy.clamp(1e-3, 1.0)
        return as_rule(rule).expected(accuracy, self, limits)


def pick(scores: Tensor, latency_ms: Tensor, mask: Tensor | None) -> Tensor:
    """Return the best score inside the mask, among equal ones the lowest latency: int64 [n].

    Args:
        scores: [n, C], or what expands to it.
        latency_ms: likewise, on any monotone scale, finite inside the mask.
        mask: bool [n, C], None for everything.

    Raises:
        ValueError: a sample has no configuration to choose.
    """
    # by the rule that deployed controllers have in NumPy
    allowed = None if mask is None else mask.numpy()
    return torch.from_numpy(arrays.pick(scores.numpy(), latency_ms.numpy(), allowed))

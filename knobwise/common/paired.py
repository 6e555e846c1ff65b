"""Tests that one policy is better than another on the same samples, by more than chance."""

from __future__ import annotations

import torch
from torch import Tensor


def standard_error(differences: Tensor) -> float:
    """Return the standard error of the mean of paired differences [n]; 0 for fewer than two."""
    if len(differences) < 2:
        return 0.0
    return float(differences.double().std()) / len(differences) ** 0.5


def lower_bound(mean: float, error: float, confidence: float) -> float:
    """Return the one-sided lower bound of a normal mean with this standard error."""
    # the quantile of the normal distribution
    quantile = torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64))
    return mean - float(quantile) * error


def is_better(differences: Tensor, confidence: float) -> bool:
    """Return True if the mean of paired differences [n] is above 0 with this one-sided confidence;
    False for fewer than two."""
    if len(differences) < 2:
        return False
    mean = float(differences.double().mean())
    return lower_bound(mean, standard_error(differences), confidence) > 0

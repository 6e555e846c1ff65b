"""Tests that one policy is better than another on the same samples, by more than chance."""

from __future__ import annotations

import torch
from torch import Tensor


def standard_error(differences: Tensor) -> float:
    """Return the standard error of the mean of paired differences [n]; 0 for fewer than two."""
    if len(differences) < 2:
        return 0.0
    return float(differences.double().std()) / len(differences) ** 0.5


def is_better(differences: Tensor, confidence: float) -> bool:
    """Return True if the mean of paired differences [n] is above 0 with this one-sided confidence.

    The normal quantile decides.
    """
    z = float(torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64)))
    if len(differences):
        mean = float(differences.double().mean())
    else:
        mean = 0.0
    return len(differences) > 1 and mean > z * standard_error(differences)

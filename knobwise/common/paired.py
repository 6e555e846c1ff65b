"""Tests that one policy is better than another on the same samples, by more than chance."""

from __future__ import annotations

import torch
from torch import Tensor


def standard_error(differences: Tensor, clusters: Tensor | None = None) -> float:
    """Return the standard error of the mean of paired differences [n]; 0 for fewer than two
    clusters, int64 [n], whose samples depend on each other. By default each sample is one.

    It is that of Liang and Zeger (1986), "Longitudinal Data Analysis Using Generalized Linear
    Models", equation 7: what is independent are the sums over clusters.
    """
    n = len(differences)
    if clusters is None:
        clusters = torch.arange(n, device=differences.device)
    count = int(clusters.max()) + 1 if n else 0
    if count < 2:
        return 0.0
    # for samples that stand alone this is their standard deviation, divided by √n
    values = differences.double()
    sums = values.new_zeros(count).index_add(0, clusters, values - values.mean())
    return float((sums.square().sum() * count / (count - 1)).sqrt()) / n


def lower_bound(mean: float, error: float, confidence: float) -> float:
    """Return the one-sided lower bound of a normal mean with this standard error."""
    # the quantile of the normal distribution
    quantile = torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64))
    return mean - float(quantile) * error


def is_better(differences: Tensor, confidence: float, clusters: Tensor | None = None) -> bool:
    """Return True if the mean of paired differences [n] is above 0 with this one-sided confidence;
    False for fewer than two clusters, see `standard_error`."""
    # a single cluster has the number 0
    if len(differences) < 2 or (clusters is not None and not clusters.any()):
        return False
    mean = float(differences.double().mean())
    return lower_bound(mean, standard_error(differences, clusters), confidence) > 0

"""The targets of regressors: accuracy and log-latency of all configurations, with every hole
filled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.envs.bandit.budgets import log_measured
from knobwise.envs.tables.profile_table import ProfileTable


class Targets:
    """Accuracy and log-latency side by side, float64 [n, 2C], each centred per configuration and
    scaled as a block.

    Regressors for several outputs need every cell. A cell that was not profiled is filled with the
    prediction of a ridge regression on the features x (float64 [n, d]), plus the mean residual of
    its sample, shrunk as if one more residual were 0. The regression is refitted five times on its
    own fillings, so that in the end they hardly affect it.
    """

    def __init__(self, table: ProfileTable, rows: Tensor, x: NDArray[np.float64]) -> None:
        self.x = x
        mask = table.mask[rows]
        seen = mask.any(0)
        accuracy = table.accuracy[rows].double()
        log_latency = log_measured(table.latency_ms[rows].double())
        slowest = log_latency.nanmean(0)[seen].amax()
        blocks = []
        centres = []
        scales = []
        for measured, never_seen in ((accuracy, 0.0), (log_latency, slowest)):
            centre = measured.nanmean(0).where(seen, never_seen)
            # one scale for a block, so that no configuration counts more than its variance
            deviation = (measured - centre).where(mask, 0.0)
            if not mask.all():
                deviation = _filled(deviation, mask, seen, x)
            scale = deviation.square().mean().sqrt()
            blocks.append(deviation / scale.where(scale > 1e-9, 1.0))
            centres.append(centre)
            scales.append(scale)
        self.values = torch.cat(blocks, 1).numpy()
        # scale and offset, [2C] each, that turn `values` back into measurements
        scale = torch.stack(scales).repeat_interleave(len(seen))
        self.units = scale.float(), torch.cat(centres).float()


def _filled(deviation: Tensor, mask: Tensor, seen: Tensor, x: NDArray[np.float64]) -> Tensor:
    from sklearn.linear_model import Ridge

    ridge = Ridge(alpha=0.1 * len(x))
    predicted = torch.zeros_like(deviation)
    for _ in range(5):
        # what a sample is better or slower by than its features say
        residual = (deviation - predicted).where(mask, 0.0)
        of_sample = residual.sum(1, keepdim=True) / (mask.sum(1, keepdim=True) + 1)
        deviation = deviation.where(mask, (predicted + of_sample).where(seen, 0.0))
        refitted = ridge.fit(x, deviation.numpy()).predict(x)
        predicted = torch.from_numpy(refitted).reshape(deviation.shape)
    return deviation

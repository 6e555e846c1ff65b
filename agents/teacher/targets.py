"""The targets of regressors: accuracy and log-latency of all configurations, with every hole
filled."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.teacher.completion import Completion
from knobwise.envs.bandit.budgets import log_measured
from knobwise.envs.tables.profile_table import ProfileTable


class Targets:
    """Accuracy and log-latency side by side, float64 [n, 2C], each centred per configuration and
    scaled as a block.

    Regressors for several outputs need every cell: one that was not measured is completed from
    those that were (`Completion`).
    """

    def __init__(self, table: ProfileTable, rows: Tensor, x: NDArray[np.float64]) -> None:
        self.x = x
        mask = table.mask[rows]
        seen = mask.any(0)
        accuracy = table.accuracy[rows].double()
        log_latency = log_measured(table.latency_ms[rows].double())
        slowest = log_latency.nanmean(0)[seen].amax()
        completion = None if mask.all() else Completion(table, x)
        blocks = []
        centres = []
        scales = []
        for measured, never_seen in ((accuracy, 0.0), (log_latency, slowest)):
            values = completion.complete(measured) if completion else measured
            centre = values.mean(0).where(seen, never_seen)
            # one scale for a block, so that no configuration counts more than its variance
            deviation = (values - centre).where(seen, 0.0)
            scale = deviation.square().mean().sqrt()
            blocks.append(deviation / scale.where(scale > 1e-9, 1.0))
            centres.append(centre)
            scales.append(scale)
        self.values = torch.cat(blocks, 1).numpy()
        # scale and offset, [2C] each, that turn `values` back into measurements
        scale = torch.stack(scales).repeat_interleave(len(seen))
        self.units = scale.float(), torch.cat(centres).float()

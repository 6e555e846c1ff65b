"""What answers are expected to take: a model for the tracker, and for promises."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.deployed.arrays import Array
from knobwise.agents.teacher.regressors import ridge
from knobwise.envs.bandit.budgets import log_moments
from knobwise.envs.tables.profile_table import ProfileTable

MAX_LATENCIES = 1 << 18
"""Most weights of a latency model; a larger one keeps only the mean of each configuration."""
SHRINKAGE = 0.03
"""α of the latency model's ridge regression, as a share of the samples."""


def fit_latency_model(
    table: ProfileTable, rows: Tensor, normaliser: FeatureNormaliser
) -> dict[str, Array]:
    """Return a linear model of ln ms, fitted on these rows (int64 [n]).

    It expects the mean logarithm of all measurements of a cell. With the logarithm of their median,
    which is lower by 1.5 % on the built-in profile, answers would look slow without any drift.

    Returns:
        `bias` [C], the `spread` of a single measurement [C], and `weight` [width, C] unless there
        are more than `MAX_LATENCIES` weights.
    """
    x = normaliser.of_rows(table, rows)
    logs, within = log_moments(table.measurements_ms[rows])
    mean = logs.nanmean(0)
    residual = (logs - mean).nan_to_num()
    arrays = {"bias": mean.nan_to_num()}
    if 0 < x.shape[1] * logs.shape[1] <= MAX_LATENCIES:
        fitted = ridge(x.double().numpy(), residual.double().numpy(), [SHRINKAGE], 0)[0]
        residual = (residual - fitted(x)).where(table.mask[rows], 0.0)
        arrays = {"weight": fitted.weight, "bias": arrays["bias"] + fitted.bias}
    # the spread of a single measurement, since an answer is timed once
    squares = residual.square() + within.nan_to_num()
    count = table.mask[rows].sum(0).clamp_min(1)
    arrays["spread"] = (squares.sum(0) / count).sqrt().clamp_min(1e-3)
    return {name: np.asarray(values, np.float32) for name, values in arrays.items()}

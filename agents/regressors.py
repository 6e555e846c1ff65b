"""Regressors for the baselines: accuracy and log-latency of all configurations at once, from the features.

With the interface of scikit-learn: `fit(x [n, d], y [n, outputs])` and `predict(x) → [n, outputs]`, float64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.envs.budgets import log_ms
from knobwise.envs.table import ProfileTable

FOLDS = 5


class Targets:
    """Accuracy and log-latency side by side, float64 [n, 2C], each centred per configuration and scaled as a block.

    Regressors for several outputs need every cell. One that was not profiled is filled with what a ridge regression on
    the features x (float64 [n, d]) predicts, plus the mean residual of its sample, shrunk as if one more were 0; the
    regression is fitted again on what it filled, five times, so that in the end the filled cells hardly pull at it.
    """

    def __init__(self, table: ProfileTable, rows: Tensor, x: NDArray[np.float64]) -> None:
        mask = table.mask[rows]
        seen = mask.any(0)
        accuracy, log_latency = table.accuracy[rows].double(), log_ms(table.latency_ms[rows].double())
        slowest = log_latency.nanmean(0)[seen].amax()
        blocks, centres, scales = [], [], []
        for measured, never_seen in ((accuracy, torch.zeros_like(slowest)), (log_latency, slowest)):
            centre = measured.nanmean(0).where(seen, never_seen)
            deviation = (measured - centre).where(mask, 0.0)
            if not mask.all():
                deviation = _filled(deviation, mask, seen, x)
            scale = deviation.square().mean().sqrt()
            blocks.append(deviation / scale.where(scale > 1e-9, 1.0))
            centres.append(centre)
            scales.append(scale)
        self.values = torch.cat(blocks, 1).numpy()
        self.centre, self._scale = torch.stack(centres).float(), torch.stack(scales).float()

    def unscale(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Regressors' outputs [n, 2C] → accuracy and log-latency, [n, C] each."""
        accuracy, mean = predictions.chunk(2, 1)
        return accuracy * self._scale[0] + self.centre[0], mean * self._scale[1] + self.centre[1]


def _filled(deviation: Tensor, mask: Tensor, seen: Tensor, x: NDArray[np.float64]) -> Tensor:
    from sklearn.linear_model import Ridge

    ridge, predicted = Ridge(alpha=0.1 * len(x)), torch.zeros_like(deviation)
    for _ in range(5):
        residual = (deviation - predicted).where(mask, 0.0)
        of_sample = residual.sum(1, keepdim=True) / (mask.sum(1, keepdim=True) + 1)
        deviation = deviation.where(mask, (predicted + of_sample).where(seen, 0.0))
        predicted = torch.from_numpy(ridge.fit(x, deviation.numpy()).predict(x)).reshape(deviation.shape)
    return deviation


def folds_of(table: ProfileTable, rows: Tensor, seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Row positions to fit on and to hold out, `FOLDS` times; samples of one image stay together."""
    from sklearn.model_selection import GroupKFold

    names, images = table.dataset_names, table.image_ids or table.sample_ids
    numbers: dict[tuple[str, str], int] = {}
    units = [numbers.setdefault((names[row], images[row]), len(numbers)) for row in rows.tolist()]
    if len(numbers) < 2:
        return [(np.arange(len(rows)), np.arange(len(rows)))]
    division = GroupKFold(min(FOLDS, len(numbers)), shuffle=True, random_state=seed)
    return list(division.split(units, groups=units))


class Neighbours:
    """k nearest neighbours; `weighted`: a feature counts by the length of its weights in a ridge regression."""

    def __init__(self, k: int, weighted: bool) -> None:
        self.k, self.weighted = k, weighted

    def fit(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> Neighbours:
        from sklearn.linear_model import Ridge
        from sklearn.neighbors import KNeighborsRegressor

        ridge = Ridge(alpha=0.1 * len(x))
        self.weights = np.linalg.norm(ridge.fit(x, y).coef_, axis=0) if self.weighted else 1.0
        self.neighbours = KNeighborsRegressor(min(self.k, len(x))).fit(x * self.weights, y)
        return self

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        predictions: NDArray[np.float64] = self.neighbours.predict(x * self.weights)
        return predictions


class Forest:
    """Random forest over the eight largest principal components of the targets: as good, and its cost does not grow
    with the number of configurations. `apart`: one forest for accuracy, one for latency, instead of one for both."""

    def __init__(self, leaf: int, apart: bool, seed: int) -> None:
        self.leaf, self.apart, self.seed = leaf, apart, seed

    def fit(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> Forest:
        from sklearn.ensemble import RandomForestRegressor

        self.parts = []
        for block in np.split(y, 2, axis=1) if self.apart else [y]:
            centre = block.mean(0)
            components = np.linalg.svd(block - centre, full_matrices=False)[2][:8]
            forest = RandomForestRegressor(30, min_samples_leaf=self.leaf, max_features=1 / 3, random_state=self.seed)
            projected = (block - centre) @ components.T
            forest.fit(x, projected if len(components) > 1 else projected.ravel())
            self.parts.append((forest, components, centre))
        return self

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        parts = [f.predict(x).reshape(len(x), -1) @ components + centre for f, components, centre in self.parts]
        return np.concatenate(parts, 1)

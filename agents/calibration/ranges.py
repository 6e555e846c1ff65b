"""The range of training, by feature: outside of it a controller with a promise promises nothing.

A range is that of all fitted samples, widened by one margin for all features, a share of the range.
The margin is found on the fitted samples alone, each by the ranges of the folds that it is not in
(`FOLDS`; samples that belong together share a fold): the smallest, of at least `LEAST_MARGIN`, by
which at most `REFUSED` of them lie outside in any feature. So many features and few samples get a
wider one. The requests that the promise is tested on have no part in that, so that for them, as for
those to come, ranges are fixed, and the rule that is tested includes what a request outside gets.
Had the margin been chosen on them, they would be fewer outside than others are.

A feature that is always above 0 has the range of its logarithms where these foresee new samples as
well (`margins_needed`), so that a 0, or another unit, lies outside of a range that begins near 0. A
feature that a sample lies beyond by more than its whole range, such as a rare one or one with wild
values, has no range. One that never varied has that one value, unless so many samples have been the
only ones in which a feature varied that the next requests are expected to be, too (Good 1953, "The
Population Frequencies of Species and the Estimation of Population Parameters", Biometrika).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.deployed.arrays import Array
from knobwise.envs.tables.columns import FEATURES
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import cluster_numbers

LEAST_MARGIN = 0.1
"""As a share of the range of a feature."""
REFUSED = 0.01
"""The share of the requests like the fitted samples that may lie outside for the margin, and once
more for features that never varied."""
FOLDS = 10
AT_MOST = 10_000
"""Samples that the margin is found on; ranges are those of all."""
ROUNDING = 1e-6
"""By how much, as a share, a value may differ by rounding: features are in float32."""


def fit_ranges(
    table: ProfileTable, rows: Array, normaliser: FeatureNormaliser, texts: list[str]
) -> dict[str, Array]:
    """Return the range of each number of the feature blocks that has one, on the fitted samples
    int64 [n]: `low` and `high` float32 [d], ∓∞ for none, and the `margin`; {} if none has.

    One-hot places have none: an unseen word or data set has a place of its own. Nor have the blocks
    of `texts`, whose encoder says which are unlike training.
    """
    blocks = table.blocks(rows)
    numbers = []
    for name in normaliser.sizes:
        judged = np.ones(normaliser.sizes[name], bool)
        if name == FEATURES and normaliser.columns:
            judged = np.array(
                [col.categories is None for col in normaliser.columns for _ in col.labels]
            )
        elif name in texts or (name == "dataset" and normaliser.datasets):
            judged[:] = False
        numbers.append(judged)
    judged = np.concatenate([np.zeros(0, bool), *numbers])
    if not judged.any():
        return {}
    values = np.concatenate([blocks[name].float().numpy() for name in normaliser.sizes], 1)
    low = np.full(len(judged), -np.inf, np.float32)
    high = np.full(len(judged), np.inf, np.float32)
    groups = cluster_numbers(table, rows).numpy()
    low[judged], high[judged], margin = widened_ranges(values[:, judged], groups)
    if not (np.isfinite(low) | np.isfinite(high)).any():
        return {}
    return {"low": low, "high": high, "margin": np.array(margin)}


def widened_ranges(
    values: NDArray[np.floating], groups: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return the least and the largest number of each feature, float64 [d] each, widened by a
    margin, and the margin; ∓∞ for a feature that is not judged.

    Args:
        values: [n, d], NaN where a number is missing.
        groups: int64 [n], which samples belong together.
    """
    draws = np.random.default_rng(0)
    some = draws.permutation(len(values))[:AT_MOST]
    folds = draws.permutation(groups.max() + 1)[groups[some]] % FOLDS
    beyond = np.zeros(len(some))
    alone = np.zeros(len(some), bool)
    # of each feature: least and largest, whether by logarithms, and whether it varies
    least, most = np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
    logs, varies = np.zeros(len(least), bool), np.zeros(len(least), bool)
    for column, feature in enumerate(values.T.astype(np.float64)):
        known = feature[np.isfinite(feature)]
        if not len(known):
            continue
        needed = margins_needed(feature[some], folds)
        if known.min() > 0:
            by_logs = margins_needed(np.log(feature[some]), folds)
            logs[column] = by_logs.max() <= max(needed.max(), LEAST_MARGIN)
            needed = by_logs if logs[column] else needed
        if needed.max() > 1:
            alone |= needed > 1
            continue
        beyond = np.maximum(beyond, needed)
        least[column], most[column] = known.min(), known.max()
        varies[column] = most[column] - least[column] > ROUNDING * np.abs(known).max()
    # the next sample is beyond the k-th smallest of n with the chance 1 − k/(n + 1)
    place = min(math.ceil((1 - REFUSED) * (len(beyond) + 1)), len(beyond))
    margin = max(float(np.sort(beyond)[place - 1]), LEAST_MARGIN)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (most / least) ** margin
    wider = margin * (most - least)
    low = np.where(logs, least / factor, least - wider)
    high = np.where(logs, most * factor, most + wider)
    low = np.where(varies, low, least - ROUNDING * np.abs(least))
    high = np.where(varies, high, most + ROUNDING * np.abs(most))
    judged = varies if alone.mean() > REFUSED else ~np.isnan(least)
    return np.where(judged, low, -np.inf), np.where(judged, high, np.inf), margin


def margins_needed(values: NDArray[np.float64], folds: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return by how much of the range of the other folds each value [n] lies beyond it, [n]: 0
    inside of it and for what is missing, ∞ where these never vary."""
    least, most = np.full(FOLDS, np.inf), np.full(FOLDS, -np.inf)
    np.fmin.at(least, folds, values)
    np.fmax.at(most, folds, values)
    own = np.eye(FOLDS, dtype=bool)
    low = np.where(own, np.inf, least).min(1)[folds]
    high = np.where(own, -np.inf, most).max(1)[folds]
    beyond = np.fmax(np.fmax(low - values, values - high), 0.0)
    width = high - low
    rounding = ROUNDING * np.maximum(np.abs(low), np.abs(high))
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(width > rounding, beyond / width, np.inf)
    return np.where(np.isnan(values) | (beyond <= rounding), 0.0, needed)

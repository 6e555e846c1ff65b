"""The range of training, by feature: outside of it a controller with a promise promises nothing.

A range is that of all fitted samples, widened by one margin for all features, a share of the range.
The margin is found on the fitted samples alone, each by the ranges of the folds that it is not in
(`FOLDS`; samples that belong together share a fold): the smallest, of at least `LEAST_MARGIN`, by
which at most `REFUSED` of them lie outside in any feature. So many features and few samples get a
wider one. The requests that the promise is tested on have no part in that, so that for them, as for
those to come, ranges are fixed, and the rule that is tested includes what a request outside gets.
Had the margin been chosen on them, they would be fewer outside than others are.

A feature that is always above 0 is outside at 0, and has the range of its logarithms unless small
numbers have a long tail there: in another unit it then lies outside of a range that begins near 0.
One that never varied has that one value. Neither counts where more than `ALONE` of the samples were
alone in something like it, which is the share that others will be (Good 1953, "The
Population Frequencies of Species and the Estimation of Population Parameters", Biometrika). A
feature whose range is more than `WILD` times as wide as that of most samples has none: it says
nothing of the next sample, and would widen all others.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.deployed.arrays import Array
from knobwise.envs.tables.columns import FEATURES
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import cluster_numbers

LEAST_MARGIN = 0.1
"""As a share of the range of a feature."""
REFUSED = 0.005
"""The share of the fitted samples that may be outside for the margin, so small that in hardly any
training more than 2 % of the requests to come are."""
ALONE = 0.01
"""The share of the fitted samples that may be alone in something."""
FOLDS = 10
AT_MOST = 2_000
"""Samples that the margin is found on; ranges are those of all."""
AT_LEAST = 600
"""Fewer samples are divided into folds several times, until so many have been outside of one, and
the largest margin of each counts: which kind of range a feature has is less certain then."""
LONG = 0.75
"""A tail, from the first hundredth to the first tenth, is long from this share on of the range from
the first to the last tenth: it is .41 of a normal variable, and 1.05 of the logarithm of a uniform
number between 0 and 1."""
WILD = 10.0
"""Times the range from the first to the last tenth; that of 10,000 exponential numbers is some 4
times as wide."""
ROUNDING = 1e-6
"""By how much, as a share, a value may differ by rounding: features are in float32."""
TINY = float(np.finfo(np.float32).tiny)


def fit_ranges(
    table: ProfileTable, rows: Tensor, normaliser: FeatureNormaliser, texts: list[str]
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
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Return the least and the largest number of each feature, float32 [d] each, widened by a
    margin, and the margin; ∓∞ for a feature without a range.

    Args:
        values: [n, d], NaN where a number is missing.
        groups: int64 [n], which samples belong together.
    """
    draws = np.random.default_rng(0)
    rows = draws.permutation(len(values))[:AT_MOST]
    some = values[rows].astype(np.float64)
    needed, is_new = np.zeros(len(rows)), np.zeros(len(rows), bool)
    for _ in range(math.ceil(AT_LEAST / len(rows))):
        folds = draws.permutation(groups.max() + 1)[groups[rows]] % FOLDS
        for fold in np.unique(folds):
            held_out = folds == fold
            if held_out.all():
                continue
            # which features have a range, and of which kind, is for the other folds to say
            others = _Ranges(some[~held_out])
            needed[held_out] = np.maximum(needed[held_out], others.margins(some[held_out]))
            is_new[held_out] |= others.is_new(some[held_out])
    # the next sample is beyond the k-th smallest of n with the chance 1 − k/(n + 1)
    place = min(math.ceil((1 - REFUSED) * (len(needed) + 1)), len(needed))
    margin = max(float(np.sort(needed)[place - 1]), LEAST_MARGIN)
    low, high = _Ranges(some, values).widened(margin, is_new.mean() <= ALONE)
    with np.errstate(over="ignore"):
        return low.astype(np.float32), high.astype(np.float32), margin


class _Ranges:
    """The ranges of samples, by feature.

    Args:
        some: float64 [n, d], samples that say what kind of range a feature has.
        values: [N, d], those that have this range; None for the same.

    Attributes:
        least, most: float64 [d], not widened; ±∞ where nothing is known.
        varies: bool [d], beyond rounding.
        logs: bool [d], which have the range of their logarithms.
        has_range: bool [d], which are judged by a margin.
    """

    def __init__(self, some: NDArray[np.float64], values: Array | None = None) -> None:
        values = some if values is None else values
        self.least = np.fmin.reduce(values, 0, initial=np.inf).astype(np.float64)
        self.most = np.fmax.reduce(values, 0, initial=-np.inf).astype(np.float64)
        known = np.isfinite(self.least)
        largest = np.maximum(np.abs(self.least), np.abs(self.most))
        self.rounding = ROUNDING * np.where(known, largest, 0.0)
        self.varies = known & (self.most - self.least > self.rounding)
        with warnings.catch_warnings():
            # of columns without any number
            warnings.simplefilter("ignore", RuntimeWarning)
            # the other one takes many times as long
            quantile = np.nanquantile if np.isnan(some).any() else np.quantile
            tail, few, many = quantile(some, (0.01, 0.1, 0.9), axis=0)
        self.logs = known & (self.least > 0)
        tail, low, high = map(self._scaled, (tail, few, many))
        self.logs &= low - tail <= LONG * (high - low)
        least, most, low, high = map(self._scaled, (self.least, self.most, few, many))
        self.has_range = self.varies & (most - least <= WILD * (high - low))

    def margins(self, new: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the margin that each new sample [m, d] needs to be inside in all features, [m]."""
        judged = self.has_range
        least, most = self._scaled(self.least)[judged], self._scaled(self.most)[judged]
        values = self._scaled(new)[:, judged]
        beyond = np.fmax(least - values, values - most) / (most - least)
        return np.fmax.reduce(beyond, 1, initial=0.0)

    def is_new(self, new: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which new samples [m, d] are other than all in what these have in common: the number
        itself, or that it is above 0. bool [m]."""
        constant = np.isfinite(self.least) & ~self.varies
        other = constant & ((new < self.least - self.rounding) | (new > self.most + self.rounding))
        below = self.has_range & (self.least > 0) & (new <= 0)
        return (other | below).any(1)

    def widened(
        self, margin: float, in_common: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the ranges that a margin makes, [d] each, and of what samples have in common if
        that counts; ∓∞ for none."""
        least, most = self._scaled(self.least), self._scaled(self.most)
        wider = margin * (most - least)
        with np.errstate(over="ignore", invalid="ignore"):
            low = np.where(self.logs, np.exp(least - wider), least - wider)
            high = np.where(self.logs, np.exp(most + wider), most + wider)
        if in_common:
            low = np.where(self.least > 0, np.maximum(low, TINY), low)
        judged = self.has_range
        low, high = np.where(judged, low, -np.inf), np.where(judged, high, np.inf)
        constant = in_common & np.isfinite(self.least) & ~self.varies
        low = np.where(constant, self.least - self.rounding, low)
        return low, np.where(constant, self.most + self.rounding, high)

    def _scaled(self, values: Array) -> NDArray[np.float64]:
        """Return features [*, d], the logarithms of those that have the range of these: far below
        all others for 0 and less."""
        with np.errstate(divide="ignore", invalid="ignore"):
            # NaN stays what it is
            return np.where(self.logs, np.log(np.where(values <= TINY, TINY, values)), values)

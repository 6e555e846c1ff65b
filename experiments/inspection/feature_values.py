"""Checks of the values of single features: those that number the samples, and those out of any
scale."""

from __future__ import annotations

import re

import numpy as np

from knobwise.experiments.inspection.measured import Finding, Findings, Measured, gaps_of

FEWEST = 20
"""Of so many samples in a random order hardly any feature rises with each."""
LARGEST = 1e15
"""Times of day in microseconds are about as large; the square of a float32 above 1e19 overflows."""
EPOCH = 1e9
"""Times of day, in seconds or smaller units since 1970, are larger."""


def numbers_of_samples(measured: Measured) -> Findings:
    """Look for those that rise or fall with each sample, in the order of the samples or of the
    numbers in their ids, or hold every whole number of a range once."""
    count = len(measured.ids)
    if count < FEWEST or not measured.names:
        return
    values = measured.features.numpy()
    hits = _rising_with_samples(measured, values) | _in_equal_steps(values)
    for column in np.flatnonzero(hits)[:3]:
        yield Finding(
            f"Feature {measured.names[column]} numbers the samples: each has a value of its own, "
            "in their order or in equal steps",
            "nearly certain",
            "New requests have other numbers: leave this feature out.",
        )


def _rising_with_samples(measured: Measured, values: np.ndarray) -> np.ndarray:
    """Return which columns of [n, d] rise or fall with each sample, bool [d]."""
    count = len(values)
    numbers = [int("".join(re.findall("[0-9]", each)) or 0) for each in measured.ids]
    orders = (np.arange(count), np.array(sorted(range(count), key=numbers.__getitem__)))
    hits = np.zeros(values.shape[1], bool)
    for order in orders:
        # where data sets stand one below the other, each may be numbered anew
        same = np.diff(measured.datasets[order]) == 0
        for column in _rising(values[order[:FEWEST]], same[: FEWEST - 1]):
            hits[column] = len(_rising(values[order, column, None], same)) > 0
    return hits


def _in_equal_steps(values: np.ndarray) -> np.ndarray:
    """Return which columns of [n, d] go in equal steps from the smallest to the largest, bool [d],
    in any order."""
    count = len(values)
    reach = np.ptp(values, 0)
    # the standard deviation of equal steps
    even = np.sqrt((count + 1) / (count - 1) / 12)
    hits = np.zeros(values.shape[1], bool)
    for column in np.flatnonzero(np.abs(values.std(0) - even * reach) < 1e-3 * reach):
        steps = np.diff(np.sort(values[:, column].astype(np.float64)))
        hits[column] = bool(np.ptp(steps) < 0.01 * steps.mean())
    return hits


def _rising(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return the columns of [n, d] whose counted steps, bool [n − 1], all rise, or all fall."""
    steps = np.diff(values, axis=0)[counted]
    return np.flatnonzero(((steps > 0).all(0) | (steps < 0).all(0)) & (len(steps) > 0))


def extreme_features(measured: Measured) -> Findings:
    if not measured.names:
        return
    values = measured.features.numpy()
    largest = np.nan_to_num(np.fmax(np.nanmax(values, 0), -np.nanmin(values, 0)))
    for hits, words in (
        (largest > LARGEST, f"reach {largest.max():.1e}"),
        ((largest > 0) & (largest < 1 / LARGEST), f"are never above {1 / LARGEST:.0e}"),
    ):
        if hits.any():
            first = measured.names[hits.argmax()]
            yield Finding(
                f"{hits.sum()} features, such as {first}, {words}",
                "likely",
                "Look at the code that wrote them: was something multiplied or divided twice?",
            )


def features_in_units(measured: Measured) -> Findings:
    values = measured.features.numpy()
    late = np.flatnonzero((values > EPOCH).all(0))
    parted, smaller = gaps_of(np.log(values[:, late]), max(2, len(values) // 50))
    for column, below in zip(late[parted], smaller.T[parted], strict=True):
        yield Finding(
            f"Feature {measured.names[column]} holds times of day in several units: "
            f"{below.sum():,} are a thousand or more times smaller than the others",
            "nearly certain",
            "Write all in the same unit.",
        )

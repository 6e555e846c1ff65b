"""Checks of features: those that hold an outcome, number the samples, are in a wrong order or out
of any scale, or tell nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from knobwise.experiments.inspection.measured import (
    Finding,
    Findings,
    Measured,
    by_numbers,
    correlations,
    fill_with_means,
    gaps_of,
    numbers_of,
    ridge_residuals,
    standardise,
)

MIN_VARIED = 10
"""Outcomes that differ in fewer samples may equal a feature by chance."""
MAX_LEAKS = 3
"""So many features that hold an outcome are named."""
MAX_NAMED = 5
"""So many features with the same fault are named."""
SHUFFLES = 20
"""Random orders that features are compared in."""
JITTER = 0.002
"""Time cannot be predicted better than this, where repeats do not say how much it varies."""
FEWEST = 20
"""Of so many samples in a random order hardly any feature rises with each."""
LARGEST = 1e15
"""Times of day in microseconds are about as large; the square of a float32 above 1e19 overflows."""
EPOCH = 1e9
"""Times of day, in seconds or smaller units since 1970, are larger."""


# -- outcomes among the features -------------------------------------------------------------------


def copied_outcomes(measured: Measured) -> Findings:
    """A feature equals an outcome, or orders samples as it."""
    targets, names = _outcomes(measured)
    if not measured.names or not names:
        return
    features = measured.features[measured.few].double().numpy()
    ranks = rankdata(fill_with_means(features), axis=0)
    ordered = rankdata(targets, axis=0, nan_policy="omit")
    likeness = np.fmax(correlations(features, targets), correlations(ranks, ordered))
    for column in np.flatnonzero(likeness.max(1) > 0.9999)[:MAX_LEAKS]:
        target = int(likeness[column].argmax())
        values = features[:, column]
        # a measured time has many values; 1e-6 is the precision of float32
        equal = np.abs(values - targets[:, target]) <= 1e-6 * values
        timed = names[target].startswith("latency") and len(np.unique(values)) > 10
        certain = bool(timed and equal.all())
        yield Finding(
            f"Feature {measured.names[column]} ranks the samples exactly like the "
            f"{names[target]}: probable leakage",
            "certain" if certain else "nearly certain",
            "An outcome is not known before the decision: leave this feature out.",
            refused=certain,
        )


def _outcomes(measured: Measured) -> tuple[np.ndarray, list[str]]:
    """Return columns of outcomes, float64 [m, k], and their names; not those that hardly vary."""
    accuracy = measured.accuracy[measured.few]
    log_ms = measured.log_ms[measured.few]
    right = np.where(accuracy >= 0.5, log_ms, np.inf)
    columns = {
        "mean accuracy": np.nanmean(accuracy, 1),
        "cheapest configuration that is right": np.argmin(right, 1),
    }
    # a price that all configurations put on an input in the same order is known before they answer
    if measured.table.unit == "ms" or not _in_one_order(log_ms):
        columns["mean of ln latency"] = np.nanmean(log_ms, 1)
    for c, label in enumerate(map(measured.table.label, range(accuracy.shape[1]))):
        columns[f"accuracy of {label}"] = accuracy[:, c]
        if measured.table.unit == "ms":
            columns[f"latency of {label}"] = np.exp(log_ms[:, c])
            for r in range(1, measured.repeats_ms.shape[2]):
                columns[f"latency of {label}, repeat {r}"] = measured.repeats_ms[measured.few, c, r]
    targets = np.stack(list(columns.values()), 1)
    differ = (targets != np.nanmedian(targets, 0)) & ~np.isnan(targets)
    varied = differ.sum(0) >= MIN_VARIED
    return targets[:, varied], list(itertools.compress(columns, varied))


def _in_one_order(values: np.ndarray) -> bool:
    """Return whether all columns, float64 [m, C], rank the rows alike."""
    ranks = rankdata(values, axis=0, nan_policy="omit")
    return bool(np.nanmax(np.nanmax(ranks, 1) - np.nanmin(ranks, 1)) == 0)


def predicted_too_well(measured: Measured) -> Findings:
    """Features predict outcomes better than any input.

    Look for latencies that are predicted closer than their own jitter, and accuracies nearly
    without error.
    """
    if not measured.names or len(measured.few) < 20:
        return
    outcomes = np.hstack([measured.accuracy, measured.log_ms])[measured.few]
    left = np.where(
        np.isnan(outcomes), np.nan, ridge_residuals(measured, fill_with_means(outcomes))
    )
    accuracy_left, latency_left = np.split(np.nanstd(left, 0), 2)
    accuracy_spread, latency_spread = np.split(np.nanstd(outcomes, 0), 2)
    logs = np.log(measured.repeats_ms[measured.few])
    counts = (~np.isnan(logs)).sum(2)
    # half of what the median of R measurements varies by
    noise = np.sqrt(np.nanmean(np.where(counts > 1, np.nanvar(logs, 2, ddof=1), np.nan), 0))
    floor = np.fmax(JITTER, 0.5 * noise * np.sqrt(math.pi / 2 / np.maximum(counts.mean(0), 1)))
    timed = (latency_left < floor) & (latency_spread > 5 * floor)
    right = (accuracy_left < 0.14 * accuracy_spread) & (accuracy_spread > 0.1)
    for what, hits in (("latency", timed), ("accuracy", right)):
        if hits.any():
            yield Finding(
                f"Features predict the {what} of {hits.sum()} configurations (e.g. "
                f"{measured.table.label(int(hits.argmax()))}) better than any input could: "
                "probable leakage",
                "likely",
                "Leave out features that are measured with the answer or made from it.",
            )


def order_of_features(measured: Measured) -> Findings:
    """Features tell nothing about outcomes in their order."""
    if not measured.names or len(measured.few) < 50:
        return
    y = _main_outcomes(measured)

    def explained(order: np.ndarray) -> float:
        """Return the share of variance that features explain if position i is sample order[i]."""
        targets = standardise(y[order[measured.few]])
        return float(1 - (ridge_residuals(measured, targets) ** 2).mean())

    draws = np.random.default_rng(0)
    straight = np.arange(len(y))
    chance = max(explained(draws.permutation(len(y))) for _ in range(SHUFFLES))
    if explained(straight) > chance:
        return
    orders = {
        "one row later": np.roll(straight, 1),
        "one row earlier": np.roll(straight, -1),
        "in reverse": straight[::-1],
        "sorted as text": np.argsort(measured.ids, kind="stable"),
    }
    name = max(orders, key=lambda each: explained(orders[each]))
    words = "Features tell no more about outcomes than shuffled ones"
    sure = "perhaps"
    if explained(orders[name]) > chance + 0.05:
        words = f"Features fit the outcomes only if ids are taken {name}"
        sure = "nearly certain"
    yield Finding(words, sure, "Match features and samples by their ids.")


def _main_outcomes(measured: Measured) -> np.ndarray:
    """Return the means over the configurations, and the main components of all outcomes, float64
    [n, k]."""
    accuracy = fill_with_means(measured.accuracy)
    log_ms = fill_with_means(measured.log_ms)
    outcomes = np.hstack([accuracy, log_ms])
    components = np.linalg.svd(standardise(outcomes)[measured.few], full_matrices=False)[2][:4]
    means = np.stack([accuracy.mean(1), log_ms.mean(1)], 1)
    return np.hstack([means, outcomes @ components.T])


# -- values of single features ---------------------------------------------------------------------


def numbers_of_samples(measured: Measured) -> Findings:
    """A feature numbers the samples.

    Look for those that rise or fall with each sample, in the order of the samples or of the
    numbers in their ids, or hold every whole number of a range once.
    """
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
    hits = np.zeros(values.shape[1], bool)
    for order in (np.arange(count), by_numbers(measured.ids)):
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
    """Features are too large or small for a measurement."""
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
    """A feature holds times of day in several units."""
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


# -- columns of features ---------------------------------------------------------------------------


def missing_features(measured: Measured) -> Findings:
    """Values of features are missing."""
    for name, (names, block) in _numbers(measured).items():
        if missing := float(block.isnan().double().sum() / max(1, block.numel())):
            words = f"Features {name}: {missing:.1%} of the values are missing"
            words += _named(names, block.isnan().any(0))
            yield Finding(words, "certain", "Missing values count as the median.")


def constant_features(measured: Measured) -> Findings:
    """Features never vary."""
    for name, (names, block) in _numbers(measured).items():
        varies = _varies(block)
        if not varies.all():
            words = f"Features {name}: {int((~varies).sum())} of {len(varies)} columns never vary"
            words += _named(names, ~varies)
            yield Finding(words, "certain", "They can be left out.")


def repeated_features(measured: Measured) -> Findings:
    """Features repeat another one."""
    columns: list[Tensor] = []
    labels: list[str] = []
    for names, block in _numbers(measured).values():
        varies = _varies(block)
        labels += itertools.compress(names, varies.tolist())
        columns += block.nan_to_num()[:, varies].unbind(1)
    if not columns:
        return
    numbered = numbers_of(torch.stack(columns))
    copied = np.ones(len(numbered), bool)
    copied[np.unique(numbered, return_index=True)[1]] = False
    if copied.any():
        words = f"{copied.sum()} features repeat another one"
        words += _named(labels, copied)
        yield Finding(words, "certain", "They can be left out.")


def _numbers(measured: Measured) -> dict[str, tuple[list[str], Tensor]]:
    """Return for each block of features the names of its columns of numbers, and their values,
    [N, d]. The places of a text are left out: they follow from each other, and the last may be
    empty. So are blocks of free text, which are NaN where a text is unlike the others."""
    blocks = {}
    for name, block in measured.table.features.items():
        if name in measured.table.texts:
            continue
        numbers: list[bool] = []
        names = []
        for column in measured.table.block_columns(name):
            is_number = column.categories is None
            numbers += [is_number] * len(column.labels)
            names += [column.name] * is_number
        blocks[name] = (names, block[:, torch.tensor(numbers)])
    return blocks


def _varies(block: Tensor) -> Tensor:
    known = block.nan_to_num()
    return (known != known[0]).any(0)


def _named(names: Sequence[str], chosen: Iterable[bool]) -> str:
    """Return the first of the chosen names, in brackets."""
    few = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
    more = ", …" * (len(few) > MAX_NAMED)
    return f" ({', '.join(few[:MAX_NAMED])}{more})"

"""Notice faults that files of measurements often have, before anything is trained on them.

Each check is a function from `Measured` to the faults that it sees; `CHECKS` lists them. Training
refuses one fault: a feature that is a measured latency, to the precision of float32. All others are
warnings, since an honest profile may look like that.

A profile does not hold when and where a cell was measured. So drift is seen in the order of samples
and of repeats alone, and another machine only where knobs cannot explain a configuration's time.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata

from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import TIME_OUT_RATIO, TIME_OUT_SHARE
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.inspection.measured import (
    Measured,
    correlations,
    filled,
    gaps_of,
    numbers_of,
    repeated,
    residuals,
    scaled,
)

LEAST_VARIED = 10
"""Outcomes that differ in fewer samples may equal a feature by chance."""
MOST_LEAKS = 3
"""So many features that hold an outcome are named."""
SHUFFLES = 20
"""Random orders that features are compared in."""
QUICKEST_MS = 0.1
"""A decision takes half of this: latencies below it leave nothing to choose, or are seconds."""
SLOWEST_MS = 3.6e6
JITTER = 0.002
"""Time cannot be predicted better than this, where repeats do not say how much it varies."""


class Fault(NamedTuple):
    """A fault that was noticed."""

    what: str
    """What it is, and where."""
    sure: str
    """How sure that is: certain, nearly certain, likely or perhaps."""
    advice: str
    """What to do."""
    refused: bool = False
    """Whether nothing can be trained with it."""

    def __str__(self) -> str:
        return f"{self.what} ({self.sure}). {self.advice}"


Faults = Iterator[Fault]


def faults_by_check(table: ProfileTable) -> dict[str, list[Fault]]:
    """Return what each check notices, by its name."""
    measured = Measured.from_table(table)
    # columns without any value have no mean
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        return {check.__name__: list(check(measured)) for check in CHECKS}


def faults_of(table: ProfileTable) -> list[Fault]:
    """Return the faults of a profile that are noticed, refused ones first."""
    faults = itertools.chain(*faults_by_check(table).values())
    return sorted(faults, key=lambda fault: not fault.refused)


def warnings_of(table: ProfileTable) -> list[str]:
    """Return the faults of a profile in sentences.

    Raises:
        InputError: training refuses one of them.
    """
    faults = faults_of(table)
    for fault in faults:
        if fault.refused:
            raise InputError(f"profile {table.name!r}: {fault}")
    return list(map(str, faults))


# -- features that hold the outcome ----------------------------------------------------------------


def copied_outcomes(measured: Measured) -> Faults:
    """Notice a feature that equals a column of outcomes, or orders the samples as it does."""
    targets, names = _outcomes(measured)
    if not measured.names or not names:
        return
    ranks = rankdata(filled(measured.raw), axis=0)
    ordered = rankdata(targets, axis=0, nan_policy="omit")
    likeness = np.fmax(correlations(measured.raw, targets), correlations(ranks, ordered))
    for column in np.flatnonzero(likeness.max(1) > 0.9999)[:MOST_LEAKS]:
        target = int(likeness[column].argmax())
        values = measured.raw[:, column]
        # a measured time has many values; 1e-6 is the precision of float32
        equal = np.abs(values - targets[:, target]) <= 1e-6 * values
        timed = names[target].startswith("latency") and len(np.unique(values)) > 10
        certain = bool(timed and equal.all())
        yield Fault(
            f"Feature {measured.names[column]} orders the samples as the {names[target]} does",
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
        "mean of ln latency": np.nanmean(log_ms, 1),
        "cheapest configuration that is right": np.argmin(right, 1),
    }
    for c, label in enumerate(map(measured.table.label, range(accuracy.shape[1]))):
        columns[f"accuracy of {label}"] = accuracy[:, c]
        if measured.table.unit == "ms":
            columns[f"latency of {label}"] = np.exp(log_ms[:, c])
            for r in range(1, measured.repeats_ms.shape[2]):
                columns[f"latency of {label}, repeat {r}"] = measured.repeats_ms[measured.few, c, r]
    targets = np.stack(list(columns.values()), 1)
    differ = (targets != np.nanmedian(targets, 0)) & ~np.isnan(targets)
    varied = differ.sum(0) >= LEAST_VARIED
    return targets[:, varied], list(itertools.compress(columns, varied))


def predicted_too_well(measured: Measured) -> Faults:
    """Notice outcomes that few features together predict better than any input could: latencies
    closer than their own jitter, accuracies nearly without error."""
    if not measured.names or len(measured.few) < 20:
        return
    outcomes = np.hstack([measured.accuracy, measured.log_ms])[measured.few]
    left = np.where(np.isnan(outcomes), np.nan, residuals(measured, filled(outcomes)))
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
            yield Fault(
                f"Features predict the {what} of {hits.sum()} configurations, such as "
                f"{measured.table.label(int(hits.argmax()))}, better than any input could",
                "likely",
                "Leave out features that are measured with the answer or made from it.",
            )


def order_of_features(measured: Measured) -> Faults:
    """Notice features that tell nothing about outcomes in their order, and whether they do in
    another one."""
    if not measured.names or len(measured.few) < 50:
        return
    # means over the configurations, and the main components of all outcomes
    accuracy = filled(measured.accuracy)
    log_ms = filled(measured.log_ms)
    outcomes = np.hstack([accuracy, log_ms])
    components = np.linalg.svd(scaled(outcomes)[measured.few], full_matrices=False)[2][:4]
    means = np.stack([accuracy.mean(1), log_ms.mean(1)], 1)
    y = np.hstack([means, outcomes @ components.T])

    def explained(order: np.ndarray) -> float:
        """Return the share of variance that features explain if position i is sample order[i]."""
        targets = scaled(y[order[measured.few]])
        return float(1 - (residuals(measured, targets) ** 2).mean())

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
    yield Fault(words, sure, "Match features and samples by their ids.")


# -- units -----------------------------------------------------------------------------------------


def units_of_time(measured: Measured) -> Faults:
    """Notice latencies in other units: in all rows, some configurations, or some samples."""
    if measured.table.unit != "ms":
        return
    advice = "Write all latencies in ms."
    median = float(np.exp(np.nanmedian(measured.log_ms)))
    if not QUICKEST_MS <= median <= SLOWEST_MS:
        yield Fault(f"The median latency is {median:.3g} ms", "likely", advice)
    columns, rows = gaps_of(measured.log_ms, max(5, len(measured.log_ms) // 50))
    if columns.mean() > 0.25:
        count = int((rows[:, columns].mean(1) > 0.5).sum())
        words = f"Latencies of {count} samples are a thousand or more times smaller than others"
        yield Fault(words, "nearly certain", advice)
    medians = np.nanmedian(measured.log_ms, 0)[:, None]
    parted, smaller = gaps_of(medians, 1)
    if parted.any():
        names = ", ".join(map(measured.table.label, np.flatnonzero(smaller[:, 0])[:3]))
        words = f"Configurations such as {names} are about a thousand times faster than the others"
        yield Fault(words, "likely", advice)


def percent(measured: Measured) -> Faults:
    """Notice accuracies that are a hundredth of the others, as where some rows were per cent."""
    known = measured.accuracy[measured.accuracy > 0]
    small = (known <= 0.0101).mean()
    between = ((known > 0.0101) & (known < 0.05)).mean()
    if small > 0.02 and between < 0.2 * small and (known > 0.2).mean() > 0.02:
        yield Fault(
            f"{small:.0%} of the accuracies above 0 are at most 0.01, and hardly any are between "
            "0.01 and 0.05",
            "likely",
            "Write all accuracies in the same unit; some may be shares and others per cent.",
        )


# -- samples ---------------------------------------------------------------------------------------


def same_samples(measured: Measured) -> Faults:
    """Notice samples that occur under several ids: with the same features and outcomes, or with the
    same features and accuracies, and latencies that hardly differ."""
    table = measured.table
    features = torch.cat([torch.zeros(len(measured.ids), 0), *measured.blocks], 1)
    cells = torch.from_numpy(np.hstack([measured.accuracy, measured.log_ms])).float()
    advice = "Keep one of them, or give both the same image_id: then no split parts them."
    if (copies := repeated(torch.cat([features, cells], 1))) and table.num_configurations > 1:
        words = f"{copies} samples have the features and outcomes of another one"
        yield Fault(words, "nearly certain", advice)
    elif table.features and not table.image_ids:
        # neighbours in an order in which equal features stand together
        number = numbers_of(features)
        order = np.argsort(number, kind="stable")
        first = order[:-1][np.diff(number[order]) == 0]
        second = order[1:][np.diff(number[order]) == 0]
        differences = np.abs(measured.log_ms[first] - measured.log_ms[second])
        usual = np.nanmedian(np.abs(np.diff(measured.log_ms, axis=0)))
        as_right = (measured.accuracy[first] == measured.accuracy[second]).mean(1) > 0.95
        if twins := int((as_right & (np.nanmedian(differences, 1) < 0.25 * usual)).sum()):
            words = f"{twins} samples have the features of another one, and take about as long"
            yield Fault(words, "likely", advice)


# -- times -----------------------------------------------------------------------------------------


def times_of_zero(measured: Measured) -> Faults:
    """Notice times of 0."""
    zeros = int((measured.repeats_ms == 0).sum())
    if zeros and measured.table.unit == "ms":
        advice = "Leave out cells that timed out or were not timed."
        yield Fault(f"{zeros} latencies are 0", "nearly certain", advice)


def capped(measured: Measured) -> Faults:
    """Notice a largest latency that occurs often, as time-outs do."""
    known = measured.log_ms[~np.isnan(measured.log_ms)]
    values, counts = np.unique(known, return_counts=True)
    usual = max(TIME_OUT_SHARE * len(known), TIME_OUT_RATIO * counts[-2:][0])
    if len(values) > 1 and counts[-1] > usual:
        yield Fault(
            f"{counts[-1]} cells have the largest latency, {math.exp(values[-1]):.4g}",
            "nearly certain",
            "They look like time-outs: default budgets leave them out; give them accuracy 0.",
        )


def repeated_digits(measured: Measured) -> Faults:
    """Notice latencies that are equal to the last digit: of repeats, of configurations, or of
    samples, as a coarse timer or a copied column has them."""
    advice = "Measure every cell by itself, with a finer timer."
    repeats = measured.repeats_ms
    several = (~np.isnan(repeats)).sum(2) > 1
    copied = (np.nanmin(repeats, 2) == np.nanmax(repeats, 2))[several].mean()
    if copied > 0.2:
        words = f"The repeats of {copied:.0%} of the cells are equal to the last digit"
        yield Fault(words, "likely", advice)
    which = ("samples of a configuration", "configurations of a sample")
    for axis, most in enumerate((0.9, 0.5)):
        ordered = np.sort(measured.log_ms, axis)
        equal = (np.diff(ordered, axis=axis) == 0).sum(axis)
        known = (~np.isnan(ordered)).sum(axis)
        if np.median((equal / known)[known > 3]) > most:
            yield Fault(f"Most {which[axis]} have equal latencies", "likely", advice)


def drift(measured: Measured) -> Faults:
    """Notice a machine that became slower or faster: between repeats, or at some sample, by more
    than the features explain."""
    advice = "Measure again on a quiet machine, or divide the drift out."
    logs = np.log(measured.repeats_ms)
    steps = np.diff(logs, axis=2)
    # readers sort repeats without an order by size
    if steps.size and (steps[~np.isnan(steps)] < 0).mean() > 0.01:
        change = np.nanmean(logs - logs[..., :1], (0, 1))
        worst = change[np.abs(change).argmax()]
        if abs(worst) > math.log(1.2):
            words = f"Later repeats take {math.exp(worst):.2f} times as long as the first"
            yield Fault(words, "likely", advice)
    count = len(measured.few)
    if count < 100:
        return
    log_ms = measured.log_ms[measured.few]
    level = np.nanmean(log_ms - np.nanmean(log_ms, 0), 1)
    # data sets may differ, and stand one after the other
    datasets = measured.datasets[measured.few]
    level -= (np.bincount(datasets, level) / np.bincount(datasets))[datasets]
    left = residuals(measured, level[:, None])[:, 0]
    # the place that parts earlier from later samples best
    at = np.arange(1, count)
    before = np.cumsum(left)[:-1] / at
    jumps = (left.sum() - before * at) / (count - at) - before
    inside = (at > 0.05 * count) & (at < 0.95 * count)
    place = int((np.abs(jumps) * np.sqrt(at * (count - at)) * inside).argmax())
    spread = math.sqrt((left[: place + 1].var() + left[place + 1 :].var()) / 2)
    if abs(jumps[place]) > max(math.log(1.5), spread):
        sample = measured.ids[measured.few[place + 1]]
        words = f"From sample {sample} on, latencies are {math.exp(jumps[place]):.2f} times as long"
        yield Fault(words, "likely", advice)


def other_machine(measured: Measured) -> Faults:
    """Notice configurations that are slower or faster by a factor than their knobs explain."""
    codes = torch.nn.functional.one_hot(measured.table.configurations).flatten(1).double().numpy()
    medians = np.nanmedian(measured.log_ms, 0)
    if len(measured.table.knobs) < 2 or len(medians) < 2 * np.linalg.matrix_rank(codes):
        return
    slower = np.zeros((len(medians), 1))
    for _ in range(10):
        # effects of knob values, and one of being measured on the slower machine
        effects = np.hstack([codes, slower])
        weights = np.linalg.lstsq(effects, medians, rcond=None)[0]
        left = medians - codes @ weights[:-1]
        slower = (left > (left.min() + left.max()) / 2).astype(np.float64)[:, None]
    factor = abs(weights[-1])
    if factor > max(math.log(1.5), 6 * (medians - effects @ weights).std()):
        words = (
            f"{int(slower.sum())} of {len(medians)} configurations take {math.exp(factor):.2f} "
            "times as long as their knobs explain"
        )
        yield Fault(words, "likely", "Measure all configurations on the same machine.")


def missing_where_slow(measured: Measured) -> Faults:
    """Notice cells that are missing where the model is slow."""
    missing = np.isnan(measured.log_ms)
    if missing.sum() < 10:
        return
    # what a cell would take, from its sample and its configuration
    of_row = np.zeros((len(missing), 1))
    for _ in range(5):
        of_column = np.nanmean(measured.log_ms - of_row, 0)
        of_row = np.nanmean(measured.log_ms - of_column, 1, keepdims=True)
    expected = of_row + of_column
    slower = expected[missing].mean() - expected[~missing].mean()
    if slower > max(0.3, 5 / math.sqrt(missing.sum())) * expected.std():
        yield Fault(
            f"The {missing.sum()} cells that are missing would take {math.exp(slower):.2f} times "
            "as long as the others",
            "likely",
            "Means favour slow configurations then: write time-outs as accuracy 0 at the limit.",
        )


# -- columns of features ---------------------------------------------------------------------------


def idle_features(measured: Measured) -> Faults:
    """Notice features that are missing, never vary, or repeat another one."""
    columns: list[torch.Tensor] = []
    for name, block in measured.table.features.items():
        if missing := float(block.isnan().double().mean()):
            words = f"Features {name}: {missing:.1%} of the values are missing"
            yield Fault(words, "certain", "Missing values count as the median.")
        known = block.nan_to_num()
        varies = (known != known[0]).any(0)
        if not varies.all():
            words = f"Features {name}: {int((~varies).sum())} of {len(varies)} columns never vary"
            yield Fault(words, "certain", "They can be left out.")
        columns += known[:, varies].unbind(1)
    if columns and (copies := repeated(torch.stack(columns))):
        words = f"{copies} features repeat another one"
        yield Fault(words, "certain", "They can be left out.")


CHECKS: tuple[Callable[[Measured], Faults], ...] = (
    copied_outcomes,
    predicted_too_well,
    order_of_features,
    units_of_time,
    percent,
    same_samples,
    times_of_zero,
    capped,
    repeated_digits,
    drift,
    other_machine,
    missing_where_slow,
    idle_features,
)
"""What is looked for, in the order in which it is reported."""

"""Checks of knobs and configurations: values that were swapped, timed elsewhere or before the model
was warm, and accuracies that count errors.

A knob may do anything to time and accuracy, so most of these are signs, not proofs.
docs/profiles.md says what they need.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.stats import spearmanr

from knobwise.common.words import spelled
from knobwise.experiments.inspection.measured import (
    Finding,
    Findings,
    Measured,
    agreements,
    expected_of,
)

COLD = 8
"""A configuration that takes so many times as long as its knobs explain was not warm: machines in
use together differ by less."""
FEWEST_EQUAL = 20
"""Cells that may be equal to the last digit by chance are fewer."""
FASTER = 1.5
"""Machines that differ by a smaller factor cannot be told from what a knob does."""
ERRORS = "If errors were counted, accuracy is 1 minus that."


# -- knob values -----------------------------------------------------------------------------------


def reversed_values(measured: Measured) -> Findings:
    """A knob's values were reversed in some samples.

    Look for a knob whose values make some samples faster in the order in which they make the
    others slower, to the same extent and with nothing between.
    """
    for knob, effects in zip(measured.table.knobs, _effects(measured), strict=True):
        # what changes its sign where the values are reversed; its main direction
        uneven = (effects - effects[:, ::-1]) / 2
        direction = np.linalg.svd(uneven, full_matrices=False)[2][0]
        strength = uneven @ direction
        strength *= np.sign(np.median(strength)) or 1.0
        few = strength < 0
        if min(few.sum(), (~few).sum()) < max(5, 0.02 * len(few)):
            continue
        usual = np.median(strength[~few])
        other = -np.median(strength[few])
        between = (np.abs(strength) < 0.2 * min(usual, other)).mean()
        if between < 0.02 and 1 / FASTER < other / usual < FASTER and usual > 0.05:
            yield Finding(
                f"In {few.sum():,} samples (e.g. {measured.ids[few.argmax()]}) knob {knob.name} "
                "affects latency in the opposite direction from the rest",
                "likely",
                "Were the values of this column reversed or swapped in some of the files?",
            )


def value_elsewhere(measured: Measured) -> Findings:
    """One number of a knob was timed on another machine."""
    for knob, effects in zip(measured.table.knobs, _effects(measured), strict=True):
        values = np.array(knob.values)
        if values.dtype.kind not in "iuf" or len(values) < 3:
            continue
        times = np.median(effects, 0)
        off = [_out_of_line(values.astype(np.float64), times, i) for i in range(len(values))]
        places = np.flatnonzero(off)
        if len(places):
            # the one without which the times of the others are closest
            worst = min(places, key=lambda i: np.ptp(np.delete(times, i)))
            yield Finding(
                f"{knob.name}={values[worst]} takes {math.exp(off[worst]):.2f} times as long as "
                "its neighbouring values predict; it, or a neighbour, may have been timed on "
                "another machine",
                "perhaps",
                "Measure all values on the same machine.",
            )


def _out_of_line(values: np.ndarray, times: np.ndarray, place: int) -> float:
    """Return by how much the ln time of a number, of [V], is out of line; 0 where it may be sound.

    It is looked at only where time rises or falls steadily with the other numbers.
    """
    rest = np.delete(np.arange(len(values)), place)
    steps = np.diff(times[rest])
    # 2 % are noise
    if not ((steps > -0.02).all() or (steps < 0.02).all()):
        return 0.0
    if 0 < place < len(values) - 1:
        low, high = sorted(times[[place - 1, place + 1]])
        beyond = max(times[place] - high, low - times[place])
        return float(times[place] - (low + high) / 2) if beyond > math.log(1.3) else 0.0
    # at an end: against the direction of the others, or far beyond their steps; 0 may mean "off"
    inner = 1 if place == 0 else len(values) - 2
    sign = np.sign(times[rest[-1]] - times[rest[0]]) * (1 if place else -1)
    step = float(times[place] - times[inner])
    if len(values) < 4 or not values[place]:
        return 0.0
    if step * sign < -math.log(FASTER):
        return step
    scales = [values, np.log(values)] if (values > 0).all() else [values]
    for scale in scales:
        slopes = np.abs(np.diff(times) / np.diff(scale))
        slope = slopes[0] if place == 0 else slopes[-1]
        others = slopes[1:] if place == 0 else slopes[:-1]
        if slope < 4 * others.max():
            return 0.0
    return step if abs(step) > math.log(2) else 0.0


def values_in_equal_times(measured: Measured) -> Findings:
    """A knob changes no latency, as where one answer was judged in several ways.

    Look for settings that differ in one knob alone, and whose latencies are equal to the last digit
    in all samples, though a setting's own differ from sample to sample.
    """
    log_ms = measured.log_answered
    several = [len(np.unique(column[~np.isnan(column)])) for column in log_ms.T]
    if np.median(several) < 0.5 * np.median((~np.isnan(log_ms)).sum(0)):
        # a coarse timer, or times that were computed
        return
    codes = measured.table.configurations.numpy()
    for place, knob in enumerate(measured.table.knobs):
        groups = np.unique(np.delete(codes, place, 1), axis=0, return_inverse=True)[1].reshape(-1)
        equal, pairs = 0, 0
        for group in np.unique(groups):
            times = log_ms[:, groups == group]
            together = (~np.isnan(times)).sum(1) > 1
            equal += int((np.nanmin(times, 1) == np.nanmax(times, 1))[together].sum())
            pairs += int(together.sum())
            if equal < pairs:
                break
        if equal == pairs >= FEWEST_EQUAL:
            yield Finding(
                f"No value of knob {knob.name} makes a difference to the latency, to the last "
                f"digit, in {pairs:,} cells",
                "likely",
                f"If answers were judged in several ways, {knob.name} is no setting: keep the rows "
                f"of one, such as {knob.name}={spelled(knob.values[0])}.",
            )


# -- configurations --------------------------------------------------------------------------------


def cold_configurations(measured: Measured) -> Findings:
    """Few configurations take far longer than knobs explain."""
    table = measured.table
    medians = np.nanmedian(measured.log_ms, 0)
    if len(table.knobs) < 2 or len(medians) < 6:
        return
    left = medians - np.nanmedian(medians)
    # effects of values, each a median: a few configurations do not move them
    for _ in range(10):
        for codes in table.configurations.numpy().T:
            for value in np.unique(codes):
                left[codes == value] -= np.nanmedian(left[codes == value])
    usual = 1.4826 * np.nanmedian(np.abs(left))
    cold = left > max(math.log(COLD), 8 * usual)
    if 0 < cold.sum() <= 0.25 * len(cold):
        names = measured.labels(cold)
        yield Finding(
            f"{math.exp(np.median(left[cold])):.0f} times as long as their knobs explain: {names} "
            f"({cold.sum()} of {len(cold)} configurations)",
            "likely",
            "If the model was not warm, measure them again.",
        )


def slower_is_worse(measured: Measured) -> Findings:
    """Accuracy falls as configurations take longer."""
    if measured.timed_out.any() and not measured.scored.any():
        # slow solvers are stopped more often, and errors would be 1 there
        return
    means = np.nanmean(measured.accuracy, 0)
    # where many requests end at a limit, slow configurations are right less often
    in_time = measured.log_ms < np.nanmax(measured.log_ms) - 0.02
    times = np.nanmedian(np.where(in_time, measured.log_ms, np.nan), 0)
    known = ~np.isnan(means) & ~np.isnan(times)
    # the fewer, the clearer it must be
    if known.sum() >= 3 and means[known].std() > (0.02 if known.sum() >= 6 else 0.05):
        rank = spearmanr(times[known], means[known])
        if rank.statistic < -0.6 and rank.pvalue < 0.01:
            words = "Configurations that take longer are right less often: rank correlation "
            words += f"{rank.statistic:.2f} over {known.sum()} configurations"
            yield Finding(words, "perhaps", ERRORS)


def contrary_configurations(measured: Measured) -> Findings:
    """A configuration is right where others are wrong."""
    agree = agreements(measured.accuracy)
    # the correlation of unrelated columns varies by 1/√n
    against = agree < -max(0.1, 5 / math.sqrt(len(measured.ids)), 0.5 * np.median(agree))
    # solvers that complement each other disagree too, but then it is many of them
    if 0 < against.sum() <= max(1, len(agree) // 8) and np.median(agree) > 0.1:
        words = "Right where the other configurations are wrong: "
        words += f"{measured.labels(against)} ({against.sum()} of {len(agree)} configurations)"
        yield Finding(words, "likely", ERRORS)


def _effects(measured: Measured) -> list[np.ndarray]:
    """Return the effect of each value of each knob on ln latency in each sample, [n, V] for each
    knob: additive, by least squares over the configurations."""
    table = measured.table
    log_ms = np.where(measured.empty, np.nan, measured.log_ms)
    log_ms = np.where(np.isnan(log_ms), expected_of(log_ms), log_ms)
    log_ms = np.nan_to_num(log_ms - np.nanmean(log_ms, 1, keepdims=True))
    sizes = [len(knob.values) for knob in table.knobs]
    columns = []
    for codes, size in zip(table.configurations.numpy().T, sizes, strict=True):
        columns.append(np.eye(size)[codes])
    effects = log_ms @ np.linalg.pinv(np.hstack(columns)).T
    parts = np.split(effects, list(itertools.accumulate(sizes))[:-1], axis=1)
    return [part - part.mean(1, keepdims=True) for part in parts]

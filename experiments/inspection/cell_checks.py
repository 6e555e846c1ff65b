"""Checks of outcomes: units, samples that occur twice, times and machines."""

from __future__ import annotations

import math

import numpy as np
import torch

from knobwise.envs.bandit.budgets import TIME_OUT_RATIO, TIME_OUT_SHARE
from knobwise.experiments.inspection.measured import (
    Finding,
    Findings,
    Measured,
    expected_of,
    gaps_of,
    jump_of,
    levels_of,
    numbers_of,
)

QUICKEST_MS = 0.1
"""A decision takes half of this: latencies below it leave nothing to choose, or are seconds."""
LONG_MS = 60_000
"""Few models are waited for longer: such latencies may be microseconds."""
EPOCH = 1e9
"""Times of day, in seconds or smaller units since 1970, are larger; as a latency it is 11 days."""
FEWEST_EQUAL = 10
"""Fewer cells with equal repeats may be copied rows, and say nothing of the timer."""
IN_MS = "Write all latencies in ms."
ALONE = "Measure every cell by itself, with a finer timer."
DRIFTED = "Measure again on a quiet machine, or divide the drift out."


# -- units -----------------------------------------------------------------------------------------


def times_of_day(measured: Measured) -> Findings:
    """Latencies are times of day."""
    late = measured.log_ms > math.log(EPOCH)
    if late.any():
        words = (
            f"{late.sum():,} latencies, such as of sample {measured.ids[late.any(1).argmax()]}, "
        )
        words += f"are above {EPOCH:.0e} ms (11 days), as times of day are"
        yield Finding(words, "nearly certain", "Write how long it took: the end minus the start.")


def usual_time(measured: Measured) -> Findings:
    """All latencies are in another unit."""
    median = float(np.exp(np.nanmedian(measured.log_ms)))
    if median < QUICKEST_MS:
        yield Finding(f"The median latency is {median:.3g} ms", "likely", IN_MS)
    elif median > LONG_MS:
        words = f"The median latency is {median:,.0f} ms, which is {median / 60_000:,.1f} minutes"
        yield Finding(words, "perhaps", "If they are microseconds, divide them by 1,000.")


def units_of_samples(measured: Measured) -> Findings:
    """Samples or cells are in another unit."""
    columns, rows = gaps_of(measured.log_ms, max(5, len(measured.log_ms) // 50))
    if columns.mean() <= 0.25:
        return
    smaller = rows[:, columns]
    share = smaller.mean(1)
    words = f"Latencies of {(share > 0.5).sum():,} samples are a thousand or more times smaller "
    words += "than others"
    # where rows were mixed, a sample has cells of both kinds
    if ((share > 0) & (share < 1)).mean() > 0.5:
        words = f"{smaller.sum():,} latencies are a thousand or more times smaller than others of "
        words += "their configuration"
    yield Finding(words, "nearly certain", IN_MS)


def units_of_repeats(measured: Measured) -> Findings:
    """Some of a cell's repeats are in another unit."""
    repeats = np.log(measured.repeats_ms)
    distant = np.nanmax(repeats, 2) - np.nanmin(repeats, 2) > math.log(300)
    if distant.mean() > 0.02:
        words = f"Repeats of {distant.sum():,} cells are hundreds of times apart"
        yield Finding(words, "likely", IN_MS)


def units_of_configurations(measured: Measured) -> Findings:
    """Configurations are in another unit."""
    parted, smaller = gaps_of(np.nanmedian(measured.log_ms, 0)[:, None], 1)
    if parted.any():
        names = measured.labels(smaller[:, 0])
        words = f"Configurations such as {names} are about a thousand times faster than the others"
        yield Finding(words, "likely", IN_MS)


def percent(measured: Measured) -> Findings:
    """Accuracies are a hundredth of others, as per cent beside shares."""
    known = measured.accuracy[measured.accuracy > 0]
    small = (known <= 0.0101).mean()
    between = ((known > 0.0101) & (known < 0.05)).mean()
    if small > 0.02 and between < 0.2 * small and (known > 0.2).mean() > 0.02:
        yield Finding(
            f"{small:.0%} of the accuracies above 0 are at most 0.01, and hardly any are between "
            "0.01 and 0.05",
            "likely",
            "Write all accuracies in the same unit; some may be shares and others per cent.",
        )


# -- samples ---------------------------------------------------------------------------------------


def same_samples(measured: Measured) -> Findings:
    """A sample occurs under several ids.

    Look for those that a split may part: with equal features (in tables without features equal
    outcomes), as often right, and latencies that hardly differ.
    """
    rows = measured.features
    alike = "features" if measured.names else "outcomes"
    if not measured.names:
        rows = torch.from_numpy(np.hstack([measured.accuracy, measured.log_ms])).float()
    number = numbers_of(rows)
    # equal rows stand together; each is compared with the one before it
    order = np.argsort(number, kind="stable")
    pairs = (np.diff(number[order]) == 0) & (np.diff(measured.split_keys[order]) != 0)
    first = order[:-1][pairs]
    second = order[1:][pairs]
    differences = np.abs(measured.log_ms[first] - measured.log_ms[second])
    usual = np.nanmedian(np.abs(np.diff(measured.log_ms, axis=0)))
    right = np.isclose(measured.accuracy[first], measured.accuracy[second], equal_nan=True)
    same = (right.mean(1) > 0.95) & (np.nanmedian(differences, 1) < 0.25 * usual)
    if same.any():
        yield Finding(
            f"{same.sum():,} samples, such as {measured.ids[second[same.argmax()]]}, have the same "
            f"{alike} as another one, are as often right, and take about as long",
            "likely",
            "Remove the duplicates, or group them with profile.group=COLUMN so that they stay in "
            "one part of the split.",
        )


# -- times -----------------------------------------------------------------------------------------


def times_of_zero(measured: Measured) -> Findings:
    """Latencies are 0."""
    zeros = int((measured.repeats_ms == 0).sum())
    if zeros:
        advice = "Leave out cells that timed out or were not timed."
        yield Finding(f"{zeros} latencies are 0", "nearly certain", advice)


def capped(measured: Measured) -> Findings:
    """The largest latency occurs often, as time-outs do."""
    known = measured.log_ms[~np.isnan(measured.log_ms)]
    values, counts = np.unique(known, return_counts=True)
    usual = max(TIME_OUT_SHARE * len(known), TIME_OUT_RATIO * counts[-2:][0])
    if len(values) > 1 and counts[-1] > usual:
        late = measured.log_ms == values[-1]
        scored = int((measured.accuracy[late] > 0).sum())
        advice = "They look like time-outs, with accuracy 0 as they should: default budgets leave "
        advice += "them out."
        if scored:
            advice = "They look like time-outs: default budgets leave them out. Give accuracy 0 to "
            advice += f"the {scored:,} of them that have more, unless they were in time."
        words = f"{counts[-1]:,} cells have the largest latency, {math.exp(values[-1]):.4g}"
        yield Finding(words, "nearly certain", advice)


def equal_repeats(measured: Measured) -> Findings:
    """Repeats are equal to the last digit."""
    repeats = measured.repeats_ms
    several = (~np.isnan(repeats)).sum(2) > 1
    copied = (np.nanmin(repeats, 2) == np.nanmax(repeats, 2))[several]
    if copied.sum() >= FEWEST_EQUAL and copied.mean() > 0.2:
        words = f"In {copied.sum():,} of {copied.size:,} cells that were repeated, the repeats are "
        words += "equal to the last digit"
        yield Finding(words, "likely", ALONE)


def equal_times(measured: Measured) -> Findings:
    """Latencies are equal to the last digit.

    Look at the samples of a configuration, as a coarse timer has them, and at the configurations
    of a sample, as a copied column has them.
    """
    which = ("samples of a configuration", "configurations of a sample")
    for axis, most in enumerate((0.9, 0.5)):
        ordered = np.sort(measured.log_ms, axis)
        equal = (np.diff(ordered, axis=axis) == 0).sum(axis)
        known = (~np.isnan(ordered)).sum(axis)
        if np.median((equal / known)[known > 3]) > most:
            yield Finding(f"Most {which[axis]} have equal latencies", "likely", ALONE)


def later_repeats(measured: Measured) -> Findings:
    """Later repeats are slower or faster."""
    logs = np.log(measured.repeats_ms)
    steps = np.diff(logs, axis=2)
    # readers sort repeats without an order by size
    if steps.size and (steps[~np.isnan(steps)] < 0).mean() > 0.01:
        change = np.nanmean(logs - logs[..., :1], (0, 1))
        worst = change[np.abs(change).argmax()]
        if abs(worst) > math.log(1.2):
            words = f"Later repeats take {math.exp(worst):.2f} times as long as the first"
            yield Finding(words, "likely", DRIFTED)


def later_samples(measured: Measured) -> Findings:
    """From some sample on, all are slower or faster."""
    if len(measured.few) < 100:
        return
    place, jump, spread = jump_of(levels_of(measured, measured.log_ms))
    if abs(jump) > max(math.log(1.5), spread):
        sample = measured.ids[measured.few[place]]
        words = f"From sample {sample} on, latencies are {math.exp(jump):.2f} times as long"
        yield Finding(words, "likely", DRIFTED)


def other_machine(measured: Measured) -> Findings:
    """Configurations are slower than knobs explain."""
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
        names = measured.labels(slower[:, 0] > 0)
        words = f"{int(slower.sum())} of {len(medians)} configurations, such as {names}, take "
        words += f"{math.exp(factor):.2f} times as long as their knobs explain"
        yield Finding(words, "likely", "Measure all configurations on the same machine.")


def slow_workers(measured: Measured) -> Findings:
    """Workers take longer than others for the same cells, which each of them measured."""
    workers = measured.facts.get("workers", ())
    if not workers:
        return
    # only what several workers measured has something to compare
    from knobwise.profiling.workers.machines import differing

    for machine in differing(workers):
        factor = f"{machine['times']:.2f} (± {machine['times'] * machine['times_error']:.2f})"
        yield Finding(
            f"{machine['name']} took {factor} times as long as the others for "
            f"{machine['shared']} cells that all workers measured",
            "certain",
            "Accuracies hold, but times mix machines: measure on equal ones, in another folder.",
        )


def missing_where_slow(measured: Measured) -> Findings:
    """Cells are missing where the model is slow."""
    missing = np.isnan(measured.log_ms)
    # where cells were drawn or chosen, it is known why the others are missing
    if missing.sum() < 10 or measured.table.sampling_weight is not None:
        return
    # what a cell would take, from its sample and its configuration
    expected = expected_of(measured.log_ms)
    slower = expected[missing].mean() - expected[~missing].mean()
    if slower > max(0.3, 5 / math.sqrt(missing.sum())) * expected.std():
        yield Finding(
            f"The {missing.sum():,} cells that are missing would take {math.exp(slower):.2f} times "
            "as long as the others",
            "likely",
            "Means favour slow configurations then: write time-outs as accuracy 0 at the limit.",
        )

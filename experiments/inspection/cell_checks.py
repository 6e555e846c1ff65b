"""Checks of outcomes: units, samples that occur twice, times and machines."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import binom, hypergeom
from scipy.stats import t as student

from knobwise.envs.tables.units import MS
from knobwise.experiments.inspection.measured import (
    FAILED,
    Finding,
    Findings,
    Measured,
    expected_of,
    gaps_of,
    jump_of,
    named_configurations,
    numbers_of,
    setting_of,
)

QUICKEST_MS = 0.1
"""A decision takes half of this: latencies below it leave nothing to choose, or are seconds."""
LONG_MS = 60_000
"""Few models are waited for longer: such latencies may be microseconds."""
DAY_MS = 8.64e7
"""Whoever stops runs after at most a day has slow runs, and times in the right unit."""
EPOCH = 1e9
"""Times of day, in seconds or smaller units since 1970, are larger; as a latency it is 11 days."""
FACTOR = 1.1
"""Repeats that differ by less are as good as equal."""
FEWEST_SAMPLES = 10
"""In fewer samples repeats of one number may be slower by chance; gaps need twice as many."""
BY_CHANCE = 1e-6
"""Repeats that are slower by chance less often are noticed."""
STEADY = 3
"""Gaps between random times that were sorted vary more: their mean is below two standard deviations
for normal, uniform and heavy-tailed times, or two kinds of them."""
ORDINALS = ("first", "second", "third")
FEWEST_EQUAL = 10
"""Fewer cells with equal repeats may be copied rows, and say nothing of the timer."""
FEWEST_MIXED = 5
"""Fewer samples that are right, or wrong, may be so for every model."""
IN_MS = "Write all latencies in ms."
ALONE = "Measure every cell by itself, with a finer timer."
COLD = "If the model was not warm yet, measure them again, or leave them out."
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
    elif median > LONG_MS and not 0 < _longest_limit(measured) <= DAY_MS:
        words = f"The median latency is {median:,.0f} ms, which is {median / 60_000:,.1f} minutes"
        yield Finding(words, "perhaps", "If they are microseconds, divide them by 1,000.")


def _longest_limit(measured: Measured) -> float:
    """Return the time of the longest time-out in ms, 0 if there are none."""
    return float(np.exp(measured.log_ms[measured.timed_out].max(initial=-np.inf)))


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
    parted, smaller = gaps_of(np.nanmedian(measured.log_answered, 0)[:, None], 1)
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


def equal_scores(measured: Measured) -> Findings:
    """Models or servers have the same score in each sample, as where a cache answers for both."""
    table = measured.table
    named = [any(isinstance(value, str | bool) for value in knob.values) for knob in table.knobs]
    # what is right, or wrong, throughout is easily equal
    right = (measured.accuracy > 0.5).sum(0)
    wrong = (measured.accuracy <= 0.5).sum(0)
    mixed = np.minimum(right, wrong) >= FEWEST_MIXED
    _, number = np.unique(np.nan_to_num(measured.accuracy, nan=-1), axis=1, return_inverse=True)
    names = table.configurations[:, named].numpy()
    for group in range(number.max() + 1):
        same = (number == group) & mixed
        if len(np.unique(names[same], axis=0)) > 1:
            words = f"The accuracies of {measured.labels(same)} are equal in each sample"
            advice = "If they are different models, a cache may have answered for several, as some "
            advice += "do where servers call their models alike: measure again without it."
            yield Finding(words, "perhaps", advice)


# -- samples ---------------------------------------------------------------------------------------


def same_samples(measured: Measured) -> Findings:
    """A sample occurs under several ids.

    Look for those that a split may part: with features that are hardly equal by chance (in tables
    without features equal outcomes), as often right, and latencies that hardly differ.
    """
    if measured.names:
        alike = "features"
        number, unlikely = measured.inputs()
    else:
        alike = "outcomes"
        outcomes = np.hstack([measured.accuracy, measured.log_ms])
        number = numbers_of(torch.from_numpy(outcomes).float())
        unlikely = np.ones(len(number), bool)
    # equal rows stand together; each is compared with the one before it
    order = np.argsort(number, kind="stable")
    pairs = (np.diff(number[order]) == 0) & (np.diff(measured.split_keys[order]) != 0)
    pairs &= unlikely[order][1:]
    first = order[:-1][pairs]
    second = order[1:][pairs]
    differences = np.abs(measured.log_ms[first] - measured.log_ms[second])
    usual = np.nanmedian(np.abs(np.diff(measured.log_ms, axis=0)))
    right = np.isclose(measured.accuracy[first], measured.accuracy[second], equal_nan=True)
    same = (right.mean(1) > 0.95) & (np.nanmedian(differences, 1) < 0.25 * usual)
    # what failed throughout is alike
    same &= ~measured.empty.all(1)[second]
    if same.any():
        yield Finding(
            f"{same.sum():,} samples, such as {measured.ids[second[same.argmax()]]}, have the same "
            f"{alike} as another one, are as often right, and take about as long",
            "likely",
            "Remove the duplicates, or group them with profile.group=COLUMN so that they stay in "
            "one part of the split.",
        )


# -- times -----------------------------------------------------------------------------------------


def costs_of_zero(measured: Measured) -> Findings:
    """Latencies are 0, unless a timer rounded them down, or a configuration is free.

    Answers that failed cost nothing, and then look fast or cheap: those are wrong more often than
    others of their configurations.
    """
    zeros = measured.repeats_ms == 0
    timed = measured.table.unit == MS
    if not timed:
        # a local model costs nothing for every sample
        zeros &= (measured.repeats_ms > 0).any((0, 2), keepdims=True)
    cells = zeros.any(2)
    if not cells.any():
        return
    usual = np.nanmean(measured.accuracy, 0)[cells.nonzero()[1]].mean()
    right = measured.accuracy[cells].mean()
    failed = right < 0.5 * usual
    if timed and not failed and _rounded(measured.repeats_ms):
        return
    words = f"{zeros.sum()} latencies are 0{setting_of(measured, cells)}"
    if failed:
        words += f", where {(measured.accuracy[cells] == 0).sum()} answers are wrong"
        advice = FAILED
    elif timed:
        advice = "Leave out cells that were answered and not timed; what failed was late and wrong."
    else:
        advice = "If they were answered from a cache, give them the full cost."
    yield Finding(words, "nearly certain", advice)


def _rounded(times: np.ndarray) -> bool:
    """Return whether the shortest of these times are one, two, three … steps of a coarse timer."""
    shortest = np.unique(times[times > 0])[:5]
    return len(shortest) == 5 and bool(np.diff(shortest).min() > 0.5 * shortest[0])


def capped(measured: Measured) -> Findings:
    """The largest latency occurs often, or nearly that, as time-outs do."""
    late = measured.timed_out
    if not late.any():
        return
    scored = int(measured.scored.sum())
    advice = "They look like time-outs"
    if not scored:
        advice += ", with accuracy 0 as they should"
    by_default = measured.facts.get("default_budgets", True)
    advice += ": default budgets leave them out." if by_default else "."
    # an answer that was cut at a number of tokens may be right
    if scored and measured.table.unit == MS:
        advice += f" Give accuracy 0 to the {scored:,} of them that have more, unless they were in "
        advice += "time."
    shortest, longest = np.exp([measured.log_ms[late].min(), measured.log_ms[late].max()])
    words = f"{late.sum():,} cells have the largest latency, {longest:.4g}"
    if shortest < longest:
        words = f"{late.sum():,} wrong cells end at nearly the same latency, {shortest:.6g} to "
        words += f"{longest:.6g}"
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
        ordered = np.sort(measured.log_answered, axis)
        equal = (np.diff(ordered, axis=axis) == 0).sum(axis)
        known = (~np.isnan(ordered)).sum(axis)
        if np.median((equal / known)[known > 3]) > most:
            yield Finding(f"Most {which[axis]} have equal latencies", "likely", ALONE)


def later_repeats(measured: Measured) -> Findings:
    """Repeats of one number are slower or faster than the others."""
    # a time of 0 is that of `costs_of_zero`, and the longest ones are those of `capped`
    timed = (measured.repeats_ms > 0) & ~measured.late
    logs = np.log(np.where(timed, measured.repeats_ms, np.nan))
    steps = np.diff(logs, axis=2)
    ordered = (steps[~np.isnan(steps)] < 0).mean() > 0.01
    # readers sort repeats without an order by size
    number, change = _slower_number(logs) if ordered else _steady_gap(steps)
    if abs(change) <= math.log(FACTOR):
        return
    times = f"{math.exp(change):.2f} times as long as"
    place = ORDINALS[number] if number < len(ORDINALS) else f"{number + 1}th"
    words = f"The {place} repeat of a cell takes {times} its others"
    if not ordered:
        words = (
            f"In each cell {logs.shape[2] - number} of {logs.shape[2]} repeats take {times} the "
        )
        words += "others, or longer"
    yield Finding(words, "likely", DRIFTED if ordered and number else COLD)


def _slower_number(logs: np.ndarray) -> tuple[int, float]:
    """Return which repeat differs most from the others of its cell, of float64 [n, C, R] in the
    order of the measurements, and by how much; 0 if that may be chance."""
    count = (~np.isnan(logs)).sum(2, keepdims=True)
    others = (np.nansum(logs, 2, keepdims=True) - logs) / (count - 1)
    # cells of a sample have much in common, so each sample counts once
    levels = np.nanmean(np.where(count > 1, logs - others, np.nan), 1)
    known = (~np.isnan(levels)).sum(0)
    mean = np.nanmean(levels, 0)
    error = np.maximum(np.nanstd(levels, 0, ddof=1) / np.sqrt(known), 1e-9)
    chance = 2 * student.sf(np.abs(mean) / error, known - 1) * len(mean)
    sure = (known >= FEWEST_SAMPLES) & (chance < BY_CHANCE)
    mean = np.where(sure, mean, 0.0)
    # of two, the slower one
    number = int((np.abs(mean) + 1e-9 * (mean > 0)).argmax())
    return number, float(mean[number])


def _steady_gap(steps: np.ndarray) -> tuple[int, float]:
    """Return which repeat is the first beyond a gap that nearly all cells have, of float64 [n, C,
    R − 1] between repeats that were sorted by size, and how wide it is; 0 if there is none."""
    # gaps between times that vary at random vary as much
    whole = ~np.isnan(steps).any(2)
    gaps = steps[whole]
    if whole.any(1).sum() < 2 * FEWEST_SAMPLES or not gaps.size:
        return 0, 0.0
    mean = gaps.mean(0)
    steady = np.where(mean > STEADY * gaps.std(0), mean, 0.0)
    return int(steady.argmax()) + 1, float(steady.max())


def later_samples(measured: Measured) -> Findings:
    """From some sample on, all are slower or faster."""
    if len(measured.few) < 100:
        return
    jump = jump_of(measured, measured.log_ms)
    if abs(jump.size) > max(math.log(1.5), jump.spread):
        words = f"{jump.since}, latencies are {math.exp(jump.size):.2f} times as long"
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
    from knobwise.profiling.workers.machines import differing_machines

    for machine in differing_machines(workers):
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
            "Means favour slow configurations then: write time-outs as accuracy 0 at the limit, or "
            "count them so with profile.missing=failed.",
        )


def missing_configurations(measured: Measured) -> Findings:
    """Cells of a configuration or of a value of a knob are missing more often than by chance."""
    if measured.table.sampling_weight is not None:
        return
    missing = np.isnan(measured.log_ms) & measured.ran
    if not missing.any():
        return
    groups = named_configurations(measured)
    chances = {name: _chance(missing, measured.ran, has) for name, has in groups.items()}
    least = min(chances, key=lambda name: chances[name], default="")
    if least and chances[least] * len(chances) < 1e-5:
        count = int(missing[:, groups[least]].sum())
        yield Finding(
            f"Of {missing.sum():,} cells that are missing, {count:,} are of {least}",
            "likely",
            "If these requests failed, it looks better than it is: profile.missing=failed counts "
            "what is missing as late and wrong.",
        )


def _chance(missing: np.ndarray, ran: np.ndarray, has: np.ndarray) -> float:
    """Return how likely it is by chance that cells of these configurations, bool [C], are missing,
    bool [n, C], in so many samples more often than other cells of the same sample.

    Samples are compared with themselves, since a sample may lack many cells at once.
    """
    total = ran.sum(1)
    inside = (ran & has).sum(1)
    lost = missing.sum(1)
    lost_inside = (missing & has).sum(1)
    mixed = (inside > 0) & (inside < total) & (lost > 0) & (lost < total)
    if not mixed.any():
        return 1.0
    usual = np.floor(lost * inside / total)
    more = (lost_inside * total > lost * inside)[mixed]
    expected = hypergeom.sf(usual, total, inside, lost)[mixed]
    return float(binom.sf(more.sum() - 1, len(more), expected.mean()))

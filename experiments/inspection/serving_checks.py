"""Checks for what happens while a model is served: retries, caches, cold starts, batches, answers
that are cut off, requests that fail, and other versions of the model."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.stats import binom

from knobwise.envs.tables.units import MS
from knobwise.experiments.inspection.measured import (
    FAILED,
    MOST,
    Finding,
    Findings,
    Measured,
    agreements,
    expected_of,
    jump_of,
    levels_of,
    numbers_of,
    orders_of,
    setting_of,
)

FAR = 1000
"""A cell that takes so many times as long as others of its sample and configuration is wrong."""
CACHED = 20
"""An answer in such a part of the usual time was not computed."""
QUICK = 4
"""A sample that takes such a part of the usual time whatever the configuration may have failed."""
SLOW = 12
"""A cell that takes so many times as long, where few take a quarter of that, was measured cold."""


def retried(measured: Measured) -> Findings:
    """Cells with more measurements than others differ by far."""
    logs = np.log(measured.repeats_ms)
    counts = (~np.isnan(logs)).sum(2)
    more = counts > np.median(counts[counts > 0])
    differ = np.nanmax(logs[more], 1, initial=-np.inf) - np.nanmin(logs[more], 1, initial=np.inf)
    far = int((differ > math.log(1.5)).sum())
    if far >= 3 and far > 0.5 * more.sum() and more.mean() < 0.3:
        yield Finding(
            f"{far} cells have more measurements than the others, and these differ by far",
            "likely",
            "If requests were sent again, keep one row: the whole time, and the last answer.",
        )


def wrong_clock(measured: Measured) -> Findings:
    """Single cells take a thousand times as long, and longer than the limit of time-outs."""
    beyond = _beyond(measured)
    late = (beyond > math.log(FAR)) & _beyond_limit(measured)
    if 0 < late.sum() < 0.05 * late.size:
        row, column = np.unravel_index(np.nanargmax(beyond), beyond.shape)
        yield Finding(
            f"{late.sum():,} cells take {FAR} times as long as they should or longer, such as "
            f"sample {measured.ids[row]} with {measured.table.label(int(column))}",
            "nearly certain",
            "Remove them; did a clock change between start and end?",
        )


def _beyond_limit(measured: Measured) -> np.ndarray:
    """Return which cells, bool [n, C], take longer than time-outs; all, if there are none."""
    return measured.log_ms > measured.log_ms[measured.timed_out].max(initial=-np.inf)


def cached(measured: Measured) -> Findings:
    """Cells take a small part of their time."""
    advice = "If they were answered from a cache, measure them without it."
    # what failed is that of `failed_cells` and `costs_of_zero`
    other = _quick_failures(measured) | (measured.repeats_ms == 0).any(2)
    return _parted(measured, -1, CACHED, other, f"less than a {CACHED}th of", advice)


def cold_cells(measured: Measured) -> Findings:
    """Cells take many times their time."""
    advice = "If they were measured before the model was warm, measure them again."
    other = np.zeros_like(measured.log_ms, bool)
    return _parted(measured, 1, SLOW, other, f"over {SLOW} times", advice)


def _beyond(measured: Measured) -> np.ndarray:
    """Return how far ln latency is above what its sample and its configuration let expect, float64
    [n, C]; 0 for tables that are too small to tell."""
    if min(measured.log_ms.shape) < 3:
        return np.zeros_like(measured.log_ms)
    return np.nan_to_num(measured.log_answered - expected_of(measured.log_answered))


def _parted(
    measured: Measured, sign: int, factor: int, other: np.ndarray, words: str, advice: str
) -> Findings:
    """Notice many cells that take so many times the time that they should, or with sign −1 such a
    part of it, with hardly any between; not those of `wrong_clock`, nor the other ones, bool
    [n, C]."""
    beyond = np.where(other, 0.0, _beyond(measured))
    late = beyond > math.log(FAR)
    far = (sign * beyond > math.log(factor)) & ~late
    count = int(far.sum())
    between = int((sign * beyond > math.log(factor / 4)).sum()) - count - int(late.sum())
    if count > max(5, 0.003 * beyond.size) and between < 0.5 * count:
        sample = measured.ids[far.any(1).argmax()]
        yield Finding(
            f"{count:,} cells (e.g. of sample {sample}) take {words} their predicted time",
            "likely",
            advice,
        )


def cold_start(measured: Measured) -> Findings:
    """The first samples take much longer."""
    if len(measured.few) < 100:
        return
    levels = levels_of(measured, measured.log_ms)
    levels -= np.median(levels)
    high = levels > max(math.log(3), 6 * np.median(np.abs(levels)))
    # in which order the most stand first without a gap
    words, order = max(orders_of(measured), key=lambda each: np.argmin(high[each[1]]))
    first = int(np.argmin(high[order]))
    usual = (high[order][first:].sum() + 1) / len(high)
    # so many among the first would hardly be chance
    if 0 < first <= 0.1 * len(high) and usual**first < 0.005:
        factor = math.exp(levels[order][:first].mean())
        yield Finding(
            f"The samples before {measured.ids[measured.few[order[first]]]}{words} take "
            f"{factor:.1f} times as long as others with such features",
            "likely",
            "If the model was not warm yet, measure them again.",
        )


def cut_answers(measured: Measured) -> Findings:
    """The slowest answers take equally long and are wrong."""
    times = measured.log_answered
    ranks = np.argsort(np.argsort(-np.nan_to_num(times, nan=-np.inf), 0), 0)
    slowest = times > np.nanmax(times, 0) - 0.02
    count = slowest.sum(0)
    right = np.nanmean(np.where(slowest, measured.accuracy, np.nan), 0)
    # as many that are a little faster
    faster = ~slowest & (ranks < 2 * count)
    usual = np.nanmean(np.where(faster, measured.accuracy, np.nan), 0)
    # so few of the slowest are right by chance hardly ever
    chance = binom.cdf(right * count, count, usual) * len(count)
    often = (count >= np.maximum(8, 0.02 * len(ranks))) & (count < 0.4 * len(ranks))
    hits = often & (right < 0.3 * usual) & (chance < 1e-5)
    if hits.any():
        worst = int((count * hits).argmax())
        yield Finding(
            f"With {hits.sum()} configurations, such as {measured.table.label(worst)}, the slowest "
            f"{count[worst]:,} answers take the same time, and few are right",
            "likely",
            "If they were cut at a number of tokens, raise it, unless they are cut in use too.",
        )


def batches(measured: Measured) -> Findings:
    """Samples share all their latencies, as in a batch."""
    if measured.log_ms.shape[1] < 2:
        return
    answered = ~np.isnan(measured.log_answered).all(1)
    number = numbers_of(torch.from_numpy(measured.log_answered[answered]).float())
    sizes = np.bincount(number)
    shared = (sizes[number] > 1).mean()
    if shared > 0.3 and len(sizes) >= 5:
        yield Finding(
            f"{shared:.0%} of the samples have all their latencies in common with another one",
            "likely",
            "If they were answered in batches, measure each by itself, as it will be served.",
        )


def failed_requests(measured: Measured) -> Findings:
    """Samples fail fast in all configurations."""
    levels = np.nanmedian(measured.log_ms - np.nanmedian(measured.log_ms, 0), 1)
    wrong = np.nanmax(measured.accuracy, 1) == 0
    timed = measured.table.unit == MS
    # tokens and prices of short inputs differ by more than times do; 0 is that of `costs_of_zero`
    factor = QUICK if timed else CACHED
    failed = wrong & (levels < np.median(levels[~wrong]) - math.log(factor))
    if not timed:
        failed &= ~measured.empty.all(1)
    if failed.sum() >= 5 and measured.log_ms.shape[1] > 1:
        words = f"{failed.sum():,} samples (e.g. {measured.ids[failed.argmax()]}) are wrong under "
        words += f"every configuration, at under a {'quarter' if timed else f'{factor}th'} "
        yield Finding(f"{words}of the usual time", "likely", FAILED)


def failed_cells(measured: Measured) -> Findings:
    """Single answers of a configuration are wrong and cost next to nothing."""
    quick = _quick_failures(measured)
    if quick.any():
        words = f"{quick.sum():,} answers{setting_of(measured, quick)} cost less than a {CACHED}th "
        words += "of what others of their configurations do, and are wrong"
        yield Finding(words, "likely", FAILED)


def _quick_failures(measured: Measured) -> np.ndarray:
    """Return which cells, bool [n, C], cost a small part of the usual and are wrong, where hardly
    any of those is right, but others are; not those of samples that all fail, and not 0."""
    below = measured.log_ms - np.nanmedian(measured.log_ms, 0) < -math.log(CACHED)
    quick = below & ~below.all(1, keepdims=True) & (measured.repeats_ms != 0).all(2)
    count = quick.sum(0)
    right = np.where(quick, measured.accuracy, 0.0).sum(0)
    # so few of them are right by chance hardly ever
    usual = np.nanmean(measured.accuracy, 0)
    chance = binom.cdf(right, count, usual) * len(count)
    hits = (count >= 5) & (right <= (1 - MOST) * count) & (chance < 1e-5)
    return quick & hits & (measured.accuracy == 0)


def shifted_scores(measured: Measured) -> Findings:
    """Accuracies fit only if moved by one sample."""
    accuracy = measured.accuracy
    count, columns = accuracy.shape
    if count < 100 or columns < 3:
        return
    straight = agreements(accuracy)
    shifted = np.maximum(agreements(accuracy, 1), agreements(accuracy, -1))
    # the correlation of unrelated columns varies by 1/√n
    chance = 5 / math.sqrt(count)
    hits = (shifted > np.maximum(straight, 0) + chance) & (straight < chance / 2)
    if hits.any():
        yield Finding(
            f"Accuracies of {hits.sum()} configurations, such as "
            f"{measured.table.label(int((shifted * hits).argmax()))}, fit the others only if they "
            "are moved by one sample",
            "nearly certain",
            "Compare each answer with its own reference.",
        )


def other_version(measured: Measured) -> Findings:
    """From some sample on, accuracy is another."""
    if len(measured.few) < 100:
        return
    since, before, jump, spread = jump_of(measured, measured.accuracy)
    count = len(measured.few)
    sure = abs(jump) * math.sqrt(before * (count - before) / count) / max(spread, 1e-9)
    if abs(jump) > 0.1 and sure > 5:
        words = f"{since}, accuracy changes by {jump:+.2f} on average"
        advice = "Was another version of the model measured, or other samples?"
        yield Finding(words, "perhaps", advice)

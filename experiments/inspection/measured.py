"""What a check takes and yields, `Measured` and `Finding`, and the arithmetic that checks share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.common.words import spelled
from knobwise.envs.bandit.budgets import log_measured, subsample
from knobwise.envs.readers.failures import ran
from knobwise.envs.tables.copies import inputs_of
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.time_outs import time_outs

if TYPE_CHECKING:
    from knobwise.experiments.inspection.facts import Facts

MAX_SAMPLES = 20_000
"""Of larger tables every k-th sample is looked at."""
MAX_FITTED = 1000
"""Regressions use at most this many samples."""
MAX_NAMED = 500
"""Single ones of more configurations are not looked at."""
MOST = 0.9
"""So large a share is nearly all."""
RARE = 1e-4
"""A sample that so few others equal by chance has a copy, if one equals it."""
PENALTIES = (1e-4, 1e-2, 1.0)
"""Of the regressions, as shares of the number of samples."""


class Measured:
    """What the checks look at: n samples, C configurations, d features.

    Of a larger table these are at most `MAX_SAMPLES`, in their order.

    Attributes:
        table: the whole profile.
        facts: see `inspect_table`; empty before training.
        accuracy, log_ms: float64 [n, C], NaN where not profiled; ln of the latencies.
        timed_out: bool [n, C], the cells that look like time-outs.
        late: bool [n, C, R], the measurements that are as long as these.
        scored: bool [n, C], the time-outs with an accuracy that measurements in time cannot have
            given them.
        empty: bool [n, C], the cells that cost nothing, and are wrong.
        log_answered: float64 [n, C], `log_ms` without these.
        repeats_ms: float64 [n, C, R], as in the profile.
        ran: bool [n, C], whether the configuration was measured in the data set of the sample.
        few: int64 [m], the samples that regressions are fitted on.
        u, s: float64 [m, k] and [k], of the singular value decomposition of their features,
            normalised.
        names: of the d features.
        features: float32 [n, d], as they are.
        ids, datasets, split_keys: of the n samples; data sets and keys by number.
        rows: int64 [n], the samples in the table.
    """

    def __init__(self, table: ProfileTable, facts: Facts | None = None) -> None:
        rows = subsample(torch.arange(table.num_samples), MAX_SAMPLES)
        few = subsample(torch.arange(len(rows)), MAX_FITTED)
        self.table = table
        self.facts = facts or {}
        self.accuracy = table.accuracy[rows].double().numpy()
        self.log_ms = log_measured(table.latency_ms[rows].double()).numpy()
        times = table.latency_ms[rows].numpy()
        self.timed_out = time_outs(times, self.accuracy == 0)
        self.repeats_ms = table.measurements_ms[rows].double().numpy()
        shortest = times[self.timed_out].min(initial=np.inf)
        self.late = self.repeats_ms >= shortest
        count = (~np.isnan(self.repeats_ms)).sum(2)
        in_time = (self.repeats_ms < shortest).sum(2) / np.maximum(count, 1)
        self.scored = self.timed_out & (self.accuracy > in_time + 1e-6)
        self.empty = (self.repeats_ms == 0).any(2) & (self.accuracy == 0)
        self.log_answered = np.where(self.timed_out | self.empty, np.nan, self.log_ms)
        self.ran = ran(table)[rows].numpy()
        self.few = few.numpy()
        x = FeatureNormaliser.fit(table, rows[few]).of_rows(table, rows[few]).double()
        self.u, self.s, _ = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
        self.names = []
        for name in table.features:
            for column in table.block_columns(name):
                self.names += column.labels
        self.features = torch.cat([torch.zeros(len(rows), 0), *table.blocks(rows).values()], 1)
        samples = rows.numpy()  # numpy takes a tensor of one number as a number
        self.ids = np.array(table.sample_ids)[samples]
        self.datasets = np.unique(table.dataset_names, return_inverse=True)[1][samples]
        keys = np.unique(table.split_keys, axis=0, return_inverse=True)[1]
        self.split_keys = keys.reshape(-1)[samples]
        self.rows = samples

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a number for each of the n samples, int64 [n], which those with equal features and
        texts share; and whether so much is equal by chance hardly ever, bool [n]."""
        table = self.table
        # what encodes a text adds nothing to it, and a table may name an image anew for each
        # question
        features = {n: block for n, block in table.features.items() if n not in table.texts}
        inputs = inputs_of(replace(table, features=features, image_ids=()))
        return inputs.number[self.rows], (inputs.sure | (inputs.by_chance < RARE))[self.rows]

    def labels(self, configurations: np.ndarray) -> str:
        """Return the names of the first three of these configurations, bool [C]."""
        return ", ".join(map(self.table.label, np.flatnonzero(configurations)[:3]))


FAILED = (
    "If these requests failed, they were late and wrong: give them accuracy 0, and the latency "
    "after which they were given up."
)
"""What to do with failures. Without them, or with what little they cost, the configuration that
fails most looks best."""
CERTAIN = ("certain", "nearly certain")
SURE = (*CERTAIN, "likely", "perhaps")
"""How sure a finding may be, the most certain first; the others are likely."""


class Finding(NamedTuple):
    """Something that was noticed."""

    what: str
    """What it is, and where; without advice a sentence of its own."""
    sure: str
    """How sure that is, of `SURE`."""
    advice: str = ""
    """What to do."""
    refused: bool = False
    """Whether nothing can be trained with it."""

    def __str__(self) -> str:
        return f"{self.what} ({self.sure}). {self.advice}" if self.advice else self.what


Findings = Iterator[Finding]


def named_configurations(measured: Measured) -> dict[str, np.ndarray]:
    """Return which configurations, bool [C], a name stands for: that of a value of a knob, or of
    a single configuration, unless there are very many."""
    table = measured.table
    groups = {}
    for knob, codes in zip(table.knobs, table.configurations.numpy().T, strict=True):
        for place, value in enumerate(knob.values):
            groups[f"{knob.name}={spelled(value)}"] = codes == place
    for place in range(table.num_configurations * (table.num_configurations <= MAX_NAMED)):
        groups[table.label(place)] = np.arange(table.num_configurations) == place
    return {name: has for name, has in groups.items() if not has.all()}


def setting_of(measured: Measured, cells: np.ndarray) -> str:
    """Say which configuration, or else which value of a knob, nearly all of these cells, bool
    [n, C], have, as in ", all with model=large"; "" where there is none."""
    counts = cells.sum(0)
    named = ""
    fewest = len(counts)
    for name, has in named_configurations(measured).items():
        count = counts[has].sum()
        if count >= MOST * counts.sum() and has.sum() < fewest:
            fewest = has.sum()
            how_many = "all" if count == counts.sum() else f"{count} of them"
            named = f", {how_many} with {name}"
    return named


def correlations(x: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the absolute correlation of columns of x, float64 [m, d], with targets [m, k], over
    the rows in which a target is known: [d, k]."""
    x = standardise(fill_with_means(x))
    known = (~np.isnan(targets)).astype(np.float64)
    t = np.nan_to_num((targets - np.nanmean(targets, 0)) / np.nanstd(targets, 0))
    count = known.sum(0)
    sums = x.T @ known
    # the targets have mean 0 and variance 1 over the rows that are known
    variance = (x**2).T @ known / count - (sums / count) ** 2
    # a column that never varies over these rows has no correlation
    return np.nan_to_num(
        np.abs(x.T @ t / count) / np.sqrt(np.where(variance > 1e-9, variance, np.nan))
    )


def fill_with_means(values: np.ndarray) -> np.ndarray:
    """Return columns with the mean in the place of NaN."""
    return np.where(np.isnan(values), np.nan_to_num(np.nanmean(values, 0)), values)


def standardise(values: np.ndarray) -> np.ndarray:
    """Return columns with mean 0 and variance 1, or 0 where they never vary."""
    centred = values - values.mean(0)
    deviation = centred.std(0)
    return centred / np.where(deviation > 1e-12, deviation, np.inf)


def ridge_residuals(measured: Measured, y: np.ndarray) -> np.ndarray:
    """Return what ridge regression on the features leaves of y, float64 [m, k], where the sample
    itself was left out; of each column with the best penalty."""
    best = np.full(y.shape[1], np.inf)
    left = np.empty_like(y)
    projected = measured.u.T @ (y - y.mean(0))
    for penalty in PENALTIES:
        kept = measured.s**2 / (measured.s**2 + penalty * len(y))
        fitted = y.mean(0) + measured.u @ (kept[:, None] * projected)
        # the diagonal of the projection says how much a sample pulls its own prediction
        own_pull = measured.u**2 @ kept + 1 / len(y)
        errors = (y - fitted) / np.maximum(1 - own_pull, 1e-6)[:, None]
        better = (errors**2).mean(0) < best
        left[:, better] = errors[:, better]
        best = np.minimum(best, (errors**2).mean(0))
    return left


def agreements(values: np.ndarray, shift: int = 0) -> np.ndarray:
    """Return the correlation of each column, float64 [n, C], moved by so many rows, with the sum of
    the other columns: [C]; 0 for a column that never varies."""
    centred = np.nan_to_num(values - np.nanmean(values, 0))
    others = centred.sum(1, keepdims=True) - centred
    moved = np.roll(centred, shift, 0)
    return np.nan_to_num((moved * others).mean(0) / (moved.std(0) * others.std(0)))


def gaps_of(logs: np.ndarray, fewest: int) -> tuple[np.ndarray, np.ndarray]:
    """Look in each column for two groups of values that are a thousand or a million apart, with
    nothing between them.

    Args:
        logs: float64 [n, C], NaN where unknown.
        fewest: how many values each group must have.

    Returns:
        Whether a column has such groups, bool [C]; which values are in the smaller, bool [n, C].
    """
    parted = np.zeros(logs.shape[1], bool)
    if len(logs) < 2 * fewest:
        return parted, np.zeros(logs.shape, bool)
    ordered = np.sort(logs, 0)
    count = (~np.isnan(logs)).sum(0)
    # the group below a step has so many values
    size = np.arange(1, len(logs))[:, None]
    steps = np.where((size >= fewest) & (count - size >= fewest), np.diff(ordered, axis=0), 0.0)
    below = steps.argmax(0)
    columns = np.arange(logs.shape[1])
    border = ordered[below, columns]
    factor = ordered[(below + count) // 2, columns] - ordered[below // 2, columns]
    for unit in (1e3, 1e6):
        parted |= np.abs(factor - math.log(unit)) < math.log(4)
    return parted & (steps.max(0) > math.log(30)), logs <= border


def numbers_of(rows: Tensor) -> np.ndarray:
    """Return a number for each row, float32 [n, d] with d > 0; rows that are equal bit for bit have
    the same."""
    return torch.unique(rows.view(torch.int32), return_inverse=True, dim=0)[1].numpy()


def expected_of(values: np.ndarray) -> np.ndarray:
    """Return what the row and the column of each value, float64 [n, C], let expect: their effects
    add up, and each is a median."""
    known = torch.from_numpy(values)
    of_row = torch.zeros(len(known), 1, dtype=torch.float64)
    for _ in range(3):
        of_column = (known - of_row).nanmedian(0).values
        of_row = (known - of_column).nanmedian(1, keepdim=True).values
    return (of_row + of_column).numpy()


def levels_of(measured: Measured, values: np.ndarray) -> np.ndarray:
    """Return how far the values of each sample, float64 [n, C], are above others on average, beyond
    what data set and features explain: [m], of the samples `few`, in their order."""
    values = values[measured.few]
    level = np.nanmean(values - np.nanmean(values, 0), 1)
    # data sets may differ, and stand one after the other
    datasets = measured.datasets[measured.few]
    level -= (np.bincount(datasets, level) / np.bincount(datasets))[datasets]
    return ridge_residuals(measured, level[:, None])[:, 0]


def by_numbers(ids: np.ndarray) -> np.ndarray:
    """Sort ids [n] by the numbers in them, q2 before q10: their positions, int64 [n]. Ids without
    numbers come first, as they stand."""
    numbers = [tuple(map(int, re.findall("[0-9]+", each))) for each in ids]
    return np.array(sorted(range(len(ids)), key=numbers.__getitem__))


def orders_of(measured: Measured) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the orders in which the samples `few` may have been measured, each with what a sentence
    says of it: positions, int64 [m].

    One is that of the profile. The other is by the numbers in ids, since readers sort names as
    text, with q10 before q2.
    """
    count = len(measured.few)
    yield "", np.arange(count)
    numbered = by_numbers(measured.ids[measured.few])
    if (numbered != np.arange(count)).any():
        yield " by the numbers in ids", numbered


class Jump(NamedTuple):
    """Where levels are parted best into earlier and later ones."""

    since: str
    """The sample that is the first later one, and in which order."""
    before: int
    """How many samples are earlier."""
    size: float
    """By how much later ones are higher on average."""
    spread: float
    """The standard deviation on both sides."""


def jump_of(measured: Measured, values: np.ndarray) -> Jump:
    """Return the largest jump of the levels of values, float64 [n, C], from some sample on, in any
    of the orders in which the samples may have been measured."""
    levels = levels_of(measured, values)
    jumps = []
    for words, order in orders_of(measured):
        before, size, spread = _parted(levels[order])
        sample = measured.ids[measured.few[order[before]]]
        jumps.append(Jump(f"From sample {sample} on{words}", before, size, spread))
    return max(jumps, key=lambda jump: abs(jump.size))


def _parted(levels: np.ndarray) -> tuple[int, float, float]:
    """Find the place that parts earlier from later levels, float64 [m], best, not at the ends.

    Returns: the position of the first later level, by how much later ones are higher on average,
    and the standard deviation on both sides.
    """
    count = len(levels)
    at = np.arange(1, count)
    before = np.cumsum(levels)[:-1] / at
    jumps = (levels.sum() - before * at) / (count - at) - before
    # few samples at an end may differ by chance
    inside = np.minimum(at, count - at) > max(20, 0.05 * count)
    place = int((np.abs(jumps) * np.sqrt(at * (count - at)) * inside).argmax())
    variances = levels[: place + 1].var(), levels[place + 1 :].var()
    return place + 1, float(jumps[place]), math.sqrt(sum(variances) / 2)

"""Samples that are copies of others under another id: one input, of which a split would show one
copy in training and another in the test."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import joint_codes

FEWEST_COLUMNS = 16
"""Samples that are equal in so many columns are hardly so by chance."""
MOST_LETTERS = 40
"""Nor are those that have a longer text in common."""
COMMON = 0.25
"""A number that a larger share of the samples has says little: a flag, or a constant."""
COMMON_TEXT = 0.1
"""The same of a text: a kind of sample, or an instruction."""
MOST_ZEROS = 5
"""A 0 that is so many times as frequent as other numbers of its column stands for none."""
LOOKED_AT = 1000
"""So many samples tell how common a value is."""


class Inputs(NamedTuple):
    """What the samples of a table are to a policy: features, texts and images."""

    number: np.ndarray
    """int64 [N], from 0; samples with equal inputs have the same."""
    sure: np.ndarray
    """bool [N], whether the sample is a copy: equal to another one, and not by chance, since they
    have a text of more than `MOST_LETTERS` in common, or `FEWEST_COLUMNS` numbers."""
    by_chance: np.ndarray
    """float64 [N], how many other samples would equal this one if columns had nothing to do with
    each other; infinite where none does."""


def inputs_of(table: ProfileTable) -> Inputs:
    """Compare the samples of a table with each other; without features, each is alone."""
    codes = [_equal_rows(block.numpy()) for block in table.features.values()]
    codes += [_numbered(texts) for texts in table.texts.values()]
    if not codes:
        everyone = np.arange(table.num_samples)
        return Inputs(everyone, everyone < 0, np.full(table.num_samples, np.inf))
    if table.image_ids:
        codes.append(_numbered(table.image_ids))
    number = joint_codes(*codes)
    first, times = np.unique(number, return_index=True, return_counts=True)[1:]
    # the first of the samples that are equal stands for all
    several = first[times > 1]
    columns = np.zeros(len(several), np.int64)
    surely = np.zeros(len(several), bool)
    log_chance = np.full(len(several), math.log(table.num_samples))
    for shares, letters in _shares(table, several):
        log_chance += np.log(shares)
        columns += shares <= COMMON
        surely |= (shares <= COMMON_TEXT) & (letters > MOST_LETTERS)
        surely |= columns >= FEWEST_COLUMNS
        if surely.all():
            break
    sure = np.zeros(len(first), bool)
    by_chance = np.full(len(first), np.inf)
    sure[times > 1] = surely
    by_chance[times > 1] = np.exp(log_chance)
    return Inputs(number, sure[number], by_chance[number])


def with_copies_together(table: ProfileTable) -> ProfileTable:
    """Return a table in which copies of a sample are in one cluster, so that no split parts them;
    itself if there are none, or those that there are belong together already.

    A split that the file fixes stays as it is; copies in several of its parts are noted.
    """
    inputs = inputs_of(table)
    if not inputs.sure.any():
        return table
    # what is no copy has a number of its own
    alone = len(inputs.number) + np.arange(len(inputs.number))
    copies = np.where(inputs.sure, inputs.number, alone)
    notes = []
    if table.parts:
        parts = _numbered(table.parts)
        if torn := int(_are_parted(copies, parts).sum()):
            notes.append(
                f"{torn} samples have copies under other ids in another part of the split that "
                "the file fixes, which flatters results: give copies the same `split`"
            )
        copies = joint_codes(copies, parts)
    units = _numbered(table.split_keys)
    parted = _are_parted(copies, units)
    if parted.any():
        kept = len(np.unique(copies[parted]))
        examples = [table.sample_ids[row] for row in np.flatnonzero(copies == copies[parted][0])]
        notes.append(
            f"{parted.sum()} samples are copies under other ids of {kept} input{'s' * (kept > 1)}, "
            f"such as {', '.join(examples[:3])}: copies stay in one part of splits and folds"
        )
        names = ["/".join(key).removeprefix("/") for key in table.split_keys]
        clusters = tuple(names[row] for row in _first_connected(units, copies).tolist())
        table = replace(table, clusters=clusters)
    return replace(table, notes=(*table.notes, *notes)) if notes else table


def _shares(table: ProfileTable, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return for each column of the features, and each text, which share of the samples has the
    value of each of these rows, int64 [k], and how many letters that has: float64 and int64 [k].

    What is missing counts as common, and so does a 0 that says so, see `_known`. Numbers have no
    letters.
    """
    step = max(1, math.ceil(table.num_samples / LOOKED_AT))
    looked_at = np.arange(0, table.num_samples, step)
    for texts in table.texts.values():
        letters = np.array([_letters(texts[row]) for row in rows])
        yield _share(_numbered(texts), rows, looked_at), letters
    none = np.zeros(len(rows), np.int64)
    for name, block in table.features.items():
        values = block.numpy()
        place = 0
        for column in table.block_columns(name):
            width = len(column.labels)
            if column.categories is None:
                yield _share(_known(values[:, place], looked_at), rows, looked_at), none
            else:
                # the places of a text are one column
                chosen = values[:, place : place + width].argmax(1)
                lengths = np.array([*map(len, column.categories), 0])
                yield _share(chosen, rows, looked_at), lengths[chosen[rows]]
            place += width


def _known(numbers: np.ndarray, looked_at: np.ndarray) -> np.ndarray:
    """Return a column of numbers, [N], with NaN for 0 where that is far more frequent than others
    are: nothing was found then, and many columns say so together."""
    others = numbers[looked_at]
    others = others[(others != 0) & ~np.isnan(others)]
    usual = len(others) / max(1, len(np.unique(others)))
    if (numbers[looked_at] == 0).sum() <= MOST_ZEROS * usual:
        return numbers
    return np.where(numbers == 0, np.nan, numbers)


def _share(values: np.ndarray, rows: np.ndarray, looked_at: np.ndarray) -> np.ndarray:
    """Return which share of the samples looked at has the value, of [N], of each row: float64 [k];
    1 where it is NaN."""
    known = np.sort(values[looked_at])
    wanted = values[rows]
    count = np.searchsorted(known, wanted, "right") - np.searchsorted(known, wanted, "left")
    # each row stands for two samples or more
    return np.where(np.isnan(wanted), 1.0, np.maximum(count, 1) / len(known))


def _letters(text: str) -> int:
    """Return how many letters a text has; of a chat, the last message of the user."""
    if text.startswith("["):
        try:
            words = [each["content"] for each in json.loads(text) if each["role"] == "user"]
            return len(words[-1]) if isinstance(words[-1], str) else len(json.dumps(words[-1]))
        except (ValueError, TypeError, KeyError, IndexError):
            # no chat, but a text that begins like one
            pass
    return len(text.strip())


def _equal_rows(block: np.ndarray) -> np.ndarray:
    """Return a number for each row of a block [N, d], int64 [N]; rows that are equal bit for bit
    have the same."""
    rows = np.ascontiguousarray(block)
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1)
    return np.unique(whole, return_inverse=True)[1].reshape(-1)


def _numbered(names: Sequence[Hashable]) -> np.ndarray:
    """Return a number for each name, int64 [N], in the order in which they come first."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def _are_parted(groups: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return which samples are in a group that has samples of several units, bool [N]."""
    number = np.unique(groups, return_inverse=True)[1]
    lowest = np.full(number.max() + 1, len(units))
    highest = np.zeros_like(lowest)
    np.minimum.at(lowest, number, units)
    np.maximum.at(highest, number, units)
    return (lowest < highest)[number]


def _first_connected(*groupings: np.ndarray) -> np.ndarray:
    """Return for each sample the first one, int64 [N], that it belongs together with if all do that
    share a group in one of the groupings, int64 [N] each."""
    first = np.arange(len(groupings[0]))
    numbers = [np.unique(groups, return_inverse=True)[1] for groups in groupings]
    while True:
        before = first
        for number in numbers:
            lowest = np.full(number.max() + 1, len(first))
            np.minimum.at(lowest, number, first)
            first = lowest[number]
        if (first == before).all():
            return first

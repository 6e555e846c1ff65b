"""Splits of rows into those to fit on and those to judge on, by shares or as a file fixes them.

`divisions` has further splits of profiles: in folds, or with one data set left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import ProfileTable

FOLDS = 5
Rows = NDArray[np.int64]
Fold = tuple[Rows, Rows]
"""Positions of samples to fit on and to hold out."""

ORDERS = 100
"""Random orders that are tried until no part is empty, where groups differ in size."""
FEW = 8
"""Codes are counted, not sorted, where there are at most so many times as many as rows."""


class Split(NamedTuple):
    """Row numbers of a table, int64, disjoint.

    Fit on `train`, choose on `validation`, report on `test`.
    """

    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def fitted(self) -> Tensor:
        """All rows but those of the test part: what a deployed policy is fitted and chosen on."""
        return torch.cat([self.train, self.validation])


def split_groups(
    groups: Sequence[Hashable],
    train: float,
    validation: float,
    seed: int,
    *,
    table: str,
    rows: str = "samples",
    allow_no_test: bool = False,
    weighted: bool = False,
) -> Split:
    """Split rows at random so that no group is torn apart.

    Args:
        groups: the group of each row, such as its image.
        train, validation: shares of the groups, or of the rows if `weighted`; the rest is the test
            part.
        seed: of the random order of the groups.
        table, rows: names of the data in errors.
        allow_no_test: the test part may be empty.
        weighted: groups may differ in size: each goes where most of its rows fall.

    Raises:
        InputError: if another part is empty.
    """
    # a large group may take the place of a whole part: then another order is drawn
    for attempt in range(ORDERS if weighted else 1):
        position, count = _shuffled(groups, seed, weighted, attempt)
        # borders in the random order of the groups
        first = round(train * count)
        second = round((train + validation) * count)
        parts = [position < first, (position >= first) & (position < second), position >= second]
        needed = parts[: 2 if allow_no_test else 3]
        if 0 < first < second <= count - (not allow_no_test) and all(map(torch.any, needed)):
            of_train, of_validation, of_test = (part.nonzero().squeeze(1) for part in parts)
            return Split(train=of_train, validation=of_validation, test=of_test)
    raise InputError(
        f"{table}: train={train}, validation={validation} leave a part of its "
        f"{len(set(groups))} {rows} (or images, or groups) empty; test gets what both leave, and "
        "each part needs at least one; give train and validation as 0.8 and 0.1"
    )


def split_fixed(
    parts: Sequence[str],
    groups: Sequence[Hashable],
    train: float,
    validation: float,
    seed: int,
    table: str,
    weighted: bool = False,
) -> Split:
    """Return the split that a file fixes by the name of each row's part.

    If it has no validation part, that comes out of the training part, in the ratio of the shares.
    Raises InputError, with the name of the table, if a part is missing or a group torn apart.
    """
    # the parts that each image is in
    parts_of = Counter(group for group, _ in {*zip(groups, parts, strict=True)})
    torn = [group for group in groups if parts_of[group] > 1]
    if torn:
        raise InputError(
            f"{table}: {len(set(torn))} images or groups are in several parts of its split (the "
            f"first: {torn[0]!r}); give all samples of an image or group the same `split`"
        )
    names = np.array(parts)
    fixed = Split(*(torch.from_numpy((names == part).nonzero()[0]) for part in Split._fields))
    missing = [part for part, rows in fixed._asdict().items() if not len(rows)]
    if missing == ["validation"]:
        drawn = split_groups(
            [groups[row] for row in fixed.train.tolist()],
            train / (train + validation),
            validation / (train + validation),
            seed,
            table=f"the training part of {table}",
            allow_no_test=True,
            weighted=weighted,
        )
        return Split(fixed.train[drawn.train], fixed.train[drawn.validation], fixed.test)
    if missing:
        raise InputError(
            f"{table} fixes its split, but no sample is in: {', '.join(missing)}. Name the parts "
            "train, validation and test, or leave out the column `split`"
        )
    return fixed


def _shuffled(
    groups: Sequence[Hashable], seed: int, weighted: bool, attempt: int = 0
) -> tuple[Tensor, int]:
    """Draw a random order of the groups.

    Args:
        attempt: further orders of the same seed.

    Returns: the middle of each row's group in the order, float64 [n], and how long the order is.
    A group is as long as it has rows, or without `weighted` 1.
    """
    numbers: dict[Hashable, int] = {}
    group_of_row = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(attempt + 1):
        order = torch.randperm(len(numbers), generator=generator)
    lengths = torch.ones(len(numbers), dtype=torch.int64)
    if weighted:
        lengths = group_of_row.bincount()
    return midpoints(order, lengths)[group_of_row], int(lengths.sum())


def midpoints(order: Tensor, lengths: Tensor) -> Tensor:
    """Return the midpoint of each group, float64 [G], after laying groups of `lengths` end to end
    in `order`, int64 [G] each."""
    ordered = lengths[order].double()
    return (ordered.cumsum(0) - ordered / 2)[order.argsort()]


def cluster_numbers(table: ProfileTable, rows: Tensor) -> Tensor:
    """Return the number of the cluster or image of each of these samples int64 [n], from 0 on:
    int64 [n]. Where there are none each sample has its own."""
    keys = table.split_keys
    numbers: dict[tuple[str, str], int] = {}
    return torch.tensor([numbers.setdefault(keys[row], len(numbers)) for row in rows.tolist()])


def folds_of(table: ProfileTable, rows: Tensor, seed: int, count: int = FOLDS) -> list[Fold]:
    """Return row positions to fit on and to hold out, `count` times.

    Samples of the same image or cluster stay together.
    """
    from sklearn.model_selection import GroupKFold

    keys = table.split_keys
    numbers: dict[tuple[str, str], int] = {}
    units = [numbers.setdefault(keys[row], len(numbers)) for row in rows.tolist()]
    if len(numbers) < 2:
        return [(np.arange(len(rows)), np.arange(len(rows)))]
    division = GroupKFold(min(count, len(numbers)), shuffle=True, random_state=seed)
    return list(division.split(units, groups=units))


def joint_codes(*codes: Rows) -> Rows:
    """Return numbers 0, 1, … for the rows, int64 [n]; rows that are equal in all codes, which are
    whole numbers from 0, have the same."""
    joined = np.zeros_like(codes[0])
    for each in codes:
        size = each.max() + 1
        joined = _dense(joined * size + each, (joined.max() + 1) * size)
    return joined


def _dense(codes: Rows, size: int) -> Rows:
    """Return the ranks of codes from 0 to `size` − 1 among those that occur, int64 [n]."""
    if size > FEW * len(codes):
        return np.unique(codes, return_inverse=True)[1]
    # counting takes a fraction of the time of sorting
    occurs = np.zeros(size, bool)
    occurs[codes] = True
    return (occurs.cumsum() - 1)[codes]


def first_rows(codes: Rows) -> Rows:
    """Return the first row of each of the codes 0, 1, …, all of which occur, int64 [codes]."""
    first = np.empty(codes.max() + 1, np.int64)
    # of rows with one code the last that is written stays
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    return first

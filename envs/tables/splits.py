"""Splits of rows into those to fit on and those to judge on, by shares or as a file fixes them.

`divisions` has further splits of profiles: in folds, or with one data set left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError


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
) -> Split:
    """Split rows at random so that no group is torn apart.

    Args:
        groups: the group of each row, such as its image.
        train, validation: shares of the groups; the rest is the test part.
        seed: of the random order of the groups.
        table, rows: names of the data in errors.
        allow_no_test: the test part may be empty.

    Raises:
        InputError: if another part is empty.
    """
    position, count = _shuffled(groups, seed)
    # borders in the random order of the groups
    first = round(train * count)
    second = round((train + validation) * count)
    if not 0 < first < second <= count - (not allow_no_test):
        raise InputError(
            f"{table}: shares train={train}, validation={validation} leave a part of its {count} "
            f"{rows} (or images) empty; each of train, validation and the rest needs at least one"
        )
    parts = [position < first, (position >= first) & (position < second), position >= second]
    return Split(*(part.nonzero().squeeze(1) for part in parts))


def split_fixed(
    parts: Sequence[str],
    groups: Sequence[Hashable],
    train: float,
    validation: float,
    seed: int,
    table: str,
) -> Split:
    """Return the split that a file fixes by the name of each row's part.

    If it has no validation part, that comes out of the training part, in the ratio of the shares.
    Raises InputError, with the name of the table, if a part is missing or a group torn apart.
    """
    names = np.array(parts)
    fixed = Split(*(torch.from_numpy((names == part).nonzero()[0]) for part in Split._fields))
    missing = [part for part, rows in fixed._asdict().items() if not len(rows)]
    if missing == ["validation"]:
        position, count = _shuffled([groups[row] for row in fixed.train.tolist()], seed)
        first = round(train / (train + validation) * count)
        if 0 < first < count:
            return Split(fixed.train[position < first], fixed.train[position >= first], fixed.test)
    if missing:
        raise InputError(
            f"{table} fixes its split, but no sample is in: {', '.join(missing)}. Name the parts "
            "train, validation and test, or leave out the column `split`"
        )
    # count the parts that each image is in
    parts_of = Counter(group for group, _ in {*zip(groups, parts, strict=True)})
    if torn := [group for group in dict.fromkeys(groups) if parts_of[group] > 1]:
        raise InputError(
            f"{table}: {len(torn)} images are in several parts of its split (the first: "
            f"{torn[0]!r}); give all samples of an image the same `split`"
        )
    return fixed


def _shuffled(groups: Sequence[Hashable], seed: int) -> tuple[Tensor, int]:
    """Draw a random order of the groups.

    Returns: the position of each row's group in it, int64 [n], and the number of groups.
    """
    numbers: dict[Hashable, int] = {}
    group_of_row = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups])
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return order.argsort()[group_of_row], len(numbers)

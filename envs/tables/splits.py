"""Splits into rows to fit on and rows to judge: by shares, in folds, or one data set left out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import ProfileTable


class Split(NamedTuple):
    """Row numbers of a table, int64, disjoint.

    Fit on `train`, choose on `validation`, report on `test`.
    """

    train: Tensor
    validation: Tensor
    test: Tensor


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
    first = round(train * count)
    second = round((train + validation) * count)
    if not 0 < first < second <= count - (not allow_no_test):
        raise InputError(
            f"{table}: shares train={train}, validation={validation} leave a part of its {count} "
            f"{rows} (or images) empty; each of train, validation and the rest needs at least one"
        )
    parts = [position < first, (position >= first) & (position < second), position >= second]
    return Split(*(part.nonzero().squeeze(1) for part in parts))


def fingerprints_of(table: ProfileTable, rows: Tensor) -> list[str]:
    """Return a short text for each of these samples (int64 [n]) that identifies its input.

    It is a hash of its features, or without features its data set and id, so that the same input
    has the same text in another table.
    """
    if not table.features:
        return [
            f"{table.datasets[row] if table.datasets else ''}/{table.sample_ids[row]}"
            for row in rows.tolist()
        ]
    joined = torch.cat([block[rows] for block in table.features.values()], 1).contiguous().numpy()
    return [hashlib.sha1(row.tobytes()).hexdigest()[:16] for row in joined]


def split_samples(
    table: ProfileTable, train: float = 0.6, validation: float = 0.2, seed: int = 0
) -> Split:
    """Split by sample, or by image where images are known; the rest is the test part.

    A split fixed by the file (`table.parts`) is used as it is; if it has no validation part, that
    comes out of the training part. Deterministic in `seed` and in the order of the samples. Raises
    InputError if the shares leave a part empty, or the fixed split lacks a part or tears an image
    apart.
    """
    # without images every sample is a group
    if not table.image_ids and not table.parts:
        return split_groups(
            range(table.num_samples), train, validation, seed, table=f"profile {table.name!r}"
        )
    groups = list(zip(table.dataset_names, table.image_ids or table.sample_ids, strict=True))
    if not table.parts:
        return split_groups(groups, train, validation, seed, table=f"profile {table.name!r}")
    names = np.array(table.parts)
    fixed = Split(*(torch.from_numpy((names == part).nonzero()[0]) for part in Split._fields))
    missing = [part for part, rows in fixed._asdict().items() if not len(rows)]
    # validation comes out of the training part
    if missing == ["validation"]:
        position, count = _shuffled([groups[row] for row in fixed.train.tolist()], seed)
        first = round(train / (train + validation) * count)
        if 0 < first < count:
            return Split(fixed.train[position < first], fixed.train[position >= first], fixed.test)
    if missing:
        raise InputError(
            f"profile {table.name!r} fixes its split, but no sample is in: {', '.join(missing)}. "
            "Name the parts train, validation and test, or leave out the column `split`"
        )
    # count the parts that each image is in
    parts_of = Counter(group for group, _ in dict.fromkeys(zip(groups, table.parts, strict=True)))
    if torn := [group for group, count in parts_of.items() if count > 1]:
        raise InputError(
            f"profile {table.name!r}: {len(torn)} images are in several parts of its split (the "
            f"first: {torn[0][1]!r}); give all samples of an image the same `split`"
        )
    return fixed


def _shuffled(groups: Sequence[Hashable], seed: int) -> tuple[Tensor, int]:
    """Draw a random order of the groups.

    Returns: the position of each row's group in it, int64 [n], and the number of groups.
    """
    # a range has a group for each row
    if isinstance(groups, range):
        group_of_row = torch.arange(len(groups))
        count = len(groups)
    else:
        numbers: dict[Hashable, int] = {}
        group_of_row = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups])
        count = len(numbers)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.argsort()[group_of_row], count


def leave_one_out(table: ProfileTable, validation: float = 0.25, seed: int = 0) -> dict[str, Split]:
    """Return for each data set the split that tests on all of its samples.

    The others are divided into training and validation, data set by data set and by image or
    sample, without those that show an image of the test part (see `unseen`). A split fixed by the
    file is ignored. Raises InputError if there is one data set, or too few samples.
    """
    names = np.array(table.dataset_names)
    known = sorted(set(table.dataset_names))
    if len(known) < 2:
        raise InputError(
            f"profile {table.name!r} has one data set, {known[0]!r}; leaving one out needs at "
            "least two"
        )
    return {
        name: _held_out(table, torch.from_numpy(names == name), validation, seed) for name in known
    }


def unseen(table: ProfileTable, split: Split) -> Split:
    """Return the split without training and validation samples that show an image of the test part.

    Several data sets may show the same images, as coco_vqa and okvqa do. An image id is unique
    inside its data set only, so two samples of different data sets show the same image if their ids
    agree and so does, bit for bit, a feature block. Raises InputError if nothing is left to train
    or to validate on.
    """
    if not table.image_ids or not table.features or len(set(table.dataset_names)) < 2:
        return split
    tested = set().union(*_images(table, split.test))

    def without_tested(rows: Tensor) -> Tensor:
        fresh = [tested.isdisjoint(images) for images in _images(table, rows)]
        return rows[torch.tensor(fresh, dtype=torch.bool)]

    train = without_tested(split.train)
    validation = without_tested(split.validation)
    if not len(train) or not len(validation):
        raise InputError(
            f"profile {table.name!r}: all other samples show images of its test part, so none is "
            "left to fit on"
        )
    return Split(train, validation, split.test)


def budget_rows(table: ProfileTable, split: Split) -> Tensor:
    """Return the rows, int64, that default budgets are taken from.

    These are all rows, but without the test part if it consists of data sets that nothing was
    fitted on, because their latencies are not known beforehand.
    """
    fitted = torch.cat([split.train, split.validation])
    names = np.array(table.dataset_names)
    new = set(names[split.test.numpy()]).isdisjoint(names[fitted.numpy()])
    if new:
        return fitted
    return torch.arange(table.num_samples)


def divide(
    table: ProfileTable,
    train: float = 0.6,
    validation: float = 0.2,
    seed: int = 0,
    leave_out: str | None = None,
    repeats: int = 1,
    folds: int = 0,
    number: int = 0,
) -> Split:
    """Return the split that the settings describe.

    It never fits on samples that show an image of the test part. With `leave_out` or `folds` only
    the ratio of `train` and `validation` counts.

    Args:
        table: the table to split.
        train, validation: shares of the samples (or images).
        seed: of the random order; it rises by one from each of the repeats to the next.
        leave_out: the data set to test on.
        repeats: number of splits by shares.
        folds: number of splits whose test parts together are all samples.
        number: which of the repeats or folds to return.

    Raises:
        InputError: if the data set does not exist, a part would be empty, or there are to be
            several splits and none changes the test part.
    """
    if (repeats > 1 or folds) and (leave_out is not None or table.parts):
        fixed = f"profile {table.name!r}"
        if leave_out is not None:
            fixed = "split.leave_out"
        setting = f"split.repeats={repeats}"
        if folds:
            setting = f"split.folds={folds}"
        raise InputError(f"{setting}: {fixed} fixes the test part, which all splits would share")
    if leave_out is None and not folds:
        return unseen(table, table.split(train, validation, seed + number))
    if not min(train, validation) > 0:
        raise InputError(
            f"split.train={train}, split.validation={validation}: both must be positive"
        )
    share = validation / (train + validation)
    if folds:
        # folds are equal stretches of the random order
        fold = (_positions(table, torch.arange(table.num_samples), seed) * folds).long()
        if not fold.bincount(minlength=folds).all():
            few = f"profile {table.name!r} has too few samples (or images)"
            raise InputError(f"split.folds={folds}: {few}")
        return _held_out(table, fold == number, share, seed)
    splits = leave_one_out(table, share, seed)
    if leave_out not in splits:
        raise InputError(f"split.leave_out={leave_out!r}: must be one of {', '.join(splits)}")
    return splits[leave_out]


def _held_out(table: ProfileTable, test: Tensor, validation: float, seed: int) -> Split:
    """Return the split with this test part (bool [N]) and the other rows divided in two.

    Raises InputError if there are too few of them for training and validation.
    """
    rows = (~test).nonzero().squeeze(1)
    validated = _positions(table, rows, seed) < validation
    if not 0 < int(validated.sum()) < len(rows):
        raise InputError(
            f"profile {table.name!r}: {len(rows)} samples cannot be divided into training and "
            f"validation ({validation:.0%})"
        )
    return unseen(table, Split(rows[~validated], rows[validated], test.nonzero().squeeze(1)))


def _images(table: ProfileTable, rows: Tensor) -> list[set[tuple[str, str, bytes]]]:
    """Return the images that each row may show.

    An image is its id with the hash of one of the row's feature blocks that are not missing.
    """
    image_ids = [table.image_ids[row] for row in rows.tolist()]
    images: list[set[tuple[str, str, bytes]]] = [set() for _ in image_ids]
    for name, block in table.features.items():
        values = block[rows].numpy()
        known = ~np.isnan(values).all(1)
        for i in known.nonzero()[0]:
            images[i].add((image_ids[i], name, hashlib.sha1(values[i].tobytes()).digest()))
    return images


def _positions(table: ProfileTable, rows: Tensor, seed: int) -> Tensor:
    """Return the position of each row's image (or sample) in a random order of its data set.

    Positions are float64 [n], evenly in 0 … 1.
    """
    names = np.array(table.dataset_names)[rows.numpy()]
    units = np.array(table.image_ids or table.sample_ids)[rows.numpy()]
    positions = np.empty(len(rows))
    for name in np.unique(names):
        rows_of_dataset = names == name
        distinct, index = np.unique(units[rows_of_dataset], return_inverse=True)
        order = np.random.default_rng(seed).permutation(len(distinct))
        positions[rows_of_dataset] = ((order + 0.5) / len(distinct))[index]
    return torch.from_numpy(positions)

"""Which samples are fitted on and which are judged: with a data set left out, or in folds."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable, Split


def leave_one_out(table: ProfileTable, validation: float = 0.25, seed: int = 0) -> dict[str, Split]:
    """For each data set the split with all of its samples as the test part; the others' are divided, data set by data
    set and by image or sample, into training and validation, without those that show one of its images (see
    `unseen`). A split that the file fixed does not count.

    Args:
        table: with at least two data sets.
        validation: share of the samples of the other data sets.
        seed: of the division.

    Raises:
        InputError: one data set only, or too few samples.
    """
    names, everything = np.array(table.dataset_names), torch.arange(table.num_samples)
    known = sorted(set(table.dataset_names))
    if len(known) < 2:
        raise InputError(f"profile {table.name!r} has one data set, {known[0]!r}; leaving one out needs two at least")
    splits = {}
    for name in known:
        out = torch.from_numpy(names == name)
        splits[name] = unseen(table, Split(*_divided(table, everything[~out], validation, seed), everything[out]))
    return splits


def k_folds(table: ProfileTable, k: int, seed: int = 0, validation: float = 0.25) -> list[Split]:
    """k splits whose test parts are disjoint and together all samples; by image or sample, and every data set is spread
    evenly over them. What shows an image of the test part (see `unseen`) is in no other part. A split that the file
    fixed does not count.

    Args:
        table: the profile.
        k: how many, at least 2.
        seed: of the division.
        validation: share of what is not in the test part.

    Raises:
        InputError: k below 2, or more folds than samples (or images).
    """
    if k < 2:
        raise InputError(f"split.folds={k}: must be at least 2")
    everything = torch.arange(table.num_samples)
    fold = (_places(table, everything, seed) * k).long()
    if int(torch.bincount(fold, minlength=k).amin()) == 0:
        raise InputError(f"split.folds={k}: profile {table.name!r} has too few samples (or images) for as many")
    return [
        unseen(table, Split(*_divided(table, everything[fold != number], validation, seed), everything[fold == number]))
        for number in range(k)
    ]


def unseen(table: ProfileTable, split: Split) -> Split:
    """The split without the training and validation samples that show an image of the test part.

    Inside a data set images are never split apart; but data sets may show the same ones, as coco_vqa and okvqa do. Ids
    of images count inside their data set, so that an image is taken for the same where its id is, and bit for bit a
    feature block. Where images or features are not known nothing is left out.

    Raises:
        InputError: nothing is left to train on or to choose on.
    """
    if not table.image_ids or not table.features or len(set(table.dataset_names)) < 2:
        return split
    shown = [_shows(table, rows) for rows in split]
    judged = set().union(*shown[2])
    train, validation = (
        rows[torch.tensor([judged.isdisjoint(one) for one in of_rows], dtype=torch.bool)]
        for rows, of_rows in zip(split[:2], shown[:2], strict=True)
    )
    if not len(train) or not len(validation):
        raise InputError(
            f"profile {table.name!r}: all samples outside the test part show images of it; nothing is left to fit on"
        )
    return Split(train, validation, split.test)


def budget_rows(table: ProfileTable, split: Split) -> Tensor:
    """The rows, int64, that default budgets are taken from: all of them, or where data sets are judged that none was
    fitted on, those that were: what the left out ones take is not known before."""
    fitted = torch.cat([split.train, split.validation])
    names = np.array(table.dataset_names)
    new = set(names[split.test.numpy()]).isdisjoint(names[fitted.numpy()])
    return fitted if new else torch.arange(table.num_samples)


def divide(
    table: ProfileTable,
    train: float = 0.6,
    validation: float = 0.2,
    seed: int = 0,
    leave_out: str | None = None,
    folds: int | None = None,
    fold: int = 0,
) -> Split:
    """The split that settings ask for: `table.split`, or with a data set left out, or one of several folds; always
    without what shows an image of the test part (`unseen`). For the last two only the ratio of the shares counts.

    Raises:
        InputError: an unknown data set, a fold that does not exist, both asked for, or what the three refuse.
    """
    if leave_out is not None and folds is not None:
        raise InputError("split.leave_out and split.folds: give one of them")
    if folds is None and fold:
        raise InputError(f"split.fold={fold}: give split.folds too, how many there are")
    if leave_out is None and folds is None:
        return unseen(table, table.split(train, validation, seed))
    if not min(train, validation) > 0:
        raise InputError(f"split.train={train}, split.validation={validation}: both must be positive")
    share = validation / (train + validation)
    if leave_out is not None:
        splits = leave_one_out(table, share, seed)
        if leave_out not in splits:
            raise InputError(f"split.leave_out={leave_out!r}: must be one of {', '.join(splits)}")
        return splits[leave_out]
    assert folds is not None  # the only case left
    if not 0 <= fold < folds:
        raise InputError(f"split.fold={fold}: must be in 0 … {folds - 1}")
    return k_folds(table, folds, seed, share)[fold]


def _divided(table: ProfileTable, rows: Tensor, validation: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to fit on and to choose on."""
    held = _places(table, rows, seed) < validation
    if not 0 < int(held.sum()) < len(rows):
        raise InputError(
            f"profile {table.name!r}: {len(rows)} samples cannot be divided into training and validation "
            f"({validation:.0%})"
        )
    return rows[~held], rows[held]


def _shows(table: ProfileTable, rows: Tensor) -> list[set[tuple[str, str, bytes]]]:
    """For each row the images that it may show: its image id with each feature block, one hash of it."""
    blocks = {name: block[rows].numpy() for name, block in table.features.items()}
    known = {name: ~np.isnan(block).all(1) for name, block in blocks.items()}  # what is missing shows nothing
    return [
        {
            (table.image_ids[row], name, hashlib.sha1(block[i].tobytes()).digest())
            for name, block in blocks.items()
            if known[name][i]
        }
        for i, row in enumerate(rows.tolist())
    ]


def _places(table: ProfileTable, rows: Tensor, seed: int) -> Tensor:
    """The place of each row's image (or sample) in a random order of its data set, float64 [n], evenly in 0 … 1."""
    names = np.array(table.dataset_names)[rows.numpy()]
    units = np.array(table.image_ids or table.sample_ids)[rows.numpy()]
    places = np.empty(len(rows))
    for name in np.unique(names):
        mine = names == name
        found, number = np.unique(units[mine], return_inverse=True)
        places[mine] = ((np.random.default_rng(seed).permutation(len(found)) + 0.5) / len(found))[number]
    return torch.from_numpy(places)

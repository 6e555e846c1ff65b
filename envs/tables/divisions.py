"""Splits of a profile: by shares, in folds, or with one data set left out.

Nothing is fitted on images of the test part.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import Split, midpoints


def without_leakage(table: ProfileTable, split: Split) -> Split:
    """Drop training and validation samples that share an image or cluster with the test split.

    Several data sets may show the same images, as coco_vqa and okvqa do. An image id is unique
    inside its data set only, so two samples of different data sets show the same image if their ids
    agree and so does, bit for bit, a feature block. Raises InputError if nothing is left to train
    or to validate on.
    """
    fitted = list(split[:2])
    if table.clusters:
        clusters = np.unique(table.clusters, return_inverse=True)[1]
        tested = clusters[split.test.numpy()]
        fitted = [
            rows[torch.from_numpy(~np.isin(clusters[rows.numpy()], tested))] for rows in fitted
        ]
    if table.image_ids and table.features and len(set(table.dataset_names)) > 1:
        # images of the test part, as every block of features shows them
        test_images = set().union(*_images(table, split.test))
        for i, rows in enumerate(fitted):
            fresh = [test_images.isdisjoint(images) for images in _images(table, rows)]
            fitted[i] = rows[torch.tensor(fresh, dtype=torch.bool)]
    if not all(map(len, fitted)):
        raise InputError(
            f"profile {table.name!r}: every remaining sample shares an image or group with the "
            "test split, so nothing is left to train on"
        )
    train, validation = fitted
    return Split(train, validation, split.test)


def hold_back(table: ProfileTable, split: Split, share: float, seed: int) -> tuple[Split, Tensor]:
    """Hold a share of the training and validation samples back, whole images or clusters.

    Returns:
        The split without them, and their rows, int64 [n].

    Raises:
        InputError: one of the three parts would be empty.
    """
    fitted = split.fitted.sort().values
    held = fitted[_positions(table, fitted, seed) < share]
    train, validation = (part[~torch.isin(part, held)] for part in split[:2])
    if not (len(held) and len(train) and len(validation)):
        raise InputError(
            f"profile {table.name!r}: {len(fitted)} samples for training and validation are too "
            f"few to hold {share:.0%} of them back"
        )
    return Split(train, validation, split.test), held


def budget_rows(table: ProfileTable, split: Split) -> Tensor:
    """Return the rows, int64, that default budgets are taken from.

    These are all rows, but without the test part if it consists of data sets that nothing was
    fitted on, because their latencies are not known beforehand.
    """
    fitted = split.fitted
    names = np.array(table.dataset_names)
    if np.isin(names[split.test.numpy()], names[fitted.numpy()]).any():
        return torch.arange(table.num_samples)
    return fitted


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
        raise InputError(
            f"split.folds={folds}, split.repeats={repeats}: split.leave_out or profile "
            f"{table.name!r} fixes the test part, which all splits would share"
        )
    if leave_out is None and not folds:
        return without_leakage(table, table.split(train, validation, seed + number))
    if not min(train, validation) > 0:
        raise InputError(
            f"split.train={train}, split.validation={validation}: both must be positive"
        )
    # the test part is given: only the ratio of the others counts
    share = validation / (train + validation)
    if folds:
        # folds are equal stretches of the random order
        fold = (_positions(table, torch.arange(table.num_samples), seed) * folds).long()
        if not fold.bincount(minlength=folds).all():
            raise InputError(
                f"split.folds={folds}: profile {table.name!r} has too few samples (or images)"
            )
        return _held_out(table, fold == number, share, seed)
    # one data set left out
    names = np.array(table.dataset_names)
    known = sorted({*table.dataset_names})
    if leave_out not in known or len(known) < 2:
        raise InputError(
            f"split.leave_out={leave_out!r}: must be one of several data sets; profile "
            f"{table.name!r} has {', '.join(known)}"
        )
    return _held_out(table, torch.from_numpy(names == leave_out), share, seed)


def _held_out(table: ProfileTable, test: Tensor, validation: float, seed: int) -> Split:
    """Return the split with this test part (bool [N]) and the other rows divided in two.

    Raises InputError if there are too few of them for training and validation.
    """
    # the other rows, by their place in the random order
    rows = (~test).nonzero().squeeze(1)
    validated = _positions(table, rows, seed) < validation
    if not 0 < int(validated.sum()) < len(rows):
        raise InputError(
            f"profile {table.name!r}: {len(rows)} samples cannot be divided into training and "
            f"validation ({validation:.0%})"
        )
    return without_leakage(
        table, Split(rows[~validated], rows[validated], test.nonzero().squeeze(1))
    )


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
    """Return the position of each row's image, cluster or sample in a random order of its data set.

    Positions are float64 [n], evenly in 0 … 1. Clusters may be in several data sets, so these have
    one order, in which a cluster is as long as it has rows.
    """
    names = np.array(table.dataset_names)[rows.numpy()]
    units = np.array(table.clusters or table.image_ids or table.sample_ids)[rows.numpy()]
    if table.clusters:
        names = np.zeros(len(rows))
    positions = np.empty(len(rows))
    # each data set has an order of its own
    for name in np.unique(names):
        rows_of_dataset = names == name
        distinct, index = np.unique(units[rows_of_dataset], return_inverse=True)
        place = np.random.default_rng(seed).permutation(len(distinct))
        lengths = np.bincount(index) if table.clusters else np.ones(len(distinct), np.int64)
        middle = midpoints(torch.from_numpy(place.argsort()), torch.from_numpy(lengths))
        positions[rows_of_dataset] = middle.numpy()[index] / lengths.sum()
    return torch.from_numpy(positions)

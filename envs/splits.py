"""Which samples are fitted on and which are judged: with a data set left out, or in folds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from knobwise.envs.errors import InputError
from knobwise.envs.table import ProfileTable, Split


def leave_one_out(table: ProfileTable, validation: float = 0.25, seed: int = 0) -> dict[str, Split]:
    """For each data set the split with all of its samples as the test part; the others' are divided, data set by data
    set and by image or sample, into training and validation. A split that the file fixed does not count.

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
        splits[name] = Split(*_divided(table, everything[~out], validation, seed), everything[out])
    return splits


def k_folds(table: ProfileTable, k: int, seed: int = 0, validation: float = 0.25) -> list[Split]:
    """k splits whose test parts are disjoint and together all samples; by image or sample, and every data set is spread
    evenly over them. A split that the file fixed does not count.

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
        Split(*_divided(table, everything[fold != number], validation, seed), everything[fold == number])
        for number in range(k)
    ]


def divide(
    table: ProfileTable,
    train: float = 0.6,
    validation: float = 0.2,
    seed: int = 0,
    leave_out: str | None = None,
    folds: int | None = None,
    fold: int = 0,
) -> Split:
    """The split that settings ask for: `table.split`, or with a data set left out, or one of several folds.

    Raises:
        InputError: an unknown data set, a fold that does not exist, both asked for, or what the three refuse.
    """
    share = validation / (train + validation)
    if leave_out is not None and folds is not None:
        raise InputError("split.leave_out and split.folds: give one of them")
    if leave_out is not None:
        splits = leave_one_out(table, share, seed)
        if leave_out not in splits:
            raise InputError(f"split.leave_out={leave_out!r}: must be one of {', '.join(splits)}")
        return splits[leave_out]
    if folds is not None:
        if not 0 <= fold < folds:
            raise InputError(f"split.fold={fold}: must be in 0 … {folds - 1}")
        return k_folds(table, folds, seed, share)[fold]
    return table.split(train, validation, seed)


def _divided(table: ProfileTable, rows: Tensor, validation: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to fit on and to choose on."""
    held = _places(table, rows, seed) < validation
    if not 0 < int(held.sum()) < len(rows):
        raise InputError(
            f"profile {table.name!r}: {len(rows)} samples cannot be divided into training and validation "
            f"({validation:.0%})"
        )
    return rows[~held], rows[held]


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

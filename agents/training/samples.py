"""The samples of a controller's training: which rows each network is fitted on, which it is judged
on, and which were seen before.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.training.checkpoint import Loaded
from knobwise.agents.training.controller_settings import ControllerSettings
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import subsample
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import folds_of

MAX_JUDGED = 1 << 16
"""Held-out samples that networks are judged on in training."""


class Samples(NamedTuple):
    """The rows of a table that networks are fitted on and judged on, int64 [n] each."""

    folds: tuple[list[Tensor], list[Tensor]]
    """The rows that each fold's network is fitted on, and those that it is judged on."""
    fitted: Tensor
    """The rows that the deployed network is fitted on."""
    fold_seed: int
    """The seed that the folds were drawn with."""
    seen_before: list[str]
    """Fingerprints of the samples that the checkpoint started from has seen."""

    @property
    def by_network(self) -> list[Tensor]:
        """The rows that each network is fitted on; behind several folds those of all samples."""
        fitted = self.folds[0]
        return fitted if len(fitted) == 1 else [*fitted, self.fitted]


def samples_of_training(
    table: ProfileTable,
    split: Split,
    settings: ControllerSettings,
    start: Loaded | None = None,
    seed: int = 0,
) -> Samples:
    """Return the samples of each network.

    If the checkpoint was trained on the same split of this profile, its folds are taken over, so
    that samples held out of a network stay held out of it.

    Args:
        table: the profile.
        split: fit on `train`, judge on `validation`, or both in folds.
        settings: the number of folds and their seed, and where the checkpoint was.
        start: the checkpoint that training starts from; None for fresh weights.
        seed: of the folds, if the settings name none.

    Raises:
        InputError: the checkpoint was trained on test samples, or there are fewer samples (or
            images) than folds.
    """
    fold_seed = seed if settings.fold_seed is None else settings.fold_seed
    seen_before: list[str] = []
    if start is not None:
        seen_before = start.extra.get("seen", [])
        test = start.extra.get("test_rows", split.train)
        if torch.equal(test, split.test) and start.profile_digest == table.digest:
            fold_seed = start.extra.get("fold_seed", fold_seed)
        else:
            _refuse_test_samples(seen_before, table, split, settings.init_from)
    fold_networks = settings.policy.fold_networks
    folds = divide_into_folds(table, split, fold_networks, fold_seed)
    # of several folds the deployed network is a last one, of all samples
    fitted = folds[0][0] if fold_networks == 1 else split.fitted
    return Samples(folds, fitted, fold_seed, seen_before)


def _refuse_test_samples(
    seen_before: list[str], table: ProfileTable, split: Split, init_from: str | Path | None
) -> None:
    """Raise InputError if a checkpoint was trained on test samples."""
    count = len({*seen_before} & {*table.fingerprints(split.test)})
    if count:
        raise InputError(
            f"init_from={init_from}: was trained on {count} of the test samples of profile "
            f"{table.name!r}; split the profile as its run did (split.seed=…)"
        )


def divide_into_folds(
    table: ProfileTable, split: Split, fold_networks: int, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows that each fold's network is fitted on, and those it is judged on.

    Raises:
        InputError: there are fewer samples (or images) than networks.
    """
    if fold_networks == 1:
        return [split.train], [subsample(split.validation, MAX_JUDGED)]
    rows = split.fitted
    folds = folds_of(table, rows, seed, fold_networks)
    if len(folds) < fold_networks:
        raise InputError(
            f"policy.fold_networks={fold_networks}: profile {table.name!r} has only {len(folds)} "
            "samples (or images) outside its test part; use fewer networks"
        )
    fitted, held_out = zip(*folds, strict=True)
    judged = [subsample(rows[hold], MAX_JUDGED // len(folds)) for hold in held_out]
    return [rows[fit] for fit in fitted], judged

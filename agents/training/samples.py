"""The samples of a controller's training: which rows each network is fitted on, which it is judged
on, and which the checkpoint that it starts from has seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import Loaded
from knobwise.agents.training.controller_settings import ControllerSettings
from knobwise.common.errors import InputError
from knobwise.common.progress import say
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


def refuse_known_samples(
    start: Loaded, problem: Problem, samples: Samples, settings: ControllerSettings
) -> None:
    """Refuse samples that are to be held out of networks whose first weights have learned them: a
    promise would be tested, and weights chosen, on samples that prove nothing.

    Which of the samples that the checkpoint has seen it was fitted on, and which it was chosen on,
    can be told where its rows mean the same samples in this table. Elsewhere a line says that some
    were seen. What only a promise was tested on has taught the weights nothing.

    Args:
        start: the checkpoint that training starts from; its network is that of the settings.

    Raises:
        InputError: there are such samples.
    """
    table, policy = problem.facts, settings.policy
    key = f"init_from={settings.init_from}"
    learned = {*samples.seen_before} - {*start.extra.get("proof", [])}
    if problem.calibration is not None:
        count = len(learned & {*table.fingerprints(problem.calibration)})
        if count:
            raise InputError(
                f"{key}: has learned from {count} of the {len(problem.calibration)} samples of "
                f"profile {table.name!r} that policy.promise={policy.promise} holds back, on which "
                "a promise of it proves nothing; leave policy.promise out, or start from a run "
                "that holds the same samples back (policy.promise=…, the same split.seed)"
            )
    judged = samples.folds[1]
    before = _rows_before(start, table)
    if before is not None:
        fitted, _ = divide_into_folds(
            table, before, policy.fold_networks, start.extra.get("fold_seed", samples.fold_seed)
        )
        pairs = zip(fitted, judged, strict=True)
        count = sum(int(torch.isin(held_out, fit).sum()) for fit, held_out in pairs)
        if count:
            raise InputError(
                f"{key}: was fitted on {count} of the {sum(map(len, judged))} samples of profile "
                f"{table.name!r} that weights are to be chosen on; divide it into training and "
                "validation as its run did (split.…, policy.promise)"
            )
        learned -= {*table.fingerprints(before.fitted)}
    count = len(learned & {*table.fingerprints(torch.cat(judged))})
    if count:
        say(
            f"{key}: has seen {count} of the samples that weights are chosen on here, and may have "
            "been fitted on them; scores on validation may be too high"
        )


def _rows_before(start: Loaded, table: ProfileTable) -> Split | None:
    """Return the rows that a checkpoint was fitted and chosen on; None where they may mean other
    samples in this table."""
    before = start.split
    if before is None or not len(before.fitted) or int(before.fitted.max()) >= table.num_samples:
        return None
    # it notes the samples in the order of their rows, equal ones once
    prints = list(dict.fromkeys(table.fingerprints(before.fitted)))
    return before if prints == start.extra.get("seen", [])[: len(prints)] else None


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

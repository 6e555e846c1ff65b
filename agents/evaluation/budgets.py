"""The budgets that policies are judged by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import DEFAULT_QUANTILES, default_budgets
from knobwise.envs.tables.profile_table import ProfileTable


def few_budgets(budgets_ms: Tensor) -> list[str]:
    """Return a note if the default budgets [B] are fewer than usual, else no note.

    Many latencies may be equal, or most lie below the floor of `default_budgets`; either way few
    different ones are above the smallest budget.
    """
    usual = len(DEFAULT_QUANTILES)
    note = (
        f"budgets: only {len(budgets_ms)} of {usual} default budgets left, because few different "
        "latencies lie above the smallest; choose your own with budgets_ms"
    )
    return [note] * (len(budgets_ms) < usual)


def judged_budgets(
    table: ProfileTable, budgets_ms: Sequence[float] | None, rows: Tensor | None = None
) -> Tensor:
    """Return the budgets in the settings, in ms or the unit of the table, float32 [B].

    The default is `default_budgets` of these rows, int64 [n], or of the whole table.

    Raises:
        InputError: there is no budget, or one that is not positive.
    """
    if budgets_ms is None:
        return default_budgets(table, rows)
    if not budgets_ms or not min(budgets_ms) > 0:
        raise InputError(
            f"budgets_ms={list(budgets_ms)}: give at least one budget in {table.unit}, all positive"
        )
    return torch.tensor(list(budgets_ms))

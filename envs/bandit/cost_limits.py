"""Outcomes within limits on further costs: an answer that costs more than a limit counts as late.

What a sample may have within limits is decided in `knobwise.agents.evaluation.limits`; there, in
the table that policies learn from, such an answer is as good as a wrong one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knobwise.envs.bandit.outcomes import DeadlineOutcomes
from knobwise.envs.tables.profile_table import ProfileTable


def share_over(cost: Tensor, limit: float) -> Tensor:
    """Return 1 where a cost, float32 [*], is above its limit, else 0; NaN where it is unknown."""
    # as float32 as the costs, of which one may equal the limit
    over = cost > torch.tensor(limit, dtype=torch.float32)
    return over.float().where(~cost.isnan(), torch.nan)


def over_limits(table: ProfileTable, limits: Any) -> Tensor:
    """Return where a cell costs more than one of the limits, bool [N, C]; an unknown cost does
    not."""
    over = torch.zeros_like(table.mask)
    for name, limit in limits.values.items():
        over |= share_over(table.costs[name], limit) > 0
    return over


def answers_of(table: ProfileTable, cells: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return how right the answers of cells are, float32, and which cost more than a limit, bool.
    In a table within limits such an answer is as right as it is, although it counts as wrong.

    Args:
        cells: rows int64 and configurations int64, which broadcast.
    """
    if table.limits is None:
        accuracy = table.accuracy[cells]
        return accuracy, torch.zeros_like(accuracy, dtype=torch.bool)
    return table.limits.table.accuracy[cells], over_limits(table, table.limits)[cells]


def judged_by_limits(
    outcomes: DeadlineOutcomes, table: ProfileTable, rows: Tensor, budgets_ms: Tensor
) -> DeadlineOutcomes:
    """Return outcomes for rows int64 [n] under deadlines [B], with those above a limit as late;
    without limits as they are.

    A request is feasible if some configuration that it may have keeps its deadline and all limits.
    """
    if table.limits is None:
        return outcomes
    accuracy, late = answers_of(table, (rows.unsqueeze(1), outcomes.chosen))
    over = over_limits(table, table.limits)[rows]
    quick = table.without_first_look.latency_ms[rows]
    fastest = quick.masked_fill(over | ~table.mask[rows], torch.inf).amin(1)
    return replace(
        outcomes,
        accuracy=accuracy,
        on_time=outcomes.on_time * ~late,
        feasible=fastest.unsqueeze(1) <= budgets_ms,
    )

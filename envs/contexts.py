"""What all three environments share: how contexts are drawn, and which decisions have an outcome."""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.envs.budgets import BudgetConfig, BudgetSampler
from knobwise.envs.errors import InputError
from knobwise.envs.table import ProfileTable


class ContextSampler:
    """Draws contexts: rows uniformly from those given, a budget for each. One seed, one sequence.

    All three environments draw through this class, so that equal seeds give equal contexts.

    Args:
        table: the profile.
        budget: which budgets.
        rows: int64 [n], the samples to draw from; None for all.
        seed: of the generator.
    """

    def __init__(self, table: ProfileTable, budget: BudgetConfig, rows: Tensor | None, seed: int) -> None:
        self.rows = torch.arange(table.num_samples) if rows is None else torch.as_tensor(rows)
        if not len(self.rows):
            raise InputError("the environment got no samples to draw from")
        self.budgets = BudgetSampler(table, budget, self.rows)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` contexts: rows int64 [count], budgets float32 [count] in ms."""
        rows = self.rows[torch.randint(len(self.rows), (count,), generator=self.generator)]
        return rows, self.budgets(rows, self.generator)


def check_profiled(table: ProfileTable, rows: Tensor, configurations: Tensor) -> None:
    """Refuse a decision whose outcome nobody measured: int64 [P] rows, int64 [P, G] configurations.

    Raises:
        InputError: naming the first such sample.
    """
    known = (configurations >= 0) & table.mask[rows[:, None], configurations.clamp_min(0)]
    if not known.all():
        sample = table.sample_ids[int(rows[(~known).any(1)][0])]
        raise InputError(
            f"{int((~known).sum())} of the actions were never profiled for their sample (the first: sample {sample!r} "
            f"of {table.name!r}); `mask` tells which configurations were"
        )

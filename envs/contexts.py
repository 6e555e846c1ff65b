"""What all three environments share: how contexts are drawn, and which decisions have an outcome."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knobwise.envs.budgets import BudgetConfig, BudgetSampler
from knobwise.envs.errors import InputError
from knobwise.envs.reward import RewardConfig
from knobwise.envs.table import ProfileTable


class ContextSampler:
    """Draws contexts: rows uniformly from those given, a budget for each. One seed, one sequence.

    All three environments draw through this class, so that equal seeds give equal contexts.

    Args:
        table: the profile.
        budget: which budgets.
        rows: int64 [n], the samples to draw from; None for all. Of M such lists the contexts are drawn in turn: number
            i from list i mod M.
        seed: of the generator.
    """

    def __init__(
        self, table: ProfileTable, budget: BudgetConfig, rows: Tensor | Sequence[Tensor] | None, seed: int
    ) -> None:
        rows = torch.arange(table.num_samples) if rows is None else rows
        lists = [rows] if isinstance(rows, Tensor) else list(rows)
        self.counts = torch.tensor([len(one) for one in lists])
        if not lists or not self.counts.all():
            raise InputError("the environment got no samples to draw from")
        self.rows = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        self.budgets = BudgetSampler(table, budget, torch.cat(lists).unique() if len(lists) > 1 else lists[0])
        self.generator = torch.Generator().manual_seed(seed)
        self.before = self.generator.get_state()  # of the contexts drawn last: set back to it, they are drawn again

    def __call__(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` contexts: rows int64 [count], budgets float32 [count] in ms."""
        self.before = self.generator.get_state()
        if len(self.rows) == 1:
            rows = self.rows[0][torch.randint(self.rows.shape[1], (count,), generator=self.generator)]
        else:
            turn = torch.arange(count) % len(self.counts)
            place = torch.randint(1 << 62, (count,), generator=self.generator) % self.counts[turn]
            rows = self.rows[turn, place]
        return rows, self.budgets(rows, self.generator)

    def set_back(self, before: Tensor) -> None:
        """To what `before` was: the contexts drawn after that come again."""
        self.generator.set_state(before)


def limit_key(budget: BudgetConfig | None) -> str:
    """What limits a request: `budget_ms`, or under a mean budget `worth_ms`, what a right answer is worth."""
    return "worth_ms" if budget is not None and budget.sense == "mean" else "budget_ms"


def reward_under(budget: BudgetConfig | None, reward: RewardConfig | None) -> RewardConfig:
    """The reward asked for, by default `shaped`, or under a mean budget `priced`.

    Raises:
        InputError: a reward of one sense with budgets of the other.
    """
    mean = limit_key(budget) == "worth_ms"
    reward = reward or RewardConfig(kind="priced" if mean else "shaped")
    if (reward.kind == "priced") != mean:
        sense = "mean" if mean else "deadline"
        raise InputError(
            f"reward.kind={reward.kind}: does not go with budget.sense={sense}; priced goes with mean only"
        )
    return reward


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

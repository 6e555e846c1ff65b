"""What all environments share: how contexts are drawn, and which decisions have an outcome."""

from __future__ import annotations

import math
import multiprocessing
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetSampler
from knobwise.envs.configurations.settings import TRAINING_REWARD, BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable


def fresh_seed() -> int:
    """A seed from torch's generator, so that `torch.manual_seed` fixes it. Processes that were
    forked from one another share the state of that generator; the name of the process, which is in
    the seed too, tells them apart."""
    drawn = int(torch.randint(1 << 62, ()))
    if multiprocessing.parent_process() is None:
        return drawn
    return drawn ^ zlib.crc32(multiprocessing.current_process().name.encode())


def row_weights(table: ProfileTable, by: str, rows: Tensor) -> Tensor:
    """Compute how often each sample is drawn, float64 [N], 0 outside `rows`, int64 [n], whose
    groups are counted; `by` is that of `BalanceConfig`. Raises InputError: there is only one
    group."""
    if by == "configuration":
        members = table.mask[rows].double()
    else:
        if by == "dataset":
            names = table.dataset_names
        else:
            names = table.question_types
        each = [names[row] for row in rows.tolist() if names]
        kinds, group = np.unique(each, return_inverse=True)
        if len(kinds) < 2:
            raise InputError(
                f"balance.by={by}: the training samples of profile {table.name!r} have fewer than "
                f"two {by}s, so there is nothing to balance"
            )
        members = torch.nn.functional.one_hot(torch.from_numpy(group)).double()
    weights = torch.zeros(table.num_samples, dtype=torch.float64)
    weights[rows] = members @ (1 / members.sum(0).clamp_min(1))
    return weights


class ContextSampler:
    """Draws contexts: rows, uniformly or balanced, and a budget for each. All environments draw
    through this class, so that equal seeds give equal contexts.

    Args:
        rows: int64 [n], the samples to draw from; None for all. From M such lists contexts are
            drawn in turn, context i from list i mod M.
        seed: None for a fresh one, see `fresh_seed`.
        balance: by what, see `BalanceConfig`.
    """

    def __init__(
        self,
        table: ProfileTable,
        budget: BudgetConfig,
        rows: Tensor | Sequence[Tensor] | Sequence[int] | None,
        seed: int | None,
        balance: str = "none",
    ) -> None:
        if rows is None:
            rows = torch.arange(table.num_samples)
        several = not isinstance(rows, Tensor) and len(rows) > 0 and isinstance(rows[0], Tensor)
        lists = [torch.as_tensor(part, dtype=torch.long) for part in (rows if several else [rows])]
        self.counts = torch.tensor([len(part) for part in lists])
        if not lists or not self.counts.all():
            raise InputError("the environment got no samples to draw from")
        self.rows = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        if len(lists) > 1:
            together = torch.cat(lists).unique()
        else:
            together = lists[0]
        self.budgets = BudgetSampler(table, budget, together)
        self.weights: Tensor | None = None
        if balance != "none":
            weights = row_weights(table, balance, together)
            of_lists = [weights[part] for part in lists]
            self.weights = torch.nn.utils.rnn.pad_sequence(of_lists, batch_first=True)
        self.generator = torch.Generator().manual_seed(fresh_seed() if seed is None else seed)
        self.before = self.generator.get_state()  # `set_back` to it draws the last contexts again

    def __call__(self, count: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`count` contexts: rows int64 [count], budgets float32 [count] in ms, under weights worths
        [count, 2]. Rows that are `chosen`, int64 [count], take the place of those drawn; their
        budgets are drawn as ever."""
        self.before, turn = self.generator.get_state(), torch.arange(count) % len(self.counts)
        if self.weights is not None:
            each = math.ceil(count / len(self.rows))
            drawn = torch.multinomial(self.weights, each, True, generator=self.generator)
            rows = self.rows[turn, drawn.T.flatten()[:count]]
        elif len(self.rows) == 1:
            rows = self.rows[0][
                torch.randint(self.rows.shape[1], (count,), generator=self.generator)
            ]
        else:
            place = torch.randint(1 << 62, (count,), generator=self.generator) % self.counts[turn]
            rows = self.rows[turn, place]
        if chosen is not None and not torch.isin(chosen, self.rows).all():
            raise InputError(
                f"reset options: row={chosen.tolist()} is not among the rows of this environment"
            )
        rows = rows if chosen is None else chosen
        return rows, self.budgets(rows, self.generator)

    def set_back(self, before: Tensor) -> None:
        """Return to an earlier value of `before`: the contexts drawn after it come again."""
        self.generator.set_state(before)


def limit_key(budget: BudgetConfig | None) -> str:
    """What limits a request: `budget_ms`; under a mean budget `worth_ms`, the worth of a right
    answer; under weights `worths`, this worth in ms and in the unit of the further cost."""
    return {"deadline": "budget_ms", "mean": "worth_ms", "weights": "worths"}[
        budget.sense if budget else "deadline"
    ]


def reward_under(budget: BudgetConfig | None, reward: RewardConfig | str | None) -> RewardConfig:
    """The reward in the settings, or of a kind; the default is that of training, under a mean
    budget and weights `priced`. Raises InputError if the reward does not go with the sense of the
    budget."""
    if budget is None:
        sense = "deadline"
    else:
        sense = budget.sense
    mean = sense != "deadline"
    if reward is None:
        if mean:
            reward = RewardConfig(kind="priced")
        else:
            reward = TRAINING_REWARD
    elif isinstance(reward, str):
        if reward == TRAINING_REWARD.kind:
            reward = TRAINING_REWARD
        else:
            reward = RewardConfig(kind=reward)
    if (reward.kind == "priced") != mean:
        raise InputError(
            f"reward.kind={reward.kind}: does not suit budget.sense={sense}; priced goes with "
            "mean and weights only"
        )
    return reward

"""What all environments share: how contexts are drawn, and which decisions have an outcome."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetSampler
from knobwise.envs.configurations.settings import TRAINING_REWARD, BalanceConfig, BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable


def row_weights(table: ProfileTable, balance: BalanceConfig, rows: Tensor) -> Tensor | None:
    """How often each row is drawn relative to the others, float64 [N]; None if all are drawn evenly.

    A group of size s among `rows`, int64 [n], gets a total weight of s^(1 − power), shared evenly by its samples. With
    `by="configuration"` the rows for which a configuration was profiled are such a group; a sample gets the sum over
    its profiled configurations. Other rows have weight 0. Raises InputError if the profile has no question types to
    balance by, or only one data set or type.
    """
    if balance.by == "none":
        return None
    weights = torch.zeros(table.num_samples, dtype=torch.float64)
    if balance.by == "configuration":
        sizes = table.mask[rows].sum(0).double().clamp_min(1)
        weights[rows] = table.mask[rows].double() @ sizes.pow(-balance.power)
        return weights
    names = table.dataset_names if balance.by == "dataset" else table.question_types
    if not names:
        raise InputError(
            f"balance.by=question_type: profile {table.name!r} has no question types; give them as `question_type` in "
            "every row of a long table or of exp5, exp6 or core_exp files"
        )
    numbers: dict[str, int] = {}
    group = torch.tensor([numbers.setdefault(names[row], len(numbers)) for row in rows.tolist()])
    if len(numbers) < 2:
        raise InputError(
            f"balance.by={balance.by}: all training samples of profile {table.name!r} are of {names[rows[0]]!r}, so "
            "there is nothing to balance"
        )
    weights[rows] = torch.bincount(group).double().pow(-balance.power)[group]
    return weights


def fresh_seed() -> int:
    """A seed from torch's generator, so that `torch.manual_seed` fixes it. Processes that were forked from one another
    share the state of that generator; the name of the process, which is in the seed too, tells them apart."""
    drawn = int(torch.randint(1 << 62, ()))
    if multiprocessing.parent_process() is None:
        return drawn
    return drawn ^ zlib.crc32(multiprocessing.current_process().name.encode())


class ContextSampler:
    """Draws contexts: rows, uniformly or by weight, and a budget for each. All environments draw through this class, so
    that equal seeds give equal contexts.

    Args:
        rows: int64 [n], the samples to draw from; None for all. From M such lists contexts are drawn in turn, context i
            from list i mod M.
        weights: float [N] of `row_weights`, within each list; None draws evenly.
        seed: None for a fresh one, see `fresh_seed`.
    """

    def __init__(
        self,
        table: ProfileTable,
        budget: BudgetConfig,
        rows: Tensor | Sequence[Tensor] | None,
        seed: int | None,
        weights: Tensor | None = None,
    ) -> None:
        rows = torch.arange(table.num_samples) if rows is None else rows
        lists = [rows] if isinstance(rows, Tensor) else list(rows)
        self.counts = torch.tensor([len(part) for part in lists])
        if not lists or not self.counts.all():
            raise InputError("the environment got no samples to draw from")
        self.rows = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        self.flat = torch.cat(lists)
        # shares of list m run from m to m + 1, so that one search finds the place in any list
        self.cumulative = None
        if weights is not None:
            self.cumulative = torch.cat([m + _shares(weights[part]) for m, part in enumerate(lists)])
        self.budgets = BudgetSampler(table, budget, self.flat.unique() if len(lists) > 1 else lists[0])
        self.generator = torch.Generator().manual_seed(fresh_seed() if seed is None else seed)
        self.before = self.generator.get_state()  # `set_back` to it draws the last contexts again

    def __call__(self, count: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`count` contexts: rows int64 [count], budgets float32 [count] in ms. Rows that are `chosen`, int64 [count],
        take the place of those drawn; their budgets are drawn as ever."""
        self.before, turn = self.generator.get_state(), torch.arange(count) % len(self.counts)
        if self.cumulative is not None:
            drawn = turn + torch.rand(count, generator=self.generator, dtype=torch.float64)
            rows = self.flat[torch.searchsorted(self.cumulative, drawn, right=True)]
        elif len(self.rows) == 1:
            rows = self.rows[0][torch.randint(self.rows.shape[1], (count,), generator=self.generator)]
        else:
            place = torch.randint(1 << 62, (count,), generator=self.generator) % self.counts[turn]
            rows = self.rows[turn, place]
        rows = rows if chosen is None else chosen
        return rows, self.budgets(rows, self.generator)

    def set_back(self, before: Tensor) -> None:
        """Return to an earlier value of `before`: the contexts drawn after it come again."""
        self.generator.set_state(before)


def _shares(weights: Tensor) -> Tensor:
    """Running sum of the normalised weights, float64 [n], whose last entry is exactly 1."""
    if not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
        raise ValueError("weights of samples must not be negative, nor all 0")
    running = weights.double().cumsum(0)
    return running / running[-1]


def limit_key(budget: BudgetConfig | None) -> str:
    """What limits a request: `budget_ms`, or under a mean budget `worth_ms`, the worth of a right answer."""
    return "worth_ms" if budget is not None and budget.sense == "mean" else "budget_ms"


def reward_under(budget: BudgetConfig | None, reward: RewardConfig | str | None) -> RewardConfig:
    """The reward in the settings, or of a kind; the default is that of training, under a mean budget `priced`. Raises
    InputError if the reward does not go with the sense of the budget."""
    mean = limit_key(budget) == "worth_ms"
    if reward is None:
        reward = RewardConfig(kind="priced") if mean else TRAINING_REWARD
    elif isinstance(reward, str):
        reward = TRAINING_REWARD if reward == TRAINING_REWARD.kind else RewardConfig(kind=reward)
    if (reward.kind == "priced") != mean:
        sense = f"budget.sense={'mean' if mean else 'deadline'}"
        raise InputError(f"reward.kind={reward.kind}: does not go with {sense}; priced goes with mean, only with it")
    return reward

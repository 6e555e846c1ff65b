"""What all three environments share: how contexts are drawn, and which decisions have an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetConfig, BudgetSampler
from knobwise.envs.configurations.reward import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable


@dataclass
class BalanceConfig:
    """Which samples are drawn how often in training. Judging counts every sample once."""

    by: str = "none"
    """`none`: every sample as often; `dataset` or `question_type`: small groups more often, up to all groups alike;
    `configuration`: samples more often for which seldom profiled configurations were measured."""
    power: float = 1.0
    """How far: 1 makes the groups (or configurations) equal, 0.5 lets them count by the square root of their size."""

    def __post_init__(self) -> None:
        if self.by not in ("none", "dataset", "question_type", "configuration"):
            raise InputError(f"balance.by={self.by!r}: must be none, dataset, question_type or configuration")
        if not 0 < self.power <= 1:
            raise InputError(f"balance.power={self.power}: must be above 0 and at most 1")


def row_weights(table: ProfileTable, balance: BalanceConfig, rows: Tensor) -> Tensor | None:
    """How often each row is to be drawn, relative to the others, float64 [N]; None where all are alike.

    A group of size s among `rows` gets weight s^(1 − power) in all, shared evenly by its samples. With
    `by="configuration"` every configuration that was profiled for s of the rows shares the same weight among these, so
    that a sample has the sum over its profiled configurations.

    Args:
        table: the profile.
        balance: what is balanced.
        rows: int64 [n], what is drawn from; the other rows have weight 0.

    Raises:
        InputError: balancing by question types that the profile does not have, or of one data set or type only.
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
            f"balance.by={balance.by}: all samples of profile {table.name!r} to train on are of one, "
            f"{names[rows[0]]!r}; there is nothing to balance"
        )
    weights[rows] = torch.bincount(group).double().pow(-balance.power)[group]
    return weights


class ContextSampler:
    """Draws contexts: rows from those given, uniformly or by weight, a budget for each. One seed, one sequence.

    All three environments draw through this class, so that equal seeds give equal contexts.

    Args:
        table: the profile.
        budget: which budgets.
        rows: int64 [n], the samples to draw from; None for all. Of M such lists the contexts are drawn in turn: number
            i from list i mod M.
        seed: of the generator.
        weights: float [N], how often each row of the table is drawn relative to the others of its list, see
            `row_weights`; None for evenly.
    """

    def __init__(
        self,
        table: ProfileTable,
        budget: BudgetConfig,
        rows: Tensor | Sequence[Tensor] | None,
        seed: int,
        weights: Tensor | None = None,
    ) -> None:
        rows = torch.arange(table.num_samples) if rows is None else rows
        lists = [rows] if isinstance(rows, Tensor) else list(rows)
        self.counts = torch.tensor([len(one) for one in lists])
        if not lists or not self.counts.all():
            raise InputError("the environment got no samples to draw from")
        self.rows = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        self.flat = torch.cat(lists)
        # list m ends at m + 1: one search finds the place in any of them
        self.ends = None if weights is None else torch.cat([m + _shares(weights[one]) for m, one in enumerate(lists)])
        self.budgets = BudgetSampler(table, budget, torch.cat(lists).unique() if len(lists) > 1 else lists[0])
        self.generator = torch.Generator().manual_seed(seed)
        self.before = self.generator.get_state()  # of the contexts drawn last: set back to it, they are drawn again

    def __call__(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` contexts: rows int64 [count], budgets float32 [count] in ms."""
        self.before = self.generator.get_state()
        if self.ends is not None:
            turn = torch.arange(count) % len(self.counts)
            drawn = turn + torch.rand(count, generator=self.generator, dtype=torch.float64)
            rows = self.flat[torch.searchsorted(self.ends, drawn, right=True)]
        elif len(self.rows) == 1:
            rows = self.rows[0][torch.randint(self.rows.shape[1], (count,), generator=self.generator)]
        else:
            turn = torch.arange(count) % len(self.counts)
            place = torch.randint(1 << 62, (count,), generator=self.generator) % self.counts[turn]
            rows = self.rows[turn, place]
        return rows, self.budgets(rows, self.generator)

    def set_back(self, before: Tensor) -> None:
        """To what `before` was: the contexts drawn after that come again."""
        self.generator.set_state(before)


def _shares(weights: Tensor) -> Tensor:
    """Running sum of weights, float64 [n], the last exactly 1."""
    if not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
        raise ValueError("weights of samples: none may be negative, and not all 0")
    running = weights.double().cumsum(0)
    return running / running[-1]


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

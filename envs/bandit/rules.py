"""What counts, by the kind of budget: what may be chosen, and what a decision gets.

A rule is chosen once, from the settings of the budget (`rule_of`), and asked from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.envs.bandit.outcomes import (
    FREE,
    DeadlineOutcomes,
    Outcomes,
    Paid,
    deadline_outcomes,
    priced_outcomes,
)
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import REWARDS, BudgetConfig
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.cells import Cells, CountedCells
from knobwise.envs.tables.profile_table import ProfileTable

Some = TypeVar("Some", bound=Outcomes)


class Rule(Protocol):
    """What counts under a kind of budget."""

    name: ClassVar[str]
    """As in `budget.constraint`."""

    @property
    def limits(self) -> Mapping[str, float]:
        """Limits on further costs, by name."""
        ...

    @property
    def probability(self) -> float:
        """With which a choice is to keep each of them."""
        ...

    def over(self, table: ProfileTable) -> Tensor | None:
        """Return which cells cost more than a limit, bool [N, C]; None without limits."""
        ...

    def counted(self, table: ProfileTable, allowed: Tensor | None = None) -> Cells:
        """Return what counts of a table's cells.

        Args:
            allowed: bool [N, C], what may be chosen; None for all that the table has.
        """
        ...

    def outcomes(
        self,
        table: ProfileTable,
        rows: Tensor,
        chosen: Tensor,
        limits: Tensor,
        paid: Paid = FREE,
        *,
        rewards: RewardTable | None = None,
        counted: Cells | None = None,
        beliefs: Beliefs | None = None,
    ) -> Outcomes:
        """Look up what choices int64 [n, B] get.

        Args:
            table: the values of all cells that may be chosen.
            rows: int64 [n].
            limits: float [B], in ms: deadlines, or under a mean budget values of a right answer.
            paid: what whoever chose pays.
            rewards: of these cells; defaults to those of training.
            counted: what counts of the table; None for all that it has.
            beliefs: where some of the values are predictions, which are to be checked: outcomes are
                then estimates, see `Beliefs.estimate`.
        """
        ...


@dataclass(frozen=True)
class Deadline:
    """Every request has its own budget, beside which further costs may be limited: an answer that
    costs more than a limit is late, and in training as good as a wrong one."""

    name: ClassVar[str] = "deadline"
    limits: Mapping[str, float] = field(default_factory=dict)
    """By the name of the cost."""
    probability: float = BudgetConfig.limit_probability
    """With which a choice is to keep each of them."""

    def over(self, table: ProfileTable) -> Tensor | None:
        """See `Rule`; an unknown cost is not above a limit."""
        if not self.limits:
            return None
        over = torch.zeros_like(table.mask)
        for name, limit in self.limits.items():
            over |= share_over(table.costs[name], limit) > 0
        return over

    def counted(self, table: ProfileTable, allowed: Tensor | None = None) -> Cells:
        """See `Rule`."""
        over = self.over(table)
        if over is None and allowed is None:
            return table
        mask = table.mask if allowed is None else allowed
        accuracy = table.accuracy.where(mask, torch.nan)
        if over is not None:
            accuracy = accuracy.masked_fill(over & mask, 0.0)
        repeats_ms = table.repeats_ms
        if repeats_ms is not None:
            repeats_ms = repeats_ms.where(mask.unsqueeze(-1), torch.nan)
        first_look_ms = table.first_look_ms
        if first_look_ms is not None:
            first_look_ms = first_look_ms.where(mask, 0.0)
        latency_ms = table.latency_ms.where(mask, torch.nan)
        return CountedCells(accuracy, latency_ms, mask, repeats_ms, first_look_ms)

    def outcomes(
        self,
        table: ProfileTable,
        rows: Tensor,
        chosen: Tensor,
        limits: Tensor,
        paid: Paid = FREE,
        *,
        rewards: RewardTable | None = None,
        counted: Cells | None = None,
        beliefs: Beliefs | None = None,
    ) -> DeadlineOutcomes:
        """See `Rule`."""

        def look_up(version: ProfileTable) -> DeadlineOutcomes:
            of_version = counted if version is table else None
            of_version = of_version or self.counted(version)
            return deadline_outcomes(
                version,
                rows,
                chosen,
                limits,
                paid,
                rewards=_rewards_of(version, of_version, rewards, self, version is table),
                counted=of_version,
                over=self.over(version),
            )

        # whether some configuration is fast enough is known from measured and predicted times alone
        names = ("accuracy", "latency_ms", "utility", "on_time", "reward")
        return _estimated(look_up, table, (rows.unsqueeze(1), chosen), beliefs, names)


@dataclass(frozen=True)
class MeanBudget:
    """The average over the requests must not exceed the budget; a limit is the value of a right
    answer, 1/price, in ms."""

    name: ClassVar[str] = "mean"
    limits: ClassVar[Mapping[str, float]] = {}
    probability: ClassVar[float] = BudgetConfig.limit_probability

    def over(self, table: ProfileTable) -> Tensor | None:
        """See `Rule`: there are no limits on further costs."""
        return None

    def counted(self, table: ProfileTable, allowed: Tensor | None = None) -> Cells:
        """See `Rule`: all that the table has."""
        return table

    def outcomes(
        self,
        table: ProfileTable,
        rows: Tensor,
        chosen: Tensor,
        limits: Tensor,
        paid: Paid = FREE,
        *,
        rewards: RewardTable | None = None,
        counted: Cells | None = None,
        beliefs: Beliefs | None = None,
    ) -> Outcomes:
        """See `Rule`."""

        def look_up(version: ProfileTable) -> Outcomes:
            of_version = _rewards_of(version, version, rewards, self, version is table)
            return priced_outcomes(
                version, rows, chosen, limits, paid, rewards=of_version, counted=version
            )

        names = ("accuracy", "latency_ms", "utility", "reward")
        return _estimated(look_up, table, (rows.unsqueeze(1), chosen), beliefs, names)


def rule_of(budget: BudgetConfig) -> Rule:
    """Return the rule that the settings of a budget ask for. Raises InputError: there is none."""
    one_of("budget.constraint", budget.constraint, REWARDS)
    if budget.constraint == MeanBudget.name:
        return MeanBudget()
    return Deadline(dict(budget.limits or {}), budget.limit_probability)


def share_over(cost: Tensor, limit: float) -> Tensor:
    """Return 1 where a cost, float32 [*], is above its limit, else 0; NaN where it is unknown."""
    # as float32 as the costs, of which one may equal the limit
    over = cost > torch.tensor(limit, dtype=torch.float32)
    return over.float().where(~cost.isnan(), torch.nan)


def _rewards_of(
    version: ProfileTable, counted: Cells, rewards: RewardTable | None, rule: Rule, same: bool
) -> RewardTable:
    """Return rewards for a version of a table: those at hand if they are the same cells'."""
    if rewards is not None and same:
        return rewards
    config = REWARDS[rule.name] if rewards is None else rewards.config
    return RewardTable(version, config, cells=counted)


def _estimated(
    look_up: Callable[[ProfileTable], Some],
    table: ProfileTable,
    cells: tuple[Tensor, Tensor],
    beliefs: Beliefs | None,
    names: tuple[str, ...],
) -> Some:
    """Return outcomes as a table has them, or with beliefs estimates of these."""
    judged = look_up(table)
    if beliefs is None:
        return judged
    look_up = functools.cache(look_up)

    def estimate(name: str) -> Tensor:
        return beliefs.estimate(cells, lambda version: getattr(look_up(version), name))

    return replace(judged, **{name: estimate(name) for name in names})

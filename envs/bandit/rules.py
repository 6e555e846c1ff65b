"""What counts, by the kind of budget: what may be chosen, what decisions get, what is trained.

A rule is chosen once, from the settings of the budget (`rule_of`), and asked from then on. Nothing
else needs to know which one it is.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.envs.bandit.budgets import (
    STRATEGIES,
    AnswerValues,
    Strategy,
    default_budgets,
    judged_values,
    value_range,
)
from knobwise.envs.bandit.outcomes import (
    DeadlineOutcomes,
    Decisions,
    Outcomes,
    deadline_outcomes,
    priced_outcomes,
)
from knobwise.envs.bandit.reward import RewardTable, expected_utility
from knobwise.envs.bandit.settings import REWARDS, BudgetConfig, RewardConfig
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.cells import Cells, CountedCells
from knobwise.envs.tables.profile_table import ProfileTable


class Expected(Protocol):
    """What is expected of every configuration, [*, C] each."""

    @property
    def latency_ms(self) -> Tensor: ...

    def meets(self, budgets_ms: Tensor, /) -> Tensor:
        """Return P(latency ≤ budget): budgets [*] → [*, C]."""
        ...


class Rule(ABC):
    """What counts under a kind of budget. A *limit* is what a request comes with, in ms."""

    name: ClassVar[str]
    """As in `budget.constraint`."""
    limit_key: ClassVar[str]
    """The key of a request's limit."""
    late: ClassVar[bool] = False
    """Whether answers can be late. Then networks may predict whether they are, learn to follow the
    drift of a machine, and choose the fastest where nothing is in time."""
    limits: Mapping[str, float] = MappingProxyType({})
    """Limits on further costs, by name."""
    probability: float = BudgetConfig.limit_probability
    """With which a choice is to keep each of them."""

    @classmethod
    @abstractmethod
    def from_settings(cls, budget: BudgetConfig) -> Self:
        """Return the rule with these settings."""

    # -- what counts -------------------------------------------------------------------------------

    def over(self, table: ProfileTable) -> Tensor | None:
        """Return which cells cost more than a limit on further costs, bool [N, C], where an unknown
        cost does not; None without such limits."""
        if not self.limits:
            return None
        over = torch.zeros_like(table.mask)
        for name, limit in self.limits.items():
            over |= share_over(table.costs[name], limit) > 0
        return over

    def counted(self, table: ProfileTable, allowed: Tensor | None = None) -> Cells:
        """Return what counts of a table's cells: an answer above a limit as a wrong one.

        Args:
            allowed: bool [N, C], what may be chosen; None for all that the table has.
        """
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
        decisions: Decisions,
        *,
        rewards: RewardTable | None = None,
        counted: Cells | None = None,
        beliefs: Beliefs | None = None,
    ) -> Outcomes:
        """Look up what decisions get.

        Args:
            table: the values of all cells that may be chosen.
            rewards: of these cells; defaults to those of training.
            counted: what counts of the table; None for all that it has.
            beliefs: where some of the values are predictions, which are to be checked: outcomes are
                then estimates, see `Beliefs.estimate`.
        """

        @functools.cache
        def look_up(version: ProfileTable) -> Outcomes:
            cells = counted if version is table and counted is not None else self.counted(version)
            of_version = rewards
            if of_version is None or version is not table:
                config = REWARDS[self.name] if rewards is None else rewards.config
                of_version = RewardTable(version, config, cells=cells)
            return self.look_up(version, decisions, of_version, cells)

        judged = look_up(table)
        if beliefs is None:
            return judged
        estimates = {}
        for name in judged.ESTIMATED:
            values_in = functools.partial(_field_in, name, look_up)
            estimates[name] = beliefs.estimate(decisions.cells, values_in)
        return replace(judged, **estimates)

    @abstractmethod
    def look_up(
        self, table: ProfileTable, decisions: Decisions, rewards: RewardTable, counted: Cells
    ) -> Outcomes:
        """Look up what decisions get in one table, see `outcomes`."""

    # -- what is trained and expected --------------------------------------------------------------

    @classmethod
    @abstractmethod
    def strategy(cls, budget: BudgetConfig) -> type[Strategy]:
        """Return how training draws limits."""

    @classmethod
    @abstractmethod
    def limits_seen(cls, latencies_ms: Tensor) -> Tensor:
        """Return the limits that a network's encoding of them is standardised by, float [m], of the
        latencies of its samples, float [n]."""

    @classmethod
    @abstractmethod
    def judged_limits(cls, table: ProfileTable, cells: Cells, budgets_ms: Tensor | None) -> Tensor:
        """Return the limits of validation, float [B].

        Args:
            cells: what counts of the table.
            budgets_ms: those that are wanted, float [B], if any.
        """

    @classmethod
    def charged(cls, reward: RewardConfig | None) -> RewardConfig | None:
        """Return the reward of training, of a wanted one; None for the default."""
        return reward

    @classmethod
    def deadlines(cls, limits: Tensor) -> Tensor:
        """Return the limits that predictors of latencies learn to keep, float [≤ B]."""
        return limits

    @classmethod
    @abstractmethod
    def expected(cls, accuracy: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """Return what decisions are expected to be worth: accuracies [*, C] and limits [*] →
        [*, C]."""

    @classmethod
    @abstractmethod
    def worth(
        cls, accuracy: Tensor, measurements_ms: Tensor, median_ms: Tensor, limits: Tensor
    ) -> Tensor:
        """Return what decisions were worth, float [B, n, C], NaN counting as nothing.

        Args:
            accuracy, median_ms: [n, C].
            measurements_ms: [n, C, R].
            limits: [B, 1, 1].
        """


@dataclass(frozen=True)
class Deadline(Rule):
    """Every request has its own budget, beside which further costs may be limited: an answer that
    costs more than a limit is late, and in training as good as a wrong one."""

    name: ClassVar[str] = "deadline"
    limit_key: ClassVar[str] = "budget_ms"
    late: ClassVar[bool] = True
    limits: Mapping[str, float] = field(default_factory=dict)
    probability: float = BudgetConfig.limit_probability

    @classmethod
    def from_settings(cls, budget: BudgetConfig) -> Self:
        return cls(dict(budget.limits or {}), budget.limit_probability)

    def look_up(
        self, table: ProfileTable, decisions: Decisions, rewards: RewardTable, counted: Cells
    ) -> DeadlineOutcomes:
        return deadline_outcomes(table, decisions, rewards, counted, self.over(table))

    @classmethod
    def strategy(cls, budget: BudgetConfig) -> type[Strategy]:
        one_of("budget.strategy", budget.strategy, STRATEGIES)
        return STRATEGIES[budget.strategy]

    @classmethod
    def limits_seen(cls, latencies_ms: Tensor) -> Tensor:
        """See `Rule`: the latencies themselves."""
        return latencies_ms

    @classmethod
    def judged_limits(cls, table: ProfileTable, cells: Cells, budgets_ms: Tensor | None) -> Tensor:
        """See `Rule`: the wanted budgets, or the default ones."""
        return default_budgets(table) if budgets_ms is None else budgets_ms

    @classmethod
    def expected(cls, accuracy: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """See `Rule`: the expected utility Â·P(latency ≤ b)."""
        return accuracy * expected.meets(limits)

    @classmethod
    def worth(
        cls, accuracy: Tensor, measurements_ms: Tensor, median_ms: Tensor, limits: Tensor
    ) -> Tensor:
        """See `Rule`: the utility."""
        return expected_utility(accuracy, measurements_ms, limits)


@dataclass(frozen=True)
class MeanBudget(Rule):
    """The average over the requests must not exceed the budget. A limit is the value of a right
    answer, 1/price: the ms that it may cost."""

    name: ClassVar[str] = "mean"
    limit_key: ClassVar[str] = "worth_ms"

    @classmethod
    def from_settings(cls, budget: BudgetConfig) -> Self:
        return cls()

    def look_up(
        self, table: ProfileTable, decisions: Decisions, rewards: RewardTable, counted: Cells
    ) -> Outcomes:
        return priced_outcomes(table, decisions, rewards, counted)

    @classmethod
    def strategy(cls, budget: BudgetConfig) -> type[Strategy]:
        one_of("budget.strategy", budget.strategy, STRATEGIES)
        return AnswerValues

    @classmethod
    def limits_seen(cls, latencies_ms: Tensor) -> Tensor:
        """See `Rule`: the least and the greatest value, [2]."""
        return value_range(latencies_ms)

    @classmethod
    def judged_limits(cls, table: ProfileTable, cells: Cells, budgets_ms: Tensor | None) -> Tensor:
        """See `Rule`: values of a right answer."""
        return judged_values(cells)

    @classmethod
    def charged(cls, reward: RewardConfig | None) -> RewardConfig | None:
        """See `Rule`: a mean budget has a reward of its own."""
        return REWARDS[cls.name]

    @classmethod
    def deadlines(cls, limits: Tensor) -> Tensor:
        """See `Rule`: none."""
        return limits[:0]

    @classmethod
    def expected(cls, accuracy: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """See `Rule`: Â − L̂/w, with w the ms that a right answer may cost."""
        return accuracy - expected.latency_ms / limits.unsqueeze(-1)

    @classmethod
    def worth(
        cls, accuracy: Tensor, measurements_ms: Tensor, median_ms: Tensor, limits: Tensor
    ) -> Tensor:
        """See `Rule`: accuracy − latency/w."""
        return (accuracy - median_ms / limits).nan_to_num()


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Deadline, MeanBudget)}
"""By the words of `budget.constraint`."""


def rule_of(budget: BudgetConfig) -> Rule:
    """Return the rule that the settings of a budget ask for. Raises InputError: there is none."""
    one_of("budget.constraint", budget.constraint, RULES)
    return RULES[budget.constraint].from_settings(budget)


def share_over(cost: Tensor, limit: float) -> Tensor:
    """Return 1 where a cost, float32 [*], is above its limit, else 0; NaN where it is unknown."""
    # as float32 as the costs, of which one may equal the limit
    over = cost > torch.tensor(limit, dtype=torch.float32)
    return over.float().where(~cost.isnan(), torch.nan)


def _field_in(
    name: str, look_up: Callable[[ProfileTable], Outcomes], version: ProfileTable
) -> Tensor:
    """Return a field of the outcomes that a version of the table gives."""
    values: Tensor = getattr(look_up(version), name)
    return values

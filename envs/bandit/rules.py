"""What counts, by the kind of budget: what may be chosen, what decisions get, what is trained.

A rule is chosen once, from the settings of the budget (`rule_of`), and asked from then on. Nothing
else needs to know which one it is. A rule of the user's own is a subclass of `Rule`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import (
    DRAWN_BY,
    MIN_LATENCY_MS,
    STRATEGIES,
    AnswerValues,
    Strategy,
    default_budgets,
    judged_budgets,
    judged_values,
    mean_budgets,
    value_range,
)
from knobwise.envs.bandit.outcomes import (
    Decisions,
    Outcomes,
    deadline_outcomes,
    priced_outcomes,
)
from knobwise.envs.bandit.reward import RewardTable, expected_utility
from knobwise.envs.bandit.rule_answers import LONGEST_MS, answer, values_of
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig, reward_of
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.cells import Cells, CountedCells, cells_of
from knobwise.envs.tables.divisions import budget_rows
from knobwise.envs.tables.profile_table import ProfileTable, Split

NODES = 16
"""A mean over a predicted latency is that over so many of its quantiles."""


class Expected(Protocol):
    """What is expected of every configuration, [*, C] each."""

    @property
    def latency_ms(self) -> Tensor: ...

    def meets(self, budgets_ms: Tensor, /) -> Tensor:
        """Return P(latency ≤ budget): budgets [*] → [*, C]."""
        ...

    def quantile(self, share: float, /) -> Tensor:
        """Return the latency in ms that this share is below."""
        ...


@dataclass(frozen=True)
class Rule:
    """What counts under a kind of budget. A *limit* is what a request comes with, in ms: its
    budget, or the value of a right answer. (`limits`, of further costs, are the same for all.)

    A rule of your own, `budget=module:Class`, is a subclass with up to three functions of its own:
    `utility`, `reward` and `allowed`. All else is that of deadlines. Numbers of its own are the
    fields of a frozen dataclass, each with a default; `budget.settings={tau_ms: 5}` sets them, and
    checkpoints keep them with the rule's name. The code is no part of a checkpoint.
    """

    name: ClassVar[str] = ""
    """As in `budget.constraint`; of a rule of the user's own `module:Class`."""
    kind: ClassVar[str] = "deadline"
    """The rule of knobwise that all is like that is no function here, such as words."""
    limit_key: ClassVar[str] = "budget_ms"
    """The key of a request's limit."""
    late: ClassVar[bool] = True
    """Whether answers can be late. Then networks may predict whether they are, learn to follow the
    drift of a machine, and choose the fastest where nothing is in time."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits on further costs, by name."""
    probability: float = BudgetConfig.limit_probability
    """With which a choice is to keep each of them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    # -- what a rule of the user's own may say -----------------------------------------------------

    def utility(self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
        """Return what answers are worth, by which decisions are judged: from 0 to 1, and no less
        under a larger budget.

        Args:
            accuracy, latency_ms, budget_ms: float, of one shape, which may be any. A latency is a
                single measurement.
        """
        return accuracy * (latency_ms <= budget_ms)

    def reward(self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
        """Return what training rewards, any finite numbers; arguments as in `utility`, which it is
        unless a rule says otherwise."""
        return self.utility(accuracy, latency_ms, budget_ms)

    def allowed(self, table: ProfileTable) -> Tensor:
        """Return which cells may be chosen in training and judging, bool [N, C], at least one for
        each sample. A deployed controller knows no table, so it may choose any configuration."""
        # a copy, which a rule may go on from
        return table.mask.clone()

    # -- what counts -------------------------------------------------------------------------------

    @property
    def is_own(self) -> bool:
        """True for a rule of the user's own."""
        return ":" in self.name

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of a rule of the user's own, by name."""
        added = dataclasses.fields(self)[len(dataclasses.fields(Rule)) :]
        return {each.name: getattr(self, each.name) for each in added}

    @property
    def words(self) -> str:
        """The name, with the numbers if it has any."""
        numbers = ", ".join(f"{name}={value}" for name, value in self.numbers.items())
        return f"{self.name} ({numbers})" if numbers else self.name

    @classmethod
    def from_settings(cls, budget: BudgetConfig) -> Self:
        """Return the rule with these settings.

        Raises:
            InputError: a rule of the user's own has no such number, or refuses it.
        """
        return cls(dict(budget.limits or {}), budget.limit_probability)

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
                config = reward_of(self.name) if rewards is None else rewards.config
                of_version = RewardTable(version, config, cells=cells, rule=self)
            return self.look_up(version, decisions, of_version, cells)

        judged = look_up(table)
        if beliefs is None:
            return judged
        estimates = {}
        for name in judged.ESTIMATED:
            values_in = functools.partial(_field_in, name, look_up)
            estimates[name] = beliefs.estimate(decisions.cells, values_in)
        return replace(judged, **estimates)

    def look_up(
        self, table: ProfileTable, decisions: Decisions, rewards: RewardTable, counted: Cells
    ) -> Outcomes:
        """Look up what decisions get in one table, see `outcomes`."""
        return deadline_outcomes(
            table, decisions, rewards, counted, self.over(table), self.mean_utility
        )

    def mean_utility(self, accuracy: Tensor, measurements_ms: Tensor, limits: Tensor) -> Tensor:
        """Return the mean utility over the measurements of cells; 0 where there are none.

        Accuracy [*], measurements [*, R], limits [*] → [*]. Shapes broadcast.
        """
        values = values_of(self, "utility", accuracy, measurements_ms, limits)
        return values.nanmean(-1).nan_to_num()

    def mean_reward(self, accuracy: Tensor, latency_ms: Tensor, limits: Tensor) -> Tensor:
        """Return the rewards of single outcomes, NaN where there are none; shapes broadcast."""
        return values_of(self, "reward", accuracy, latency_ms.unsqueeze(-1), limits).squeeze(-1)

    # -- what is trained and expected --------------------------------------------------------------

    def strategy(self, budget: BudgetConfig) -> type[Strategy]:
        """Return how training draws limits.

        Raises:
            InputError: there is no such strategy, or it does not read other settings.
        """
        name = budget.strategy or DRAWN_BY
        one_of("budget.strategy", name, STRATEGIES)
        budget.refuse_unread(name)
        return STRATEGIES[name]

    def limits_seen(self, latencies_ms: Tensor) -> Tensor:
        """Return the limits that a network's encoding of them is standardised by, float [m], of the
        latencies of its samples, float [n]: the latencies themselves."""
        return latencies_ms

    def check(self, table: ProfileTable, splits: int) -> None:
        """Raise InputError for a table, or a number of splits, that the rule does not go with."""

    def budgets(self, table: ProfileTable, split: Split, wanted: Sequence[float] | None) -> Tensor:
        """Return the budgets that policies are judged at, float [B]: the wanted ones, or those that
        suit the table."""
        return judged_budgets(table, wanted, budget_rows(table, split))

    def judged_limits(self, table: ProfileTable, cells: Cells, budgets_ms: Tensor | None) -> Tensor:
        """Return the limits of validation, float [B]: the wanted budgets, or the default ones.

        Args:
            cells: what counts of the table.
            budgets_ms: those that are wanted, float [B], if any.
        """
        return default_budgets(table) if budgets_ms is None else budgets_ms

    def charged(self, reward: RewardConfig | None) -> RewardConfig | None:
        """Return the reward of training, of a wanted one; None for the default. Here the rule's."""
        return reward_of(self.name)

    def deadlines(self, limits: Tensor) -> Tensor:
        """Return the limits that predictors of latencies learn to keep, float [≤ B]."""
        return limits

    def left(self, limits: Tensor, cost_ms: float) -> Tensor:
        """Return what is left of limits for the answer, float [B], where a decision takes so
        long."""
        return (limits - cost_ms).clamp_min(MIN_LATENCY_MS)

    def expected(self, accuracy: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """Return what decisions are expected to be worth: accuracies [*, C] and limits [*] →
        [*, C]. It is the mean utility over `NODES` quantiles of the predicted latency, for an
        answer of the expected accuracy."""
        # predictions have no holes, so only the result is looked at
        total = torch.zeros(())
        limits = limits.unsqueeze(-1)
        for node in range(NODES):
            latency_ms = expected.quantile((node + 0.5) / NODES).clamp_max(LONGEST_MS)
            total = total + answer(self, "utility", accuracy, latency_ms, limits)
        if not total.isfinite().all():
            raise InputError(f"budget={self.name}: utility: is not finite for some latency")
        return total / NODES

    def likely(self, score: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """Return what is too low where nothing is worth its time, so that the fastest is chosen,
        [*, C]: the score, which is what `expected` returned for these limits [*]."""
        return score

    def worth(self, accuracy: Tensor, measurements_ms: Tensor, limits: Tensor) -> Tensor:
        """Return what decisions were worth, float [B, n, C], NaN counting as nothing: the utility.

        Args:
            accuracy: [n, C].
            measurements_ms: [n, C, R].
            limits: [B, 1, 1].
        """
        return self.mean_utility(accuracy, measurements_ms, limits)


@dataclass(frozen=True)
class Deadline(Rule):
    """Every request has its own budget, beside which further costs may be limited: an answer that
    costs more than a limit is late, and in training as good as a wrong one."""

    name: ClassVar[str] = "deadline"

    def mean_utility(self, accuracy: Tensor, measurements_ms: Tensor, limits: Tensor) -> Tensor:
        """See `Rule`: accuracy · share in time."""
        return expected_utility(accuracy, measurements_ms, limits)

    def look_up(
        self, table: ProfileTable, decisions: Decisions, rewards: RewardTable, counted: Cells
    ) -> Outcomes:
        """See `Rule`: the utility is accuracy · on_time."""
        return deadline_outcomes(table, decisions, rewards, counted, self.over(table))

    def charged(self, reward: RewardConfig | None) -> RewardConfig | None:
        """See `Rule`: the wanted one."""
        return reward

    def expected(self, accuracy: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """See `Rule`: the expected utility Â·P(latency ≤ b)."""
        return accuracy * expected.meets(limits)

    def likely(self, score: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """See `Rule`: the probability of being on time."""
        return expected.meets(limits)


@dataclass(frozen=True)
class MeanBudget(Rule):
    """The average over the requests must not exceed the budget. A limit is the value of a right
    answer, 1/price: the ms that it may cost."""

    name: ClassVar[str] = "mean"
    kind: ClassVar[str] = "mean"
    limit_key: ClassVar[str] = "worth_ms"
    late: ClassVar[bool] = False

    @classmethod
    def from_settings(cls, budget: BudgetConfig) -> Self:
        return cls()

    def counted(self, table: ProfileTable, allowed: Tensor | None = None) -> Cells:
        """See `Rule`: of several measurements the mean, since a mean budget is kept by the mean of
        all answers, in which the slow ones count in full."""
        cells = super().counted(table, allowed)
        if cells.repeats_ms is None:
            return cells
        return replace(cells_of(cells, ...), latency_ms=cells.repeats_ms.nanmean(-1))

    def look_up(
        self, table: ProfileTable, decisions: Decisions, rewards: RewardTable, counted: Cells
    ) -> Outcomes:
        """See `Rule`: latencies are those that count."""
        return priced_outcomes(table, decisions, rewards, counted.latency_ms)

    def strategy(self, budget: BudgetConfig) -> type[Strategy]:
        super().strategy(budget)
        return AnswerValues

    def limits_seen(self, latencies_ms: Tensor) -> Tensor:
        """See `Rule`: the least and the greatest value, [2]."""
        return value_range(latencies_ms)

    def check(self, table: ProfileTable, splits: int) -> None:
        """See `Rule`: there is one split, and no first look to pay for."""
        if table.first_look_ms is not None or splits > 1:
            raise InputError(
                "budget=mean: has one split, so leave out split.folds and split.repeats, and "
                f"no first stage to pay for, as {table.name!r} has if it names first_look_ms"
            )

    def budgets(self, table: ProfileTable, split: Split, wanted: Sequence[float] | None) -> Tensor:
        """See `Rule`: the default are `mean_budgets`."""
        if wanted is not None:
            return judged_budgets(table, wanted).double()
        return mean_budgets(self.counted(table), split.fitted)

    def judged_limits(self, table: ProfileTable, cells: Cells, budgets_ms: Tensor | None) -> Tensor:
        """See `Rule`: values of a right answer."""
        return judged_values(cells)

    def deadlines(self, limits: Tensor) -> Tensor:
        """See `Rule`: none."""
        return limits[:0]

    def left(self, limits: Tensor, cost_ms: float) -> Tensor:
        """See `Rule`: a right answer is worth as much, whatever the decision takes."""
        return limits

    def expected(self, accuracy: Tensor, expected: Expected, limits: Tensor) -> Tensor:
        """See `Rule`: Â − L̂/w, with w the ms that a right answer may cost."""
        return accuracy - expected.latency_ms / limits.unsqueeze(-1)

    def worth(self, accuracy: Tensor, measurements_ms: Tensor, limits: Tensor) -> Tensor:
        """See `Rule`: accuracy − latency/w."""
        return (accuracy - measurements_ms.nanmean(-1) / limits).nan_to_num()


DEADLINES = Deadline()
"""The rule where nothing else is said."""


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

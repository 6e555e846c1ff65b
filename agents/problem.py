"""What a controller is to decide, and all that is known of it: what trainers, evaluators, guards
and experiments are made from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.bandit.outcomes import Decisions, Outcomes
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.rule_choice import allowed_cells, check_limits, rule_of, try_rule
from knobwise.envs.bandit.rules import Deadline, Rule
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable, Split

if TYPE_CHECKING:
    from knobwise.agents.deployed.text import TextEncoder


@dataclass(frozen=True, eq=False)
class Problem:
    """Facts, beliefs and the rule by which decisions are judged.

    `knobwise.agents.evaluation.problems.problem_of` makes one from settings.
    """

    facts: ProfileTable
    """The profile as it was measured; its texts are encoded as features."""
    split: Split
    """What policies are fitted on, chosen by, and judged on."""
    rule: Rule = field(default_factory=Deadline)
    """What counts."""
    beliefs: Beliefs | None = None
    """Predictions for the cells that nobody measured; None where all were, or where what was not
    measured may not be chosen."""
    encoders: Mapping[str, TextEncoder] = field(default_factory=dict)
    """What encoded the texts, by name."""
    calibration: Tensor | None = None
    """int64 [n], samples that are held back for a promise (`knobwise.agents.calibration.promise`):
    nothing is fitted on them or chosen by them. None without a promise."""
    allowed: Tensor | None = None
    """bool [N, C], the cells that samples may have within the limits of the rule; None for all that
    have values."""

    @classmethod
    def from_table(
        cls,
        table: ProfileTable | Problem,
        split: Split | None = None,
        budget: BudgetConfig | None = None,
    ) -> Problem:
        """Return the problem of a table alone, without beliefs; a problem as it is.

        Args:
            split: None to fit on all samples.
            budget: the settings; None for deadlines.

        Raises:
            InputError: see `check_limits` and `try_rule`; or there are limits on further costs,
                which `problem_of` fits on the split.
        """
        if isinstance(table, Problem):
            return table
        if split is None:
            everything = torch.arange(table.num_samples)
            split = Split(everything, everything[:0], everything[:0])
        budget = budget or BudgetConfig()
        check_limits(table, budget)
        if budget.limits:
            raise InputError(
                "budget.limits: what is expected to keep them must be fitted first; give the "
                "problem that knobwise.agents.evaluation.problems.problem_of makes of the table"
            )
        rule = rule_of(budget)
        if rule.is_own:
            try_rule(rule, table)
        return cls(table, split, rule, allowed=allowed_cells(rule, table))

    def budgets(self, wanted: Sequence[float] | None = None) -> Tensor:
        """Return the budgets to judge at, float [B]: the wanted ones, or those that suit the
        table."""
        return self.rule.budgets(self.facts, self.split, wanted)

    def judged_on(self, rows: Tensor) -> Self:
        """Return the problem with other test samples, int64 [n]."""
        return replace(self, split=self.split._replace(test=rows))

    @property
    def values(self) -> ProfileTable:
        """Values in all cells that may be chosen: those measured, and with beliefs predictions."""
        return self.facts if self.beliefs is None else self.beliefs.filled

    @property
    def mask(self) -> Tensor:
        """bool [N, C], the cells that may be chosen."""
        return self.values.mask if self.allowed is None else self.allowed

    @functools.cached_property
    def cells(self) -> Cells:
        """What counts of the values: policies are fitted on it."""
        return self.rule.counted(self.values, self.allowed)

    def outcomes(
        self, decisions: Decisions, *, rewards: RewardTable | None = None, checked: bool = True
    ) -> Outcomes:
        """Look up what decisions get, see `Rule.outcomes`.

        Args:
            checked: whether predictions are checked by what was measured, so that outcomes are
                estimates.
        """
        return self.rule.outcomes(
            self.values,
            decisions,
            rewards=rewards,
            counted=self.cells,
            beliefs=self.beliefs if checked else None,
        )

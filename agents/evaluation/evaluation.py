"""Evaluation: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from knobwise.agents.evaluation.policy import Policy, choices_of, reads_features, requests_of
from knobwise.agents.teacher.completed import CompletedTable, estimated
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.cost_limits import judged_by_limits
from knobwise.envs.bandit.outcomes import DeadlineOutcomes, outcomes_of
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import TRAINING_REWARD
from knobwise.envs.tables.profile_table import ProfileTable


def evaluate_policy(
    policy: Policy,
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    *,
    cost_ms: Tensor | float = 0.0,
) -> DeadlineOutcomes:
    """Let a policy decide for every sample under every deadline, and look up the outcomes.

    The policy sees the features, each deadline minus its own `cost_ms`, and the mask of profiled
    configurations. What costs more than a limit of the table is late.

    Args:
        rows: int64 [n].
        budgets_ms: float [B].
        rewards: defaults to those of training.
        cost_ms: float [B], the time of a decision.

    Raises:
        InputError: the policy chooses outside the mask or returns no configurations, or a cost is
            not finite.
    """
    if not torch.as_tensor(cost_ms).isfinite().all():
        raise InputError(f"cost_ms={cost_ms}: must be finite")
    left = (budgets_ms.double() - cost_ms).clamp_min(MIN_LATENCY_MS).numpy()
    # the policy decides for the time that its own cost leaves
    features, mask = requests_of(table, rows)
    chosen = choices_of(policy, features, left, mask)
    _refuse_unmeasured(policy, chosen, table.mask[rows])
    reads = torch.from_numpy(reads_features(policy, left))
    if isinstance(table, CompletedTable) and not getattr(policy, "hindsight", False):
        return _estimated_outcomes(
            table, rows, chosen, budgets_ms, rewards=rewards, cost_ms=cost_ms, reads=reads
        )
    outcomes = outcomes_of(
        table, rows, chosen, budgets_ms, rewards=rewards, cost_ms=cost_ms, reads=reads
    )
    return judged_by_limits(outcomes, table, rows, budgets_ms)


def _refuse_unmeasured(policy: Policy, chosen: Tensor, mask: Tensor) -> None:
    """Raise InputError if some choices, int64 [n, B], lie outside the mask, bool [n, C]; their
    outcomes would be NaN, and so would every mean."""
    outside = int((~mask.gather(1, chosen)).sum())
    if outside:
        raise InputError(
            f"{type(policy).__name__}.choose: {outside} of {chosen.numel()} choices are "
            "configurations that were not measured for their sample; `mask`, its third argument, "
            "says which were"
        )


def _estimated_outcomes(
    table: CompletedTable,
    rows: Tensor,
    chosen: Tensor,
    budgets_ms: Tensor,
    *,
    rewards: RewardTable | None,
    cost_ms: Tensor | float,
    reads: Tensor,
) -> DeadlineOutcomes:
    """Estimate the outcomes of choices some of which nobody measured, see `estimated`."""
    config = TRAINING_REWARD if rewards is None else rewards.config

    @functools.cache
    def outcomes_in(version: ProfileTable) -> DeadlineOutcomes:
        outcomes = outcomes_of(
            version,
            rows,
            chosen,
            budgets_ms,
            rewards=RewardTable(version, config),
            cost_ms=cost_ms,
            reads=reads,
        )
        return judged_by_limits(outcomes, version, rows, budgets_ms)

    def estimate(name: str) -> Tensor:
        cells = rows.unsqueeze(1), chosen
        return estimated(table, cells, lambda version: getattr(outcomes_in(version), name))

    names = ("accuracy", "latency_ms", "utility", "on_time", "reward")
    estimates = {name: estimate(name) for name in names}
    # whether some configuration is fast enough is known from measured and predicted times alone
    return replace(outcomes_in(table), **estimates)

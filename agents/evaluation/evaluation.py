"""Evaluation: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.evaluation.policy import Policy, choices_of, inputs_of_rows, reads_features
from knobwise.agents.problem import Problem
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.outcomes import DeadlineOutcomes, Decisions
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.profile_table import ProfileTable


def evaluate_policy(
    policy: Policy,
    table: ProfileTable | Problem,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    *,
    cost_ms: Tensor | float = 0.0,
) -> DeadlineOutcomes:
    """Let a policy decide for every sample under every deadline, and look up the outcomes.

    The policy sees the features, each deadline minus its own `cost_ms`, and the mask of what it may
    choose.

    Args:
        table: the profile; or the problem, where some cells are predicted or further costs limited.
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
    problem = Problem.from_table(table)
    left = (budgets_ms.double() - cost_ms).clamp_min(MIN_LATENCY_MS).numpy()
    # the policy decides for the time that its own cost leaves
    features, mask = inputs_of_rows(problem, rows)
    if hasattr(policy, "settled"):
        # its guard is asked with whole budgets
        pairs = list(zip(map(policy.settled, budgets_ms.tolist()), left[:, None], strict=True))
        chosen = torch.cat([choices_of(each, features, limit, mask) for each, limit in pairs], 1)
        reads = torch.from_numpy(np.concatenate([reads_features(*pair) for pair in pairs]))
    else:
        chosen = choices_of(policy, features, left, mask)
        reads = torch.from_numpy(reads_features(policy, left))
    _refuse_unmeasured(policy, chosen, problem.mask[rows])
    outcomes = problem.outcomes(
        Decisions(rows, chosen, budgets_ms, cost_ms, reads),
        rewards=rewards,
        # who knew the outcomes chose by the predictions
        checked=not getattr(policy, "hindsight", False),
    )
    assert isinstance(outcomes, DeadlineOutcomes)
    return outcomes


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

"""Evaluation: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.agents.evaluation.policy import Policy, choices_of, reads_features, requests_of
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.outcomes import DeadlineOutcomes, outcomes_of
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.profile_table import ProfileTable


def evaluate_policy(
    policy: Policy,
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    cost_ms: Tensor | float = 0.0,
) -> DeadlineOutcomes:
    """Let a policy decide for every sample under every deadline, and look up the outcomes.

    The policy sees the features, each deadline minus its own `cost_ms`, and the mask of profiled
    configurations.

    Args:
        rows: int64 [n].
        budgets_ms: float [B].
        rewards: defaults to those of training.
        cost_ms: float [B], the time of a decision.
    """
    left = (budgets_ms.double() - cost_ms).clamp_min(MIN_LATENCY_MS).numpy()
    # the policy decides for the time that its own cost leaves
    features, mask = requests_of(table, rows)
    chosen = choices_of(policy, features, left, mask)
    reads = torch.from_numpy(reads_features(policy, left))
    return outcomes_of(table, rows, chosen, budgets_ms, rewards, cost_ms, reads)

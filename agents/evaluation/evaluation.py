"""Judging: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from knobwise.agents.evaluation.policy import Policy, choices_of, reads_features, requests_of
from knobwise.common.progress import progress
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.outcomes import DeadlineOutcomes, outcomes_of
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.tables.profile_table import ProfileTable


def judge(
    policy: Policy,
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    cost_ms: Tensor | float = 0.0,
) -> DeadlineOutcomes:
    """Let a policy decide for every sample under every deadline, and look up the outcomes.

    The policy sees features, the rest of the deadlines after its own cost, and which configurations
    were profiled for the sample, because the outcomes of others are unknown.

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


def judge_all(
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None,
    policies: Mapping[str, Sequence[Policy]],
    costs_ms: Mapping[str, Sequence[Tensor]],
) -> dict[str, list[DeadlineOutcomes]]:
    """Judge policies by name, one for each seed where they were trained.

    Arguments as in `judge`; the costs by name too, one for each policy that has any.
    """
    judged: dict[str, list[DeadlineOutcomes]] = {name: [] for name in policies}
    # one step for each policy and seed
    with progress("judging", sum(map(len, policies.values())), quiet_s=2) as tick:
        for name, of_seeds in policies.items():
            costs = costs_ms.get(name, [torch.tensor(0.0)] * len(of_seeds))
            for policy, cost_ms in zip(of_seeds, costs, strict=True):
                judged[name].append(judge(policy, table, rows, budgets_ms, rewards, cost_ms))
                tick(sum(map(len, judged.values())), name)
    return judged

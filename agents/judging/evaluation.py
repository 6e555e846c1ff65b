"""Judging: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.judging.policy import Policy, reads_features, requests_of
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.configurations.reward import RewardTable, share_in_time
from knobwise.envs.configurations.settings import TRAINING_REWARD
from knobwise.envs.tables.profile_table import ProfileTable

LOGGED = {
    "loss": "Loss",
    "loss_objective": "Policy_Loss",
    "loss_kl_to_ref": "KL_Loss",
    "loss_critic": "Value_Loss",
    "grad_norm": "Grad_Norm",
    "entropy": "Entropy",
    "kl_to_ref": "KL",
    "clip_fraction": "Clip_Fraction",
    "ESS": "ESS",
    "ratio_mean": "Ratio_Mean",
    "mean_ratio": "Ratio_Mean",
    "explained_variance": "Explained_Variance",
    "zero_advantage_fraction": "Zero_Advantage_Fraction",
    "advantage_mean": "Advantage_Mean",
    "advantage_std": "Advantage_Std",
}
"""Diagnostics of the loss modules, and the names that they are logged under."""


AT_ONCE = 1 << 17
"""Samples that are judged together, so that many of them need little memory."""
OUTCOMES = ("chosen", "accuracy", "latency_ms", "in_time", "utility", "reward", "feasible")
"""The fields of `Judged` with a value for each sample and budget."""


@dataclass(frozen=True)
class Judged:
    """The outcomes of a policy's decisions, n samples × B budgets; of a mixture the mean."""

    budgets_ms: Tensor
    """float [B]."""
    chosen: Tensor
    """int64 [n, B], configuration indices; −1 where a mixture of two decided."""
    accuracy: Tensor
    """float [n, B]."""
    latency_ms: Tensor
    """float [n, B], with the policy's own cost; of several measurements the median."""
    in_time: Tensor | None
    """float [n, B]: the share of the measurements that, with the policy's own cost, meet the
    deadline; None under mean budgets."""
    utility: Tensor
    """float [n, B]: accuracy · in_time; under mean budgets the accuracy."""
    reward: Tensor
    """float [n, B]; NaN under mean budgets."""
    feasible: Tensor | None = None
    """bool [n, B]: True if some profiled configuration meets the deadline; None under mean
    budgets."""

    def metrics(self) -> dict[str, float]:
        """Return means over samples and deadlines, under the logged names (without `Val/`)."""
        assert self.feasible is not None
        assert self.in_time is not None
        satisfaction = 1.0
        if self.feasible.any():
            satisfaction = float(self.in_time[self.feasible].mean())
        numbers = {"Reward": self.reward, "Accuracy": self.accuracy, "Latency": self.latency_ms}
        return _moments(numbers) | {
            "Budget_Violation_Rate": 1 - float(self.in_time.mean()),
            "Utility": float(self.utility.mean()),
            "Satisfaction_Feasible": satisfaction,
        }


def drawn_metrics(
    table: ProfileTable, rows: Tensor, chosen: Tensor, rewards: Tensor, budgets_ms: Tensor | None
) -> dict[str, float]:
    """Return metrics of decisions drawn in training, under the logged names (without `Train/`).

    Args:
        rows: int64 [n].
        chosen: configurations, int64 [n, G].
        rewards: of these, float [n, G].
        budgets_ms: [n]; None at a price, where nothing is late.
    """
    cells = rows.unsqueeze(1), chosen
    accuracy = table.accuracy[cells]
    latency = table.latency_ms[cells]
    metrics = _moments({"Reward": rewards, "Accuracy": accuracy, "Latency": latency})
    if budgets_ms is not None:
        metrics["Budget_Violation_Rate"] = float((latency > budgets_ms.unsqueeze(1)).float().mean())
    return metrics


def _moments(numbers: dict[str, Tensor]) -> dict[str, float]:
    """Return mean and standard deviation of each tensor."""
    metrics = {}
    for name, values in numbers.items():
        metrics[f"{name}_Mean"] = float(values.mean())
        metrics[f"{name}_Std"] = float(values.std())
    return metrics


def judge(
    policy: Policy,
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    cost_ms: Tensor | None = None,
) -> Judged:
    """Let a policy decide for every sample under every deadline, and look up the outcomes.

    The policy sees features, the rest of the deadlines after its own cost, and which configurations
    were profiled for the sample, because the outcomes of others are unknown.

    Args:
        rows: int64 [n].
        budgets_ms: float [B].
        rewards: defaults to those of training.
        cost_ms: float [B], the time of a decision.
    """
    left = budgets_ms.double()
    if cost_ms is not None:
        left = (left - cost_ms).clamp_min(LEAST_LATENCY_MS)
    features, mask = requests_of(table, rows)
    chosen = []
    for limit in left.numpy():
        limits = np.full(len(rows), limit)
        chosen.append(torch.from_numpy(np.asarray(policy.choose(features, limits, mask))))
    reads = torch.from_numpy(reads_features(policy, left.numpy()))
    columns = torch.stack(chosen, 1)
    return outcomes_of(table, rows, columns, budgets_ms, rewards, cost_ms, reads)


def outcomes_of(
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    cost_ms: Tensor | None = None,
    reads: Tensor | None = None,
) -> Judged:
    """Look up the outcomes of choices int64 [n, B].

    The other arguments are those of `judge`. Where `reads` bool [B] is False the choices read no
    features, and do not pay for a first look (`ProfileTable.first_look_ms`).
    """
    if rewards is None:
        rewards = RewardTable(table, TRAINING_REWARD)
    if reads is None:
        reads = torch.ones(len(budgets_ms), dtype=torch.bool)
    if cost_ms is None:
        cost_ms = torch.zeros_like(budgets_ms)
    else:
        cost_ms = cost_ms.to(budgets_ms)
    limits = (budgets_ms - cost_ms).clamp_min(LEAST_LATENCY_MS)
    parts = []
    for part, columns in zip(rows.split(AT_ONCE), chosen.split(AT_ONCE), strict=True):
        parts.append(_outcomes(table, part, columns, budgets_ms, limits, rewards, cost_ms, reads))
    outcomes = {}
    for name in OUTCOMES:
        outcomes[name] = torch.cat([getattr(judged, name) for judged in parts])
    return Judged(budgets_ms=budgets_ms, **outcomes)


def _outcomes(
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    budgets_ms: Tensor,
    limits: Tensor,
    rewards: RewardTable,
    cost_ms: Tensor,
    reads: Tensor,
) -> Judged:
    """Look up the outcomes of some rows, see `outcomes_of`."""
    cells = rows.unsqueeze(1), chosen
    quick = table.without_first_look
    added_ms = cost_ms.expand(chosen.shape)
    if table.first_look_ms is not None:
        added_ms = added_ms - table.first_look_ms[cells] * ~reads
    accuracy = table.accuracy[cells]
    in_time = share_in_time(table.measurements_ms[cells] + added_ms[..., None], budgets_ms)
    fastest = quick.latency_ms[rows].masked_fill(~table.mask[rows], torch.inf)
    device = rewards.accuracy.device
    unread = rewards
    if quick is not table:
        unread = RewardTable(quick, rewards.config, device)
    rewarded = []
    for b, limit in enumerate(limits):
        known = rewards if reads[b] else unread
        column = chosen[:, b, None].to(device)
        repeated = limit.expand(len(rows)).to(device)
        rewarded.append(known.chosen(rows.to(device), column, repeated).cpu())
    return Judged(
        budgets_ms=budgets_ms,
        chosen=chosen,
        accuracy=accuracy,
        latency_ms=table.latency_ms[cells] + added_ms,
        in_time=in_time,
        utility=accuracy * in_time,
        reward=torch.stack(rewarded).squeeze(-1).T,
        feasible=fastest.amin(1, keepdim=True) <= budgets_ms,
    )


def judge_all(
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    policies: Mapping[str, Sequence[Policy]],
    costs_ms: Mapping[str, Sequence[Tensor]] | None = None,
) -> dict[str, list[Judged]]:
    """Judge policies by name, one for each seed where they were trained.

    Arguments as in `judge`; the costs by name too, one for each policy.
    """
    judged: dict[str, list[Judged]] = {}
    count = sum(map(len, policies.values()))
    done = 0
    with progress("judging", count, quiet_s=2) as tick:
        for name, of_seeds in policies.items():
            costs = (costs_ms or {}).get(name, [None] * len(of_seeds))
            judged[name] = []
            for policy, cost_ms in zip(of_seeds, costs, strict=True):
                judged[name].append(judge(policy, table, rows, budgets_ms, rewards, cost_ms))
                done += 1
                tick(done, name)
    return judged

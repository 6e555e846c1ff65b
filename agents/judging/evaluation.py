"""Judging: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knobwise.agents.judging.policy import Baseline, Policy, reads_features
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
    """The outcome of every decision of a policy: n samples × B budgets; of a mixture the expectation."""

    budgets_ms: Tensor
    """float [B]."""
    chosen: Tensor
    """int64 [n, B], configuration indices; −1 where a mixture of two decided."""
    accuracy: Tensor
    """float [n, B]."""
    latency_ms: Tensor
    """float [n, B], with the policy's own cost; of several measurements the median."""
    in_time: Tensor | None
    """float [n, B]: the share of the measurements that, with the policy's own cost, meet the deadline; None under mean
    budgets."""
    utility: Tensor
    """float [n, B]: accuracy · in_time; under mean budgets the accuracy."""
    reward: Tensor
    """float [n, B]; NaN under mean budgets."""
    feasible: Tensor | None = None
    """bool [n, B]: whether any profiled configuration meets the deadline; None under mean budgets."""

    def metrics(self) -> dict[str, float]:
        """Means over samples and deadlines, under the logged names (without `Val/`)."""
        assert self.feasible is not None
        assert self.in_time is not None
        numbers = {"Reward": self.reward, "Accuracy": self.accuracy, "Latency": self.latency_ms}
        return _moments(numbers) | {
            "Budget_Violation_Rate": 1 - float(self.in_time.mean()),
            "Utility": float(self.utility.mean()),
            "Satisfaction_Feasible": float(self.in_time[self.feasible].mean()) if self.feasible.any() else 1.0,
        }


def drawn_metrics(
    table: ProfileTable, rows: Tensor, chosen: Tensor, rewards: Tensor, budgets_ms: Tensor | None
) -> dict[str, float]:
    """The outcomes of decisions drawn in training, under the logged names (without `Train/`): for rows int64 [n] the
    configurations int64 [n, G] and their rewards; budgets [n], None at a price, where nothing is late."""
    accuracy, latency = (values[rows.unsqueeze(1), chosen] for values in (table.accuracy, table.latency_ms))
    metrics = _moments({"Reward": rewards, "Accuracy": accuracy, "Latency": latency})
    if budgets_ms is not None:
        metrics["Budget_Violation_Rate"] = float((latency > budgets_ms.unsqueeze(1)).float().mean())
    return metrics


def _moments(numbers: dict[str, Tensor]) -> dict[str, float]:
    metrics = {}
    for name, values in numbers.items():
        metrics[f"{name}_Mean"], metrics[f"{name}_Std"] = float(values.mean()), float(values.std())
    return metrics


def for_all(limit: Tensor, rows: Tensor) -> Tensor:
    """The same limit, [] or a pair [2], for each of these rows: [n] or [n, 2]."""
    return limit.expand(len(rows), *limit.shape)


def judge(
    policy: Policy[Tensor],
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable | None = None,
    cost_ms: Tensor | None = None,
) -> Judged:
    """Let a policy decide for every sample, int64 [n], under every deadline [B], and look up the outcomes.

    It sees features, what its own cost, [B] in ms, leaves of the deadlines, and which configurations were profiled for
    the sample, because the outcomes of others are unknown. Where it reads no features it does not pay for a first look
    (`ProfileTable.first_look_ms`). `rewards` defaults to those of training. Under weights budgets are pairs of worths
    [B, 2], which nothing is taken from.
    """
    pairs = budgets_ms if budgets_ms.ndim == 2 else None
    budgets_ms = budgets_ms if pairs is None else torch.full((len(pairs),), torch.inf)
    cost_ms = torch.zeros_like(budgets_ms) if cost_ms is None else cost_ms.to(budgets_ms)
    rewards = RewardTable(table, TRAINING_REWARD) if rewards is None else rewards
    parts = [_judged(policy, table, part, budgets_ms, pairs, rewards, cost_ms) for part in rows.split(AT_ONCE)]
    outcomes = {name: torch.cat([getattr(part, name) for part in parts]) for name in OUTCOMES}
    return Judged(budgets_ms=budgets_ms, **outcomes)


def _judged(
    policy: Policy[Tensor],
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    pairs: Tensor | None,
    rewards: RewardTable,
    cost_ms: Tensor,
) -> Judged:
    """The outcomes of some rows, see `judge`; `pairs` [B, 2] are worths, and the budgets then infinite."""
    features, mask = {name: block[rows] for name, block in table.features.items()}, table.mask[rows]
    left = (budgets_ms - cost_ms).clamp_min(LEAST_LATENCY_MS)
    limits = [for_all(limit, rows) for limit in (left if pairs is None else pairs)]
    chosen = torch.stack([policy.choose(features, limit, mask).cpu() for limit in limits], 1)
    at = rows.unsqueeze(1), chosen
    reads, quick = reads_features(policy, left), table.without_first_look
    added_ms = cost_ms.expand(chosen.shape)
    if table.first_look_ms is not None:
        added_ms = added_ms - table.first_look_ms[at] * ~reads
    accuracy, in_time = table.accuracy[at], share_in_time(table.measurements_ms[at] + added_ms[..., None], budgets_ms)
    fastest = quick.latency_ms[rows].masked_fill(~mask, torch.inf).amin(1, keepdim=True)
    device = rewards.accuracy.device
    unread = rewards if quick is table else RewardTable(quick, rewards.config, device)
    rewarded = [
        (rewards if reads[i] else unread).chosen(rows.to(device), chosen[:, i, None].to(device), limit.to(device)).cpu()
        for i, limit in enumerate(limits)
    ]
    return Judged(
        budgets_ms=budgets_ms,
        chosen=chosen,
        accuracy=accuracy,
        latency_ms=table.latency_ms[at] + added_ms,
        in_time=in_time,
        utility=accuracy * in_time,
        reward=torch.stack(rewarded).squeeze(-1).T,
        feasible=fastest <= budgets_ms,
    )


def judge_all(
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    controllers: Sequence[Policy[Tensor]],
    baselines: Sequence[Baseline],
    costs_ms: Mapping[str, Sequence[Tensor]] | None = None,
    teachers: Sequence[Policy[Tensor]] = (),
) -> dict[str, list[Judged]]:
    """The outcomes by policy: one for each seed of `controller` and of `teacher`, one for each baseline. Arguments as
    in `judge`, the costs by policy, one for each of its outcomes."""
    judged: dict[str, list[Judged]] = {}
    named = [*(("controller", c) for c in controllers), *(("teacher", t) for t in teachers)]
    named += [(b.name, b) for b in baselines]
    with progress("judging", len(named), quiet_s=2) as tick:
        for done, (name, policy) in enumerate(named, 1):
            outcomes, costs = judged.setdefault(name, []), (costs_ms or {}).get(name)
            cost = costs[len(outcomes)] if costs else None
            outcomes.append(judge(policy, table, rows, budgets_ms, rewards, cost))
            tick(done, name)
    return judged

"""The outcomes of decisions: what they would have got on samples of a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.reward import RewardTable, share_on_time
from knobwise.envs.bandit.settings import TRAINING_REWARD
from knobwise.envs.tables.profile_table import ProfileTable


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of a policy's decisions, n samples × B budgets; of a mixture the mean."""

    chosen: Tensor
    """int64 [n, B], configuration indices; −1 where a mixture of two decided."""
    accuracy: Tensor
    """float [n, B]."""
    latency_ms: Tensor
    """float [n, B], with the policy's own cost; of several measurements the median."""
    utility: Tensor
    """float [n, B]: accuracy · on_time; under mean budgets the accuracy."""


@dataclass(frozen=True)
class DeadlineOutcomes(Outcomes):
    """The outcomes of decisions under deadlines."""

    on_time: Tensor
    """float [n, B]: the share of the measurements that, with the policy's own cost, meet the
    deadline."""
    reward: Tensor
    """float [n, B]."""
    feasible: Tensor
    """bool [n, B]: True if some profiled configuration meets the deadline."""

    def metrics(self) -> dict[str, float]:
        """Return means over samples and deadlines, under the logged names (without `Val/`)."""
        # where no deadline can be met, all that can be are
        satisfaction = self.on_time[self.feasible].mean().nan_to_num(1.0)
        numbers = {"Reward": self.reward, "Accuracy": self.accuracy, "Latency": self.latency_ms}
        return moments(numbers) | {
            "Budget_Violation_Rate": 1 - float(self.on_time.mean()),
            "Utility": float(self.utility.mean()),
            "Satisfaction_Feasible": float(satisfaction),
        }


def moments(numbers: dict[str, Tensor]) -> dict[str, float]:
    """Return mean and standard deviation of each tensor, under the names that runs are compared
    by."""
    metrics = {}
    for name, values in numbers.items():
        metrics[f"{name}_Mean"] = float(values.mean())
        metrics[f"{name}_Std"] = float(values.std())
    return metrics


def outcomes_of(
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    budgets_ms: Tensor,
    *,
    rewards: RewardTable | None = None,
    cost_ms: Tensor | float = 0.0,
    reads: Tensor | None = None,
) -> DeadlineOutcomes:
    """Look up the outcomes of choices int64 [n, B].

    Args:
        rows: int64 [n].
        budgets_ms: float [B].
        rewards: defaults to those of training.
        cost_ms: float [B], the time of a decision.
        reads: bool [B]; where it is False the choices read no features, and do not pay for a first
            look (`ProfileTable.first_look_ms`).
    """
    if rewards is None:
        rewards = RewardTable(table, TRAINING_REWARD)
    if reads is None:
        reads = torch.ones(len(budgets_ms), dtype=torch.bool)
    # the cell of each choice, [n, B]
    cells = rows.unsqueeze(1), chosen
    quick = table.without_first_look
    added_ms = torch.as_tensor(cost_ms).to(budgets_ms).expand(chosen.shape)
    limits = (budgets_ms - added_ms).clamp_min(MIN_LATENCY_MS)
    device = rewards.accuracy.device
    # a request of one choice for each sample and deadline
    row_of = cells[0].to(device)
    choice = chosen.unsqueeze(2).to(device)
    limits = limits.to(device)
    reward = rewards.chosen(row_of, choice, limits)
    if table.first_look_ms is not None:
        unread = RewardTable(quick, rewards.config, device).chosen(row_of, choice, limits)
        reward = reward.where(reads.to(device).unsqueeze(1), unread)
        added_ms = added_ms - table.first_look_ms[cells] * ~reads
    fastest = quick.latency_ms[rows].masked_fill(~table.mask[rows], torch.inf).amin(1)
    accuracy = table.accuracy[cells]
    # a cell may have been measured several times
    on_time = share_on_time(table.measurements_ms[cells] + added_ms[..., None], budgets_ms)
    return DeadlineOutcomes(
        chosen=chosen,
        accuracy=accuracy,
        latency_ms=table.latency_ms[cells] + added_ms,
        utility=accuracy * on_time,
        on_time=on_time,
        reward=reward.squeeze(2).cpu(),
        feasible=fastest.unsqueeze(1) <= budgets_ms,
    )

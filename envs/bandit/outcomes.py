"""The outcomes of decisions: what they would have got on samples of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from knobwise.envs.bandit.reward import RewardTable, share_on_time
from knobwise.envs.tables.cells import Cells, unread_ms
from knobwise.envs.tables.profile_table import ProfileTable

AT_ONCE = 4096
"""Samples that are looked up together."""


class Decisions(NamedTuple):
    """Choices for n samples under B limits, and what they pay."""

    rows: Tensor
    """int64 [n], the samples."""
    chosen: Tensor
    """int64 [n, B], configurations."""
    limits: Tensor
    """float [B], in ms: deadlines, or under a mean budget values of a right answer."""
    cost_ms: Tensor | float = 0.0
    """float [B], the time of a decision with its features."""
    reads: Tensor | None = None
    """bool [B]; where it is False the choices read no features, and do not pay for a first look
    (`ProfileTable.first_look_ms`). None: they always read."""

    @property
    def cells(self) -> tuple[Tensor, Tensor]:
        """The cell of each choice: rows and configurations, which broadcast to [n, B]."""
        return self.rows.unsqueeze(1), self.chosen

    @property
    def own_ms(self) -> Tensor:
        """`cost_ms` of each choice, float [n, B]."""
        return torch.as_tensor(self.cost_ms).to(self.limits).expand(self.chosen.shape)

    def added_ms(self, table: ProfileTable) -> Tensor:
        """Return what is added to the latencies of cells, float [n, B]; less than nothing where no
        first look is paid."""
        if table.first_look_ms is None or self.reads is None:
            return self.own_ms
        return self.own_ms - table.first_look_ms[self.cells] * ~self.reads


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of a policy's decisions, n samples × B limits."""

    ESTIMATED: ClassVar[tuple[str, ...]] = ("accuracy", "latency_ms", "utility", "reward")
    """What is estimated where predictions are to be checked."""
    chosen: Tensor
    """int64 [n, B], configuration indices."""
    accuracy: Tensor
    """float [n, B]."""
    latency_ms: Tensor
    """float [n, B], with the policy's own cost; of several measurements the median."""
    utility: Tensor
    """float [n, B]: accuracy · on_time; under mean budgets the accuracy."""
    reward: Tensor
    """float [n, B]."""

    def metrics(self) -> dict[str, float]:
        """Return means over samples and limits, under the logged names (without `Val/`)."""
        return moments(
            {"Reward": self.reward, "Accuracy": self.accuracy, "Latency": self.latency_ms}
        )


@dataclass(frozen=True)
class DeadlineOutcomes(Outcomes):
    """The outcomes of decisions under deadlines."""

    # whether some configuration is fast enough is known from measured and predicted times alone
    ESTIMATED: ClassVar = (*Outcomes.ESTIMATED, "on_time")
    on_time: Tensor
    """float [n, B]: the share of the measurements that, with the policy's own cost, meet the
    deadline; 0 for an answer above a limit on further costs."""
    feasible: Tensor
    """bool [n, B]: True if some configuration that may be chosen meets the deadline, and all
    limits."""

    def metrics(self) -> dict[str, float]:
        """See `Outcomes`."""
        # where no deadline can be met, all that can be are
        satisfaction = self.on_time[self.feasible].mean().nan_to_num(1.0)
        return super().metrics() | {
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


def priced_outcomes(
    table: ProfileTable,
    decisions: Decisions,
    rewards: RewardTable,
    latency_ms: Tensor | None = None,
) -> Outcomes:
    """Look up what decisions get where nothing is late.

    Args:
        rewards: those of what counts.
        latency_ms: [N, C], what answers took; None for the medians of their measurements.
    """
    if latency_ms is None:
        latency_ms = table.latency_ms
    row_of, chosen = decisions.cells
    added_ms = decisions.added_ms(table)
    device = rewards.accuracy.device
    # a request of one choice for each sample and limit
    reward = rewards.chosen(
        row_of.to(device),
        chosen.unsqueeze(2).to(device),
        decisions.limits.to(device),
        added_ms.unsqueeze(2).to(device),
    )
    accuracy = table.accuracy[decisions.cells]
    return Outcomes(
        chosen=chosen,
        accuracy=accuracy,
        latency_ms=latency_ms[decisions.cells] + added_ms,
        utility=accuracy,
        reward=reward.squeeze(2).cpu(),
    )


def deadline_outcomes(
    table: ProfileTable,
    decisions: Decisions,
    rewards: RewardTable,
    counted: Cells,
    over: Tensor | None = None,
    mean_utility: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> DeadlineOutcomes:
    """Look up what decisions get under deadlines, see `priced_outcomes`.

    Args:
        counted: what counts of the table.
        over: bool [N, C], the answers that cost more than a limit; None for none.
        mean_utility: see `Rule.mean_utility`; None for accuracy · on_time.
    """
    priced = priced_outcomes(table, decisions, rewards)
    measured_ms = table.measurements_ms[decisions.cells] + decisions.added_ms(table)[..., None]
    # a cell may have been measured several times
    on_time = share_on_time(measured_ms, decisions.limits)
    if over is not None:
        on_time = on_time * ~over[decisions.cells]
    fastest = []
    # a few samples at a time, of which no copy of the table is made
    for rows in decisions.rows.split(AT_ONCE):
        impossible = ~counted.mask[rows]
        if over is not None:
            impossible |= over[rows]
        fastest.append(unread_ms(table, rows).masked_fill(impossible, torch.inf).amin(1))
    fastest_ms = torch.cat(fastest)
    utility = priced.accuracy * on_time
    if mean_utility is not None:
        utility = mean_utility(counted.accuracy[decisions.cells], measured_ms, decisions.limits)
    shared = dict(vars(priced)) | {"utility": utility}
    feasible = fastest_ms.unsqueeze(1) <= decisions.limits
    return DeadlineOutcomes(**shared, on_time=on_time, feasible=feasible)

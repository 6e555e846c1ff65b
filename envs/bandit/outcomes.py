"""The outcomes of decisions: what they would have got on samples of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.reward import RewardTable, share_on_time
from knobwise.envs.tables.cells import Cells, unread, unread_ms
from knobwise.envs.tables.profile_table import ProfileTable


class Paid(NamedTuple):
    """What a policy pays for its decisions, under B limits."""

    cost_ms: Tensor | float = 0.0
    """float [B], the time of a decision with its features."""
    reads: Tensor | None = None
    """bool [B]; where it is False the choices read no features, and do not pay for a first look
    (`ProfileTable.first_look_ms`). None: they always read."""


FREE = Paid()
"""Nothing, but for a first look."""


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of a policy's decisions, n samples × B limits."""

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
    rows: Tensor,
    chosen: Tensor,
    limits: Tensor,
    paid: Paid,
    *,
    rewards: RewardTable,
    counted: Cells,
) -> Outcomes:
    """Look up what choices int64 [n, B] get, where nothing is late.

    Args:
        rows: int64 [n].
        limits: float [B], in ms.
        rewards: of what counts.
        counted: what counts of the table.
    """
    # the cell of each choice, [n, B]
    cells = rows.unsqueeze(1), chosen
    added_ms = added_by(table, cells, paid, limits)
    # a reward is that of the time which the decision leaves
    charged_ms = torch.as_tensor(paid.cost_ms).to(limits).expand(chosen.shape)
    left_ms = (limits - charged_ms).clamp_min(MIN_LATENCY_MS)
    device = rewards.accuracy.device
    # a request of one choice for each sample and limit
    request = cells[0].to(device), chosen.unsqueeze(2).to(device), left_ms.to(device)
    reward = rewards.chosen(*request)
    if table.first_look_ms is not None and paid.reads is not None:
        of_unread = RewardTable(table, rewards.config, device, cells=unread(counted))
        reads = paid.reads.to(device).unsqueeze(1)
        reward = reward.where(reads, of_unread.chosen(*request))
    accuracy = table.accuracy[cells]
    return Outcomes(
        chosen=chosen,
        accuracy=accuracy,
        latency_ms=table.latency_ms[cells] + added_ms,
        utility=accuracy,
        reward=reward.squeeze(2).cpu(),
    )


def deadline_outcomes(
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    limits: Tensor,
    paid: Paid,
    *,
    rewards: RewardTable,
    counted: Cells,
    over: Tensor | None = None,
) -> DeadlineOutcomes:
    """Look up what choices get under deadlines, see `priced_outcomes`.

    Args:
        over: bool [N, C], the answers that cost more than a limit; None for none.
    """
    cells = rows.unsqueeze(1), chosen
    looked_up = priced_outcomes(table, rows, chosen, limits, paid, rewards=rewards, counted=counted)
    measured_ms = table.measurements_ms[cells] + added_by(table, cells, paid, limits)[..., None]
    # a cell may have been measured several times
    on_time = share_on_time(measured_ms, limits)
    possible = counted.mask[rows]
    if over is not None:
        on_time = on_time * ~over[cells]
        possible = possible & ~over[rows]
    fastest_ms = unread_ms(table, rows).masked_fill(~possible, torch.inf).amin(1)
    shared = dict(vars(looked_up)) | {"utility": looked_up.accuracy * on_time}
    return DeadlineOutcomes(**shared, on_time=on_time, feasible=fastest_ms.unsqueeze(1) <= limits)


def added_by(
    table: ProfileTable, cells: tuple[Tensor, Tensor], paid: Paid, limits: Tensor
) -> Tensor:
    """Return what a policy's decisions add to the latencies of cells, ms, float [n, B]; less than
    nothing where they save the first look."""
    added_ms = torch.as_tensor(paid.cost_ms).to(limits).expand(cells[1].shape)
    if table.first_look_ms is None or paid.reads is None:
        return added_ms
    return added_ms - table.first_look_ms[cells] * ~paid.reads

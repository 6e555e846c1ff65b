"""The reward of a decision, and the utility that decisions are judged by.

`settings.py` lists the kinds of reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.envs.configurations.reward_function import RewardFunction
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable


def utility(accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Compute the utility that every policy is judged by: accuracy if latency ≤ budget, else 0.

    Shapes broadcast. NaN cells give 0.
    """
    return torch.where(latency_ms <= budget_ms, accuracy, 0.0)


def share_in_time(measurements_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Compute the share of a cell's measurements that are within the budget; 0 if there are none.

    Measurements [*, R], NaN for none, and budgets that broadcast with [*] → float [*].
    """
    count = (~measurements_ms.isnan()).sum(-1).clamp_min(1)
    in_time = (measurements_ms <= budget_ms.unsqueeze(-1)).sum(-1)
    return in_time.to(measurements_ms.dtype) / count


def expected_utility(accuracy: Tensor, measurements_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Compute the mean `utility` over a cell's measurements, accuracy · share in time.

    Accuracy [*], measurements [*, R], budgets [*] → [*]. Shapes broadcast. NaN cells give 0. For
    R = 1 it is `utility`, bit for bit.
    """
    share = share_in_time(measurements_ms, budget_ms)
    return torch.where(share > 0, accuracy * share, 0.0)


def reward(
    accuracy: Tensor,
    latency_ms: Tensor,
    budget_ms: Tensor,
    complexity: Tensor,
    config: RewardConfig,
) -> Tensor:
    """Compute the reward of a configuration under a budget, for the kinds that have a formula.

    `utility` = α·accuracy if latency ≤ budget, else −miss.

    `priced` = α·accuracy − latency/worth, where the budget is the worth of a right answer, in ms.

    `shaped` = α·accuracy − β·sigmoid(10·(latency/budget − 1)) − γ·(max(0, latency −
    budget)/budget)² − ε·complexity + δ·(1 − latency/budget if latency ≤ budget else 0), the formula
    of the original controller.

    All tensors broadcast. NaN in, NaN out. `RewardTable` also knows the kind `function`.
    """
    relative = latency_ms / budget_ms
    if config.kind == "priced":
        return config.alpha * accuracy - relative
    if config.kind == "utility":
        kept = torch.where(relative <= 1, config.alpha * accuracy, -config.miss)
        return torch.where(relative.isnan(), torch.nan, kept)
    excess = relative - 1
    return (
        config.alpha * accuracy
        - config.beta * torch.sigmoid(10 * excess)
        - config.gamma * excess.clamp_min(0).square()
        - config.epsilon * complexity
        - config.delta * excess.clamp_max(0)
    )


def complexity(table: ProfileTable) -> Tensor:
    """Compute for each configuration the mean over its knobs of value / largest value, float32 [C].

    Knobs whose values are names or negative have no size and count 0.
    """
    columns = []
    for k, knob in enumerate(table.knobs):
        sizes = [0.0 if isinstance(v, str) else float(v) for v in knob.values]
        largest = max(sizes)
        if min(sizes) < 0 or largest <= 0:
            sizes = [0.0] * len(sizes)
            largest = 1.0
        columns.append(torch.tensor(sizes)[table.configurations[:, k]] / largest)
    return torch.stack(columns).mean(0)


class RewardTable:
    """The rewards of a table's configurations, computed on demand.

    A cell that was measured repeatedly has a reward for each measurement.

    Args:
        table: the profile.
        config: the settings of the reward.
        device: where rewards are computed; None for where the table is.
        repeats: `draw` for all measurements of a cell; `median` for its median latency alone.
        cost_ms: the time that a decision and its features take; it is added to every latency.
    """

    def __init__(
        self,
        table: ProfileTable,
        config: RewardConfig,
        device: torch.device | str | None = None,
        repeats: str = "draw",
        cost_ms: float = 0.0,
    ) -> None:
        self.config = config
        self.complexity = complexity(table).to(device)
        self.configurations = torch.arange(table.num_configurations, device=self.complexity.device)
        self.function: RewardFunction | None = None
        if config.function is not None:
            self.function = RewardFunction(config.function, table, device)
        self.accuracy = table.accuracy.to(device)
        self.latency_ms = table.latency_ms.to(device)
        self.repeats_ms: Tensor | None = None
        if table.repeats_ms is not None and repeats == "draw":
            self.repeats_ms = table.measurements_ms.to(device)
        if cost_ms:
            self.latency_ms = self.latency_ms + cost_ms
            if self.repeats_ms is not None:
                self.repeats_ms = self.repeats_ms + cost_ms

    def all(self, rows: Tensor, budgets_ms: Tensor) -> Tensor:
        """Return the reward of every configuration, int64 [n], float [n] → float32 [n, C].

        Rewards are means over the measurements of a cell, and NaN where it was not profiled.
        """
        accuracy = self.accuracy.index_select(0, rows)
        budgets_ms = budgets_ms.unsqueeze(-1)
        if self.repeats_ms is None:
            latency_ms = self.latency_ms.index_select(0, rows)
            return self._rewards(accuracy, latency_ms, budgets_ms, self.configurations)
        measured = self.repeats_ms.index_select(0, rows)
        return self._mean(accuracy, measured, budgets_ms, self.configurations)

    def outcome(
        self, rows: Tensor, configurations: Tensor, repeats: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return accuracy and latency in ms of these choices, float32 [n, G] each.

        Args:
            rows: int64 [n].
            configurations: int64 [n, G].
            repeats: int64 [n, G], ≥ 0, the measurement that gives the latency, modulo the number of
                measurements of the cell; None for the median.
        """
        # cells count through the flattened table
        cells = rows.unsqueeze(-1) * len(self.complexity) + configurations
        if repeats is None or self.repeats_ms is None:
            return self.accuracy.take(cells), self.latency_ms.take(cells)
        measured = self.repeats_ms.flatten(0, 1)[cells]
        repeat = repeats % (~measured.isnan()).sum(-1).clamp_min(1)
        return self.accuracy.take(cells), measured.gather(-1, repeat.unsqueeze(-1)).squeeze(-1)

    def chosen(
        self,
        rows: Tensor,
        configurations: Tensor,
        budgets_ms: Tensor,
        repeats: Tensor | None = None,
    ) -> Tensor:
        """Return the rewards of these choices, float32 [n, G].

        Args:
            rows: int64 [n].
            configurations: int64 [n, G].
            budgets_ms: float [n].
            repeats: int64 [n, G], the measurements, see `outcome`; None for the mean over all
                measurements of each cell.
        """
        budgets_ms = budgets_ms.unsqueeze(-1)
        if repeats is None and self.repeats_ms is not None:
            cells = rows.unsqueeze(-1) * len(self.complexity) + configurations
            measured = self.repeats_ms.flatten(0, 1)[cells]
            return self._mean(self.accuracy.take(cells), measured, budgets_ms, configurations)
        return self._rewards(
            *self.outcome(rows, configurations, repeats), budgets_ms, configurations
        )

    def _mean(
        self, accuracy: Tensor, measured: Tensor, budgets_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """Return the mean reward over measurements [*, R] of cells [*]."""
        accuracy = accuracy.unsqueeze(-1)
        budgets_ms = budgets_ms.unsqueeze(-1)
        configurations = configurations.unsqueeze(-1)
        return self._rewards(accuracy, measured, budgets_ms, configurations).nanmean(-1)

    def _rewards(
        self, accuracy: Tensor, latency_ms: Tensor, budgets_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """Return the reward of each measurement; int64 configurations and the others broadcast."""
        if self.function is not None:
            return self.function(accuracy, latency_ms, budgets_ms, configurations)
        return reward(
            accuracy, latency_ms, budgets_ms, self.complexity[configurations], self.config
        )

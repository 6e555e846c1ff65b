"""The reward of one decision, and the utility that decisions are judged by. `settings.py` lists the
kinds of reward."""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.envs.configurations.reward_function import RewardFunction
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable


def utility(accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """accuracy if latency ≤ budget, else 0, by which every policy is judged. Shapes broadcast; NaN
    cells give 0."""
    return torch.where(latency_ms <= budget_ms, accuracy, 0.0)


def share_in_time(measurements_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """The share of a cell's measurements that are within the budget: [*, R] with NaN for no
    measurement, and budgets that broadcast with [*] → float [*]; 0 where nothing was measured."""
    count = (~measurements_ms.isnan()).sum(-1).clamp_min(1)
    in_time = (measurements_ms <= budget_ms.unsqueeze(-1)).sum(-1)
    return in_time.to(measurements_ms.dtype) / count


def expected_utility(accuracy: Tensor, measurements_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """The mean of `utility` over a cell's measurements, accuracy · share in time: accuracy [*],
    measurements [*, R], budgets [*]. Shapes broadcast; NaN cells give 0; for R = 1 it is `utility`,
    bit for bit."""
    share = share_in_time(measurements_ms, budget_ms)
    return torch.where(share > 0, accuracy * share, 0.0)


def reward(
    accuracy: Tensor,
    latency_ms: Tensor,
    budget_ms: Tensor,
    complexity: Tensor,
    config: RewardConfig,
) -> Tensor:
    """The reward of running a configuration under a budget, by a formula; `RewardTable` also knows
    `function`.

    `shaped` = α·accuracy − β·sigmoid(10·(latency/budget − 1)) − γ·(max(0, latency −
    budget)/budget)² − ε·complexity + δ·(1 − latency/budget if latency ≤ budget else 0), the formula
    of the original controller.

    Under `priced` the budget is the worth of a right answer, in ms. All tensors broadcast. NaN in,
    NaN out.
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


def at_worths(accuracy: Tensor, latency_ms: Tensor, cost: Tensor, worths: Tensor) -> Tensor:
    """accuracy − latency/worth − cost/worth: [*, C] each, worths [*, 2] in ms and in the unit of
    the cost → [*, C]."""
    worth_ms, worth = worths.unsqueeze(-2).unbind(-1)
    return accuracy - latency_ms / worth_ms - cost / worth


def complexity(table: ProfileTable) -> Tensor:
    """float32 [C]: for each configuration the mean over its knobs of value / the knob's largest
    value. Knobs whose values are names or negative have no size and count 0."""
    columns = []
    for number, knob in enumerate(table.knobs):
        sizes = [0.0 if isinstance(v, str) else float(v) for v in knob.values]
        largest = max(sizes)
        if min(sizes) < 0 or largest <= 0:
            sizes = [0.0] * len(sizes)
            largest = 1.0
        columns.append(torch.tensor(sizes)[table.configurations[:, number]] / largest)
    return torch.stack(columns).mean(0)


class RewardTable:
    """The rewards of a table's configurations, computed on demand; without a device, where the
    table is.

    A cell that was measured repeatedly has a reward for each measurement. `repeats="median"` keeps
    the one of its median latency alone. Under weights budgets are pairs of worths [n, 2], and the
    further cost is subtracted. `cost_ms` is what a decision and its features take themselves; it is
    added to every latency.
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
        if config.function is None:
            self.function = None
        else:
            self.function = RewardFunction(config.function, table, device)
        self.accuracy = table.accuracy.to(device)
        self.latency_ms = table.latency_ms.to(device)
        if table.cost is None:
            self.cost = None
        else:
            self.cost = table.cost.to(device)
        several = table.repeats_ms is not None and repeats == "draw"
        if several:
            self.repeats_ms: Tensor | None = table.measurements_ms.to(device)
        else:
            self.repeats_ms = None
        if cost_ms:
            self.latency_ms = self.latency_ms + cost_ms
            if self.repeats_ms is not None:
                self.repeats_ms = self.repeats_ms + cost_ms

    def all(self, rows: Tensor, budgets_ms: Tensor) -> Tensor:
        """int64 [n], float [n] → float32 [n, C], means over the measurements; NaN where a cell was
        not profiled."""
        if budgets_ms.ndim == 2:
            return (
                self.all(rows, budgets_ms[:, 0])
                - self.further_cost(rows, self.configurations) / budgets_ms[:, 1:]
            )
        accuracy = self.accuracy.index_select(0, rows)
        budgets_ms = budgets_ms.unsqueeze(-1)
        if self.repeats_ms is None:
            latency_ms = self.latency_ms.index_select(0, rows)
            return self._rewards(accuracy, latency_ms, budgets_ms, self.configurations)
        return self._mean(
            accuracy, self.repeats_ms.index_select(0, rows), budgets_ms, self.configurations
        )

    def outcome(
        self, rows: Tensor, configurations: Tensor, repeats: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """int64 [n] rows, int64 [n, G] configurations → accuracy and latency in ms, float32 [n, G]
        each.

        `repeats` int64 [n, G] ≥ 0 says which measurement's latency, modulo how many the cell has;
        None is the median.
        """
        cells = rows.unsqueeze(-1) * len(self.complexity) + configurations
        if repeats is None or self.repeats_ms is None:
            return self.accuracy.take(cells), self.latency_ms.take(cells)
        measured = self.repeats_ms.flatten(0, 1)[cells]
        place = repeats % (~measured.isnan()).sum(-1).clamp_min(1)
        return self.accuracy.take(cells), measured.gather(-1, place.unsqueeze(-1)).squeeze(-1)

    def chosen(
        self,
        rows: Tensor,
        configurations: Tensor,
        budgets_ms: Tensor,
        repeats: Tensor | None = None,
    ) -> Tensor:
        """int64 [n] rows, int64 [n, G] configurations, float [n] budgets → float32 [n, G]: the
        reward of the measurements in `repeats`, see `outcome`; for None the mean over all
        measurements of each cell."""
        if budgets_ms.ndim == 2:
            paid = self.further_cost(rows, configurations) / budgets_ms[:, 1:]
            return self.chosen(rows, configurations, budgets_ms[:, 0], repeats) - paid
        budgets_ms = budgets_ms.unsqueeze(-1)
        if repeats is None and self.repeats_ms is not None:
            cells = rows.unsqueeze(-1) * len(self.complexity) + configurations
            measured = self.repeats_ms.flatten(0, 1)[cells]
            return self._mean(self.accuracy.take(cells), measured, budgets_ms, configurations)
        return self._rewards(
            *self.outcome(rows, configurations, repeats), budgets_ms, configurations
        )

    def further_cost(self, rows: Tensor, configurations: Tensor) -> Tensor:
        """int64 [n] rows, int64 [n, G] or [G] configurations → the further cost, which the table
        must have, [n, G]."""
        assert self.cost is not None
        return self.cost[rows.unsqueeze(-1), configurations]

    def _mean(
        self, accuracy: Tensor, measured: Tensor, budgets_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """The mean reward over measurements [*, R] of cells [*]."""
        cells = (each.unsqueeze(-1) for each in (accuracy, budgets_ms, configurations))
        accuracy, budgets_ms, configurations = cells
        return self._rewards(accuracy, measured, budgets_ms, configurations).nanmean(-1)

    def _rewards(
        self, accuracy: Tensor, latency_ms: Tensor, budgets_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """The reward of each measurement; int64 configurations and the others broadcast."""
        if self.function is not None:
            return self.function(accuracy, latency_ms, budgets_ms, configurations)
        return reward(
            accuracy, latency_ms, budgets_ms, self.complexity[configurations], self.config
        )

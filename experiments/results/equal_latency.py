"""Under mean budgets a policy hardly ever spends exactly its budget. So it is compared with what
the static mix, the best single configuration and the oracle get at *equal mean latency* on the same
samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.judging.baselines import averages
from knobwise.agents.judging.evaluation import Judged
from knobwise.agents.stack.prices import (
    MeanBudgetPolicy,
    StaticMix,
    best_single_at,
    oracle_at_mean,
    static_hull,
)
from knobwise.envs.tables.profile_table import ProfileTable


class Reference:
    """What any policy is compared with, by its spending on the test samples.

    Args:
        fitted, test: int64, the rows that static policies are chosen on, and those that they are
            judged on.
    """

    def __init__(self, table: ProfileTable, fitted: Tensor, test: Tensor) -> None:
        self.table = table
        self.fitted = fitted
        self.test = test
        self.accuracy = table.accuracy[test].double()
        self.latency_ms = table.latency_ms[test].double()
        self.mask = table.mask[test]
        self.averages = averages(table, fitted)
        self.corners = static_hull(*self.averages)
        at_corners = StaticMix(*self.averages, self.averages[1][self.corners])
        self._accuracy, latency_ms = at_corners.expected(table, test)
        # a dearer corner may turn out cheaper on the test samples; from there on the mix costs what
        # the dearest did
        self._means = latency_ms.mean(0).cummax(0).values

    def hull(self) -> list[dict[str, Any]]:
        """The corners that the static mix lies between, from the cheapest to the most accurate."""
        values = zip(
            self.corners.tolist(),
            self._accuracy.mean(0).tolist(),
            self._means.tolist(),
            strict=True,
        )
        return [
            {"label": self.table.label(c), "accuracy": a, "latency_ms": ms} for c, a, ms in values
        ]

    def static_mix(self, spent: Tensor) -> Tensor:
        """Accuracy of the static mix whose mean latency on the test samples is `spent`, float64 [B]
        ms → [n, B].

        It mixes two neighbours on the hull of the averages of `fitted`; only their shares are set
        on the test samples, and by latency alone. Below the cheapest corner it is this corner,
        above the dearest that one.
        """
        if len(self._means) == 1:
            return self._accuracy.expand(-1, len(spent))
        high = torch.searchsorted(self._means, spent).clamp(1, len(self._means) - 1)
        low = high - 1
        share = (
            ((spent - self._means[low]) / (self._means[high] - self._means[low]))
            .nan_to_num(0.0)
            .clamp(0, 1)
        )
        return torch.lerp(self._accuracy[:, low], self._accuracy[:, high], share)

    def best_single(self, spent: Tensor) -> Tensor:
        """Accuracy of the single configuration that was the most accurate on `fitted` among those
        whose mean latency on the test samples is at most `spent`, or up to 1 % more, so that no
        hair decides: float64 [B] ms → [n, B]."""
        cost = averages(self.table, self.test)[1]
        return self.accuracy.gather(
            1, best_single_at(self.averages[0], cost, 1.01 * spent, self.mask)
        )

    def oracle(self, budgets_ms: Tensor) -> Judged:
        """The most accuracy possible at these mean latencies, in hindsight."""
        return self._chosen(
            budgets_ms, oracle_at_mean(self.accuracy, self.latency_ms, self.mask, budgets_ms)
        )

    def mixture_use(self, budgets_ms: Tensor, mixed: np.ndarray) -> Tensor:
        """How many requests each configuration is expected to get, float64 [C, B], where the static
        mix for a budget (float [B] ms) decides, bool [S, n, B]."""
        mix = StaticMix(*self.averages, budgets_ms)
        times = torch.from_numpy(mixed.sum(0)).double()  # [n, B]
        used = torch.zeros(self.table.num_configurations, len(budgets_ms), dtype=torch.float64)
        for side, share in zip(mix.both(self.mask), (1 - mix.share, mix.share), strict=True):
            used.scatter_add_(0, side, times * share)
        return used

    def judged(
        self,
        budgets_ms: Tensor,
        controllers: Sequence[MeanBudgetPolicy],
        baselines: Sequence[MeanBudgetPolicy],
        costs_ms: Sequence[Tensor],
    ) -> dict[str, list[Judged]]:
        """The outcomes of every policy by name, charged its own cost, the references included; one
        for each controller."""
        mix = StaticMix(*self.averages, budgets_ms).expected(self.table, self.test)
        single = best_single_at(*self.averages, budgets_ms, self.mask)
        nothing = torch.zeros_like(budgets_ms)
        judged = {each.name: [self._priced(each, nothing)] for each in baselines}
        return {
            "controller": [self._priced(*each) for each in zip(controllers, costs_ms, strict=True)],
            "static_mix": [_judged(budgets_ms, torch.full(mix[0].shape, -1), *mix)],
            "best_single": [self._chosen(budgets_ms, single)],
            **judged,
            "oracle": [self.oracle(budgets_ms)],
        }

    def _priced(self, policy: MeanBudgetPolicy, cost_ms: Tensor) -> Judged:
        chosen = policy.decided(self.table, self.test)
        accuracy, latency_ms = policy.expected(self.table, self.test, chosen)
        return _judged(
            policy.budgets_ms, chosen.where(policy.deployed, -1), accuracy, latency_ms + cost_ms
        )

    def _chosen(self, budgets_ms: Tensor, chosen: Tensor) -> Judged:
        return _judged(
            budgets_ms, chosen, self.accuracy.gather(1, chosen), self.latency_ms.gather(1, chosen)
        )


def _judged(budgets_ms: Tensor, chosen: Tensor, accuracy: Tensor, latency_ms: Tensor) -> Judged:
    unknown = torch.full_like(accuracy, torch.nan)
    return Judged(
        budgets_ms, chosen, accuracy, latency_ms, in_time=None, utility=accuracy, reward=unknown
    )

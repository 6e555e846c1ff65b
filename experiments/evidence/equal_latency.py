"""Under mean budgets a policy hardly ever spends exactly its budget. So it is compared with what
the static mix, the best single configuration and the oracle get at *equal mean latency* on the same
samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.prices import (
    MeanBudgetPolicy,
    StaticMix,
    best_single_at,
    oracle_at_mean,
    outcomes_of,
    static_hull,
)
from knobwise.agents.evaluation.baselines import averages
from knobwise.envs.bandit.outcomes import Outcomes
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.schema import ConfigurationRow


class Reference:
    """Policies that any other is compared with, by its spending on the test samples.

    Args:
        fitted: int64, the rows that static policies are chosen on.
        test: int64 [n], the rows that they are judged on.
    """

    def __init__(self, table: ProfileTable, fitted: Tensor, test: Tensor) -> None:
        self.table = table
        self.fitted = fitted
        self.test = test
        self.mask = table.mask[test]
        self.averages = averages(table, fitted)
        self.corners = static_hull(*self.averages)
        at_corners = StaticMix(*self.averages, self.averages[1][self.corners])
        self._accuracy, latency_ms = at_corners.expected(table, test)
        # a dearer corner may turn out cheaper on the test samples; from there on the mix costs what
        # the dearest did
        self._means = latency_ms.mean(0).cummax(0).values

    def hull(self) -> list[ConfigurationRow]:
        """Return the corners of the static mix, from the cheapest to the most accurate."""
        labels = list(map(self.table.label, self.corners.tolist()))
        means = self._accuracy.mean(0).tolist(), self._means.tolist()
        corners: list[ConfigurationRow] = []
        for label, accuracy, latency_ms in zip(labels, *means, strict=True):
            corners.append({"label": label, "accuracy": accuracy, "latency_ms": latency_ms})
        return corners

    def static_mix(self, spent: Tensor) -> Tensor:
        """Return the accuracy of the static mix whose mean latency on the test samples is `spent`,
        float64 [B] ms → [n, B].

        It mixes two neighbours on the hull of the averages of `fitted`; only their shares are set
        on the test samples, and by latency alone. Below the cheapest corner it is this corner,
        above the dearest that one.
        """
        # of a single corner both neighbours are this one
        high = torch.searchsorted(self._means, spent).clamp(1, len(self._means) - 1)
        low = high - 1
        share = (spent - self._means[low]) / (self._means[high] - self._means[low])
        share = share.nan_to_num(0.0).clamp(0, 1)
        return torch.lerp(self._accuracy[:, low], self._accuracy[:, high], share)

    def best_single(self, spent: Tensor) -> Tensor:
        """Return the accuracy of the single configuration that was the most accurate on `fitted`
        among those whose mean latency on the test samples is at most `spent`, or up to 1 % more, so
        that no hair decides: float64 [B] ms → [n, B]."""
        cost = averages(self.table, self.test)[1]
        chosen = best_single_at(self.averages[0], cost, 1.01 * spent, self.mask)
        return self._chosen(chosen).accuracy

    def oracle(self, budgets_ms: Tensor) -> Outcomes:
        """Judge the choices that are the most accurate at these mean latencies, in hindsight."""
        cells = self.table.accuracy[self.test], self.table.latency_ms[self.test], self.mask
        return self._chosen(oracle_at_mean(*cells, budgets_ms))

    def mixture_use(self, budgets_ms: Tensor, mixed: np.ndarray) -> Tensor:
        """Return how many requests each configuration is expected to get, float64 [C, B], where the
        static mix for a budget (float [B] ms) decides, bool [S, n, B]."""
        mix = StaticMix(*self.averages, budgets_ms)
        times = torch.from_numpy(mixed.sum(0)).double()  # [n, B]
        used = times.new_zeros(self.table.num_configurations, len(budgets_ms))
        for side, share in zip(mix.both(self.mask), (1 - mix.share, mix.share), strict=True):
            used.scatter_add_(0, side, times * share)
        return used

    def judged(
        self,
        budgets_ms: Tensor,
        controllers: Sequence[MeanBudgetPolicy],
        baselines: Sequence[MeanBudgetPolicy],
        costs_ms: Sequence[Tensor],
    ) -> dict[str, list[Outcomes]]:
        """Judge every policy, the references included, by name; one controller for each seed, with
        its own cost, float [B]."""
        mix = StaticMix(*self.averages, budgets_ms).expected(self.table, self.test)
        single = best_single_at(*self.averages, budgets_ms, self.mask)
        # a mixture has no single choice
        mixed = torch.full_like(single, -1)
        return {
            "controller": list(map(self._priced, controllers, costs_ms)),
            "static_mix": [Outcomes(mixed, *mix, utility=mix[0])],
            "best_single": [self._chosen(single)],
            **{policy.name: [self._priced(policy)] for policy in baselines},
            "oracle": [self.oracle(budgets_ms)],
        }

    def _priced(self, policy: MeanBudgetPolicy, cost_ms: Tensor | float = 0.0) -> Outcomes:
        """Judge a policy at its budgets; where its mix decides, by its expectation."""
        decided = policy.decided(self.table, self.test)
        accuracy, latency_ms = policy.expected(self.table, self.test, decided)
        chosen = decided.where(policy.deployed, -1)
        return Outcomes(chosen, accuracy, latency_ms + cost_ms, utility=accuracy)

    def _chosen(self, chosen: Tensor) -> Outcomes:
        """Judge choices int64 [n, B]."""
        accuracy, latency_ms = outcomes_of(self.table, self.test, chosen)
        return Outcomes(chosen, accuracy, latency_ms, utility=accuracy)

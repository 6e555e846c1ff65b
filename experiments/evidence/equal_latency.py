"""Under mean budgets a policy hardly ever spends exactly its budget. So it is compared with what
the static mix, the best single configuration and the oracle get at *equal mean latency* on the same
samples."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.calibration.prices import (
    StaticMix,
    best_single_at,
    oracle_at_mean,
    outcomes_of,
    static_hull,
)
from knobwise.agents.evaluation.baselines import averages
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.decisions import array_of
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
        return self._accuracy_of(chosen)

    def at_equal_latency(self, decisions: pl.DataFrame) -> pl.DataFrame:
        """Add to decisions what others would get with the mean latency that their policy spent
        under the same budget: the static mix (`of_reference`), the oracle (`of_upper_bound`) and
        the best single configuration (`of_best_single`)."""
        frames = []
        for (policy,), part in decisions.group_by("policy", maintain_order=True):
            latency_ms = array_of(decisions, str(policy), "latency_ms")
            spent = torch.from_numpy(latency_ms.mean((0, 1)))
            scores = {
                "of_reference": self.static_mix(spent),
                "of_upper_bound": self.oracle(spent * (1 + 1e-9)),
                "of_best_single": self.best_single(spent),
            }
            # the same for every seed
            seeds = len(latency_ms)
            columns = {name: np.tile(each.numpy().ravel(), seeds) for name, each in scores.items()}
            frames.append(part.with_columns(**{k: pl.Series(v) for k, v in columns.items()}))
        return pl.concat(frames)

    def oracle(self, budgets_ms: Tensor) -> Tensor:
        """Return the accuracy of the choices that are the most accurate at these mean latencies, in
        hindsight, float64 [B] ms → [n, B]."""
        cells = self.table.accuracy[self.test], self.table.latency_ms[self.test], self.mask
        return self._accuracy_of(oracle_at_mean(*cells, budgets_ms))

    def _accuracy_of(self, chosen: Tensor) -> Tensor:
        return outcomes_of(self.table, self.test, chosen)[0]

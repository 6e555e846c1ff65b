"""Which cells of a partly measured profile would change decisions most if they were measured.

Two completions, each from one half of the samples to train and validate on, predict all of these
samples. How far they differ says how sure a prediction is. As Thompson sampling does (Russo et al.
2018, "A Tutorial on Thompson Sampling"), accuracies and latencies are drawn around their mean, as
uncertain as that; a cell is the more informative the more often its configuration is then the best
of its sample at the default budgets. These are what a policy would choose, its close rivals, and
what may be fast enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher.completion import Completion
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.envs.bandit.budgets import default_budgets, log_measured
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import folds_of
from knobwise.profiling.measuring.cell_design import Outlook

DRAWS = 20
"""Draws of the outcomes at each budget."""


def outlook_of(table: ProfileTable, seed: int = 0) -> Outlook:
    """Say which cells to measure next; samples to test on are never looked at, nor chosen.

    The estimated gain is that of a predictor from half of the samples, valued by the completion of
    the other half. It may be below 0 while little is known, and grows with what is known.
    """
    split = table.split()
    rows = torch.cat([split.train, split.validation])
    budgets = default_budgets(table, rows).double()
    halves = _Halves.fit(table, rows, seed)
    difference = halves.from_others.accuracy - halves.from_own.accuracy
    slower = halves.from_others.log_latency - halves.from_own.log_latency
    hole = ~table.mask[rows]
    accuracy = (halves.from_others.accuracy + halves.from_own.accuracy) / 2
    log_latency = (halves.from_others.log_latency + halves.from_own.log_latency) / 2
    unsure = [_size(values[hole]) for values in (difference, slower)]
    generator = torch.Generator().manual_seed(seed)
    # cells that are never the best follow in random order
    best = torch.rand(accuracy.shape, generator=generator, dtype=torch.float64) / 2
    for budget in budgets:
        limits = budget.expand(len(rows))
        for _ in range(DRAWS):
            noise = torch.randn(2, *accuracy.shape, generator=generator, dtype=torch.float64)
            drawn = Prediction(
                accuracy + unsure[0] * noise[0],
                log_latency + unsure[1] * noise[1],
                halves.from_own.spread,
            )
            chosen = drawn.score(limits).argmax(1, keepdim=True)
            best.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    shape = (table.num_samples, table.num_configurations)
    score = torch.full(shape, -torch.inf, dtype=torch.float64)
    score[rows] = best
    latency_ms = log_latency.mean(0).exp().repeat(table.num_samples, 1)
    latency_ms[rows] = log_latency.exp()
    return Outlook(score, latency_ms, halves.gain(budgets))


class _Halves(NamedTuple):
    """What is predicted of n samples, [n, C] each, from the measurements of one half of them."""

    from_own: Prediction
    """From the half that the sample is in."""
    from_others: Prediction
    """From the half that it is not in."""
    folds: list[Tensor]
    """The positions of each half, int64."""

    @classmethod
    def fit(cls, table: ProfileTable, rows: Tensor, seed: int) -> _Halves:
        x = FeatureNormaliser.fit(table, rows).of_rows(table, rows).double().numpy()
        completion = Completion(table, x, seed)
        mask = table.mask[rows]
        folds = [torch.from_numpy(hold) for _, hold in folds_of(table, rows, seed, 2)]
        log_latency = log_measured(table.latency_ms[rows].double())
        predicted = []
        for measured in (table.accuracy[rows].double(), log_latency):
            # from the half with the sample, and from the other
            both = torch.full((2, *mask.shape), torch.nan, dtype=torch.float64)
            for half in folds:
                inside = torch.zeros(len(rows), 1, dtype=torch.bool)
                inside[half] = True
                completed = completion.complete(measured.where(inside, torch.nan))
                both[0] = completed.where(inside, both[0])
                both[1] = completed.where(~inside | (len(folds) < 2), both[1])
            predicted.append(both)
        accuracy, times = predicted
        # how far single measurements are from what features let expect
        spread = _size((log_latency - times[1])[mask])
        within = Prediction(accuracy[0], times[0], spread)
        return cls(within, Prediction(accuracy[1], times[1], spread), folds)

    def gain(self, budgets: Tensor) -> float:
        """Estimate the utility of choosing for each sample over one choice for all, the mean over
        budgets [B]."""
        gains = []
        for budget in budgets:
            limits = budget.expand(len(self.from_own.accuracy))
            utility = self.from_own.score(limits)
            chosen = self.from_others.score(limits).argmax(1)
            values = utility.gather(1, chosen.unsqueeze(1)).squeeze(1)
            # the best of one half is judged on the other
            for half in self.folds:
                outside = torch.ones(len(limits), dtype=torch.bool)
                outside[half] = len(self.folds) < 2
                static = utility[outside].mean(0).argmax()
                gains.append(values[half] - utility[half, static])
        return float(torch.cat(gains).mean())


def _size(values: Tensor) -> Tensor:
    """Return the root mean square of these values, at least 1e-3."""
    return values.square().mean().sqrt().nan_to_num(0.0).clamp_min(1e-3)

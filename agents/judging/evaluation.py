"""Judging: what decisions would have got on samples that were never seen in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from knobwise.envs.configurations.reward import RewardTable, utility
from knobwise.envs.tables.profile_table import ProfileTable

LOGGED = {
    "loss": "Loss",
    "grad_norm": "Grad_Norm",
    "entropy": "Entropy",
    "kl_to_ref": "KL",
    "clip_fraction": "Clip_Fraction",
    "ESS": "ESS",
    "ratio_mean": "Ratio_Mean",
    "zero_advantage_fraction": "Zero_Advantage_Fraction",
}
"""What the loss modules say for the eye, and how it is logged."""
ENDS = torch.tensor([0.025, 0.975], dtype=torch.float64)
"""Of a 95 % interval."""


class Chooses(Protocol):
    """Anything that decides: a controller, a baseline."""

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        """Feature blocks [n, d], budgets [n] in ms, mask bool [n, C] → configuration indices int64 [n]."""
        ...


@dataclass(frozen=True)
class Judged:
    """The outcome of every decision: n samples × B budgets."""

    budgets_ms: Tensor
    """float [B]."""
    chosen: Tensor
    """int64 [n, B], configuration indices."""
    accuracy: Tensor
    """float [n, B]."""
    latency_ms: Tensor
    """float [n, B]."""
    utility: Tensor
    """float [n, B]: accuracy where the budget was met, else 0."""
    reward: Tensor
    """float [n, B]."""
    feasible: Tensor
    """bool [n, B]: whether any profiled configuration meets the budget."""

    @property
    def met(self) -> Tensor:
        """bool [n, B]: latency ≤ budget."""
        return self.latency_ms <= self.budgets_ms

    def metrics(self) -> dict[str, float]:
        """Means over samples and budgets, under the logged names (without `Val/`)."""
        return {
            "Reward_Mean": float(self.reward.mean()),
            "Reward_Std": float(self.reward.std()),
            "Accuracy_Mean": float(self.accuracy.mean()),
            "Accuracy_Std": float(self.accuracy.std()),
            "Latency_Mean": float(self.latency_ms.mean()),
            "Latency_Std": float(self.latency_ms.std()),
            "Budget_Violation_Rate": float((~self.met).float().mean()),
            "Utility": float(self.utility.mean()),
            "Satisfaction_Feasible": float(self.met[self.feasible].float().mean()) if self.feasible.any() else 1.0,
        }

    def row(self, budget: int | None) -> dict[str, Any]:
        """One row of `results.json` without intervals: budget number b, or None for the mean over budgets.

        `infeasible` is the share of samples without a profiled configuration that meets the budget;
        `satisfaction_feasible`, of the others, is None where there are none.
        """
        if budget is None:
            return mean_row([self.row(b) for b in range(len(self.budgets_ms))]) | {"budget_ms": None}
        met, feasible = self.met[:, budget].double(), self.feasible[:, budget]
        latency = self.latency_ms[:, budget].double()
        return {
            "budget_ms": float(self.budgets_ms[budget]),
            "accuracy": float(self.accuracy[:, budget].double().mean()),
            "latency_ms_mean": float(latency.mean()),
            "latency_ms_p95": float(latency.quantile(0.95)),
            "satisfaction": float(met.mean()),
            "satisfaction_feasible": float(met[feasible].mean()) if feasible.any() else None,
            "infeasible": float(1 - feasible.double().mean()),
            "utility": float(self.utility[:, budget].double().mean()),
            "reward": float(self.reward[:, budget].double().mean()),
        }


def drawn_metrics(
    table: ProfileTable, rows: Tensor, chosen: Tensor, rewards: Tensor, budgets_ms: Tensor | None
) -> dict[str, float]:
    """What decisions drawn in training got, under the logged names (without `Train/`).

    Args:
        table: the profile.
        rows: int64 [n].
        chosen: int64 [n, G], configuration indices.
        rewards: float [n, G].
        budgets_ms: float [n]; None at a price, where nothing is late.
    """
    accuracy, latency = (values[rows.unsqueeze(1), chosen] for values in (table.accuracy, table.latency_ms))
    metrics = {}
    for name, values in (("Reward", rewards), ("Accuracy", accuracy), ("Latency", latency)):
        metrics[f"{name}_Mean"], metrics[f"{name}_Std"] = float(values.mean()), float(values.std())
    if budgets_ms is not None:
        metrics["Budget_Violation_Rate"] = float((latency > budgets_ms.unsqueeze(1)).float().mean())
    return metrics


def mean_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each number over rows (of budgets, of seeds); None does not count, and all None gives None."""
    means = {}
    for key in rows[0]:
        known = [row[key] for row in rows if row[key] is not None]
        means[key] = sum(known) / len(known) if known else None
    return means


def judge(chooser: Chooses, table: ProfileTable, rows: Tensor, budgets_ms: Tensor, rewards: RewardTable) -> Judged:
    """Let a policy decide for every sample under every budget, and look up what comes of it.

    Args:
        chooser: what decides; it sees features, budgets and which configurations were profiled for the sample, because
            the outcome of another one is not known.
        table: the profile.
        rows: int64 [n], the samples.
        budgets_ms: float [B].
        rewards: the reward that `Judged.reward` is in.
    """
    features = {name: block[rows] for name, block in table.features.items()}
    mask, accuracy, latency = table.mask[rows], table.accuracy[rows], table.latency_ms[rows]
    chosen = torch.stack([chooser.choose(features, b.expand(len(rows)), mask).cpu() for b in budgets_ms], 1)
    got_accuracy, got_latency = accuracy.gather(1, chosen), latency.gather(1, chosen)
    fastest = latency.masked_fill(~mask, torch.inf).amin(1, keepdim=True)
    there = rewards.accuracy.device
    reward = torch.stack(
        [
            rewards.of(rows.to(there), chosen[:, i, None].to(there), b.expand(len(rows)).to(there)).cpu()
            for i, b in enumerate(budgets_ms)
        ]
    )
    return Judged(
        budgets_ms=budgets_ms,
        chosen=chosen,
        accuracy=got_accuracy,
        latency_ms=got_latency,
        utility=utility(got_accuracy, got_latency, budgets_ms),
        reward=reward.squeeze(-1).T,
        feasible=fastest <= budgets_ms,
    )


def bootstrap(policy: Tensor, static: Tensor, best: Tensor, draws: int = 2000, seed: int = 0) -> dict[str, list[float]]:
    """Paired bootstrap intervals of utility and gap closed, over samples and over seeds.

    Each draw takes n samples with replacement, the same for all policies, and S of the S seeds with replacement.
    gap closed = (policy − static)/(best − static) of the means in the draw.

    Args:
        policy: float [S, n], utility of each sample under each seed, averaged over the budgets that count.
        static: float [n], of budget-aware static.
        best: float [n], of the oracle.
        draws: how many.
        seed: of the draws.

    Returns:
        `utility_ci95` and `gap_closed_ci95`, each [2.5 %, 97.5 %].
    """
    everyone = torch.stack([values.double().expand(policy.shape) for values in (policy, static, best)])
    mean_policy, mean_static, mean_best = resampled_means(everyone, draws, seed).unbind(1)
    between = mean_best - mean_static
    # with very few samples a draw may hold none where choosing could gain; it says nothing about the share gained
    gap = torch.where(between > 1e-9, (mean_policy - mean_static) / between, torch.nan)
    return {
        "utility_ci95": mean_policy.quantile(ENDS).tolist(),
        "gap_closed_ci95": gap.nanquantile(ENDS).nan_to_num().tolist(),
    }


def mean_ci95(values: Tensor, draws: int = 2000, seed: int = 0) -> Tensor:
    """Bootstrap intervals [2.5 %, 97.5 %] of means over n samples and S seeds, float [*, S, n] → float64 [*, 2].

    Of a difference of two policies it is the paired interval: the draws are the same for all.
    """
    return resampled_means(values, draws, seed).quantile(ENDS, dim=0).movedim(0, -1)


def resampled_means(values: Tensor, draws: int, seed: int, other_seeds: bool = False) -> Tensor:
    """Means of float [*, S, n] in each draw of n samples and of S seeds, both with replacement: float64 [draws, *].

    With `other_seeds` the draws of samples are the same ones, and those of seeds are not: for policies that were
    trained with other seeds.
    """
    generator = np.random.default_rng(seed)
    seeds, n = values.shape[-2:]
    # how often each sample and each seed was drawn: means are then matrix products
    samples = torch.from_numpy(generator.multinomial(n, np.full(n, 1 / n), draws) / n)
    if other_seeds:
        generator = np.random.default_rng([seed, 1])
    runs = torch.from_numpy(generator.multinomial(seeds, np.full(seeds, 1 / seeds), draws) / seeds)
    per_seed = samples @ values.double().reshape(-1, n).T
    means = (per_seed.view(draws, -1, seeds) * runs.unsqueeze(1)).sum(-1)
    return means.view(draws, *values.shape[:-2])

"""The guard of a deployed policy: whether it decides at a budget, or budget-aware static does.

It is calibrated on samples that the policy was not fitted on, and falls back to static where the
policy was not better by more than chance. It says nothing about how often requests are on time; a
share that holds is promised by `knobwise.agents.calibration.promise`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.problem import Problem
from knobwise.common.paired import is_better, standard_error
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.reward import share_on_time
from knobwise.envs.bandit.rules import Rule
from knobwise.envs.tables.beliefs import effective_cells
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import cluster_numbers

CONFIDENCE = 0.8
"""One-sided confidence that it requires for the policy to be better than static."""
Decide = Callable[[float], Tensor]
"""A limit in ms → the configurations int64 [n] that the policy chooses for samples that it was not
fitted on."""


class GuardRow(TypedDict):
    """The guard's calibration at one budget, on held-out samples."""

    budget_ms: float
    deployed: bool
    """True: the policy decides; False: static does."""
    reason: str
    """Why, in words."""
    gain: float
    gain_se: float
    """The gain in utility over static, or in accuracy over the static mix, and its standard
    error."""
    on_time: NotRequired[float]
    """The share on time of what is deployed; under deadlines."""
    utility_static: NotRequired[float]
    effective_cells: NotRequired[float]
    """Where not every choice was measured: as many choices of the policy, all measured, would give
    an estimate as sure as this."""
    accuracy_policy: NotRequired[float]
    accuracy_static_mix: NotRequired[float]
    latency_ms_mean: NotRequired[float]


def calibrate(
    problem: Problem,
    rows: Tensor,
    budgets_ms: Tensor,
    static_choice: Tensor,
    decide: Decide,
    *,
    cost_ms: float = 0.0,
) -> list[GuardRow]:
    """Compare the policy with static on n held-out samples, for B budgets.

    Args:
        rows: int64 [n], the samples.
        budgets_ms: float [B].
        static_choice: int64 [n, B], what budget-aware static chooses. It pays for no first look.
        decide: what the policy chooses.
        cost_ms: what a decision of the policy takes from each budget. Static costs nothing.

    Returns:
        A row for each budget.
    """
    clusters = cluster_numbers(problem.facts, rows)
    beliefs = problem.beliefs
    rulings = []
    for budget, by_static in zip(budgets_ms, static_choice.T, strict=True):
        chosen = decide(max(float(budget) - cost_ms, MIN_LATENCY_MS))
        # [n, 2]: the policy, then static
        cells = rows.unsqueeze(1), torch.stack([chosen, by_static], 1)
        look_up = functools.partial(
            _outcomes, rule=problem.rule, cells=cells, budget_ms=budget, cost_ms=cost_ms
        )
        if beliefs is None:
            on_time, utilities = look_up(problem.values)
        else:
            on_time, utilities = beliefs.estimate(cells, look_up)
        gain = utilities[:, 0] - utilities[:, 1]
        deployed = is_better(gain, CONFIDENCE, clusters)
        row: GuardRow = {
            "budget_ms": float(budget),
            "deployed": deployed,
            "reason": "",
            "gain": float(gain.mean()),
            "gain_se": standard_error(gain, clusters),
            # an estimate may lie outside
            "on_time": float(on_time[:, 0 if deployed else 1].mean().clamp(0, 1)),
            "utility_static": float(utilities[:, 1].mean()),
        }
        row["reason"] = reason_for(row, "static", "utility")
        if beliefs is not None:
            row["effective_cells"] = effective_cells(beliefs.weight[rows, chosen])
            row["reason"] += f"; estimated from {row['effective_cells']:.0f} measured choices"
            missing = _unmeasured(problem, rows, torch.stack([chosen, by_static], 1))
            if missing and not row["deployed"]:
                row["reason"] += (
                    f"; {missing:,} missing cells of validation samples decide once measured, by "
                    "complete=RUN of knobwise profile if that measured the others"
                )
        rulings.append(row)
    return rulings


def _unmeasured(problem: Problem, rows: Tensor, chosen: Tensor) -> int:
    """Return how many cells were not measured among these choices, int64 [n, 2], for those samples
    int64 [n] that are validation samples."""
    cells = torch.zeros_like(problem.facts.mask)
    cells[rows.unsqueeze(1), chosen] = True
    return int((cells & ~problem.facts.mask)[problem.split.validation].sum())


def _outcomes(
    table: ProfileTable,
    rule: Rule,
    cells: tuple[Tensor, Tensor],
    budget_ms: Tensor,
    cost_ms: float,
) -> Tensor:
    """Return the share of measurements on time, and the utility, of the policy and of static:
    float64 [2, n, 2]."""
    # [n, 2, R]; the policy pays for its decision, static not for the first look
    latency_ms = table.measurements_ms[cells].double()
    latency_ms[:, :-1] += cost_ms
    if table.first_look_ms is not None:
        latency_ms[:, -1] -= table.first_look_ms[cells][:, -1:]
    on_time = share_on_time(latency_ms, budget_ms)
    over = rule.over(table)
    accuracy = table.accuracy[cells].double()
    if over is not None:
        on_time = on_time * ~over[cells]
    if not rule.is_own:
        return torch.stack([on_time, accuracy * on_time])
    if over is not None:
        accuracy = accuracy * ~over[cells]
    return torch.stack([on_time, rule.mean_utility(accuracy, latency_ms, budget_ms)])


def arrays_of(rows: Sequence[GuardRow]) -> dict[str, np.ndarray]:
    """Collect the columns that `agents.deployed.calibrated.Guard` reads, [B] each: `budgets_ms` and
    `deploy` (bool)."""
    return {
        "budgets_ms": np.array([row["budget_ms"] for row in rows]),
        "deploy": np.array([row["deployed"] for row in rows]),
    }


def reason_for(row: GuardRow, rival: str, score: str) -> str:
    """Say in words which policy is deployed at a budget, with the policy's held-out gain over its
    rival (in this score, ± SE)."""
    gain = f"{row['gain']:+z.3f} ± {row['gain_se']:.3f} {score}, SE"
    if row["deployed"]:
        return f"policy deployed: it beats {rival} on held-out samples ({gain})"
    confidence = f"{CONFIDENCE:.0%} confidence on held-out samples"
    return f"{rival} deployed: no gain with {confidence} ({gain})"

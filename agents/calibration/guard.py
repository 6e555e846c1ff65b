"""The guard of a deployed policy: whether it decides at a budget, or budget-aware static does.

It is calibrated on samples that the policy was not fitted on, and falls back to static where the
policy was not better by more than chance. Where most cells of a profile were not measured, a single
budget says little: a policy that is better over all budgets then decides wherever it is not worse
(docs/results.md, GRPO on sparse profiles). It says nothing about how often requests are on time; a
share that holds is promised by `knobwise.agents.calibration.promise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.problem import Problem
from knobwise.common.paired import is_better, standard_error
from knobwise.envs.bandit.outcomes import DeadlineOutcomes, Decisions
from knobwise.envs.tables.beliefs import effective_cells
from knobwise.envs.tables.splits import cluster_numbers

CONFIDENCE = 0.8
"""One-sided confidence that it requires for the policy to be better than static."""


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
    chosen: Tensor,
    *,
    cost_ms: float = 0.0,
    pooled: bool = False,
) -> list[GuardRow]:
    """Compare the policy with static on n held-out samples, for B budgets.

    Args:
        rows: int64 [n], the samples.
        budgets_ms: float [B].
        static_choice: int64 [n, B], what budget-aware static chooses. It pays for no first look.
        chosen: int64 [n, B], what the policy chooses with what its decision leaves of each budget.
        cost_ms: what a decision of the policy takes from each budget. Static costs nothing.
        pooled: see `deployed_at`.

    Returns:
        A row for each budget.
    """
    clusters = cluster_numbers(problem.facts, rows)
    beliefs = problem.beliefs
    choices = torch.stack([chosen, static_choice], 2)  # [n, B, 2]
    # the policy pays for its decision, static not for the first look
    decisions = Decisions(
        rows,
        choices.flatten(1),
        budgets_ms.repeat_interleave(2),
        cost_ms=torch.tensor([cost_ms, 0.0]).repeat(len(budgets_ms)),
        reads=torch.tensor([True, False]).repeat(len(budgets_ms)),
    )
    outcomes = problem.outcomes(decisions)
    assert isinstance(outcomes, DeadlineOutcomes)
    shares = outcomes.on_time.double().unflatten(1, (-1, 2))
    utility = outcomes.utility.double().unflatten(1, (-1, 2))
    gains = utility[..., 0] - utility[..., 1]
    deployed_by_itself = deployed_at(gains, clusters)
    deployed = deployed_at(gains, clusters, pooled=pooled)
    overall = gains.mean(1)
    rulings = []
    for column, budget in enumerate(budgets_ms.tolist()):
        gain = gains[:, column]
        row: GuardRow = {
            "budget_ms": budget,
            "deployed": deployed[column],
            "reason": "",
            "gain": float(gain.mean()),
            "gain_se": standard_error(gain, clusters),
            # an estimate may lie outside
            "on_time": float(shares[:, column, 0 if deployed[column] else 1].mean().clamp(0, 1)),
            "utility_static": float(utility[:, column, 1].mean()),
        }
        row["reason"] = reason_for(row, "static", "utility")
        if deployed[column] and not deployed_by_itself[column]:
            of_all = _in_words(float(overall.mean()), standard_error(overall, clusters))
            row["reason"] = (
                "policy deployed: it beats static over all budgets on held-out samples "
                f"({of_all} utility, SE), and is not measurably worse here "
                f"({_in_words(row['gain'], row['gain_se'])})"
            )
        if beliefs is not None:
            row["effective_cells"] = effective_cells(beliefs.weight[rows, chosen[:, column]])
            row["reason"] += f"; estimated from {row['effective_cells']:.0f} measured choices"
            missing = _unmeasured(problem, rows, choices[:, column])
            if missing and not row["deployed"]:
                row["reason"] += (
                    f"; {missing:,} missing cells of validation samples decide once measured, by "
                    "complete=RUN of knobwise profile if that measured the others"
                )
        rulings.append(row)
    return rulings


def pools_budgets(problem: Problem, *, imitated: bool) -> bool:
    """Return whether the guard pools budgets: for what imitated a teacher, where cells were not
    measured. Pooling gained measurably there, and nothing after GRPO alone (docs/results.md)."""
    return problem.beliefs is not None and imitated


def deployed_at(gains: Tensor, clusters: Tensor | None, *, pooled: bool = False) -> list[bool]:
    """Return at which of B budgets the policy decides.

    Args:
        gains: float64 [n, B], of each held-out sample over static.
        clusters: int64 [n], those of the samples; None: each is one.
        pooled: it decides where it is not worse, if its mean gain over the budgets is better; else,
            and without, where it is better. All with `CONFIDENCE`.
    """
    better = [is_better(gain, CONFIDENCE, clusters) for gain in gains.T]
    if not (pooled and is_better(gains.mean(1), CONFIDENCE, clusters)):
        return better
    worse = (is_better(-gain, CONFIDENCE, clusters) for gain in gains.T)
    return [not each for each in worse]


def _unmeasured(problem: Problem, rows: Tensor, chosen: Tensor) -> int:
    """Return how many cells were not measured among these choices, int64 [n, 2], for those samples
    int64 [n] that are validation samples."""
    cells = torch.zeros_like(problem.facts.mask)
    cells[rows.unsqueeze(1), chosen] = True
    return int((cells & ~problem.facts.mask)[problem.split.validation].sum())


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
    gain = f"{_in_words(row['gain'], row['gain_se'])} {score}, SE"
    if row["deployed"]:
        return f"policy deployed: it beats {rival} on held-out samples ({gain})"
    confidence = f"{CONFIDENCE:.0%} confidence on held-out samples"
    return f"{rival} deployed: no gain with {confidence} ({gain})"


def _in_words(gain: float, se: float) -> str:
    return f"{gain:+z.3f} ± {se:.3f}"

"""The guard of a deployed policy: whether it decides at a budget, or budget-aware static does.

It is calibrated on samples that the policy was not fitted on, and falls back to static where the
policy was not better by more than chance, or where too few of the choices were measured to know
(see `knobwise.envs.tables.measured_decisions`). Where most cells of a profile were not measured, a
single budget says little: a policy that is better over all budgets then decides wherever it is not
worse (docs/results.md, GRPO on sparse profiles). It says nothing about how often requests are on
time; a share that holds is promised by `knobwise.agents.calibration.promise`.
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
from knobwise.envs.tables.measured_decisions import are_known, not_known_words
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
    gain: float | None
    gain_se: float | None
    """The gain in utility over static, or in accuracy over the static mix, and its standard
    error. These and the numbers below are None where too few of the choices were measured."""
    on_time: NotRequired[float | None]
    """The share on time of what is deployed; under deadlines."""
    utility_static: NotRequired[float | None]
    effective_cells: NotRequired[float]
    """Where not every choice was measured: as many choices of the policy, all measured, would give
    an estimate as sure as this."""
    accuracy_policy: NotRequired[float | None]
    accuracy_static_mix: NotRequired[float | None]
    latency_ms_mean: NotRequired[float | None]


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
    # how many choices of the policy and of static are measured cells, [B, 2]
    measured = problem.facts.mask[rows[:, None, None], choices].sum(0)
    known = [all(are_known(count, len(rows)) for count in pair) for pair in measured.tolist()]
    deployed_by_itself = deployed_at(gains, clusters, known)
    deployed = deployed_at(gains, clusters, known, pooled=pooled)
    overall = gains[:, known].mean(1)
    rulings: list[GuardRow] = []
    row: GuardRow
    for column, budget in enumerate(budgets_ms.tolist()):
        if not known[column]:
            of_policy, of_static = measured[column].tolist()
            row = unknown_row(budget, "static", (of_policy, of_static), len(rows))
            row["utility_static"] = row["on_time"] = None
            if are_known(of_static, len(rows)):
                row["utility_static"] = float(utility[:, column, 1].mean())
                row["on_time"] = float(shares[:, column, 1].mean().clamp(0, 1))
            rulings.append(_with_cells(row, problem, rows, choices[:, column]))
            continue
        gain = gains[:, column]
        mean, error = float(gain.mean()), standard_error(gain, clusters)
        row = {
            "budget_ms": budget,
            "deployed": deployed[column],
            "reason": "",
            "gain": mean,
            "gain_se": error,
            # an estimate may lie outside
            "on_time": float(shares[:, column, 0 if deployed[column] else 1].mean().clamp(0, 1)),
            "utility_static": float(utility[:, column, 1].mean()),
        }
        row["reason"] = reason_for(deployed[column], (mean, error), "static", "utility")
        if deployed[column] and not deployed_by_itself[column]:
            of_all = _in_words(float(overall.mean()), standard_error(overall, clusters))
            row["reason"] = (
                "policy deployed: it beats static over all budgets on held-out samples "
                f"({of_all} utility, SE), and is not measurably worse here "
                f"({_in_words(mean, error)})"
            )
        rulings.append(_with_cells(row, problem, rows, choices[:, column]))
    return rulings


def unknown_row(budget: float, rival: str, measured: tuple[int, int], decisions: int) -> GuardRow:
    """Return the row of a budget where too few choices were measured to know which is better: the
    rival is deployed, and nothing is said of its gain.

    Args:
        rival: in words.
        measured: how many choices of the policy and of its rival are measured cells.
        decisions: how many held-out choices each of them made.
    """
    of_policy, of_rival = measured
    reason = f"{rival} deployed: how good the policy is, is {not_known_words(of_policy, decisions)}"
    if are_known(of_policy, decisions):
        reason = f"{rival} deployed: whether the policy is better is not known"
    if not are_known(of_rival, decisions):
        reason += f"; {rival} is {not_known_words(of_rival, decisions)} too"
    return {
        "budget_ms": budget,
        "deployed": False,
        "reason": reason,
        "gain": None,
        "gain_se": None,
    }


def are_gains_known(rows: Sequence[GuardRow]) -> bool:
    """Return whether enough of what a policy chose for held-out samples was measured to know how
    good it is there, at each calibrated budget; True without a guard, which did not count."""
    return all(row.get("gain", 0.0) is not None for row in rows)


def _with_cells(row: GuardRow, problem: Problem, rows: Tensor, choices: Tensor) -> GuardRow:
    """Return a row with what it says of cells that were not measured, if there are any.

    Args:
        rows: int64 [n], held-out samples.
        choices: int64 [n, 2], of the policy and of static at this budget.
    """
    if problem.beliefs is None:
        return row
    cells = effective_cells(problem.beliefs.weight[rows, choices[:, 0]])
    reason = row["reason"]
    if row["gain"] is not None:
        reason += f"; estimated from {cells:.0f} measured choices"
    missing = _unmeasured(problem, rows, choices)
    if missing and not row["deployed"]:
        reason += (
            f"; {missing:,} missing cells of validation samples decide once measured, by "
            "complete=RUN of knobwise profile if that measured the others"
        )
    return {**row, "reason": reason, "effective_cells": cells}


def pools_budgets(problem: Problem, *, imitated: bool) -> bool:
    """Return whether the guard pools budgets: for what imitated a teacher, where cells were not
    measured. Pooling gained measurably there, and nothing after GRPO alone (docs/results.md)."""
    return problem.beliefs is not None and imitated


def deployed_at(
    gains: Tensor,
    clusters: Tensor | None,
    known: Sequence[bool] | None = None,
    *,
    pooled: bool = False,
) -> list[bool]:
    """Return at which of B budgets the policy decides.

    Args:
        gains: float64 [n, B], of each held-out sample over static.
        clusters: int64 [n], those of the samples; None: each is one.
        known: at which budgets these gains are known, the only ones at which the policy may decide;
            None for all.
        pooled: it decides where it is not worse, if its mean gain over the budgets is better; else,
            and without, where it is better. All with `CONFIDENCE`.
    """
    if known is None:
        known = [True] * gains.shape[1]
    pairs = list(zip(gains.T, known, strict=True))
    if not (pooled and any(known) and is_better(gains[:, known].mean(1), CONFIDENCE, clusters)):
        return [sure and is_better(gain, CONFIDENCE, clusters) for gain, sure in pairs]
    return [sure and not is_better(-gain, CONFIDENCE, clusters) for gain, sure in pairs]


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


def reason_for(deployed: bool, gain_and_se: tuple[float, float], rival: str, score: str) -> str:
    """Say in words which policy is deployed at a budget, with the policy's held-out gain over its
    rival (in this score, ± SE)."""
    gain = f"{_in_words(*gain_and_se)} {score}, SE"
    if deployed:
        return f"policy deployed: it beats {rival} on held-out samples ({gain})"
    confidence = f"{CONFIDENCE:.0%} confidence on held-out samples"
    return f"{rival} deployed: no gain with {confidence} ({gain})"


def _in_words(gain: float, se: float) -> str:
    return f"{gain:+z.3f} ± {se:.3f}"

"""Two guarantees for a deployed policy, both calibrated per budget on samples that it was not
fitted on.

The *margin* keeps the share of met budgets at a level: the policy plans with this share of its
budget. The *comparison* falls back to budget-aware static if the policy at that margin was not
better by more than chance.

The margin is found by conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster 2024,
"Conformal Risk Control", ICLR, section 2): λ̂ = inf{λ : n/(n+1)·R̂(λ) + 1/(n+1) ≤ 1 − level}, where
R̂ is the share of missed budgets among the n feasible requests (some profiled configuration meets
the budget, and all limits on further costs: an answer above one is late), and λ rises as the margin
narrows. The guarantee is a mean over the draw of calibration samples and of a new one. A narrower
margin can make a choice miss that met before, so R̂(λ) is replaced by its maximum over all margins
from λ down to the *cautious* one, at which the fewest budgets are missed; the guarantee is then
asymptotic in n, not exact.

Static may miss the level too. If it does and the policy at its margin keeps it, the policy only has
to be no worse on average.

The level is not enforced at any cost. It is *not possible* if the share on time is below it at
every margin and with static; there are *too few* requests if it is not, but n is too small for the
bound above; it *costs too much* if it takes more than a share of the gain over static, measured
from what would be deployed without it. In all three cases nothing is enforced, and the report says
so.
"""

from __future__ import annotations

import functools
import math
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
from knobwise.envs.tables.cells import unread_ms
from knobwise.envs.tables.profile_table import ProfileTable

CONFIDENCE = 0.8
"""One-sided confidence that it requires for the policy to be better than static."""
LEVEL_COST = 0.1
"""Share of the gain over budget-aware static that keeping the level may cost."""
MARGINS = tuple(0.97**step for step in range(24))
"""Shares of a budget that are tried, from all of it down to half."""
TOO_FEW = "too few held-out requests"
OUT_OF_REACH = "out of reach"
TOO_COSTLY = "would cost too much utility"
ROUNDING = 1e-6
"""Tolerance for sums of shares of measurements."""
Decide = Callable[[float], Tensor]
"""A limit in ms → the configurations int64 [n] that the policy chooses for samples that it was not
fitted on."""


class GuardRow(TypedDict):
    """The guard's calibration at one budget, on held-out samples. `level` and `margin` exist only
    under deadlines; a mean budget is met through λ."""

    budget_ms: float
    deployed: bool
    """True: the policy decides; False: static does."""
    reason: str
    """Why, in words."""
    gain: float
    gain_se: float
    """The gain in utility over static, or in accuracy over the static mix, and its standard
    error."""
    level: NotRequired[float]
    """The share of the feasible requests whose budget is to be kept."""
    margin: NotRequired[float]
    """The share of the budget that the policy plans with."""
    missed: NotRequired[str]
    """`TOO_FEW`, `OUT_OF_REACH` or `TOO_COSTLY`: why the level is not kept; "" if it is."""
    satisfaction_deployed: NotRequired[float | None]
    """The share on time of what is deployed; None if no request was feasible."""
    utility_static: NotRequired[float]
    feasible: NotRequired[int]
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
    level: float,
    *,
    cost_ms: float = 0.0,
    margins: Sequence[float] = MARGINS,
) -> list[GuardRow]:
    """Find margins and fall-backs on n held-out samples, for B budgets.

    Args:
        rows: int64 [n], the samples.
        budgets_ms: float [B].
        static_choice: int64 [n, B], what budget-aware static chooses. It pays for no first look.
        decide: what the policy chooses.
        level: share of the feasible requests whose budget is kept.
        cost_ms: what a decision of the policy takes from each budget. Static costs nothing.
        margins: to choose from, the widest first.

    Returns:
        A row for each budget.
    """
    quickest_ms = unread_ms(problem.cells, rows)
    clusters = cluster_numbers(problem.facts, rows)
    beliefs = problem.beliefs
    over = problem.rule.over(problem.values)
    rulings = []
    for budget, by_static in zip(budgets_ms, static_choice.T, strict=True):
        left = max(float(budget) - cost_ms, MIN_LATENCY_MS)
        choices = [decide(margin * left) for margin in margins]
        # [n, M + 1]: the margins, then static
        cells = rows.unsqueeze(1), torch.stack([*choices, by_static], 1)
        look_up = functools.partial(
            _outcomes, rule=problem.rule, cells=cells, budget_ms=budget, cost_ms=cost_ms
        )
        if beliefs is None:
            on_time, utilities = look_up(problem.values)
        else:
            on_time, utilities = beliefs.estimate(cells, look_up)
        # only requests that some configuration answers in time count for the level
        possible = quickest_ms <= budget
        if over is not None:
            possible &= ~over[rows]
        feasible = possible.any(1)
        count = int(feasible.sum())
        # an estimate may be below 0
        misses = (count - on_time[feasible].sum(0)).clamp(0, count)
        row = _calibrated(float(budget), utilities, misses, count, level, margins, clusters)
        if beliefs is not None:
            chosen = choices[margins.index(row["margin"])]
            row["effective_cells"] = effective_cells(beliefs.weight[rows, chosen])
            row["reason"] += f"; estimated from {row['effective_cells']:.0f} measured choices"
            missing = _unmeasured(problem, rows, torch.stack([chosen, by_static], 1))
            if missing and not row["deployed"]:
                row["reason"] += (
                    f"; knobwise profile complete=RUN measures {missing:,} missing cells of "
                    "validation samples, which then decide"
                )
        rulings.append(row)
    return rulings


def _unmeasured(problem: Problem, rows: Tensor, chosen: Tensor) -> int:
    """Return how many cells were not measured among these choices, int64 [n, 2], for those samples
    int64 [n] that are validation samples."""
    cells = torch.zeros_like(problem.facts.mask)
    cells[rows.unsqueeze(1), chosen] = True
    return int((cells & ~problem.facts.mask)[problem.split.validation].sum())


def cluster_numbers(table: ProfileTable, rows: Tensor) -> Tensor:
    """Return the number of the cluster or image of each of these samples int64 [n], from 0 on:
    int64 [n]. Where there are none each sample has its own."""
    keys = table.split_keys
    numbers: dict[tuple[str, str], int] = {}
    return torch.tensor([numbers.setdefault(keys[row], len(numbers)) for row in rows.tolist()])


def _outcomes(
    table: ProfileTable,
    rule: Rule,
    cells: tuple[Tensor, Tensor],
    budget_ms: Tensor,
    cost_ms: float,
) -> Tensor:
    """Return the share of measurements on time, and the utility, at each margin and, last, with
    static: float64 [2, n, M + 1]."""
    # [n, M + 1, R]; the policy pays for its decision, static not for the first look
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


def _calibrated(
    budget_ms: float,
    utilities: Tensor,
    misses: Tensor,
    count: int,
    level: float,
    margins: Sequence[float],
    clusters: Tensor,
) -> GuardRow:
    """Return the row of one budget.

    Args:
        utilities: [n, M + 1], at each margin and, last, of static.
        misses: [M + 1], how many feasible requests are late, shares of measurements added up.
        count: how many feasible requests there are.
        clusters: int64 [n], see `cluster_numbers`.
    """
    # (misses + 1)/(n + 1) ≤ 1 − level; 1e-9: rounding of 1 − level must not matter
    may_miss = math.floor((1 - level) * (count + 1) + 1e-9) - 1 + ROUNDING
    widest = _widest(misses[:-1], may_miss)
    if widest is not None and _costs_too_much(widest, utilities, clusters):
        widest = None
    chosen = widest or 0
    gain = utilities[:, chosen] - utilities[:, -1]
    better = is_better(gain, CONFIDENCE, clusters)
    deployed = better or (widest is not None and bool(misses[-1] > may_miss))
    late = float(misses[chosen if deployed else -1])
    missed = ""
    if count and late > may_miss:
        missed = _why_missed(float(misses.min()), may_miss, level, count)
    row: GuardRow = {
        "budget_ms": budget_ms,
        "level": level,
        "margin": margins[chosen],
        "deployed": deployed,
        "missed": missed,
        "reason": "",
        "satisfaction_deployed": (count - late) / count if count else None,
        "utility_static": float(utilities.mean(0)[-1]),
        "gain": float(gain.mean()),
        "gain_se": standard_error(gain, clusters),
        "feasible": count,
    }
    row["reason"] = reason_for(row, "static", "utility")
    if deployed and not better:
        row["reason"] = (
            "policy deployed, since static misses the on-time target; held-out gain "
            f"{row['gain']:+z.3f} utility"
        )
    if missed:
        row["reason"] += (
            f"; {100 * level:g}% on-time target not guaranteed ({missed}): {1 - late / count:.1%} "
            f"of {count:,} feasible requests"
        )
    return row


def _costs_too_much(margin: int, utilities: Tensor, clusters: Tensor) -> bool:
    """Return whether the level, kept by a margin, costs too much of what would be gained without
    it.

    Args:
        margin: its index.
        utilities: [n, M + 1], at each margin and, last, of static.
        clusters: int64 [n], see `cluster_numbers`.
    """
    means = utilities.mean(0)
    # what would be deployed without the level
    widest_gain = utilities[:, 0] - utilities[:, -1]
    otherwise = means[0 if is_better(widest_gain, CONFIDENCE, clusters) else -1]
    may_cost = LEVEL_COST * max(float(otherwise - means[-1]), 0.0) + 1e-12
    return bool(otherwise - means[margin] > may_cost)


def _why_missed(fewest: float, may_miss: float, level: float, count: int) -> str:
    """Return why the level is not kept.

    Args:
        fewest: how many of the feasible requests are late at the best margin, or with static.
        may_miss: how many may be.
        level: share of the feasible requests whose budget is to be kept.
        count: how many feasible requests there are.
    """
    # what is not possible is without the correction for n
    if may_miss >= 0 and fewest > (1 - level) * count + ROUNDING:
        return OUT_OF_REACH
    if fewest <= may_miss:
        return TOO_COSTLY
    return TOO_FEW


def _widest(misses: Tensor, may_miss: float) -> int | None:
    """Return the index of the widest margin that keeps the level, or None.

    Args:
        misses: [M], how many feasible requests are late at each margin.
        may_miss: how many may be.
    """
    cautious = int((misses <= misses.min() + ROUNDING).nonzero()[-1])
    # the most misses at any margin from here down to the cautious one
    worst = misses[: cautious + 1].flip(0).cummax(0).values.flip(0)
    keeps = (worst <= may_miss).nonzero()
    return int(keeps[0]) if len(keeps) else None


def arrays_of(rows: Sequence[GuardRow]) -> dict[str, np.ndarray]:
    """Collect the columns that `agents.deployed.calibrated.Guard` reads, [B] each: `budgets_ms`,
    `margin` (share of a budget to plan with) and `deploy` (bool)."""
    return {
        "budgets_ms": np.array([row["budget_ms"] for row in rows]),
        "margin": np.array([row["margin"] for row in rows]),
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

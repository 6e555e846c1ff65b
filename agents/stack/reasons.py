"""Why a guard deploys a policy or falls back, as sentences for `reason` in results.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def deadline_reason(row: Mapping[str, Any], may_miss: int, confidence: float, level_cost: float) -> str:
    """The reason for one budget.

    Args:
        row: see `Guard.rows`.
        may_miss: the most misses that the level allows; −1 for none.
        confidence, level_cost: of the guard.
    """
    decision, n = _comparison(row, confidence), row["feasible"]
    level = f"{100 * row['level']:g}%"
    if not n:
        return f"{decision}; no held-out request can meet this budget"
    kept = f"{row['satisfaction_deployed']:.1%}"
    if may_miss < 0:
        least = math.ceil((1 - 1e-9) / (1 - row["level"])) - 1
        return f"{decision}; {n} feasible requests are too few to show {level} on time, at least {least} are needed"
    if row["too_dear"]:
        cost = f"more than {100 * level_cost:g}% of the gain over static" if row["deployed"] else "utility"
        return f"{decision}; {level} on time would cost {cost}, so it is not enforced ({kept} on time)"
    if row["unattainable"]:
        share = max(row["satisfaction_cautious"], row["satisfaction_static"])
        return (
            f"{decision}; {level} on time is unattainable at this budget: the most cautious choice reaches {share:.1%} "
            f"({round(share * n)} of {n} feasible requests, {n - may_miss} are needed)"
        )
    return decision


def _comparison(row: Mapping[str, Any], confidence: float) -> str:
    gain = f"{row['gain']:+z.3f} ± {row['gain_se']:.3f} on held-out samples"
    if row["deployed"] and row["better"]:
        return f"deployed: better than budget-aware static by {gain}"
    if row["deployed"]:
        on_time, static = row["satisfaction_deployed"], row["satisfaction_static"]
        return f"deployed: {on_time:.1%} on time, budget-aware static {static:.1%}; utility {gain}"
    if row["better"]:
        on_time = row["satisfaction_deployed"]
        level = f"{100 * row['level']:g}%"
        return f"fell back to budget-aware static: it is {on_time:.1%} on time, the policy reaches {level} at no price"
    if row["utility_policy"] == row["utility_static"] and row["gain_se"] == 0:
        return "fell back to budget-aware static: the policy has the same utility on every held-out sample"
    return f"fell back to budget-aware static: {gain} is not above 0 with {100 * confidence:g}% confidence"


def mean_budget_reason(row: Mapping[str, Any], kept: bool, confidence: float) -> str:
    """The reason for one mean budget; see `knobwise.agents.stack.priced_policy.compared`.

    Args:
        row: with the gain and its standard error.
        kept: whether the policy keeps the mean budget.
        confidence: of the guard.
    """
    gain = f"{row['gain']:+z.3f} ± {row['gain_se']:.3f} accuracy on held-out samples"
    if row["deployed"]:
        return f"deployed: better than the static mix by {gain}"
    if kept:
        return f"fell back to the static mix: {gain} is not above 0 with {confidence:.0%} confidence"
    return f"fell back to the static mix: no price brings the mean this low, the lowest is {row['latency_ms_mean']:.4g}"

"""Two guarantees for a deployed policy, both calibrated per budget on samples that it was not
fitted on.

The *margin* keeps the share of met budgets at a level: the policy plans with this share of its
budget. The *comparison* falls back to budget-aware static if the policy at that margin was not
better by more than chance.

The margin is found by conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster 2024,
"Conformal Risk Control", ICLR, section 2): λ̂ = inf{λ : n/(n+1)·R̂(λ) + 1/(n+1) ≤ 1 − level}, where
R̂ is the share of missed budgets among the n feasible requests (some profiled configuration meets
the budget), and λ rises as the margin narrows. The guarantee is a mean over the draw of calibration
samples and of a new one. A narrower margin can make a choice miss that met before, so R̂(λ) is
replaced by its maximum over all margins from λ down to the *cautious* one, at which the fewest
budgets are missed; the guarantee is then asymptotic in n, not exact.

Static may miss the level too. If it does and the policy at its margin keeps it, the policy only has
to be no worse on average.

The level is not enforced at any cost. It is *unattainable* if the share on time is below it at
every margin and with static; *unshown* if it is not, but n is too small for the bound above; *too
dear* if it costs more than a share of the gain over static, measured from what would be deployed
without it. In all three cases nothing is enforced, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.judging.paired import is_better, standard_error
from knobwise.agents.predictors.experts import Measured
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.configurations.reward import share_in_time

MARGINS = tuple(0.97**step for step in range(24))
"""Shares of a budget that are tried, from all of it down to half."""
ROUNDING = 1e-6
"""Tolerance for sums of shares of measurements."""
WHEN = ("before", "after", "cautious", "static")
"""The sides of the comparison: the policy with its whole budget, at its margin and at the cautious
one; static."""
Decide = Callable[[float], Tensor]
"""A limit in ms → the configurations int64 [n] that the policy chooses for samples that it was not
fitted on."""


class GuardSettings(NamedTuple):
    """Settings of the guard."""

    level: float = 0.95
    """Share of the feasible requests whose budget the guard keeps."""
    confidence: float = 0.8
    """One-sided confidence that it requires for the policy to be better than static."""
    level_cost: float = 0.1
    """Share of the gain over budget-aware static that keeping the level may cost; if it costs more,
    the level is not enforced and the report says so. 1 keeps the level at any cost: static is
    deployed where only it keeps the level."""


def calibrate(
    measured: Measured,
    decide: Decide,
    static_choice: Tensor,
    settings: GuardSettings,
    cost_ms: float = 0.0,
    first_look_ms: Tensor | None = None,
    margins: Sequence[float] = MARGINS,
) -> list[dict[str, Any]]:
    """Find margins and fall-backs on n held-out samples, for B budgets.

    Args:
        measured: the samples and the budgets.
        decide: what the policy chooses.
        static_choice: int64 [B, n], what budget-aware static chooses.
        cost_ms: what a decision of the policy takes from each budget. Static costs nothing.
        first_look_ms: float [n, C], what static does not pay of the measurements; None for nothing.
        margins: to choose from, the widest first.

    Returns:
        For each budget plain values: `margin`, `deployed`, a `reason` in words, whether the level
        is `unattainable`, `unshown` or `too_dear`, whether the policy is `better` than static, and
        utilities and shares on time, None if no held-out request was feasible.
    """
    quickest_ms = measured.latency_ms
    if first_look_ms is not None:
        quickest_ms = quickest_ms - first_look_ms
    rows = []
    for group, budget in enumerate(measured.budgets_ms):
        left = max(float(budget) - cost_ms, LEAST_LATENCY_MS)
        choices = [decide(margin * left) for margin in margins]
        # [n, M + 1]: the margins, then static
        columns = torch.stack([*choices, static_choice[group]], 1)
        cells = torch.arange(len(columns)).unsqueeze(1), columns
        latency_ms = measured.measurements_ms[cells].double()
        latency_ms[:, :-1] += cost_ms
        if first_look_ms is not None:
            latency_ms[:, -1] -= first_look_ms.gather(1, columns[:, -1:])
        in_time = share_in_time(latency_ms, budget)
        feasible = (quickest_ms <= budget).any(1)
        utilities = measured.accuracy[cells].double() * in_time
        met = in_time[feasible].sum(0)
        row = _calibrated(utilities, met, int(feasible.sum()), settings, margins)
        rows.append({"budget_ms": float(budget)} | row)
    return rows


def _calibrated(
    utilities: Tensor,
    met: Tensor,
    count: int,
    settings: GuardSettings,
    margins: Sequence[float],
) -> dict[str, Any]:
    """Return the row of one budget.

    Args:
        utilities: [n, M + 1], at each margin and, last, of static.
        met: [M + 1], how many feasible requests are on time, shares of measurements added up.
        count: how many feasible requests there are.
    """
    level, confidence, level_cost = settings
    means = utilities.mean(0)
    may_miss = _may_miss(count, level)
    misses = count - met[:-1]
    static_misses = float(count - met[-1])
    static_keeps = static_misses <= may_miss + ROUNDING
    widest, cautious = _margins(misses, may_miss)

    # what would be deployed without the level, and what the level costs from there
    otherwise = means[-1]
    if is_better(utilities[:, 0] - utilities[:, -1], confidence):
        otherwise = means[0]
    narrowed = widest is not None and _affordable(means, widest, otherwise, level_cost)
    chosen = widest if narrowed and widest is not None else 0
    gain = utilities[:, chosen] - utilities[:, -1]
    better = is_better(gain, confidence)
    only_static = static_keeps and not narrowed and level_cost == 1
    deployed = (better and not only_static) or (narrowed and not static_keeps)

    # why the level is not kept, if it is not
    allowed = (1 - level) * count + ROUNDING  # without the correction for the number of requests
    fewest = min(float(misses.min()), static_misses)
    late = float(misses[chosen]) if deployed else static_misses
    unattainable = may_miss >= 0 and fewest > allowed
    too_dear = fewest <= may_miss + ROUNDING < late
    unshown = count > 0 and late > may_miss + ROUNDING and not (unattainable or too_dear)
    row: dict[str, Any] = {
        "level": level,
        "margin": margins[chosen],
        "unattainable": unattainable,
        "too_dear": too_dear,
        "better": better,
        "unshown": unshown,
        "deployed": deployed,
        "reason": "",
    }
    for when, column in zip(WHEN, (0, chosen, cautious, -1), strict=True):
        if count:
            row[f"satisfaction_{when}"] = float(met[column]) / count
        else:
            row[f"satisfaction_{when}"] = None
    row["satisfaction_deployed"] = row["satisfaction_after" if deployed else "satisfaction_static"]
    row |= _utilities(means, chosen, deployed)
    row |= {"gain": float(gain.mean()), "gain_se": standard_error(gain), "feasible": count}
    return row | {"reason": _reason(row, settings)}


def _margins(misses: Tensor, may_miss: int) -> tuple[int | None, int]:
    """Return the index of the widest margin that keeps the level, or None, and of the cautious one.

    Args:
        misses: [M], how many feasible requests are late at each margin.
        may_miss: how many may be.
    """
    cautious = int((misses <= misses.min() + ROUNDING).nonzero()[-1])
    worst = misses[: cautious + 1].flip(0).cummax(0).values.flip(0)
    keeps = worst <= may_miss + ROUNDING
    if not keeps.any():
        return None, cautious
    return int(keeps.long().argmax()), cautious  # the first that keeps it


def _affordable(means: Tensor, margin: int, otherwise: Tensor, level_cost: float) -> bool:
    """Return True if a margin costs at most its share of the gain over static.

    Args:
        means: utilities [M + 1], as in `_calibrated`.
        otherwise: the utility of what would be deployed without the level.
    """
    may_cost = level_cost * max(float(otherwise - means[-1]), 0.0) + 1e-12
    return level_cost == 1 or bool(otherwise - means[margin] <= may_cost)


def _utilities(means: Tensor, chosen: int, deployed: bool) -> dict[str, float]:
    """Return mean utilities, of [M + 1] as in `_calibrated`, under the names of a row."""
    return {
        "utility_policy": float(means[chosen]),
        "utility_unconstrained": float(means[0]),
        "utility_static": float(means[-1]),
        "utility_deployed": float(means[chosen if deployed else -1]),
    }


def arrays_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arrays that `policy.guard.Guard` reads."""
    names = {"budgets_ms": "budget_ms", "margin": "margin", "deploy": "deployed"}
    arrays = {}
    for key, name in names.items():
        arrays[key] = np.array([row[name] for row in rows])
    return arrays


# -- in words --------------------------------------------------------------------------------------


def _reason(row: dict[str, Any], settings: GuardSettings) -> str:
    """Say why the policy is deployed at this budget or not, and whether the level is kept."""
    decision = _comparison(row, settings)
    n = row["feasible"]
    level = f"{100 * settings.level:g}%"
    if not n:
        return f"{decision}; no held-out request can meet this budget"
    needed = n - _may_miss(n, settings.level)
    if row["too_dear"]:
        cost = "utility"
        if row["deployed"]:
            cost = f"more than {100 * settings.level_cost:g}% of the gain over static"
        kept = f"({row['satisfaction_deployed']:.1%} on time)"
        return (
            f"{decision}; a guarantee of {level} on time would cost {cost}, so there is none {kept}"
        )
    if not (row["unattainable"] or row["unshown"]):
        return decision
    if needed > n:
        least = math.ceil((1 - 1e-9) / (1 - settings.level)) - 1
        return (
            f"{decision}; {n} feasible requests are too few to show {level} on "
            f"time, at least {least} are needed"
        )
    best = max(row["satisfaction_cautious"], row["satisfaction_static"])
    on_time = (
        f"at best {best:.1%} are ({round(best * n, 1):g} of {n} feasible "
        f"requests, {needed} are needed)"
    )
    if row["unshown"]:
        return f"{decision}; too few requests to guarantee {level} on time: {on_time}"
    no_help = ""
    if row["satisfaction_cautious"] <= row["satisfaction_before"]:
        no_help = "; a margin does not help"
    return f"{decision}; {level} on time is unattainable at this budget: {on_time}{no_help}"


def _comparison(row: dict[str, Any], settings: GuardSettings) -> str:
    """Say how the policy compares with static."""
    gain = f"{row['gain']:+z.3f} ± {row['gain_se']:.3f} on held-out samples"
    fallback = "fell back to budget-aware static"
    if row["deployed"] and row["better"]:
        return f"deployed: better than budget-aware static by {gain}"
    if row["deployed"]:
        on_time = row["satisfaction_deployed"]
        static = row["satisfaction_static"]
        return f"deployed: {on_time:.1%} on time, budget-aware static {static:.1%}; utility {gain}"
    if row["better"]:
        return (
            f"{fallback}: it is {row['satisfaction_static']:.1%} on time, the policy reaches "
            f"{100 * settings.level:g}% at no margin"
        )
    if row["utility_policy"] == row["utility_static"] and row["gain_se"] == 0:
        return f"{fallback}: the policy has the same utility on every held-out sample"
    return f"{fallback}: {gain} is not above 0 with {100 * settings.confidence:g}% confidence"


def _may_miss(n: int, level: float) -> int:
    """Return the most misses among n feasible requests with (misses + 1)/(n + 1) ≤ 1 − level; −1 if
    there is none."""
    # 1e-9: rounding of 1 − level must not matter
    return math.floor((1 - level) * (n + 1) + 1e-9) - 1

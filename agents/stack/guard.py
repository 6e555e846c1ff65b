"""Two guarantees for a deployed policy, both calibrated on samples that it was not fitted on, budget by budget.

The *price of a miss* κ keeps the share of met budgets at a level: what is taken has the best expected utility minus κ
times the probability of missing the budget. The *comparison* falls back to budget-aware static where the policy, that
price included, was not better than it by more than chance.

κ is found by conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster 2024, "Conformal Risk Control", ICLR,
section 2): λ̂ = inf{λ : n/(n+1)·R̂(λ) + 1/(n+1) ≤ 1 − level}, where R̂ is the share of missed budgets among the n
feasible requests (some profiled configuration meets the budget). The guarantee is a mean over the draw of calibration
samples and of a new one. A higher price can make a choice miss that met before, so R̂(λ) is replaced by its maximum over
all prices from λ up; the guarantee is then asymptotic in n, not exact. A bound on every single probability would reach
the same level at a higher cost: it forbids a gamble also where nothing better is to be had.

Static may miss the level too. Where it does and the priced policy keeps it, the policy need not be shown to be better:
to be no worse on average is enough.

The level is not kept at any cost, counted from what would be deployed without it. Where neither a price nor static
reaches it, it is *unattainable*; where keeping it costs more than a share of what is gained over static, it is *too
dear*. Nothing is forced then, and the report says so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from knobwise.agents.predictors.prediction import pick
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import log_ms
from knobwise.envs.configurations.reward import utility

PRICES = torch.tensor([0.0, *(0.05 * 1.2**step for step in range(43)), 1e6], dtype=torch.float64)
"""What a miss may cost, float64 [45], in units of accuracy: from nothing up to where only the probability of meeting
the budget counts."""
WHEN = ("before", "after", "cautious", "static")
"""What is compared: the policy at the lowest price, at the one found, at the highest; budget-aware static."""


class Guard(nn.Module):
    """Prices of a miss and fall-backs for B calibrated budgets; a fresh one takes the best expected utility.

    All state is in buffers [B]: restore one by `Guard(B, …)` and `load_state_dict`.

    Args:
        groups: B.
        level: the share of feasible requests whose budget is to be met.
        confidence: one-sided, that the policy is better than static; 0.5 asks for a better mean only.
        level_cost: the share of the gain over static that keeping the level may cost; 1 keeps it at any cost, also by
            static where only static does.

    Raises:
        InputError: level or confidence not between 0 and 1, or level_cost not in [0, 1].
    """

    budgets_ms: Tensor
    miss: Tensor
    """κ."""
    unattainable: Tensor
    """bool: neither a price nor static reaches the level; then nothing is forced."""
    too_dear: Tensor
    """bool: the level can be reached, but costs more than `level_cost`; then nothing is forced either."""
    better: Tensor
    """bool: with its price the policy is better than static, by more than chance."""
    deploy: Tensor
    """bool: False falls back to static."""
    n_feasible: Tensor
    satisfaction_before: Tensor
    """Of the feasible held-out requests, as all satisfactions here; this one at the lowest price."""
    satisfaction_after: Tensor
    satisfaction_cautious: Tensor
    """At the highest price tried."""
    satisfaction_static: Tensor
    utility_before: Tensor
    """Mean held-out utility, as all utilities here; this one at the lowest price."""
    utility_after: Tensor
    utility_cautious: Tensor
    utility_static: Tensor
    gain_se: Tensor
    """Standard error of the paired mean of utility after − utility of static."""

    def __init__(self, groups: int, level: float = 0.95, confidence: float = 0.8, level_cost: float = 0.1) -> None:
        super().__init__()
        if not (0 < level < 1 and 0 < confidence < 1):
            raise InputError(f"guard: level={level}, confidence={confidence}; both must lie between 0 and 1")
        if not 0 <= level_cost <= 1:
            raise InputError(f"guard: level_cost={level_cost}; it must lie in [0, 1]")
        self.level, self.confidence, self.level_cost = level, confidence, level_cost
        numbers = [f"{what}_{when}" for what in ("satisfaction", "utility") for when in WHEN]
        for name in ("budgets_ms", "miss", *numbers, "gain_se"):
            self.register_buffer(name, torch.zeros(groups, dtype=torch.float64))
        self.register_buffer("n_feasible", torch.zeros(groups, dtype=torch.int64))
        for name in ("unattainable", "too_dear", "better"):
            self.register_buffer(name, torch.zeros(groups, dtype=torch.bool))
        self.register_buffer("deploy", torch.ones(groups, dtype=torch.bool))

    @classmethod
    @torch.no_grad()
    def calibrate(
        cls,
        *,
        budgets_ms: Tensor,
        score: Tensor,
        meets: Tensor,
        accuracy: Tensor,
        latency_ms: Tensor,
        mask: Tensor,
        static_choice: Tensor,
        level: float = 0.95,
        confidence: float = 0.8,
        level_cost: float = 0.1,
    ) -> Guard:
        """Find prices and fall-backs on held-out samples; n samples, C configurations, B budgets.

        Args:
            budgets_ms: float [B].
            score: float [B, n, C], predicted utility under each budget, by a model that was not fitted on the sample.
            meets: float [B, n, C], likewise the predicted probability that the latency is at most the budget.
            accuracy, latency_ms: float [n, C], as measured; NaN where not profiled.
            mask: bool [n, C], what was profiled.
            static_choice: int64 [B, n], what budget-aware static chooses.
            level, confidence, level_cost: see the class.
        """
        guard = cls(len(budgets_ms), level, confidence, level_cost)
        guard.budgets_ms.copy_(budgets_ms)
        for group, budget in enumerate(budgets_ms):
            # columns: the prices, then static
            choices = [_choice(score[group], meets[group], p, mask, static_choice[group]) for p in PRICES]
            columns = torch.stack([*choices, static_choice[group]], 1)
            latency, feasible = latency_ms.gather(1, columns), (latency_ms <= budget).any(1)
            got = utility(accuracy.gather(1, columns), latency, budget).double()
            met, count, means = (latency <= budget).sum(0), int(feasible.sum()), got.mean(0)

            keeps = (count - met[:-1]).flip(0).cummax(0).values.flip(0) <= guard._may_miss(count)
            static_keeps = bool(count - met[-1] <= guard._may_miss(count))
            lowest = int(keeps.long().argmax())  # the first; 0 where there is none
            otherwise = means[0] if guard._is_better(got[:, 0] - got[:, -1]) else means[-1]
            may_cost = math.inf if level_cost == 1 else level_cost * max(float(otherwise - means[-1]), 0.0) + 1e-12
            priced = bool(keeps.any()) and bool(otherwise - means[lowest] <= may_cost)
            at = lowest if priced else 0
            gain = got[:, at] - got[:, -1]
            better = guard._is_better(gain)
            only_static = static_keeps and not priced and level_cost == 1
            deploy = (better and not only_static) or (priced and not static_keeps)
            reachable = bool(keeps.any()) or static_keeps
            found = {
                "miss": PRICES[at],
                "unattainable": count > 0 and not reachable,
                "too_dear": reachable and not (priced if deploy else static_keeps),
                "better": better,
                "deploy": deploy,
                "n_feasible": count,
                "gain_se": _standard_error(gain),
            }
            for when, column in zip(WHEN, (0, at, -2, -1), strict=True):
                found[f"satisfaction_{when}"] = met[column].double() / max(count, 1)
                found[f"utility_{when}"] = means[column]
            for name, value in found.items():
                getattr(guard, name)[group] = value
        return guard

    @torch.no_grad()
    def choose(self, score: Tensor, meets: Tensor, budgets_ms: Tensor, mask: Tensor, static_choice: Tensor) -> Tensor:
        """Guarded decisions for n requests, int64 [n].

        A request belongs to the calibrated budget that is nearest in log-ms. Among equals the configuration more likely
        to meet the budget is taken; where all probabilities of that round to 0, what static chooses.

        Args:
            score, meets: float [n, C], predicted utility and predicted probability of meeting the budget.
            budgets_ms: float [n].
            mask: bool [n, C], the configurations that may be chosen; at least one per request.
            static_choice: int64 [n], what budget-aware static chooses.
        """
        group = (log_ms(budgets_ms).unsqueeze(1) - log_ms(self.budgets_ms)).abs().argmin(1)
        chosen = _choice(score, meets, self.miss[group].unsqueeze(1), mask, static_choice)
        return torch.where(self.deploy[group], chosen, static_choice)

    def rows(self) -> list[dict[str, Any]]:
        """What was found for each budget, in plain values and with a `reason` for a person; [] if never calibrated.

        `…_deployed` are of the policy at its price, or of static after a fall-back. Satisfactions are None where no
        held-out request was feasible.
        """
        found = {name: values.tolist() for name, values in self.state_dict().items()}
        groups = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
        return [
            {
                "budget_ms": group["budgets_ms"],
                "level": self.level,
                "miss_price": group["miss"],
                "unattainable": group["unattainable"],
                "too_dear": group["too_dear"],
                "better": group["better"],
                "deployed": group["deploy"],
                "reason": self._reason(group),
                **{f"satisfaction_{w}": group[f"satisfaction_{w}"] if group["n_feasible"] else None for w in WHEN},
                "satisfaction_deployed": _deployed(group, "satisfaction") if group["n_feasible"] else None,
                "utility_policy": group["utility_after"],
                "utility_unconstrained": group["utility_before"],
                "utility_static": group["utility_static"],
                "utility_deployed": _deployed(group, "utility"),
                "gain": group["utility_after"] - group["utility_static"],
                "gain_se": group["gain_se"],
                "feasible": group["n_feasible"],
            }
            for group in groups
            if group["budgets_ms"] > 0
        ]

    def _may_miss(self, n: int) -> int:
        """The most misses among n feasible requests with (misses + 1)/(n + 1) ≤ 1 − level; −1 for none."""
        return math.floor((1 - self.level) * (n + 1) + 1e-9) - 1  # the rounding of 1 − level must not decide

    def _is_better(self, gain: Tensor) -> bool:
        """Whether paired differences [n] are above 0 by more than chance."""
        z = torch.special.ndtri(torch.tensor(self.confidence, dtype=torch.float64))
        return len(gain) > 1 and bool(gain.mean() > z * _standard_error(gain))

    def _reason(self, group: dict[str, Any]) -> str:
        level, n = f"{100 * self.level:g}%", group["n_feasible"]
        kept = f"{_deployed(group, 'satisfaction'):.1%}"
        gain = f"{group['utility_after'] - group['utility_static']:+z.3f} ± {group['gain_se']:.3f} on held-out samples"
        if group["deploy"] and group["better"]:
            reason = f"deployed: better than budget-aware static by {gain}"
        elif group["deploy"]:
            static = f"{group['satisfaction_static']:.1%}"
            reason = f"deployed: keeps {kept} where budget-aware static keeps {static}; {gain} in utility"
        elif group["better"]:
            reason = f"fell back to budget-aware static: it keeps {kept}, the policy at no price {level}"
        elif group["utility_after"] == group["utility_static"] and group["gain_se"] == 0:
            reason = "fell back to budget-aware static: the policy got the same from every held-out sample"
        else:
            sure = f"{100 * self.confidence:g}%"
            reason = f"fell back to budget-aware static: {gain} is not above 0 with {sure} confidence"
        may_miss = self._may_miss(n)
        if not n:
            return f"{reason}; no held-out request can meet this budget"
        if may_miss < 0:
            least = math.ceil((1 - 1e-9) / (1 - self.level)) - 1
            return f"{reason}; {level} cannot be shown with {n} feasible requests, at least {least} are needed"
        if group["too_dear"]:
            cost = f"more than {100 * self.level_cost:g}% of the gain over static" if group["deploy"] else "utility"
            return f"{reason}; {level} is too dear at this budget: it would cost {cost}; {kept} is kept"
        if group["unattainable"]:
            share = max(group["satisfaction_cautious"], group["satisfaction_static"])
            return (
                f"{reason}; {level} is unattainable at this budget: the most cautious choice keeps {share:.1%} "
                f"({round(share * n)} of {n} feasible requests, {n - may_miss} are needed)"
            )
        return reason


def _choice(score: Tensor, meets: Tensor, price: Tensor, mask: Tensor, static_choice: Tensor) -> Tensor:
    """The best expected utility minus the expected price of a miss (up to a constant), [n, C] each → [n]."""
    # double, for the highest price
    chosen = pick(score.double() + price * meets.double(), -meets, mask)
    # the model cannot tell anything apart where no probability is above 0, and would take the first
    return torch.where((meets.masked_fill(~mask, 0.0) > 0).any(1), chosen, static_choice)


def _standard_error(values: Tensor) -> Tensor:
    """Of the mean of [n]."""
    n = len(values)
    return ((values - values.mean()).square().sum() / max(n - 1, 1) / n).sqrt()


def _deployed(group: dict[str, Any], what: str) -> float:
    value: float = group[f"{what}_after" if group["deploy"] else f"{what}_static"]
    return value

"""Two guarantees for a deployed policy, both calibrated per budget on samples that it was not fitted on.

The *price of a miss* κ keeps the share of met budgets at a level: the choice maximises expected utility minus κ times
the probability of missing the budget. The *comparison* falls back to budget-aware static if the policy at that price
was not better by more than chance.

κ is found by conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster 2024, "Conformal Risk Control", ICLR,
section 2): λ̂ = inf{λ : n/(n+1)·R̂(λ) + 1/(n+1) ≤ 1 − level}, where R̂ is the share of missed budgets among the n
feasible requests (some profiled configuration meets the budget). The guarantee is a mean over the draw of calibration
samples and of a new one. A higher price can make a choice miss that met before, so R̂(λ) is replaced by its maximum over
all prices from λ up to the *cautious* one, at which the fewest budgets are missed; the guarantee is then asymptotic in
n, not exact. With true probabilities the cautious price is the highest, up to chance; where the model is wrong, higher
prices can make more choices late, and are left out. A bound on every single probability would reach the same level at a
higher cost: it forbids a gamble even where there is no better choice.

Static may miss the level too. If it does and the priced policy keeps it, the policy only has to be no worse on average.

The level is not enforced at any cost. It is *unattainable* if the share on time is below it at every price and with
static; *unshown* if it is not, but n is too small for the bound above; *too dear* if it costs more than a share of the
gain over static, measured from what would be deployed without it. In all three cases nothing is enforced, and the
report says so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from knobwise.agents.predictors.experts import Measured, pick
from knobwise.envs.configurations.budgets import log_ms
from knobwise.envs.configurations.reward import share_in_time

PRICES = torch.tensor([0.0, *(0.05 * 1.2**step for step in range(43)), 1e6], dtype=torch.float64)
"""Prices of a miss that are tried, float64 [45], in units of accuracy: from 0 to one at which only the probability of
meeting the budget counts."""
ROUNDING = 1e-6
"""Of sums of shares of measurements."""
WHEN = ("before", "after", "cautious", "static")
"""What is compared: the policy at the lowest price, at the calibrated one, at the cautious one; budget-aware static."""


class Guard(nn.Module):
    """Prices of a miss and fall-backs for B calibrated budgets; before calibration the best expected utility is taken.

    `level`, `confidence` and `level_cost` are those of `PolicyConfig`; with a `level_cost` of 1 static is deployed
    where only static keeps the level.

    All state is in buffers [B]: restore a guard by `Guard(B, …)` and `load_state_dict`. `unattainable`, `too_dear`:
    see above. `better`: at its price the policy is better than static, by more than chance. `deploy`: False falls back
    to static. Utilities are means over held-out requests, satisfactions shares of the feasible ones, both at each of
    `WHEN`; `gain_se` is the standard error of the paired mean of utility after − utility of static.
    """

    budgets_ms: Tensor
    miss: Tensor
    """κ."""
    deploy: Tensor

    def __init__(self, groups: int, level: float = 0.95, confidence: float = 0.8, level_cost: float = 0.1) -> None:
        super().__init__()
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
        measured: Measured,
        *,
        score: Tensor,
        meets: Tensor,
        static_choice: Tensor,
        cost_ms: float = 0.0,
        first_look_ms: Tensor | None = None,
        **settings: float,
    ) -> Guard:
        """Find prices and fall-backs on n held-out samples with C configurations, for B budgets.

        Args:
            measured: the samples and the budgets.
            score, meets: float [B, n, C], the utility under what the policy's own cost leaves of each budget, and the
                probability that the latency is at most that, predicted by a model not fitted on the sample.
            static_choice: int64 [B, n], what budget-aware static chooses.
            cost_ms: what a decision of the policy takes from each budget. Static costs nothing.
            first_look_ms: float [n, C], what static does not pay of the measurements; None for nothing.
            settings: those of the class.
        """
        guard = cls(len(measured.budgets_ms), **settings)
        guard.budgets_ms.copy_(measured.budgets_ms)
        quickest_ms = measured.latency_ms if first_look_ms is None else measured.latency_ms - first_look_ms
        for group, budget in enumerate(measured.budgets_ms):
            # columns: the prices, then static
            choices = [_choice(score[group], meets[group], p, measured.mask, static_choice[group]) for p in PRICES]
            columns = torch.stack([*choices, static_choice[group]], 1)
            cells = torch.arange(len(columns)).unsqueeze(1), columns
            latency_ms = measured.measurements_ms[cells].double()
            latency_ms[:, :-1] += cost_ms
            if first_look_ms is not None:
                latency_ms[:, -1] -= first_look_ms.gather(1, columns[:, -1:])
            in_time = share_in_time(latency_ms, budget)
            feasible = (quickest_ms <= budget).any(1)
            utilities = measured.accuracy[cells].double() * in_time
            values = guard._calibrated(utilities, in_time[feasible].sum(0), int(feasible.sum()))
            for name, value in values.items():
                getattr(guard, name)[group] = value
        return guard

    def _calibrated(self, utilities: Tensor, met: Tensor, count: int) -> dict[str, Any]:
        """The buffers for one budget, from utilities [n, P + 1] at each price and, last, of static, how many feasible
        requests are on time [P + 1], shares of measurements added up, and how many there are."""
        means, may_miss = utilities.mean(0), self._may_miss(count)
        misses, static_misses = count - met[:-1], float(count - met[-1])
        cautious = int((misses <= misses.min() + ROUNDING).nonzero()[-1])
        keeps = misses[: cautious + 1].flip(0).cummax(0).values.flip(0) <= may_miss + ROUNDING
        static_keeps = static_misses <= may_miss + ROUNDING
        lowest = int(keeps.long().argmax())  # the first; 0 if no price keeps the level
        otherwise = means[0] if self._is_better(utilities[:, 0] - utilities[:, -1]) else means[-1]
        may_cost = self.level_cost * max(float(otherwise - means[-1]), 0.0) + 1e-12
        affordable = self.level_cost == 1 or bool(otherwise - means[lowest] <= may_cost)
        priced = bool(keeps.any()) and affordable
        price = lowest if priced else 0
        gain = utilities[:, price] - utilities[:, -1]
        better = self._is_better(gain)
        only_static = static_keeps and not priced and self.level_cost == 1
        deploy = (better and not only_static) or (priced and not static_keeps)
        allowed = (1 - self.level) * count + ROUNDING  # without the correction for the number of requests
        fewest, late = min(float(misses.min()), static_misses), float(misses[price]) if deploy else static_misses
        values = {
            "miss": PRICES[price],
            "unattainable": may_miss >= 0 and fewest > allowed,
            "too_dear": fewest <= may_miss + ROUNDING < late,
            "better": better,
            "deploy": deploy,
            "n_feasible": count,
            "gain_se": _standard_error(gain),
        }
        for when, column in zip(WHEN, (0, price, cautious, -1), strict=True):
            values[f"satisfaction_{when}"] = met[column].double() / max(count, 1)
            values[f"utility_{when}"] = means[column]
        return values

    def groups(self, budgets_ms: Tensor) -> Tensor:
        """The calibrated budget nearest in log-ms to each of these: float [n] → int64 [n]."""
        return (log_ms(budgets_ms).unsqueeze(1) - log_ms(self.budgets_ms)).abs().argmin(1)

    @torch.no_grad()
    def choose(self, score: Tensor, meets: Tensor, budgets_ms: Tensor, mask: Tensor, static_choice: Tensor) -> Tensor:
        """Guarded decisions for n requests, int64 [n].

        A request uses the calibrated budget nearest to its own. Among equal scores the configuration more likely to
        meet the budget is taken; if all these probabilities round to 0, the choice of static. Arguments as in
        `calibrate`, for one budget [n] each: score and meets [n, C], static_choice [n].
        """
        group = self.groups(budgets_ms)
        chosen = _choice(score, meets, self.miss[group].unsqueeze(1), mask, static_choice)
        return torch.where(self.deploy[group], chosen, static_choice)

    def rows(self) -> list[dict[str, Any]]:
        """The calibration of each budget in plain values, with a `reason` in words; [] before calibration.

        `…_deployed` are of the policy at its price, or of static after a fall-back. Satisfactions are None if no
        held-out request was feasible. `unshown`: see above.
        """
        buffers = {name: values.tolist() for name, values in self.state_dict().items()}
        groups = [dict(zip(buffers, values, strict=True)) for values in zip(*buffers.values(), strict=True)]
        return [self._row(group) for group in groups if group["budgets_ms"] > 0]

    def _row(self, group: dict[str, Any]) -> dict[str, Any]:
        deployed, n = "after" if group["deploy"] else "static", group["n_feasible"]
        satisfaction = {w: group[f"satisfaction_{w}"] if n else None for w in WHEN}
        kept = n * (1 - group[f"satisfaction_{deployed}"]) <= self._may_miss(n) + ROUNDING
        row = {
            "budget_ms": group["budgets_ms"],
            "level": self.level,
            "miss_price": group["miss"],
            **{name: group[name] for name in ("unattainable", "too_dear", "better")},
            "unshown": n > 0 and not (kept or group["unattainable"] or group["too_dear"]),
            "deployed": group["deploy"],
            "reason": "",
            **{f"satisfaction_{w}": share for w, share in satisfaction.items()},
            "satisfaction_deployed": satisfaction[deployed],
            "utility_policy": group["utility_after"],
            "utility_unconstrained": group["utility_before"],
            "utility_static": group["utility_static"],
            "utility_deployed": group[f"utility_{deployed}"],
            "gain": group["utility_after"] - group["utility_static"],
            "gain_se": group["gain_se"],
            "feasible": n,
        }
        return row | {"reason": self._reason(row)}

    def _reason(self, row: dict[str, Any]) -> str:
        """Why the policy is deployed at this budget or not, and whether the level is kept."""
        decision, n, level = self._comparison(row), row["feasible"], f"{100 * self.level:g}%"
        if not n:
            return f"{decision}; no held-out request can meet this budget"
        needed, kept = n - self._may_miss(n), row["satisfaction_deployed"]
        if row["too_dear"]:
            cost = f"more than {100 * self.level_cost:g}% of the gain over static" if row["deployed"] else "utility"
            return (
                f"{decision}; a guarantee of {level} on time would cost {cost}, so there is none ({kept:.1%} on time)"
            )
        if not (row["unattainable"] or row["unshown"]):
            return decision
        if needed > n:
            least = math.ceil((1 - 1e-9) / (1 - self.level)) - 1
            return f"{decision}; {n} feasible requests are too few to show {level} on time, at least {least} are needed"
        best = max(row["satisfaction_cautious"], row["satisfaction_static"])
        on_time = f"at best {best:.1%} are ({round(best * n, 1):g} of {n} feasible requests, {needed} are needed)"
        if row["unshown"]:
            return f"{decision}; too few requests to guarantee {level} on time: {on_time}"
        no_help = "; a price of a miss does not help" * (row["satisfaction_cautious"] <= row["satisfaction_before"])
        return f"{decision}; {level} on time is unattainable at this budget: {on_time}{no_help}"

    def _comparison(self, row: dict[str, Any]) -> str:
        gain = f"{row['gain']:+z.3f} ± {row['gain_se']:.3f} on held-out samples"
        on_time, static = row["satisfaction_deployed"], row["satisfaction_static"]
        fallback = "fell back to budget-aware static"
        if row["deployed"] and row["better"]:
            return f"deployed: better than budget-aware static by {gain}"
        if row["deployed"]:
            return f"deployed: {on_time:.1%} on time, budget-aware static {static:.1%}; utility {gain}"
        if row["better"]:
            return f"{fallback}: it is {on_time:.1%} on time, the policy reaches {100 * self.level:g}% at no price"
        if row["utility_policy"] == row["utility_static"] and row["gain_se"] == 0:
            return f"{fallback}: the policy has the same utility on every held-out sample"
        return f"{fallback}: {gain} is not above 0 with {100 * self.confidence:g}% confidence"

    def _may_miss(self, n: int) -> int:
        """The most misses among n feasible requests with (misses + 1)/(n + 1) ≤ 1 − level; −1 if there is none."""
        return math.floor((1 - self.level) * (n + 1) + 1e-9) - 1  # 1e-9: rounding of 1 − level must not matter

    def _is_better(self, gain: Tensor) -> bool:
        """Whether paired differences [n] are above 0 by more than chance."""
        z = torch.special.ndtri(torch.tensor(self.confidence, dtype=torch.float64))
        return len(gain) > 1 and bool(gain.mean() > z * _standard_error(gain))


def _choice(score: Tensor, meets: Tensor, price: Tensor, mask: Tensor, static_choice: Tensor) -> Tensor:
    """The best expected utility minus the expected price of a miss (up to a constant), [n, C] each → [n]."""
    # double because of the highest price
    chosen = pick(score.double() + price * meets.double(), -meets, mask)
    # if no probability is above 0 the model cannot distinguish configurations, and would take the first
    return torch.where((meets.masked_fill(~mask, 0.0) > 0).any(1), chosen, static_choice)


def _standard_error(values: Tensor) -> Tensor:
    """Of the mean of [n]."""
    n = len(values)
    return ((values - values.mean()).square().sum() / max(n - 1, 1) / n).sqrt()

"""Policies for mean budgets: a policy that decides at a price, the calibrated price of each budget, and a guard.

The policy predicts accuracy and cost of every configuration, so that the lowest price that keeps a budget is computed
exactly (`calibrate_prices`), on samples that the policy was not fitted on. For each budget the guard falls back to the
static mix unless the policy was more accurate on those samples, by more than chance, at no higher mean latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import PredictThenChoose
from knobwise.agents.predictors.experts import Experts
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.agents.stack.prices import StaticMix, calibrate_prices, choose_at_price
from knobwise.agents.stack.stacked_controller import StackedController, fit_priced_stack
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable, Split

GOLDEN = 0.6180339887498949
"""(√5 − 1)/2, the golden ratio without its 1."""


class PricedChooser:
    """Decides for mean budgets.

    Args:
        name: of the policy.
        chooser: a stack or a baseline whose `choose(features, worths, mask)` weighs accuracy against latency/worth.
        budgets_ms, prices: float [B], the calibrated mean budgets, and λ = 1/worth for each, accuracy per ms.
        mix, guard: the static mix and the guard's comparison (`compared`) for each budget; None and empty without.
    """

    def __init__(
        self,
        name: str,
        chooser: Any,
        budgets_ms: Tensor,
        prices: Tensor,
        mix: StaticMix | None = None,
        guard: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.name, self.chooser, self.mix = name, chooser, mix
        self.budgets_ms, self.prices = budgets_ms, prices.double()
        self.guard = [dict(row) for row in guard]
        self.deployed = torch.tensor([row["deployed"] for row in self.guard] or [True] * len(prices))
        self._turn = 1

    def groups(self, budgets_ms: Tensor) -> Tensor:
        """The index of each of these budgets among the calibrated ones: float [n] in ms → int64 [n]. One that is not
        is an `InputError`; its price cannot be guessed."""
        known = self.budgets_ms.double()
        group = (budgets_ms.double().unsqueeze(1) - known).abs().argmin(1)
        far = (budgets_ms.double() - known[group]).abs() > 1e-3 * known[group]
        if far.any():
            raise InputError(
                f"a mean budget of {float(budgets_ms[far][0]):.4g}: prices were calibrated for "
                f"{', '.join(f'{budget:.4g}' for budget in known.tolist())} only; train with the budgets_ms you need"
            )
        return group

    @torch.no_grad()
    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        """Decisions for requests under mean budgets: blocks [n, d], [n] ms, bool [n, C] → configurations int64 [n].

        Where the static mix decides, requests take turns between its sides, whatever their features.

        Raises:
            InputError: if a budget has no calibrated price.
        """
        group = self.groups(budgets_ms)
        chosen = self.chooser.choose(features, 1 / self.prices[group], mask).cpu()
        if self.mix is None or bool(self.deployed[group].all()):
            return chosen
        mixed = (~self.deployed[group]).nonzero().squeeze(1)
        mask = torch.ones(len(group), len(self.chooser.configurations), dtype=torch.bool) if mask is None else mask
        place, self._turn = turns(self._turn, len(mixed)), self._turn + len(mixed)
        chosen[mixed] = self.mix.choose(place, group[mixed], mask.cpu()[mixed])
        return chosen

    @torch.no_grad()
    def decided(self, table: ProfileTable, rows: Tensor) -> Tensor:
        """The chooser's configurations for each sample at each calibrated budget, without the guard: int64 [n, B]."""
        features, mask = {name: block[rows] for name, block in table.features.items()}, table.mask[rows]
        worths = [(1 / price).expand(len(rows)) for price in self.prices]
        return torch.stack([self.chooser.choose(features, worth, mask).cpu() for worth in worths], 1)

    @torch.no_grad()
    def expected(self, table: ProfileTable, rows: Tensor, decided: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Accuracy and latency (ms) of each sample at each calibrated budget, float64 [n, B] each: of the choices
        `decided`, None to make them here, and where the static mix decides, of its expectation instead of a draw."""
        chosen = self.decided(table, rows) if decided is None else decided
        accuracy, cost = (values[rows].double().gather(1, chosen) for values in (table.accuracy, table.latency_ms))
        if self.mix is None:
            return accuracy, cost
        mixed, mixed_cost = self.mix.expected(table, rows)
        return accuracy.where(self.deployed, mixed), cost.where(self.deployed, mixed_cost)

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint; the chooser must be a stack."""
        return {
            "name": self.name,
            "chooser": self.chooser.plain(),
            "budgets_ms": self.budgets_ms,
            "prices": self.prices,
            "mix": self.mix and self.mix.plain(),
            "guard": self.guard,
        }

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> PricedChooser:
        """The inverse of `plain`."""
        mix = plain["mix"] and StaticMix.restored(plain["mix"])
        chooser = StackedController.restored(plain["chooser"])
        return cls(plain["name"], chooser, plain["budgets_ms"], plain["prices"], mix, plain["guard"])


def turns(first: int, count: int) -> Tensor:
    """Numbers in [0, 1) that share it out as evenly as a sequence can: k·φ mod 1 for k = `first` …, φ the golden ratio
    (Niederreiter 1992, "Random Number Generation and Quasi-Monte Carlo Methods", chapter 3): float64 [count]."""
    return torch.arange(first, first + count, dtype=torch.float64) * GOLDEN % 1


# -- calibrating -------------------------------------------------------------------------------------------------------


def compared(
    accuracy: Tensor, cost: Tensor, mixed: Tensor, budgets_ms: Tensor, confidence: float
) -> list[dict[str, Any]]:
    """The guard's comparison for each budget [B] in plain values, with a `reason` in words.

    The policy is deployed if it keeps the budget and is more accurate than the static mix by more than z·(standard
    error of the mean paired difference), z the normal quantile of the one-sided `confidence`. Accuracy and cost of the
    policy and the mix's expected accuracy are float [n, B], on samples that neither was fitted on.
    """
    n, z = len(accuracy), torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64))
    gains = (accuracy - mixed).double()
    gain, spent = gains.mean(0), cost.double().mean(0)
    error = (gains - gain).square().sum(0).div(max(n - 1, 1) * n).sqrt()
    kept, sure = spent <= budgets_ms.double() * (1 + 1e-9), (gain > z * error) & (n > 1)
    rows = []
    for b, budget in enumerate(budgets_ms.tolist()):
        row = {
            "budget_ms": budget,
            "deployed": bool(kept[b] & sure[b]),
            "reason": "",
            "accuracy_policy": float(accuracy[:, b].double().mean()),
            "accuracy_static_mix": float(mixed[:, b].double().mean()),
            "latency_ms_mean": float(spent[b]),
            "gain": float(gain[b]),
            "gain_se": float(error[b]),
        }
        by = f"{row['gain']:+z.3f} ± {row['gain_se']:.3f} accuracy on held-out samples"
        if row["deployed"]:
            row["reason"] = f"deployed: better than the static mix by {by}"
        elif kept[b]:
            row["reason"] = f"fell back to the static mix: {by} is not above 0 with {confidence:.0%} confidence"
        else:
            lowest = f"no price brings the mean this low, the lowest is {row['latency_ms_mean']:.4g}"
            row["reason"] = f"fell back to the static mix: {lowest}"
        rows.append(row)
    return rows


@torch.no_grad()
def price_stack(
    table: ProfileTable,
    rows: Tensor,
    network: Controller,
    config: PolicyConfig,
    worths: Tensor,
    budgets_ms: Tensor,
    seed: int,
    cost_ms: float = 0.0,
    experts: Experts | None = None,
) -> PricedChooser:
    """A stack (see `fit_priced_stack`) at its prices for mean budgets [B], inside a guard, calibrated out of fold. A
    decision takes `cost_ms` from each budget."""
    stack, (accuracy, cost) = fit_priced_stack(table, rows, network, config, worths, seed, experts)
    mask = table.mask[rows]
    prices = calibrate_prices(accuracy, cost, table.latency_ms[rows], mask, budgets_ms - cost_ms)
    chosen = torch.stack([choose_at_price(accuracy, cost, price, mask) for price in prices], 1)
    mixed = torch.zeros(chosen.shape, dtype=torch.float64)
    for fit, hold in folds_of(table, rows, seed):
        mixed[hold] = StaticMix(table, rows[torch.from_numpy(fit)], budgets_ms).expected(table, rows[hold])[0]
    unguarded = PricedChooser("controller", stack, budgets_ms, prices)
    return _guarded(unguarded, chosen, mixed, table, rows, config, cost_ms)


def _guarded(
    policy: PricedChooser,
    chosen: Tensor,
    mixed: Tensor,
    table: ProfileTable,
    rows: Tensor,
    config: PolicyConfig,
    cost_ms: float,
) -> PricedChooser:
    """Inside a guard that compares the choices int64 [n, B], made out of fold, on `rows`."""
    if not config.guard:
        return policy
    budgets_ms = policy.budgets_ms
    accuracy, latency_ms = policy.expected(table, rows, chosen)
    guard = compared(accuracy, latency_ms + cost_ms, mixed, budgets_ms, config.confidence)
    mix = StaticMix(table, rows, budgets_ms)
    return PricedChooser(policy.name, policy.chooser, budgets_ms, policy.prices, mix, guard)


@torch.no_grad()
def taught(
    teacher: PricedChooser, student: StackedController, table: ProfileTable, rows: Tensor, cost_ms: float = 0.0
) -> PricedChooser:
    """A student of its stack inside the teacher's guard, at prices of its own: the lowest that keep the mean budgets,
    less `cost_ms` for a decision, on samples `rows` [n], none of which it learned from."""
    features = student.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    accuracy, cost = student.predictions(features).costs()
    limits = teacher.budgets_ms - cost_ms
    prices = calibrate_prices(accuracy, cost, table.latency_ms[rows], table.mask[rows], limits)
    return PricedChooser(teacher.name, student, teacher.budgets_ms, prices, teacher.mix, teacher.guard)


# -- baselines ---------------------------------------------------------------------------------------------------------


class PredictAtPrice(PredictThenChoose):
    """Predicts accuracy and latency of every configuration, then takes the best Â − L̂/worth."""

    def choose(self, features: Mapping[str, Tensor], worths: Tensor, mask: Tensor | None = None) -> Tensor:
        prediction = self.predict(features, len(worths))
        return choose_at_price(prediction.accuracy, prediction.latency_ms, 1 / worths.double(), mask)


def make_priced_baselines(
    table: ProfileTable, split: Split, budgets_ms: Tensor, seed: int = 0, experts: Experts | None = None
) -> list[PricedChooser]:
    """The baselines that read the request, for mean budgets [B], fitted on all but the test rows and calibrated out of
    fold; `seed` is that of folds and trees, `experts` as in `make_baselines`."""
    rows = torch.cat([split.train, split.validation])
    experts = experts or Experts.fit(table, rows, budgets_ms[:0], tuple(FAMILIES), seed)
    measured, normaliser, fitted = experts
    named = [("latency_only", fitted[0]), *((each.expert.name, each) for each in fitted)]
    baselines = []
    for name, (expert, held_out) in named:
        predict_accuracy = name != "latency_only"
        accuracy = held_out.accuracy if predict_accuracy else expert.mean_accuracy.expand_as(held_out.accuracy)
        prices = calibrate_prices(accuracy, held_out.latency_ms, measured.latency_ms, measured.mask, budgets_ms)
        chooser = PredictAtPrice(name, expert, normaliser, predict_accuracy)
        baselines.append(PricedChooser(name, chooser, budgets_ms, prices))
    return baselines

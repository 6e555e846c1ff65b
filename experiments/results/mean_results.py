"""results.json under mean budgets: accuracy at what was really spent, beside mixtures, single configurations, oracle.

A policy hardly ever spends exactly its budget on samples that its price was not calibrated on. So it is compared at
*equal mean latency*: with the static mix, the best single configuration and the oracle that spend what it spent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.judging.baselines import averages
from knobwise.agents.judging.evaluation import bootstrap, mean_row
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.prices import StaticMix, best_single_at, difference_ci95, oracle_at_mean, static_hull
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.results import configurations_of, decision_cells, decision_us, profile_of

SHOWN_IN_USAGE = ("controller", "static_mix", "oracle")
SHOWN_BY_DATASET = ("controller", "static_mix", "best_single", "oracle")


class Outcome(NamedTuple):
    """What came of a policy's decisions: S seeds, n samples, B mean budgets."""

    accuracy: Tensor
    """float64 [S, n, B]; of a mixture expected."""
    latency_ms: Tensor
    """float64 [S, n, B], likewise."""
    prices: Tensor | None = None
    """float64 [S, B], where the policy has prices."""
    mixed: Tensor | None = None
    """bool [B], where a mixture decided: the latencies of single requests are not known there."""
    chosen: Tensor | None = None
    """int64 [S, n, B], configurations; −1 where a mixture decided; None of a mixture at every budget."""


class Reference:
    """What any policy is compared with, by what it spends on the test samples.

    Args:
        table: the profile.
        fitted: int64, the rows that the static ways are chosen on.
        test: int64 [n], the rows that they are judged on.
    """

    def __init__(self, table: ProfileTable, fitted: Tensor, test: Tensor) -> None:
        self.table, self.test, self.averages = table, test, averages(table, fitted)
        self.corners = static_hull(*self.averages)
        at_corners = StaticMix(table, fitted, self.averages[1][self.corners])
        self._accuracy, self._latency = at_corners.expected(table, test)
        # a dearer corner may turn out cheaper on the test samples; from there on the mix costs what the dearest did
        self._means = self._latency.mean(0).cummax(0).values

    def hull(self) -> list[dict[str, Any]]:
        """The corners that the static mix lies between, from the cheapest to the most accurate."""
        values = zip(self.corners.tolist(), self._accuracy.mean(0).tolist(), self._means.tolist(), strict=True)
        return [{"label": self.table.label(c), "accuracy": a, "latency_ms": ms} for c, a, ms in values]

    def static_mix(self, spent: Tensor) -> Tensor:
        """Accuracy of the static mix whose mean latency on the test samples is `spent`, float64 [B] ms → [n, B].

        It mixes two neighbours on the hull of the averages of `fitted`; only their shares are set on the test samples,
        and by latency alone. Below the cheapest corner it is that one, above the dearest that.
        """
        if len(self._means) == 1:
            return self._accuracy.expand(-1, len(spent))
        high = torch.searchsorted(self._means, spent).clamp(1, len(self._means) - 1)
        low = high - 1
        share = ((spent - self._means[low]) / (self._means[high] - self._means[low])).nan_to_num(0.0).clamp(0, 1)
        return torch.lerp(self._accuracy[:, low], self._accuracy[:, high], share)

    def best_single(self, spent: Tensor) -> Tensor:
        """Accuracy of the single configuration that was the most accurate on `fitted` among those whose mean latency on
        the test samples is at most `spent`, or up to 1 % more, so that no hair decides: float64 [B] ms → [n, B]."""
        accuracy, cost = self.averages[0], averages(self.table, self.test)[1]
        chosen = best_single_at(accuracy, cost, 1.01 * spent, self.table.mask[self.test])
        return self.table.accuracy[self.test].double().gather(1, chosen)

    def oracle(self, budgets_ms: Tensor) -> Outcome:
        """The most that could have been got at these mean latencies."""
        accuracy, latency = self.table.accuracy[self.test].double(), self.table.latency_ms[self.test].double()
        chosen = oracle_at_mean(accuracy, latency, self.table.mask[self.test], budgets_ms)
        return _of_chosen(self.table, self.test, chosen)


def mean_results_of(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[PricedChooser],
    seeds: Sequence[int],
    baselines: Sequence[PricedChooser],
    outcomes: Mapping[str, Outcome] | None = None,
) -> dict[str, Any]:
    """Judge policies for mean budgets on the same samples.

    Args:
        table: the profile.
        fitted: int64, the rows that static ways are chosen on.
        test: int64 [n], samples that nothing was fitted, chosen or calibrated on.
        budgets_ms: float [B].
        controllers: one for each seed; numbers are means over them, intervals are over samples and seeds.
        seeds: of the controllers.
        baselines: what else looks at the request.
        outcomes: what `outcomes_of` gives for the same arguments, where that is at hand.

    Returns:
        The content of `results.json`. Besides the usual keys a row has `price` (λ) and `worth_ms` (1/λ, None at price
        0), the differences in accuracy `over_static_mix` and `over_best_single` at equal mean latency and
        `over_static_mix_at_budget`, each with its `_ci95`, and `oracle_accuracy` at equal mean latency. `utility` is
        the accuracy; `gap_closed` is at equal mean latency. Of several data sets also `by_dataset`.
    """
    reference = Reference(table, fitted, test)
    outcomes = outcomes or outcomes_of(table, fitted, test, budgets_ms, controllers, baselines)
    at_budget, mix = outcomes["static_mix"].accuracy[0], StaticMix(table, fitted, budgets_ms)
    deciders = {"controller": controllers[0], **{baseline.name: baseline for baseline in baselines}}
    rows = []
    for name, outcome in outcomes.items():
        decision = decision_us(deciders[name], table, test, budgets_ms) if name in deciders else None
        for row in _rows(outcome, reference, at_budget, budgets_ms):
            rows.append({"policy": name, **row, "decision_us_p50": decision})
    return {
        "profile": profile_of(table),
        "sense": "mean",
        "split": "test",
        "test_samples": len(test),
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": budgets_ms.tolist(),
        "rows": rows,
        "configurations": configurations_of(table, test),
        "knob_usage": [
            use
            for name in SHOWN_IN_USAGE
            for use in _usage(table, name, outcomes[name], mix, table.mask[test], budgets_ms)
        ],
        "static_hull": reference.hull(),
        **_by_dataset(table, fitted, test, outcomes, budgets_ms),
    }


def outcomes_of(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[PricedChooser],
    baselines: Sequence[PricedChooser],
) -> dict[str, Outcome]:
    """What came of every policy, the static mix, the best single configuration and the oracle among them; the arguments
    are those of `mean_results_of`."""
    accuracy, latency = StaticMix(table, fitted, budgets_ms).expected(table, test)
    single = best_single_at(*averages(table, fitted), budgets_ms, table.mask[test])
    everywhere = torch.ones(len(budgets_ms), dtype=torch.bool)
    return {
        "controller": _outcome(controllers, table, test),
        "static_mix": Outcome(accuracy.unsqueeze(0), latency.unsqueeze(0), mixed=everywhere),
        "best_single": _of_chosen(table, test, single),
        **{baseline.name: _outcome([baseline], table, test) for baseline in baselines},
        "oracle": Reference(table, fitted, test).oracle(budgets_ms),
    }


def mean_decisions_of(
    table: ProfileTable, test: Tensor, budgets_ms: Tensor, outcomes: Mapping[str, Outcome], seeds: Sequence[int]
) -> pl.DataFrame:
    """The content of `decisions.parquet` (`knobwise.experiments.results.decisions_file.CONTROLLER`): `utility` is
    the accuracy,
    and nothing is early or late."""
    frames = []
    for name, outcome in outcomes.items():
        for number, seed in enumerate(seeds if name == "controller" else [None]):
            accuracy, latency = outcome.accuracy[number], outcome.latency_ms[number]
            chosen = torch.full(accuracy.shape, -1) if outcome.chosen is None else outcome.chosen[number]
            columns = {"configuration": chosen, "accuracy": accuracy, "latency_ms": latency, "utility": accuracy}
            whole = decision_cells(table, test, budgets_ms, columns | {"in_time": None, "feasible": None})
            frames.append(whole.with_columns(policy=pl.lit(name), seed=seed))
    return pl.concat(frames, how="vertical_relaxed")


def _by_dataset(
    table: ProfileTable, fitted: Tensor, test: Tensor, outcomes: Mapping[str, Outcome], budgets_ms: Tensor
) -> dict[str, Any]:
    """`by_dataset`: for each data set the means over budgets of the policies of `SHOWN_BY_DATASET` and of the one that
    is best there of all others; nothing for one data set.

    A budget is kept by the mean over all data sets: what a policy spends on one of them is its own choice, and it is
    compared with what the static mix of all data sets gets there at equal mean latency.
    """
    parts = rows_by_dataset(table, test)
    rows = []
    for dataset, places in parts.items() if len(parts) > 1 else ():
        reference = Reference(table, fitted, test[places])
        own = {
            name: outcome._replace(accuracy=outcome.accuracy[:, places], latency_ms=outcome.latency_ms[:, places])
            for name, outcome in outcomes.items()
        }
        at_budget = own["static_mix"].accuracy[0]
        means = {name: _rows(outcome, reference, at_budget, budgets_ms)[0] for name, outcome in own.items()}
        others = sorted(means.keys() - SHOWN_BY_DATASET, key=lambda name: (-means[name]["over_static_mix"], name))
        for name in (*SHOWN_BY_DATASET[:-1], *others[:1], "oracle"):
            rows.append({"dataset": dataset, "samples": len(places), "policy": name, **means[name]})
    return {"by_dataset": rows} if rows else {}


def _outcome(choosers: Sequence[PricedChooser], table: ProfileTable, test: Tensor) -> Outcome:
    chosen = [chooser.decided(table, test) for chooser in choosers]
    accuracy, latency = zip(
        *(chooser.expected(table, test, own) for chooser, own in zip(choosers, chosen, strict=True)), strict=True
    )
    mixed = torch.stack([~chooser.deployed for chooser in choosers]).any(0)
    prices = torch.stack([chooser.prices for chooser in choosers])
    singly = [
        own if chooser.mix is None else own.where(chooser.deployed, -1)
        for chooser, own in zip(choosers, chosen, strict=True)
    ]
    return Outcome(torch.stack(accuracy), torch.stack(latency), prices, mixed, torch.stack(singly))


def _usage(
    table: ProfileTable, policy: str, outcome: Outcome, mix: StaticMix, mask: Tensor, budgets_ms: Tensor
) -> list[dict[str, Any]]:
    """How often a policy set each knob to each value, under each budget; of a mixture how often it is expected to.

    Args:
        table: the profile.
        policy: its name.
        outcome: what came of it.
        mix: what decides where `outcome.chosen` is −1.
        mask: bool [n, C], of the samples.
        budgets_ms: float [B].
    """
    first, second = mix.both(mask)
    shares = []  # [C] for each budget
    for b in range(outcome.accuracy.shape[-1]):
        share = torch.zeros(table.num_configurations, dtype=torch.float64)
        for chosen in torch.full((1, len(mask)), -1) if outcome.chosen is None else outcome.chosen[..., b]:
            mixed = chosen < 0
            share += torch.bincount(chosen[~mixed], minlength=len(share))
            for side, weight in ((first, 1 - mix.share[b]), (second, mix.share[b])):
                share += weight * torch.bincount(side[mixed, b], minlength=len(share))
        shares.append(share / share.sum())
    return [
        {
            "policy": policy,
            "budget_ms": float(budgets_ms[b]),
            "knob": knob.name,
            "value": value,
            "share": float(share[table.configurations[:, k] == v].sum()),
        }
        for k, knob in enumerate(table.knobs)
        for b, share in enumerate(shares)
        for v, value in enumerate(knob.values)
    ]


def _of_chosen(table: ProfileTable, rows: Tensor, chosen: Tensor) -> Outcome:
    """Of configurations int64 [n, B] for the samples `rows`, int64 [n], without any seed."""
    accuracy, latency = (values[rows].double().gather(1, chosen) for values in (table.accuracy, table.latency_ms))
    return Outcome(accuracy.unsqueeze(0), latency.unsqueeze(0), chosen=chosen.unsqueeze(0))


def _rows(outcome: Outcome, reference: Reference, at_budget: Tensor, budgets_ms: Tensor) -> list[dict[str, Any]]:
    """One row for the mean over the budgets, then one for each."""
    accuracy, latency = outcome.accuracy, outcome.latency_ms
    spent = latency.mean((0, 1))
    mix, single, best = reference.static_mix(spent), reference.best_single(spent), reference.oracle(spent * (1 + 1e-9))
    compared = {"over_static_mix": mix, "over_static_mix_at_budget": at_budget, "over_best_single": single}
    rows: list[dict[str, Any]] = []
    for budget in range(len(budgets_ms)):
        price = None if outcome.prices is None else float(outcome.prices[:, budget].mean())
        drawn = outcome.mixed is not None and bool(outcome.mixed[budget])
        rows.append(
            {
                "budget_ms": float(budgets_ms[budget]),
                "price": price,
                "worth_ms": 1 / price if price else None,
                "latency_ms_mean": float(spent[budget]),
                "latency_ms_p95": None if drawn else float(latency[..., budget].quantile(0.95, 1).mean()),
            }
        )
    rows.insert(0, mean_row(rows) | {"budget_ms": None, "price": None, "worth_ms": None})
    for row, columns in zip(rows, [slice(None), *(slice(b, b + 1) for b in range(len(budgets_ms)))], strict=True):
        own, low, high = (t[..., columns].mean(-1) for t in (accuracy, mix, best.accuracy[0]))
        between = float(high.mean() - low.mean())
        row["accuracy"] = row["utility"] = float(own.mean())
        row["gap_closed"] = float(own.mean() - low.mean()) / between if between > 1e-9 else 0.0
        row |= bootstrap(own, low, high)
        row["accuracy_ci95"], row["oracle_accuracy"] = row["utility_ci95"], float(high.mean())
        for key, other in compared.items():
            rival = other[:, columns].mean(-1)
            row[key], row[f"{key}_ci95"] = float((own - rival).mean()), difference_ci95(own, rival)
        if len(own) > 1:
            row["utility_per_seed"] = own.mean(1).tolist()
    return rows

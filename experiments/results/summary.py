"""results.json: the summary of a run's decisions and a few facts about what was judged.

The rows of a controller hold means over its seeds, and intervals over samples and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.judging.evaluation import Judged
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.decisions import DecisionArrays
from knobwise.experiments.results.equal_latency import Reference
from knobwise.experiments.results.problem import (
    CONTROLS,
    DEADLINE,
    LEARNED,
    MEAN_BUDGET,
    PAIRS,
    TRAINED,
    UPPER,
    Problem,
)
from knobwise.experiments.results.statistics import mean_intervals, score_intervals

Rows = list[dict[str, Any]]
Outcome = tuple[str, dict[str, np.ndarray], list[np.ndarray]]
"""A policy; its numbers at each budget, float [B] by key, NaN where unknown; and by sample, float [S, n, B] or [n, B],
its score, the low and the high end of the oracle gap, and the scores that its own is compared with as `COMPARED`."""
COMPARED = ("over_static_mix", "over_static_mix_at_budget", "over_best_single")
"""The differences in a row under mean budgets."""


# -- controllers -------------------------------------------------------------------------------------------------------


def deadline_results(
    decisions: pl.DataFrame, table: ProfileTable, test: Tensor, seeds: Sequence[int]
) -> dict[str, Any]:
    """The content of `results.json` of a controller under deadlines, with `by_dataset` for several data sets.

    Args:
        decisions: see `knobwise.experiments.results.judge`; with `budget_aware_static` and `oracle`.
        test: int64 [n], the judged samples, which nothing was fitted or chosen on.
    """
    return _controller_results(DEADLINE, decisions, table, test, seeds, lambda arrays, _: _under_deadlines(arrays))


def mean_results(
    decisions: pl.DataFrame, reference: Reference, seeds: Sequence[int], prices: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The content of `results.json` of a controller under mean budgets.

    Besides the usual keys a row has `price` (λ) and `worth_ms` (1/λ, None at price 0), the differences in accuracy
    `over_static_mix` and `over_best_single` at equal mean latency and `over_static_mix_at_budget`, each with its
    `_ci95`, and `oracle_accuracy` at equal mean latency. `utility` is the accuracy; `gap_closed` is at equal mean
    latency. A budget limits the mean over all data sets: what a policy spends on one of them is its own choice, and
    `by_dataset` compares it with what the static mix of all data sets gets there at equal mean latency.

    Args:
        decisions: see `knobwise.experiments.results.judge`; with `static_mix` and `oracle`.
        reference: of the judged samples.
        prices: float64 [S, B] by policy, for those that have prices.
    """
    table, fitted, test = reference.table, reference.fitted, reference.test

    def outcomes(arrays: DecisionArrays, rows: Tensor) -> Iterator[Outcome]:
        return _under_mean_budgets(arrays, Reference(table, fitted, rows), prices)

    results = _controller_results(MEAN_BUDGET, decisions, table, test, seeds, outcomes, reference)
    for row in (*results["rows"], *results.get("by_dataset", [])):
        row["accuracy_ci95"] = row["utility_ci95"]
        if row["budget_ms"] is None:
            row |= {"price": None, "worth_ms": None}
    return results | {"sense": "mean", "static_hull": reference.hull()}


def profile_of(table: ProfileTable | BeamTable) -> dict[str, Any]:
    """Name, digest and sizes of a profile or of beams."""
    if isinstance(table, BeamTable):
        sizes = {"samples": table.num_queries, "candidates": len(table.candidates)}
    else:
        sizes = {"samples": table.num_samples, "configurations": table.num_configurations}
    return {"name": table.name, "digest": table.digest, **sizes}


def held_out_choices(loaded: Sequence[Loaded]) -> dict[str, Any]:
    """Choices made on held-out samples in training; every list has one entry for each seed.

    `guard`: rows of `Guard.rows`, or under mean budgets of `knobwise.agents.stack.priced_policy.compared`, [] without
    a guard. `chosen`: the weights of the stack, the settings of its experts, the iteration of the network.
    `satisfaction_level`: the level that the guard keeps, if any.
    """
    chosen, guards = [], []
    for checkpoint in loaded:
        controller: Any = checkpoint.controller
        choice: dict[str, Any] = {"weights": {"network": 1.0}, "settings": {}}
        if isinstance(controller, PricedChooser):
            guards += [controller.guard] if controller.guard else []
            controller = controller.chooser
        if isinstance(controller, StackedController):
            choice = controller.chosen()
            if controller.guard is not None:
                guards.append(controller.guard.rows())
        chosen.append(choice | {"iteration": checkpoint.extra["iteration"]})
    level = {"satisfaction_level": guards[0][0]["level"]} if guards and "level" in guards[0][0] else {}
    return {"guard": guards, "chosen": chosen, **level}


def _controller_results(
    problem: Problem,
    decisions: pl.DataFrame,
    table: ProfileTable,
    test: Tensor,
    seeds: Sequence[int],
    outcomes: Callable[[DecisionArrays, Tensor], Iterator[Outcome]],
    reference: Reference | None = None,
) -> dict[str, Any]:
    """What both kinds of controllers have; `outcomes` takes decisions and the rows of the table that they are about."""
    arrays = DecisionArrays(decisions)
    rows = _rows(outcomes(arrays, test), arrays.places)
    for row in rows:
        times = arrays.array(row["policy"], "decision_us")[0, 0]
        row["decision_us_p50"] = None if np.isnan(times[0]) else float(times.mean())
    accuracy, latency = (values[test].nanmean(0).tolist() for values in (table.accuracy, table.latency_ms))
    profiled = table.mask[test].any(0).tolist()
    results = {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": arrays.places,
        "rows": rows,
        "configurations": [
            {"label": label, "knobs": table.configuration(c), "accuracy": accuracy[c], "latency_ms": latency[c]}
            for c, label in enumerate(_labels(table))
            if profiled[c]
        ],
        "knob_usage": _usage(problem, arrays, table, reference),
    }
    names = arrays.samples["dataset"]
    if names.n_unique() > 1:
        results["by_dataset"] = []
        for dataset in sorted(names.unique()):
            samples = test[torch.from_numpy((names == dataset).to_numpy())]
            part = DecisionArrays(decisions.filter(pl.col("dataset") == dataset))
            means = _most_important(problem, _rows(outcomes(part, samples)))
            results["by_dataset"] += [{"dataset": dataset, "samples": len(samples), **row} for row in means]
    return results


def _most_important(problem: Problem, means: Rows) -> Rows:
    """The rows of the policies of `problem.by_dataset`, and before the last that of the best of all others."""
    rows = {row["policy"]: row for row in means}
    others = rows.keys() - set(problem.by_dataset)
    best = sorted(others, key=lambda policy: (-rows[policy][problem.ranked_by], policy))[:1]
    names = (*problem.by_dataset[:-1], *best, problem.by_dataset[-1])
    return [rows[policy] for policy in names if policy in rows]


def _rows(outcomes: Iterable[Outcome], budgets: Sequence[float] = ()) -> Rows:
    """For each policy the mean over all budgets, then a row for each of `budgets`, with the intervals of its score, of
    the oracle gap that it closes and of `COMPARED`."""
    parts = {None: slice(None)} | {budget: slice(b, b + 1) for b, budget in enumerate(budgets)}
    rows, cases = [], []
    for policy, numbers, scores in outcomes:
        for budget, part in parts.items():
            score, low, high, *rivals = (values[..., part].mean(-1) for values in scores)
            gains = [score - rival for rival in rivals]
            between = float(high.mean() - low.mean())
            row = {"policy": policy, "budget_ms": budget}
            row |= {key: _known_mean(values[part]) for key, values in numbers.items()}
            row |= {key: float(gain.mean()) for key, gain in zip(COMPARED, gains, strict=False)}
            row["utility"] = float(score.mean())
            row["gap_closed"] = float(score.mean() - low.mean()) / between if between > 1e-9 else 0.0
            if len(score) > 1:
                row["utility_per_seed"] = score.mean(1).tolist()
            rows.append(row)
            cases.append([score, low, high, *gains])
    for row, intervals in zip(rows, score_intervals(cases), strict=True):
        row |= {"utility_ci95": intervals["score_ci95"], "gap_closed_ci95": intervals["gap_closed_ci95"]}
        row |= {f"{key}_ci95": interval for key, interval in zip(COMPARED, intervals["differences_ci95"], strict=False)}
    return rows


def _known_mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _under_deadlines(arrays: DecisionArrays) -> Iterator[Outcome]:
    low, high = (arrays.array(policy, "score")[0] for policy in (DEADLINE.low, DEADLINE.high))
    for policy in arrays.policies:
        names = ("accuracy", "latency_ms", "in_time", "feasible", "score", "reward")
        columns = {name: arrays.array(policy, name) for name in names}
        yield policy, _deadline_numbers(columns), [columns["score"], low, high]


def _deadline_numbers(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers of a policy at each budget, float [B], from arrays [S, n, B] by column.

    `infeasible` is the share of samples that no profiled configuration serves in time; `satisfaction_feasible`, over
    the others, is NaN if there are none.
    """
    feasible, in_time = columns["feasible"] > 0, columns["in_time"] > 0
    served, servable = (values.sum((0, 1)) for values in (in_time & feasible, feasible))
    return {
        "accuracy": columns["accuracy"].mean((0, 1)),
        "latency_ms_mean": columns["latency_ms"].mean((0, 1)),
        "latency_ms_p95": np.quantile(columns["latency_ms"], 0.95, axis=1).mean(0),
        "satisfaction": in_time.mean((0, 1)),
        "satisfaction_feasible": served / np.where(servable, servable, np.nan),
        "infeasible": 1 - feasible.mean((0, 1)),
        "reward": columns["reward"].mean((0, 1)),
    }


def judged_means(judged: Judged) -> dict[str, Any]:
    """The same numbers and the utility as means over the budgets, for one policy."""
    assert judged.feasible is not None
    columns = {"accuracy": judged.accuracy, "latency_ms": judged.latency_ms, "in_time": judged.met}
    columns |= {"feasible": judged.feasible, "reward": judged.reward}
    numbers = _deadline_numbers({name: values[None].double().numpy() for name, values in columns.items()})
    means = {key: _known_mean(values) for key, values in numbers.items()}
    return means | {"utility": float(judged.utility.double().mean())}


def _under_mean_budgets(
    arrays: DecisionArrays, reference: Reference, prices: Mapping[str, Tensor]
) -> Iterator[Outcome]:
    """The low and the high end of the oracle gap are those at equal mean latency."""
    at_budget = arrays.array(MEAN_BUDGET.low, "accuracy")[0]
    for policy in arrays.policies:
        accuracy, latency = (arrays.array(policy, name) for name in ("accuracy", "latency_ms"))
        mixed = np.isnan(arrays.choices(policy, _labels(reference.table))).any((0, 1))
        spent = torch.from_numpy(latency.mean((0, 1)))
        mix, single = reference.static_mix(spent).numpy(), reference.best_single(spent).numpy()
        best = reference.oracle(spent * (1 + 1e-9)).accuracy.numpy()
        price = prices[policy].mean(0).numpy() if policy in prices else np.full(len(spent), np.nan)
        numbers = {
            "accuracy": accuracy.mean((0, 1)),
            "latency_ms_mean": spent.numpy(),
            "latency_ms_p95": np.where(mixed, np.nan, np.quantile(latency, 0.95, axis=1).mean(0)),
            "price": price,
            "worth_ms": 1 / np.where(price > 0, price, np.nan),
            "oracle_accuracy": best.mean(0),
        }
        yield policy, numbers, [accuracy, mix, best, mix, at_budget, single]


def _labels(table: ProfileTable) -> list[str]:
    return [table.label(c) for c in range(table.num_configurations)]


def _usage(problem: Problem, arrays: DecisionArrays, table: ProfileTable, reference: Reference | None) -> Rows:
    """How often each policy of `problem.usage` set each knob to each value, under each budget; for a mixture how often
    it is expected to."""
    rows = []
    for policy in problem.usage:
        choices = arrays.choices(policy, _labels(table))
        used = np.stack([(choices == c).sum((0, 1), dtype=float) for c in range(table.num_configurations)])  # [C, B]
        if reference is not None:
            budgets = torch.tensor(arrays.places, dtype=torch.float64)
            used += reference.mixture_use(budgets, np.isnan(choices)).numpy()
        shares = used / used.sum(0)
        for k, knob in enumerate(table.knobs):
            values = table.configurations[:, k].numpy()
            for b, budget in enumerate(arrays.places):
                for v, value in enumerate(knob.values):
                    row = {"policy": policy, "budget_ms": budget, "knob": knob.name, "value": value}
                    rows.append(row | {"share": float(shares[values == v, b].sum())})
    return rows


# -- selectors ---------------------------------------------------------------------------------------------------------


def selector_results(
    decisions: pl.DataFrame,
    table: BeamTable,
    *,
    seeds: Sequence[int],
    trained_shots: int,
    test: BeamTable | None = None,
    judged_by: str = "scorer",
    hidden: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `results.json` of a selector: means over queries and seeds, and intervals over both.

    A query of which something is unknown for some policy is left out for all, at that number of shots: every
    comparison is on the same queries. A policy of which nothing is known at a number of shots has no row there.

    Args:
        decisions: see `knobwise.experiments.results.judge`; trained policies are compared seed by seed.
        table: the data that the selectors were trained on.
        trained_shots: how many demonstrations they were trained to choose.
        test: the held-out queries with their own bank, where they are not part of `table`.
        judged_by: see `knobwise.experiments.settings.beams.SelectorData`.
        hidden: the blocks of the embeddings that the controls `hidden_…` did not see.
    """
    arrays = DecisionArrays(decisions)
    rows, differences = _demonstration_rows(arrays, "accuracy")
    votes, _ = _demonstration_rows(arrays, "vote")
    return {
        "system": "selector",
        "profile": profile_of(table),
        "split": "test",
        "test_queries": len(arrays.samples),
        **({} if test is None else {"test_digest": test.digest, "test_candidates": len(test.candidates)}),
        "seeds": list(seeds),
        "shots": sorted({row["shots"] for row in rows}),
        "trained_shots": trained_shots,
        "judged_by": judged_by,
        "hidden": list(hidden),
        "rows": [row for row in rows if row["policy"] not in CONTROLS],
        "differences": differences,
        "controls": [row for row in rows if row["policy"] in CONTROLS],
        **({"votes": votes} if votes else {}),
    }


def _demonstration_rows(arrays: DecisionArrays, column: str) -> tuple[Rows, Rows]:
    """Rows policy by policy, and differences, at every number of shots; `column` holds who was right."""
    rows: Rows = []
    differences: Rows = []
    for place in np.argsort(arrays.places):
        shots = int(arrays.places[place])
        some = {policy: arrays.array(policy, column)[..., place] for policy in arrays.policies}
        some = {policy: right for policy, right in some.items() if not np.isnan(right).all()}
        if not some:
            continue
        common = ~np.isnan(np.concatenate(list(some.values()))).any(0)
        if not common.any():
            continue
        known = {policy: right[:, common] for policy, right in some.items()}
        for (policy, right), interval in zip(known.items(), mean_intervals(list(known.values())), strict=True):
            row = {"policy": policy, "shots": shots, "accuracy": float(right.mean()), "accuracy_ci95": interval}
            times = arrays.array(policy, "decision_us")[..., place]
            timed = column == "accuracy" and not np.isnan(times).all()
            row |= {"queries": right.shape[1], "decision_us_p50": float(np.nanmean(times)) if timed else None}
            if len(right) > 1:
                row["accuracy_per_seed"] = right.mean(1).tolist()
            rows.append(row)
        differences += _differences(known, shots)
    return sorted(rows, key=lambda row: arrays.policies.index(row["policy"])), differences


def _differences(known: Mapping[str, np.ndarray], shots: int) -> Rows:
    """policy − against, query by query and seed by seed."""
    form = next((policy for policy in LEARNED if policy in known), None)
    variants = [policy for policy in known if policy not in (*TRAINED, *SIMPLE, *UPPER)]
    wanted = [
        *PAIRS,
        *((form, way) for way in SIMPLE if form is not None),
        *((policy, other) for policy in variants for other in ("rce", "sft")),
        *((policy, variants[0]) for policy in variants[1:]),
    ]
    pairs = [pair for pair in dict.fromkeys(wanted) if set(pair) <= set(known)]
    gains = [_paired(known, *pair) for pair in pairs]
    return [
        {"policy": policy, "against": against, "shots": shots, "difference": float(gain.mean()), "ci95": interval}
        for (policy, against), gain, interval in zip(pairs, gains, mean_intervals(gains), strict=True)
    ]


def _paired(known: Mapping[str, np.ndarray], policy: str, against: str) -> np.ndarray:
    """[S, q] of the seeds that both have; what no seed changes goes with every seed."""
    both = [(name, known[name]) for name in (policy, against)]
    seeds = min((len(right) for name, right in both if len(right) > 1 or name in TRAINED), default=1)
    first, second = (np.broadcast_to(right[:seeds], (seeds, right.shape[1])) for _, right in both)
    return first - second

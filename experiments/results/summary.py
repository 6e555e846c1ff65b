"""results.json: the summary of a run's decisions and a few facts about what was judged.

The rows of a controller hold means over its seeds, and intervals over samples and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from knobwise.experiments.results.statistics import mean_intervals, mean_row, score_intervals

Rows = list[dict[str, Any]]
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
    arrays = DecisionArrays(decisions)
    facts = _facts(DEADLINE, arrays, table, test, seeds, partial(_deadline_rows, arrays))
    return facts | {"knob_usage": _usage(DEADLINE, arrays, table)}


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
    arrays, table = DecisionArrays(decisions), reference.table
    facts = _facts(MEAN_BUDGET, arrays, table, reference.test, seeds, partial(_mean_rows, arrays, reference, prices))
    usage = _usage(MEAN_BUDGET, arrays, table, reference)
    return facts | {"sense": "mean", "knob_usage": usage, "static_hull": reference.hull()}


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


def _facts(
    problem: Problem,
    arrays: DecisionArrays,
    table: ProfileTable,
    test: Tensor,
    seeds: Sequence[int],
    rows_of: Callable[[np.ndarray, bool], Rows],
) -> dict[str, Any]:
    """What both kinds of controllers have; `rows_of` gives the rows for some samples, at every place or the means."""
    rows = rows_of(np.arange(len(test)), True)
    for row in rows:
        times = arrays.array(row["policy"], "decision_us")[0, 0]
        row["decision_us_p50"] = None if np.isnan(times[0]) else float(times.mean())
    facts = {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": arrays.places,
        "rows": rows,
        "configurations": _configurations(table, test),
    }
    by_dataset = _by_dataset(problem, arrays, rows_of)
    return facts | ({"by_dataset": by_dataset} if by_dataset else {})


def _by_dataset(problem: Problem, arrays: DecisionArrays, rows_of: Callable[[np.ndarray, bool], Rows]) -> Rows:
    """For each data set the means of the policies of `problem.by_dataset` and of the best of all others; [] for one."""
    names = arrays.samples["dataset"]
    rows: Rows = []
    for dataset in sorted(names.unique()) if names.n_unique() > 1 else ():
        samples = (names == dataset).to_numpy().nonzero()[0]
        means = {row["policy"]: row for row in rows_of(samples, False)}
        others = sorted(
            means.keys() - set(problem.by_dataset), key=lambda policy: (-means[policy][problem.ranked_by], policy)
        )
        for policy in (*problem.by_dataset[:-1], *others[:1], problem.by_dataset[-1]):
            if policy in means:
                rows.append({"dataset": dataset, "samples": len(samples), **means[policy]})
    return rows


def _deadline_rows(arrays: DecisionArrays, samples: np.ndarray, every: bool) -> Rows:
    """For each policy the mean over the budgets, then with `every` one row for each budget."""
    low, high = (arrays.array(policy, "score")[0, samples] for policy in (DEADLINE.low, DEADLINE.high))
    rows, cases = [], []
    for policy in arrays.policies:
        names = ("accuracy", "latency_ms", "in_time", "feasible", "score", "reward")
        columns = {name: arrays.array(policy, name)[:, samples] for name in names}
        numbers = [deadline_numbers(columns, place) for place in range(len(arrays.places))]
        for places, row in _with_mean(arrays, numbers, every):
            rows.append({"policy": policy, **row})
            cases.append([columns["score"][..., places].mean(-1), *(end[:, places].mean(-1) for end in (low, high))])
    return _with_intervals(rows, cases)


def deadline_numbers(columns: Mapping[str, np.ndarray], place: int) -> dict[str, Any]:
    """The numbers of a row at one budget, without intervals, from arrays [S, n, B] by column.

    `infeasible` is the share of samples that no profiled configuration serves in time; `satisfaction_feasible`, over
    the others, is None if there are none.
    """
    values = {name: array[..., place] for name, array in columns.items()}
    feasible = values["feasible"][0] > 0
    return {
        "accuracy": float(values["accuracy"].mean()),
        "latency_ms_mean": float(values["latency_ms"].mean()),
        "latency_ms_p95": float(np.quantile(values["latency_ms"], 0.95, axis=1).mean()),
        "satisfaction": float(values["in_time"].mean()),
        "satisfaction_feasible": float(values["in_time"][:, feasible].mean()) if feasible.any() else None,
        "infeasible": float(1 - feasible.mean()),
        "utility": float(values["score"].mean()),
        "reward": float(values["reward"].mean()),
    }


def judged_means(judged: Judged) -> dict[str, Any]:
    """The same numbers as means over the budgets, for one policy."""
    assert judged.feasible is not None
    columns = {"accuracy": judged.accuracy, "latency_ms": judged.latency_ms, "in_time": judged.met}
    columns |= {"feasible": judged.feasible, "score": judged.utility, "reward": judged.reward}
    arrays = {name: values[None].double().numpy() for name, values in columns.items()}
    return mean_row([deadline_numbers(arrays, place) for place in range(len(judged.budgets_ms))])


def _mean_rows(
    arrays: DecisionArrays, reference: Reference, prices: Mapping[str, Tensor], samples: np.ndarray, every: bool
) -> Rows:
    """The same under mean budgets; the oracle gap is that at equal mean latency."""
    reference = Reference(reference.table, reference.fitted, reference.test[samples])
    at_budget = arrays.array(MEAN_BUDGET.low, "accuracy")[0, samples]
    rows, cases = [], []
    for policy in arrays.policies:
        accuracy, latency = (arrays.array(policy, name)[:, samples] for name in ("accuracy", "latency_ms"))
        spent = torch.from_numpy(latency.mean((0, 1)))
        single, mix = reference.best_single(spent).numpy(), reference.static_mix(spent).numpy()
        best = reference.oracle(spent * (1 + 1e-9)).accuracy.numpy()
        numbers = []
        for place, mixed in enumerate(arrays.mixed(policy)):
            price = float(prices[policy][:, place].mean()) if policy in prices else None
            tail = None if mixed else float(np.quantile(latency[..., place], 0.95, axis=1).mean())
            numbers.append({"latency_ms_mean": float(spent[place]), "latency_ms_p95": tail})
            numbers[-1] |= {"price": price, "worth_ms": 1 / price if price else None}
        for places, row in _with_mean(arrays, numbers, every):
            score, low, high = (values[..., places].mean(-1) for values in (accuracy, mix, best))
            rivals = (low, at_budget[:, places].mean(-1), single[:, places].mean(-1))
            if row["budget_ms"] is None:
                row |= {"price": None, "worth_ms": None}
            row |= {"utility": float(score.mean()), "accuracy": float(score.mean())}
            row["oracle_accuracy"] = float(high.mean())
            row |= {key: float((score - rival).mean()) for key, rival in zip(COMPARED, rivals, strict=True)}
            rows.append({"policy": policy, **row})
            cases.append([score, low, high, *(score - rival for rival in rivals)])
    return [row | {"accuracy_ci95": row["utility_ci95"]} for row in _with_intervals(rows, cases)]


def _with_mean(
    arrays: DecisionArrays, numbers: Sequence[Mapping[str, Any]], every: bool
) -> list[tuple[slice, dict[str, Any]]]:
    """The mean over the places, then with `every` each of them: which places, and their numbers."""
    rows = [(slice(None), {"budget_ms": None, **mean_row(numbers)})]
    if every:
        for place, (budget, row) in enumerate(zip(arrays.places, numbers, strict=True)):
            rows.append((slice(place, place + 1), {"budget_ms": budget, **row}))
    return rows


def _with_intervals(rows: Rows, cases: Sequence[Sequence[np.ndarray]]) -> Rows:
    """The rows with `gap_closed`, intervals of the score, of the gap and of `COMPARED`, and scores by seed."""
    for row, (score, low, high, *_), intervals in zip(rows, cases, score_intervals(cases), strict=True):
        between = float(high.mean() - low.mean())
        row["gap_closed"] = float(score.mean() - low.mean()) / between if between > 1e-9 else 0.0
        row |= {"utility_ci95": intervals["score_ci95"], "gap_closed_ci95": intervals["gap_closed_ci95"]}
        row |= {f"{key}_ci95": interval for key, interval in zip(COMPARED, intervals["differences_ci95"], strict=False)}
        if len(score) > 1:
            row["utility_per_seed"] = score.mean(1).tolist()
    return rows


def _labels(table: ProfileTable) -> list[str]:
    return [table.label(c) for c in range(table.num_configurations)]


def _configurations(table: ProfileTable, rows: Tensor) -> Rows:
    """Mean accuracy and latency of each configuration over the samples that it was profiled for."""
    accuracy, latency = table.accuracy[rows].nanmean(0).tolist(), table.latency_ms[rows].nanmean(0).tolist()
    seen = table.mask[rows].any(0).tolist()
    return [
        {"label": label, "knobs": table.configuration(c), "accuracy": accuracy[c], "latency_ms": latency[c]}
        for c, label in enumerate(_labels(table))
        if seen[c]
    ]


def _usage(problem: Problem, arrays: DecisionArrays, table: ProfileTable, reference: Reference | None = None) -> Rows:
    """How often each policy of `problem.usage` set each knob to each value, under each budget; for a mixture how often
    it is expected to."""
    rows = []
    for policy in problem.usage:
        choices = arrays.choices(policy, _labels(table))
        mixed = np.isnan(choices)
        used = [
            np.bincount(choices[..., b][~mixed[..., b]].astype(int), minlength=table.num_configurations)
            for b in range(len(arrays.places))
        ]
        shares = np.stack(used, 1).astype(float)
        if reference is not None:
            shares += reference.mixture_use(torch.tensor(arrays.places, dtype=torch.float64), mixed).numpy()
        shares /= shares.sum(0)
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

"""Let controllers and baselines decide on the held-out samples: decisions.parquet, and its summary
results.json.

The rows of a controller hold means over its seeds, and intervals over samples and seeds; those of a
run on several splits hold means over the splits too, and intervals over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.judging.evaluation import Judged, judge_all
from knobwise.agents.judging.policy import Baseline
from knobwise.agents.serving.own_cost import own_costs
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import MeanBudgetPolicy
from knobwise.envs.configurations.reward import RewardTable, expected_utility
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.decisions import DecisionArrays, decision_rows
from knobwise.experiments.results.equal_latency import Reference
from knobwise.experiments.results.gains import gain
from knobwise.experiments.results.problem import DEADLINE, MEAN_BUDGET, Problem
from knobwise.experiments.results.reliability import expected_in_time, reliability
from knobwise.experiments.results.statistics import score_intervals

COMPARED = {
    DEADLINE.name: ("over_static",),
    MEAN_BUDGET.name: ("over_static_mix", "over_static_mix_at_budget", "over_best_single"),
}
"""Kind of problem → the keys of the differences in a row."""
Results = dict[str, Any]
Rows = list[dict[str, Any]]
Outcome = tuple[str, dict[str, np.ndarray], list[np.ndarray]]
"""What is known about a policy:

- its name;
- its numbers at each budget, float [B] by key, NaN where unknown;
- arrays by sample, float [S, n, B] or [n, B]: its score, the low and the high end of the oracle
  gap, then the scores that it is compared with, in the order of `COMPARED`.
"""
Outcomes = Callable[[DecisionArrays, Tensor], Iterator[Outcome]]
"""A function of decisions and of the rows of the table that they are about."""


def judge_deadlines(
    table: ProfileTable,
    test: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    baselines: Sequence[Baseline],
    charge: bool = True,
    before: Sequence[DeployedController | None] = (),
) -> tuple[Results, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet`: controllers, one for each
    of `seeds`, and their teachers and baselines on the same samples under the same deadlines.

    Controllers are charged their own cost: the time of their decisions and of the features that
    they read. `utility_free` is what they would have got for nothing. All others decide for free,
    and have neither that nor a decision time.

    Args:
        test: int64 [n], samples that nothing was fitted or chosen on.
        budgets_ms: float [B].
        rewards: the reward of the column `reward`.
        seeds: of the controllers.
        baselines: `budget_aware_static` and `oracle` must be among them.
        charge: whether controllers pay for their decisions.
        before: the controllers as they were before GRPO, for what it added (`grpo_gain`).
    """
    times, spent = _own_costs(table, test, budgets_ms, controllers, charge)
    policies = _policies_of(controllers, baselines)
    costs = {"controller": spent}
    problem = table, test, budgets_ms, rewards
    judged = judge_all(*problem, policies)
    if any(cost.any() for cost in spent):
        judged |= judge_all(*problem, {"controller": policies["controller"]}, costs)

    # the probabilities of being on time that the teachers predict
    expected = []
    for controller, outcome, cost_ms in zip(controllers, judged["controller"], spent, strict=True):
        left_ms = budgets_ms - cost_ms
        expected.append(expected_in_time(controller, table, test, outcome.chosen, left_ms))
    uncharged = judge_all(
        *problem, {"controller": [controller.if_free for controller in controllers]}
    )
    decisions = decision_frame(
        table, test, judged, seeds, times, uncharged, {"controller": expected}
    )
    results = _results(DEADLINE, decisions, table, test, seeds, _under_deadlines)

    known = [controller for controller in before if controller is not None]
    if known and len(known) == len(controllers):
        untrained = {"controller": [controller.decider for controller in known]}
        started = judge_all(*problem, untrained, costs)["controller"]
        results["grpo_gain"] = _utility_gained(started, judged["controller"])
    return results, decisions


def _policies_of(
    controllers: Sequence[DeployedController], baselines: Sequence[Baseline]
) -> dict[str, list[Any]]:
    """Return all that decide, by policy: controllers, their teachers, baselines."""
    policies: dict[str, list[Any]] = {
        "controller": [controller.decider for controller in controllers]
    }
    teachers = [
        controller.guarded_teacher for controller in controllers if controller.teacher is not None
    ]
    if teachers:
        policies["teacher"] = teachers
    return policies | {baseline.name: [baseline] for baseline in baselines}


def _utility_gained(before: Sequence[Judged], after: Sequence[Judged]) -> dict[str, Any]:
    """Return the gain in utility over seeds and test samples, with its interval."""
    pairs = zip(before, after, strict=True)
    gains = torch.stack([second.utility - first.utility for first, second in pairs])
    return gain("test", gains.mean(2).double().numpy())


def over_splits(
    table: ProfileTable,
    tests: Sequence[Tensor],
    seeds: Sequence[int],
    decisions: Sequence[pl.DataFrame],
) -> tuple[Results, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet` of several splits together,
    from the decisions in each of them under the same deadlines.

    Every row also has `utility_per_split`. `test_samples` counts a sample once for each split that
    judges it.

    Args:
        tests: int64 [n], the test samples of each split.
        seeds: of the controllers.
        decisions: from `judge_deadlines`, of each split.
    """
    numbered = []
    for split, frame in enumerate(decisions):
        numbered.append(frame.with_columns(split=pl.lit(split, pl.Int64)))
    together = pl.concat(numbered)
    test = torch.cat(list(tests))
    return _results(DEADLINE, together, table, test, seeds, _under_deadlines), together


def judge_mean_budgets(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    baselines: Sequence[MeanBudgetPolicy],
    charge: bool = True,
) -> tuple[Results, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet` under mean budgets.

    Besides the keys under deadlines a row has `price` (λ) and `worth_ms` (1/λ, None at price 0),
    the differences in accuracy `over_static_mix` and `over_best_single` at equal mean latency and
    `over_static_mix_at_budget`, each with its `_ci95`, and `oracle_accuracy` at equal mean latency.
    `utility` is the accuracy; `gap_closed` is at equal mean latency.

    A budget limits the mean over all data sets, so a policy may spend more on one of them than on
    another. `by_dataset` compares it with the static mix of all data sets that spends as much on
    this one.

    Args:
        fitted: int64, the rows that static policies are chosen on.
        test: int64 [n], samples that nothing was fitted, chosen or calibrated on.
        budgets_ms: float [B].
        seeds: of the controllers.
        baselines: those that look at the request; the static ones and the oracle are added.
        charge: whether controllers pay for their decisions.
    """
    reference = Reference(table, fitted, test)
    times, spent = _own_costs(table, test, budgets_ms, controllers, charge)
    policies = [controller.under_mean_budgets() for controller in controllers]
    judged = reference.judged(budgets_ms, policies, baselines, spent)
    prices = {baseline.name: baseline.prices.unsqueeze(0) for baseline in baselines}
    prices["controller"] = torch.stack([policy.prices for policy in policies])
    decisions = decision_frame(table, test, judged, seeds, times)

    def outcomes(arrays: DecisionArrays, rows: Tensor) -> Iterator[Outcome]:
        return _under_mean_budgets(arrays, Reference(table, fitted, rows), prices)

    results = _results(MEAN_BUDGET, decisions, table, test, seeds, outcomes, reference)
    for row in (*results["rows"], *results.get("by_dataset", [])):
        row |= {"accuracy": row["utility"], "accuracy_ci95": row["utility_ci95"]}
        if row["budget_ms"] is None:
            row |= {"price": None, "worth_ms": None}
    return results | {"sense": "mean", "static_hull": reference.hull()}, decisions


def _own_costs(
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[DeployedController],
    charge: bool,
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the median time of a decision in µs, by policy, and what a decision is charged in ms;
    [B] for each controller."""
    costs = own_costs([controller.decider for controller in controllers], table, rows, budgets_ms)
    times = {"controller": [cost.decision_us for cost in costs]}
    charged = [cost.charged_ms * charge for cost in costs]
    return times, charged


def held_out_choices(loaded: Sequence[Loaded]) -> Results:
    """Return the choices made on held-out samples in training; every list has an entry for each
    seed.

    Returns:
        `guard`: rows of `knobwise.agents.stack.guard.calibrate`, or under mean budgets of
        `knobwise.agents.stack.prices.compared`, [] without a guard. `chosen`: the weights of the
        teacher, the settings of its experts, the iteration of the controller, and validation
        utility where GRPO starts, at its best and at its end. `satisfaction_level`: the level that
        the guard keeps, if any.
    """
    chosen = []
    guards = []
    for checkpoint in loaded:
        controller = checkpoint.controller
        choice: dict[str, Any] = {"weights": {}, "settings": {}}
        if controller.teacher is not None:
            choice = controller.teacher.chosen()
        if controller.settled.guard:
            guards.append(controller.settled.guard)
        extra = checkpoint.extra
        chosen.append(choice | {"iteration": extra["iteration"], "grpo": extra.get("grpo", {})})
    level = {}
    if guards and "level" in guards[0][0]:
        level = {"satisfaction_level": guards[0][0]["level"]}
    return {"guard": guards, "chosen": chosen, **level}


def profile_of(table: ProfileTable | BeamTable) -> dict[str, Any]:
    """Return name, digest and sizes of a profile or of beams."""
    if isinstance(table, BeamTable):
        sizes = {"samples": table.num_queries, "candidates": len(table.candidates)}
    else:
        sizes = {"samples": table.num_samples, "configurations": table.num_configurations}
    return {"name": table.name, "digest": table.digest, **sizes}


def decision_frame(
    table: ProfileTable,
    test: Tensor,
    judged: Mapping[str, Sequence[Judged]],
    seeds: Sequence[int],
    times: Mapping[str, Sequence[Tensor]],
    free: Mapping[str, Sequence[Judged]] | None = None,
    expected: Mapping[str, Sequence[Tensor | None]] | None = None,
) -> pl.DataFrame:
    """Return the content of `decisions.parquet`.

    Args:
        test: int64 [n], the samples that were judged.
        judged: outcomes by policy, for each seed where there are several.
        seeds: of the trained policies.
        times: by policy the median times of a decision in µs, float [B], where they are known.
        free: by policy the outcomes without its cost, of those that are charged any.
        expected: by policy the predicted probabilities of being on time, float [n, B].
    """
    if table.datasets:
        datasets = [table.datasets[i] for i in test.tolist()]
    else:
        datasets = [None] * len(test)
    ids = [table.sample_ids[i] for i in test.tolist()]
    samples = pl.DataFrame(
        {"sample_id": ids, "dataset": datasets}, schema_overrides={"dataset": pl.String}
    )
    labels = pl.Series([*_labels(table), None], dtype=pl.String)  # the last one stands for −1
    frames = []
    for policy, outcomes in judged.items():
        if policy in DEADLINE.trained:
            of_seeds: Sequence[int | None] = seeds
        else:
            of_seeds = [None]
        for i, (seed, outcome) in enumerate(zip(of_seeds, outcomes, strict=True)):
            columns: dict[str, Any] = {
                "choice": labels[outcome.chosen.flatten().numpy()],
                "accuracy": outcome.accuracy,
                "latency_ms": outcome.latency_ms,
                "in_time": outcome.in_time,
                "feasible": outcome.feasible,
                "reward": outcome.reward,
                "score": outcome.utility,
            }
            if expected and policy in expected:
                columns["expected_in_time"] = expected[policy][i]
            if free and policy in free:
                columns["score_free"] = free[policy][i].utility
            if policy in times:
                columns["decision_us"] = times[policy][i].expand(len(test), -1)
            budgets = outcome.budgets_ms.tolist()
            frames.append(decision_rows(policy, seed, samples, budgets, columns))
    return pl.concat(frames)


def _labels(table: ProfileTable) -> list[str]:
    return [table.label(c) for c in range(table.num_configurations)]


# -- the summary -----------------------------------------------------------------------------------


def _results(
    problem: Problem,
    decisions: pl.DataFrame,
    table: ProfileTable,
    test: Tensor,
    seeds: Sequence[int],
    outcomes: Outcomes,
    reference: Reference | None = None,
) -> Results:
    """Return the content of `results.json`, as far as both kinds of problem have it."""
    arrays = DecisionArrays(decisions)
    rows = _rows(problem, outcomes(arrays, test), arrays.splits, arrays.places)
    _add_decision_times(rows, arrays)
    results: Results = {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": arrays.places,
        "rows": rows,
        "configurations": _configurations(problem, table, test, arrays.places),
        "knob_usage": _usage(problem, arrays, table, reference),
    }
    if bins := reliability(decisions):
        results["reliability"] = bins
    names = arrays.samples["dataset"]
    if names.n_unique() > 1:
        results["by_dataset"] = []
        for dataset in sorted(names.unique()):
            part = DecisionArrays(decisions.filter(pl.col("dataset") == dataset))
            samples = test[torch.from_numpy((names == dataset).to_numpy())]
            means = _most_important(problem, _rows(problem, outcomes(part, samples), part.splits))
            for row in means:
                row = {"dataset": dataset, "samples": len(samples), **row}
                results["by_dataset"].append(row)
    return results


def _add_decision_times(rows: Rows, arrays: DecisionArrays) -> None:
    """Add `decision_us_p50` to every row; None for a policy whose decisions are not timed."""
    # all samples of a split have the same times: take one of each
    if arrays.splits is None:
        firsts: Any = [0]
    else:
        firsts = np.unique(arrays.splits[0], return_index=True)[1]
    for row in rows:
        times = arrays.array(row["policy"], "decision_us")[:, firsts].mean((0, 1))
        if np.isnan(times[0]):
            row["decision_us_p50"] = None
        elif row["budget_ms"] is None:
            row["decision_us_p50"] = float(times.mean())
        else:
            row["decision_us_p50"] = float(times[arrays.places.index(row["budget_ms"])])


def _configurations(
    problem: Problem, table: ProfileTable, test: Tensor, budgets: Sequence[float]
) -> Rows:
    """Return the means of every profiled configuration over the test samples, under deadlines with
    the mean utility over the budgets."""
    accuracy = table.accuracy[test].nanmean(0).tolist()
    latency = table.latency_ms[test].nanmean(0).tolist()
    profiled = table.mask[test].any(0).tolist()
    measured = table.accuracy[test], table.measurements_ms[test]
    total = sum(expected_utility(*measured, torch.tensor(budget)) for budget in budgets)
    served = torch.where(table.mask[test], total / len(budgets), torch.nan)
    utility = served.nanmean(0).tolist()
    rows = []
    for c, label in enumerate(_labels(table)):
        if profiled[c]:
            row = {"label": label, "knobs": table.configuration(c)}
            row |= {"accuracy": accuracy[c], "latency_ms": latency[c]}
            if problem is DEADLINE:
                row["utility"] = utility[c]
            rows.append(row)
    return rows


def _most_important(problem: Problem, means: Rows) -> Rows:
    """Return the rows of the policies of `problem.by_dataset`, and before the last of them the best
    of all other rows."""
    rows = {row["policy"]: row for row in means}
    others = rows.keys() - set(problem.by_dataset)
    best = sorted(others, key=lambda policy: (-rows[policy][problem.ranked_by], policy))[:1]
    names = (*problem.by_dataset[:-1], *best, problem.by_dataset[-1])
    return [rows[policy] for policy in names if policy in rows]


def _rows(
    problem: Problem,
    outcomes: Iterable[Outcome],
    splits: np.ndarray | None,
    budgets: Sequence[float] = (),
) -> Rows:
    """Return for each policy the mean over all budgets, then a row for each of `budgets`, with the
    intervals of its score, of the oracle gap that it closes and of `COMPARED`.

    Args:
        splits: see `DecisionArrays.splits`.
    """
    compared = COMPARED[problem.name]
    parts = {None: slice(None)} | {budget: slice(b, b + 1) for b, budget in enumerate(budgets)}
    rows = []
    cases = []
    for policy, numbers, scores in outcomes:
        for budget, part in parts.items():
            score, low, high, *rivals = (values[..., part].mean(-1) for values in scores)
            gains = [score - rival for rival in rivals]
            row: dict[str, Any] = {"policy": policy, "budget_ms": budget}
            row |= {key: _known_mean(values[part]) for key, values in numbers.items()}
            row |= {key: float(gain.mean()) for key, gain in zip(compared, gains, strict=True)}
            gap = float(high.mean() - low.mean())
            if gap > 1e-9:
                row["gap_closed"] = float(score.mean() - low.mean()) / gap
            else:
                row["gap_closed"] = 0.0
            if policy in DEADLINE.trained:
                row["utility_per_seed"] = score.mean(1).tolist()
            if splits is not None:
                row["utility_per_split"] = [
                    float(score[:, splits[0] == split].mean()) for split in np.unique(splits[0])
                ]
            rows.append(row)
            cases.append([score, low, high, *gains])

    # all intervals at once: they share their draws
    for row, intervals in zip(rows, score_intervals(cases, splits), strict=True):
        row["utility_ci95"] = intervals["score_ci95"]
        row["gap_closed_ci95"] = intervals["gap_closed_ci95"]
        for key, interval in zip(compared, intervals["differences_ci95"], strict=True):
            row[f"{key}_ci95"] = interval
    return rows


def _known_mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _under_deadlines(arrays: DecisionArrays, _: Tensor) -> Iterator[Outcome]:
    """Yield what is known about each policy under deadlines.

    `infeasible` is the share of samples that no profiled configuration serves in time;
    `satisfaction_feasible` is over all other samples, and NaN if there are none.
    """
    low = arrays.array(DEADLINE.low, "score")[0]
    high = arrays.array(DEADLINE.high, "score")[0]
    for policy in arrays.policies:
        latency = arrays.array(policy, "latency_ms")
        in_time = arrays.array(policy, "in_time")
        feasible = arrays.array(policy, "feasible")
        score = arrays.array(policy, "score")
        served = (in_time * feasible).sum((0, 1))
        servable = feasible.sum((0, 1))
        numbers = {
            "accuracy": arrays.array(policy, "accuracy").mean((0, 1)),
            "latency_ms_mean": latency.mean((0, 1)),
            "latency_ms_p95": np.quantile(latency, 0.95, axis=1).mean(0),
            "satisfaction": in_time.mean((0, 1)),
            "satisfaction_feasible": served / np.where(servable, servable, np.nan),
            "infeasible": 1 - feasible.mean((0, 1)),
            "reward": arrays.array(policy, "reward").mean((0, 1)),
            "utility": score.mean((0, 1)),
            "utility_free": arrays.array(policy, "score_free").mean((0, 1)),
        }
        yield policy, numbers, [score, low, high, low]


def _under_mean_budgets(
    arrays: DecisionArrays, reference: Reference, prices: Mapping[str, Tensor]
) -> Iterator[Outcome]:
    """Yield what is known about each policy under mean budgets. The ends of the oracle gap are
    those at equal mean latency.

    Args:
        prices: by policy, float64 [S, B].
    """
    at_budget = arrays.array(MEAN_BUDGET.low, "accuracy")[0]
    for policy in arrays.policies:
        accuracy = arrays.array(policy, "accuracy")
        latency = arrays.array(policy, "latency_ms")
        mixed = np.isnan(arrays.choices(policy, _labels(reference.table))).any((0, 1))
        spent = torch.from_numpy(latency.mean((0, 1)))
        mix = reference.static_mix(spent).numpy()
        single = reference.best_single(spent).numpy()
        best = reference.oracle(spent * (1 + 1e-9)).accuracy.numpy()
        if policy in prices:
            price = prices[policy].mean(0).numpy()
        else:
            price = np.full(len(spent), np.nan)
        numbers = {
            "utility": accuracy.mean((0, 1)),
            "latency_ms_mean": spent.numpy(),
            "latency_ms_p95": np.where(mixed, np.nan, np.quantile(latency, 0.95, axis=1).mean(0)),
            "price": price,
            "worth_ms": 1 / np.where(price > 0, price, np.nan),
            "oracle_accuracy": best.mean(0),
        }
        yield policy, numbers, [accuracy, mix, best, mix, at_budget, single]


def _usage(
    problem: Problem, arrays: DecisionArrays, table: ProfileTable, reference: Reference | None
) -> Rows:
    """Return how often each policy of `problem.usage` set each knob to each value, under each
    budget; for a mixture how often it is expected to."""
    rows = []
    for policy in problem.usage:
        choices = arrays.choices(policy, _labels(table))
        used = np.stack(
            [(choices == c).sum((0, 1), dtype=float) for c in range(table.num_configurations)]
        )  # [C, B]
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

"""Let controllers and baselines decide on the held-out samples: decisions.parquet, and its summary
results.json.

The rows of a controller hold means over its seeds, and intervals over samples and seeds; those of a
run on several splits hold means over the splits too, and intervals over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.judging.evaluation import Outcomes, judge_all
from knobwise.agents.judging.policy import Baseline
from knobwise.agents.serving.own_cost import own_costs
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import MeanBudgetPolicy
from knobwise.envs.configurations.reward import RewardTable, expected_utility
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.decisions import SAMPLE, array_of, decision_rows, splits_of
from knobwise.experiments.results.equal_latency import Reference
from knobwise.experiments.results.problem import DEADLINE, MEAN_BUDGET, Problem
from knobwise.experiments.results.statistics import score_intervals, with_interval

BINS = 10
"""Number of bins of predicted probabilities."""
Results = dict[str, Any]
Rows = list[dict[str, Any]]


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
        baselines: `budget_aware_static` and `oracle` must be among them.
        charge: whether controllers pay for their decisions.
        before: the controllers as they were before GRPO, for what it added (`grpo_gain`).
    """
    deciders = [controller.decider for controller in controllers]
    costs = own_costs(deciders, table, test, budgets_ms)
    spent = [cost.charged_ms * charge for cost in costs]
    policies: dict[str, list[Any]] = {"controller": deciders}
    if all(controller.teacher is not None for controller in controllers):
        policies["teacher"] = [controller.guarded_teacher for controller in controllers]
    policies |= {baseline.name: [baseline] for baseline in baselines}
    policies["if_free"] = [controller.if_free for controller in controllers]
    started = [controller.decider for controller in before if controller is not None]
    if len(started) == len(controllers):
        policies["before"] = started
    # only controllers pay for their decisions
    paid = {"controller": spent, "before": spent}
    judged = judge_all(table, test, budgets_ms, rewards, policies, paid)
    if_free = judged.pop("if_free")
    untrained = judged.pop("before", [])

    # what only controllers have, among it the probabilities that their teachers predict
    further = []
    for i, outcome in enumerate(judged["controller"]):
        left_ms = budgets_ms - spent[i]
        columns: dict[str, Any] = {
            "decision_us": costs[i].decision_us,
            "score_free": if_free[i].utility,
        }
        chances = expected_in_time(controllers[i], table, test, outcome.chosen, left_ms)
        further.append(columns | {"expected_in_time": chances})
    decisions = decision_frame(table, test, budgets_ms, judged, seeds, further)
    results = _results(DEADLINE, decisions, table, test, seeds)

    if untrained:
        results["grpo_gain"] = _gain(untrained, judged["controller"])
    return results, decisions


def _gain(before: Sequence[Outcomes], after: Sequence[Outcomes]) -> Results:
    """Return the gain in utility by GRPO over seeds and test samples, with its interval."""
    pairs = zip(before, after, strict=True)
    gains = torch.stack([trained.utility - started.utility for started, trained in pairs])
    return with_interval("test", gains.mean(2).double().numpy())


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
    return _results(DEADLINE, together, table, test, seeds), together


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
    costs = own_costs([each.decider for each in controllers], table, test, budgets_ms)
    policies = [controller.under_mean_budgets() for controller in controllers]
    spent = [cost.charged_ms * charge for cost in costs]
    judged = reference.judged(budgets_ms, policies, baselines, spent)
    further = [{"decision_us": cost.decision_us} for cost in costs]
    decisions = decision_frame(table, test, budgets_ms, judged, seeds, further)

    results = _results(MEAN_BUDGET, decisions, table, test, seeds, reference)
    # a price belongs to a budget, so a mean over the budgets has none
    prices = {baseline.name: baseline.prices.tolist() for baseline in baselines}
    prices["controller"] = torch.stack([policy.prices for policy in policies]).mean(0).tolist()
    for row in (*results["rows"], *results.get("by_dataset", [])):
        at_budgets = zip(results["budgets_ms"], prices.get(row["policy"], []), strict=False)
        price = dict(at_budgets).get(row["budget_ms"])
        row |= {"price": price, "worth_ms": 1 / price if price else None}
        row |= {"accuracy": row["utility"], "accuracy_ci95": row["utility_ci95"]}
    return results | {"sense": "mean", "static_hull": reference.hull()}, decisions


@torch.no_grad()
def expected_in_time(
    controller: DeployedController,
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    left_ms: Tensor,
) -> Tensor | None:
    """Return the probability that what a controller chose is on time, as its teacher expects it.

    Args:
        rows: int64 [n], samples.
        chosen: int64 [n, B], configurations.
        left_ms: [B], what its own cost leaves of the budgets.

    Returns:
        float [n, B]; None without a teacher.
    """
    if controller.teacher is None:
        return None
    blocks = {name: block[rows] for name, block in table.features.items()}
    moments = controller.teacher.moments(controller.controller.features(blocks, len(rows)))
    columns = []
    for place, limit in enumerate(left_ms):
        meets = moments.meets(limit.float().expand(len(rows)))
        columns.append(meets.gather(1, chosen[:, [place]]))
    return torch.cat(columns, 1)


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
    for checkpoint in loaded:
        teacher = checkpoint.controller.teacher
        choice = teacher.chosen() if teacher is not None else {"weights": {}, "settings": {}}
        extra = checkpoint.extra
        chosen.append(choice | {"iteration": extra["iteration"], "grpo": extra.get("grpo", {})})
    guards = [checkpoint.controller.settled.guard for checkpoint in loaded]
    guards = [rows for rows in guards if rows]
    choices: Results = {"guard": guards, "chosen": chosen}
    if guards and "level" in guards[0][0]:
        choices["satisfaction_level"] = guards[0][0]["level"]
    return choices


def gain_on_held_out(loaded: Sequence[Loaded]) -> dict[str, Any]:
    """Return what GRPO added on the samples that were held out in training, as `grpo_gain` has it;
    {} where there was no GRPO, or no warm-up before it.

    It is the difference, sample by sample, between the weights that are kept and those that GRPO
    started with, of networks that were not fitted on the sample.
    """
    scores = [each.extra.get("grpo_held_out") or {} for each in loaded]
    if not all(scores):
        return {}
    gains = torch.stack([each["best"].double() - each["start"].double() for each in scores])
    return with_interval("held_out", gains.numpy())


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
    budgets_ms: Tensor,
    judged: Mapping[str, Sequence[Outcomes]],
    seeds: Sequence[int],
    further: Sequence[Mapping[str, Any]],
) -> pl.DataFrame:
    """Return the content of `decisions.parquet`.

    Args:
        test: int64 [n], the samples that were judged.
        budgets_ms: float [B].
        judged: outcomes by policy, for each seed where there are several.
        seeds: of the trained policies.
        further: more columns of the controller of each seed, float [n, B] or [B].
    """
    # a row for each judged sample
    names = pl.DataFrame({"sample_id": table.sample_ids, "dataset": table.datasets or None})
    samples = names[test.numpy()]
    labels = pl.Series([*_labels(table), None], dtype=pl.String)  # the last one stands for −1
    frames = []
    for policy, outcomes in judged.items():
        of_seeds = seeds if policy in DEADLINE.trained else [None]
        for i, (seed, outcome) in enumerate(zip(of_seeds, outcomes, strict=True)):
            columns = dict(vars(outcome))
            columns["choice"] = labels[columns.pop("chosen").flatten().numpy()]
            columns["score"] = columns.pop("utility")
            if policy == "controller":
                columns |= further[i]
            frames.append(decision_rows(policy, seed, samples, budgets_ms.tolist(), columns))
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
    reference: Reference | None = None,
) -> Results:
    """Return the content of `results.json`, as far as both kinds of problem have it."""
    budgets = decisions["place"].unique(maintain_order=True).to_list()
    results: Results = {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": budgets,
        "rows": _rows(problem, decisions, reference, budgets),
        "configurations": _configurations(problem, table, test, budgets),
        "knob_usage": _usage(problem, decisions, table, budgets, reference),
    }
    if bins := reliability(decisions):
        results["reliability"] = bins
    # the means once more, for each of several data sets
    names = decisions.select(SAMPLE).unique(maintain_order=True)["dataset"]
    if names.n_unique() > 1:
        results["by_dataset"] = []
        for dataset in sorted(names.unique()):
            part = decisions.filter(dataset=dataset)
            samples = test[torch.from_numpy((names == dataset).to_numpy())]
            of_part = reference and Reference(table, reference.fitted, samples)
            rows = _rows(problem, part, of_part)
            facts = {"dataset": dataset, "samples": len(samples)}
            for row in _most_important(problem, rows):
                del row["decision_us_p50"]  # no data set has times of its own
                results["by_dataset"].append(facts | row)
    return results


def _configurations(
    problem: Problem, table: ProfileTable, test: Tensor, budgets: Sequence[float]
) -> Rows:
    """Return the means of every profiled configuration over the test samples, under deadlines with
    the mean utility over the budgets."""
    cells = {"accuracy": table.accuracy[test], "latency_ms": table.latency_ms[test]}
    if problem is DEADLINE:
        # [n, C, B]; what was not profiled has no utility
        measured = cells["accuracy"][..., None], table.measurements_ms[test][..., None, :]
        utility = expected_utility(*measured, torch.tensor(budgets)).mean(-1)
        cells["utility"] = utility.where(table.mask[test], torch.nan)
    means = {name: values.nanmean(0).tolist() for name, values in cells.items()}
    # the rest was never measured
    rows = []
    for c, label in enumerate(_labels(table)):
        if table.mask[test, c].any():
            row = {"label": label, "knobs": table.configuration(c)}
            rows.append(row | {name: values[c] for name, values in means.items()})
    return rows


def _most_important(problem: Problem, means: Rows) -> Rows:
    """Return the rows of the policies of `problem.by_dataset`, and before the last of them the best
    of all other rows."""
    rows = {row["policy"]: row for row in means}
    others = rows.keys() - set(problem.by_dataset)
    best = sorted(others, key=lambda policy: (-rows[policy][problem.ranked_by], policy))[:1]
    names = (*problem.by_dataset[:-1], *best, problem.by_dataset[-1])
    return [rows[policy] for policy in names if policy in rows]


def _means(problem: Problem, decisions: pl.DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the means of each policy over its seeds at each budget, by (policy, budget), and over
    the budgets at which they are known, by (policy, None).

    `infeasible` is the share of samples that no profiled configuration serves in time;
    `satisfaction_feasible` is over all other samples, and None if there are none. A mixture has no
    `latency_ms_p95`, since its latencies are expectations.
    """
    high = pl.quantile("latency_ms", 0.95, "linear")
    numbers = {
        "utility": pl.mean("score"),
        "latency_ms_mean": pl.mean("latency_ms"),
        "latency_ms_p95": pl.when(pl.col("choice").has_nulls()).then(np.nan).otherwise(high),
        "decision_us_p50": pl.mean("decision_us"),
    }
    if problem is DEADLINE:
        numbers |= {
            "accuracy": pl.mean("accuracy"),
            "satisfaction": pl.mean("in_time"),
            "satisfaction_feasible": pl.col("in_time").filter("feasible").mean(),
            "infeasible": 1 - pl.mean("feasible"),
            "reward": pl.mean("reward"),
            "utility_free": pl.mean("score_free"),
        }
    # over samples, then over seeds, then over budgets: the sizes of all parts are equal; rows keep
    # their order, so that sums do not differ between two runs
    precise = decisions.with_columns(pl.col(pl.Float32).cast(pl.Float64))
    of_seeds = precise.group_by("policy", "place", "seed", maintain_order=True).agg(**numbers)
    means = pl.col(*numbers).mean().fill_nan(None)
    at_budgets = of_seeds.group_by("policy", "place", maintain_order=True).agg(means)
    everywhere = pl.lit(None, pl.Float64).alias("place")
    over_budgets = at_budgets.group_by("policy", everywhere, maintain_order=True).agg(means)
    keys = ["policy", "place"]
    return pl.concat([at_budgets, over_budgets]).rows_by_key(keys, named=True, unique=True)


def _rows(
    problem: Problem,
    decisions: pl.DataFrame,
    reference: Reference | None,
    budgets: Sequence[float] = (),
) -> Rows:
    """Return for each policy the mean over all budgets, then a row for each of `budgets`, with the
    intervals of its score, of the oracle gap that it closes and of its differences."""
    splits = splits_of(decisions.select(SAMPLE).unique(maintain_order=True))
    means = _means(problem, decisions)
    parts = {None: slice(None)} | {budget: slice(b, b + 1) for b, budget in enumerate(budgets)}
    rows = []
    cases = []
    for policy in decisions["policy"].unique(maintain_order=True):
        arrays = _scores(problem, decisions, policy, reference)
        for budget, part in parts.items():
            row = {"policy": policy, "budget_ms": budget, **means[policy, budget]}
            score, low, high, *rivals = (values[..., part].mean(-1) for values in arrays)
            if problem is MEAN_BUDGET:
                row["oracle_accuracy"] = float(high.mean())
            if policy in DEADLINE.trained:
                row["utility_per_seed"] = score.mean(1).tolist()
            if splits is not None:
                of_splits = [score[:, splits[0] == split] for split in np.unique(splits[0])]
                row["utility_per_split"] = [float(values.mean()) for values in of_splits]
            rows.append(row)
            cases.append([score, low, high, *(score - rival for rival in rivals)])

    # all intervals at once: they share their draws
    keys = ("utility", "gap_closed", *problem.compared)
    for row, estimates in zip(rows, score_intervals(cases, splits), strict=True):
        for key, (value, ci95) in zip(keys, estimates, strict=True):
            row |= {key: value, f"{key}_ci95": ci95}
    return rows


def _scores(
    problem: Problem, decisions: pl.DataFrame, policy: str, reference: Reference | None
) -> list[Any]:
    """Return scores by sample, [S, n, B] of a policy, then [n, B]: the low and the high end of the
    oracle gap, and the scores that it is compared with, in the order of `Problem.compared`. Under
    mean budgets the ends of the gap are those at equal mean latency."""
    score = array_of(decisions, policy, "score")
    low = array_of(decisions, problem.low, "score")[0]
    if reference is None:
        return [score, low, array_of(decisions, problem.high, "score")[0], low]
    # [B], the mean latency at each budget
    spent = torch.from_numpy(array_of(decisions, policy, "latency_ms").mean((0, 1)))
    mix = reference.static_mix(spent).numpy()
    best = reference.oracle(spent * (1 + 1e-9)).accuracy.numpy()
    return [score, mix, best, mix, low, reference.best_single(spent).numpy()]


def reliability(decisions: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the learned policy's decisions, all budgets and seeds together, in ten bins of equally
    many and of rising probability: how many `decisions`, and the means of `expected_in_time` and
    `in_time`. [] if it predicts none."""
    known = decisions.filter(policy=DEADLINE.trained[0]).drop_nulls("expected_in_time")
    number = pl.int_range(pl.len()) * BINS // pl.len()
    means = pl.col("expected_in_time", "in_time").cast(pl.Float64).mean()
    bins = (
        known.sort("expected_in_time", maintain_order=True)
        .group_by(number.alias("bin"), maintain_order=True)
        .agg(pl.len().alias("decisions"), means)
    )
    return bins.drop("bin").to_dicts()


def _usage(
    problem: Problem,
    decisions: pl.DataFrame,
    table: ProfileTable,
    budgets: Sequence[float],
    reference: Reference | None,
) -> Rows:
    """Return how often the controller and both ends of the oracle gap set each knob to each value,
    under each budget; for a mixture how often it is expected to."""
    labels = _labels(table)
    index = pl.col("choice").replace_strict(labels, range(len(labels)), default=None)
    indexed = decisions.select("policy", "seed", "place", index)
    rows = []
    for policy in (problem.trained[0], problem.low, problem.high):
        choices = array_of(indexed, policy, "choice")  # NaN where a mixture decided
        counts = [(choices == c).sum((0, 1)) for c in range(len(labels))]
        used = torch.tensor(np.stack(counts), dtype=torch.float64)  # [C, B]
        if reference is not None:
            limits = torch.tensor(budgets, dtype=torch.float64)
            used += reference.mixture_use(limits, np.isnan(choices))
        shares = used / used.sum(0)
        # shares of configurations add up to shares of knob values
        for k, knob in enumerate(table.knobs):
            for b, budget in enumerate(budgets):
                for v, value in enumerate(knob.values):
                    share = float(shares[table.configurations[:, k] == v, b].sum())
                    row = {"policy": policy, "budget_ms": budget, "knob": knob.name}
                    rows.append(row | {"value": value, "share": share})
    return rows

"""Summarise the decisions of controllers and baselines: results.json.

The rows of a controller hold means over its seeds, and intervals over samples and seeds; those of a
run on several splits hold means over the splits too, and intervals over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.envs.bandit.reward import expected_utility
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.decisions import SAMPLE, array_of, splits_of
from knobwise.experiments.evidence.equal_latency import Reference
from knobwise.experiments.evidence.results import value_of
from knobwise.experiments.evidence.schema import (
    ConfigurationRow,
    DatasetRow,
    PolicyRow,
    ProfileFacts,
    ReliabilityBin,
    RunResults,
    UsageRow,
)
from knobwise.experiments.evidence.statistics import score_intervals
from knobwise.experiments.evidence.task import DEADLINE, MEAN_BUDGET, Task

BINS = 10
"""Number of bins of predicted probabilities."""


def profile_of(table: ProfileTable | BeamTable) -> ProfileFacts:
    """Return name, digest and sizes of a profile or of beams."""
    facts: ProfileFacts = {"name": table.name, "digest": table.digest}
    if isinstance(table, BeamTable):
        return facts | {"samples": table.num_queries, "candidates": len(table.candidates)}
    return facts | {"samples": table.num_samples, "configurations": table.num_configurations}


def labels_of(table: ProfileTable) -> list[str]:
    """Return the name of each configuration."""
    return [table.label(c) for c in range(table.num_configurations)]


def summary_of(
    task: Task,
    decisions: pl.DataFrame,
    table: ProfileTable,
    test: Tensor,
    seeds: Sequence[int],
    reference: Reference | None = None,
) -> RunResults:
    """Return the content of `results.json`, as far as both kinds of task have it."""
    budgets = decisions["condition"].unique(maintain_order=True).to_list()
    clusters = None
    if table.clusters:
        clusters = len({table.clusters[row] for row in test.tolist()})
    # only deadlines have a utility
    limits = budgets if task is DEADLINE else []
    results: RunResults = {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
        "test_clusters": clusters,
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": budgets,
        "rows": _rows(task, decisions, reference, budgets),
        "configurations": configurations_of(table, test, limits),
        "knob_usage": _usage(task, decisions, table, budgets, reference),
    }
    if bins := reliability(decisions):
        results["reliability"] = bins
    # the means once more, for each of several data sets
    names = decisions.select(SAMPLE).unique(maintain_order=True)["dataset"]
    if names.n_unique() > 1:
        results["by_dataset"] = []
        for dataset in sorted(names.unique()):
            samples = test[(names == dataset).to_torch()]
            of_part = reference and Reference(table, reference.fitted, samples)
            rows = _rows(task, decisions.filter(dataset=dataset), of_part)
            for row in _most_important(task, rows):
                del row["decision_us_p50"]  # no data set has times of its own
                about: DatasetRow = {"dataset": dataset, "samples": len(samples)}
                results["by_dataset"].append({**about, **row})
    return results


def configurations_of(
    table: ProfileTable, rows: Tensor, budgets: Sequence[float] = ()
) -> list[ConfigurationRow]:
    """Return the means of every configuration that was profiled for these samples (int64 [n]), with
    the mean utility over the budgets if there are any."""
    cells = {"accuracy": table.accuracy[rows], "latency_ms": table.latency_ms[rows]}
    if budgets:
        # [n, C, B]; what was not profiled has no utility
        measured = cells["accuracy"][..., None], table.measurements_ms[rows][..., None, :]
        utility = expected_utility(*measured, torch.tensor(budgets)).mean(-1)
        cells["utility"] = utility.where(table.mask[rows], torch.nan)
    means = {name: values.nanmean(0).tolist() for name, values in cells.items()}
    # the rest was never measured
    configurations: list[ConfigurationRow] = []
    for c, label in enumerate(labels_of(table)):
        if table.mask[rows, c].any():
            row: ConfigurationRow = {"label": label, "knobs": table.configuration(c)}
            known = {name: values[c] for name, values in means.items()}
            configurations.append(cast("ConfigurationRow", row | known))
    return configurations


def _most_important(task: Task, means: list[PolicyRow]) -> list[PolicyRow]:
    """Return the rows of the policies of `task.by_dataset`, and before the last of them the best
    of all other rows."""
    rows = {row["policy"]: row for row in means}
    *first, last = task.by_dataset
    others = sorted(rows.keys() - {*first, last})
    best = sorted(others, key=lambda policy: -value_of(rows[policy], task.ranked_by))[:1]
    return [rows[policy] for policy in (*first, *best, last) if policy in rows]


def _means(task: Task, decisions: pl.DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the means of each policy over its seeds at each budget, by (policy, budget), and over
    the budgets at which they are known, by (policy, None).

    `infeasible` is the share of samples that no profiled configuration serves in time;
    `satisfaction_feasible` is over all other samples, and None if there are none. A mixture has no
    `latency_ms_p95`, since its latencies are expectations.
    """
    high = pl.quantile("latency_ms", 0.95, "linear")
    numbers = {
        "utility": pl.mean(task.score),
        "latency_ms_mean": pl.mean("latency_ms"),
        "latency_ms_p95": pl.when(pl.col("choice").has_nulls()).then(np.nan).otherwise(high),
        "decision_us_p50": pl.mean("decision_us"),
    }
    if task is DEADLINE:
        numbers |= {
            "accuracy": pl.mean("accuracy"),
            "satisfaction": pl.mean("on_time"),
            "satisfaction_feasible": pl.col("on_time").filter("feasible").mean(),
            "infeasible": 1 - pl.mean("feasible"),
            "reward": pl.mean("reward"),
            "utility_free": pl.mean("utility_free"),
        }
    # over samples, then over seeds, then over budgets: the sizes of all parts are equal; rows keep
    # their order, so that sums do not differ between two runs
    precise = decisions.with_columns(pl.col(pl.Float32).cast(pl.Float64))
    of_seeds = precise.group_by("policy", "condition", "seed", maintain_order=True).agg(**numbers)
    means = pl.col(*numbers).mean().fill_nan(None)
    at_budgets = of_seeds.group_by("policy", "condition", maintain_order=True).agg(means)
    over_budgets = at_budgets.group_by("policy", maintain_order=True).agg(means)
    # the condition of a mean over the budgets is null
    every = pl.concat([at_budgets, over_budgets], how="diagonal")
    return every.rows_by_key(["policy", "condition"], named=True, unique=True)


def _rows(
    task: Task,
    decisions: pl.DataFrame,
    reference: Reference | None,
    budgets: Sequence[float] = (),
) -> list[PolicyRow]:
    """Return for each policy the mean over all budgets, then a row for each of `budgets`, with the
    intervals of its score, of the oracle gap that it closes and of its differences."""
    samples = decisions.select(*SAMPLE, "cluster").unique(maintain_order=True)
    splits = splits_of(samples)
    means = _means(task, decisions)
    parts = {None: slice(None)} | {budget: slice(b, b + 1) for b, budget in enumerate(budgets)}
    rows: list[dict[str, Any]] = []
    cases = []
    for policy in decisions["policy"].unique(maintain_order=True):
        arrays = _scores(task, decisions, policy, reference)
        for budget, part in parts.items():
            row = {"policy": policy, "budget_ms": budget, **means[policy, budget]}
            score, low, high, *rivals = (values[..., part].mean(-1) for values in arrays)
            if task is MEAN_BUDGET:
                row["oracle_accuracy"] = float(high.mean())
            if policy in DEADLINE.trained:
                row["utility_per_seed"] = score.mean(1).tolist()
            if splits is not None and not samples["split"].has_nulls():
                of_splits = [score[:, splits[0] == split] for split in np.unique(splits[0])]
                row["utility_per_split"] = [float(values.mean()) for values in of_splits]
            rows.append(row)
            cases.append([score, low, high, *(score - rival for rival in rivals)])

    # all intervals at once: they share their draws
    keys = ("utility", "gap_closed", *task.compared)
    for row, estimates in zip(rows, score_intervals(cases, splits), strict=True):
        for key, (value, ci95) in zip(keys, estimates, strict=True):
            row |= {key: value, f"{key}_ci95": ci95}
    return cast("list[PolicyRow]", rows)


def _scores(
    task: Task, decisions: pl.DataFrame, policy: str, reference: Reference | None
) -> list[Any]:
    """Return scores by sample, [S, n, B] of a policy, then [n, B]: the low and the high end of the
    oracle gap, and the scores that it is compared with, in the order of `Task.compared`. Under
    mean budgets the ends of the gap are those at equal mean latency."""
    score = array_of(decisions, policy, task.score)
    low = array_of(decisions, task.low, task.score)[0]
    if reference is None:
        return [score, low, array_of(decisions, task.high, task.score)[0], low]
    # [B], the mean latency at each budget
    spent = torch.from_numpy(array_of(decisions, policy, "latency_ms").mean((0, 1)))
    mix = reference.static_mix(spent).numpy()
    best = reference.oracle(spent * (1 + 1e-9)).accuracy.numpy()
    return [score, mix, best, mix, low, reference.best_single(spent).numpy()]


def reliability(decisions: pl.DataFrame) -> list[ReliabilityBin]:
    """Return the learned policy's decisions, all budgets and seeds together, in ten bins of equally
    many and of rising probability: how many `decisions`, and the means of `expected_in_time` and
    `in_time`. [] if it predicts none."""
    known = decisions.filter(policy=DEADLINE.trained[0]).drop_nulls("expected_on_time")
    number = pl.int_range(pl.len()) * BINS // pl.len()
    means = pl.col("expected_on_time", "on_time").cast(pl.Float64).mean()
    bins = (
        known.sort("expected_on_time", maintain_order=True)
        .group_by(number.alias("bin"), maintain_order=True)
        .agg(pl.len().alias("decisions"), means)
    )
    return cast("list[ReliabilityBin]", bins.drop("bin").to_dicts())


def _usage(
    task: Task,
    decisions: pl.DataFrame,
    table: ProfileTable,
    budgets: Sequence[float],
    reference: Reference | None,
) -> list[UsageRow]:
    """Return how often the controller and both ends of the oracle gap set each knob to each value,
    under each budget; for a mixture how often it is expected to."""
    labels = labels_of(table)
    index = pl.col("choice").replace_strict(labels, range(len(labels)), default=None)
    indexed = decisions.select("policy", "seed", "condition", index)
    rows: list[UsageRow] = []
    for policy in (task.trained[0], task.low, task.high):
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
                    row: UsageRow = {"policy": policy, "budget_ms": budget, "knob": knob.name}
                    rows.append(row | {"value": value, "share": share})
    return rows

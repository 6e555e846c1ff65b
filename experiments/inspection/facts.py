"""Gather the facts about a profile: its content, and how much a policy could gain on it.

Every number is taken over profiled cells only. The headroom is in-sample (the static configuration
is chosen on the samples that it is judged on) and the oracle knows the outcomes: it is only an
upper bound on what a policy could gain. `attainable` is what quick policies gain out of fold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.envs.configurations.budgets import default_budgets, few_budgets, log_measured
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.experiments.inspection.faults import faults_of
from knobwise.experiments.report.words import number
from knobwise.experiments.results.attainable import attainable, oracle_of_halves
from knobwise.experiments.results.explanation import difficulty_of
from knobwise.experiments.results.statistics import pareto_front

Facts = Mapping[str, Any]
"""What `inspect_table` returns."""
QUANTILES = (0.05, 0.5, 0.95)
"""The quantiles of latency for each configuration."""
EXAMPLES = 6
"""How many samples are given as examples."""


def inspect_table(table: ProfileTable) -> dict[str, Any]:
    """Return the facts about a profile, as plain values for JSON.

    Returns:
        - `samples`, `configurations`, `grid` (how many there could be), `unit` of latencies
        - `coverage`: share of the cells that are profiled
        - `config_dependent_share`: of the samples, whose accuracy differs between configurations
        - `latency_cv_within_configuration`: standard deviation / mean over the samples, mean over
          the configurations
        - `latency_jitter_within_cell`: standard deviation of ln latency over a cell's measurements,
          median over the cells; None if each was measured once
        - `latency_spread_between_configurations`: the same over a sample's configurations
        - `knobs`: means over the profiled cells with each value
        - `headroom`, `static_choices`, `feasible_share`: see `_headroom`
        - `attainable`, `oracle_of_halves`: see `knobwise.experiments.results.attainable`
        - `configuration_means`, with the 5, 50 and 95 % quantiles of latency, and `pareto`
        - `examples`: samples from easy to hard, with the latency of their cheapest right answer
        - `datasets`, `images`, `clusters`, `features`, `digest`, `notes` (of the reader),
          `warnings`, `faults` (see `knobwise.experiments.inspection.faults`)
    """
    # digest and policies are those of the whole profile, which may have a first look
    whole = table
    table = whole.without_first_look
    # NaN where a cell was not profiled
    accuracy = table.accuracy.double()
    latency = table.latency_ms.double()
    means = {"accuracy": accuracy.nanmean(0), "latency_ms": latency.nanmean(0)}
    front = pareto_front(*(values.numpy() for values in means.values()))
    lowest, highest = _range(accuracy.T)
    budgets_ms = default_budgets(table)
    deviation = (latency - means["latency_ms"]).square().nanmean(0).sqrt()
    facts = {
        "name": table.name,
        "digest": whole.digest,
        "unit": table.unit,
        "samples": table.num_samples,
        "configurations": table.num_configurations,
        "grid": math.prod(table.knob_sizes),
        "coverage": float(table.mask.double().mean()),
        "config_dependent_share": float((highest - lowest > 1e-6).double().mean()),
        "latency_cv_within_configuration": float(
            (deviation / means["latency_ms"].clamp_min(1e-9)).mean()
        ),
        "latency_jitter_within_cell": _log_spread(table.measurements_ms),
        "latency_spread_between_configurations": _log_spread(table.latency_ms),
        "knobs": _marginals(table, accuracy, latency),
        **_headroom(table, accuracy, latency, budgets_ms),
        "attainable": attainable(whole, budgets_ms),
        "oracle_of_halves": oracle_of_halves(table, budgets_ms),
        "configuration_means": _configuration_means(table, means),
        "datasets": dict(Counter(table.dataset_names)),
        "images": len(set(table.image_ids)) or None,
        "clusters": len(set(table.clusters)) or None,
        "features": [_feature_facts(name, block) for name, block in table.features.items()],
        "notes": list(table.notes),
        "faults": list(map(str, faults_of(whole))),
        "examples": _examples(table, accuracy),
        "pareto": [c for c in means["latency_ms"].argsort().tolist() if front[c]],
    }
    return facts | {"warnings": _warnings(facts) + few_budgets(budgets_ms)}


def _configuration_means(table: ProfileTable, means: Mapping[str, Tensor]) -> list[Any]:
    """Describe each configuration: its knobs, how many samples were profiled with it, and its means
    and the quantiles of its latency over these samples."""
    profiled = table.mask.sum(0).tolist()
    # three quantiles for each configuration, [3, C] → C lists
    quantiles = np.nanquantile(table.latency_ms.numpy(), QUANTILES, axis=0).T.tolist()
    rows = []
    for c in range(table.num_configurations):
        row = {"label": table.label(c), "knobs": table.configuration(c), "samples": profiled[c]}
        row |= {name: float(values[c]) for name, values in means.items()}
        rows.append(row | {"latency_ms_quantiles": quantiles[c]})
    return rows


def _feature_facts(name: str, block: Tensor) -> dict[str, Any]:
    """Return the width of a feature block, its share of missing values, and its number of constant
    columns."""
    lowest, highest = _range(block)
    return {
        "name": name,
        "width": block.shape[1],
        "missing": float(block.isnan().double().mean()),
        "constant": int((lowest >= highest).sum()),
    }


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest known value of each column: float [n, d] → two float
    [d]."""
    return values.nan_to_num(nan=torch.inf).amin(0), values.nan_to_num(nan=-torch.inf).amax(0)


def _log_spread(latency_ms: Tensor) -> float | None:
    """Return the standard deviation of ln latency along the last axis, the median over all rows.

    A row needs at least two latencies; None if no row has them. NaN is left out.
    """
    # NaN where there is no measurement
    logs = log_measured(latency_ms)
    count = (~logs.isnan()).sum(-1)
    squares = (logs - logs.nanmean(-1, keepdim=True)).square().nansum(-1)
    spreads = (squares / (count - 1)).sqrt()[count > 1]
    return float(median_of(spreads)) if len(spreads) else None


def _examples(table: ProfileTable, accuracy: Tensor) -> list[Facts]:
    """Return some samples, from easy to hard.

    A sample is harder if its fastest right answer takes longer.
    """
    needed = difficulty_of(accuracy, table.latency_ms)
    known = needed.argsort()[: int(needed.isfinite().sum())].numpy()
    spaced = np.linspace(0, len(known) - 1, min(EXAMPLES, len(known))).round().astype(int)
    return [
        {"sample_id": table.sample_ids[row], "needed_ms": float(needed[row])}
        for row in known[spaced]
    ]


def _marginals(table: ProfileTable, accuracy: Tensor, latency: Tensor) -> dict[str, Any]:
    """Return for each value of each knob the mean accuracy and latency over all profiled cells with
    this value, and the number of these cells."""
    marginals = {}
    for k, knob in enumerate(table.knobs):
        # [C, V]: whether a configuration has a value
        has = torch.nn.functional.one_hot(table.configurations[:, k], len(knob.values)).double()
        cells = table.mask.double().sum(0) @ has
        marginals[knob.name] = {
            "values": list(knob.values),
            "accuracy": (accuracy.nansum(0) @ has / cells).tolist(),
            "latency_ms": (latency.nansum(0) @ has / cells).tolist(),
            "cells": cells.int().tolist(),
        }
    return marginals


def _headroom(
    table: ProfileTable, accuracy: Tensor, latency: Tensor, budgets_ms: Tensor
) -> dict[str, Any]:
    """Return at each budget, float [B], what the best static configuration is, its utility, that of
    the oracle (the best one of each sample), and the share of samples that some configuration
    answers on time."""
    headroom: dict[str, list[float]] = {"budgets_ms": [], "budget_aware_static": [], "oracle": []}
    choices = []
    feasible = []
    for budget in budgets_ms.tolist():
        # [N, C]; utility is NaN where a cell was not profiled
        in_time = (latency <= budget).double()
        utility = accuracy * in_time
        means = utility.nanmean(0)
        best = int(means.argmax())
        headroom["budgets_ms"].append(budget)
        headroom["budget_aware_static"].append(float(means[best]))
        headroom["oracle"].append(float(utility.nan_to_num().amax(1).mean()))
        feasible.append(float(in_time.amax(1).mean()))
        choices.append(
            {
                "budget_ms": budget,
                "label": table.label(best),
                "knobs": table.configuration(best),
                "utility": float(means[best]),
                "satisfaction": float(in_time[table.mask[:, best], best].mean()),
                "samples": int(table.mask[:, best].sum()),
            }
        )
    return {"headroom": headroom, "static_choices": choices, "feasible_share": feasible}


def mean_headroom(facts: Facts) -> list[float]:
    """Return the mean utility over the budgets of static and of the oracle."""
    headroom = facts["headroom"]
    return [float(np.mean(headroom[key])) for key in ("budget_aware_static", "oracle")]


# -- warnings --------------------------------------------------------------------------------------

FEW_CLUSTERS = 100
"""Of fewer clusters the test part holds less than 20."""
NEXT_TO_NOTHING = 0.02
"""A smaller share or variation counts as next to nothing."""


def _warnings(facts: Facts) -> list[str]:
    """Say what a person should know before training on this profile."""
    headroom = facts["headroom"]
    gains = np.subtract(headroom["oracle"], headroom["budget_aware_static"])
    varies = facts["latency_cv_within_configuration"]
    # warning → whether it holds
    warnings = {
        f"Only {facts['samples']} samples: intervals on a test split of them will be wide.": (
            facts["samples"] < 200
        ),
        f"Only {facts['clusters']} groups (profile.group): the test part holds few of them, and "
        "intervals over few groups are too narrow.": (facts["clusters"] or FEW_CLUSTERS)
        < FEW_CLUSTERS,
        f"{number(1 - facts['coverage'], '.1%')} of the cells were not profiled: means per "
        "configuration or knob and the best static choice then come from different samples; "
        "compare them with caution.": facts["coverage"] < 1,
        "Accuracy hardly depends on the configuration: choosing can save time, but not gain "
        "accuracy.": facts["config_dependent_share"] < NEXT_TO_NOTHING,
        "Latency is the same for every sample: these look like means per configuration, not "
        "measurements.": varies == 0,
        "Latency hardly differs between samples: the configuration alone determines the time.": (
            0 < varies < NEXT_TO_NOTHING
        ),
        "The oracle is hardly better than budget-aware static: choosing per input can gain next "
        "to nothing.": gains.max() < NEXT_TO_NOTHING,
        "No features: a policy sees only the budget, and cannot do better than budget-aware "
        "static.": not facts["features"],
    }
    for name, knob in facts["knobs"].items():
        alone = len(knob["values"]) < 2
        warnings[f"Knob {name} has only one value: there is nothing to choose."] = alone
        # half a point of accuracy, or a hundredth of the latency, is nothing
        idle = np.ptp(knob["accuracy"]) < 0.005
        idle = idle and np.ptp(knob["latency_ms"]) < 0.01 * max(knob["latency_ms"])
        warnings[f"Knob {name} changes neither accuracy nor latency on average."] = (
            idle and not alone
        )
    return [warning for warning, holds in warnings.items() if holds]

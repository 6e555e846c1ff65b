"""Gather the facts about a profile: its content, and how much a policy could gain on it.

Every number is taken over profiled cells only. The headroom is in-sample: the static configuration
is chosen on the samples that it is judged on, so it looks better than it is. `attainable` is what
quick policies gain out of fold over static, and the oracle, which knows the outcomes: the upper
bound on what a policy could gain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.texts import encoded_by, fit_encoders
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import judged_budgets, log_moments
from knobwise.envs.tables.cells import unread
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.experiments.evidence.profile_facts import configuration_rows, costs_of, difficulty_of
from knobwise.experiments.evidence.statistics import pareto_front
from knobwise.experiments.inspection.attainable import (
    attainable,
    is_scattered,
    learning_curve,
    oracle_of_halves,
    repeated_share,
    samples_of_setting,
)
from knobwise.experiments.inspection.checks import CHECKS, FAULT, findings_by_check

Facts = Mapping[str, Any]
"""What `inspect_table` returns."""
QUANTILES = (0.05, 0.5, 0.95)
"""The quantiles of latency for each configuration."""
FEWEST_REPEATED = 20
"""From fewer cells, unless they are most, nobody can tell how much measurements vary."""
EXAMPLES = 6
"""How many samples are given as examples."""


def inspect_table(
    table: ProfileTable,
    curve: bool = False,
    workers: Sequence[Facts] = (),
    budgets_ms: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the facts about a profile, as plain values for JSON.

    Args:
        table: the profile.
        curve: also estimate the learning curve, which takes minutes.
        workers: those that measured it, as `profile.json` notes them.
        budgets_ms: at which gains are estimated; None for `default_budgets`.

    Returns:
        - `name`, `digest`, `unit` of latencies, `notes` (of the reader), `workers`
        - what the profile holds, see `_contents`; how accuracies and latencies vary, see
          `_accuracies` and `_latencies`
        - `knobs`: means over the profiled cells with each value
        - `costs`: the further costs, whose means are `cost_usd_mean` in knobs and configurations
        - `headroom`: see `_headroom`; `default_budgets`: whether no others were given
        - `samples_of_setting`, `scattered`, `attainable`, `oracle_of_halves`: see
          `knobwise.experiments.inspection.attainable`
        - `learning_curve`: likewise; [] without `curve`
        - `configuration_means`: see `_configurations`; `pareto`: which of them are on the front
        - `examples`: samples from easy to hard, with the latency of their cheapest right answer
        - `findings`: what the checks notice, refused ones first, see `_findings`; `faults` and
          `warnings`: the same in sentences

    Raises:
        InputError: no budget, or one that is not positive.
    """
    if table.texts:
        table = _encoded(table)
    # digest and policies are those of the whole profile, which may have a first look
    whole = table
    table = unread(whole)
    means = _configurations(table)
    plane = pl.DataFrame(means).select("accuracy", "latency_ms")
    front = pareto_front(*(column.to_numpy() for column in plane)).nonzero()[0]
    judged_at = judged_budgets(table, budgets_ms)
    everything = torch.arange(table.num_samples)
    facts = {
        "name": table.name,
        "digest": whole.digest,
        "unit": table.unit,
        **_contents(table),
        **_accuracies(table),
        **_latencies(table),
        "knobs": _marginals(table),
        "costs": costs_of(table),
        "default_budgets": budgets_ms is None,
        "headroom": _headroom(table, judged_at),
        "samples_of_setting": samples_of_setting(table, everything),
        "scattered": is_scattered(table, everything),
        "attainable": attainable(whole, judged_at),
        "oracle_of_halves": oracle_of_halves(table, judged_at),
        "learning_curve": learning_curve(whole, judged_at) if curve else [],
        "configuration_means": means,
        "notes": list(table.notes),
        "workers": list(workers),
        "examples": _examples(table),
        "pareto": sorted(front.tolist(), key=lambda i: means[i]["latency_ms"]),
    }
    findings = _findings(whole, facts)
    faults = [each["text"] for each in findings if each["kind"] == FAULT]
    warnings = [each["text"] for each in findings if each["kind"] != FAULT]
    return facts | {"findings": findings, "faults": faults, "warnings": warnings}


def _contents(table: ProfileTable) -> dict[str, object]:
    """Return the numbers of `samples`, `configurations` and `clusters`, how many configurations
    there could be (`grid`), the `coverage`, which is the share of the cells that are profiled, the
    samples of the `datasets` and the widths of the `features`."""
    return {
        "samples": table.num_samples,
        "configurations": table.num_configurations,
        "grid": math.prod(table.knob_sizes),
        "coverage": float(table.mask.double().mean()),
        "datasets": dict(Counter(table.dataset_names)),
        "clusters": len(set(table.clusters)) or None,
        "features": {name: block.shape[1] for name, block in table.features.items()},
    }


def _accuracies(table: ProfileTable) -> dict[str, object]:
    """Return how much the accuracy of a sample depends on the configuration.

    Returns:
        - `config_dependent_share`: of the samples, whose accuracy differs between configurations
        - `fractional`: whether accuracies other than 0 and 1 occur
        - `accuracy_range`: a sample's highest accuracy minus its lowest, median over the samples
    """
    # NaN where a cell was not profiled
    accuracy = table.accuracy.double()
    differs = (accuracy - accuracy.nanmean(1, keepdim=True)).abs() > 1e-6
    known = accuracy[table.mask]
    return {
        "config_dependent_share": float(differs.any(1).double().mean()),
        "fractional": bool((torch.minimum(known, 1 - known) > 1e-6).any()),
        "accuracy_range": float(median_of(_range_of(accuracy))),
    }


def _latencies(table: ProfileTable) -> dict[str, object]:
    """Return how much latencies vary.

    Returns:
        - `median_latency_ms`: over all profiled cells
        - `latency_cv_within_configuration`: standard deviation / mean over the samples, mean over
          the configurations that were measured on several; None without any
        - `latency_jitter_within_cell`: standard deviation of ln latency over a cell's measurements,
          median over the cells; None if few cells were measured repeatedly
        - `repeated_share`: share of the cells that were measured more than once
        - `latency_spread_between_configurations`: standard deviation of ln latency over a
          sample's configurations, median over the samples
    """
    latency = table.latency_ms.double()
    mean_ms = latency.nanmean(0)
    deviation = (latency - mean_ms).square().nanmean(0).sqrt()
    several = table.mask.sum(0) > 1
    varies = (deviation / mean_ms.clamp_min(1e-9))[several]
    repeated = repeated_share(table)
    jitter = None
    if repeated > 0.5 or repeated * int(table.mask.sum()) >= FEWEST_REPEATED:
        jitter = _log_spread(table.measurements_ms)
    return {
        "median_latency_ms": float(median_of(table.latency_ms.flatten())),
        "latency_cv_within_configuration": float(varies.mean()) if len(varies) else None,
        "latency_jitter_within_cell": jitter,
        "repeated_share": repeated,
        "latency_spread_between_configurations": _log_spread(table.latency_ms),
    }


def _encoded(table: ProfileTable) -> ProfileTable:
    """Return a table whose texts are encoded as in training; without texts if it has too few
    samples to divide."""
    try:
        split = table.split()
    except InputError:
        return table
    return encoded_by(table, fit_encoders(table, split))


def _findings(table: ProfileTable, facts: Facts) -> list[dict[str, object]]:
    """Return what the checks notice: the `check`, its `kind` and what it looks for (`sentence`);
    what was found (`text`), how `sure` that is, and whether it is `refused`."""
    noticed = findings_by_check(table, facts)
    findings = []
    for check in CHECKS:
        about = {"check": check.name, "kind": check.kind, "sentence": check.sentence}
        for finding in noticed[check.name]:
            text = in_words(str(finding), table.unit)
            outcome = {"text": text, "sure": finding.sure, "refused": finding.refused}
            findings.append(about | outcome)
    return sorted(findings, key=lambda finding: not finding["refused"])


def _range_of(values: Tensor) -> Tensor:
    """Return the largest minus the smallest of each row, [n]; NaN is left out."""
    return values.nan_to_num(-torch.inf).amax(1) - values.nan_to_num(torch.inf).amin(1)


def _log_spread(latency_ms: Tensor) -> float | None:
    """Return the standard deviation of ln latency along the last axis, the median over all rows.

    A row needs at least two latencies; None if no row has them. NaN is left out.
    """
    # NaN where there is no measurement
    count = (~latency_ms.isnan()).sum(-1)
    variance = log_moments(latency_ms)[1] * count / (count - 1)
    spreads = variance[count > 1].sqrt()
    return float(median_of(spreads)) if len(spreads) else None


def _configurations(table: ProfileTable) -> list[dict[str, Any]]:
    """Return the means of every profiled configuration, how many samples it was profiled for, and
    the quantiles of its latency over these."""
    means = configuration_rows(table, torch.arange(table.num_samples))
    profiled = table.mask.any(0)
    samples = table.mask.sum(0)[profiled].tolist()
    # [3, C] → three numbers for each configuration
    quantiles = np.nanquantile(table.latency_ms[:, profiled].numpy(), QUANTILES, axis=0).T.tolist()
    rows: list[dict[str, Any]] = []
    for row, count, latencies in zip(means, samples, quantiles, strict=True):
        rows.append({**row, "samples": count, "latency_ms_quantiles": latencies})
    # further costs, under the names that results have
    for name, cost in table.costs.items():
        of_costs = cost.double()[:, profiled].nanmean(0).tolist()
        for about, mean in zip(rows, of_costs, strict=True):
            about[f"cost_{name}_mean"] = mean
    return rows


def _examples(table: ProfileTable) -> list[dict[str, object]]:
    """Return some samples, from easy to hard: a sample is harder if its fastest right answer takes
    longer."""
    needed_ms = difficulty_of(table.accuracy, table.latency_ms)
    answered = needed_ms.argsort()[: int(needed_ms.isfinite().sum())]
    places = np.linspace(0, len(answered) - 1, min(EXAMPLES, len(answered))).round()
    return [
        {"sample_id": table.sample_ids[row], "needed_ms": float(needed_ms[row])}
        for row in answered[places.astype(int)].tolist()
    ]


def _marginals(table: ProfileTable) -> dict[str, dict[str, list[Any]]]:
    """Return for each value of each knob the mean accuracy and latency over all profiled cells with
    this value."""
    accuracy = table.accuracy.double()
    latency = table.latency_ms.double()
    marginals = {}
    for k, knob in enumerate(table.knobs):
        # [C, V]: whether a configuration has a value
        has = torch.nn.functional.one_hot(table.configurations[:, k], len(knob.values)).double()
        cells = table.mask.double().sum(0) @ has
        marginals[knob.name] = {
            "values": list(knob.values),
            "accuracy": (accuracy.nansum(0) @ has / cells).tolist(),
            "latency_ms": (latency.nansum(0) @ has / cells).tolist(),
        }
        for name, cost in table.costs.items():
            known = (~cost.isnan()).double().sum(0) @ has
            mean = cost.double().nansum(0) @ has / known
            marginals[knob.name][f"cost_{name}_mean"] = mean.tolist()
    return marginals


def _headroom(table: ProfileTable, budgets_ms: Tensor) -> dict[str, list[float] | list[str]]:
    """Return for each budget, float [B], the utility of static and of the oracle, the share of
    samples that some configuration answers on time, and what static chooses."""
    rows = torch.arange(table.num_samples)
    static = fit_static(table, rows)
    by_static = evaluate_policy(static, table, rows, budgets_ms)
    by_oracle = evaluate_policy(Oracle(table, rows), table, rows, budgets_ms)
    return {
        "budgets_ms": budgets_ms.tolist(),
        "budget_aware_static": by_static.utility.double().mean(0).tolist(),
        "oracle": by_oracle.utility.double().mean(0).tolist(),
        "feasible": by_oracle.feasible.double().mean(0).tolist(),
        "static_choice": list(map(table.label, static.choose({}, budgets_ms.numpy()))),
    }


def mean_headroom(facts: Facts) -> tuple[float, ...]:
    """Return the mean utility over the budgets of static and of the oracle."""
    columns = pl.DataFrame(facts["headroom"])
    return columns.select(pl.mean("budget_aware_static", "oracle")).row(0)

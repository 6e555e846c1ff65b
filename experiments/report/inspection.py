"""`knobwise inspect`: the content of a profile, its faults, and how much a policy could gain on it.

Every number is taken over profiled cells only. The headroom is in-sample (the static configuration
is chosen on the samples that it is judged on) and the oracle knows the outcomes: it is only an
upper bound on what a policy could gain.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.envs.configurations.budgets import default_budgets, few_budgets, log_measured
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.report.words import policy_name, quantity, sentences
from knobwise.experiments.results.statistics import pareto_front

if TYPE_CHECKING:
    from rich.console import Console

QUANTILES = (0.05, 0.5, 0.95)
"""The quantiles of latency for each configuration."""
EXAMPLES = 6
"""How many samples are given as examples."""


def inspect_table(table: ProfileTable) -> dict[str, Any]:
    """Return the facts about a profile, as plain values for JSON.

    Returns:
        - `samples`, `configurations`, `grid`: how many there are, and how many configurations there
          could be
        - `coverage`: share of the cells that are profiled
        - `config_dependent_share`: share of the samples whose accuracy differs between
          configurations
        - `latency_cv_within_configuration`: standard deviation / mean over the samples, mean over
          the configurations
        - `latency_jitter_within_cell`: standard deviation of ln latency over a cell's measurements,
          median over the cells; None if each was measured once
        - `latency_spread_between_configurations`: standard deviation of ln latency over a sample's
          configurations, median over the samples
        - `knobs`: means over the profiled cells with each value
        - `headroom`: utility at each default budget, of the best static configuration and of the
          best one of each sample; `static_choices`, `feasible_share`
        - `configuration_means`, with the 5, 50 and 95 % quantiles of latency, and `pareto`
        - `examples`: samples with the latency of their cheapest right configuration, from easy to
          hard
        - `datasets`, `images`, `features`, `digest`, `notes` (of the reader), `warnings`
    """
    digest = table.digest
    table = table.without_first_look
    mask = table.mask
    accuracy = table.accuracy.nan_to_num()
    latency = table.latency_ms.nan_to_num()
    means = {"accuracy": _mean(accuracy, mask), "latency_ms": _mean(latency, mask)}
    front = pareto_front(*(values.numpy() for values in means.values()))
    lowest, highest = _range(accuracy.where(mask, torch.nan).T)
    facts: dict[str, Any] = {
        "name": table.name,
        "digest": digest,
        "samples": table.num_samples,
        "configurations": table.num_configurations,
        "grid": math.prod(table.knob_sizes),
        "coverage": float(mask.double().mean()),
        "config_dependent_share": float((highest - lowest > 1e-6).double().mean()),
        "latency_cv_within_configuration": _variation(latency, means["latency_ms"], mask),
        "latency_jitter_within_cell": _log_spread(table.measurements_ms),
        "latency_spread_between_configurations": _log_spread(table.latency_ms),
        "knobs": {
            knob.name: _marginal(table, k, accuracy, latency) for k, knob in enumerate(table.knobs)
        },
        **_headroom(table, accuracy),
        "configuration_means": _configuration_means(table, means),
        "datasets": dict(Counter(table.dataset_names)),
        "images": len(set(table.image_ids)) or None,
        "features": [_feature_facts(name, block) for name, block in table.features.items()],
        "notes": list(table.notes),
        "examples": _examples(table, accuracy),
        "pareto": [c for c in means["latency_ms"].argsort().tolist() if front[c]],
    }
    warnings = sentences("profile_warnings.txt.j2", **facts)
    return facts | {"warnings": warnings + few_budgets(default_budgets(table))}


def _configuration_means(table: ProfileTable, means: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return for each configuration its means over the profiled samples, their number, and the
    quantiles of its latency."""
    profiled = table.mask.sum(0)
    quantiles = np.nanquantile(table.latency_ms.numpy(), QUANTILES, axis=0).T.tolist()
    rows = []
    for c in range(table.num_configurations):
        row: dict[str, Any] = {"label": table.label(c), "knobs": table.configuration(c)}
        row["samples"] = int(profiled[c])
        row |= {name: float(values[c]) for name, values in means.items()}
        row["latency_ms_quantiles"] = quantiles[c]
        rows.append(row)
    return rows


def _feature_facts(name: str, block: Tensor) -> dict[str, Any]:
    """Return the width of a feature block, its share of missing values, and its number of constant
    columns."""
    lowest, highest = _range(block)
    missing = float(block.isnan().double().mean())
    constant = int((lowest >= highest).sum())
    return {"name": name, "width": block.shape[1], "missing": missing, "constant": constant}


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the profiled samples of each configuration: [N, C] → float64 [C]."""
    return (values.double() * mask).sum(0) / mask.sum(0)


def _variation(values: Tensor, means: Tensor, mask: Tensor) -> float:
    """Return standard deviation / mean over the profiled samples, as a mean over configurations."""
    deviation = ((values - means).square() * mask).sum(0).div(mask.sum(0)).sqrt()
    return float((deviation / means.clamp_min(1e-9)).mean())


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest known value of each column: float [n, d] → two float
    [d]."""
    return values.nan_to_num(nan=torch.inf).amin(0), values.nan_to_num(nan=-torch.inf).amax(0)


def _log_spread(latency_ms: Tensor) -> float | None:
    """Return the median of the standard deviations of ln latency along the last axis, over rows
    with at least two latencies; None if there is no such row. NaN is left out."""
    logs = log_measured(latency_ms)
    count = (~logs.isnan()).sum(-1)
    squares = (logs - logs.nanmean(-1, keepdim=True)).square().nansum(-1)
    spreads = (squares / (count - 1)).sqrt()[count > 1]
    if len(spreads):
        return float(median_of(spreads))
    return None


def _examples(table: ProfileTable, accuracy: Tensor) -> list[dict[str, Any]]:
    """Return some samples, from the one that is answered right soonest to the one that takes
    longest."""
    needed = table.latency_ms.where((accuracy >= 0.5) & table.mask, torch.inf).amin(1)
    known = needed.argsort()[: int(needed.isfinite().sum())].tolist()
    spaced = np.linspace(0, len(known) - 1, min(EXAMPLES, len(known))).round().astype(int).tolist()
    return [
        {"sample_id": table.sample_ids[known[i]], "needed_ms": float(needed[known[i]])}
        for i in spaced
    ]


def _marginal(
    table: ProfileTable, knob: int, accuracy: Tensor, latency: Tensor
) -> dict[str, list[Any]]:
    """Return mean accuracy and latency over all profiled cells with each value of a knob."""
    values = table.knobs[knob].values
    totals = torch.stack(
        [
            table.mask.double().sum(0),
            (accuracy.double() * table.mask).sum(0),
            (latency.double() * table.mask).sum(0),
        ]
    )
    sums = torch.zeros(3, len(values), dtype=torch.float64)
    cells, accuracy_sum, latency_sum = sums.index_add(1, table.configurations[:, knob], totals)
    return {
        "values": list(values),
        "accuracy": (accuracy_sum / cells).tolist(),
        "latency_ms": (latency_sum / cells).tolist(),
        "cells": cells.int().tolist(),
    }


def _headroom(table: ProfileTable, accuracy: Tensor) -> dict[str, Any]:
    """Return at each default budget the utility of the best static configuration and of the oracle,
    that configuration, and the share of samples that some configuration serves in time."""
    budgets = default_budgets(table).tolist()
    oracle = []
    choices = []
    feasible = []
    for budget in budgets:
        in_time = (table.latency_ms <= budget) & table.mask
        utility = accuracy * in_time
        per_configuration = _mean(utility, table.mask)
        best = int(per_configuration.argmax())
        oracle.append(float(utility.amax(1).double().mean()))
        feasible.append(float(in_time.any(1).double().mean()))
        choices.append(
            {
                "budget_ms": budget,
                "label": table.label(best),
                "knobs": table.configuration(best),
                "utility": float(per_configuration[best]),
                "satisfaction": float(_mean(in_time, table.mask)[best]),
                "samples": int(table.mask[:, best].sum()),
            }
        )
    static = [choice["utility"] for choice in choices]
    return {
        "headroom": {"budgets_ms": budgets, "budget_aware_static": static, "oracle": oracle},
        "static_choices": choices,
        "feasible_share": feasible,
    }


# -- for people ------------------------------------------------------------------------------------


def print_inspection(facts: Mapping[str, Any], console: Console) -> None:
    """Print the facts in words and three small tables; without colours and frames if this is no
    terminal."""
    bold = partial(console.print, style="bold", markup=False, highlight=False)
    bold(f"{facts['name']}  {facts['digest']}")
    print_lines(console, sentences("profile.txt.j2", **facts))
    for title, table in _tables(facts).items():
        bold(f"\n{title}")
        print_table(console, table.header, table.rows, range(len(table.header)))
    for title, lines in (("Warnings", facts["warnings"]), ("Notes of the reader", facts["notes"])):
        if lines:
            bold(f"\n{title}")
            print_lines(console, [f"- {line}" for line in lines])


def _tables(facts: Mapping[str, Any]) -> dict[str, Table]:
    """Return the three tables: title → cells."""
    per_budget = zip(
        facts["static_choices"], facts["headroom"]["oracle"], facts["feasible_share"], strict=True
    )
    budgets = [
        [
            quantity(static["budget_ms"]),
            f"{static['utility']:.3f}",
            f"{oracle:.3f}",
            f"{share:.1%}",
            static["label"],
        ]
        for static, oracle, share in per_budget
    ]
    knobs = []
    for name, knob in facts["knobs"].items():
        values = zip(knob["values"], knob["accuracy"], knob["latency_ms"], strict=True)
        for value, accuracy, latency in values:
            knobs.append([name, str(value), f"{accuracy:.3f}", quantity(latency)])
    front = [facts["configuration_means"][c] for c in facts["pareto"]]
    best = [
        [c["label"], f"{c['accuracy']:.3f}", quantity(c["latency_ms"]), f"{c['samples']:,}"]
        for c in front
    ]
    return {
        "Headroom per budget": Table(
            ["budget", "static", "oracle", "feasible", "best static configuration"], budgets
        ),
        "Knobs, means over all profiled cells": Table(
            ["knob", "value", "accuracy", "latency"], knobs
        ),
        "Pareto front: no other configuration is more accurate without being slower": Table(
            ["configuration", "accuracy", "latency", "samples"], best
        ),
    }


def write_inspection(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write the facts as a self-contained page with charts, and return its path."""
    from knobwise.experiments.report import charts, page

    names = {key: policy_name(key) for key in ("budget_aware_static", "oracle")}
    lines = pl.DataFrame(facts["headroom"]).rename({"budgets_ms": "budget_ms"} | names)
    lines = lines.unpivot(index="budget_ms", variable_name="policy", value_name="utility").unique(
        maintain_order=True
    )
    lines = lines.with_columns(name="policy")
    holes = facts["coverage"] < 1 or facts["grid"] > facts["configurations"]
    front = [facts["configuration_means"][c] for c in facts["pareto"]]
    spread = []
    for configuration in front:
        low, median, high = configuration["latency_ms_quantiles"]
        row = {"low": low, "value": median, "high": high}
        row["name"] = " · ".join(map(str, configuration["knobs"].values()))
        row["beside"] = f"{configuration['accuracy']:.1%} right"
        spread.append(row)
    return page.render_page(
        path,
        "inspection.html.j2",
        title=f"knobwise: profile {facts['name']}",
        facts=facts,
        tables=list(_tables(facts).values()),
        headroom=charts.by_budget(lines, "utility", "utility (0 to 1)", list(names.values())),
        plane=charts.plane(facts["configuration_means"]),
        knobs=charts.knob_effects(facts["knobs"]),
        latencies=charts.dots(pl.DataFrame(spread), "latency (ms)"),
        coverage=charts.coverage(_coverage(facts)) if holes else None,
        pictures=_pictures(facts),
        sentences=sentences("profile.txt.j2", **facts),
    )


def _pictures(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return picture (PNG as a data URI), question and latency needed of each example; only the
    built-in profile has any."""
    if facts["name"] != "builtin":
        return []
    from PIL import Image

    from knobwise.profiling.elastic.adapter import builtin_input

    pictures = []
    for example in facts["examples"]:
        question, pixels = builtin_input(example["sample_id"])
        file = io.BytesIO()
        Image.fromarray((255 * pixels).astype(np.uint8)).save(file, "PNG")
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        pictures.append((uri, question, quantity(example["needed_ms"])))
    return pictures


def _coverage(facts: Mapping[str, Any]) -> list[pl.DataFrame]:
    """Return the share that is profiled for every pair of the first three knobs, or for a single
    knob: a frame each, with the columns share and the knobs' names."""
    names = list(facts["knobs"])[:3]
    cells = []
    for configuration in facts["configuration_means"]:
        values = {name: configuration["knobs"][name] for name in names}
        cells.append(values | {"samples": configuration["samples"]})
    rows = pl.DataFrame(cells)
    pairs: list[tuple[str, ...]] = [*itertools.combinations(names, 2)] or [(names[0],)]
    frames = []
    for pair in pairs:
        sizes = [len(knob["values"]) for name, knob in facts["knobs"].items() if name not in pair]
        whole = facts["samples"] * math.prod(sizes)
        frames.append(
            rows.group_by(*pair, maintain_order=True).agg(share=pl.col("samples").sum() / whole)
        )
    return frames

"""The content of a profile, its faults, and how much a policy could gain on it.

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
EXAMPLES = 6


def inspect_table(table: ProfileTable) -> dict[str, Any]:
    """The facts about a profile, as plain values for JSON.

    `samples`, `configurations`, `coverage` (share of cells profiled), `config_dependent_share` (of
    samples: accuracy differs between configurations), `latency_cv_within_configuration` (mean over
    the configurations of standard deviation / mean over the samples), `latency_jitter_within_cell`
    (standard deviation of ln latency over a cell's measurements, median over the cells; None if
    each was measured once), `latency_spread_between_configurations` (the same over a sample's
    configurations, median over the samples), `knobs` (marginal means over profiled cells),
    `headroom` (utility per default budget: the best static configuration, and the best of each
    sample), `static_choices`, `feasible_share`, `configuration_means` with the 5, 50 and 95 %
    quantiles of latency and `pareto`, `examples` (samples with the latency of their cheapest right
    configuration, from easy to hard), `datasets`, `features`, `digest`, `notes` (the reader's),
    `warnings` (ours).
    """
    digest = table.digest
    table = table.without_first_look
    mask = table.mask
    accuracy = table.accuracy.nan_to_num()
    latency = table.latency_ms.nan_to_num()
    profiled = mask.sum(0)
    means = {"accuracy": _mean(accuracy, mask), "latency_ms": _mean(latency, mask)}
    spread = ((latency - means["latency_ms"]).square() * mask).sum(0).div(profiled).sqrt()
    front = pareto_front(*(values.numpy() for values in means.values()))
    lowest, highest = _range(accuracy.where(mask, torch.nan).T)
    quantiles = np.nanquantile(table.latency_ms.numpy(), QUANTILES, axis=0).T.tolist()
    facts: dict[str, Any] = {
        "name": table.name,
        "digest": digest,
        "samples": table.num_samples,
        "configurations": table.num_configurations,
        "grid": math.prod(table.knob_sizes),
        "coverage": float(mask.double().mean()),
        "config_dependent_share": float((highest - lowest > 1e-6).double().mean()),
        "latency_cv_within_configuration": float(
            (spread / means["latency_ms"].clamp_min(1e-9)).mean()
        ),
        "latency_jitter_within_cell": _log_spread(table.measurements_ms),
        "latency_spread_between_configurations": _log_spread(table.latency_ms),
        "knobs": {
            knob.name: _marginal(table, place, accuracy, latency)
            for place, knob in enumerate(table.knobs)
        },
        **_headroom(table, accuracy),
        "configuration_means": [
            {"label": table.label(c), "knobs": table.configuration(c), "samples": int(profiled[c])}
            | {name: float(values[c]) for name, values in means.items()}
            | {"latency_ms_quantiles": quantiles[c]}
            for c in range(table.num_configurations)
        ],
        "datasets": dict(Counter(table.dataset_names)),
        "images": len(set(table.image_ids)) or None,
        "features": [
            {"name": name, "width": block.shape[1], "missing": float(block.isnan().double().mean())}
            | {"constant": int(torch.ge(*_range(block)).sum())}
            for name, block in table.features.items()
        ],
        "notes": list(table.notes),
        "examples": _examples(table, accuracy),
        "pareto": [c for c in means["latency_ms"].argsort().tolist() if front[c]],
    }
    return facts | {
        "warnings": sentences("profile_warnings.txt.j2", **facts)
        + few_budgets(default_budgets(table))
    }


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the profiled samples of each configuration: [N, C] → float64 [C]."""
    return (values.double() * mask).sum(0) / mask.sum(0)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest known value of each column: float [n, d] → two float [d]."""
    return values.nan_to_num(nan=torch.inf).amin(0), values.nan_to_num(nan=-torch.inf).amax(0)


def _log_spread(latency_ms: Tensor) -> float | None:
    """The median of the standard deviations of ln latency along the last axis, over rows with at
    least two latencies; None if there is no such row. NaN is left out."""
    logs = log_measured(latency_ms)
    count = (~logs.isnan()).sum(-1)
    squares = (logs - logs.nanmean(-1, keepdim=True)).square().nansum(-1)
    spreads = (squares / (count - 1)).sqrt()[count > 1]
    if len(spreads):
        return float(median_of(spreads))
    return None


def _examples(table: ProfileTable, accuracy: Tensor) -> list[dict[str, Any]]:
    """Samples from the one that a configuration answers right soonest to the one that needs
    longest."""
    needed = table.latency_ms.where((accuracy >= 0.5) & table.mask, torch.inf).amin(1)
    known = needed.argsort()[: int(needed.isfinite().sum())].tolist()
    places = np.linspace(0, len(known) - 1, min(EXAMPLES, len(known))).round().astype(int).tolist()
    return [
        {"sample_id": table.sample_ids[known[i]], "needed_ms": float(needed[known[i]])}
        for i in places
    ]


def _marginal(
    table: ProfileTable, place: int, accuracy: Tensor, latency: Tensor
) -> dict[str, list[Any]]:
    """Mean accuracy and latency over all profiled cells that have each value of one knob."""
    values = table.knobs[place].values
    totals = torch.stack(
        [
            table.mask.double().sum(0),
            *((x.double() * table.mask).sum(0) for x in (accuracy, latency)),
        ]
    )
    cells, *sums = torch.zeros(3, len(values), dtype=torch.float64).index_add(
        1, table.configurations[:, place], totals
    )
    means = {
        name: (total / cells).tolist()
        for name, total in zip(("accuracy", "latency_ms"), sums, strict=True)
    }
    return {"values": list(values), **means, "cells": cells.int().tolist()}


def _headroom(table: ProfileTable, accuracy: Tensor) -> dict[str, Any]:
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
            {"budget_ms": budget, "label": table.label(best), "knobs": table.configuration(best)}
            | {
                "utility": float(per_configuration[best]),
                "satisfaction": float(_mean(in_time, table.mask)[best]),
            }
            | {"samples": int(table.mask[:, best].sum())}
        )
    static = [choice["utility"] for choice in choices]
    return {
        "headroom": {"budgets_ms": budgets, "budget_aware_static": static, "oracle": oracle},
        "static_choices": choices,
        "feasible_share": feasible,
    }


# -- for people ------------------------------------------------------------------------------------


def print_inspection(facts: Mapping[str, Any], console: Console) -> None:
    """The facts in words and three small tables; without colours and frames if this is no
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
    knobs = [
        [name, str(value), f"{accuracy:.3f}", quantity(latency)]
        for name, knob in facts["knobs"].items()
        for value, accuracy, latency in zip(
            knob["values"], knob["accuracy"], knob["latency_ms"], strict=True
        )
    ]
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
    spread = [
        dict(zip(("low", "value", "high"), each["latency_ms_quantiles"], strict=True))
        | {
            "name": " · ".join(map(str, each["knobs"].values())),
            "beside": f"{each['accuracy']:.1%} right",
        }
        for each in front
    ]
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
    """Picture (PNG as a data URI), question and latency needed of the examples; only the built-in
    profile has any."""
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
    """Per pair of knobs (first three knobs; or the one knob alone): x, y, share, and the knobs'
    names as columns."""
    names = list(facts["knobs"])[:3]
    rows = pl.DataFrame(
        [
            {n: c["knobs"][n] for n in names} | {"samples": c["samples"]}
            for c in facts["configuration_means"]
        ]
    )
    frames = []
    for pair in itertools.combinations(names, 2) if len(names) > 1 else [(names[0],)]:
        sizes = [len(knob["values"]) for name, knob in facts["knobs"].items() if name not in pair]
        whole = facts["samples"] * math.prod(sizes)
        frames.append(
            rows.group_by(*pair, maintain_order=True).agg(share=pl.col("samples").sum() / whole)
        )
    return frames

"""`knobwise inspect`: the content of a profile, its faults, and how much a policy could gain on it;
the content of the log of a deployed controller.

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
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console
from torch import Tensor

from knobwise.agents.learning.logged import read_log
from knobwise.envs.configurations.budgets import default_budgets, few_budgets, log_measured
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.experiments.report.choice_sentences import setting
from knobwise.experiments.report.tables import (
    Folded,
    Table,
    print_lines,
    print_sections,
    print_table,
    table_of,
)
from knobwise.experiments.report.words import listed, number, points, policy_name, quantity
from knobwise.experiments.results.statistics import pareto_front

Facts = Mapping[str, Any]
"""What `inspect_table` or `inspect_log` returns."""
QUANTILES = (0.05, 0.5, 0.95)
"""The quantiles of latency for each configuration."""
LOGGED = ("met", "accuracy", "choice", "best", "controller")
"""The columns of a log that shares are taken of."""
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
    # the digest is that of the whole profile
    digest = table.digest
    table = table.without_first_look
    # NaN where a cell was not profiled
    accuracy = table.accuracy.double().where(table.mask, torch.nan)
    latency = table.latency_ms.double().where(table.mask, torch.nan)
    means = {"accuracy": accuracy.nanmean(0), "latency_ms": latency.nanmean(0)}
    front = pareto_front(*(values.numpy() for values in means.values()))
    lowest, highest = _range(accuracy.T)
    deviation = (latency - means["latency_ms"]).square().nanmean(0).sqrt()
    facts = {
        "name": table.name,
        "digest": digest,
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
        **_headroom(table, accuracy, latency),
        "configuration_means": _configuration_means(table, means),
        "datasets": dict(Counter(table.dataset_names)),
        "images": len(set(table.image_ids)) or None,
        "features": [_feature_facts(name, block) for name, block in table.features.items()],
        "notes": list(table.notes),
        "examples": _examples(table, accuracy),
        "pareto": [c for c in means["latency_ms"].argsort().tolist() if front[c]],
    }
    return facts | {"warnings": _warnings(facts) + few_budgets(default_budgets(table))}


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
    # inf where no configuration is right
    needed = table.latency_ms.where((accuracy >= 0.5) & table.mask, torch.inf).amin(1)
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


def _headroom(table: ProfileTable, accuracy: Tensor, latency: Tensor) -> dict[str, Any]:
    """Return at each default budget what the best static configuration is, its utility, that of the
    oracle, and the share of samples that some configuration answers on time."""
    headroom: dict[str, list[float]] = {"budgets_ms": [], "budget_aware_static": [], "oracle": []}
    choices = []
    feasible = []
    for budget in default_budgets(table).tolist():
        # [N, C], NaN where a cell was not profiled
        in_time = (latency <= budget).double().where(table.mask, torch.nan)
        utility = accuracy * in_time
        means = utility.nanmean(0)
        best = int(means.argmax())
        headroom["budgets_ms"].append(budget)
        headroom["budget_aware_static"].append(float(means[best]))
        headroom["oracle"].append(float(utility.nan_to_num().amax(1).mean()))
        feasible.append(float(in_time.nan_to_num().amax(1).mean()))
        choices.append(
            {
                "budget_ms": budget,
                "label": table.label(best),
                "knobs": table.configuration(best),
                "utility": float(means[best]),
                "satisfaction": float(in_time[:, best].nanmean()),
                "samples": int(table.mask[:, best].sum()),
            }
        )
    return {"headroom": headroom, "static_choices": choices, "feasible_share": feasible}


# -- for people ------------------------------------------------------------------------------------

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
    for block in facts["features"]:
        name = f"Features {block['name']}"
        missing = f"{name}: {number(block['missing'], '.1%')} of the values are missing."
        warnings[missing] = block["missing"] > 0
        constant = f"{name}: {block['constant']} of {block['width']} columns never vary."
        warnings[constant] = block["constant"] > 0
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


def _sentences(facts: Facts) -> list[str]:
    """Say what the profile holds, and what choosing per input could gain."""
    counts = ", ".join(f"{name} {count:,}" for name, count in facts["datasets"].items())
    widths = ", ".join(f"{block['name']} ({block['width']})" for block in facts["features"])
    lines = [
        f"{facts['samples']:,} samples × {facts['configurations']} configurations (of "
        f"{facts['grid']} combinations of knob values); {number(facts['coverage'], '.1%')} of the "
        f"cells are profiled. Samples by data set: {counts}.",
        "Accuracy depends on the configuration for "
        f"{number(facts['config_dependent_share'], '.1%')} of the samples. Within one "
        "configuration latency varies by "
        f"{number(facts['latency_cv_within_configuration'], '.0%')} between samples (standard "
        "deviation / mean).",
    ]
    # cells that were measured more than once show how much a measurement varies
    jitter = facts["latency_jitter_within_cell"]
    if jitter is not None:
        spread = number(facts["latency_spread_between_configurations"], ".0%")
        lines.append(
            "Measurements of the same sample and configuration vary by "
            f"{number(jitter, '.1%')}, the configurations of a sample by {spread} "
            "(standard deviation of ln latency, median)."
        )
    static, oracle = _mean_headroom(facts)
    lines.append(
        "Mean over the default budgets: the best static choice has utility "
        f"{number(static, '.3f')}, the oracle {number(oracle, '.3f')}. Choosing per input could "
        f"gain {number(oracle - static, '.3f')} at most; both are measured on these same samples."
    )
    return [*lines, f"Features: {widths or 'none'}."]


def _mean_headroom(facts: Facts) -> list[float]:
    """Return the mean utility over the budgets of static and of the oracle."""
    headroom = facts["headroom"]
    return [float(np.mean(headroom[key])) for key in ("budget_aware_static", "oracle")]


def print_inspection(facts: Facts, console: Console) -> None:
    """Print the sentences and tables of the page; outside a terminal without colours and frames."""
    print_lines(console, [f"{facts['name']}  {facts['digest']}"])
    print_sections(console, _sections(facts, {}))


def _sections(facts: Facts, figures: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the page, heading → blocks, with these figures, or with none for a terminal."""
    per_budget = zip(
        facts["static_choices"], facts["headroom"]["oracle"], facts["feasible_share"], strict=True
    )
    budgets = [
        {
            "budget": quantity(static["budget_ms"]),
            "static": f"{static['utility']:.3f}",
            "oracle": f"{oracle:.3f}",
            "feasible": f"{feasible:.1%}",
            "best static configuration": static["label"],
        }
        for static, oracle, feasible in per_budget
    ]
    knobs = []
    for name, knob in facts["knobs"].items():
        for i, value in enumerate(knob["values"]):
            line = {"knob": name, "value": str(value), "accuracy": f"{knob['accuracy'][i]:.3f}"}
            knobs.append(line | {"latency": quantity(knob["latency_ms"][i])})
    best = [
        {
            "configuration": mean["label"],
            "accuracy": f"{mean['accuracy']:.3f}",
            "latency": quantity(mean["latency_ms"]),
            "samples": f"{mean['samples']:,}",
        }
        for mean in _front(facts)
    ]
    pareto = "Pareto front: no other configuration is more accurate without being slower"
    tables = {
        "Headroom": Folded("Headroom per budget", [table_of(budgets)]),
        "What the profile holds": _sentences(facts),
        "Warnings and notes": facts["warnings"] + facts["notes"],
        "Samples": None,
        "Accuracy and latency": Folded(pareto, [table_of(best)]),
        "Latency distributions": None,
        "Effect of each knob": Folded("Means over all profiled cells", [table_of(knobs)]),
        "Coverage": None,
    }
    # a figure stands above its numbers
    return {name: [*figures.get(name, []), block] for name, block in tables.items()}


def _front(facts: Facts) -> list[Facts]:
    """Return the means of the configurations that no other beats."""
    return [facts["configuration_means"][c] for c in facts["pareto"]]


def write_inspection(facts: Facts, path: str | Path) -> Path:
    """Write the facts as a self-contained page with charts, and return its path."""
    from knobwise.experiments.report.page import render_page

    static, oracle = _mean_headroom(facts)
    tiles = [
        (
            f"{facts['samples']:,} × {facts['configurations']:,}",
            "samples × configurations",
            f"{facts['coverage']:.1%} of the cells profiled",
        ),
        (
            f"{facts['config_dependent_share']:.0%}",
            "of the samples need choosing",
            "their accuracy depends on the configuration",
        ),
        (
            f"{points(oracle - static)} points",
            "of utility to gain at most",
            "oracle against the best fixed configuration for each budget",
        ),
    ]
    return render_page(
        path,
        "knobwise profile",
        facts["name"],
        _sections(facts, _figures(facts)),
        facts=[facts["digest"]],
        tiles=tiles,
    )


def _figures(facts: Facts) -> dict[str, list[Any]]:
    """Draw the figures of the page, heading → blocks; that of the coverage only where there are
    holes."""
    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import Figure

    keys = ["budget_aware_static", "oracle"]
    names = list(map(policy_name, keys))
    headroom = pl.DataFrame(facts["headroom"]).rename(dict(zip(keys, names, strict=True)))
    utility = headroom.rename({"budgets_ms": "budget_ms"}).unpivot(
        names, index="budget_ms", variable_name="policy", value_name="utility"
    )
    utility = utility.with_columns(name="policy").unique(maintain_order=True)
    spread = []
    # a line from the fastest to the slowest samples, a dot at the median
    for configuration in _front(facts):
        low, median, high = configuration["latency_ms_quantiles"]
        values = " · ".join(map(str, configuration["knobs"].values()))
        name = f"{values}: {configuration['accuracy']:.1%} right"
        spread.append({"name": name, "low": low, "value": median, "high": high})
    figures = {
        "Headroom": Figure(
            charts.by_budget(utility, "utility", "utility (0 to 1)", names),
            "Utility is the accuracy of an answer that is on time, and 0 for a late one. Both "
            "lines are measured on the samples they were chosen on: a policy gets less than the "
            "oracle.",
        ),
        "Accuracy and latency": Figure(
            charts.plane(facts["configuration_means"]),
            "Each dot is one configuration; no other beats those on the dashed line.",
        ),
        "Latency distributions": Figure(
            charts.dots(pl.DataFrame(spread), "latency (ms)"),
            "Of the configurations on the dashed line above, named by their "
            f"{listed(list(facts['knobs']))}: the median over the samples, and a line from the "
            "fastest 5% to the slowest 5%.",
        ),
        "Effect of each knob": Figure(
            charts.knob_effects(facts["knobs"]),
            "Means over all profiled cells with this value.",
            columns=2,
        ),
    }
    if facts["coverage"] < 1 or facts["grid"] > facts["configurations"]:
        figures["Coverage"] = Figure(
            [charts.coverage(frame) for frame in _coverage(facts)],
            "Share of all samples × combinations with these values that were profiled; blank: "
            "none.",
        )
    return {"Samples": _pictures(facts)} | {name: [figures[name]] for name in figures}


def _pictures(facts: Facts) -> list[Any]:
    """Return the examples as pictures with question and latency needed; only the built-in profile
    has any."""
    if facts["name"] != "builtin":
        return []
    from markupsafe import Markup
    from PIL import Image

    from knobwise.profiling.elastic.adapter import builtin_input

    pictures = Markup("")
    cell = Markup('<div><img src="{}" alt="{}"><small>{}<br>{}</small></div>')
    for example in facts["examples"]:
        question, pixels = builtin_input(example["sample_id"])
        file = io.BytesIO()
        Image.fromarray((255 * pixels).astype(np.uint8)).save(file, "PNG")
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        pictures += cell.format(uri, question, question, quantity(example["needed_ms"]))
    return [
        "From easy to hard: below each picture its question and the latency of the cheapest "
        "configuration that answers it right.",
        Markup("<div class=samples>{}</div>").format(pictures),
    ]


def _coverage(facts: Facts) -> list[pl.DataFrame]:
    """Return the share that is profiled for every pair of the first three knobs, or for a single
    knob: a frame each, with the columns share and the knobs' names."""
    names = list(facts["knobs"])[:3]
    means = facts["configuration_means"]
    counts = [row["knobs"] | {"share": row["samples"]} for row in means]
    rows = pl.DataFrame(counts, schema=[*names, "share"])
    frames = []
    for pair in itertools.combinations(names, min(2, len(names))):
        # how often a pair of values could have been profiled
        sizes = [len(facts["knobs"][name]["values"]) for name in pair]
        whole = facts["samples"] * facts["grid"] / math.prod(sizes)
        cells = rows.group_by(*pair, maintain_order=True)
        frames.append(cells.agg(pl.col("share").sum() / whole))
    return frames


# -- a log -----------------------------------------------------------------------------------------


def inspect_log(folder: str) -> dict[str, Any]:
    """Return the facts about a log, as plain values for JSON.

    Returns:
        `requests`: their number. `on_time`, `labelled`, `explored`: shares of them, the last of
        those that were not answered by the best choice. `accuracy`: mean over the labelled.
        `configurations`: label → requests. `controllers`: digest → requests. `set_aside`: reason →
        rows.

    Raises:
        InputError: there is no log in the folder.
    """
    log = read_log(folder)
    rows = pl.DataFrame(log.rows, schema=dict.fromkeys(LOGGED), infer_schema_length=None)
    labelled = pl.col("accuracy").is_not_null()
    shares = rows.select(
        on_time=pl.mean("met"),
        labelled=labelled.mean(),
        explored=(pl.col("choice") != pl.col("best")).mean(),
    )
    return {
        "log": folder,
        "requests": len(rows),
        # an empty log has shares of 0
        **shares.fill_null(0.0).row(0, named=True),
        "accuracy": rows["accuracy"].mean(),
        "configurations": dict(Counter(setting(row["knobs"]) for row in log.rows).most_common()),
        "controllers": dict(Counter(rows["controller"])),
        "set_aside": dict(log.aside),
    }


def print_log(facts: Facts, console: Console) -> None:
    """Print the facts in words and a table."""
    total = facts["requests"]
    lines = [
        f"{facts['log']}: {total:,} requests by {len(facts['controllers'])} controllers",
        f"{facts['on_time']:.1%} on time, {facts['labelled']:.1%} labelled, of which "
        f"{number(facts['accuracy'], '.1%')} are right, {facts['explored']:.1%} explored",
    ]
    for reason, count in sorted(facts["set_aside"].items()):
        lines.append(f"{count:,} set aside: {reason}")
    print_lines(console, lines)
    used = facts["configurations"].items()
    cells = [[label, f"{count:,}", f"{count / total:.1%}"] for label, count in used]
    print_table(console, Table(["configuration", "requests", "share"], cells))

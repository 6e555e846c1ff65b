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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.learning.logged import read_log
from knobwise.envs.configurations.budgets import default_budgets, few_budgets, log_measured
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.report.words import listed, number, points, policy_name, quantity
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
    # the digest is that of the whole profile
    digest = table.digest
    table = table.without_first_look
    # NaN cells count nowhere: the mask is False there
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
    return facts | {"warnings": _warnings(facts) + few_budgets(default_budgets(table))}


def _configuration_means(table: ProfileTable, means: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return for each configuration its means over the profiled samples, their number, and the
    quantiles of its latency."""
    profiled = table.mask.sum(0)
    # [3, C] → C lists
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
    # NaN where there is no measurement
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
    # inf where no configuration is right
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
    # [3, C]: cells, and the sums of accuracy and latency
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
        # [N, C]
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

NEXT_TO_NOTHING = 0.02
"""A smaller share or variation counts as next to nothing."""


def _warnings(facts: Mapping[str, Any]) -> list[str]:
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


def _sentences(facts: Mapping[str, Any]) -> list[str]:
    """Say what the profile holds, and what choosing per input could gain."""
    datasets = ""
    if len(facts["datasets"]) > 1:
        counts = (f"{count} of {name}" for name, count in facts["datasets"].items())
        datasets = f" ({', '.join(counts)})"
    grid = ""
    if facts["grid"] != facts["configurations"]:
        grid = f" (of {facts['grid']} combinations of knob values)"
    varies = number(facts["latency_cv_within_configuration"], ".0%")
    lines = [
        f"{facts['samples']:,} samples{datasets} × {facts['configurations']} configurations{grid}; "
        f"{number(facts['coverage'], '.1%')} of the cells are profiled.",
        "Accuracy depends on the configuration for "
        f"{number(facts['config_dependent_share'], '.1%')} of the samples. Within one "
        f"configuration latency varies by {varies} between samples (standard deviation / mean).",
    ]
    # cells that were measured more than once show how much a measurement varies
    jitter = facts["latency_jitter_within_cell"]
    spread = facts["latency_spread_between_configurations"]
    if jitter is not None and spread is not None:
        lines.append(
            "Measurements of the same sample and configuration vary by "
            f"{number(jitter, '.1%')}, the configurations of a sample by {number(spread, '.0%')} "
            "(standard deviation of ln latency, median)."
        )
    static, oracle = _mean_headroom(facts)
    lines.append(
        "Mean over the default budgets: the best static choice has utility "
        f"{number(static, '.3f')}, the oracle {number(oracle, '.3f')}. Choosing per input could "
        f"gain {number(oracle - static, '.3f')} at most; both are measured on these same samples."
    )
    if blocks := [f"{block['name']} ({block['width']})" for block in facts["features"]]:
        lines.append(f"Features: {', '.join(blocks)}.")
    return lines


def _mean_headroom(facts: Mapping[str, Any]) -> list[float]:
    """Return the mean utility over the budgets of static and of the oracle."""
    headroom = facts["headroom"]
    return [float(np.mean(headroom[key])) for key in ("budget_aware_static", "oracle")]


def print_inspection(facts: Mapping[str, Any], console: Console) -> None:
    """Print the facts in words and three small tables; without colours and frames if this is no
    terminal."""
    bold = partial(console.print, style="bold", markup=False, highlight=False)
    bold(f"{facts['name']}  {facts['digest']}")
    print_lines(console, _sentences(facts))
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
    budgets = []
    for static, oracle, share in per_budget:
        utilities = [f"{static['utility']:.3f}", f"{oracle:.3f}", f"{share:.1%}"]
        budgets.append([quantity(static["budget_ms"]), *utilities, static["label"]])
    knobs = []
    for name, knob in facts["knobs"].items():
        values = zip(knob["values"], knob["accuracy"], knob["latency_ms"], strict=True)
        for value, accuracy, latency in values:
            knobs.append([name, str(value), f"{accuracy:.3f}", quantity(latency)])
    best = []
    for mean in _front(facts):
        means = [f"{mean['accuracy']:.3f}", quantity(mean["latency_ms"])]
        best.append([mean["label"], *means, f"{mean['samples']:,}"])
    headers = {
        "Headroom per budget": [
            "budget",
            "static",
            "oracle",
            "feasible",
            "best static configuration",
        ],
        "Knobs, means over all profiled cells": ["knob", "value", "accuracy", "latency"],
        "Pareto front: no other configuration is more accurate without being slower": [
            *("configuration", "accuracy", "latency", "samples")
        ],
    }
    rows = (budgets, knobs, best)
    return {
        title: Table(header, cells)
        for (title, header), cells in zip(headers.items(), rows, strict=True)
    }


def _front(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the means of the configurations that no other beats."""
    return [facts["configuration_means"][c] for c in facts["pareto"]]


def write_inspection(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write the facts as a self-contained page with charts, and return its path."""
    from knobwise.experiments.report.page import Folded, render_page

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
    figures = _figures(facts)
    folded = [Folded("The numbers", [table]) for table in _tables(facts).values()]
    sections = {
        "Headroom": [figures["Headroom"], folded[0]],
        "What the profile holds": [_sentences(facts)],
        "Warnings and notes": [facts["warnings"] + facts["notes"]],
        "Samples": _pictures(facts),
        "Accuracy and latency": [figures["Accuracy and latency"], folded[2]],
        "Latency distributions": [figures["Latency distributions"]],
        "Effect of each knob": [figures["Effect of each knob"], folded[1]],
        "Coverage": [figures.get("Coverage")],
    }
    return render_page(
        path, "knobwise profile", facts["name"], sections, facts=[facts["digest"]], tiles=tiles
    )


def _figures(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the figures of the page; that of the coverage only where there are holes."""
    from knobwise.experiments.report import charts
    from knobwise.experiments.report.page import Figure

    names = {key: policy_name(key) for key in ("budget_aware_static", "oracle")}
    lines = pl.DataFrame(facts["headroom"]).rename({"budgets_ms": "budget_ms"} | names)
    lines = lines.unpivot(index="budget_ms", variable_name="policy", value_name="utility").unique(
        maintain_order=True
    )
    lines = lines.with_columns(name="policy")
    spread = []
    # a line from the fastest to the slowest samples, a dot at the median
    for configuration in _front(facts):
        low, median, high = configuration["latency_ms_quantiles"]
        row = {"low": low, "value": median, "high": high}
        row["name"] = " · ".join(map(str, configuration["knobs"].values()))
        row["beside"] = f"{configuration['accuracy']:.1%} right"
        spread.append(row)
    figures = {
        "Headroom": Figure(
            charts.by_budget(lines, "utility", "utility (0 to 1)", list(names.values())),
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
            charts.coverage(_coverage(facts)),
            "Share of all samples × combinations with these values that were profiled; blank: "
            "none.",
        )
    return figures


def _pictures(facts: Mapping[str, Any]) -> list[Any]:
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
        # combinations of all other knobs
        sizes = [len(knob["values"]) for name, knob in facts["knobs"].items() if name not in pair]
        whole = facts["samples"] * math.prod(sizes)
        frames.append(
            rows.group_by(*pair, maintain_order=True).agg(share=pl.col("samples").sum() / whole)
        )
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
    rows = log.rows
    # an empty log has shares of 0
    count = max(len(rows), 1)
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    labels = []
    for row in rows:
        labels.append(", ".join(f"{name}={value}" for name, value in row["knobs"].items()))
    return {
        "log": folder,
        "requests": len(rows),
        "on_time": sum(row["met"] for row in rows) / count,
        "labelled": len(accuracies) / count,
        "explored": sum(row["choice"] != row["best"] for row in rows) / count,
        "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "configurations": dict(Counter(labels).most_common()),
        "controllers": dict(Counter(row["controller"] for row in rows)),
        "set_aside": dict(log.aside),
    }


def print_log(facts: Mapping[str, Any], console: Console) -> None:
    """Print the facts in words and a table."""
    accuracy = ""
    if facts["accuracy"] is not None:
        accuracy = f", of which {facts['accuracy']:.1%} are right"
    lines = [
        f"{facts['log']}: {facts['requests']:,} requests by {len(facts['controllers'])} "
        "controllers",
        f"{facts['on_time']:.1%} on time, {facts['labelled']:.1%} labelled{accuracy}, "
        f"{facts['explored']:.1%} explored",
    ]
    for reason, count in sorted(facts["set_aside"].items()):
        lines.append(f"{count:,} set aside: {reason}")
    print_lines(console, lines)
    total = facts["requests"]
    used = facts["configurations"].items()
    cells = [[label, f"{count:,}", f"{count / total:.1%}"] for label, count in used]
    print_table(console, ["configuration", "requests", "share"], cells, range(3))

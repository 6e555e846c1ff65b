"""What is in a profile, what is wrong with it, and how much a policy could gain on it.

Every number is taken over profiled cells only. The headroom is in-sample (the static configuration is chosen on the
samples that it is judged on) and the oracle knows the outcomes: it bounds what a policy could gain, no more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable

if TYPE_CHECKING:
    from rich.console import Console

FEW_SAMPLES = 200
LITTLE = 0.02
"""Shares, spreads and gains below this count as next to nothing."""


def inspect_table(table: ProfileTable) -> dict[str, Any]:
    """The facts about a profile, as plain values for JSON.

    `samples`, `configurations`, `coverage` (share of cells profiled), `config_dependent_share` (of samples: accuracy
    differs between configurations), `latency_cv_within_configuration` (mean over the configurations of standard
    deviation / mean over the samples), `knobs` (marginal means over profiled cells), `headroom` (utility per default
    budget: the best static configuration, and the best of each sample), `static_choices`, `feasible_share`,
    `configuration_means` with `pareto`, `datasets`, `features`, `digest`, `notes` (the reader's), `warnings` (ours).
    """
    mask, accuracy, latency = table.mask, table.accuracy.nan_to_num(), table.latency_ms.nan_to_num()
    profiled = mask.sum(0)
    means = {"accuracy": _mean(accuracy, mask), "latency_ms": _mean(latency, mask)}
    spread = ((latency - means["latency_ms"]).square() * mask).sum(0).div(profiled).sqrt()
    variation = (spread / means["latency_ms"].clamp_min(1e-9)).mean()
    lowest = accuracy.masked_fill(~mask, torch.inf).amin(1)
    depends = accuracy.masked_fill(~mask, -torch.inf).amax(1) - lowest > 1e-6
    facts: dict[str, Any] = {
        "name": table.name,
        "digest": table.digest,
        "samples": table.num_samples,
        "configurations": table.num_configurations,
        "grid": _product(table.knob_sizes),
        "coverage": float(mask.double().mean()),
        "config_dependent_share": float(depends.double().mean()),
        "latency_cv_within_configuration": float(variation),
        "knobs": {knob.name: _marginal(table, place, accuracy, latency) for place, knob in enumerate(table.knobs)},
        **_headroom(table, accuracy),
        "configuration_means": [
            {"label": table.label(c), "knobs": table.configuration(c), "samples": int(profiled[c])}
            | {name: float(values[c]) for name, values in means.items()}
            for c in range(table.num_configurations)
        ],
        "datasets": dict(Counter(table.dataset_names)),
        "images": len(set(table.image_ids)) or None,
        "features": [
            {"name": name, "width": block.shape[1], "missing": float(block.isnan().double().mean())}
            | {"constant": int(_constant(block).sum())}
            for name, block in table.features.items()
        ],
        "notes": list(table.notes),
    }
    facts["pareto"] = _pareto(means["accuracy"], means["latency_ms"])
    facts["warnings"] = _warnings(facts)
    return facts


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the profiled samples of each configuration: [N, C] → float64 [C]."""
    return (values.double() * mask).sum(0) / mask.sum(0)


def _marginal(table: ProfileTable, place: int, accuracy: Tensor, latency: Tensor) -> dict[str, list[Any]]:
    """Mean accuracy and latency over all profiled cells that have each value of one knob."""
    values = table.knobs[place].values
    totals = torch.stack([table.mask.double().sum(0), *((x.double() * table.mask).sum(0) for x in (accuracy, latency))])
    per_value = torch.zeros(3, len(values), dtype=torch.float64)
    per_value.index_add_(1, table.configurations[:, place], totals)
    return {
        "values": list(values),
        "accuracy": (per_value[1] / per_value[0]).tolist(),
        "latency_ms": (per_value[2] / per_value[0]).tolist(),
        "cells": per_value[0].int().tolist(),
    }


def _headroom(table: ProfileTable, accuracy: Tensor) -> dict[str, Any]:
    budgets = default_budgets(table)
    static, oracle, choices, feasible = [], [], [], []
    for budget in budgets.tolist():
        in_time = (table.latency_ms <= budget) & table.mask
        utility = accuracy * in_time
        per_configuration = _mean(utility, table.mask)
        best = int(per_configuration.argmax())
        static.append(float(per_configuration[best]))
        oracle.append(float(utility.amax(1).double().mean()))
        feasible.append(float(in_time.any(1).double().mean()))
        choices.append(
            {"budget_ms": budget, "label": table.label(best), "knobs": table.configuration(best), "utility": static[-1]}
            | {"satisfaction": float(_mean(in_time, table.mask)[best]), "samples": int(table.mask[:, best].sum())}
        )
    return {
        "headroom": {"budgets_ms": budgets.tolist(), "budget_aware_static": static, "oracle": oracle},
        "static_choices": choices,
        "feasible_share": feasible,
    }


def _constant(block: Tensor) -> Tensor:
    """Which columns never vary where they are known: float [n, d] → bool [d]."""
    known = ~block.isnan()
    highest = block.masked_fill(~known, -torch.inf).amax(0)
    return highest <= block.masked_fill(~known, torch.inf).amin(0)


def _pareto(accuracy: Tensor, latency_ms: Tensor) -> list[int]:
    from knobwise.experiments.report.charts import pareto_front

    front = torch.from_numpy(pareto_front(accuracy.numpy(), latency_ms.numpy())).nonzero().squeeze(1)
    return front[latency_ms[front].argsort()].tolist()


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _warnings(facts: Mapping[str, Any]) -> list[str]:
    """What a person should know before training on this, in words."""
    found = []
    gains = [
        oracle - one["utility"]
        for oracle, one in zip(facts["headroom"]["oracle"], facts["static_choices"], strict=True)
    ]
    if facts["samples"] < FEW_SAMPLES:
        found.append(f"Only {facts['samples']} samples: intervals on a test split of them will be wide.")
    if facts["coverage"] < 1:
        found.append(
            f"{1 - facts['coverage']:.1%} of the cells were not profiled: means per configuration or knob, and the "
            "best static choice, are over different samples then, and compare with caution."
        )
    if facts["config_dependent_share"] < LITTLE:
        found.append("Accuracy hardly depends on the configuration: choosing can save time, but not win accuracy.")
    if facts["latency_cv_within_configuration"] == 0:
        found.append("Latency is the same for every sample: it looks like means per configuration, not measurements.")
    elif facts["latency_cv_within_configuration"] < LITTLE:
        found.append("Latency hardly differs between samples: knowing the configuration is knowing the time.")
    if max(gains) < LITTLE:
        found.append(
            "The oracle is hardly better than budget-aware static: choosing per input can gain next to nothing."
        )
    if not facts["features"]:
        found.append("No features: a policy can see the budget only, and cannot do better than budget-aware static.")
    for block in facts["features"]:
        if block["missing"] > 0:
            found.append(f"Features {block['name']}: {block['missing']:.1%} of the values are missing.")
        if block["constant"]:
            found.append(f"Features {block['name']}: {block['constant']} of {block['width']} columns never vary.")
    for name, knob in facts["knobs"].items():
        if len(knob["values"]) < 2:
            found.append(f"Knob {name} has one value only: there is nothing to choose.")
        elif _range(knob["accuracy"]) < 0.005 and _range(knob["latency_ms"]) < 0.01 * max(knob["latency_ms"]):
            found.append(f"Knob {name} changes neither accuracy nor latency on average.")
    return found


def _range(values: list[float]) -> float:
    return max(values) - min(values)


# -- for people --------------------------------------------------------------------------------------------------------


def in_words(facts: Mapping[str, Any]) -> list[str]:
    """The facts in plain sentences."""
    headroom, grid = facts["headroom"], facts["grid"]
    static, oracle = (sum(headroom[k]) / len(headroom[k]) for k in ("budget_aware_static", "oracle"))
    of_grid = f" (of {grid} combinations of knob values)" if grid != facts["configurations"] else ""
    several = [f"{count} of {name}" for name, count in facts["datasets"].items()]
    sentences = [
        f"{facts['samples']:,} samples{' (' + ', '.join(several) + ')' if len(several) > 1 else ''} × "
        f"{facts['configurations']} configurations{of_grid}; {facts['coverage']:.1%} of the cells are profiled.",
        f"For {facts['config_dependent_share']:.1%} of the samples accuracy depends on the configuration. Within one "
        f"configuration latency varies by {facts['latency_cv_within_configuration']:.0%} between samples "
        "(standard deviation / mean).",
        f"Mean over five budgets: the best static choice has utility {static:.3f}, the oracle {oracle:.3f}. Choosing "
        f"per input could gain {oracle - static:.3f} at most; both are measured on these same samples.",
    ]
    if facts["features"]:
        blocks = ", ".join(f"{block['name']} ({block['width']})" for block in facts["features"])
        sentences.append(f"Features: {blocks}.")
    return sentences


def print_inspection(facts: Mapping[str, Any], console: Console) -> None:
    """The facts in words and three small tables; without colours and frames when this is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    wide = console if console.is_terminal else Console(file=console.file, width=200)

    def show(title: str, header: list[str], rows: list[list[str]]) -> None:
        shown = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, header_style="bold", pad_edge=False)
        for place, name in enumerate(header):
            shown.add_column(name, justify="right" if place else "left")
        for row in rows:
            shown.add_row(*row)
        console.print(f"\n{title}", style="bold", markup=False, highlight=False)
        wide.print(shown, markup=False, highlight=False)

    def say(words: str) -> None:
        console.print(words, markup=False, highlight=False, soft_wrap=not console.is_terminal)

    console.print(f"{facts['name']}  {facts['digest']}", style="bold", markup=False, highlight=False)
    for sentence in in_words(facts):
        say(sentence)
    for title, (header, rows) in _tables(facts).items():
        show(title, header, rows)
    for title, lines in (("Worth knowing", facts["warnings"]), ("What the reader says", facts["notes"])):
        if lines:
            console.print(f"\n{title}", style="bold")
            for line in lines:
                say(f"- {line}")


def _tables(facts: Mapping[str, Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
    from knobwise.experiments.report.page import quantity

    front = [facts["configuration_means"][c] for c in facts["pareto"]]
    per_budget = zip(facts["static_choices"], facts["headroom"]["oracle"], facts["feasible_share"], strict=True)
    per_knob = [
        [name, str(value), f"{accuracy:.3f}", quantity(latency)]
        for name, knob in facts["knobs"].items()
        for value, accuracy, latency in zip(knob["values"], knob["accuracy"], knob["latency_ms"], strict=True)
    ]
    return {
        "Headroom per budget": (
            ["budget", "static", "oracle", "can be met", "best static configuration"],
            [
                [
                    quantity(static["budget_ms"]),
                    f"{static['utility']:.3f}",
                    f"{oracle:.3f}",
                    f"{share:.1%}",
                    static["label"],
                ]
                for static, oracle, share in per_budget
            ],
        ),
        "Knobs, means over all profiled cells": (["knob", "value", "accuracy", "latency"], per_knob),
        "Pareto front: nothing else is more accurate without being slower": (
            ["configuration", "accuracy", "latency", "samples"],
            [[c["label"], f"{c['accuracy']:.3f}", quantity(c["latency_ms"]), f"{c['samples']:,}"] for c in front],
        ),
    }


def write_inspection(facts: Mapping[str, Any], path: str | Path) -> Path:
    """Write the facts as a self-contained page with charts, and return its path."""
    import html

    from knobwise.experiments.report import charts, page

    warnings = "".join(f"<li>{html.escape(words)}</li>" for words in [*facts["warnings"], *facts["notes"]])
    tables = {title: page.table(*content) for title, content in _tables(facts).items()}
    headroom_table, knob_table, front_table = tables.values()
    cells = pl.DataFrame(
        [{k: c[k] for k in ("label", "accuracy", "latency_ms", "samples")} for c in facts["configuration_means"]]
    )
    headroom = facts["headroom"]
    lines = pl.DataFrame(
        [
            {"policy": words, "name": words, "budget_ms": budget, "utility": utility}
            for key, words in (("budget_aware_static", "budget-aware static"), ("oracle", "oracle (upper bound)"))
            for budget, utility in zip(headroom["budgets_ms"], headroom[key], strict=True)
        ]
    ).unique(maintain_order=True)
    parts = [
        f"<p class=soft>knobwise profile</p><h1>{html.escape(facts['name'])}</h1>",
        f"<p class=soft><code>{facts['digest']}</code></p>",
        f"<div class=verdict>{''.join(f'<p>{html.escape(words)}</p>' for words in in_words(facts))}</div>",
        f"<h2>Worth knowing</h2><ul>{warnings}</ul>" if warnings else "",
        "<h2>Headroom</h2>",
        page.figure(
            charts.by_budget(lines, "utility", "utility (0 to 1)", list(dict.fromkeys(lines["policy"]))),
            "Mean accuracy of answers, counted 0 when late; both measured on the samples they were chosen on.",
        ),
        headroom_table,
        "<h2>Accuracy and latency</h2>",
        page.figure(charts.plane(cells), "Each dot is one configuration; the dashed line is the Pareto front."),
        page.folded("The configurations on the front", front_table),
        "<h2>What each knob does</h2>",
        page.figure(charts.knob_effects(facts["knobs"]), "Means over all profiled cells that have this value."),
        page.folded("The numbers", knob_table),
    ]
    if facts["coverage"] < 1 or facts["grid"] > facts["configurations"]:
        caption = "Share of all samples × combinations with these values that were profiled; blank: none."
        parts += ["<h2>Coverage</h2>", page.figure(charts.coverage(_coverage(facts)), caption)]
    return page.write_page(path, f"knobwise: profile {facts['name']}", parts)


def _coverage(facts: Mapping[str, Any]) -> list[pl.DataFrame]:
    """Per pair of knobs (first three knobs; or the one knob alone): x, y, share, and the knobs' names as columns."""
    names = list(facts["knobs"])[:3]
    rows = [{**{n: c["knobs"][n] for n in names}, "samples": c["samples"]} for c in facts["configuration_means"]]
    frames = []
    for pair in itertools.combinations(names, 2) if len(names) > 1 else [(names[0],)]:
        sizes = [len(knob["values"]) for name, knob in facts["knobs"].items() if name not in pair]
        whole = facts["samples"] * _product(sizes)
        frame = pl.DataFrame(rows).group_by(*pair, maintain_order=True).agg(pl.col("samples").sum() / whole)
        frames.append(frame.rename({"samples": "share"}))
    return frames

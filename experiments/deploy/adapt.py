"""Adapt a trained controller to other hardware: list the cells to time there, or make the controller of their times."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console

from knobwise.agents.checkpoint import Loaded, load_checkpoint
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.adaptation import adapted, cells_to_time, decision_weights, fit_offsets, log_ratios
from knobwise.agents.serving.export import export_numpy
from knobwise.common.errors import InputError
from knobwise.common.files import write_text, written_whole
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.report.words import sentences
from knobwise.experiments.settings.options import AdaptRun
from knobwise.experiments.settings.profiles import LongTables, read_profile

WEIGHED = 500
"""Requests that show how often a configuration is chosen."""


def run(config: AdaptRun) -> Path:
    """Write cells.csv, or with the times of cells controller.pt, controller.npz, numpy_controller.py and
    adaptation.json; returns their folder.

    Raises:
        InputError: a controller that predicts no latency, is for mean budgets or was adapted before; another profile
            than that of its training; see also `log_ratios`.
    """
    loaded, out = load_checkpoint(config.checkpoint), Path(config.out)
    _check(config.checkpoint, loaded)
    table = read_profile(config.trained_on)
    if table.digest != loaded.profile_digest:
        raise InputError(
            f"{config.checkpoint}: was trained on profile {loaded.profile_name!r}, and trained_on is another, "
            f"{table.name!r}; name the profile of the training, as in trained_on=table trained_on.path=FILE"
        )
    if config.profile is None:
        write_text(out / "cells.csv", _listed(config, loaded, table).write_csv())
        print_lines(Console(), sentences("adapt.txt.j2", config=config, out=out, facts=None))
        return out
    profile = config.profile
    if isinstance(profile, LongTables) and profile.knobs is None:  # few rows do not show which columns are knobs
        profile = replace(profile, knobs=[knob.name for knob in table.knobs])
    _adapt(loaded, table, read_profile(profile), out)
    return out


def _check(checkpoint: str, loaded: Loaded) -> None:
    """Refuse controllers whose predicted latencies cannot be moved."""
    network = loaded.network
    if network.priced:
        raise InputError(
            f"{checkpoint}: decides for mean budgets, whose prices hold on the hardware of its profile only; measure a "
            "profile on the other hardware and train on it"
        )
    if network.config.structure != "utility":
        raise InputError(
            f"{checkpoint}: policy.structure={network.config.structure} predicts no latencies that could be adapted; "
            "train with policy=auto or policy=utility, or let AdaptiveModel.calibrate scale the budgets"
        )
    if "adapted" in loaded.extra:
        raise InputError(f"{checkpoint}: was adapted before; give the controller as it was trained")


def _listed(config: AdaptRun, loaded: Loaded, table: ProfileTable) -> pl.DataFrame:
    """The cells to time as rows of a long table, without a latency."""
    parts = [loaded.extra[f"{part}_rows"] for part in ("train", "validation") if f"{part}_rows" in loaded.extra]
    rows = torch.cat(parts) if parts else torch.arange(table.num_samples)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed))]
    agent: Any = loaded.controller
    weights = decision_weights(agent, table, rows[:WEIGHED], default_budgets(table))
    cells = cells_to_time(table.configurations, table.mask[rows], weights, config.cells, config.seed)
    named = []
    for row, column in zip(rows[cells[:, 0]].tolist(), cells[:, 1].tolist(), strict=True):
        key = {"dataset": table.datasets[row]} if table.datasets else {}
        key |= {"sample_id": table.sample_ids[row], **table.configuration(column)}
        named.append(key | {"accuracy": float(table.accuracy[row, column]), "latency_ms": None})
    return pl.DataFrame(named)


def _adapt(loaded: Loaded, table: ProfileTable, timed: ProfileTable, out: Path) -> None:
    """Write the adapted controller, and print what the timed cells tell."""
    chosen, ratios = log_ratios(table, timed)
    offsets = fit_offsets(table.configurations, chosen, ratios)
    factors, agent = offsets.mean.exp(), loaded.controller
    facts: dict[str, Any] = {
        "timed": {"name": timed.name, "digest": timed.digest, "cells": len(chosen)},
        "one_factor": float(ratios.median().exp()),
        "spread": float(offsets.spread.mean()),
        "scales": offsets.scales._asdict(),
        "configurations": [
            {**table.configuration(c), "factor": float(factors[c]), "spread": float(offsets.spread[c])}
            for c in range(table.num_configurations)
        ],
    }
    agent = adapted(agent, offsets.mean)  # type: ignore[type-var]
    loaded._replace(agent=agent, extra=loaded.extra | {"adapted": facts}).save(out / "controller.pt")
    export_numpy(agent, out / "controller.npz")
    with written_whole(out / "numpy_controller.py") as temporary:
        shutil.copyfile(numpy_controller.__file__, temporary)
    write_text(out / "adaptation.json", json.dumps(facts, indent=1))
    rows = [
        [knob.name, str(value), f"{offsets.mean[table.configurations[:, k] == v].mean().exp():.3f}"]
        for k, knob in enumerate(table.knobs)
        for v, value in enumerate(knob.values)
    ]
    print_table(Console(), ["knob", "value", "time here / time there"], rows, range(3))
    print_lines(Console(), sentences("adapt.txt.j2", facts=facts, out=out))

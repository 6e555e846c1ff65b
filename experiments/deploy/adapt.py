"""Adapt a trained controller to other hardware, from some cells that were timed there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from knobwise.agents.checkpoint import Loaded, load_checkpoint
from knobwise.agents.learning.adaptation import adapted, fit_offsets, log_ratios
from knobwise.agents.serving.export import export_numpy
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.report.words import sentences
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.settings.options import AdaptRun
from knobwise.experiments.settings.profiles import LongTables, read_profile

REQUESTS = 500
"""How many show how sure the controller is."""


def run(config: AdaptRun) -> Path:
    """Write controller.pt and controller.npz; returns their folder.

    Raises:
        InputError: a controller whose latencies cannot be moved, another profile than that of its training; see also
            `log_ratios`.
    """
    if config.profile is None:
        raise InputError("profile: name what was timed on the other hardware: profile=table profile.path=FILE")
    loaded, out = load_checkpoint(checkpoint_at(config.checkpoint)), Path(config.out)
    if problem := _problem(loaded):
        raise InputError(f"{config.checkpoint}: {problem}")
    table = read_profile(config.trained_on)
    if table.digest != loaded.profile_digest:
        raise InputError(
            f"{config.checkpoint}: was trained on profile {loaded.profile_name!r}, and trained_on is another, "
            f"{table.name!r}; name that of the training, such as trained_on=table trained_on.path=FILE"
        )
    profile = config.profile
    if isinstance(profile, LongTables) and profile.knobs is None:  # few rows do not show which columns are knobs
        profile = replace(profile, knobs=[knob.name for knob in table.knobs])
    facts = _adapt(loaded, table, read_profile(profile), out)
    print_lines(Console(), sentences("adapt.txt.j2", config=config, facts=facts))
    return out


def _problem(loaded: Loaded) -> str:
    """Why the latencies that a controller expects cannot be moved; "" if they can."""
    network = loaded.network
    if network.priced:
        return "decides for mean budgets, whose prices hold on one machine only; train on a profile of the other one"
    if network.config.structure != "utility":
        return (
            f"policy.structure={network.config.structure} predicts no latencies that could be adapted; train with "
            "policy=auto or policy=utility, or let AdaptiveModel.calibrate scale the budgets"
        )
    return "was adapted before; give the controller as it was trained" if "adapted" in loaded.extra else ""


def _fitted(loaded: Loaded, table: ProfileTable) -> Tensor:
    """The rows that the controller was fitted on, all if it does not say, int64 in random order."""
    parts = [loaded.extra[f"{part}_rows"] for part in ("train", "validation") if f"{part}_rows" in loaded.extra]
    rows = torch.cat(parts) if parts else torch.arange(table.num_samples)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def _adapt(loaded: Loaded, table: ProfileTable, timed: ProfileTable, out: Path) -> dict[str, Any]:
    """Write the adapted controller, print its factors by knob, and return what the timed cells tell."""
    chosen, ratios = log_ratios(table, timed)
    offsets = fit_offsets(table.configurations, chosen, ratios)
    facts = {"timed": timed.name, "digest": timed.digest, "cells": len(chosen)}
    facts |= {"factors": offsets.mean.exp().tolist(), "spread": offsets.variance.sqrt().tolist()}
    facts["one_factor"] = float(ratios.median().exp())
    agent: Any = loaded.controller
    rows = _fitted(loaded, table)[:REQUESTS]
    x = agent.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    agent = adapted(agent, offsets, x)
    loaded._replace(agent=agent, extra=loaded.extra | {"adapted": facts}).save(out / "controller.pt")
    export_numpy(agent, out / "controller.npz")
    lines = [
        [knob.name, str(value), f"× {offsets.mean[table.configurations[:, k] == v].mean().exp():.3f}"]
        for k, knob in enumerate(table.knobs)
        for v, value in enumerate(knob.values)
    ]
    print_table(Console(), ["knob", "value", "time, here / in training"], lines, range(3))
    return facts

"""Rounds of measuring after the first one: what is noted of them, what they add, why they end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.design.cell_design import CellDesign, Outlook
from knobwise.profiling.measuring.machine import read_note, write_json
from knobwise.profiling.measuring.measuring import CELL, STAGE_TIMES, MeasurementPlan
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.profiling.measuring.sure_cells import places

FEWEST = 5
"""A configuration that fewer samples were measured with tells too little to go on with."""
ROUNDS = "rounds.json"
"""The file of the rounds after the first, in the state folder."""


class Rounds:
    """The rounds of measuring after the first, which are noted in a file before they begin.

    Args:
        path: of the file. It is read if there are to be further rounds.
        plan: the first round.

    Attributes:
        report: what `profile.json` says of the rounds.

    Raises:
        InputError: the file is of rounds that followed another first one.
    """

    def __init__(self, path: Path, plan: MeasurementPlan) -> None:
        self.path = path
        self.first = plan
        cells = [plan.contents, plan.configurations, plan.design.probability.tolist()]
        self.key = hashlib.sha256(json.dumps(cells, default=str).encode()).hexdigest()
        self.noted: list[dict[str, Any]] = []
        self.report: dict[str, Any] = {}
        if plan.config.rounds > 1 and path.exists():
            note = read_note(path, dict)
            if note.get("first") != self.key:
                raise InputError(
                    f"{path}: holds rounds that followed other samples, values or "
                    "knobs.per_sample; choose another out folder, or the settings as before"
                )
            self.noted = note["rounds"]

    def plan(self) -> MeasurementPlan:
        """Return what is to be measured in all rounds that are known."""
        design = self.first.design
        for number, noted in enumerate(self.noted[: self.first.config.rounds - 1], 2):
            for name, probability in {"random": noted["probability"], "chosen": 1.0}.items():
                cells = np.zeros(design.cells.shape, bool)
                cells.flat[noted[name]] = True
                design = design.added(cells, probability, number)
        return replace(self.first, design=design)

    def add(self, design: CellDesign, gain: float) -> None:
        """Note the last round of a design as the next to measure, and the gain before it."""
        latest = design.rounds == design.rounds.max()
        random = latest & (design.probability < 1)
        noted = {
            "gain_before": gain,
            "probability": float(design.probability[random].min(initial=1.0)),
            "random": np.flatnonzero(random).tolist(),
            "chosen": np.flatnonzero(latest & ~random).tolist(),
        }
        self.noted.append(noted)
        write_json(self.path, {"first": self.key, "rounds": self.noted})

    def end(
        self,
        plan: MeasurementPlan,
        measurements: pl.DataFrame,
        gain: float,
        whole: bool,
        limit: str = "knobs.max_hours",
    ) -> bool:
        """Report the rounds so far, and return whether the latest was the last.

        Args:
            plan: what was measured.
            measurements: the log.
            gain: see `Outlook`, after the latest round.
            whole: whether the latest round is complete.
            limit: the setting that ended it, if not.
        """
        design = plan.design
        last = int(design.rounds.max())
        gains = [noted["gain_before"] for noted in self.noted[: last - 1]] + [gain]
        measured = plan.select(measurements)
        cells = tuple(measured.select(CELL).to_numpy().T)
        times_s = measured["total_ms"].to_numpy() / 1e3
        reports = []
        for number, of_round in enumerate(gains, 1):
            mine = design.rounds == number
            drawn = mine & (design.probability < 1)
            seconds = float(times_s[design.rounds[cells] == number].sum())
            reports.append(
                {
                    "cells": int(mine.sum()),
                    "at_random": int(drawn.sum()),
                    "probability": float(design.probability[drawn].min(initial=1.0)),
                    "seconds": round(seconds, 1),
                    "gain": round(of_round, 4),
                }
            )
        ended = ""
        if not whole:
            ended = f"{limit} is reached; the same command goes on"
        elif last >= plan.config.rounds:
            ended = "knobs.rounds are done"
        elif design.cells.all():
            ended = "every cell is measured"
        elif last > 2 and gains[-1] <= gains[-2]:
            ended = "the estimated gain has stopped growing"
        self.report = {"rounds": reports, "ended": ended}
        latest = reports[-1]
        print(
            f"round {last}: {latest['cells']} cells, {latest['at_random']} of them at random, "
            f"{latest['seconds']} s; estimated gain of choosing for each input {gain:.3f}"
        )
        if ended:
            print(f"no further round: {ended}")
        return bool(ended)


def first_round(
    parts: Sequence[str], samples: int, configurations: int, config: VLMProfileConfig
) -> CellDesign:
    """Return the cells of the first round: all, or if parts are measured `knobs.per_sample` of each
    sample, and all of those to test on."""
    whole = np.ones(samples, bool)
    if parts:
        whole = (np.array(parts) == "test") & config.whole_test
    return CellDesign.first_round(whole, configurations, config.per_sample)


def further_round(
    plan: MeasurementPlan,
    measurements: pl.DataFrame,
    table: ProfileTable,
    outlook: Outlook,
    together: bool,
) -> CellDesign:
    """Return the design of a plan with a further round, as long as the first took.

    Args:
        plan: what was measured.
        measurements: the log.
        table: the profile that was made of it.
        outlook: of the table.
        together: whether the model answers several configurations of a sample from one stage.
    """
    rows, columns = places(table, [item.id for item in plan.items], plan.configurations)
    shape = plan.design.cells.shape
    score = np.full(shape, -np.inf)
    score[np.ix_(rows, columns)] = outlook.score.numpy()
    cell_s = np.full(shape, float(outlook.latency_ms.mean()) / 1e3)
    cell_s[np.ix_(rows, columns)] = outlook.latency_ms.numpy() / 1e3
    # what comes before the answers, for each of them or for all of a sample
    stages = plan.select(measurements).with_columns(pl.col(STAGE_TIMES).fill_null(0.0))
    stages = stages.group_by("sample").agg(
        ms=pl.median("features_ms") + pl.max("first_look_ms"),
    )
    stage_s = np.zeros(shape[0])
    stage_s[stages["sample"].to_numpy()] = stages["ms"].to_numpy() / 1e3
    if not together:
        cell_s += stage_s[:, None]
        stage_s[:] = 0
    drawn = (plan.design.rounds == 1) & (plan.design.probability < 1)
    spent_s = float(cell_s[drawn].sum() + stage_s[drawn.any(1)].sum())
    return plan.design.next_round(score, cell_s, stage_s, spent_s)


def part_of(plan: MeasurementPlan, measurements: pl.DataFrame, limit: str) -> MeasurementPlan:
    """Return the part of a plan that was measured before a limit was reached, such as
    `knobs.max_hours=1`.

    Raises:
        InputError: that is not even the first round; or, where all cells were to be measured, some
            configuration was measured on fewer than `FEWEST` samples.
    """
    done = plan.done(measurements)[0] & plan.design.cells
    first = plan.design.rounds == 1
    # cells were measured in random order, so that what is missing is missing at random
    enough = done[first].all() or (not plan.parts and done.sum(0).min() >= FEWEST)
    if not enough:
        raise InputError(
            f"{limit}: is reached, with {done[first].sum()} of {first.sum()} cells of the first "
            "round measured. They are kept: repeat the command, with a higher limit if need be, to "
            "continue, or lower knobs.per_sample or knobs.samples"
        )
    return replace(plan, design=plan.design.measured(done))

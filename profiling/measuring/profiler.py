"""Profile a model with one call, which measures it and writes the profile.

The call can be interrupted at any time.

profile_vlm("out", model, items, config)  →  out/table.parquet  features.safetensors  profile.json
                                             out/exp5/…  out/exp6/…  (the same measurements as
                                             exp5/exp6 files) out/state/…  (what a later call
                                             continues from)

With `knobs.rounds` the profile is written after each round. From it `choose` says which cells to
measure next; they are noted in the folder before the round begins, so that an interrupted round is
the same when it goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from knobwise.common.checks import folder_name
from knobwise.common.errors import InputError
from knobwise.envs.readers.long_table import read_long_table
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import split_groups
from knobwise.profiling.design.sure_cells import (
    FILE,
    cells_of_plan,
    places,
    read_sure_cells,
    write_sure_cells,
)
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    KnobSupport,
    check_configuration,
)
from knobwise.profiling.measuring.cell_design import CellDesign, Outlook
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys
from knobwise.profiling.measuring.grid_sampling import sample_grid
from knobwise.profiling.measuring.machine import claim, machine, read_note, write_json
from knobwise.profiling.measuring.measuring import (
    CELL,
    COLUMNS,
    EXTRA,
    LOG,
    SEED,
    STAGE_TIMES,
    MeasurementPlan,
    appended,
    measure,
    read_measurements,
)
from knobwise.profiling.measuring.outputs import knob_lines, write_vlm_profile
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import Questions, question_text
from knobwise.profiling.measuring.settings import VLMProfileConfig

MIN_IMAGES = 5
"""Samples of fewer images are not divided into parts."""
SPLIT = "validation"
"""The split of the data set that exp5/exp6 files name."""
ROUNDS = "rounds.json"
"""The file of the rounds after the first."""


def profile_vlm(
    out: str | Path,
    model: AdaptiveVLM,
    items: Sequence[VQAItem],
    config: VLMProfileConfig,
    identity: Mapping[str, Any] | None = None,
    choose: Callable[[ProfileTable], Outlook] | None = None,
    needed: Callable[[ProfileTable], Tensor] | None = None,
    clock_s: Callable[[], float] = time.monotonic,
) -> Path:
    """Measure the model on the items, write the profile, and return its folder.

    The same call resumes an interrupted run. A call for more configurations, samples, repeats or
    rounds adds them. Another model, machine, version or data set needs another folder.

    Args:
        identity: what tells this model from others, beside `model.identity`.
        choose: what to measure in further rounds, from the profile so far; None for one round.
        needed: cells that are measured too whatever is drawn, bool [n, c] from the profile so far,
            which must be there.
        clock_s: the clock of `knobs.max_hours`, in seconds.

    Raises:
        InputError: settings, metric or folder do not fit, the model fails on a sample, or time runs
            out before the first round ends.
    """
    start_s = clock_s()
    out = Path(out)
    state = out / "state"
    # check everything before anything is written
    items = draw_items(items, config)
    requests = Questions(items, config.metric, config.prompt)
    configurations = chosen_configurations(model.knobs, config, getattr(model, "measured", {}))
    name = config.name or "data"
    folder_name("knobs.name", name)
    values = {k.name: [k.default, *(k.values or (k.least, k.most))] for k in model.knobs}
    versions = getattr(model, "identity", {})
    identity = {"model": model.name, "knobs": values, **versions, **(identity or {})}
    identity["machine"] = machine()
    # a change of the prompt changes the content of every sample
    questions = [question_text(item, config.prompt) for item in items]
    contents = content_keys(items, questions)
    parts = drawn_parts(items, config, len(configurations))
    design = first_round(parts, len(items), len(configurations), config)
    plan = MeasurementPlan(items, requests, contents, configurations, config, design, parts)
    rounds = Rounds(state / ROUNDS, plan)
    settings = {"max_new_tokens": config.max_new_tokens, "clock": config.clock}
    claim(state / "run.json", {"dataset": name, **identity, **settings})
    store = FeatureStore(state / "features")
    features = out / "features.safetensors"
    path = state / LOG
    facts = {
        "name": name,
        "config": asdict(config),
        "split": SPLIT,
        **identity,
        "metrics": dict(sorted(Counter(requests.metrics.values()).items())),
    }
    limit_s = 3600 * (config.max_hours or math.inf)

    def out_of_time() -> bool:
        return clock_s() - start_s >= limit_s

    with appended(path) as log:
        sure = read_sure_cells(state / FILE, contents, configurations)
        if needed is not None:
            table = read_long_table(out / "table.parquet", features=str(features))
            ids = [item.id for item in items]
            sure |= cells_of_plan(needed(table), table, ids, configurations)
            write_sure_cells(state / FILE, sure, contents, configurations)
        while True:
            plan = rounds.plan()
            plan = replace(plan, design=plan.design.with_sure(sure))
            done = plan.done(read_measurements(path))
            whole = measure(model, plan, log, done, store, out_of_time)
            measurements = read_measurements(path)
            if not whole:
                plan = part_of(plan, measurements)
            store.write(features, plan.contents, [item.id for item in items])
            profile = write_vlm_profile(out, plan, measurements, model.knobs, facts)
            if config.rounds == 1 or choose is None or not parts:
                break
            table = read_long_table(out / "table.parquet", features=str(features))
            outlook = choose(table)
            if rounds.end(plan, measurements, outlook.gain, whole):
                profile["measured"] |= rounds.report
                write_json(out / "profile.json", profile)
                break
            together = hasattr(model, "answer_all")
            rounds.add(further_round(plan, measurements, table, outlook, together), outlook.gain)
    print(*knob_lines(profile), sep="\n")
    return out


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
        self, plan: MeasurementPlan, measurements: pl.DataFrame, gain: float, whole: bool
    ) -> bool:
        """Report the rounds so far, and return whether the latest was the last.

        Args:
            plan: what was measured.
            measurements: the log.
            gain: see `Outlook`, after the latest round.
            whole: whether the latest round is complete.
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
            ended = "knobs.max_hours is over; the same command goes on"
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


def part_of(plan: MeasurementPlan, measurements: pl.DataFrame) -> MeasurementPlan:
    """Return the part of a plan that was measured before time ran out. Raises InputError if that is
    not even the first round."""
    done = plan.done(measurements)[0] & plan.design.cells
    first = plan.design.rounds == 1
    if not done[first].all():
        raise InputError(
            f"knobs.max_hours={plan.config.max_hours}: is over, with {done[first].sum()} of "
            f"{first.sum()} cells of the first round measured. They are kept: repeat the command "
            "to continue, or lower knobs.per_sample or knobs.samples"
        )
    return replace(plan, design=plan.design.measured(done))


def draw_items(items: Sequence[VQAItem], config: VLMProfileConfig) -> tuple[VQAItem, ...]:
    """Draw the samples to measure; they keep their order."""
    count = config.samples or len(items)
    if count > len(items):
        raise InputError(f"knobs.samples={count}: the data hold only {len(items)} samples")
    # the beginning of a fixed permutation, so that a larger draw includes a smaller one
    drawn = np.random.default_rng(SEED).permutation(len(items))[:count]
    return tuple(items[i] for i in sorted(drawn))


def drawn_parts(
    items: Sequence[VQAItem], config: VLMProfileConfig, configurations: int
) -> tuple[str, ...]:
    """Divide samples into train, validation and test if part of the cells is measured; () if all
    are. Questions about one image stay together.

    Raises:
        InputError: there are fewer configurations than are to be measured of a sample, or too few
            samples for three parts.
    """
    if config.per_sample > configurations:
        raise InputError(
            f"knobs.per_sample={config.per_sample}: there are only {configurations} configurations"
        )
    if config.per_sample in (0, configurations):
        return ()
    images = [item.image_id or f"of sample {item.id}" for item in items]
    if len(set(images)) < MIN_IMAGES:
        raise InputError(
            f"knobs.per_sample={config.per_sample}: {len(set(images))} samples (or images) are too "
            f"few to train, validate and test on; use at least {MIN_IMAGES}, or knobs.per_sample=0"
        )
    split = split_groups(images, 0.6, 0.2, SEED, table="knobs.per_sample")
    parts = np.empty(len(items), object)
    for name, rows in split._asdict().items():
        parts[rows.numpy()] = name
    return tuple(parts)


def chosen_configurations(
    knobs: Sequence[KnobSupport],
    config: VLMProfileConfig,
    usual: Mapping[str, Sequence[Any]],
) -> tuple[dict[str, Any], ...]:
    """Return the configurations to measure, with a value for every knob.

    The settings give the values of a knob. Otherwise `usual` gives them (the model's usual values
    by knob), and otherwise the default is the only value.

    Raises:
        InputError: the model lacks a knob, a knob is named like a column of the table, a knob does
            not take a value, or `sample_grid` refuses the grid.
    """
    for knob in knobs:
        if knob.name in COLUMNS or knob.name.startswith(EXTRA) or knob.name.endswith("_ms"):
            raise InputError(
                f"knob {knob.name!r}: is the name of a measurement in a profile; rename it"
            )
    # each source overrides those before it
    defaults = {knob.name: (knob.default,) for knob in knobs}
    values = {**defaults, **usual, **config.chosen_values()}
    for name, knob_values in values.items():
        for value in knob_values:
            check_configuration(knobs, {name: value})
    return tuple(sample_grid(values, config.count, SEED))

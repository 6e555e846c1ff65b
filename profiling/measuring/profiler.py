"""Profile a model with one call, which measures it and writes the profile.

The call can be interrupted at any time.

profile_vlm("out", model, items, config)  →  out/table.parquet  features.safetensors  profile.json
                                             out/exp5/…  out/exp6/…  (the same measurements as
                                             exp5/exp6 files) out/state/…  (what a later call
                                             continues from)
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from knobwise.common.checks import folder_name
from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import split_groups
from knobwise.profiling.design.cell_design import cells_to_measure, part_of
from knobwise.profiling.design.grid_sampling import sample_grid
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    KnobSupport,
    check_configuration,
)
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys
from knobwise.profiling.measuring.local_runner import LocalRunner
from knobwise.profiling.measuring.machine import claim_machine, machine
from knobwise.profiling.measuring.measuring import (
    COLUMNS,
    EXTRA,
    LOG,
    SEED,
    Bools,
    MeasurementPlan,
    Runner,
    measure,
    open_log,
    read_measurements,
)
from knobwise.profiling.measuring.outputs import knob_lines, line_of_plan, write_vlm_profile
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import Questions, question_text
from knobwise.profiling.measuring.settings import VLMProfileConfig, one_type
from knobwise.profiling.measuring.sure_cells import (
    FILE,
    cells_of_plan,
    read_sure_cells,
    write_sure_cells,
)

MIN_IMAGES = 5
"""Samples of fewer images are not divided into parts."""
SPLIT = "validation"
"""The split of the data set that exp5/exp6 files name."""


def profile_vlm(
    out: str | Path,
    model: AdaptiveVLM,
    items: Sequence[VQAItem],
    config: VLMProfileConfig,
    identity: Mapping[str, Any] | None = None,
    needed: Callable[[], tuple[ProfileTable, Tensor]] | None = None,
    clock_s: Callable[[], float] = time.monotonic,
    runner: Callable[[AdaptiveVLM, MeasurementPlan, Path], Runner] | None = None,
    source: Path | None = None,
) -> Path:
    """Measure the model on the items, write the profile, and return its folder.

    The same call resumes an interrupted run. A call for more configurations, samples or repeats
    adds them. Another model, machine, version or data set needs another folder.

    Args:
        identity: what tells this model from others, beside `model.identity`; also the `machine`, if
            another one measures.
        needed: the profile so far, which must be there, and its cells that are measured too
            whatever is drawn, bool [n, c].
        clock_s: the clock of `knobs.max_hours`, in seconds.
        runner: makes what measures, from the model, the plan and the state folder; None measures in
            this process.
        source: the file that the model is written in; it is said if it changes while measurements
            go on.

    Raises:
        InputError: settings, metric or folder do not fit, the model fails on a sample, or time runs
            out before enough is measured (`part_of`).
    """
    start_s = clock_s()
    out = Path(out)
    state = out / "state"
    # check everything before anything is written
    config = replace(config, repeats=config.repeats or getattr(model, "repeats", None))
    name = config.name or "data"
    folder_name("knobs.name", name)
    drawn = _drawn_plan(model, draw_items(items, config), config)
    identity = _identity(model, identity or {})
    settings = {"max_new_tokens": config.max_new_tokens, "clock": config.clock}
    noted = {"dataset": name, **identity, **settings}
    has_changed = claim_machine(state / "run.json", noted, source)
    store = FeatureStore(state / "features")
    features = out / "features.safetensors"
    path = state / LOG
    facts = {
        "name": name,
        "config": asdict(config),
        "split": SPLIT,
        **identity,
        "metrics": dict(sorted(Counter(drawn.requests.metrics.values()).items())),
    }
    limit_s = 3600 * (config.max_hours or math.inf)

    def out_of_time() -> bool:
        return clock_s() - start_s >= limit_s

    with open_log(path) as log:
        known = read_measurements(path)
        if has_changed and len(known):
            say(
                f"{source}: has changed since the first of {len(known)} measurements in {out} was "
                "made, which this run goes on from; another out folder measures anew"
            )
        if hasattr(model, "continues"):
            model.continues(state, known)
        sure = _sure_cells(state / FILE, drawn, needed)
        plan = replace(drawn, design=drawn.design.with_sure(sure))
        wanted_cells = int(plan.design.cells.sum())
        done = plan.done(known)
        print(line_of_plan(plan, model.knobs))
        run: Runner = LocalRunner(model, plan)
        if runner is not None:
            run = runner(model, plan, state)
        whole = measure(run, plan, log, done, store, out_of_time)
        measurements = read_measurements(path)
        limit = getattr(model, "limit", "") or f"knobs.max_hours={config.max_hours}"
        if not whole:
            taken = plan.done(measurements)[0] & plan.design.cells
            plan = replace(plan, design=part_of(drawn.design, sure, taken, plan.parts, limit))
        if hasattr(model, "remarks"):
            facts["remarks"] = model.remarks(plan, measurements)
        store.write(features, plan.contents, [item.id for item in plan.items])
        further = getattr(model, "columns", ())
        profile = write_vlm_profile(out, plan, measurements, model.knobs, facts, further)
    if not whole:
        print(
            f"{limit}: is reached, with {plan.design.cells.sum()} of {wanted_cells} cells "
            "measured, which the table holds; the same command with a higher limit goes on"
        )
    print(*knob_lines(profile), sep="\n")
    return out


def _identity(model: AdaptiveVLM, further: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells this model and machine from others."""
    values = {k.name: [k.default, *(k.values or (k.least, k.most))] for k in model.knobs}
    versions = getattr(model, "identity", {})
    identity = {"model": model.name, "knobs": values, **versions, **further}
    identity.setdefault("machine", machine())
    return identity


def _drawn_plan(
    model: AdaptiveVLM, items: tuple[VQAItem, ...], config: VLMProfileConfig
) -> MeasurementPlan:
    """Return what is measured of these samples, as it is drawn: without cells that are measured
    whatever is drawn."""
    requests = Questions(items, config.metric, config.prompt)
    configurations = chosen_configurations(model.knobs, config, getattr(model, "measured", {}))
    # a change of the prompt changes the content of every sample
    questions = [question_text(item, config.prompt) for item in items]
    contents = content_keys(items, questions)
    parts = drawn_parts(items, config, len(configurations))
    design = cells_to_measure(
        parts, len(items), len(configurations), config.per_sample, config.whole_test
    )
    return MeasurementPlan(items, requests, contents, configurations, config, design, parts)


def _sure_cells(
    path: Path, drawn: MeasurementPlan, needed: Callable[[], tuple[ProfileTable, Tensor]] | None
) -> Bools:
    """Return the cells that are measured whatever is drawn, bool [N, C]: those of earlier calls,
    and those that this one needs, which are noted in the file."""
    sure = read_sure_cells(path, drawn.contents, drawn.configurations)
    if needed is not None:
        table, wanted = needed()
        ids = [item.id for item in drawn.items]
        sure |= cells_of_plan(wanted, table, ids, drawn.configurations)
        write_sure_cells(path, sure, drawn.contents, drawn.configurations)
    return sure


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
    by knob), or the knob lists them itself; of a range the default is the only value.

    Raises:
        InputError: the model lacks a knob, a knob is named like a column of the table, a knob does
            not take a value or has true among others, or `sample_grid` refuses the grid.
    """
    for knob in knobs:
        if knob.name in COLUMNS or knob.name.startswith(EXTRA) or knob.name.endswith("_ms"):
            raise InputError(
                f"knob {knob.name!r}: is the name of a measurement in a profile; rename it"
            )
    # each source overrides those before it
    listed = {knob.name: one_type(knob.values) or (knob.default,) for knob in knobs}
    values = {**listed, **usual, **config.chosen_values()}
    for name, knob_values in values.items():
        if bool in (kinds := {*map(type, knob_values)}) and len(kinds) > 1:
            raise InputError(
                f"knobs.values.{name}={list(knob_values)}: true and false must be all values of a "
                "knob, since a column of a profile has one type; leave them or the others out"
            )
        for value in knob_values:
            check_configuration(knobs, {name: value})
    return tuple(sample_grid(values, config.count, SEED))

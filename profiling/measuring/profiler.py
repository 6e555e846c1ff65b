"""Profile a model with one call, which measures it and writes the profile.

The call can be interrupted at any time.

profile_vlm("out", model, items, config)  →  out/table.parquet  features.safetensors  profile.json
                                             out/exp5/…  out/exp6/…  (the same measurements as
                                             exp5/exp6 files) out/state/…  (what a later call
                                             continues from)

Several processes, each with its own GPU and `shard`, share one `out`: each measures its part of the
configurations, and the last to finish writes the profile. Let the GPUs be of one kind: their
differences become those of configurations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from knobwise.common.checks import folder_name
from knobwise.common.errors import InputError
from knobwise.common.files import locked
from knobwise.common.progress import progress
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    KnobSupport,
    check_configuration,
)
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys, image_digests
from knobwise.profiling.measuring.grid_sampling import sample_grid
from knobwise.profiling.measuring.machine import claim, machine
from knobwise.profiling.measuring.measuring import (
    COLUMNS,
    EXTRA,
    SEED,
    Plan,
    appended,
    measure,
    read_logs,
)
from knobwise.profiling.measuring.outputs import knob_lines, write_vlm_profile
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import Questions, question_text
from knobwise.profiling.measuring.settings import VLMProfileConfig, changed_settings

SPLIT = "validation"
"""The split of the data set that exp5/exp6 files name."""
_NOT_REPEATED = ("shard", "shards", "force")  # the profile is made again without them


def profile_vlm(
    out: str | Path,
    model: AdaptiveVLM,
    items: Sequence[VQAItem],
    config: VLMProfileConfig,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Measure the model on the items, write the profile, and return its folder.

    The same call resumes an interrupted run. A call for more configurations, samples or repeats
    adds them. Another model, machine, version or data set needs another folder.

    Args:
        identity: what tells this model from others, beside `model.identity`.

    Raises:
        InputError: settings, metric or folder do not fit, or the model fails on a sample.
    """
    out = Path(out)
    state = out / "state"
    # check everything before anything is written
    items = draw_items(items, config)
    requests = Questions(items, config.metric, config.prompt)
    configurations = chosen_configurations(model.knobs, config, getattr(model, "measured", {}))
    if config.name:
        folder_name("knobs.name", config.name)
    if config.shards > len(configurations):
        raise InputError(
            f"knobs.shards={config.shards}: there are only {len(configurations)} configurations"
        )

    values = {k.name: [k.default, *(k.values or (k.least, k.most))] for k in model.knobs}
    versions = getattr(model, "identity", {})
    identity = {"model": model.name, "knobs": values, **versions, **(identity or {})}
    # a change of the prompt changes the content of every sample
    questions = [question_text(item, config.prompt) for item in items]
    contents = content_keys(image_digests(items), questions, json.dumps(identity, sort_keys=True))
    plan = Plan(items, requests, tuple(contents), configurations, config)
    store = FeatureStore(state / "features")
    where = machine()
    _claim_folder(state, identity, where, config)
    _measure_part(state, model, plan, store)

    # the measurements of all processes
    log = read_logs(state)
    if missing := int((~plan.done(log)).sum()):
        print(
            f"shard {config.shard} of {config.shards} is done; {missing} measurements of the "
            "others are missing"
        )
        return out
    # two processes that finish at once write one after the other
    with locked(state):
        _collect(model, store, plan, {key for key in plan.contents if key not in store})
        store.write(out / "features.safetensors", plan.contents, [item.id for item in plan.items])
        facts = _facts(model, plan, {**identity, "machine": where})
        profile = write_vlm_profile(out, plan, log, model.knobs, facts)
    print(*knob_lines(profile), sep="\n")
    return out


def _facts(model: AdaptiveVLM, plan: Plan, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a profile notes about its run; `origin` describes the model and the machine."""
    name = origin.get("class", model.name)
    config = plan.config
    return {
        "name": config.name or "data",
        "config": asdict(config),
        "command": command(name, config, hasattr(model, "questions")),
        "split": SPLIT,
        **origin,
        "shards": config.shards,
        "metrics": dict(sorted(Counter(plan.requests.metrics.values()).items())),
    }


def draw_items(items: Sequence[VQAItem], config: VLMProfileConfig) -> tuple[VQAItem, ...]:
    """Draw the samples to measure; they keep their order."""
    count = config.samples or len(items)
    if count > len(items):
        raise InputError(f"knobs.samples={count}: the data hold only {len(items)} samples")
    # the beginning of a fixed permutation, so that a larger draw includes a smaller one
    drawn = np.random.default_rng(SEED).permutation(len(items))[:count]
    return tuple(items[i] for i in sorted(drawn))


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


def _claim_folder(
    state: Path, identity: Mapping[str, Any], where: Mapping[str, Any], config: VLMProfileConfig
) -> None:
    """Note what is measured in this folder; raise InputError if it holds another run."""
    claimed = {
        "dataset": config.name or "data",
        **identity,
        "max_new_tokens": config.max_new_tokens,
        "machine": where,
    }
    if config.clock != "wall":
        claimed["clock"] = config.clock
    mine = state / f"run-{config.shard}.json"
    # the other shards' files come first, so that a refusal writes nothing
    others = sorted(set(state.glob("run-*.json")) - {mine})
    for path in (*others, mine):
        claim(path, claimed)


def _measure_part(state: Path, model: AdaptiveVLM, plan: Plan, store: FeatureStore) -> None:
    """Measure this process's part of the configurations, and compute its part of the features.

    The parts are drawn at random, so that no value of a knob is measured on one GPU alone.
    """
    config = plan.config
    drawn = np.random.default_rng(SEED).permutation(len(plan.configurations))
    part = sorted(drawn[config.shard :: config.shards])
    # the whole plan's samples under this part's configurations
    mine = replace(plan, configurations=tuple(plan.configurations[j] for j in part))
    samples = plan.contents[config.shard :: config.shards]
    untaken = {key for key in samples if config.force or key not in store}
    with appended(state / f"measured-{config.shard}.jsonl") as log:
        measure(model, mine, log, mine.done(read_logs(state)), store, untaken)
        _collect(model, store, plan, untaken)


def _collect(model: AdaptiveVLM, store: FeatureStore, plan: Plan, wanted: Collection[str]) -> None:
    """Compute the features with these content keys, which no measurement gave."""
    samples = {key: i for i, key in enumerate(plan.contents) if key in wanted}
    with progress("features", len(samples), quiet_s=5) as tick:
        for done, (key, i) in enumerate(samples.items(), 1):
            sample_id = plan.items[i].id
            stage = model.first_stage(plan.requests.request(sample_id))
            store.add(key, stage.features, sample_id)
            tick(done)


def command(model: str, config: VLMProfileConfig, own_questions: bool = False) -> str:
    """Return the command that repeats a profile, with every setting that is not the default.

    A model with questions of its own (`own_questions`) needs no data file.
    """
    data = "" if own_questions else " data=FILE"
    settings = changed_settings("knobs.", config, leave_out=_NOT_REPEATED)
    return " ".join([f"knobwise profile model={model}{data} out=DIR", *settings])

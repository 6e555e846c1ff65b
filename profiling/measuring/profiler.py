"""Profile a vision-language model: measure it, write the profile. One call, which can be
interrupted at any time.

profile_vlm("out", model, data, config)  →  out/table.parquet  features.safetensors  profile.json
                                            out/exp5/…  out/exp6/…  (the same measurements as
                                            exp5/exp6 files) out/state/…  (what a later call
                                            continues from)

Several processes, each with its own GPU and `shard`, share one `out`: each measures its part of the
configurations, and the last to finish writes the profile. Let the GPUs be of one kind: their
differences become those of configurations.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from knobwise.common.checks import folder_name
from knobwise.common.errors import InputError
from knobwise.common.files import locked
from knobwise.common.progress import progress
from knobwise.profiling.measuring.adaptive_model import (
    KNOBS,
    AdaptiveVLM,
    KnobSupport,
    Request,
    check_configuration,
)
from knobwise.profiling.measuring.feature_store import FeatureStore, content_keys, image_digests
from knobwise.profiling.measuring.grid_sampling import sample_grid
from knobwise.profiling.measuring.machine import claim, machine, rendered
from knobwise.profiling.measuring.measuring import (
    COLUMNS,
    EXTRA,
    Plan,
    appended,
    measure,
    read_logs,
)
from knobwise.profiling.measuring.outputs import without_drift, write_vlm_profile
from knobwise.profiling.measuring.questions import VQAData, VQAItem
from knobwise.profiling.measuring.requests import Questions, question_text
from knobwise.profiling.measuring.settings import VLMProfileConfig, changed_settings

FEATURES_FILE = "features.safetensors"
_NOT_REPEATED = ("shard", "shards", "force")  # the profile is made again without them


def profile_vlm(
    out: str | Path,
    model: AdaptiveVLM,
    data: VQAData,
    config: VLMProfileConfig,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Measure the model on the queries of the data, write the profile, and return its folder.

    Repeat the call to resume it. More configurations, samples or repeats are measured beside those
    that exist; another model, machine, version or data set needs another folder. `about` is what
    else distinguishes this model from others, as JSON can hold it: digest of its weights, data
    type, device. Raises InputError for settings that the model cannot run, data that the metric
    cannot judge, another run in `out`, a model that fails with a sample (named).
    """
    out, state = Path(out), Path(out) / "state"
    items = _drawn(data.queries, config)
    requests = Questions(items, config.metric, config.prompt)
    metrics = list(requests.metrics.values())

    def judge(i: int, answer: str) -> float:
        return requests.score(items[i].id, answer)

    configurations = chosen_configurations(model.knobs, config, getattr(model, "measured", None))
    if config.name:
        folder_name("knobs.name", config.name)
    if config.shards > len(configurations):
        raise InputError(
            f"knobs.shards={config.shards}: there are only {len(configurations)} configurations"
        )

    identity = {
        "model": model.name,
        "knobs": {k.name: [k.default, *(k.values or (k.least, k.most))] for k in model.knobs},
        **(about or {}),
    }
    questions = tuple(question_text(item, config.prompt) for item in items)
    contents = tuple(
        content_keys(image_digests(items), questions, json.dumps(identity, sort_keys=True))
    )
    how = {name: getattr(config, name) for name in ("repeats", "seed", "warm_up", "clock")}
    plan = Plan(items, questions, contents, configurations, **how)
    # reads what exists, and writes nothing yet
    if config.features:
        store = _store(out, contents, config)
    else:
        store = None
    where = machine()
    dataset = config.name or "data"
    claimed = {
        "dataset": dataset,
        **identity,
        "max_new_tokens": config.max_new_tokens,
        "machine": where,
    }
    claimed |= {} if config.clock == "wall" else {"clock": config.clock}
    mine = state / f"run-{config.shard}.json"
    for path in (
        *sorted(set(state.glob("run-*.json")) - {mine}),
        mine,
    ):  # refuse before anything is written
        claim(path, claimed)
    _measure_part(state, model, plan, store, config)

    log = read_logs(state)
    if missing := int((~plan.done(log)).sum()):
        print(
            f"shard {config.shard} of {config.shards} is done; {missing} measurements of the "
            "others are missing"
        )
        return out
    if config.detrend:
        log = without_drift(plan, log)
    with locked(state):  # two that finish at once write one after the other
        if store is not None:
            _merge_features(out, model, plan, config)
        written: dict[str, Any] = {"name": dataset, "config": asdict(config)}
        written |= {
            "command": command(
                (about or {}).get("class", model.name), config, hasattr(model, "questions")
            )
        }
        written |= {"split": config.split, **identity, "machine": where, "shards": config.shards}
        written |= {"metrics": {metric: metrics.count(metric) for metric in sorted(set(metrics))}}
        profile = write_vlm_profile(out, plan, log, judge, model.knobs, written)
    print(rendered("profile", **profile))
    return out


def _measure_part(
    state: Path,
    model: AdaptiveVLM,
    plan: Plan,
    store: FeatureStore | None,
    config: VLMProfileConfig,
) -> None:
    """Measure the configurations, and take the features, that are this process's part. Which part a
    configuration falls into is drawn, so that no knob goes with one of the GPUs."""
    drawn = np.random.default_rng(config.seed).permutation(len(plan.configurations))
    part = sorted(drawn[config.shard :: config.shards])
    mine = replace(plan, configurations=tuple(plan.configurations[j] for j in part))
    untaken: set[str] = set()
    if store is not None:
        samples = plan.contents[config.shard :: config.shards]
        untaken = {key for key in samples if config.force or key not in store}
    with appended(state / f"measured-{config.shard}.jsonl") as log:
        measure(model, mine, log, mine.done(read_logs(state)), store, untaken)
        if store is not None:
            _collect(model, store, plan, untaken)


def _merge_features(out: Path, model: AdaptiveVLM, plan: Plan, config: VLMProfileConfig) -> None:
    """Write the features of all parts as one file."""
    store = _store(out, plan.contents, config)
    state = out / "state"
    _collect(model, store, plan, {key for key in plan.contents if key not in store})
    store.write(out / FEATURES_FILE, plan.contents, [item.id for item in plan.items])
    for folder in state.glob("features-*"):
        # a process that is still at work merges its own part
        with (
            suppress(InputError),
            appended(state / f"measured-{folder.name.rpartition('-')[2]}.jsonl"),
        ):
            shutil.rmtree(folder)


def _collect(model: AdaptiveVLM, store: FeatureStore, plan: Plan, wanted: Collection[str]) -> None:
    """Take the features with these content keys, which no measurement gave."""
    samples = {key: i for i, key in enumerate(plan.contents) if key in wanted}
    with progress("features", len(samples), quiet_s=5) as tick:
        for done, (key, i) in enumerate(samples.items(), 1):
            request = Request(plan.items[i].picture(), plan.questions[i])
            store.add(key, model.first_stage(request).features, plan.items[i].id)
            tick(done, "")
    store.flush()


def command(model: str, config: VLMProfileConfig, own_questions: bool = False) -> str:
    """The command that measures the same again: every setting that is not the default, as
    key=value."""
    words = [
        f"knobwise profile model={model}",
        *([] if own_questions else ["data=FILE"]),
        "out=DIR",
    ]
    return " ".join([*words, *changed_settings("knobs.", config, leave_out=_NOT_REPEATED)])


def chosen_configurations(
    knobs: tuple[KnobSupport, ...],
    config: VLMProfileConfig,
    usual: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[dict[str, Any], ...]:
    """The configurations that are measured, with a value for every knob: those in the settings,
    else the `usual` ones of the model, else its default. Raises InputError for a knob that the
    model lacks or that is named like a column of the table, a value that it does not take, and as
    `sample_grid`."""
    for knob in knobs:
        if knob.name in COLUMNS or knob.name.startswith(EXTRA) or knob.name.endswith("_ms"):
            raise InputError(
                f"knob {knob.name!r}: is the name of a measurement in a profile; rename it"
            )
    names = {*(config.values or {}), *(name for name in KNOBS if getattr(config, name))}
    check_configuration(knobs, dict.fromkeys(names - {knob.name for knob in knobs}))
    values = {knob.name: (knob.default,) for knob in knobs} | dict(usual or {})
    values |= {name: chosen for name in values if (chosen := config.measured_values(name))}
    for name, of_knob in values.items():
        for value in of_knob:
            check_configuration(knobs, {name: value})
    return tuple(sample_grid(values, config.count, config.seed))


def _drawn(items: tuple[VQAItem, ...], config: VLMProfileConfig) -> tuple[VQAItem, ...]:
    if config.samples is None:
        count = len(items)
    else:
        count = config.samples
    if count > len(items):
        raise InputError(f"knobs.samples={count}: the data hold only {len(items)} samples")
    drawn = np.random.default_rng(config.seed).permutation(len(items))[:count]
    return tuple(items[i] for i in sorted(drawn))


def _store(out: Path, contents: Sequence[str], config: VLMProfileConfig) -> FeatureStore:
    """This process's features, and all that is known of others'."""
    state = out / "state"
    known = [out / FEATURES_FILE, *sorted(state.glob("features-*"))]
    return FeatureStore(state / f"features-{config.shard}", contents, known)

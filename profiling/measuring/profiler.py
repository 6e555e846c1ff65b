"""Profile a vision-language model: measure it, write the profile. One call, which can be interrupted at any time.

profile_vlm("out", model, data, config)  →  out/table.parquet  features.safetensors  profile.json
                                            out/exp5/…  out/exp6/…  (the same measurements as exp5/exp6 files)
                                            out/state/…  (what a later call goes on from)

Several processes, each with its own GPU and `shard`, share one `out`: each measures its part of the configurations and
writes files of its own, and the one that ends last writes the profile. So does the same call once more, which is the
way to merge by hand. Which part a configuration falls into is drawn, so that no knob goes with one of the GPUs; still,
GPUs that differ in speed make configurations differ: let them be of one kind, and cooled alike.
"""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import shutil
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from knobwise.common.errors import InputError
from knobwise.profiling.elastic.measuring import claim
from knobwise.profiling.measuring.adaptive_model import KNOBS, AdaptiveVLM, KnobSupport, Request, check_configuration
from knobwise.profiling.measuring.answer_metrics import METRICS, answer_accuracy
from knobwise.profiling.measuring.feature_store import FeatureStore, collect_features, content_keys, image_digests
from knobwise.profiling.measuring.figures import describe
from knobwise.profiling.measuring.grid_sampling import STRATEGIES, sample_grid
from knobwise.profiling.measuring.measuring import Plan, appended, measure, read_logs
from knobwise.profiling.measuring.outputs import describe_knobs, machine, write_vlm_profile
from knobwise.profiling.measuring.questions import VQAData, VQAItem

FEATURES_FILE = "features.safetensors"


@dataclass
class VLMProfileConfig:
    """What `profile_vlm` measures of a model."""

    name: str = ""
    """Name of the data set, such as text_vqa; empty for that of the file."""
    split: str = "validation"
    """Which split of the data set the file holds; noted in exp5/exp6 files."""
    samples: int | None = None
    """Measure so many samples, drawn; more of them later include these. None for all."""
    metric: str = "auto"
    """vqa, exact, choice, anls, relaxed. auto: for each sample choice where it has choices, else vqa where it has three
    answers or more, else exact."""
    prompt: str = "{question}{choices}"
    """How a question is asked; {choices} stands for its options with their letters, a line each, or for nothing where
    there are none. Leave it out where the questions hold them already."""
    max_crops: tuple[int, ...] = ()
    """Values of this knob to measure; empty for the model's default alone."""
    top_k: tuple[int, ...] = ()
    """Likewise: experts for each token."""
    num_active_blocks: tuple[int, ...] = ()
    """Likewise: decoder blocks that run."""
    strategy: str = "full"
    """Which configurations of the grid are measured: full, or of large grids stratified, boundary, balanced or
    latin_hypercube."""
    count: int = 0
    """How many configurations, unless the grid is measured in full."""
    repeats: int = 3
    """Measurements of each sample with each configuration; the median is kept."""
    warm_up: int = 1
    """Untimed answers with each configuration before anything is timed."""
    block: int = 1
    """Samples asked in a row under one configuration, after one untimed; more than 1 only for a model that is slow
    after a change of its knobs, such as a compiled one."""
    max_new_tokens: int = 32
    """Where an answer is cut off. Given to the model where it is made."""
    seed: int = 0
    """Of the samples, the configurations, their parts and the order of measuring."""
    shard: int = 0
    """Which part of the configurations this process measures, from 0."""
    shards: int = 1
    """Into how many parts the configurations are divided."""
    features: bool = True
    """Whether to take what a decision sees: it comes with the first stage of every measurement."""
    half: bool = False
    """Keep features in half precision."""
    features_from: str = ""
    """Feature file of an earlier profile of the same model, to take over what has the same image and question."""
    force: bool = False
    """Take all features anew, also those that are there already; nothing is measured again."""

    def __post_init__(self) -> None:
        for name, least in {"repeats": 1, "warm_up": 0, "block": 1, "max_new_tokens": 1, "shards": 1}.items():
            if getattr(self, name) < least:
                raise InputError(f"knobs.{name} must be {least} at least, not {getattr(self, name)}")
        if self.samples is not None and self.samples < 1:
            raise InputError(f"knobs.samples must be 1 at least, or none for all, not {self.samples}")
        if not 0 <= self.shard < self.shards:
            raise InputError(
                f"knobs.shard must be 0 to {self.shards - 1}, since knobs.shards={self.shards}; not {self.shard}"
            )
        if self.metric not in ("auto", *METRICS):
            raise InputError(f"knobs.metric={self.metric!r} is unknown; known are auto, {', '.join(METRICS)}")
        if self.strategy not in STRATEGIES:
            raise InputError(f"knobs.strategy={self.strategy!r} is unknown; known are {', '.join(STRATEGIES)}")
        if self.count and self.strategy == "full":
            raise InputError(f"knobs.count={self.count}: give knobs.strategy too; full measures every configuration")
        if "{question}" not in self.prompt:
            raise InputError(f"knobs.prompt={self.prompt!r} must hold {{question}}")
        for knob in KNOBS:
            setattr(self, knob, tuple(int(value) for value in getattr(self, knob)))


_OF_A_CALL = ("shard", "shards", "force", "features_from")  # not what makes the profile again


def profile_vlm(
    out: str | Path,
    model: AdaptiveVLM,
    data: VQAData,
    config: VLMProfileConfig,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Measure the model, write the profile, and return its folder.

    Calling it again goes on where it stopped. More configurations, samples or repeats are measured beside those that
    are there; another model, machine, version or data set needs another folder.

    Args:
        out: the folder.
        model: what is measured; each call of `answer` is given one request.
        data: its queries are the samples.
        config: what of it.
        about: what else tells this model from others, as JSON can hold it: digest of its weights, data type, device.

    Raises:
        InputError: settings that the model cannot run, data that the metric cannot judge, another run in `out`, a model
            that fails with a sample (named).
    """
    out, state = Path(out), Path(out) / "state"
    items = _chosen(data.queries, config)
    metrics = tuple(metric_of(item, config.metric) for item in items)
    for item, metric in zip(items, metrics, strict=True):
        try:
            answer_accuracy(metric, item.answer, item.answers, item.choices)
        except InputError as error:
            raise InputError(f"sample {item.id!r}: {error}; choose another knobs.metric=…") from error
    configurations = chosen_configurations(model.knobs, config)
    if config.shards > len(configurations):
        raise InputError(f"knobs.shards={config.shards}: there are {len(configurations)} configurations only")
    if config.features_from and not Path(config.features_from).is_file():
        raise InputError(f"knobs.features_from={config.features_from}: no such file")

    where, dataset = machine(), config.name or "data"
    which = {
        "model": model.name,
        "knobs": {knob.name: [knob.default, knob.least, knob.most] for knob in model.knobs},
        **(about or {}),
    }
    questions = tuple(asked(item, config.prompt) for item in items)
    contents = tuple(content_keys(image_digests(items), questions, json.dumps(which, sort_keys=True)))
    store = _store(out, contents, config) if config.features else None  # reads what is there, and writes nothing yet
    _claim(
        state, config.shard, {"dataset": dataset, **which, "max_new_tokens": config.max_new_tokens, "machine": where}
    )

    plan = Plan(items, questions, contents, configurations, config.repeats)
    part = np.random.default_rng(config.seed).permutation(len(configurations))[config.shard :: config.shards]
    mine = replace(plan, configurations=tuple(configurations[j] for j in sorted(part)))
    own = dict(zip(contents[config.shard :: config.shards], items[config.shard :: config.shards], strict=True))
    untaken = {key for key in own if store is not None and (config.force or key not in store)}
    with appended(state / f"measured-{config.shard}.jsonl") as log:
        done = mine.done(read_logs(state))
        measure(
            model, mine, log, done, store=store, untaken=untaken, seed=config.seed, warm_up=config.warm_up,
            block=config.block,
        )  # fmt: skip
        if store is not None:
            left = {key: item for key, item in own.items() if key in untaken}
            _collect(model, store, left, config, force=config.force)

    found = read_logs(state)
    if missing := int((~plan.done(found)).sum()):
        print(f"shard {config.shard} of {config.shards} is done; {missing} measurements of the others are missing")
        return out
    with (state / "merging").open("w") as lock:  # two that end at once write one after the other
        fcntl.flock(lock, fcntl.LOCK_EX)
        if config.features:
            store = _store(out, contents, config)
            _collect(model, store, dict(zip(contents, items, strict=True)), config, force=False)
            store.write(out / FEATURES_FILE, contents, [item.id for item in items])
            for folder in state.glob("features-*"):
                # of a part that is still at work its process will merge them
                with suppress(InputError), appended(state / f"measured-{folder.name.rpartition('-')[2]}.jsonl"):
                    shutil.rmtree(folder)
        told = {"command": command(model.name, config), "config": asdict(config), "split": config.split, **which}
        profile = write_vlm_profile(
            out, dataset, plan, found, metrics, model.knobs, {**told, "machine": where, "shards": config.shards}
        )
    print(describe(profile["figures"]))
    if config.strategy != "full":
        print("(means over what was measured, which are not all combinations)")
    print(describe_knobs(profile["knobs"]))
    return out


def command(model: str, config: VLMProfileConfig) -> str:
    """The command that measures the same again: every setting that is not the default, as key=value."""
    words = []
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in _OF_A_CALL or value == f.default:
            continue
        text = str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)
        if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value):
            text = json.dumps(value, ensure_ascii=False)
        word = f"knobs.{f.name}={text}"
        words.append(shlex.quote(word) if isinstance(value, str) else word)
    return " ".join([f"knobwise profile model={model} data=FILE out=DIR", *words])


# -- what is measured --------------------------------------------------------------------------------------------------


def metric_of(item: VQAItem, metric: str = "auto") -> str:
    """The metric of one sample."""
    if metric != "auto":
        return metric
    return "choice" if item.choices else "vqa" if len(item.answers) >= 3 else "exact"


def asked(item: VQAItem, prompt: str = "{question}{choices}") -> str:
    """The question of one sample as the model reads it."""
    options = [f"\n{letter}. {text}" for letter, text in zip(string.ascii_uppercase, item.choices, strict=False)]
    parts = {"{question}": item.question, "{choices}": "".join(options)}
    return re.sub(r"{question}|{choices}", lambda found: parts[found[0]], prompt)


def chosen_configurations(knobs: tuple[KnobSupport, ...], config: VLMProfileConfig) -> tuple[dict[str, int], ...]:
    """The configurations that are measured, all knobs of each.

    Raises:
        InputError: a value that the model cannot be set to; what `sample_grid` refuses.
    """
    values = {knob.name: getattr(config, knob.name) or (knob.default,) for knob in knobs}
    for name, of_knob in values.items():
        for value in of_knob:
            check_configuration(knobs, {name: value})
    return tuple(sample_grid(values, config.strategy, config.count, config.seed))


def _chosen(items: tuple[VQAItem, ...], config: VLMProfileConfig) -> tuple[VQAItem, ...]:
    count = len(items) if config.samples is None else config.samples
    if count > len(items):
        raise InputError(f"knobs.samples={count}: the data hold {len(items)} only")
    drawn = np.random.default_rng(config.seed).permutation(len(items))[:count]
    return tuple(items[i] for i in sorted(drawn))


# -- state -------------------------------------------------------------------------------------------------------------


def _claim(state: Path, shard: int, identity: Mapping[str, Any]) -> None:
    """Note what is measured in `state`, and refuse what another process, or an earlier call, does not measure too."""
    own = state / f"run-{shard}.json"
    for path in (*(path for path in sorted(state.glob("run-*.json")) if path != own), own):
        try:
            claim(path, dict(identity))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error


def _store(out: Path, contents: Sequence[str], config: VLMProfileConfig) -> FeatureStore:
    """This process's features, and all that is known of others'."""
    state = out / "state"
    known = [out / FEATURES_FILE, *sorted(state.glob("features-*"))]
    if config.features_from:
        known.insert(0, Path(config.features_from))
    return FeatureStore(state / f"features-{config.shard}", contents, known, config.half)


def _collect(
    model: AdaptiveVLM, store: FeatureStore, wanted: Mapping[str, VQAItem], config: VLMProfileConfig, force: bool
) -> None:
    def take(item: VQAItem) -> Mapping[str, Any]:
        return model.first_stage(Request(item.picture(), asked(item, config.prompt))).features

    collect_features(store, tuple(wanted.values()), tuple(wanted), take, force)

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import small_table

from knobwise.experiments.command_line.compose import (
    GROUPS,
    field_docs,
    read_settings,
)
from knobwise.experiments.command_line.help import help_lines
from knobwise.experiments.settings.options import VERBS, TrainRun
from knobwise.experiments.settings.profiles import BuiltinProfile, TableProfile, read_profile


def every_config() -> set[type[Any]]:
    configs = {
        type(option) if not isinstance(option, type) else option for g in GROUPS.values() for option in g.values()
    }
    waiting = list(VERBS.values()) + list(configs)
    while waiting:
        node = waiting.pop()
        configs.add(node)
        for f in fields(node):
            default = f.default_factory() if callable(f.default_factory) else f.default
            if is_dataclass(default) and type(default) not in configs:
                waiting.append(type(default))
    return configs


@pytest.mark.parametrize("node", sorted(every_config(), key=lambda n: n.__name__), ids=lambda n: n.__name__)
def test_every_field_of_every_config_has_a_docstring(node: type[Any]) -> None:
    assert set(field_docs(node)) == {f.name for f in fields(node)}
    assert all(len(text) > 10 for text in field_docs(node).values())


def test_the_settings_of_the_original_system() -> None:
    settings = read_settings("train", ["experiment=seeds"])
    assert (settings.optimiser.contexts, settings.optimiser.lr, settings.loss.group_size) == (64, 1e-4, 8)
    assert settings.split.train == 0.8
    r = settings.reward
    assert (r.kind, r.alpha, r.beta, r.gamma, r.delta, r.epsilon) == ("shaped", 1, 0.5, 10, 0.1, 0.05)
    assert settings.budget.strategy == "relative"
    assert list(settings.budget.factors) == [0.8, 1.0, 1.2]
    assert (settings.policy.structure, settings.policy.hidden) == ("independent", 256)
    assert settings.loss.objective == "sampled"


def test_the_settings_of_the_original_selector() -> None:
    settings = read_settings("train_selector", ["experiment=selector_seeds"])
    network = settings.selector
    assert (network.version, network.projection, network.update, network.dropout) == ("v2", "linear", "convex", 0.5)
    assert (network.width, network.layers, network.temperature) == (256, 1, 0.1)
    assert (settings.sft.epochs, settings.sft.lr, settings.sft.weight_decay, settings.sft.rise) == (
        20,
        1e-4,
        1e-3,
        0.05,
    )
    assert settings.rce.lr == settings.sft.lr / 10
    assert 2 <= settings.grpo.epochs <= 5
    loss = settings.loss
    assert (loss.clip_epsilon, loss.advantage, loss.advantage_std_floor, loss.advantage_clip) == (0.2, "zscore", 0.1, 5)
    assert (list(loss.kl_band), loss.temperature_start, loss.temperature_end) == ([0.01, 0.1], 2.0, 0.5)
    assert loss.curriculum_top == 3
    (name,) = settings.variants
    variant = settings.plan(name).variant
    assert (variant.live, variant.groups, variant.own_draws, variant.warmup) == (False, "all", 0, True)
    assert settings.reward.mode == "hard_plus_soft_v2"


def test_defaults_and_overrides() -> None:
    settings = read_settings("train", [])
    assert isinstance(settings, TrainRun)
    assert isinstance(settings.profile, BuiltinProfile)
    assert len(settings.seeds) >= 3
    changed = read_settings("train", ["profile=table", "profile.path=a.csv", "policy=joint", "policy.hidden=8"])
    assert isinstance(changed.profile, TableProfile)
    assert (changed.policy.structure, changed.policy.hidden) == ("joint", 8)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_names_every_key_once(verb: str) -> None:
    lines = help_lines(verb)
    assert len({(line.key, line.choice) for line in lines}) == len(lines)
    assert all(line.meaning for line in lines)


def test_help_shows_the_defaults_that_hold() -> None:
    defaults = {line.key: line.default for line in help_lines("train")}
    assert defaults["reward.kind"] == "utility"
    assert defaults["profile"] == "builtin"


def test_a_saved_table_is_a_profile_too(tmp_path: Path) -> None:
    table = small_table(20)
    table.save(tmp_path / "t.safetensors")
    settings = read_settings("inspect", ["profile=table", f"profile.path={tmp_path / 't.safetensors'}"])
    assert read_profile(settings.profile).digest == table.digest

"""Every option: its meaning, its default, and what profiles and beams are read from it."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_beams, small_table

from knobwise.agents.controller.controller import Controller
from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.experiments.command_line.compose import GROUPS, field_docs, read_settings
from knobwise.experiments.command_line.help import help_lines
from knobwise.experiments.settings.beams import hide, read_data
from knobwise.experiments.settings.options import VERBS, TrainRun
from knobwise.experiments.settings.profiles import BuiltinProfile, TableProfile, read_profile
from knobwise.experiments.settings.selector_options import BeamFiles


def every_config() -> list[type[Any]]:
    """The dataclasses of the verbs and of all choices, with those that their fields hold by
    default."""
    configs: dict[type[Any], None] = {}
    waiting = [*VERBS.values(), *(option for group in GROUPS.values() for option in group.values())]
    while waiting:
        option = waiting.pop()
        node = option if isinstance(option, type) else type(option)
        configs[node] = None
        defaults = [
            f.default_factory() if callable(f.default_factory) else f.default for f in fields(node)
        ]
        waiting += [
            default
            for default in defaults
            if is_dataclass(default) and type(default) not in configs
        ]
    return list(configs)


@pytest.mark.parametrize("node", every_config(), ids=lambda node: node.__name__)
def test_every_field_of_every_config_has_a_docstring(node: type[Any]) -> None:
    assert set(field_docs(node)) == {f.name for f in fields(node)}
    assert all(len(text) > 10 for text in field_docs(node).values())


def test_the_settings_of_the_original_system() -> None:
    settings = read_settings("train", ["experiment=seeds"])
    assert (settings.optimiser.contexts, settings.optimiser.lr, settings.loss.group_size) == (
        64,
        1e-4,
        8,
    )
    assert settings.split.train == 0.8
    r = settings.reward
    assert (r.kind, r.alpha, r.beta, r.gamma, r.delta, r.epsilon) == (
        "shaped",
        1,
        0.5,
        10,
        0.1,
        0.05,
    )
    assert settings.budget.strategy == "relative"
    assert list(settings.budget.factors) == [0.8, 1.0, 1.2]
    policy = settings.policy
    assert (policy.teacher, policy.members, policy.guard, policy.hidden) == (False, 1, False, 256)
    assert settings.loss.objective == "sampled"


def test_the_small_original_has_half_a_million_parameters_and_nothing_else_is_different() -> None:
    wide = [
        "profile=simulated",
        "profile.datasets=[text_vqa]",
        "profile.samples=8",
        "profile.grid='240'",
    ]
    small, large = (
        read_settings("train", [f"experiment={name}", *wide]) for name in ("seeds_small", "seeds")
    )
    same = {
        "experiment": large.experiment,
        "policy": replace(small.policy, hidden=large.policy.hidden),
    }
    assert replace(small, **same) == large
    table = read_profile(small.profile)
    assert {name: block.shape[1] for name, block in table.features.items()} == {
        "image_features": 768, "language_features": 2048
    }  # fmt: skip
    assert table.num_configurations == 240
    counts = {}
    for budget_width in (
        small.policy.budget_width,
        33,
    ):  # 33 makes 2,848 inputs and the budget itself
        config = replace(small.policy, budget_width=budget_width)
        controller = Controller.for_table(table, torch.arange(8), config)
        counts[budget_width] = sum(parameter.numel() for parameter in controller.parameters())
    assert counts == {9: 500_011, 33: 503_995}
    assert all(abs(count / 500_000 - 1) < 0.03 for count in counts.values())


def test_the_settings_of_the_original_selector() -> None:
    settings = read_settings("train_selector", ["experiment=selector_seeds"])
    network = settings.selector
    assert (network.projection, network.update, network.dropout) == ("linear", "convex", 0.5)
    assert (network.width, network.layers, network.temperature) == (256, 1, 0.1)
    sft = settings.sft
    assert (sft.epochs, sft.lr, sft.weight_decay, sft.rise) == (20, 1e-4, 1e-3, 0.05)
    assert settings.rce.lr == sft.lr / 10
    assert 2 <= settings.grpo.epochs <= 5
    loss = settings.loss
    assert (loss.clip_epsilon, loss.advantage, loss.advantage_std_floor, loss.advantage_clip) == (
        0.2,
        "zscore",
        0.1,
        5,
    )
    assert (loss.temperature_start, loss.temperature_end) == (2.0, 0.5)
    (name,) = settings.variants
    variant = settings.plan(name).variant
    assert (variant.live, variant.groups, variant.own_draws, variant.warmup) == (
        False,
        "all",
        0,
        True,
    )
    assert settings.reward.mode == "auto"


def test_defaults_and_overrides() -> None:
    settings = read_settings("train", [])
    assert isinstance(settings, TrainRun)
    assert isinstance(settings.profile, BuiltinProfile)
    assert len(settings.seeds) >= 3
    assert settings.policy.teacher
    assert settings.policy.guard
    assert settings.policy.members > 1
    assert set(settings.policy.experts) == set(FAMILIES)
    assert (settings.loss.objective, settings.loss.group_size) == ("sampled", 16)
    assert min(settings.optimiser.warmup_iterations, settings.optimiser.iterations) > 0
    assert asdict(read_settings("train", ["policy=utility"]).policy) == asdict(settings.policy) | {
        "experts": []
    }
    changed = read_settings(
        "train", ["profile=table", "profile.path=a.csv", "policy=independent", "policy.hidden=8"]
    )
    assert isinstance(changed.profile, TableProfile)
    assert (changed.policy.teacher, changed.policy.hidden) == (False, 8)
    in_help = {line.key: line.default for line in help_lines("train")}
    assert (in_help["reward.kind"], in_help["profile"]) == ("utility", "builtin")
    assert (in_help["policy"], in_help["optimiser"], in_help["loss"]) == (
        "auto",
        "that of policy",
        "sampled",
    )


def test_help_says_what_every_policy_is() -> None:
    meanings = {line.key: line.meaning for line in help_lines("train")}
    choices, about = meanings["policy"].split(". ", 1)
    assert choices == "Group: auto, utility, independent"
    for choice in ("auto", "utility", "independent"):
        assert f"{choice}: " in about
    assert meanings["optimiser"].startswith("Group: auto, utility, independent. ")


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_names_every_key_once(verb: str) -> None:
    lines = help_lines(verb)
    assert len({(line.key, line.choice) for line in lines}) == len(lines)
    assert all(line.meaning for line in lines)


def test_a_saved_table_is_a_profile_too(tmp_path: Path) -> None:
    table = small_table(20)
    table.save(tmp_path / "t.safetensors")
    settings = read_settings(
        "inspect", ["profile=table", f"profile.path={tmp_path / 't.safetensors'}"]
    )
    assert read_profile(settings.profile).digest == table.digest


# -- what the selector experiment learns from and is judged on -------------------------------------


def test_hidden_columns_are_hidden_everywhere_and_nothing_else_is() -> None:
    table, _ = small_beams()
    hidden = hide(table, ["liar"])
    for seen, before in ((hidden.queries, table.queries), (hidden.candidates, table.candidates)):
        assert not seen[:, 3].any()
        assert torch.equal(seen[:, :3], before[:, :3])
    assert table.candidates[:, 3].any()  # the table itself is left as it was


def test_beams_of_a_file_are_judged_on_queries_that_nothing_was_fitted_or_chosen_on(
    tmp_path: Path,
) -> None:
    table, _ = small_beams(50)
    table.save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    parts = [
        set(rows.tolist()) for rows in (data.split.train, data.split.validation, data.test_rows)
    ]
    assert [len(part) for part in parts] == [40, 5, 5]
    assert len(set.union(*parts)) == 50
    assert data.judged_by == "recorded"


def test_without_right_answers_the_best_beam_is_right(tmp_path: Path) -> None:
    table, _ = small_beams(30)
    scores = {"beam_score": torch.tensor([0.1, 0.4, 0.2, 0.4, 0.3, 0.0]).expand(30, -1)}
    replace(table, fields=scores).save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    assert data.judged_by == "best_beam"
    assert "vqa_correct" not in data.table.fields
    assert data.test.fields["vqa_correct"][0].tolist() == [0, 1, 0, 1, 0, 0]

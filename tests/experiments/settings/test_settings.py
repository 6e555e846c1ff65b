"""Every option: its meaning, its default, and what profiles and beams are read from it."""

import json
from dataclasses import asdict, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path

import polars as pl
import pytest
import torch
import yaml
from helpers import input_error, small_beams

from knobwise.agents import Controller, OptimiserConfig
from knobwise.agents.deployed.text import MESSAGES
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.help import help_lines
from knobwise.experiments.command_line.registry import (
    READERS,
    field_docs,
    names_of_choices,
    readers_of,
)
from knobwise.experiments.command_line.verbs import VERBS, settings_of_verb
from knobwise.experiments.settings.beams import SMOLLM_BEAMS, _check_items, hide, read_data
from knobwise.experiments.settings.config_file import flatten_keys, settings_text
from knobwise.experiments.settings.deployment_options import EvaluateRun
from knobwise.experiments.settings.options import CHATS, TrainRun, resolve_training
from knobwise.experiments.settings.profiles import (
    BuiltinProfile,
    SimulatedProfile,
    TableProfile,
    read_profile,
    read_questions,
)
from knobwise.experiments.settings.selector_options import BeamFiles, BuiltinBeams, SmollmBeams
from knobwise.experiments.settings.values import training_settings
from knobwise.profiling.huggingface.smollm import QUESTIONS_CSV
from knobwise.profiling.measuring.questions import read_vqa_data

CONFIGS = [settings_of_verb(verb) for verb in VERBS]
for readers in map(readers_of, READERS):
    CONFIGS += [reader for reader in readers.values() if reader not in CONFIGS]
# those that their fields hold by default come behind them
for config in CONFIGS:
    for field in fields(config):
        value = field.default_factory() if callable(field.default_factory) else None
        if is_dataclass(value) and type(value) not in CONFIGS:
            CONFIGS.append(type(value))


@pytest.mark.parametrize("node", CONFIGS, ids=lambda node: node.__name__)
def test_every_field_of_every_config_has_a_docstring(node):
    docs = field_docs(node)
    assert docs.keys() == {f.name for f in fields(node)}
    assert min(map(len, docs.values()), default=11) > 10


def chosen(settings, wanted):
    """The settings that are `wanted`, by their keys."""
    return {key: attrgetter(key)(settings) for key in wanted}


def assert_set(settings, words):
    """Check that settings have these values, written as on the command line."""
    for word in words.split():
        key, value = word.split("=")
        assert attrgetter(key)(settings) == yaml.safe_load(value), key


def test_the_settings_of_the_original_system():
    settings = read_settings("train", ["experiment=seeds"])
    assert_set(
        settings,
        """
        optimiser.contexts=64 optimiser.lr=1.0e-4 loss.group_size=8 split.train=0.8
        reward.kind=shaped reward.alpha=1 reward.beta=0.5 reward.gamma=10 reward.delta=0.1
        reward.epsilon=0.05 budget.strategy=relative policy.teacher=false policy.fold_networks=1
        policy.guard=false policy.hidden=256 loss.objective=sampled
        """,
    )


def test_the_small_original_has_half_a_million_parameters_and_nothing_else_is_different():
    wide = "profile=simulated profile.datasets=[text_vqa] profile.samples=8 profile.grid='240'"
    small, large = (
        read_settings("train", [f"experiment={name}", *wide.split()])
        for name in ("seeds_small", "seeds")
    )
    policy = replace(small.policy, hidden=large.policy.hidden)
    assert replace(small, experiment=large.experiment, policy=policy) == large
    table = read_profile(small.profile)
    widths = {name: block.shape[1] for name, block in table.features.items()}
    assert widths == {"image_features": 768, "language_features": 2048}
    assert table.num_configurations == 240
    controller = Controller.for_table(table, torch.arange(8), small.policy)
    assert sum(parameter.numel() for parameter in controller.parameters()) == 500_011


def test_the_settings_of_the_original_selector():
    settings = read_settings("train_selector", ["experiment=selector_seeds"])
    assert_set(
        settings,
        """
        selector.projection=linear selector.update=convex selector.dropout=0.5 selector.width=256
        selector.layers=3 selector.temperature=0.1 sft.epochs=20 sft.lr=1.0e-4 rce.lr=1.0e-5
        grpo.epochs=5 loss.clip_epsilon=0.2 loss.advantage=zscore reward.mode=auto
        """,
    )
    (plan,) = settings.plans.values()
    assert_set(plan.variant, "live=false groups=all own_draws=0 warmup=true")


def test_defaults_and_overrides():
    settings = read_settings("train", [])
    assert isinstance(settings.profile, BuiltinProfile)
    assert_set(
        settings,
        """
        policy.teacher=true policy.guard=true policy.fold_networks=5 policy.drift=0.3
        loss.objective=sampled loss.group_size=16 reward.kind=utility reward.miss=0.2
        optimiser.pretrain_iterations=300 optimiser.iterations=400
        """,
    )
    assert set(settings.policy.experts) == set(FAMILIES)
    utility = read_settings("train", ["policy=utility"])
    assert asdict(utility.policy) == asdict(settings.policy) | {"experts": []}
    assert utility.optimiser == settings.optimiser
    words = "profile=table profile.path=a.csv policy=independent policy.hidden=8"
    changed = read_settings("train", words.split())
    assert isinstance(changed.profile, TableProfile)
    assert changed.policy.teacher is False
    assert changed.policy.hidden == 8
    assert changed.optimiser == OptimiserConfig()


def test_the_dataclass_says_what_is_trained_by_default():
    assert settings_text(read_settings("train", [])) == settings_text(
        TrainRun(profile=BuiltinProfile())
    )
    assert read_settings("evaluate", ["beams=builtin"]).reward == EvaluateRun().reward


OF_CONTROLLERS = [
    name for name in names_of_choices("experiment") if not name.startswith("selector")
]
CHOSEN = [
    {"policy": "independent"},
    {"policy": "independent", "optimiser": "utility"},
    {"policy": "utility", "optimiser": {"lr": 0.5}, "policy.hidden": 9, "loss": "exact"},
    {"reward": "shaped", "reward.alpha": 2, "seeds": (1, 2), "init_from": "x"},
    {"budget": "mean", "budgets_ms": [3, 5]},
    {"loss": {"kl_band": (0.01, 0.1)}, "split": {"train": 0.5}, "balance": {"by": "dataset"}},
    {"loss.kl_to_ref_coeff": None, "policy.experts": ["ridge"], "name": "${x}", "baselines": False},
    {"experiment": "seeds", "policy": "utility", "optimiser.iterations": 3},
]


@pytest.mark.parametrize(
    "options", [*({"experiment": name} for name in OF_CONTROLLERS), *CHOSEN], ids=str
)
def test_values_from_python_mean_what_words_mean(options):
    words = []
    for key, value in flatten_keys(options).items():
        words.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    wanted = replace(read_settings("train", words), profile=None)
    assert settings_text(training_settings(options)) == settings_text(wanted)


def test_settings_from_python_are_nobody_elses():
    before = settings_text(training_settings({}))
    changed = training_settings({})
    changed.policy.hidden = 3
    changed.tracking.mode = "online"
    assert settings_text(training_settings({})) == before


def test_what_is_read_of_a_chat_is_what_encoders_know():
    """Also where no text is read, so that nobody is told late."""
    assert CHATS == MESSAGES
    with input_error("chat='first'"):
        TrainRun(profile=None, chat="first")


def test_what_follows_from_the_kind_of_budget_is_settled_beside_the_settings():
    settings = read_settings("train", ["budget=mean"])
    assert resolve_training(settings).reward.kind == "priced"
    assert settings.reward.kind == "utility"


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_names_every_key_once(verb):
    lines = help_lines(verb)
    assert len({(line.key, line.choice) for line in lines}) == len(lines)
    assert all(line.meaning for line in lines)


# -- what the selector experiment learns from and is judged on -------------------------------------


def test_hidden_columns_are_hidden_everywhere_and_nothing_else_is():
    table, _ = small_beams()
    hidden = hide(table, ["liar"])
    for seen, before in ((hidden.queries, table.queries), (hidden.candidates, table.candidates)):
        assert not seen[:, 3].any()
        assert torch.equal(seen[:, :3], before[:, :3])
    assert table.candidates[:, 3].any()  # the table itself is left as it was


def test_beams_of_a_file_are_judged_on_queries_that_nothing_was_fitted_or_chosen_on(tmp_path):
    small_beams(50)[0].save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    parts = [data.split.train, data.split.validation, data.test_rows]
    assert [len(part) for part in parts] == [40, 5, 5]
    assert len(torch.cat(parts).unique()) == 50
    assert data.judged_by == "recorded"


def test_beams_that_were_recorded_under_questions_as_they_are_spelled_fit_their_items():
    data = read_vqa_data(QUESTIONS_CSV, images=False)
    table = BeamTable.load(SMOLLM_BEAMS)
    assert table.query_images[0] != data.queries[0].image_id
    _check_items(data, table)
    with input_error("images of the queries"):
        _check_items(data, replace(table, query_images=("", *table.query_images[1:])))


def test_without_right_answers_the_best_beam_is_right(tmp_path):
    table, _ = small_beams(30)
    scores = {"beam_score": torch.tensor([0.1, 0.4, 0.2, 0.4, 0.3, 0.0]).expand(30, -1)}
    replace(table, fields=scores).save(tmp_path / "t.safetensors")
    data = read_data(BeamFiles(path=str(tmp_path / "t.safetensors")))
    assert data.judged_by == "best_beam"
    assert "vqa_correct" not in data.table.fields
    assert data.test.fields["vqa_correct"][0].tolist() == [0, 1, 0, 1, 0, 0]
    # so `evaluate` leaves out what a selector was trained on, unlike on the built-in beams
    assert not data.has_own_test
    assert read_data(BuiltinBeams()).has_own_test


def test_questions_are_those_beside_the_profile(home):
    profile = TableProfile(path="t.csv")
    assert read_questions(profile) == {}
    file = Path("samples.parquet")
    pl.DataFrame({"sample_id": [7], "question": ["How many?"]}).write_parquet(file)
    assert read_questions(profile) == {"7": "How many?"}
    # a simulated profile has no files, whatever is in the current folder
    assert read_questions(SimulatedProfile()) == {}
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(len(content) - 12) + content[-8:])
    assert read_questions(profile) == {}


def test_the_beams_of_the_language_model_come_with_their_questions():
    data = read_data(SmollmBeams())
    table = data.table
    items = read_vqa_data(QUESTIONS_CSV, images=False)
    assert table.query_ids == tuple(item.id for item in items.queries)
    assert table.candidate_images == tuple(item.question for item in items.bank)
    assert [len(part) for part in data.split] == [460, 84, 293]
    # what was shown decides: pairs of the query's own kind are right most often
    right = {}
    for method in ("random", "retrieval", "sample"):
        of_method = table.found_by == METHODS.index(method)
        right[method] = float(table.fields["vqa_correct"][of_method].mean())
    assert 0.1 < right["random"] < right["retrieval"] < right["sample"] < 0.5

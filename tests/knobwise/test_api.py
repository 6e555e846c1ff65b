"""A policy from Python in one call: read, fit, load, decide."""

import doctest
import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
import pytest
import torch
from commands import TABLE, launch, write_table
from helpers import (
    WITH_TEACHER,
    close,
    deployed,
    driven_apart,
    identical,
    input_error,
    small_beams,
    small_table,
    two_kinds,
)
from replayed import untrained

import knobwise
from knobwise import agents, api, envs, losses, reading, testbeds
from knobwise.agents import DeployedController, PolicyConfig, Selector, SelectorConfig
from knobwise.agents.training.checkpoint import Loaded, save_checkpoint
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, write_long_table
from knobwise.serving.knob_policy import KnobPolicy
from knobwise.testbeds import builtin_profile

QUICK = {"teacher_iterations": 4, "pretrain_iterations": 4, "iterations": 4}
QUICK |= {"contexts": 32, "minibatch": 32, "evaluate_every": 4}
TINY = {"policy": "utility", "policy.hidden": 8, "policy.fold_networks": 2, "optimiser": QUICK}
HEADS = PolicyConfig(hidden=8)
MEAN_MS = 12.0
"""The budget that the policies for mean budgets are calibrated for."""
KINDS = {
    "heads": HEADS,
    "taught": replace(WITH_TEACHER, experts=("ridge", "knn")),
    "unguarded": replace(WITH_TEACHER, experts=(), guard=False),
    "no features": replace(WITH_TEACHER, experts=()),
    "mean": replace(WITH_TEACHER, experts=(), guard=False),
}


@functools.cache
def case(kind):
    """A table, a controller of this kind for it, and the policy that decides by it."""
    table = small_table(40, features=kind != "no features")
    if kind == "heads":
        agent = untrained(table, HEADS)
    elif kind == "mean":
        agent = deployed(table, KINDS[kind], torch.tensor([MEAN_MS]), "mean")
    else:
        agent = deployed(table, KINDS[kind])
    return table, agent, policy_of(agent)


def policy_of(agent):
    return KnobPolicy(Loaded(agent, "t", "", {}))


def chosen_by(agent, table, features, limits):
    """The knob values that an agent chooses for these inputs."""
    blocks = {name: block.numpy() for name, block in features.items()}
    return [table.configuration(int(c)) for c in agent.choose(blocks, limits.double().numpy())]


# -- decide ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decide_is_choose_for_many_or_for_each_alone_in_lists_numpy_and_torch(kind):
    table, agent, policy = case(kind)
    limits = torch.full((40,), MEAN_MS) if kind == "mean" else torch.linspace(5, 25, 40)
    wanted = chosen_by(agent, table, table.features, limits)
    for form in (torch.Tensor.tolist, torch.Tensor.numpy, torch.clone):
        blocks = {name: form(block) for name, block in table.features.items()}
        assert policy.decide(blocks, form(limits)) == wanted
        for i in (0, 17):
            alone = {name: form(block[i]) for name, block in table.features.items()}
            assert policy.decide(alone, float(limits[i])) == wanted[i]


@pytest.mark.parametrize("batched", itertools.product([False, True], repeat=3))
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_for_one_input_is_for_all_of_them(batched, n):
    table, agent, policy = case("taught")
    values = {"limits": torch.linspace(5, 25, n), **table.features}
    given, whole = {}, {}
    for name, many in zip(reversed(values), batched, strict=True):
        given[name] = values[name][:n] if many else values[name][0]
        whole[name] = given[name].expand_as(values[name][:n])
    wanted = chosen_by(agent, table, whole, whole.pop("limits"))
    decisions = policy.decide(given, given.pop("limits"))
    assert (decisions if any(batched) else [decisions] * n) == wanted


def test_a_lone_block_needs_no_name_and_no_features_are_none():
    table = two_kinds(20, shown=True)
    agent = untrained(table, HEADS)
    policy = policy_of(agent)
    chosen = chosen_by(agent, table, table.features, torch.full((20,), 15.0))
    assert policy.decide(table.features["x"].double().numpy(), 15) == chosen
    assert policy.decide(np.zeros((0, 2)), 15.0) == []
    assert policy.decide([0.0, 1.0], [], explain=True) == []
    *_, without = case("no features")
    assert without.decide(None, 9.0) == without.decide({}, 9.0) == without.decide({}, [9.0])[0]


def test_a_decision_is_the_callers_own():
    *_, policy = case("unguarded")
    before = policy.decide(GOOD, 10.0)
    policy.decide(GOOD, 10.0).clear()
    policy.decide(GOOD, 10.0, explain=True).expected[0]["configuration"].clear()
    assert policy.decide(GOOD, 10.0) == before != {}
    assert policy.features == {"image_features": 4, "language_features": 4}
    assert policy.knobs == {"max_crops": (2, 6, 10), "top_k": (4, 8), "num_active_blocks": (12, 16)}
    assert "'language_features': 4" in repr(policy)


GOOD = {"image_features": [0.0] * 4, "language_features": [0.0] * 4}


# -- fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "features"),
    [
        (r"image_features.* \(1, 4\), got \(1, 3\)", GOOD | {"image_features": [0.0] * 3}),
        ("language_features.* nothing", {"image_features": [0.0] * 4}),
        ("language_features.* nothing", [0.0] * 4),
        ("image_features.* nothing", None),
        (r"image_features.* \(\)", GOOD | {"image_features": 1.0}),
        ("image_features: must be numbers", GOOD | {"image_features": ["a"] * 4}),
        ("image_features: must be numbers", GOOD | {"image_features": [[0.0] * 4, [0.0]]}),
        ("infinite", GOOD | {"image_features": [1e300, 0.0, 0.0, 0.0]}),
        ("image_features: must be numbers", GOOD | {"image_features": np.full(4, 1j)}),
        ("image_features: must be numbers", GOOD | {"image_features": torch.full((4,), 1j)}),
    ],
)
def test_features_that_do_not_fit_are_named(message, features):
    with input_error(message):
        case("taught")[2].decide(features, 9.0)


@pytest.mark.parametrize(
    "budget_ms", [np.complex128(9), float("nan"), 0, -1.0, [9, np.inf], [[9.0]], "soon"]
)
def test_a_budget_that_is_none_is_named(budget_ms):
    with input_error("budget"):
        case("taught")[2].decide(GOOD, budget_ms)


def test_other_numbers_of_budgets_and_budgets_that_are_not_calibrated_are_refused():
    with input_error(r"\[2, 3\]"):
        case("taught")[2].decide(GOOD | {"image_features": np.zeros((3, 4))}, [9.0, 9.0])
    with input_error(r"7.*12"):
        case("mean")[2].decide(GOOD, 7.0)


def test_fit_is_what_the_command_trains_and_save_keeps_it(home, capsys):
    write_table(60)
    before, threads = sorted(home.iterdir()), torch.get_num_threads()
    torch.set_num_threads(2)
    policy = knobwise.fit("t.parquet", "f.npz", seed=3, **TINY)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert sorted(home.iterdir()) == before
    assert "budget-aware static" in capsys.readouterr().err
    optimiser = [f"optimiser.{name}={value}" for name, value in QUICK.items()]
    words = (
        "policy=utility policy.hidden=8 policy.fold_networks=2 baselines=false tracking=disabled"
    )
    launch("train", TABLE, optimiser, words, "seeds=[3]")
    policies = [row["policy"] for row in policy.judged["rows"][::6]]
    assert policies == ["controller", "teacher", "budget_aware_static", "oracle"]
    policy.save("p.pt")
    features = knobwise.read("t.parquet", "f.npz").features
    limits = torch.linspace(5, 25, 60)
    for path, judged in (("p.pt", policy.judged), ("runs/latest", None)):
        again = knobwise.load(path)
        assert again.decide(features, limits) == policy.decide(features, limits)
        assert again.judged == judged
        identical(again.agent.controller.state_dict(), policy.agent.controller.state_dict())


@pytest.mark.parametrize(
    ("options", "experts"),
    [
        ({"policy": "independent", "reward": "shaped"}, None),
        (
            {
                "policy": "utility",
                "policy.fold_networks": 2,
                "budget": "mean",
                "budgets_ms": [9.0, 14],
            },
            [],
        ),
        ({"policy.fold_networks": 2, "policy.experts": ["ridge"], "budget": "relative"}, ["ridge"]),
        ({"policy": "utility", "policy.fold_networks": 2, "budgets_ms": (10, 20)}, []),
        ({"policy": "independent", "budgets_ms": np.array([10.0, 20.0]), "loss": {}}, None),
    ],
    ids=["independent", "mean", "experts", "no experts", "an array"],
)
def test_fit_takes_the_options_of_the_command_line(options, experts, capsys):
    table = small_table(60)
    taught = options.get("policy") != "independent"
    optimiser = {key: QUICK[key] for key in QUICK if taught or key != "teacher_iterations"}
    policy = knobwise.fit(table, optimiser=optimiser, **options)
    agent = policy.agent
    if experts is None:
        assert agent.teacher is None
    else:
        assert list(agent.teacher.chosen()["settings"]) == experts
    mean = options.get("budget") == "mean"
    assert agent.rule.name == ("mean" if mean else "deadline")
    assert bool(agent.calibration.guard) == (experts is not None)
    assert len(policy.decide(table.features, 14.0, explain=True)) == 60
    budgets_ms = policy.judged["budgets_ms"]
    assert budgets_ms == list(options.get("budgets_ms", budgets_ms))
    assert ("static mix" if mean else "budget-aware static") in capsys.readouterr().err


class Frame:
    """As much of a pandas data frame as is used: columns as lists, holes as NaN."""

    def __init__(self, frame):
        holes = polars.col("accuracy", "latency_ms").fill_null(float("nan"))
        self.columns = frame.with_columns(holes).to_dict(as_series=False)

    def to_dict(self, orient):
        assert orient == "list"
        return self.columns


@pytest.mark.parametrize("form", ["polars", "pandas"])
def test_a_data_frame_is_read_as_the_file_is(form, home):
    table = small_table(12)
    frame = long_frame(table).sample(fraction=1.0, shuffle=True, seed=1)
    first = polars.int_range(polars.len()) == 0
    hole = polars.when(~first).then("accuracy")
    frame = frame.with_columns(accuracy=hole)
    frame.write_parquet("small.parquet")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    blocks = {name: block[order] for name, block in table.features.items()}
    features = {"sample_id": [table.sample_ids[i] for i in order.tolist()], **blocks}
    write_features(table, "f.npz")
    wanted = knobwise.read("small.parquet", "f.npz")
    assert int((~wanted.mask).sum()) == 1
    assert wanted.features["image_features"].equal(table.features["image_features"])
    given = frame if form == "polars" else Frame(frame)
    assert knobwise.read(given, features).digest == wanted.digest
    assert knobwise.read(given, features, name="mine").name == "mine"


def test_read_names_the_reader_of_exp5_and_exp6_folders(home):
    Path("exp5").mkdir()
    with input_error("exp5.*read_exp5_exp6"):
        knobwise.read("exp5")


def test_read_takes_saved_profiles_and_folders(home):
    table = small_table(12)
    table.save("t.safetensors")
    assert knobwise.read("t.safetensors").digest == table.digest
    Path("measured").mkdir()
    write_long_table(table, "measured/table.parquet")
    write_features(table, "measured/features.npz")
    folder = knobwise.read(Path("measured"))
    assert folder.name == "measured"
    assert folder.digest == table.digest
    ids = table.sample_ids
    lone = {"sample_id": list(ids), "x": np.ones(12)}
    assert set(knobwise.read("measured", lone).features) == {"x"}
    for message, features in (
        ("sample_id", np.ones((12, 2))),
        ("features", {"sample_id": ids, "x": [[1.0], [1.0, 2.0]]}),
        ("1 of 12", {"sample_id": ids[1:], "x": np.ones(11)}),
    ):
        with input_error(message):
            knobwise.read("measured", features)


def test_features_of_a_profile_are_in_its_order():
    bare = small_table(60, features=False)
    block = torch.arange(120.0).reshape(60, 2)
    rows = torch.cat(bare.split()[:2])
    for features in (block, block.tolist(), {"features": block.numpy()}):
        policy = knobwise.fit(bare, features, **TINY)
        assert policy.features == {"features": 2}
        close(policy.agent.controller.normaliser.mean, block[rows].mean(0))
    with input_error("have shape"):
        knobwise.fit(bare, block[1:], **TINY)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("policy.*huge.*utility", {"policy": "huge"}),
        ("optimiser.iterations=3", {"optimiser": {"iteration": 3}}),
        ("optimiser.*utility", {"optimiser": 3}),
        ("optimiser.iterations.*many", {"optimiser": {"iterations": "many"}}),
        ("optimiser.iterations", {"optimiser": {"iterations": -1}}),
        ("loss.kl_band.*wide", {"loss.kl_band": "wide"}),
        ("budgets_ms.*0.5", {"budget_ms": [0.5]}),
        ("reward.function", {"reward": "function"}),
        ("experiment.*nothing", {"experiment": "nothing"}),
        ("experiment=selector", {"experiment": "selector"}),
        ("profile.path", {"profile": {"path": "a.csv"}}),
        ("seeds", {"seed": -1}),
        ("20 samples", {"split": {"train": 0.9, "validation": 0.1}}),
    ],
)
def test_what_cannot_be_trained_is_refused(message, options):
    with input_error(message):
        knobwise.fit(small_table(20), **options)


AFTER_READ = """
import json, sys
import knobwise

assert knobwise.read(sys.argv[1]).num_samples == 60
print(json.dumps(sorted(sys.modules)))
"""
AFTER_INSPECT = """
import json, sys
from knobwise.__main__ import main

assert main(["inspect", *sys.argv[1:]]) == 0
print(json.dumps(sorted(sys.modules)))
"""
LEARNS = {"torchrl", "tensordict", "wandb", "tensorboard", "transformers", "ray"}
"""Libraries of what learns, tracks and measures."""


def test_read_loads_nothing_of_what_learns_and_judges(tmp_path):
    path = tmp_path / "t.csv"
    long_frame(small_table(60)).write_csv(path)
    loaded = modules_after(AFTER_READ, str(path))
    assert "torch" in loaded
    unused = {"scipy", "sklearn", "hydra", "omegaconf", "pandas", "altair", "rich", "joblib"}
    assert libraries_of(loaded).isdisjoint(LEARNS | unused)
    rooms = {".".join(name.split(".")[:3]) for name in loaded if name.startswith("knobwise.")}
    assert not {name for name in rooms if name.startswith(("knobwise.agents", "knobwise.losses"))}
    settings = {"knobwise.experiments", "knobwise.experiments.settings"}
    assert {name for name in rooms if name.startswith("knobwise.experiments")} == settings


def test_inspect_loads_no_training_no_charts_and_no_tracking(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table()
    loaded = modules_after(AFTER_INSPECT, *TABLE)
    assert "knobwise.experiments.inspection.facts" in loaded
    assert libraries_of(loaded).isdisjoint(LEARNS | {"altair", "jinja2", "pandas"})
    for part in ("agents.training.trainer", "agents.calibration", "experiments.train"):
        assert f"knobwise.{part}" not in loaded


AFTER_FIT = """
import json, sys
import knobwise
from helpers import small_table

options = {"policy.hidden": 8, "policy.fold_networks": 2, "optimiser": json.loads(sys.argv[1])}
knobwise.fit(small_table(40), policy="utility", **options)
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(script, *words):
    """Return the modules that Python has loaded after a script which prints them last."""
    command = [sys.executable, "-c", script, *words]
    folders = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | folders)
    return json.loads(done.stdout.splitlines()[-1])


def libraries_of(loaded):
    return {name.partition(".")[0] for name in loaded}


def test_fit_loads_no_command_line_no_charts_and_no_report():
    loaded = modules_after(AFTER_FIT, json.dumps(QUICK))
    assert "knobwise.experiments.train.controller" in loaded
    unused = {"hydra", "altair", "wandb", "jinja2", "tensorboard"}
    assert libraries_of(loaded).isdisjoint(unused)
    rooms = {".".join(name.split(".")[:3]) for name in loaded if name.startswith("knobwise.")}
    assert rooms.isdisjoint({f"knobwise.experiments.{room}" for room in ("command_line", "deploy")})
    # of the report the sentence of the outcome alone
    sentence = {
        f"knobwise.experiments.report{part}" for part in ("", ".verdict", ".sentences", ".words")
    }
    assert {name for name in loaded if name.startswith("knobwise.experiments.report")} == sentence


# -- load ------------------------------------------------------------------------------------------


def test_load_takes_a_finished_run(home):
    run, table = home / "runs/a/default", small_table(20)
    best = run / "checkpoints/best.pt"
    save_checkpoint(best, untrained(table, HEADS), table, {})
    (home / "runs/latest").symlink_to(run)
    limits = torch.linspace(5, 25, 20)
    decisions = knobwise.load(best).decide(table.features, limits)
    assert knobwise.load().decide(table.features, limits) == decisions
    (run / ".unfinished").touch()
    with input_error("not finished"):
        knobwise.load(run)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ("runs/latest", "runs/latest"),
        ("empty/checkpoints", "empty"),
        ("selector", "s.pt"),
        ("not calibrated", "half.pt"),
    ],
)
def test_what_holds_no_policy_is_refused(message, path, home):
    selector = Selector(SelectorConfig(width=8, heads=2), 4)
    save_checkpoint("s.pt", selector, small_beams()[0], {})
    half = DeployedController(driven_apart(small_table(20), HEADS, constraint="mean")).eval()
    save_checkpoint("half.pt", half, small_table(20), {})
    Path("empty").mkdir()
    with input_error(message):
        knobwise.load(path)


# -- the rest --------------------------------------------------------------------------------------


def test_importing_knobwise_stays_light():
    heavy = {"torch", "polars", "hydra", "numpy", "gymnasium"}
    script = f"import knobwise, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'fits'"):
        _ = knobwise.fits


def test_the_examples_run():
    names = {"knobwise": knobwise, "polars": polars, "builtin_profile": builtin_profile}
    results = [doctest.testmod(module, extraglobs=names) for module in (api, reading)]
    assert [result.failed for result in results] == [0, 0]
    assert [result.attempted for result in results] == [5, 4]


PUBLIC = {
    envs: "InputError Knob ProfileTable Split join_tables read_beam_data",
    agents: "Controller LossConfig SelectorLossConfig load_checkpoint save_checkpoint make_actor",
    losses: "GRPOLoss RCELoss group_advantage",
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_a_package_hands_out_its_public_names(package):
    assert set(PUBLIC[package].split()) <= set(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        assert name.isupper() or value.__name__ == name  # a constant has no name of its own


@pytest.mark.parametrize("name", ["builtin_profile", "SimulatedConfig", "simulate"])
def test_what_moved_is_still_found_where_it_was(name):
    assert getattr(envs, name) is getattr(testbeds, name)

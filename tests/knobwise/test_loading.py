"""`knobwise.load` of a run's folder: the export decides, and is the checkpoint's, or is left alone."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TABLE, launch, read_json, words_of, write_table

import knobwise
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.common.errors import InputError
from knobwise.experiments.evidence.exports import CONTROLLER, NOTE, exported_of
from knobwise.serving.knob_policy import KnobPolicy

RUN = "runs/controller/run"
BEST = f"{RUN}/checkpoints/best.pt"
QUICK = "baselines=false policy=utility policy.hidden=8 policy.fold_networks=2"
QUICK += " optimiser.teacher_iterations=4 optimiser.pretrain_iterations=4 optimiser.iterations=2"
PLAIN = ("unit", "features", "columns", "datasets", "knobs", "configurations")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs of two seeds, and of one under a mean budget."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_table()
        for options in ("name=run seeds=[0,1]", "name=mean seeds=[0] budget=mean"):
            launch(words_of("train", options, QUICK), TABLE)
    return folder


@pytest.fixture(autouse=True)
def folder(trained, tmp_path, monkeypatch):
    """Run every test in a copy."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def inputs(policy, n=64):
    draw = np.random.default_rng(0)
    features = {
        name: draw.normal(size=(n, width)).astype(np.float32)
        for name, width in policy.features.items()
    }
    features["image_features"][::7] = np.nan
    return features


def budgets_of(policy):
    """Calibrated budgets, and where others are known those between and beyond."""
    budgets = policy.decider.calibrated.budgets_ms
    if policy.decider.mean is not None:
        return budgets
    return np.geomspace(budgets.min() / 3, budgets.max() * 3, 16)


def is_of_the_export(policy):
    return callable(policy._loaded)


@pytest.mark.parametrize("name", ["run", "mean"])
def test_the_export_decides_as_the_checkpoint_does(name):
    run = f"runs/controller/{name}"
    policy = knobwise.load(run)
    whole = KnobPolicy(load_checkpoint(f"{run}/checkpoints/best.pt"))
    assert is_of_the_export(policy)
    features = inputs(policy)
    for budget_ms in budgets_of(policy).tolist():
        for options in ({}, {"deterministic": False, "seed": 3}):
            for each in (whole, policy):
                # the turns of a static mix begin anywhere
                each.decider.budgets.start_over(1)
            wanted = whole.decide(features, budget_ms, **options)
            assert policy.decide(features, budget_ms, **options) == wanted
    for attribute in PLAIN:
        value, wanted = (getattr(each, attribute) for each in (policy, whole))
        assert value == wanted
        assert type(value) is type(wanted)
    assert repr(policy) == repr(whole)
    assert policy.decider.digest == whole.decider.digest
    one = {name: block[1] for name, block in features.items()}
    budget_ms = float(budgets_of(policy)[0])
    explained = policy.decide(one, budget_ms, explain=True)
    assert explained == whole.decide(one, budget_ms, explain=True)
    assert not is_of_the_export(policy)
    assert policy.decide(features, budget_ms) == whole.decide(features, budget_ms)
    assert policy.loaded.extra.keys() == whole.loaded.extra.keys()


WITHOUT_TORCH = """
import json, sys
import knobwise
policy = knobwise.load(sys.argv[1])
features = {name: [0.5] * width for name, width in policy.features.items()}
knobs = policy.decide(features, 20.0)
serve = knobwise.wrap(lambda request, **knobs: knobs, policy, features=lambda request: features)
assert serve(None, budget_ms=20.0).keys() == knobs.keys()
assert not {"torch", "polars", "rich", "hydra"} & sys.modules.keys()
policy.save("copy.pt")
assert "torch" in sys.modules
print(json.dumps(knobs))
"""


def test_a_run_decides_without_torch():
    printed = subprocess.check_output([sys.executable, "-c", WITHOUT_TORCH, RUN])
    copy = knobwise.load("copy.pt")
    features = {name: [0.5] * width for name, width in copy.features.items()}
    assert json.loads(printed) == copy.decide(features, 20.0)


def test_a_copy_takes_the_network_along():
    policy = knobwise.load(RUN)
    sent = pickle.dumps(policy)
    Path(BEST).unlink()
    copy = pickle.loads(sent)
    features = inputs(policy)
    assert copy.decide(features, 20.0) == policy.decide(features, 20.0)
    assert copy.agent.rule.kind == "deadline"


def test_a_network_that_is_trained_further_decides():
    policy = knobwise.load(RUN)
    features = inputs(policy)
    before = policy.decider.digest
    with torch.no_grad():
        policy.loaded.network.network.head.logits.bias.zero_()
    assert policy.decider.digest != before
    assert policy.decide(features, 20.0) == KnobPolicy(policy.loaded).decide(features, 20.0)


def other_checkpoint():
    shutil.copy(f"{RUN}/checkpoints/{other_seed()}/best.pt", BEST)


def other_seed():
    best = read_json(f"{RUN}/results.json")["best_seed"]
    return f"seed{1 - best}"


def without(name):
    Path(RUN, name).unlink()


def other_export():
    shutil.copy(f"runs/controller/mean/{CONTROLLER}", RUN)


def cut(name):
    path = Path(RUN, name)
    path.write_bytes(path.read_bytes()[:-20])


def noted(content):
    Path(RUN, NOTE).write_text(content)


@pytest.mark.parametrize(
    "happens",
    [
        other_checkpoint,
        other_export,
        lambda: without(NOTE),
        lambda: without(CONTROLLER),
        lambda: cut(NOTE),
        lambda: cut(CONTROLLER),
        *(lambda content=content: noted(content) for content in ("[]", "{}", "3", "[" * 100_000)),
        lambda: noted(json.dumps(read_json(f"{RUN}/{NOTE}") | {"checkpoint": None})),
        lambda: noted(json.dumps(read_json(f"{RUN}/{NOTE}") | {"rule": "examples.rules:Own"})),
    ],
)
def test_an_export_that_is_not_the_checkpoints_is_left_alone(happens):
    happens()
    policy = knobwise.load(RUN)
    assert not is_of_the_export(policy)
    assert policy.decider.digest == load_checkpoint(BEST).controller.decider.digest
    assert exported_of(Path(BEST), Path(RUN)) is None


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_taken_for_the_policys():
    policy = knobwise.load(RUN)
    features = inputs(policy)
    wanted = policy.decide(features, 20.0)
    other_checkpoint()
    for ask in (lambda: policy.agent, lambda: policy.save("copy.pt"), lambda: policy.judged):
        with pytest.raises(InputError):
            ask()
    assert policy.decide(features, 20.0) == wanted
    Path(BEST).unlink()
    with pytest.raises(InputError, match=r"best\.pt"):
        policy.decide({name: block[0] for name, block in features.items()}, 20.0, explain=True)


def test_a_checkpoint_file_and_a_seed_are_read_themselves():
    for path in (BEST, f"{RUN}/checkpoints/{other_seed()}/best.pt"):
        policy = knobwise.load(path)
        assert not is_of_the_export(policy)
        assert policy.decider.digest == load_checkpoint(path).controller.decider.digest


def test_a_run_is_refused_as_ever():
    with pytest.raises(InputError, match="runs/controller/none"):
        knobwise.load("runs/controller/none")
    cut("checkpoints/best.pt")
    with pytest.raises(InputError, match=r"best\.pt"):
        knobwise.load(RUN)
    Path(RUN, ".unfinished").touch()
    with pytest.raises(InputError, match="not finished"):
        knobwise.load(RUN)


def test_the_note_is_that_of_knobwise_export():
    launch(f"export checkpoint={RUN} out=exported")
    exported, note = read_json(f"exported/{NOTE}"), read_json(f"{RUN}/{NOTE}")
    assert note["checkpoint"]["digest"] == exported["checkpoint"]["digest"]
    assert note["rule"] == exported["rule"] == "deadline"
    # an export into the run's own folder is the run's
    launch(f"export checkpoint={RUN} out={RUN}")
    assert is_of_the_export(knobwise.load(RUN))
    size = note["files"][CONTROLLER]["bytes"]
    assert size == Path(RUN, CONTROLLER).stat().st_size < Path(BEST).stat().st_size


def test_the_commands_take_the_export_of_a_run():
    script = f"""
import sys
sys.modules["torch"] = None  # an import of it fails
from knobwise.experiments.evidence.run_folder import controller_at
print(controller_at({RUN!r}).digest)
"""
    printed = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert printed.strip() == knobwise.load(BEST).decider.digest

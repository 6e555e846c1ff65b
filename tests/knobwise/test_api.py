"""A policy from Python in one call: read, fit, load, decide."""

import doctest
import functools
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
import pytest
import torch
from commands import TABLE, same, write_table
from helpers import TAUGHT, arrays, deployed, driven_apart, small_beams, small_table, two_kinds
from replayed import untrained

import knobwise
from knobwise import agents, api, envs, losses
from knobwise.__main__ import main
from knobwise.agents.checkpoint import Loaded, save_checkpoint
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.serving.knob_policy import KnobPolicy
from knobwise.agents.stack.deployed import DeployedController
from knobwise.common.errors import InputError
from knobwise.envs import builtin_profile
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, write_long_table

QUICK = {"teacher_iterations": 4, "warmup_iterations": 4, "iterations": 4}
QUICK |= {"contexts": 32, "minibatch": 32, "evaluate_every": 4}
TINY = {"policy": "utility", "policy.hidden": 8, "policy.members": 2, "optimiser": QUICK}
HEADS = PolicyConfig(hidden=8)
MEAN_MS = 12.0
"""The budget that the policies for mean budgets are calibrated for."""
KINDS = {
    "heads": HEADS,
    "taught": replace(TAUGHT, experts=("ridge", "knn")),
    "unguarded": replace(TAUGHT, experts=(), guard=False),
    "no features": replace(TAUGHT, experts=()),
    "mean": replace(TAUGHT, experts=(), guard=False),
}


@functools.cache
def case(kind):
    """A table and a controller of this kind for it."""
    table = small_table(40, features=kind != "no features")
    if kind == "heads":
        return table, untrained(table, HEADS)
    if kind == "mean":
        return table, deployed(table, KINDS[kind], torch.tensor([MEAN_MS]), "mean")
    return table, deployed(table, KINDS[kind])


def policy_of(kind):
    table, agent = case(kind)
    return KnobPolicy(Loaded(agent, table.name, table.digest, {}))


def budgets_of(kind, n):
    return torch.full((n,), MEAN_MS) if kind == "mean" else torch.linspace(5, 25, n)


def chosen_by(agent, table, limits):
    """The knob values that an agent chooses for all samples."""
    chosen = agent.choose(arrays(table), limits.double().numpy())
    return [table.configuration(index) for index in chosen.tolist()]


# -- decide ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS])
def test_decide_is_choose_for_many_or_for_each_alone_in_lists_numpy_and_torch(kind):
    (table, agent), policy, limits = case(kind), policy_of(kind), budgets_of(kind, 40)
    wanted = chosen_by(agent, table, limits)
    for form in (torch.Tensor.tolist, torch.Tensor.numpy, torch.clone):
        blocks = {name: form(block) for name, block in table.features.items()}
        assert policy.decide(blocks, form(limits)) == wanted
        for i in (0, 17):
            alone = {name: form(block[i]) for name, block in table.features.items()}
            assert policy.decide(alone, float(limits[i])) == wanted[i]


@pytest.mark.parametrize("batched", itertools.product([False, True], repeat=3))
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_for_one_input_is_for_all_of_them(batched, n):
    (table, agent), policy = case("taught"), policy_of("taught")
    values = [*(block[:n] for block in table.features.values()), budgets_of("taught", n)]
    image, language, limits = (v if many else v[0] for v, many in zip(values, batched, strict=True))
    whole = [v if many else v[:1].expand_as(v) for v, many in zip(values, batched, strict=True)]
    decisions = policy.decide({"language_features": language, "image_features": image}, limits)
    *blocks, under = (v.numpy() for v in whole)
    chosen = agent.choose(
        dict(zip(table.features, blocks, strict=True)), under.astype(np.float64)
    ).tolist()
    assert (decisions if any(batched) else [decisions] * n) == [
        table.configuration(index) for index in chosen
    ]


def test_a_lone_block_needs_no_name_and_no_features_are_none():
    table = two_kinds(20, shown=True)
    agent = untrained(table, HEADS)
    policy = KnobPolicy(Loaded(agent, "t", "", {}))
    chosen = chosen_by(agent, table, torch.full((20,), 15.0))
    assert policy.decide(table.features["x"].double().numpy(), 15) == chosen
    without = policy_of("no features")
    assert without.decide(None, 9.0) == without.decide({}, 9.0) == without.decide({}, [9.0])[0]
    assert (
        policy.decide(np.zeros((0, 2)), 15.0) == policy.decide([0.0, 1.0], [], explain=True) == []
    )


def test_a_decision_is_the_callers_own():
    policy = policy_of("unguarded")
    features = {name: torch.zeros(width) for name, width in policy.features.items()}
    first = policy.decide(features, 10.0)
    before = dict(first)
    first.clear()
    policy.decide(features, 10.0, explain=True).expected[0]["configuration"].clear()
    assert policy.decide(features, 10.0) == before
    assert policy.features == {"image_features": 4, "language_features": 4}
    assert policy.knobs == {"max_crops": (2, 6, 10), "top_k": (4, 8), "num_active_blocks": (12, 16)}
    assert "'language_features': 4" in repr(policy)


GOOD = {"image_features": [0.0] * 4, "language_features": [0.0] * 4}
MISTAKES = [
    (r"image_features.* \(1, 4\), got \(1, 3\)", GOOD | {"image_features": [0.0] * 3}, 9.0),
    ("language_features.* nothing", {"image_features": [0.0] * 4}, 9.0),
    ("language_features.* nothing", [0.0] * 4, 9.0),
    ("image_features.* nothing", None, 9.0),
    (r"image_features.* \(\)", GOOD | {"image_features": 1.0}, 9.0),
    ("image_features: not an array", GOOD | {"image_features": ["a"] * 4}, 9.0),
    ("image_features: not an array", GOOD | {"image_features": [[0.0] * 4, [0.0]]}, 9.0),
    ("infinite", GOOD | {"image_features": [1e300, 0.0, 0.0, 0.0]}, 9.0),
    ("image_features: not an array", GOOD | {"image_features": np.full(4, 1j)}, 9.0),
    ("image_features: not an array", GOOD | {"image_features": torch.full((4,), 1j)}, 9.0),
    ("budget_ms: not an array", GOOD, np.complex128(9)),
    *(("budget", GOOD, budget) for budget in (float("nan"), 0, -1.0, [9, np.inf], [[9.0]])),
    ("budget_ms: not an array", GOOD, "soon"),
    (r"\[2, 3\]", GOOD | {"image_features": np.zeros((3, 4))}, [9.0, 9.0]),
]


@pytest.mark.parametrize(("message", "features", "budget_ms"), MISTAKES)
def test_a_mistake_is_named(message, features, budget_ms):
    with pytest.raises(InputError, match=message):
        policy_of("taught").decide(features, budget_ms)


def test_a_mean_budget_that_is_not_calibrated_is_refused():
    with pytest.raises(InputError, match=r"7.*calibrated for 12 only"):
        policy_of("mean").decide(GOOD, 7.0)


# -- fit -------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def decisions(policy, table):
    return policy.decide(table.features, budgets_of("taught", table.num_samples))


def test_fit_is_what_the_command_trains_and_save_keeps_it(home, capsys):
    write_table(60)
    before, threads = sorted(home.iterdir()), torch.get_num_threads()
    torch.set_num_threads(2)
    policy = knobwise.fit("t.parquet", "f.npz", seed=3, **TINY)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert sorted(home.iterdir()) == before
    assert "budget-aware static" in capsys.readouterr().err
    words = [f"optimiser.{name}={value}" for name, value in QUICK.items()]
    words += ["policy=utility", "policy.hidden=8", "policy.members=2"]
    words += ["seeds=[3]", "tracking=disabled", "baselines=false"]
    assert main(["train", *TABLE, *words]) == 0
    table = knobwise.read("t.parquet", "f.npz")
    wanted = decisions(policy, table)
    judged = policy.judged
    assert judged is not None
    policies = [row["policy"] for row in judged["rows"][::6]]
    assert policies == ["controller", "teacher", "budget_aware_static", "oracle"]
    policy.save("p.pt")
    for path in ("p.pt", "runs/latest"):
        assert decisions(knobwise.load(path), table) == wanted
    run, again = (knobwise.load(path) for path in ("runs/latest", "p.pt"))
    first, *others = (p.agent.controller.state_dict() for p in (policy, run, again))
    assert all(same(first, state) for state in others)
    assert (again.judged, run.judged) == (judged, None)


FITS = {
    "independent": {"policy": "independent", "reward": "shaped"},
    "mean": {"policy": "utility", "policy.members": 2, "budget": "mean", "budgets_ms": [9.0, 14]},
    "experts": {"policy.members": 2, "policy.experts": ["ridge"], "budget": "relative"},
    "no experts": {"policy": "utility", "policy.members": 2, "budgets_ms": (10, 20)},
}


@pytest.mark.parametrize("name", FITS)
def test_fit_takes_the_options_of_the_command_line(name, capsys):
    table = small_table(60)
    options = FITS[name]
    policy = knobwise.fit(table, optimiser=QUICK, **options)
    agent = policy.agent
    assert (agent.teacher is None) == (name == "independent")
    if agent.teacher is not None:
        assert list(agent.teacher.chosen()["settings"]) == options.get("policy.experts", [])
    assert agent.sense == ("mean" if name == "mean" else "deadline")
    assert bool(agent.settled.guard) == (name != "independent")
    assert len(policy.decide(table.features, 14.0, explain=True)) == 60
    assert policy.judged is not None
    if "budgets_ms" in options:
        assert policy.judged["budgets_ms"] == list(options["budgets_ms"])
    assert (
        "the static mix" if name == "mean" else "budget-aware static"
    ) in capsys.readouterr().err


class Frame:
    """As much of a pandas data frame as is used: columns as lists, holes as NaN."""

    def __init__(self, frame):
        self.frame = frame

    def to_dict(self, orient):
        assert orient == "list"
        columns = self.frame.with_columns(
            polars.col("accuracy", "latency_ms").fill_null(float("nan"))
        )
        return columns.to_dict(as_series=False)


@pytest.mark.parametrize("form", [lambda frame: frame, Frame], ids=["polars", "pandas"])
def test_a_data_frame_is_read_as_the_file_is(form, home):
    table = small_table(12)
    frame = long_frame(table).sample(fraction=1.0, shuffle=True, seed=1)
    hole = polars.DataFrame({**frame.row(0, named=True), "accuracy": None})
    frame = polars.concat([frame[1:], hole.select(frame.columns).cast(dict(frame.schema))])
    frame.write_parquet("small.parquet")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    blocks = {name: block[order] for name, block in table.features.items()}
    features = {"sample_id": [table.sample_ids[i] for i in order.tolist()], **blocks}
    write_features(table, "f.npz")
    wanted = knobwise.read("small.parquet", "f.npz")
    assert int((~wanted.mask).sum()) == 1
    assert wanted.features["image_features"].equal(table.features["image_features"])
    assert knobwise.read(form(frame), features).digest == wanted.digest
    assert knobwise.read(form(frame), features, name="mine").name == "mine"


def test_read_takes_saved_profiles_and_folders(home):
    table = small_table(12)
    table.save("t.safetensors")
    assert knobwise.read("t.safetensors").digest == table.digest
    Path("measured").mkdir()
    write_long_table(table, "measured/table.parquet")
    write_features(table, "measured/features.npz")
    folder = knobwise.read(Path("measured"))
    assert (folder.name, folder.digest) == ("measured", table.digest)
    lone = {"sample_id": list(table.sample_ids), "x": np.ones(12)}
    assert set(knobwise.read("measured", lone).features) == {"x"}
    ids = table.sample_ids
    for message, features in (
        ("sample_id", np.ones((12, 2))),
        ("features", {"sample_id": ids, "x": [[1.0], [1.0, 2.0]]}),
        ("1 of 12", {"sample_id": ids[1:], "x": np.ones(11)}),
    ):
        with pytest.raises(InputError, match=message):
            knobwise.read("measured", features)


def test_features_of_a_profile_are_in_its_order():
    bare = small_table(60, features=False)
    block = torch.arange(120.0).reshape(60, 2)
    for features in (block, block.tolist(), {"features": block.numpy()}):
        policy = knobwise.fit(bare, features, **TINY)
        assert policy.features == {"features": 2}
        median = policy.agent.controller.normaliser.mean
        rows = torch.cat(list(bare.split()[:2]))
        assert median.tolist() == pytest.approx(block[rows].mean(0).tolist())
    with pytest.raises(InputError, match="have shape"):
        knobwise.fit(bare, block[1:], **TINY)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("policy/huge", {"policy": "huge"}),
        ("optimiser.iterations=3", {"optimiser": {"iteration": 3}}),
        ("seeds", {"seed": -1}),
        ("20 samples", {"split": {"train": 0.9, "validation": 0.1}}),
    ],
)
def test_what_cannot_be_trained_is_refused(message, options):
    with pytest.raises(InputError, match=message):
        knobwise.fit(small_table(20), **options)


# -- load ------------------------------------------------------------------------------------------


def test_load_takes_a_finished_run(home):
    run, table = home / "runs" / "a" / "default", small_table(20)
    save_checkpoint(run / "checkpoints" / "best.pt", untrained(table, HEADS), table, {})
    (home / "runs" / "latest").symlink_to(run)
    assert decisions(knobwise.load(), table) == decisions(
        knobwise.load(run / "checkpoints" / "best.pt"), table
    )
    (run / ".unfinished").touch()
    with pytest.raises(InputError, match="not finished"):
        knobwise.load(run)


def test_what_holds_no_policy_is_refused(home):
    table, _ = small_beams()
    selector = Selector(SelectorConfig(width=8, heads=2), 4)
    save_checkpoint("s.pt", selector, table, {})
    half = DeployedController(driven_apart(small_table(20), HEADS, sense="mean")).eval()
    save_checkpoint("half.pt", half, small_table(20), {})
    Path("empty").mkdir()
    for message, path in (
        ("runs/latest", "runs/latest"),
        ("empty/checkpoints", "empty"),
        ("selector", "s.pt"),
        ("not calibrated", "half.pt"),
    ):
        with pytest.raises(InputError, match=message):
            knobwise.load(path)


# -- the rest --------------------------------------------------------------------------------------


def test_importing_knobwise_stays_light():
    script = "import knobwise, sys; assert not {'torch', 'polars', 'hydra'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'fits'"):
        _ = knobwise.fits


def test_the_examples_run():
    names = {"knobwise": knobwise, "polars": polars, "builtin_profile": builtin_profile}
    result = doctest.testmod(api, extraglobs=names)
    assert (result.failed, result.attempted) == (0, 9)


PUBLIC = {
    envs: "InputError Knob ProfileTable SimulatedConfig Split join_tables read_beam_data simulate",
    agents: "Controller LossConfig SelectorLossConfig load_checkpoint save_checkpoint make_actor",
    losses: "GRPOLoss RCELoss group_advantage",
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_a_package_hands_out_its_public_names(package):
    assert set(PUBLIC[package].split()) <= set(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import arrays, driven_apart, gappy_table, input_error, small_table
from replayed import calibration_for, untrained

from knobwise.agents import DeployedController, PolicyConfig
from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.training.checkpoint import save_checkpoint
from knobwise.envs import ProfileTable, default_budgets
from knobwise.experiments.deploy.export import _budgets_of, export_controller
from knobwise.experiments.settings.deployment_options import ExportRun
from knobwise.experiments.settings.profiles import TableProfile
from knobwise.serving.onnx_graph import (
    REFUSED,
    Deployed,
    OnnxController,
    agreement,
    quantise,
    write_onnx,
)

DEPLOY = [True, False, True, True, True]


@functools.cache
def guarded():
    table = small_table(90)
    return table, untrained(table, None, DEPLOY)


# -- the graph --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("with_guard", "utility_head"), [(True, True), (False, True), (False, False)]
)
def test_a_graph_decides_as_a_controller_does_for_one_request_or_many(
    with_guard, utility_head, tmp_path
):
    table = gappy_table()
    # static decides in two groups
    deploy = [True, False, True, False, True] if with_guard else None
    config = PolicyConfig(hidden=8, fold_networks=2, drift=0.3, utility_head=utility_head)
    agent = untrained(table, config, deploy)
    path = tmp_path / "c.onnx"
    write_onnx(Deployed(agent), path)
    graph = OnnxController(path)
    light = agent.decider
    more = torch.tensor([1e-9, 1e-3, 3.0, 60.0, 1e9])
    budgets = torch.cat([default_budgets(table), more])
    counts = agreement(light, graph.choose, table, budgets, "c.onnx")
    assert counts["contexts"] == 900
    assert counts["same"] + counts["rounding"] == 900
    assert counts["rounding"] <= 9
    for row in range(5):
        request = arrays(table, row)
        for budget in budgets.tolist():
            assert graph.decide_index(request, budget) == light.decide_index(request, budget)
    session = onnxruntime.InferenceSession(path)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["configurations"]) == configurations_of(light)
    assert [value.name for value in session.get_inputs()] == [*table.features, "budget_ms"]
    # it holds the deployed network alone
    weights = onnx.load(path).graph.initializer
    stored = sum(onnx.numpy_helper.to_array(values).size for values in weights)
    deployed = sum(values.numel() for values in agent.controller.alone().parameters())
    assert with_guard or stored < 1.5 * deployed


@pytest.mark.parametrize("deploy", [[True, False, True, False, True], None])
def test_a_graph_refuses_what_a_controller_refuses(deploy, tmp_path):
    table = gappy_table()
    agent = untrained(table, PolicyConfig(hidden=8, fold_networks=2), deploy)
    light = agent.decider
    write_onnx(Deployed(agent), tmp_path / "c.onnx")
    quantise(tmp_path / "c.onnx", tmp_path / "c.int8.onnx")
    blocks = {name: block[:10].copy() for name, block in arrays(table).items()}
    name = min(blocks)
    blocks[name][7, -1] = np.inf
    blocks[name][8, 0] = -np.inf
    # a missing value is none of these
    blocks[name][9, 0] = np.nan
    budgets = np.array([0.0, -1.0, np.nan, np.inf, -np.inf, 1e30, 8.0, 8.0, 8.0, 8.0])
    good = [6, 9]
    for row in set(range(10)) - {*good}:
        with pytest.raises(ValueError, match="finite"):
            light.choose({k: b[[row]] for k, b in blocks.items()}, budgets[[row]])
    for form in ("c.onnx", "c.int8.onnx"):
        chosen = OnnxController(tmp_path / form).choose(blocks, budgets)
        assert [row for row in range(10) if chosen[row] != REFUSED] == good
        assert chosen[good].min() >= 0
    wanted = light.choose({k: b[good] for k, b in blocks.items()}, budgets[good])
    chosen = OnnxController(tmp_path / "c.onnx").choose(blocks, budgets)
    assert chosen[good].tolist() == wanted.tolist()


def test_a_graph_leaves_to_static_what_a_block_lacks_but_no_training_sample(tmp_path):
    table = gappy_table()
    light = (agent := untrained(table, PolicyConfig(hidden=8), [True] * 5)).decider
    write_onnx(Deployed(agent), tmp_path / "c.onnx")
    blocks = {name: block.copy() for name, block in arrays(table).items()}
    blocks["language_features"][:40, 1] = np.nan
    chosen = OnnxController(tmp_path / "c.onnx").choose(blocks, budgets := np.full(90, 15.0))
    assert chosen.tolist() == light.choose(blocks, budgets).tolist()
    assert set(chosen[:40].tolist()) == {light.static.single(15.0)}
    assert len(set(chosen[40:].tolist())) > 1


def test_what_has_no_graph_is_refused(monkeypatch):
    table = small_table(60)
    agent = DeployedController(driven_apart(table, PolicyConfig(hidden=8), constraint="mean"))
    with input_error("budget=quantiles"):
        Deployed(agent)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with input_error("onnxscript"):
        Deployed(untrained(table))


# -- how other forms compare -----------------------------------------------------------------------


def test_equal_log_probabilities_are_rounding_and_others_are_not():
    table = small_table(60)
    controller = driven_apart(table, PolicyConfig(hidden=8))
    heads = controller.network.head
    sizes = table.configurations.amax(0) + 1
    best = table.configurations[:2]
    first = sizes.cumsum(0) - sizes
    heads.logits.weight.data.zero_()
    heads.logits.bias.data.zero_()
    # the first two are always best, and equal
    heads.logits.bias.data[..., (best + first).flatten().unique()] = 50.0
    light = DeployedController(controller, None, calibration_for(table)).decider
    budgets = default_budgets(table)[:2]

    def compared(choice, **options):
        chosen = np.full(60, choice)
        return agreement(light, lambda *about: chosen, table, budgets, "it", **options)

    assert compared(1) == {"contexts": 120, "same": 0, "rounding": 120}
    with input_error("it"):
        compared(2)
    assert compared(2, exact=False) == {"contexts": 120, "same": 0, "rounding": 0}


def test_the_budgets_of_the_comparison_are_those_that_people_type():
    """They are calibrated in float32, in which 16.7 is 16.700000762939453."""
    table, agent = guarded()
    light = agent.decider
    handed = []

    def decide(blocks, limits):
        handed.append(limits[0])
        return light.choose(blocks, limits)

    agreement(light, decide, table, torch.tensor([16.7, 0.0011, 120.0]), "it")
    assert handed == [16.7, 0.0011, 120.0]


def test_a_graph_and_a_controller_agree_on_what_takes_exactly_a_budget():
    """In float32, the precision of a graph's input, 16.7 is above the double of 16.7."""
    table = small_table(60)
    times = table.latency_ms.clone()
    times[:, 0] = 16.7
    times[:, 1:] = 33.4
    table = replace(table, latency_ms=times)
    agent = untrained(table, None, [False] * len(default_budgets(table)))
    limits = np.array([16.7, 33.4, 10.0])
    blocks = {name: block[:3] for name, block in arrays(table).items()}
    tensors = [torch.from_numpy(block) for block in blocks.values()]
    graph = Deployed(agent).eval()(*tensors, torch.from_numpy(limits).float())
    assert agent.decider.choose(blocks, limits).tolist() == graph.tolist()
    assert (graph[1] != 0) & (graph[0] == 0)


def test_budgets_that_are_compared_are_the_calibrated_or_the_default():
    table, agent = guarded()
    judged = default_budgets(table).tolist()
    assert _budgets_of(agent, table).tolist() == judged
    moved = DeployedController(agent.controller, None, calibration_for(table, DEPLOY))
    moved.calibration.guard[1]["budget_ms"] = 33.5
    assert _budgets_of(moved, table).tolist() == [judged[0], 33.5, *judged[2:]]
    assert _budgets_of(untrained(table), table).tolist() == judged


# -- the command -----------------------------------------------------------------------------------


def test_nothing_is_written_when_a_graph_disagrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, agent = guarded()
    table.save("table.safetensors")
    parts = zip(("train", "validation", "test"), torch.arange(90).split([54, 18, 18]), strict=True)
    rows = {f"{part}_rows": rows for part, rows in parts}
    save_checkpoint("best.pt", agent, ProfileTable.load("table.safetensors"), {"seen": [], **rows})
    right = OnnxController.choose

    def wrong(self, *about):
        return (right(self, *about) + 1) % 12

    monkeypatch.setattr(OnnxController, "choose", wrong)
    with input_error("controller.onnx"):
        export_controller(
            ExportRun("best.pt", TableProfile(path="table.safetensors"), out="out", onnx=True)
        )
    assert not Path("out").exists()

import json
import sys

import onnx
import onnxruntime
import pytest
import torch
from helpers import arrays, driven_apart, gappy_table, input_error, small_table
from replayed import untrained

from knobwise.agents import DeployedController, PolicyConfig
from knobwise.agents.policy.arrays import configurations_of
from knobwise.agents.serving.onnx_graph import Deployed, OnnxController, agreement, write_onnx
from knobwise.envs import default_budgets


@pytest.mark.parametrize(("guarded", "utility_head"), [(True, True), (False, True), (False, False)])
def test_a_graph_decides_as_a_controller_does_for_one_request_or_many(
    guarded, utility_head, tmp_path
):
    table = gappy_table()
    # static decides in two groups
    margins = [1.0, 1.0, 0.7, 1.0, 0.5] if guarded else None
    config = PolicyConfig(hidden=8, members=2, drift=0.3, utility_head=utility_head)
    agent = untrained(table, config, margins, [True, False, True, False, True])
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
    assert guarded or stored < 1.5 * deployed


def test_what_has_no_graph_is_refused(monkeypatch):
    table = small_table(60)
    agent = DeployedController(driven_apart(table, PolicyConfig(hidden=8), sense="mean"))
    with input_error("budget=quantiles"):
        Deployed(agent)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with input_error("onnxscript"):
        Deployed(untrained(table))

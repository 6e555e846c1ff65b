import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import driven_apart, input_error, small_table
from replayed import settled_for, untrained

from knobwise.agents import DeployedController, PolicyConfig
from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.serving.onnx_graph import OnnxController, agreement
from knobwise.envs import ProfileTable, default_budgets
from knobwise.experiments.deploy.export import _budgets_of, run
from knobwise.experiments.settings.options import ExportRun
from knobwise.experiments.settings.profiles import TableProfile

MARGINS = [1.0, 0.9, 0.8, 1.0, 0.7]
DEPLOY = [True, False, True, True, True]


@functools.cache
def guarded():
    table = small_table(90)
    return table, untrained(table, None, MARGINS, DEPLOY)


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
    light = DeployedController(controller, None, settled_for(table)).decider
    budgets = default_budgets(table)[:2]

    def compared(choice, **options):
        chosen = np.full(60, choice)
        return agreement(light, lambda *about: chosen, table, budgets, "it", **options)

    assert compared(1) == {"contexts": 120, "same": 0, "rounding": 120}
    with input_error("it"):
        compared(2)
    assert compared(2, exact=False) == {"contexts": 120, "same": 0, "rounding": 0}


def test_budgets_that_are_compared_are_the_calibrated_or_the_default():
    table, agent = guarded()
    judged = default_budgets(table).tolist()
    assert _budgets_of(agent, table).tolist() == judged
    moved = DeployedController(agent.controller, None, settled_for(table, MARGINS, DEPLOY))
    moved.settled.guard[1]["budget_ms"] = 33.5
    assert _budgets_of(moved, table).tolist() == [judged[0], 33.5, *judged[2:]]
    assert _budgets_of(untrained(table), table).tolist() == judged


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def order(tmp_path):
    """To export a checkpoint to the folder `out`, with a graph."""
    table, agent = guarded()
    path = tmp_path / "table.safetensors"
    table.save(path)
    parts = torch.arange(90).split([54, 18, 18])
    rows = dict(zip(("train_rows", "validation_rows", "test_rows"), parts, strict=True))
    save_checkpoint(tmp_path / "best.pt", agent, ProfileTable.load(path), {"seen": [], **rows})
    profile = TableProfile(path=str(path))
    return ExportRun(str(tmp_path / "best.pt"), profile, out=str(tmp_path / "out"), onnx=True)


def test_nothing_is_written_when_a_graph_disagrees(order, monkeypatch):
    right = OnnxController.choose

    def wrong(self, *about):
        return (right(self, *about) + 1) % 12

    monkeypatch.setattr(OnnxController, "choose", wrong)
    with input_error("controller.onnx"):
        run(order)
    assert not Path(order.out).exists()

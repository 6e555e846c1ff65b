from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from helpers import driven_apart, small_table
from numpy.typing import NDArray
from test_numpy_controller import assert_same, gappy, stack_of

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.export import configurations_of, contexts_of, one_by_one, parity, to_numpy
from knobwise.agents.serving.onnx_graph import Deployed, OnnxController, write_onnx
from knobwise.common.errors import InputError


def test_a_graph_decides_as_a_guarded_network_does_for_one_request_or_many(tmp_path: Path) -> None:
    table = gappy()
    stack = stack_of(table, experts=(), members=2)
    assert stack.guard is not None
    stack.guard.deploy.copy_(torch.tensor([True, False, True, False, True]))  # static decides in two groups
    stack.guard.miss[2] = 0.5
    write_onnx(Deployed(stack), tmp_path / "c.onnx")
    graph = OnnxController(tmp_path / "c.onnx")
    assert_same(stack, table, graph.choose)
    assert_same(stack, table, one_by_one(graph), samples=5)  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(tmp_path / "c.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["configurations"]) == configurations_of(stack)
    assert [value.name for value in session.get_inputs()] == [*table.features, "budget_ms"]

    def wrong(blocks: Mapping[str, NDArray[Any]], limits: NDArray[Any]) -> NDArray[Any]:
        return (graph.choose(blocks, limits) + 1) % 12

    about = stack, wrong, table, contexts_of(stack, table), "c.onnx", None, to_numpy(stack).choose
    with pytest.raises(InputError, match=r"c\.onnx: decides differently .* in 450 of 450 contexts"):
        parity(*about)
    assert parity(*about, exact=False) == {"contexts": 450, "same": 0, "rounding": 0}


def test_what_has_no_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table(60)
    stack = stack_of(table, experts=("ridge",))
    stack.weights.fill_(0.5)
    with pytest.raises(InputError, match=r"policy\.deploy=auto"):
        Deployed(stack)
    stack.weights.copy_(torch.tensor([1.0, 0.0]))  # an expert that does not count does not matter
    Deployed(stack)
    config = PolicyConfig(structure="utility", hidden=8)
    with pytest.raises(InputError, match="budget=quantiles"):
        Deployed(driven_apart(table, config, priced=True))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"onnxscript.*knobwise\[onnx\]"):
        Deployed(driven_apart(table, config))

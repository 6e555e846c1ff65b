"""What goes into results.json beside the judged rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_table

from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.settings import PolicyConfig
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.results import held_out_choices

EXTRA = {"iteration": 30}


@pytest.fixture(scope="module")
def table() -> ProfileTable:
    return small_table(60)


def untrained(table: ProfileTable, **settings: Any) -> Controller:
    config = PolicyConfig(structure="utility", members=2, hidden=8, **settings)
    return Controller.for_table(table, torch.arange(60), config).eval()


def stacked(table: ProfileTable, **settings: Any) -> StackedController:
    network = untrained(table, **settings)
    return fit_stack(table, torch.arange(60), network, network.config, default_budgets(table), seed=0)


def loaded(controller: Controller | StackedController) -> Loaded:
    return Loaded(controller, "small", "sha256:0", EXTRA)


def test_every_seed_says_what_was_chosen_and_what_its_guard_found(table: ProfileTable, tmp_path: Path) -> None:
    stack = stacked(table, experts=("ridge",), level=0.8)
    save_checkpoint(tmp_path / "best.pt", stack, table, EXTRA)
    found = held_out_choices([loaded(stack), load_checkpoint(tmp_path / "best.pt")])
    assert found["satisfaction_level"] == 0.8
    first, second = found["guard"]
    assert first == second
    assert [row["budget_ms"] for row in first] == default_budgets(table).tolist()
    assert found["chosen"][0] == found["chosen"][1]
    assert found["chosen"][0]["iteration"] == 30
    assert list(found["chosen"][0]["weights"]) == ["network", "ridge"]
    assert json.loads(json.dumps(found)) == found


def test_without_a_guard_no_level_was_asked_for(table: ProfileTable) -> None:
    assert held_out_choices([loaded(stacked(table, guard=False))]) == {
        "guard": [],
        "chosen": [{"weights": {"network": 1.0}, "settings": {}, "iteration": 30}],
    }
    plain = held_out_choices([loaded(untrained(table))])
    assert plain == {"guard": [], "chosen": [{"weights": {"network": 1.0}, "settings": {}, "iteration": 30}]}

"""What goes into results.json beside the judged rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_table, table_of

from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.judge import held_out_choices, judge_deadlines

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


# -- rows by hand ------------------------------------------------------------------------------------------------------


class Always:
    """Takes one configuration for every request."""

    def __init__(self, name: str, configuration: int) -> None:
        self.name, self.configuration = name, configuration

    def choose(self, features: Any, budgets_ms: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((len(budgets_ms),), self.configuration)


def test_rows_of_deadlines_by_hand() -> None:
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    policies = [Always("budget_aware_static", 0), Always("oracle", 1)]
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    learned = [Always("", 1), Always("", 0)]
    budgets = torch.tensor([5.0, 15.0, 35.0])
    results, _ = judge_deadlines(table, torch.arange(2), budgets, rewards, learned, [4, 5], policies)
    rows = {(row["policy"], row["budget_ms"]): row for row in results["rows"]}
    assert list(rows) == [(n, b) for n in ("controller", "budget_aware_static", "oracle") for b in (None, 5, 15, 35)]
    first, second, mean = (rows["oracle", budget] for budget in (5, 15, None))
    assert (first["infeasible"], first["satisfaction_feasible"]) == (1, None)
    assert (second["infeasible"], second["satisfaction_feasible"], second["utility"]) == (0.5, 0, 0)
    assert (mean["accuracy"], mean["latency_ms_mean"], mean["infeasible"]) == pytest.approx((0.875, 30, 0.5))
    assert mean["satisfaction"] == mean["utility"] == mean["reward"] == pytest.approx(1 / 6)
    assert mean["satisfaction_feasible"] == pytest.approx((0 + 1 / 2) / 2)
    assert mean["latency_ms_p95"] == pytest.approx(20 + 0.95 * 20)
    own = rows["controller", None]
    assert own["utility"] == pytest.approx((1 / 6 + (0 + 0.5 / 2 + 0.75 / 2) / 3) / 2)
    assert own["utility_per_seed"] == pytest.approx([1 / 6, 5 / 24])
    assert own["gap_closed"] == pytest.approx(0)  # the "oracle" is worse than static here
    assert rows["controller", 35]["latency_ms_mean"] == 25
    assert results["knob_usage"][0].keys() == {"policy", "budget_ms", "knob", "value", "share"}
    assert {use["share"] for use in results["knob_usage"] if use["policy"] == "controller"} == {0.5}
    assert [one["accuracy"] for one in results["configurations"]] == [0.375, 0.875]

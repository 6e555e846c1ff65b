"""Judging by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from helpers import small_table, table_of
from torch import Tensor

from knobwise.agents.judging.evaluation import decision_us, judge
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig


class Always:
    """Takes one configuration for every request."""

    def __init__(self, configuration: int) -> None:
        self.configuration = configuration

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.full((len(budgets_ms),), self.configuration)


def test_judged_by_hand() -> None:
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    judged = judge(Always(1), table, torch.arange(2), torch.tensor([15.0, 35.0]), rewards)
    assert judged.chosen.tolist() == [[1, 1], [1, 1]]
    assert judged.accuracy.tolist() == [[1, 1], [0.75, 0.75]]
    assert judged.latency_ms.tolist() == [[20, 20], [40, 40]]
    assert judged.utility.tolist() == judged.reward.tolist() == [[0, 1.0], [0, 0]]
    assert judged.met.tolist() == [[False, True], [False, False]]
    assert judged.feasible is not None
    assert judged.feasible.tolist() == [[True, True], [False, True]]
    metrics = judged.metrics()
    assert (metrics["Utility"], metrics["Reward_Mean"], metrics["Accuracy_Mean"]) == (0.25, 0.25, 0.875)
    assert (metrics["Latency_Mean"], metrics["Budget_Violation_Rate"]) == (30, 0.75)
    assert metrics["Satisfaction_Feasible"] == pytest.approx(1 / 3)


def test_the_same_policy_scores_the_same_twice_and_takes_time() -> None:
    table = small_table(40)
    rows, budgets = torch.arange(40), torch.tensor([9.0])
    twice = [judge(Always(3), table, rows, budgets, RewardTable(table, RewardConfig())) for _ in range(2)]
    assert torch.equal(twice[0].utility, twice[1].utility)
    assert torch.equal(twice[0].reward, twice[1].reward)
    assert 0 < decision_us(Always(3), table, rows, budgets) < 1e6

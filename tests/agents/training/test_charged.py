"""What a decision costs is charged: in the reward that is trained on, and where it is judged."""

import numpy as np
import pytest
import torch
from helpers import arrays, controller_trainer, small_table, table_of, trained

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.training.settle import deployed_by
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import median_of

NAN = torch.nan
UTILITY = RewardConfig(kind="utility")
ROWS = torch.arange(2)


def test_a_cost_is_added_to_every_latency_by_hand():
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    rewards = RewardTable(table, UTILITY, cost_ms=1.0)
    budgets_ms = torch.tensor([20.5, 41.0])
    # 11 and 21 ms under 20.5, 31 and 41 under 41
    assert rewards.all(ROWS, budgets_ms).tolist() == [[0.5, 0.0], [0.25, 0.75]]
    chosen = torch.tensor([[1, 0], [1, 1]])
    assert rewards.chosen(ROWS, chosen, budgets_ms).tolist() == [[0.0, 0.5], [0.75, 0.75]]
    assert rewards.outcome(ROWS, chosen)[1].tolist() == [[21.0, 11.0], [41.0, 41.0]]
    priced = RewardTable(table, RewardConfig(kind="priced"), cost_ms=1.0)
    # accuracy − (latency + 1)/worth
    wanted = [[0.5 - 11 / 50, 1.0 - 21 / 50], [0.25 - 31 / 50, 0.75 - 41 / 50]]
    result = priced.all(ROWS, torch.full((2,), 50.0))
    torch.testing.assert_close(result, torch.tensor(wanted))


def test_a_cost_is_added_to_each_of_several_measurements_and_not_to_the_table():
    repeats = torch.tensor([[[10.0, 11.0, 12.0], [20.0, 22.0, NAN]]])
    table = table_of([[0.6, 1.0]], repeats)
    budget_ms = torch.tensor([12.0])
    row = torch.tensor([0])
    plain = RewardTable(table, UTILITY)
    charged = RewardTable(table, UTILITY, cost_ms=0.5)
    torch.testing.assert_close(plain.all(row, budget_ms), torch.tensor([[0.6, 0.0]]))
    # 10.5, 11.5 and 12.5
    torch.testing.assert_close(charged.all(row, budget_ms), torch.tensor([[0.4, 0.0]]))
    assert torch.equal(table.latency_ms, median_of(repeats))
    median = RewardTable(table, UTILITY, repeats="median", cost_ms=0.5)
    assert median.outcome(row, torch.tensor([[0]]))[1].tolist() == [[11.5]]


@pytest.mark.parametrize("sense", ["deadline", "mean"])
def test_training_learns_from_what_its_decisions_leave(sense):
    table = small_table(60)
    student = controller_trainer(table, PolicyConfig(hidden=8), sense, cost_ms=2.0)
    learned = student.env.rewards
    torch.testing.assert_close(learned.latency_ms, table.latency_ms + 2)
    assert torch.equal(student.free_rewards.latency_ms, table.latency_ms)


def test_a_policy_that_costs_more_than_every_budget_gives_way_to_static_and_its_teacher_does_not():
    table = small_table(120)
    trainer = trained(table, cost_ms=1e3)
    deployed = deployed_by(trainer, trainer.limits)
    rows = deployed.settled.guard_of_teacher
    # its own cost makes the policy late at every budget; the teacher pays nothing
    assert trainer.best["score"] == 0
    for row in deployed.settled.guard:
        assert (row["deployed"], row["gain"]) == (False, -row["utility_static"])
    assert max(row["gain"] + row["utility_static"] for row in rows) > 0
    assert [row["margin"] for row in rows] == [1.0] * len(trainer.limits)
    rows[0]["deployed"] = False
    rows[1]["deployed"] = True
    teacher = deployed.guarded_teacher
    assert deployed.teacher is not None
    features = arrays(table)
    limits = trainer.limits.double().numpy()
    assert teacher.reads_features(limits).tolist() == [row["deployed"] for row in rows]
    static = static_of(table, trainer.fitted)
    for limit, by in ((limits[0], static), (limits[1], deployed.teacher)):
        under = np.full(table.num_samples, limit)
        assert np.array_equal(teacher.choose(features, under), by.choose(features, under))
    restored = DeployedController.restored(deployed.plain())
    assert restored.settled.guard_of_teacher == rows

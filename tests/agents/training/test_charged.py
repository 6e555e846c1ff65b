"""What a decision costs is charged: in the reward that is trained on, and where it is judged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays, close, identical, repeated, small_table, trained, trainer_on

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import RewardConfig

ONCE = small_table(40, holes=0.2)


@pytest.mark.parametrize("kind", ["utility", "priced"])
@pytest.mark.parametrize(
    ("table", "repeats"), [(ONCE, "draw"), (repeated(ONCE), "draw"), (repeated(ONCE), "median")]
)
def test_a_cost_is_as_if_every_measurement_took_that_much_longer(table, repeats, kind):
    """What rewards are without a cost is worked out by hand in the tests of rewards."""
    before = table.latency_ms.clone()
    several = None if table.repeats_ms is None else table.repeats_ms + 1.5
    longer = replace(table, latency_ms=table.latency_ms + 1.5, repeats_ms=several)
    rows, limits = torch.arange(40), default_budgets(table).repeat(8)
    chosen = table.mask.float().multinomial(1)
    free, charged, wanted = (
        RewardTable(each, RewardConfig(kind=kind), repeats=repeats, cost_ms=cost_ms)
        for each, cost_ms in ((table, 0.0), (table, 1.5), (longer, 0.0))
    )
    identical(charged.all(rows, limits), wanted.all(rows, limits))
    identical(charged.chosen(rows, chosen, limits), wanted.chosen(rows, chosen, limits))
    identical(charged.outcome(rows, chosen), wanted.outcome(rows, chosen))
    assert (free.all(rows, limits) > charged.all(rows, limits)).any()
    identical(table.latency_ms, before)


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
def test_training_learns_from_what_its_decisions_leave(constraint):
    table = small_table(60)
    student = trainer_on(table, PolicyConfig(hidden=8), constraint, cost_ms=2.0)
    learned = student.env.rewards
    close(learned.latency_ms, table.latency_ms + 2)
    assert torch.equal(student.setup.held_out.free_rewards.latency_ms, table.latency_ms)


def test_a_policy_that_costs_more_than_every_budget_gives_way_to_static_and_its_teacher_does_not():
    table = small_table(120)
    trainer = trained(table, cost_ms=1e3)
    deployed = calibrate_controller(trainer.setup, trainer.setup.limits)
    rows = deployed.calibration.guard_of_teacher
    # its own cost makes the policy late at every budget; the teacher pays nothing
    assert trainer.state.best.score == 0
    for row in deployed.calibration.guard:
        assert (row["deployed"], row["gain"]) == (False, -row["utility_static"])
    assert max(row["gain"] + row["utility_static"] for row in rows) > 0
    rows[0]["deployed"] = False
    rows[1]["deployed"] = True
    teacher = deployed.guarded_teacher
    limits = trainer.setup.limits.double().numpy()
    assert teacher.reads_features(limits).tolist() == [row["deployed"] for row in rows]
    static = fit_static(table, trainer.setup.fitted)
    for limit, policy in zip(limits, (static, deployed.teacher), strict=False):
        request = arrays(table), np.full(120, limit)
        assert np.array_equal(teacher.choose(*request), policy.choose(*request))
    restored = DeployedController.restored(deployed.plain())
    assert restored.calibration.guard_of_teacher == rows

"""What a decision costs is charged: in the reward that is trained on, and where it is judged."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import arrays, close, identical, small_table, trained, trainer_on

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.profile_table import Knob


@pytest.mark.parametrize(("constraint", "left"), [("deadline", 2.0), ("mean", 0.0)])
def test_training_is_for_what_a_decision_leaves_of_a_budget(constraint, left):
    table = small_table(60)
    student = trainer_on(table, PolicyConfig(hidden=8), constraint, cost_ms=2.0)
    held_out = student.setup.held_out
    # as a deployed controller is asked: the cost is charged where decisions are judged, and once
    identical(student.env.rewards.latency_ms[:60], table.latency_ms)
    close(held_out.left, student.setup.limits - left)


def test_a_cost_is_charged_once():
    """Right after 9 ms, or half of the time after 5: with 1.5 ms for the decision, the first is on
    time from a budget of 10.5 ms on."""
    samples = 60
    latency_ms = torch.tensor([9.0, 5.0]).repeat(samples, 1)
    table = replace(
        small_table(samples),
        knobs=(Knob("k", ("slow", "quick")),),
        configurations=torch.tensor([[0], [1]]),
        accuracy=torch.tensor([1.0, 0.5]).repeat(samples, 1),
        latency_ms=latency_ms,
        mask=torch.ones(samples, 2, dtype=torch.bool),
    )
    student = trainer_on(
        table,
        PolicyConfig(hidden=16, dropout=0.0),
        budget=BudgetConfig(strategy="spread", values_ms=(6.0, 14.0)),
        optimiser=OptimiserConfig(
            pretrain_iterations=0, iterations=100, contexts=64, minibatch=64, lr=1e-2, keep="last"
        ),
        budgets_ms=torch.tensor([11.0]),
        cost_ms=1.5,
    )
    policy = DeployedController(student.run())
    budgets_ms = torch.tensor([10.0, 11.0])
    judged = evaluate_policy(policy, table, torch.arange(samples), budgets_ms, cost_ms=1.5)
    close(judged.utility.mean(0), torch.tensor([0.5, 1.0]))


def test_a_guard_is_about_what_is_chosen_with_what_a_decision_leaves():
    setup = trainer_on(small_table(60), cost_ms=2.0).setup
    with patch.object(setup, "held_out_log_probs", wraps=setup.held_out_log_probs) as asked:
        calibrate_controller(setup, setup.limits)
    limits = torch.stack([call.args[0] for call in asked.call_args_list])
    # with the cost charged, and as if it were free
    close(limits, torch.cat([(setup.limits - 2).clamp_min(MIN_LATENCY_MS), setup.limits]))


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

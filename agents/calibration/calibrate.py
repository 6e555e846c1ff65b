"""After training: calibrate what is deployed beside a controller, on samples that it was not
fitted on."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import Calibration, DeployedController
from knobwise.agents.calibration.guard import GuardRow, calibrate, pools_budgets
from knobwise.agents.calibration.latencies import fit_latency_model
from knobwise.agents.calibration.ways import WAYS
from knobwise.agents.deployed.calibrated import Static
from knobwise.agents.evaluation.limits import fit_bounds
from knobwise.agents.evaluation.policy import (
    Array,
    Policy,
    allowed_in_service,
    choices_of,
    inputs_of_rows,
)
from knobwise.agents.problem import Problem
from knobwise.agents.training.controllers import ControllerSetup
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable


def calibrate_controller(setup: ControllerSetup, budgets_ms: Tensor) -> DeployedController:
    """Return the controller that a finished training deploys, with all that belongs to it.

    Args:
        setup: that of the finished training, with the best weights.
        budgets_ms: float [B], the budgets that the guard is calibrated for; under a mean budget
            those that prices are found for.
    """
    problem = setup.problem
    controller = copy.deepcopy(setup.controller).cpu()
    teacher = setup.distiller.fitted.teacher if setup.distiller else None
    calibration = Calibration(
        latency=fit_latency_model(setup.facts, setup.fitted, controller.normaliser),
        texts={name: {**encoder.arrays} for name, encoder in problem.encoders.items()},
    )
    probability = problem.rule.probability
    if problem.rule.limits:
        calibration.limits = {"values": dict(problem.rule.limits), "probability": probability}
    if setup.facts.costs:
        calibration.costs = fit_bounds(
            setup.facts, setup.fitted, controller.normaliser, probability
        )
        calibration.cost_names = [*setup.facts.costs]
    WAYS[problem.rule.kind].plan(calibration, setup, budgets_ms)
    return DeployedController(controller, teacher, calibration).eval()


def cells_to_judge(controller: DeployedController, table: ProfileTable, test: Tensor) -> Tensor:
    """Return the cells that judging a controller needs: what it chooses and what static chooses,
    for the validation samples that its guard is about and for test samples. bool [N, C].

    Args:
        test: int64 [n].
    """
    calibration = controller.calibration
    cells = torch.zeros_like(table.mask)
    rows = torch.from_numpy(calibration.judged["rows"]).unsqueeze(1)
    for name in ("chosen", "static"):
        cells[rows, torch.from_numpy(calibration.judged[name])] = True
    problem = Problem.from_table(table)
    features, _ = inputs_of_rows(problem, test)
    budgets_ms = np.array([row["budget_ms"] for row in calibration.guard])
    left_ms = np.maximum(budgets_ms - calibration.judged["cost_ms"], MIN_LATENCY_MS)
    allowed = allowed_in_service(controller.decider, problem, test)
    policies: list[tuple[Policy, Array]] = [
        (controller.without_fallback, left_ms),
        (Static(calibration.static), budgets_ms),
    ]
    for policy, limits in policies:
        cells[test.unsqueeze(1), choices_of(policy, features, limits, allowed)] = True
    return cells


def calibrated_again(controller: DeployedController, problem: Problem) -> DeployedController:
    """Return a controller whose guard was calibrated once more on the choices that it is about;
    the guard of free decisions on the same choices, without their cost.

    Args:
        problem: of the profile in which they have been measured.
    """
    judged = controller.calibration.judged

    def calibrated(cost_ms: float) -> list[GuardRow]:
        return calibrate(
            problem,
            torch.from_numpy(judged["rows"]),
            budgets_ms=torch.tensor([row["budget_ms"] for row in controller.calibration.guard]),
            static_choice=torch.from_numpy(judged["static"]),
            chosen=torch.from_numpy(judged["chosen"]),
            cost_ms=cost_ms,
            pooled=pools_budgets(problem, imitated=controller.teacher is not None),
        )

    guard = calibrated(float(judged["cost_ms"]))
    calibration = replace(controller.calibration, guard=guard, guard_if_free=calibrated(0.0))
    return DeployedController(controller.controller, controller.teacher, calibration).eval()

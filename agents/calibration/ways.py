"""How policies are made and compared, by the rule of a problem: reference, upper bound, baselines,
and what a deployed controller plans with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import Calibration, DeployedController
from knobwise.agents.calibration.mean_policies import (
    BestSingle,
    MixingPolicy,
    OracleAtMean,
    StaticMix,
    make_priced_baselines,
)
from knobwise.agents.calibration.plans import plan_for_deadlines, plan_for_mean_budgets
from knobwise.agents.evaluation.baselines import (
    LookupTable,
    Oracle,
    fit_static,
    make_baselines,
)
from knobwise.agents.evaluation.policy import Baseline, Policy
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.training.controllers import ControllerSetup
from knobwise.common.errors import InputError
from knobwise.envs.bandit.rules import Deadline, MeanBudget
from knobwise.envs.tables.cells import averages

Wanted = Sequence[float] | None
"""Budgets in the settings, if any."""


class Ways(NamedTuple):
    """What differs between rules, as functions of the problem and of B budgets."""

    check_trained: Callable[[DeployedController], None]
    """Raises InputError for a controller that cannot decide yet."""
    budgets_for: Callable[[DeployedController, Problem, Wanted], Tensor]
    """Those to judge a trained controller at. Raises InputError: it cannot decide at these."""
    references: Callable[[Problem, Tensor], list[Any]]
    """The ends of the scale: first the reference policy, last the upper bound, perhaps with others
    between them."""
    baselines: Callable[[Problem, Tensor, Experts, int], list[Any]]
    """All other simple ways to decide, with experts of all families, and the seed of `random`."""
    static: Callable[[Problem], Policy]
    """What chooses without features beside a controller that is explained."""
    prices: Callable[[DeployedController], Tensor | None]
    """Of a ms at each budget, float [B]; None where there are none."""
    deployed: Callable[[DeployedController], Any]
    """The policy that decides for a controller, guard or mix included."""
    plan: Callable[[Calibration, ControllerSetup, Tensor], None]
    """Adds to a calibration what the controller of a finished training plans with."""


def accept(*_: Any) -> None:
    """Accept everything."""


def deadline_references(problem: Problem, budgets_ms: Tensor) -> list[Baseline]:
    """Make budget-aware static, fitted on all but the test samples, and the oracle."""
    return [static_of(problem), Oracle(problem.cells, problem.split.test, problem.rule)]


def static_of(problem: Problem) -> Any:
    """Fit budget-aware static on all but the test samples."""
    return fit_static(problem.cells, problem.split.fitted, problem.rule)


def check_prices(controller: DeployedController) -> None:
    """Raise InputError for a controller that does not know the prices of its budgets yet."""
    if not controller.calibration.mean:
        raise InputError("its prices were not calibrated yet; let its training end")


def calibrated_means(controller: DeployedController, problem: Problem, wanted: Wanted) -> Tensor:
    """Return the mean budgets that a controller was calibrated for.

    Raises:
        InputError: another one is wanted.
    """
    mean = controller.decider.mean
    assert mean is not None
    try:
        mean.groups(np.array(wanted or mean.budgets_ms))
    except ValueError as error:
        raise InputError(f"budgets_ms: {error}") from error
    return torch.from_numpy(mean.budgets_ms)


def mean_references(problem: Problem, budgets_ms: Tensor) -> list[MixingPolicy]:
    """Make static mix and best single configuration, fitted on all but the test samples, and the
    oracle at mean budgets."""
    means = averages(problem.cells, problem.split.fitted)
    return [StaticMix(*means, budgets_ms), BestSingle(*means, budgets_ms), OracleAtMean(budgets_ms)]


WAYS = {
    Deadline.name: Ways(
        check_trained=accept,
        budgets_for=lambda controller, problem, wanted: problem.budgets(wanted),
        references=deadline_references,
        baselines=make_baselines,
        static=static_of,
        prices=lambda controller: None,
        deployed=lambda controller: controller,
        plan=plan_for_deadlines,
    ),
    MeanBudget.name: Ways(
        check_trained=check_prices,
        budgets_for=calibrated_means,
        references=mean_references,
        baselines=lambda problem, budgets_ms, experts, seed: make_priced_baselines(
            problem, budgets_ms, experts
        ),
        static=lambda problem: LookupTable(problem.cells, problem.split.fitted, 0.0),
        prices=lambda controller: 1 / torch.from_numpy(controller.calibration.mean["worths"]),
        deployed=lambda controller: controller.under_mean_budgets(),
        plan=plan_for_mean_budgets,
    ),
}
"""By the kind of the rule."""

"""What a deployed controller plans with, calibrated on samples that it was not fitted on: a guard
or a promise for deadlines, prices for mean budgets."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import (
    Arrays,
    Calibration,
    DeployedController,
)
from knobwise.agents.calibration.guard import calibrate, pools_budgets
from knobwise.agents.calibration.latencies import fit_latency_model
from knobwise.agents.calibration.mean_policies import (
    StaticMix,
    calibrated_values,
    compare_with_mix,
    outcomes_of,
)
from knobwise.agents.calibration.promise import (
    PromiseRow,
    Trial,
    requests_of,
    trials_of,
    with_smaller,
)
from knobwise.agents.calibration.ranges import fit_ranges
from knobwise.agents.controller.actor import make_actor
from knobwise.agents.deployed.arrays import pick
from knobwise.agents.deployed.promise import LatencyModel
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.policy import (
    Array,
    Policy,
    allowed_in_service,
    choices_of,
    inputs_of_rows,
)
from knobwise.agents.training.controllers import ControllerSetup
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.tables.splits import cluster_numbers


def plan_for_deadlines(
    calibration: Calibration, setup: ControllerSetup, budgets_ms: Tensor
) -> None:
    """Calibrate the guards on held-out samples, and keep the static policy that they fall back to;
    nothing without a guard, or where the aim is another one than utility."""
    if setup.policy.promise is not None:
        promise_for_deadlines(calibration, setup, budgets_ms, setup.policy.promise)
        return
    if not (setup.policy.guard and setup.judged_by == "utility"):
        return
    cells = setup.problem.cells
    # the static policy that chooses for a fold is fitted on the others
    rule = setup.rule
    statics = [fit_static(cells, rows, rule) for rows in setup.folds[0]]
    static_choice = _choices(setup, statics, budgets_ms)

    def decide(limits_ms: Tensor) -> Tensor:
        log_probs = map(setup.held_out_log_probs, limits_ms)
        return torch.stack([each.argmax(-1).cpu() for each in log_probs], 1)

    calibrated = functools.partial(
        calibrate,
        setup.problem,
        rows=setup.held_out.rows,
        budgets_ms=budgets_ms,
        static_choice=static_choice,
        pooled=pools_budgets(setup.problem, imitated=setup.distiller is not None),
    )
    # once with the cost of a decision charged, once as if it were free
    chosen = decide((budgets_ms - setup.cost_ms).clamp_min(MIN_LATENCY_MS))
    calibration.guard = calibrated(chosen=chosen, cost_ms=setup.cost_ms)
    calibration.guard_if_free = calibrated(chosen=decide(budgets_ms))
    if setup.problem.beliefs is not None:
        validation = torch.isin(setup.held_out.rows, setup.split.validation)
        calibration.judged = {
            "rows": setup.held_out.rows[validation].numpy(),
            "chosen": chosen[validation].numpy(),
            "static": static_choice[validation].numpy(),
            "cost_ms": np.array(setup.cost_ms),
        }
    if setup.distiller:
        by_teacher = _choices(setup, setup.distiller.fitted.of_folds, budgets_ms)
        calibration.guard_of_teacher = calibrated(chosen=by_teacher)
    calibration.static = fit_static(cells, setup.fitted, rule).arrays()


def promise_for_deadlines(
    calibration: Calibration, setup: ControllerSetup, budgets_ms: Tensor, promise: float
) -> None:
    """Find the rule for each budget, and the smaller ones that it brings, that keeps a promise on
    the samples that were held back for it, and keep what static knows of the times of
    configurations."""
    problem = setup.problem
    rows = setup.held_out.rows
    folds = setup.folds
    assert problem.calibration is not None
    requests = requests_of(problem, problem.calibration)
    names = list(problem.encoders)
    calibration.ranges = fit_ranges(problem.facts, setup.fitted, setup.controller.normaliser, names)
    # the network that is deployed, with its model of latencies and its limits, and no rule yet
    decider = DeployedController(copy.deepcopy(setup.controller).cpu(), None, calibration).decider
    features, _ = inputs_of_rows(problem, requests.rows)
    # as in service, where nothing is known of what was measured for a sample
    allowed = torch.from_numpy(
        allowed_in_service(decider, problem, torch.arange(problem.facts.num_samples))
    )
    # what is unlike training gets in service what is most often on time, and so it does here, so
    # that what is promised holds of all requests, those outside the range of training included
    unlike = decider.unlike(features, len(requests.rows))
    actor = make_actor(
        setup.controller, problem.facts, setup.group_size, all_networks=True, mask=allowed
    ).to(setup.device)

    normaliser = copy.deepcopy(setup.controller.normaliser).cpu()

    def within(model: LatencyModel, rows: Tensor, limit_ms: float, quantile: float) -> Array:
        x = normaliser.of_rows(problem.facts, rows).numpy()
        return model.within(x, limit_ms, quantile, allowed[rows].numpy())

    static = fit_static(problem.cells, setup.fitted, setup.rule)

    # for samples held out of a fold neither network nor model of latencies was fitted on them
    models = [LatencyModel(fit_latency_model(problem.facts, fit, normaliser)) for fit in folds[0]]

    # at one limit the candidates differ in the quantile alone
    @functools.lru_cache(maxsize=1)
    def log_probs_of_rows(limit_ms: float) -> Array:
        return setup.held_out.log_probs(actor, torch.tensor(limit_ms)).cpu().numpy()

    @functools.lru_cache(maxsize=1)
    def log_probs_of_requests(limit_ms: float) -> Array:
        mask = allowed[requests.rows].numpy()
        return decider.log_probs(features, np.full(len(mask), limit_ms), mask)

    def held_out(limit_ms: float, quantile: float) -> Tensor:
        log_probs = log_probs_of_rows(limit_ms)
        parts = zip(models, folds[1], strict=True)
        expected = [within(model, hold, limit_ms, quantile) for model, hold in parts]
        return torch.from_numpy(np.where(np.concatenate(expected), log_probs, -np.inf).argmax(1))

    def deployed(limit_ms: float, quantile: float) -> Tensor:
        expected = within(decider.latency, requests.rows, limit_ms, quantile)
        log_probs = log_probs_of_requests(limit_ms)
        chosen = np.where(expected, log_probs, -np.inf).argmax(1)
        mask = allowed[requests.rows].numpy()
        on_time = np.broadcast_to(static.on_time(limit_ms), mask.shape)
        return torch.from_numpy(np.where(unlike, pick(on_time, static.latency_ms, mask), chosen))

    budgets = with_smaller(problem, rows, budgets_ms, setup.cost_ms)

    def promised(trials: Sequence[Trial]) -> list[PromiseRow]:
        pairs = zip(trials, budgets.values(), strict=True)
        return [trial._replace(is_wanted=wanted).row(promise) for trial, wanted in pairs]

    about = problem, rows, requests, torch.tensor([*budgets]).double(), static
    policy = trials_of(*about, held_out, deployed, allowed=allowed, cost_ms=setup.cost_ms)
    calibration.promise = promised(policy)
    calibration.promise_of_static = promised(trials_of(*about, allowed=allowed))
    calibration.static = static.arrays()


def _choices(setup: ControllerSetup, policies: Sequence[Policy], limits: Tensor) -> Tensor:
    """Return what the policy of each fold chooses for the samples held out of it, int64 [n, B]."""
    choices = []
    for policy, rows in zip(policies, setup.folds[1], strict=True):
        features, mask = inputs_of_rows(setup.problem, rows)
        choices.append(choices_of(policy, features, limits.double().numpy(), mask))
    return torch.cat(choices)


def plan_for_mean_budgets(
    calibration: Calibration, setup: ControllerSetup, budgets_ms: Tensor
) -> None:
    """Find the price for each mean budget, and the budgets where the static mix is better."""
    problem = setup.problem
    rows = setup.held_out.rows
    cost_ms = setup.cost_ms

    def decide(value_ms: Tensor) -> Tensor:
        return setup.held_out_log_probs(value_ms.float()).argmax(-1).cpu()

    values_ms, chosen = calibrated_values(decide, problem, rows, budgets_ms - cost_ms)
    mean: Arrays = {"budgets_ms": budgets_ms.double().numpy(), "worths": values_ms.numpy()}
    mean["deployed"] = np.ones(len(values_ms), bool)
    if setup.policy.guard:
        # the mix for held-out samples is fitted on the others
        mixed = []
        of_mix = torch.zeros(len(budgets_ms), dtype=torch.int64)
        for fit, hold in zip(*setup.folds, strict=True):
            mix = StaticMix.fit(problem.cells, fit, budgets_ms)
            mixed.append(mix.expected(problem, hold)[0])
            of_mix += mix.mixture(problem, hold).measured(problem.facts.mask[hold]).sum(0)
        accuracy, _ = outcomes_of(problem, rows, chosen)
        _, latency_ms = outcomes_of(problem, rows, chosen, checked=False)
        calibration.guard = compare_with_mix(
            accuracy,
            latency_ms + cost_ms,
            torch.cat(mixed),
            budgets_ms,
            unit=problem.facts.unit,
            clusters=cluster_numbers(problem.facts, rows),
            measured=(problem.facts.mask[rows[:, None], chosen].sum(0), of_mix),
        )
        mean["deployed"] = np.array([row["deployed"] for row in calibration.guard])
        # the mix that is deployed is fitted on all samples
        mix = StaticMix.fit(problem.cells, setup.fitted, budgets_ms)
        mean |= {f"mix.{name}": values for name, values in mix.arrays().items()}
    calibration.mean = mean

"""A controller on other hardware: a few timed cells give an offset of the log-latency for every configuration.

    ln t_new(sample, c) = ln t_old(sample, c) + β₀ + Σ_k β_k[value of knob k] + γ_c + ε

All terms are normal with mean 0: β₀ is almost free, γ_c is shrunk more than the β_k. The posterior mean of all terms
but ε, 0 if no cell was timed, is the offset of a configuration; its posterior variance is added to that of the
controller's predictions. The accuracies stay.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from knobwise.agents.checkpoint import network_of
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.predictors.regressors import Regressor
from knobwise.agents.serving.export import configurations_of
from knobwise.agents.stack.stacked_controller import StackedController, network_outcomes
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import log_measured
from knobwise.envs.tables.profile_table import ProfileTable

Adaptable = TypeVar("Adaptable", Controller, StackedController)


class Scales(NamedTuple):
    """Prior standard deviations of the β_k, of the γ_c and of ε."""

    knob: float
    configuration: float
    noise: float


FREE = 3.0
"""Prior standard deviation of β₀."""
_GRID = itertools.product((0.01, 0.05, 0.1, 0.2, 0.4), (0.01, 0.03, 0.1), (0.02, 0.05, 0.1, 0.3))
TRIED = [Scales(*each) for each in _GRID]
"""What offsets are averaged over."""
OUTLYING, LEAST_NOISE = 4.0, 0.02
"""Cells further from a first fit than so many standard deviations, each at least 0.02, are left out as stalls."""
NARROWEST = 0.5
"""The least factor of a predicted spread."""
LEAST_CELLS = 5
"""With fewer cells the noise is not known."""


class Offsets(NamedTuple):
    """Posterior mean and variance of the offsets, float64 [C] each, and ln of the marginal likelihood of the timed
    cells up to a constant."""

    mean: Tensor
    variance: Tensor
    evidence: float


def prior_covariance(configurations: Tensor, scales: Scales, free: float = FREE) -> Tensor:
    """Of the offsets of configurations int64 [C, K], with `free` for the standard deviation of β₀: float64 [C, C]."""
    covariance = free**2 + scales.configuration**2 * torch.eye(len(configurations), dtype=torch.float64)
    for values in configurations.T:
        covariance += scales.knob**2 * (values.unsqueeze(1) == values)
    return covariance


def fit_offsets(configurations: Tensor, chosen: Tensor, ratios: Tensor) -> Offsets:
    """Offsets from timed cells, averaged over the scales by their marginal likelihoods (Hoeting et al. 1999, "Bayesian
    Model Averaging", Statistical Science 14). The variance includes that of the cells around their offsets, because
    other requests will scatter alike.

    Args:
        configurations: int64 [C, K].
        chosen: int64 [n], the configuration of each cell.
        ratios: float [n], ln(t_new / t_old).
    """
    kept = torch.ones_like(chosen, dtype=torch.bool)
    for _ in range(3):
        fits = [posterior(configurations, chosen[kept], ratios[kept], scales) for scales in TRIED]
        means, variances = (torch.stack(parts) for parts in list(zip(*fits, strict=True))[:2])
        evidence = torch.tensor([fit.evidence for fit in fits], dtype=torch.float64)
        share = evidence.softmax(0)
        mean = share @ means
        residuals = (ratios - mean[chosen]).abs()
        kept = residuals <= OUTLYING * max(1.4826 * float(residuals.median()), LEAST_NOISE)
    jitter = residuals[kept].square().sum() / max(int(kept.sum()), 1)
    variance = share @ (variances + means.square()) - mean.square() + jitter
    return Offsets(mean, variance, float(evidence.logsumexp(0)))


def posterior(configurations: Tensor, chosen: Tensor, ratios: Tensor, scales: Scales) -> Offsets:
    """The same at these scales, from all cells. Cells of a configuration count as their mean, with less noise."""
    timed, group = chosen.unique(return_inverse=True)
    count = group.bincount(minlength=len(timed)).double()
    mean = torch.zeros_like(count).index_add_(0, group, ratios.double()) / count
    prior = prior_covariance(configurations, scales)
    factor = torch.linalg.cholesky(prior[timed][:, timed] + torch.diag(scales.noise**2 / count))
    gain = torch.cholesky_solve(prior[timed], factor)
    within = (ratios - mean[group]).square().sum() / scales.noise**2
    between = torch.linalg.solve_triangular(factor, mean.unsqueeze(1), upper=False).square().sum()
    volume = factor.diagonal().log().sum() + (len(chosen) - len(timed)) * math.log(scales.noise)
    variance = (prior.diagonal() - (gain * prior[timed]).sum(0)).clamp_min(0)
    return Offsets(gain.T @ mean, variance, float(-0.5 * (within + between) - volume))


def log_ratios(old: ProfileTable, new: ProfileTable) -> tuple[Tensor, Tensor]:
    """The cells that both tables hold, matched by sample id (and data set, if both name data sets) and knob values: the
    configuration of each in `old`, int64 [n], and ln of its latency in `new` / in `old`, float64 [n].

    Raises:
        InputError: other configurations, ambiguous ids, too few such cells.
    """
    both = bool(old.datasets and new.datasets)
    of_old, of_new = ([*zip(t.datasets, t.sample_ids, strict=True)] if both else [*t.sample_ids] for t in (old, new))
    numbers = {key: row for row, key in enumerate(of_old)}
    if len(numbers) < len(of_old):
        raise InputError(f"profile {new.name!r}: add a column `dataset`, since ids of {old.name!r} occur several times")
    known = {tuple(sorted(values.items())): column for column, values in enumerate(configurations_of(old))}
    columns = torch.tensor([known.get(tuple(sorted(values.items())), -1) for values in configurations_of(new)])
    if len(others := (columns < 0).nonzero()):
        raise InputError(
            f"profile {new.name!r}: {len(others)} of its configurations are not in {old.name!r}, such as "
            f"{new.label(int(others[0]))}; time the configurations that the controller chooses from"
        )
    rows = torch.tensor([numbers.get(key, -1) for key in of_new])
    i, j = (new.mask & (rows >= 0).unsqueeze(1) & old.mask[rows][:, columns]).nonzero().T
    if len(i) < LEAST_CELLS:
        raise InputError(
            f"profile {new.name!r}: {len(i)} of its cells (sample and configuration) are also in {old.name!r}, but at "
            f"least {LEAST_CELLS} are needed; time more samples of {old.name!r}"
        )
    before, after = log_measured(old.latency_ms)[rows[i], columns[j]], log_measured(new.latency_ms)[i, j]
    return columns[j], after.double() - before.double()


@torch.no_grad()
def adapted(agent: Adaptable, offsets: Offsets, x: Tensor) -> Adaptable:
    """A copy of a `utility` controller for deadlines that expects e^offset times the latency of each configuration, and
    is less sure of it. What belongs to budgets (the guard, their encoding) moves by the mean offset.

    A network's spreads get one factor for each configuration, from those at `x`, normalised features [n, width].
    """
    agent = copy.deepcopy(agent)
    controller, factors, overall = network_of(agent), offsets.mean.exp(), offsets.mean.mean()
    spread = network_outcomes(controller, x).spread
    assert isinstance(controller.network, UtilityNetwork)
    _, log_latency, log_spread = controller.network.outcome_head.bias.chunk(3, -1)
    log_latency += offsets.mean
    wider = offsets.variance / spread.square().mean(1, keepdim=True)  # of a member that is surer than all together
    log_spread += 0.5 * wider.clamp_min(NARROWEST**2 - 1).log1p()
    controller.network.encoding.mean += overall
    if isinstance(agent, StackedController):
        for expert in agent.experts:
            assert isinstance(expert, Expert)
            assert isinstance(expert.log_latency, Regressor)
            expert.log_latency = expert.log_latency.rescaled(torch.ones(len(factors)), offsets.mean.float())
            expert.spread = (expert.spread.square() + offsets.variance.float()).clamp_min(1e-6).sqrt()
        if agent.guard is not None:
            agent.guard.budgets_ms *= overall.exp()
        if agent.static is not None:
            agent.static = agent.static.scaled(factors)
    return agent

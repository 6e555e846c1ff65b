"""A controller on other hardware: a few timed cells give an offset of the log-latency for every configuration.

    ln t_new(sample, c) = ln t_old(sample, c) + β₀ + Σ_k β_k[value of knob k] + γ_c + ε

All terms are normal with mean 0: β₀ almost free, each value of a knob with the standard deviation `knob`, each
configuration's own deviation with `configuration`, less, and ε with `noise`. The offset of a configuration is the
posterior mean of the sum without ε; with no timed cell it is 0. It is added to the latencies that a controller
predicts, and multiplies those that its guard and its static choice were calibrated on. The accuracies stay.
"""

from __future__ import annotations

import copy
import itertools
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from knobwise.agents.checkpoint import network_of
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.serving.export import configurations_of
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import log_measured
from knobwise.envs.tables.profile_table import ProfileTable

FREE = 3.0
"""Prior standard deviation of β₀: hardware may be e⁶ times as fast, or as slow."""
LEAST_CELLS = 5
"""With fewer nothing can be said about the noise."""
OUTLYING = 4.0
"""Cells further than this many standard deviations from a first fit are left out: stalls of the machine."""
LEAST_NOISE = 0.02
"""Least standard deviation that this is counted in."""
Adaptable = TypeVar("Adaptable", Controller, StackedController)


class Scales(NamedTuple):
    """Prior standard deviations of ln(t_new / t_old)."""

    knob: float
    configuration: float
    noise: float


PLANNED = Scales(0.2, 0.05, 0.1)
"""What is assumed when cells are chosen."""
TRIED = [Scales(*each) for each in itertools.product((0.05, 0.1, 0.2, 0.4), (0.01, 0.03, 0.1), (0.02, 0.05, 0.1, 0.3))]
"""Among these the one with the greatest marginal likelihood is taken."""


class Offsets(NamedTuple):
    """What timed cells tell of the log-latencies of C configurations, float64 [C] each."""

    mean: Tensor
    spread: Tensor
    """Posterior standard deviation."""
    scales: Scales
    evidence: float
    """ln of the marginal likelihood of the cells, up to a constant."""


def prior_covariance(configurations: Tensor, scales: Scales) -> Tensor:
    """Of the offsets, for configurations int64 [C, K]: float64 [C, C]."""
    covariance = FREE**2 + scales.configuration**2 * torch.eye(len(configurations), dtype=torch.float64)
    for values in configurations.T:
        covariance += scales.knob**2 * (values.unsqueeze(1) == values)
    return covariance


def fit_offsets(configurations: Tensor, chosen: Tensor, differences: Tensor) -> Offsets:
    """Offsets from n timed cells, at the scales with the greatest marginal likelihood (MacKay 1992, "Bayesian
    Interpolation", Neural Computation 4).

    Args:
        configurations: int64 [C, K].
        chosen: int64 [n], the configuration of each cell.
        differences: float [n], ln t_new − ln t_old of each cell.
    """
    kept = torch.ones_like(differences, dtype=torch.bool)
    for _ in range(3):
        offsets = max(
            (posterior(configurations, chosen[kept], differences[kept], s) for s in TRIED),
            key=lambda each: each.evidence,
        )
        residuals = (differences - offsets.mean[chosen]).abs()
        kept = residuals <= OUTLYING * max(1.4826 * float(residuals.median()), LEAST_NOISE)
    return offsets


def posterior(configurations: Tensor, chosen: Tensor, differences: Tensor, scales: Scales) -> Offsets:
    """The same at fixed scales, from all cells."""
    timed, group = chosen.unique(return_inverse=True)
    count = group.bincount(minlength=len(timed)).double()
    mean = torch.zeros_like(count).index_add_(0, group, differences.double()) / count
    within = float((differences - mean[group]).square().sum()) / scales.noise**2
    prior = prior_covariance(configurations, scales)
    factor = torch.linalg.cholesky(prior[timed][:, timed] + torch.diag(scales.noise**2 / count))
    gain = torch.cholesky_solve(prior[timed], factor)
    between = float(mean @ torch.cholesky_solve(mean.unsqueeze(1), factor).squeeze(1))
    freedom = (len(chosen) - len(timed)) * torch.tensor(scales.noise).log()
    evidence = -0.5 * (within + between) - float(factor.diagonal().log().sum() + freedom)
    variance = prior.diagonal() - (gain * prior[timed]).sum(0)
    return Offsets(gain.T @ mean, variance.clamp_min(0).sqrt(), scales, evidence)


def log_ratios(old: ProfileTable, new: ProfileTable) -> tuple[Tensor, Tensor]:
    """The cells in both tables: the configuration of each, int64 [n], by its number in `old`, and ln t_new − ln t_old,
    float64 [n]. Samples have the same id, and the same data set where both tables name data sets.

    Raises:
        InputError: other configurations, ids that are ambiguous, too few such cells.
    """
    named = bool(old.datasets and new.datasets)
    of_old, of_new = ([*zip(t.datasets, t.sample_ids, strict=True)] if named else [*t.sample_ids] for t in (old, new))
    numbers = {key: row for row, key in enumerate(of_old)}
    if len(numbers) < len(of_old):
        raise InputError(
            f"profile {new.name!r}: a sample id is in several data sets of {old.name!r}; add a column dataset"
        )
    known = {tuple(sorted(values.items())): column for column, values in enumerate(configurations_of(old))}
    columns = [known.get(tuple(sorted(values.items())), -1) for values in configurations_of(new)]
    if -1 in columns:
        raise InputError(
            f"profile {new.name!r}: {columns.count(-1)} of its configurations are none of {old.name!r}, such as "
            f"{new.label(columns.index(-1))}; time the configurations that the controller chooses from"
        )
    rows, column = torch.tensor([numbers.get(key, -1) for key in of_new]), torch.tensor(columns)
    i, j = (new.mask & (rows >= 0).unsqueeze(1)).nonzero().T
    i, j = (index[old.mask[rows[i], column[j]]] for index in (i, j))
    if len(i) < LEAST_CELLS:
        raise InputError(
            f"profile {new.name!r}: {len(i)} of its cells (sample and configuration) are in {old.name!r} too, at least "
            f"{LEAST_CELLS} are needed; time those that knobwise adapt lists without profile="
        )
    ratios = log_measured(new.latency_ms)[i, j].double() - log_measured(old.latency_ms)[rows[i], column[j]].double()
    return column[j], ratios


# -- which cells to time -----------------------------------------------------------------------------------------------


@torch.no_grad()
def decision_weights(
    agent: Controller | StackedController, table: ProfileTable, rows: Tensor, budgets: Tensor
) -> Tensor:
    """How often each configuration is chosen or nearly chosen: the mean of the controller's probabilities over these
    rows (int64 [n]) and budgets [B] in ms, float64 [C], of which a tenth is spread evenly."""
    x = agent.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    shares = [agent(x, budget.expand(len(rows)), table.mask[rows]).exp().mean(0) for budget in budgets]
    return 0.9 * torch.stack(shares).double().mean(0) + 0.1 / table.num_configurations


def cells_to_time(configurations: Tensor, mask: Tensor, weights: Tensor, count: int, seed: int = 0) -> Tensor:
    """Cells whose times would tell most about the offsets: at most `count`, as (sample, configuration), int64 [n, 2].

    Each is the one that reduces Σ_c weights_c·Var[offset_c] most, given those before: Bayesian A-optimality (Chaloner
    and Verdinelli 1995, "Bayesian Experimental Design: A Review", Statistical Science 10, section 2.2), greedily. The
    variance does not depend on the times, so that all cells are known beforehand. Samples are drawn, each as rarely as
    possible, since a sample's own deviation must not pass for a configuration's.

    Args:
        configurations: int64 [C, K].
        mask: bool [N, C], the cells that may be taken.
        weights: float64 [C].
    """
    free, covariance = mask.clone(), prior_covariance(configurations, PLANNED)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    taken, cells = torch.zeros(len(mask)), []
    for _ in range(min(count, int(mask.sum()))):
        reduction = weights @ covariance.square() / (covariance.diagonal() + PLANNED.noise**2)
        best = int(reduction.masked_fill(~free.any(0), -1.0).argmax())
        column = covariance[best]
        covariance = covariance - torch.outer(column, column) / (column[best] + PLANNED.noise**2)
        sample = int(order[taken[order].masked_fill(~free[order, best], torch.inf).argmin()])
        taken[sample] += 1
        free[sample, best] = False
        cells.append((sample, best))
    return torch.tensor(cells).reshape(-1, 2)


# -- the controller ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def adapted(agent: Adaptable, offsets: Tensor) -> Adaptable:
    """A copy of a controller for deadlines of structure `utility` that expects e^offset times the latency of each
    configuration, offsets [C]. Limits that stand for no configuration (the calibrated budgets of the guard, the
    encoding of the budget) follow the mean offset."""
    agent = copy.deepcopy(agent)
    network, count, overall = network_of(agent).network, len(offsets), offsets.mean()
    assert isinstance(network, UtilityNetwork)
    network.outcome_head.bias[..., count : 2 * count] += offsets
    network.encoding.mean += overall
    if isinstance(agent, StackedController):
        for expert in agent.experts:
            assert isinstance(expert, Expert)
            expert.log_latency = expert.log_latency.rescaled(torch.ones(count), offsets.float())
        if agent.guard is not None:
            agent.guard.budgets_ms *= overall.exp()
        if agent.static is not None:
            agent.static = agent.static.scaled(offsets.exp())
    return agent

"""A controller on other hardware: a few timed cells give an offset of the log-latency for every
configuration.

    ln t_new(sample, c) = ln t_old(sample, c) + β₀ + Σ_k β_k[value of knob k] + γ_c + ε

All terms are normal with mean 0: β₀ is almost free, γ_c is shrunk more than the β_k. The posterior
mean of all terms but ε, 0 if no cell was timed, is the offset of a configuration; its posterior
variance is added to that of the controller's predictions. The accuracies stay.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.judging.baselines import FittedStatic
from knobwise.agents.serving.export import configurations_of
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.teacher import NARROWEST, Teacher
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import log_measured
from knobwise.envs.configurations.drift import Drift
from knobwise.envs.tables.profile_table import ProfileTable


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
OUTLYING = 4.0
LEAST_NOISE = 0.02
"""Cells further from a first fit than so many standard deviations, each at least 0.02, are left out
as stalls."""
LEAST_CELLS = 5
"""With fewer cells the noise is not known."""


class Offsets(NamedTuple):
    """Posterior mean and variance of the offsets, float64 [C] each, and ln of the marginal
    likelihood of the timed cells up to a constant."""

    mean: Tensor
    variance: Tensor
    evidence: float


def prior_covariance(configurations: Tensor, scales: Scales, free: float = FREE) -> Tensor:
    """Of the offsets of configurations int64 [C, K], with `free` for the standard deviation of β₀:
    float64 [C, C]."""
    covariance = free**2 + scales.configuration**2 * torch.eye(
        len(configurations), dtype=torch.float64
    )
    for values in configurations.T:
        covariance += scales.knob**2 * (values.unsqueeze(1) == values)
    return covariance


def fit_offsets(configurations: Tensor, chosen: Tensor, ratios: Tensor) -> Offsets:
    """Offsets from timed cells, averaged over the scales by their marginal likelihoods (Hoeting et
    al. 1999, "Bayesian Model Averaging", Statistical Science 14). The variance includes that of the
    cells around their offsets, because other requests will scatter alike.

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
    """The same at these scales, from all cells. Cells of a configuration count as their mean, with
    less noise."""
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
    """The cells that both tables hold, matched by sample id (and data set, if both name data sets)
    and knob values: the configuration of each in `old`, int64 [n], and ln of its latency in `new` /
    in `old`, float64 [n].

    Raises:
        InputError: other configurations, ambiguous ids, too few such cells.
    """
    both = bool(old.datasets and new.datasets)
    of_old, of_new = (
        [*zip(t.datasets, t.sample_ids, strict=True)] if both else [*t.sample_ids]
        for t in (old, new)
    )
    numbers = {key: row for row, key in enumerate(of_old)}
    if len(numbers) < len(of_old):
        raise InputError(
            f"profile {new.name!r}: add a column `dataset`, since ids of {old.name!r} occur "
            "several times"
        )
    known = {
        tuple(sorted(values.items())): column
        for column, values in enumerate(configurations_of(old))
    }
    columns = torch.tensor(
        [known.get(tuple(sorted(values.items())), -1) for values in configurations_of(new)]
    )
    if len(others := (columns < 0).nonzero()):
        raise InputError(
            f"profile {new.name!r}: {len(others)} of its configurations are not in {old.name!r}, "
            "such as "
            f"{new.label(int(others[0]))}; time the configurations that the controller chooses from"
        )
    rows = torch.tensor([numbers.get(key, -1) for key in of_new])
    i, j = (new.mask & (rows >= 0).unsqueeze(1) & old.mask[rows][:, columns]).nonzero().T
    if len(i) < LEAST_CELLS:
        raise InputError(
            f"profile {new.name!r}: {len(i)} of its cells (sample and configuration) are also in "
            f"{old.name!r}, but at "
            f"least {LEAST_CELLS} are needed; time more samples of {old.name!r}"
        )
    before = log_measured(old.latency_ms)[rows[i], columns[j]]
    after = log_measured(new.latency_ms)[i, j]
    return columns[j], after.double() - before.double()


def adapted(agent: DeployedController, offsets: Offsets, x: Tensor) -> DeployedController:
    """Return a copy of a controller for deadlines whose teacher expects e^offset times the latency
    of each configuration, and is less sure of it, and whose heads were taught again.

    What belongs to budgets (the guard, their encoding, static) moves by the mean offset.

    Args:
        x: normalised features [n, width] of requests to learn from.
    """
    agent = copied(agent)
    teacher = agent.teacher
    assert teacher is not None
    before = copy.deepcopy(teacher)
    overall = float(offsets.mean.mean())
    # where all configurations are as much slower, the budget alone moves
    before.latency_offset += overall
    teacher.latency_offset += offsets.mean.float()
    narrowest = (NARROWEST**2 - 1) * teacher.moments(x).spread.square().mean(0)
    teacher.latency_variance += offsets.variance.float().maximum(narrowest)
    agent.controller.network.encoding.mean += overall
    settled = agent.settled
    for row in (*settled.guard, *settled.guard_if_free):
        row["budget_ms"] *= math.exp(overall)
    if settled.static:
        static = FittedStatic.restored(settled.static).scaled(offsets.mean.exp().numpy())
        settled.static = static.arrays()
    latency = settled.latency
    bias = latency["bias"] + offsets.mean.numpy()
    variance = latency["spread"] ** 2
    variance = np.maximum(variance + offsets.variance.numpy(), NARROWEST**2 * variance)
    moved = {"bias": bias, "spread": np.sqrt(variance)}
    settled.latency = latency | {name: v.astype(np.float32) for name, v in moved.items()}
    teach_again(agent, before, x)
    return agent


def copied(agent: DeployedController) -> DeployedController:
    """Return a copy to be changed."""
    settled = copy.deepcopy(agent.settled)
    parts = copy.deepcopy(agent.controller), copy.deepcopy(agent.teacher)
    return DeployedController(*parts, settled).eval()


STEPS = 200
CONTEXTS = 256
LR = 1e-3
"""Of AdamW in each of two parts, requests in each step, and its largest learning rate, when heads
are taught again."""
LEAST_CHANGE = 1e-3
"""Where no configuration's worth changes by more than this, there is nothing to teach."""


def teach_again(agent: DeployedController, before: Teacher, x: Tensor) -> None:
    """Teach the deployed heads what their teacher expects now, if it expected something else
    `before`.

    As in training they first imitate it: the cross-entropy with its softmax(sharpness·utility).
    Then they gain utility by what it expects, with a bonus for entropy: the KL divergence from
    them to it. Adding what changed to the old heads' logits would be worse, since these say little
    of how much worse it is what they would not choose. The networks beside them stay as they were.

    Args:
        x: normalised features [n, width] of requests.
    """
    controller = agent.controller
    teacher = agent.teacher
    assert teacher is not None
    generator = torch.Generator().manual_seed(0)
    encoding = controller.network.encoding
    low, high = (float(encoding.mean + z * encoding.scale) for z in (-2, 2))
    # asked once for all: several limits for each request
    requests = x[torch.randint(len(x), (8 * CONTEXTS,), generator=generator)]
    share = torch.rand(len(requests), 1, generator=generator)
    limits = torch.exp(low + (high - low) * share)
    drift = Drift(controller.configurations, controller.config.drift)
    offsets = drift.draw((len(requests), 1), generator)
    worths = teacher.teach(requests, limits, offsets)
    few = requests[:CONTEXTS], limits[:CONTEXTS], None if offsets is None else offsets[:CONTEXTS]
    change = worths[:CONTEXTS] - before.teach(*few)
    if float(change.std(-1).max()) < LEAST_CHANGE:
        return
    target = (controller.config.sharpness * worths.squeeze(1)).log_softmax(-1)
    pupil = controller.alone().requires_grad_(True)
    parameters = list(pupil.network.parameters())
    for divergence in (_cross_entropy, _divergence_to):
        optimiser = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
        for _ in range(STEPS):
            some = torch.randint(len(requests), (CONTEXTS,), generator=generator)
            if offsets is None:
                offset = None
            else:
                offset = offsets[some, 0]
            log_probs = pupil(requests[some], limits[some, 0], None, offset)
            loss = divergence(log_probs, target[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    networks = controller.network.parameters()
    for all_networks, taught in zip(networks, parameters, strict=True):
        all_networks.data[-1:] = taught.data


def _cross_entropy(log_probs: Tensor, target: Tensor) -> Tensor:
    """Return −E ln π under the target's log-probs, [n, C] each."""
    return -(target.exp() * log_probs).sum(-1).mean()


def _divergence_to(log_probs: Tensor, target: Tensor) -> Tensor:
    """Return KL(π ‖ target) of log-probs [n, C] each."""
    return (log_probs.exp() * (log_probs - target)).sum(-1).mean()

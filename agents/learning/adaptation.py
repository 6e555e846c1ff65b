"""Adapt a controller to other hardware: from a few timed cells, estimate by how much the
log-latency of every configuration differs there.

    ln t_new(sample, c) = ln t_old(sample, c) + β₀ + Σ_k β_k[value of knob k] + γ_c + ε

All terms are normal with mean 0: β₀ is almost free, γ_c is shrunk more than the β_k. The offset of
a configuration is the posterior mean of all terms but ε, which is 0 if no cell was timed. Its
posterior variance is added to that of the controller's predictions. The accuracies stay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.teacher.teacher import NARROWEST, Teacher
from knobwise.common.errors import InputError
from knobwise.common.words import setting, spelled
from knobwise.envs.bandit.budgets import log_measured
from knobwise.envs.tables.drift import drawn_drift
from knobwise.envs.tables.profile_table import ProfileTable


class Scales(NamedTuple):
    """Prior standard deviations of the terms of an offset."""

    knob: float = 0.3
    """That of the β_k."""
    configuration: float = 0.1
    """That of the γ_c."""
    noise: float = 0.3
    """That of ε."""


SCALES = Scales()
"""Those of what configurations imply for each other."""
FREE = 3.0
"""Prior standard deviation of β₀."""
TRIED = [
    Scales(knob=knob, configuration=configuration, noise=noise)
    for knob in (0.01, 0.05, 0.1, 0.2, 0.4)
    for configuration in (0.01, 0.03, 0.1)
    for noise in (0.02, 0.05, 0.1, 0.3)
]
"""The scales that offsets are averaged over."""
OUTLYING = 4.0
"""Cells further from a first fit than this, in standard deviations, are left out as stalls."""
MIN_NOISE = 0.02
"""Least standard deviation, in ln ms, by which stalls are recognised."""
MIN_CELLS = 5
"""Fewest cells that offsets are estimated from; with fewer the noise is not known."""


class Offsets(NamedTuple):
    """Offsets of the log-latency of every configuration."""

    mean: Tensor
    """Posterior mean, float64 [C]."""
    variance: Tensor
    """Posterior variance, float64 [C]."""
    evidence: Tensor
    """ln of the marginal likelihood of the timed cells, up to a constant, float64 []."""


def fit_offsets(configurations: Tensor, chosen: Tensor, ratios: Tensor) -> Offsets:
    """Estimate offsets from timed cells, averaged over `TRIED` scales by their evidence.

    This is Bayesian model averaging (Hoeting et al. 1999, "Bayesian Model Averaging", Statistical
    Science 14). The variance includes the scatter of the cells around their offsets, because other
    requests will scatter alike.

    Args:
        configurations: int64 [C, K].
        chosen: int64 [n], the configuration of each cell.
        ratios: float [n], ln(t_new / t_old).
    """
    kept = torch.ones_like(chosen, dtype=torch.bool)
    # fit, leave out stalls, fit again
    for _ in range(3):
        fits = [posterior(configurations, chosen[kept], ratios[kept], scales) for scales in TRIED]
        means, variances, evidence = map(torch.stack, zip(*fits, strict=True))
        share = evidence.softmax(0)
        mean = share @ means
        residuals = (ratios - mean[chosen]).abs()
        # the standard deviation, if it is normal
        spread = 1.4826 * float(residuals.median())
        kept = residuals <= OUTLYING * max(spread, MIN_NOISE)
    # the variance of the mixture of all scales, and the scatter of the cells
    jitter = residuals[kept].square().sum() / max(int(kept.sum()), 1)
    variance = share @ (variances + means.square()) - mean.square() + jitter
    return Offsets(mean, variance, evidence.logsumexp(0))


def posterior(
    configurations: Tensor, chosen: Tensor, ratios: Tensor, scales: Scales = SCALES
) -> Offsets:
    """Return the posterior offsets at given scales, from all cells.

    The cells of a configuration count as their mean, with accordingly less noise.

    Args:
        configurations: int64 [C, K].
        chosen: int64 [n], the configuration of each cell.
        ratios: float [n], ln(t_new / t_old).
        scales: prior standard deviations of the terms.
    """
    # the prior covariance of all offsets, [C, C]
    identity = torch.eye(len(configurations), dtype=torch.float64)
    prior = FREE**2 + scales.configuration**2 * identity
    for values in configurations.T:
        prior += scales.knob**2 * (values.unsqueeze(1) == values)
    # the mean of each timed configuration
    timed, group = chosen.unique(return_inverse=True)
    count = group.bincount(minlength=len(timed)).double()
    mean = torch.zeros_like(count).index_add_(0, group, ratios.double()) / count
    # normal prior, normal noise: the posterior by a Cholesky factor
    factor = torch.linalg.cholesky(prior[timed][:, timed] + torch.diag(scales.noise**2 / count))
    gain = torch.cholesky_solve(prior[timed], factor)
    # ln of the marginal likelihood: of cells around their means, and of the means
    within = (ratios - mean[group]).square().sum() / scales.noise**2
    between = torch.linalg.solve_triangular(factor, mean.unsqueeze(1), upper=False).square().sum()
    volume = factor.diagonal().log().sum() + (len(chosen) - len(timed)) * math.log(scales.noise)
    variance = (prior.diagonal() - (gain * prior[timed]).sum(0)).clamp_min(0)
    return Offsets(gain.T @ mean, variance, -0.5 * (within + between) - volume)


class _Places(NamedTuple):
    """Where the samples and configurations of a table stand in an older one; -1 for nowhere."""

    rows: Tensor
    """int64 [N], for each sample."""
    columns: Tensor
    """int64 [C], for each configuration."""
    common: Tensor
    """bool [N, C]: the cells that both tables hold."""


def log_ratios(old: ProfileTable, new: ProfileTable) -> tuple[Tensor, Tensor]:
    """Compare the latencies of the cells that both tables hold.

    Cells are matched by sample id (and data set, if both tables name data sets) and knob values.

    Returns:
        The configuration of each cell in `old`, int64 [n], and ln(latency in `new` / latency in
        `old`), float64 [n].

    Raises:
        InputError: another unit, ambiguous ids, too few such cells.
    """
    if old.unit != new.unit:
        raise InputError(
            f"profile {new.name!r}: is in {new.unit}, but {old.name!r} is in {old.unit}"
        )
    rows, columns, common = _places(old, new)
    i, j = common.nonzero().T
    if len(i) < MIN_CELLS:
        _, why = unmatched_cells(old, new)
        raise InputError(
            f"profile {new.name!r}: {len(i)} of its cells (sample and configuration) are also in "
            f"{old.name!r}{why and f', which {why}'}; time {MIN_CELLS} of these at least"
        )
    before = log_measured(old.latency_ms)[rows[i], columns[j]]
    after = log_measured(new.latency_ms)[i, j]
    return columns[j], after.double() - before.double()


def unmatched_cells(old: ProfileTable, new: ProfileTable) -> tuple[int, str]:
    """Count the cells of a table that an older one does not hold, matched as by `log_ratios`.

    Returns:
        How many they are, and why the first of them is one, such as `has no sample '7'`; "" if
        there are none.

    Raises:
        InputError: ambiguous ids.
    """
    rows, columns, common = _places(old, new)
    i, j = (new.mask & ~common).nonzero().T
    if not len(i):
        return 0, ""
    row = int(i[0])
    column = int(j[0])
    name = repr(new.sample_ids[row])
    if old.datasets and new.datasets:
        name += f" of the data set {new.datasets[row]!r}"
    knobs = setting(configurations_of(new)[column])
    if columns[column] < 0:
        return len(i), f"has no configuration {knobs}"
    if rows[row] < 0:
        return len(i), f"has no sample {name}"
    return len(i), f"does not hold sample {name} under {knobs}"


def _places(old: ProfileTable, new: ProfileTable) -> _Places:
    """Find samples by id, and by data set if both tables name it, and configurations by knob
    values. Raises InputError for ambiguous ids."""
    ids: list[Any] = [old.sample_ids, new.sample_ids]
    if old.datasets and new.datasets:
        ids = [zip(table.sample_ids, table.datasets, strict=True) for table in (old, new)]
    row_of = {key: row for row, key in enumerate(ids[0])}
    if len(row_of) < old.num_samples:
        raise InputError(
            f"profile {new.name!r}: add a column `dataset`, since ids of {old.name!r} occur "
            "several times"
        )
    rows = torch.tensor([row_of.get(key, -1) for key in ids[1]])
    column_of = {_key(values): column for column, values in enumerate(configurations_of(old))}
    columns = torch.tensor([column_of.get(_key(values), -1) for values in configurations_of(new)])
    known = (rows >= 0).unsqueeze(1) & (columns >= 0)
    return _Places(rows, columns, known & new.mask & old.mask[rows][:, columns])


def _key(configuration: Mapping[str, object]) -> str:
    """Return what a configuration has in common with itself in a file where true is text, as in
    those of earlier versions."""
    return str({name: spelled(value) for name, value in configuration.items()})


def adapt_latency(agent: DeployedController, offsets: Offsets, x: Tensor) -> DeployedController:
    """Return a copy of a controller for deadlines that allows for offsets of the log-latency.

    Its teacher expects e^offset times the latency of each configuration and is less sure of it, and
    its heads are distilled again. The guard and the encoding of budgets move by the mean offset.

    Args:
        agent: the controller; it is not changed.
        offsets: offsets of every configuration.
        x: normalised features [n, width] of requests to learn from.
    """
    agent = copy_controller(agent)
    teacher = agent.teacher
    before = copy.deepcopy(teacher)
    # an offset that all configurations share only moves the budgets, so nothing has to be distilled
    overall = float(offsets.mean.mean())
    before.latency_offset += overall
    # the teacher
    teacher.latency_offset += offsets.mean.float()
    teacher.latency_variance += offsets.variance.float()
    # budgets, guards and static
    agent.controller.network.encoding.mean += overall
    calibration = agent.calibration
    for guard in (calibration.guard, calibration.guard_if_free, calibration.guard_of_teacher):
        for row in guard:
            row["budget_ms"] *= math.exp(overall)
    times = offsets.mean.exp().numpy()
    calibration.scale_static(times, np.ones_like(times))
    # the latency model of the tracker
    latency = calibration.latency
    bias = latency["bias"] + offsets.mean.numpy()
    variance = latency["spread"] ** 2
    variance = np.maximum(variance + offsets.variance.numpy(), NARROWEST**2 * variance)
    latency |= {"bias": bias.astype("f4"), "spread": np.sqrt(variance).astype("f4")}
    distil_again(agent, before, x)
    return agent


def copy_controller(agent: DeployedController) -> DeployedController:
    """Return a deep copy of a controller, in eval mode."""
    # together, so that what they share stays shared
    controller, teacher, calibration = copy.deepcopy(
        (agent.controller, agent.teacher, agent.calibration)
    )
    return DeployedController(controller, teacher, calibration).eval()


# when heads are distilled again
STEPS = 200
"""Steps of AdamW in each of two parts."""
CONTEXTS = 256
"""Requests in each step."""
LR = 1e-3
"""Largest learning rate."""
MIN_CHANGE = 1e-3
"""If no configuration's expected utility changes by more than this, the heads stay as they are."""


def distil_again(agent: DeployedController, before: Teacher, x: Tensor) -> None:
    """Re-distil the policy from its updated teacher; nothing happens if that equals `before`.

    1. As in training they imitate the teacher: cross-entropy to its softmax(sharpness·utility).
    2. They maximise the utility that it expects, with an entropy bonus: the KL divergence from the
       heads to the same softmax.

    Adding the change to the old heads' logits would be worse: logits say little about how much
    worse the configurations are that the heads would not choose. The networks of the folds stay.

    Args:
        agent: the controller, which is changed.
        before: the teacher before the change.
        x: normalised features [n, width] of requests.
    """
    controller = agent.controller
    teacher = agent.teacher
    generator = torch.Generator().manual_seed(0)
    encoding = controller.network.encoding
    low, high = (float(encoding.mean + z * encoding.scale) for z in (-2, 2))
    # the teacher is asked once, about requests that may repeat with other limits
    requests = x[torch.randint(len(x), (8 * CONTEXTS,), generator=generator)]
    share = torch.rand(len(requests), 1, generator=generator)
    limits = torch.exp(low + (high - low) * share)
    shape = (len(requests), 1)
    offsets = drawn_drift(controller.configurations, controller.config.drift, shape, generator)
    utility = teacher.expected_utility(requests, limits, offsets)
    change = utility - before.expected_utility(requests, limits, offsets)
    if change.std(-1).max() < MIN_CHANGE:
        return
    target = (controller.config.sharpness * utility.squeeze(1)).log_softmax(-1)
    heads = controller.alone().requires_grad_(True)
    parameters = list(heads.network.parameters())
    for imitates in (True, False):
        # each part has a schedule of its own
        optimiser = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
        for _ in range(STEPS):
            rows = torch.randint(len(requests), (CONTEXTS,), generator=generator)
            offset = None if offsets is None else offsets[rows, 0]
            log_probs = heads(requests[rows], limits[rows, 0], None, offset)
            if imitates:
                loss = cross_entropy(log_probs, target[rows].exp())
            else:
                loss = kl_div(target[rows], log_probs, reduction="batchmean", log_target=True)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    # the deployed network is the last of those side by side
    networks = controller.network.parameters()
    for all_networks, distilled in zip(networks, parameters, strict=True):
        all_networks.data[-1:] = distilled.data

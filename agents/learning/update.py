"""Update a deployed controller from its log, in two steps:

1. Offsets of ln ms for every configuration, from the times of all requests, as far as the tracker
   did not follow them.
2. Offsets of the accuracies' logits for every configuration, from the labelled requests.

Each step is compared with the best before it on held-out requests. The log is cut into folds, and a
fold judges a controller that learned from the others (cross-fitting, Chernozhukov et al. 2018,
"Double/debiased machine learning", section 3), so every labelled request counts. The controller
that may take over learned from the whole log. A step takes over if its gain is above 0 with the
stated confidence. The next step builds on it even if it did not take over, since a small gain may
show only together with others. An update makes two comparisons, so a useless update takes over with
at most twice the chance of a single comparison.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from knobwise.agents.judging.baselines import FittedStatic
from knobwise.agents.learning.adaptation import (
    LEAST_CELLS,
    Offsets,
    Scales,
    adapted,
    copied,
    fit_offsets,
    prior_covariance,
    teach_again,
)
from knobwise.agents.learning.logged import Logged
from knobwise.agents.learning.off_policy import Judgement, decisions, judge
from knobwise.agents.predictors.outcomes import Prediction
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.teacher import NARROWEST
from knobwise.common.errors import InputError

FOLDS = 4
"""Parts of the log; each is judged by a controller that learned from the others."""
_GRID = itertools.product((0.05, 0.3, 1.0), (0.05, 0.3, 1.0))
ACCURACY_SCALES = [Scales(*scales, 0.0) for scales in _GRID]
"""Prior standard deviations that offsets of logits are averaged over."""
FREE_LOGIT = 1.0
"""Prior standard deviation of the offset of logits that all configurations share."""
SPREADS = NARROWEST, 3.0
"""Bounds of the factor by which an update may scale the predicted spreads."""


class Update(NamedTuple):
    """The result of an update."""

    agent: DeployedController
    """The controller after the last step that took over; if none did, after the last step."""
    better: bool
    """True if a step took over, so that the controller is to serve."""
    steps: dict[str, Judgement]
    """Comparisons of each step with the best before it, in order."""
    factors: list[float]
    """The first step's factors on the expected latency of each configuration."""
    logits: list[float]
    """The second step's offsets of the logit of each expected accuracy."""


def update(agent: DeployedController, logged: Logged) -> Update:
    """Let a controller learn from a log, and judge it.

    Args:
        agent: a controller for deadlines with a teacher; it is not changed.
        logged: requests that this controller or earlier versions of it served.

    Raises:
        InputError: too few requests.
    """
    n = len(logged)
    if n < LEAST_CELLS * FOLDS:
        raise InputError(f"update: {n} requests are too few; let the controller serve more")
    after, offsets, logits = learn(agent, logged)
    test, expected, choices = _judged(agent, logged, after)
    # each step against the best before it
    best = choices[""]
    serving = None
    steps = {}
    for name, controller in after.items():
        steps[name] = judge(test, expected, best, choices[name])
        if steps[name].better:
            best = choices[name]
            serving = controller
    return Update(
        serving or controller,
        better=serving is not None,
        steps=steps,
        factors=offsets.mean.exp().tolist(),
        logits=logits.tolist(),
    )


def learn(
    agent: DeployedController, logged: Logged
) -> tuple[dict[str, DeployedController], Offsets, Tensor]:
    """Let a controller learn from a log.

    Returns:
        The controller after each step that the log allows, by the step's name in order; the offsets
        of ln ms; and those of the accuracies' logits, float64 [C].
    """
    offsets = _latency_offsets(agent, logged)
    candidate = adapted(agent, offsets, _features(agent, logged))
    after = {"latencies": candidate}
    logits = torch.zeros(len(agent.configurations), dtype=torch.float64)
    lessons = logged[logged.seen & logged.labelled]
    if len(lessons):
        logits = _accuracy_offsets(candidate, lessons)
        after["accuracies"] = _with_logits(candidate, logits, lessons)
    return after, offsets, logits


def _judged(
    agent: DeployedController, logged: Logged, steps: Collection[str]
) -> tuple[Logged, Tensor, dict[str, Tensor]]:
    """Let the controller learn without each fold in turn, and decide the fold's labelled requests.

    Returns:
        The labelled requests; the utility of every configuration that a model expects that has not
        seen them, float [n, C]; and the choices int64 [n] of the old controller, under "", and of
        the controllers after each step.
    """
    parts = []
    expected = []
    choices: dict[str, list[Tensor]] = {name: [] for name in ("", *steps)}
    fold_of = torch.arange(len(logged)) % FOLDS
    for fold in range(FOLDS):
        test = logged[(fold_of == fold) & logged.labelled]
        after, _, _ = learn(agent, logged[fold_of != fold])
        parts.append(test)
        # a step that this fold's log does not allow leaves the controller as it was
        last = agent
        for name in choices:
            last = after.get(name, last)
            choices[name].append(decisions(last.decider, test))
        expected.append(_expected_utility(last, test))
    joined = {name: torch.cat(of_folds) for name, of_folds in choices.items()}
    return Logged.cat(parts), torch.cat(expected), joined


# -- the steps -------------------------------------------------------------------------------------


def _features(agent: DeployedController, logged: Logged) -> Tensor:
    """Return the normalised features of logged requests, [n, width]."""
    return agent.controller.normaliser(logged.features.to_dict(), len(logged))


def _predictions(agent: DeployedController, logged: Logged) -> Prediction:
    """Return the outcomes that a controller's teacher expects of every configuration."""
    assert agent.teacher is not None
    return agent.teacher.moments(_features(agent, logged))


@torch.no_grad()
def _expected_utility(agent: DeployedController, logged: Logged) -> Tensor:
    """Return the expected utility of every configuration for logged requests, float [n, C]."""
    accuracy, log_latency, spread = _predictions(agent, logged)
    wide = spread * logged.scale.float().unsqueeze(1)
    moved = Prediction(accuracy, log_latency + logged.offset, wide)
    return moved.score(logged.limit_ms.float())


@torch.no_grad()
def _latency_offsets(agent: DeployedController, logged: Logged) -> Offsets:
    """Estimate offsets of ln ms that neither the controller nor the tracker allowed for.

    The variance is what the predicted spreads lack, or negative if they are too wide. It follows
    from the median of the residuals, on which a stall has little influence.
    """
    lessons = _predictions(agent, logged)
    seen = logged.seen
    cell = torch.arange(len(logged)), logged.choice
    # where the features were not seen, the prediction is the logged one
    predicted = lessons.log_latency[cell].double().where(seen, logged.log_latency)
    residual = logged.answer_ms.log() - predicted - logged.offset[cell]
    offsets = fit_offsets(agent.configurations, logged.choice, residual)
    # residuals in predicted standard deviations
    factor = torch.ones(())
    if seen.any():
        spread = lessons.spread[cell] * logged.scale.float()
        z = (residual - offsets.mean[logged.choice]) / spread
        factor = 1.4826 * z[seen].abs().median()
    missing = factor.clamp(*SPREADS).square() - 1
    return offsets._replace(variance=missing * lessons.spread.square().mean(0).double())


@torch.no_grad()
def _accuracy_offsets(agent: DeployedController, logged: Logged) -> Tensor:
    """Estimate offsets δ of the accuracies' logits, float64 [C], from labelled requests.

    They are additive over the knobs and shrunk like those of latencies: the mean over several prior
    scales, weighted by the evidence of each.
    """
    expected = _predictions(agent, logged).accuracy[torch.arange(len(logged)), logged.choice]
    predicted = expected.double().clamp(0.01, 0.99).logit()
    label = logged.accuracy.float().double()
    modes = []
    evidence = []
    for scales in ACCURACY_SCALES:
        prior = prior_covariance(agent.configurations, scales, FREE_LOGIT)
        mode, log_evidence = _laplace(prior, predicted, logged.choice, label)
        modes.append(mode)
        evidence.append(log_evidence)
    return torch.stack(evidence).softmax(0) @ torch.stack(modes)


def _laplace(
    prior: Tensor, predicted: Tensor, choice: Tensor, label: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the most probable offsets of logits, by Newton steps, and their log-evidence.

    This is Laplace's approximation (Rasmussen and Williams 2006, "Gaussian Processes for Machine
    Learning", algorithm 3.1).

    Args:
        prior: covariance of the offsets, float64 [C, C].
        predicted: predicted logits [n].
        choice: int64 [n], the configurations.
        label: measured accuracies [n].

    Returns:
        The offsets, float64 [C], and ln of the evidence, up to a constant.
    """
    mode = torch.zeros(len(prior), dtype=torch.float64)
    for _ in range(12):
        # slope and curvature of the log-likelihood
        p = (predicted + mode[choice]).sigmoid()
        slope = torch.zeros_like(mode).index_add_(0, choice, label - p)
        curvature = torch.zeros_like(mode).index_add_(0, choice, p * (1 - p))
        # the algorithm's B, b and a
        root = curvature.sqrt()
        identity = torch.eye(len(prior), dtype=prior.dtype)
        factor = torch.linalg.cholesky(identity + root.outer(root) * prior)
        target = curvature * mode + slope
        solved = torch.cholesky_solve((root * (prior @ target)).unsqueeze(1), factor).squeeze(1)
        weight = target - root * solved
        mode = prior @ weight
    loss = binary_cross_entropy_with_logits(predicted + mode[choice], label, reduction="sum")
    return mode, -loss - 0.5 * weight @ mode - factor.diagonal().log().sum()


def _with_logits(agent: DeployedController, logits: Tensor, logged: Logged) -> DeployedController:
    """Return a copy of a controller that allows for offsets of the accuracies' logits.

    Its teacher adds the offsets, its heads are taught again, and static's accuracies change by the
    mean effect on logged requests.
    """
    agent = copied(agent)
    assert agent.teacher is not None
    x = _features(agent, logged)
    before = copy.deepcopy(agent.teacher)
    agent.teacher.accuracy_logits += logits.float()
    effect = agent.teacher.moments(x).accuracy.mean(0) / before.moments(x).accuracy.mean(0)
    if agent.settled.static:
        static = FittedStatic.restored(agent.settled.static)
        scaled = static.scaled(np.ones(len(logits)), effect.double().numpy())
        agent.settled.static = scaled.arrays()
    teach_again(agent, before, x)
    return agent

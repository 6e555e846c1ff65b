"""Update a deployed controller from its log, in two steps:

1. Offsets of ln ms for every configuration, from the times of all requests, as far as the tracker
   did not follow them.
2. Offsets of the accuracies' logits for every configuration, from the labelled requests.

Each step is compared with the best before it on held-out requests. The log is cut into folds, and a
fold judges a controller that learned from the others (cross-fitting, Chernozhukov et al. 2018,
"Double/debiased machine learning", section 3), so every labelled request counts. The controller
that may take over learned from the whole log. A step takes over if its gain is above 0 with the
stated confidence. The next step builds on it even if it did not take over, since a small gain may
show only together with others. An update makes up to three comparisons, two steps and a trial, so a
useless update takes over with at most three times the chance of a single comparison.

With little exploration, these comparisons take many requests. A candidate on trial instead decides
a share of the requests itself, so that its choices are likely to be drawn. It was fitted before
these requests, which can therefore judge it without folds. If the candidates on trial were better
than the controller that served, the latest takes over.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from knobwise.agents.learning.off_policy import LEAST_DIFFERENT, Judgement, decisions, judge
from knobwise.agents.learning.settings import UpdateConfig
from knobwise.agents.predictors.outcomes import Prediction
from knobwise.agents.serving.request_log import Array, Logged
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.teacher import NARROWEST
from knobwise.common.errors import InputError

Agent = DeployedController
ACCURACY_SCALES = [
    Scales(*scales, 0.0) for scales in itertools.product((0.05, 0.3, 1.0), (0.05, 0.3, 1.0))
]
"""Prior standard deviations that offsets of logits are averaged over."""
FREE_LOGIT = 1.0
"""Prior standard deviation of the offset of logits that all configurations share."""
SPREADS = NARROWEST, 3.0
"""Bounds of the factor by which an update may scale the predicted spreads."""


class Update(NamedTuple):
    """The result of an update."""

    agent: Any
    """The controller to serve: after the last step that took over, or else the old controller."""
    candidate: Any
    """The controller after the last step, which may go on trial."""
    better: bool
    """True if `agent` is a new controller."""
    promising: bool
    """True if the candidate is worth a trial: it is expected to gain, and no trial has shown that
    it loses."""
    steps: dict[str, Judgement]
    """Comparisons of each step with the best before it, in order; the last one, `trial`, compares
    the candidates on trial with the controller that served."""
    factors: list[float]
    """The first step's factors on the expected latency of each configuration."""
    logits: list[float]
    """The second step's offsets of the logit of each expected accuracy."""


class Contexts(NamedTuple):
    """Logged requests as tensors; see `Logged` for what is not explained here."""

    x: Tensor
    """Normalised features [n, width]."""
    limit: Tensor
    offset: Tensor
    scale: Tensor
    choice: Tensor

    @classmethod
    def of_log(cls, agent: Agent, logged: Logged) -> Contexts:
        """Return the requests of a log, with features as a controller reads them."""
        blocks = {name: torch.from_numpy(block) for name, block in logged.features.items()}
        return cls(
            x=agent.controller.features(blocks, len(logged.ids)),
            limit=_single(logged.limit_ms),
            offset=_single(logged.offset),
            scale=_single(logged.scale),
            choice=torch.from_numpy(logged.choice),
        )


def _single(values: Array) -> Tensor:
    """Return an array as a tensor, in single precision if it is float64."""
    tensor = torch.from_numpy(values)
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class Learned(NamedTuple):
    """The controllers after each step, and what the steps learned."""

    after: dict[str, Any]
    """The controller after each step, by the step's name, in order."""
    offsets: Offsets
    """Offsets of ln ms."""
    logits: Tensor
    """Offsets of the accuracies' logits, float64 [C]."""

    @property
    def last(self) -> Any:
        """The controller after the last step."""
        return self.after[next(reversed(self.after))]


def update(agent: Any, logged: Logged, config: UpdateConfig | None = None) -> Update:
    """Let a controller learn from a log, and judge it.

    Args:
        agent: a controller for deadlines with a teacher; it is not changed.
        logged: requests that this controller or earlier versions of it served.
        config: the settings; None for the defaults.

    Raises:
        InputError: the controller has no teacher or is not for deadlines; too few requests.
    """
    config = config or UpdateConfig()
    if agent.teacher is None or agent.sense != "deadline":
        raise InputError(
            "update: needs a controller for deadlines with a teacher, from policy=auto or utility"
        )
    if len(logged.ids) < LEAST_CELLS * config.folds:
        raise InputError(
            f"update: {len(logged.ids)} requests are too few; let the controller serve more"
        )
    learned = learn(agent, logged)
    test, expected, choices = _judged(agent, logged, config, list(learned.after))

    def compare(old: Array, new: Array) -> Judgement:
        return judge(test, expected, old, new, config.clip, config.confidence)

    # each step against the best before it
    best = choices[""]
    last = choices[next(reversed(learned.after))]
    serving = agent
    steps = {}
    for name, after in learned.after.items():
        steps[name] = compare(best, choices[name])
        if steps[name].better:
            best = choices[name]
            serving = after
    # the gain that is expected of the last step
    rows = np.arange(len(best))
    gain = expected[rows, last] - expected[rows, best]
    promising = int((best != last).sum()) >= LEAST_DIFFERENT and float(gain.mean()) > 0
    # candidates on trial against what served; the promise holds while the upper bound is above 0
    if (tried := test.tried >= 0).any():
        on_trial = test.take(tried)
        verdict = judge(
            on_trial, expected[tried], on_trial.best, on_trial.tried, config.clip, config.confidence
        )
        steps["trial"] = verdict
        if verdict.better:
            serving = learned.last
        promising &= 2 * verdict.doubly_robust["difference"].value > verdict.bound
    return Update(
        serving,
        learned.last,
        better=serving is not agent,
        promising=promising and serving is not learned.last,
        steps=steps,
        factors=learned.offsets.mean.exp().tolist(),
        logits=learned.logits.tolist(),
    )


def learn(agent: Any, logged: Logged) -> Learned:
    """Let a controller learn from a log, and return it after each step that the log allows."""
    offsets = _latency_offsets(agent, logged)
    candidate = adapted(agent, offsets, Contexts.of_log(agent, logged).x)
    after = {"latencies": candidate}
    logits = torch.zeros(len(agent.configurations), dtype=torch.float64)
    lessons = logged.take(logged.seen & ~np.isnan(logged.accuracy))
    if len(lessons.ids):
        logits = _accuracy_offsets(candidate, lessons)
        after["accuracies"] = _with_logits(candidate, logits, lessons)
    return Learned(after, offsets, logits)


def _judged(
    agent: Agent, logged: Logged, config: UpdateConfig, steps: Sequence[str]
) -> tuple[Logged, Tensor, dict[str, Array]]:
    """Let the controller learn without each fold in turn, and decide the fold's labelled requests.

    Returns:
        The labelled requests; the utility of every configuration that a model expects that has not
        seen them, float [n, C]; and the choices int64 [n] of the old controller, under "", and of
        the controllers after each step.
    """
    parts = []
    expected = []
    choices: dict[str, list[Array]] = {name: [] for name in ("", *steps)}
    fold_of = np.arange(len(logged.ids)) % config.folds
    for fold in range(config.folds):
        test = logged.take((fold_of == fold) & ~np.isnan(logged.accuracy))
        learned = learn(agent, logged.take(fold_of != fold))
        expected.append(_expected_utility(learned.last, test))
        parts.append(test)
        # a step that this fold's log does not allow leaves the controller as it was
        last = agent
        for name in choices:
            last = learned.after.get(name, last)
            choices[name].append(decisions(last.decider, test))
    joined = {name: np.concatenate(of_folds) for name, of_folds in choices.items()}
    return Logged.joined(parts), torch.cat(expected), joined


# -- the steps -------------------------------------------------------------------------------------


def _predictions(agent: Agent, x: Tensor) -> Prediction:
    """Return the outcomes that a controller's teacher expects of every configuration."""
    assert agent.teacher is not None
    return agent.teacher.moments(x)


@torch.no_grad()
def _expected_utility(agent: Agent, logged: Logged) -> Tensor:
    """Return the expected utility of every configuration for logged requests, float [n, C]."""
    contexts = Contexts.of_log(agent, logged)
    accuracy, log_latency, spread = _predictions(agent, contexts.x)
    late = log_latency + contexts.offset - contexts.limit.log().unsqueeze(1)
    return accuracy * torch.special.ndtr(-late / (spread * contexts.scale.unsqueeze(1)))


@torch.no_grad()
def _latency_offsets(agent: Agent, logged: Logged) -> Offsets:
    """Estimate offsets of ln ms that neither the controller nor the tracker allowed for.

    The variance is what the predicted spreads lack, or negative if they are too wide. It follows
    from the median of the residuals, on which a stall has little influence.
    """
    contexts = Contexts.of_log(agent, logged)
    lessons = _predictions(agent, contexts.x)
    cell = torch.arange(len(contexts.x)), contexts.choice
    seen = torch.from_numpy(logged.seen)
    # where the features were not seen, the prediction is the logged one
    predicted = lessons.log_latency[cell].double()
    predicted = predicted.where(seen, torch.from_numpy(logged.log_latency))
    residual = torch.from_numpy(np.log(logged.answer_ms)) - predicted - contexts.offset[cell]
    offsets = fit_offsets(agent.configurations, contexts.choice, residual)
    # residuals in predicted standard deviations
    z = (residual - offsets.mean[contexts.choice]) / (lessons.spread[cell] * contexts.scale)
    if seen.any():
        factor = 1.4826 * z[seen].abs().median()
    else:
        factor = torch.ones(())
    missing = factor.clamp(*SPREADS).square() - 1
    return offsets._replace(variance=missing * lessons.spread.square().mean(0).double())


@torch.no_grad()
def _accuracy_offsets(agent: Agent, logged: Logged) -> Tensor:
    """Estimate offsets δ of the accuracies' logits, float64 [C], from labelled requests.

    They are additive over the knobs and shrunk like those of latencies, and averaged over prior
    scales by their evidence.
    """
    contexts = Contexts.of_log(agent, logged)
    choice = contexts.choice
    expected = _predictions(agent, contexts.x).accuracy[torch.arange(len(choice)), choice]
    predicted = expected.double().clamp(0.01, 0.99).logit()
    label = torch.from_numpy(logged.accuracy).float().double()
    modes = []
    evidence = []
    for scales in ACCURACY_SCALES:
        prior = prior_covariance(agent.configurations, scales, FREE_LOGIT)
        mode, log_evidence = _laplace(prior, predicted, choice, label)
        modes.append(mode)
        evidence.append(log_evidence)
    return torch.tensor(evidence, dtype=torch.float64).softmax(0) @ torch.stack(modes)


def _laplace(
    prior: Tensor, predicted: Tensor, choice: Tensor, label: Tensor
) -> tuple[Tensor, float]:
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
        p = (predicted + mode[choice]).sigmoid()
        slope = torch.zeros_like(mode).index_add_(0, choice, label - p)
        curvature = torch.zeros_like(mode).index_add_(0, choice, p * (1 - p))
        root = curvature.sqrt()
        identity = torch.eye(len(prior), dtype=prior.dtype)
        factor = torch.linalg.cholesky(identity + root.outer(root) * prior)
        target = curvature * mode + slope
        solved = torch.cholesky_solve((root * (prior @ target)).unsqueeze(1), factor).squeeze(1)
        weight = target - root * solved
        mode = prior @ weight
    logits = predicted + mode[choice]
    log_likelihood = -binary_cross_entropy_with_logits(logits, label, reduction="sum")
    return mode, float(log_likelihood - 0.5 * weight @ mode - factor.diagonal().log().sum())


def _with_logits(agent: Agent, logits: Tensor, logged: Logged) -> Agent:
    """Return a copy of a controller that allows for offsets of the accuracies' logits.

    Its teacher adds the offsets, its heads are taught again, and static's accuracies change by the
    mean effect on logged requests.
    """
    agent = copied(agent)
    assert agent.teacher is not None
    x = Contexts.of_log(agent, logged).x
    before = copy.deepcopy(agent.teacher)
    agent.teacher.accuracy_logits += logits.float()
    effect = agent.teacher.moments(x).accuracy.mean(0) / before.moments(x).accuracy.mean(0)
    if agent.settled.static:
        static = FittedStatic.restored(agent.settled.static)
        scaled = static.scaled(np.ones(len(logits)), effect.double().numpy())
        agent.settled.static = scaled.arrays()
    teach_again(agent, before, x)
    return agent

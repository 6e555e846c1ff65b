"""A deployed controller learns from its log, in two steps, each judged beside the best so far on
held-out requests:

1. Offsets of ln ms by configuration, from the times of all requests, as far as the tracker did not
   follow them.
2. Offsets of the accuracies' logits by configuration, from the labelled requests.

The log is cut into folds. Each is judged by a controller that learned from the others
(cross-fitting, Chernozhukov et al. 2018, "Double/debiased machine learning", section 3), so that
every labelled request counts; the controller that may take over learned from all. A step takes over
where its gain is above 0 with the stated confidence. A step that does not stays in those after it:
a small gain may show only together with others. An update makes up to three such comparisons, two
steps and a trial, so a useless one takes over with at most three times the chance of a single
comparison.

With little exploration that takes many requests. A candidate on trial decides a share of the
requests instead, so that what it chooses has a large chance. Candidates were fitted before the
requests that they decided, which therefore judge them without folds; where they were better than
the controller that served, the latest takes over.
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
    Scales(*each, 0.0) for each in itertools.product((0.05, 0.3, 1.0), (0.05, 0.3, 1.0))
]
"""Prior standard deviations that offsets of logits are averaged over."""
FREE_LOGIT = 1.0
"""That of the offset that all configurations share."""
SPREADS = NARROWEST, 3.0
"""Bounds of the factor on predicted spreads in an update."""


class Update(NamedTuple):
    """What came of an update."""

    agent: Any
    """The controller to serve: the last step that took over, or else the old one."""
    candidate: Any
    """The one that may go on trial: after the last step."""
    better: bool
    """Whether `agent` is a new one."""
    promising: bool
    """Whether the candidate is worth a trial: it is expected to gain, and no trial has shown that
    it loses."""
    steps: dict[str, Judgement]
    """Each step beside the best before it, in their order; last the candidates on trial, beside
    what served."""
    factors: list[float]
    """What the first step multiplies the expected latency of each configuration by."""
    logits: list[float]
    """What the second step adds to the logit of each expected accuracy."""


class Contexts(NamedTuple):
    """Logged requests as tensors: normalised features x [n, width], and the rest as in `Logged`."""

    x: Tensor
    limit: Tensor
    offset: Tensor
    scale: Tensor
    choice: Tensor

    @classmethod
    def of_log(cls, agent: Agent, logged: Logged) -> Contexts:
        blocks = {name: torch.from_numpy(block) for name, block in logged.features.items()}
        parts = map(torch.from_numpy, (logged.limit_ms, logged.offset, logged.scale, logged.choice))
        x = agent.controller.features(blocks, len(logged.ids))
        return cls(x, *(part.float() if part.dtype == torch.float64 else part for part in parts))


class Learned(NamedTuple):
    """A controller after each step, by name in their order, and what they learned."""

    after: dict[str, Any]
    offsets: Offsets
    logits: Tensor

    @property
    def last(self) -> Any:
        """The controller after the last step."""
        return self.after[next(reversed(self.after))]


def update(agent: Any, logged: Logged, config: UpdateConfig | None = None) -> Update:
    """Let a controller learn from a log, and judge it.

    Args:
        agent: for deadlines, with a teacher. It is not changed.
        logged: requests of this controller or of versions before it.

    Raises:
        InputError: a controller that predicts no outcomes, too few requests.
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

    best = choices[""]
    last = choices[next(reversed(learned.after))]
    serving = agent
    steps = {}
    for name, after in learned.after.items():
        steps[name] = compare(best, choices[name])
        if steps[name].better:
            best = choices[name]
            serving = after
    rows = np.arange(len(best))
    gain = expected[rows, last] - expected[rows, best]
    promising = int((best != last).sum()) >= LEAST_DIFFERENT and float(gain.mean()) > 0
    if (tried := test.tried >= 0).any():
        on_trial = test.take(tried)
        verdict = judge(
            on_trial, expected[tried], on_trial.best, on_trial.tried, config.clip, config.confidence
        )
        steps["trial"] = verdict
        if verdict.better:
            serving = learned.last
        promising &= (
            2 * verdict.doubly_robust["difference"].value > verdict.bound
        )  # the upper bound is above 0
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
    """A controller after each step that the log allows."""
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
    """The labelled requests; the utility that a model that has not seen them expects, float [n, C];
    and for the controller ("") and after each step the choices of one that has not, int64 [n]."""
    parts = []
    expected = []
    choices: dict[str, list[Array]] = {name: [] for name in ("", *steps)}
    fold = np.arange(len(logged.ids)) % config.folds
    for number in range(config.folds):
        test = logged.take((fold == number) & ~np.isnan(logged.accuracy))
        learned = learn(agent, logged.take(fold != number))
        expected.append(_expected_utility(learned.last, test))
        parts.append(test)
        last = agent
        for name in choices:
            last = learned.after.get(name, last)
            choices[name].append(decisions(last.decider, test))
    return (
        Logged.joined(parts),
        torch.cat(expected),
        {name: np.concatenate(each) for name, each in choices.items()},
    )


# -- the steps -------------------------------------------------------------------------------------


def _predictions(agent: Agent, x: Tensor) -> Prediction:
    """What a controller's teacher expects of every configuration."""
    assert agent.teacher is not None
    return agent.teacher.moments(x)


@torch.no_grad()
def _expected_utility(agent: Agent, logged: Logged) -> Tensor:
    """Of every configuration for logged requests, float [n, C]."""
    contexts = Contexts.of_log(agent, logged)
    accuracy, log_latency, spread, _ = _predictions(agent, contexts.x)
    late = log_latency + contexts.offset - contexts.limit.log().unsqueeze(1)
    return accuracy * torch.special.ndtr(-late / (spread * contexts.scale.unsqueeze(1)))


@torch.no_grad()
def _latency_offsets(agent: Agent, logged: Logged) -> Offsets:
    """Offsets of ln ms that neither the controller nor the tracker allowed for. The variance is
    what the spreads miss or have too much of, by the median of the residuals, in which a stall
    counts little."""
    contexts = Contexts.of_log(agent, logged)
    lessons = _predictions(agent, contexts.x)
    rows = torch.arange(len(contexts.x))
    place = rows, contexts.choice
    seen = torch.from_numpy(logged.seen)
    predicted = (
        lessons.log_latency[place].double().where(seen, torch.from_numpy(logged.log_latency))
    )
    residual = torch.from_numpy(np.log(logged.answer_ms)) - predicted - contexts.offset[place]
    offsets = fit_offsets(agent.configurations, contexts.choice, residual)
    z = (residual - offsets.mean[contexts.choice]) / (lessons.spread[place] * contexts.scale)
    if seen.any():
        factor = 1.4826 * z[seen].abs().median()
    else:
        factor = torch.ones(())
    spare = factor.clamp(*SPREADS).square() - 1
    return offsets._replace(variance=spare * lessons.spread.square().mean(0).double())


@torch.no_grad()
def _accuracy_offsets(agent: Agent, logged: Logged) -> Tensor:
    """Offsets δ of the accuracies' logits, float64 [C]: additive over the knobs and shrunk as those
    of latencies, the mode of the posterior by Newton steps, averaged over prior scales by Laplace's
    approximation of their evidence (Rasmussen and Williams 2006, "Gaussian Processes for Machine
    Learning", algorithm 3.1)."""
    contexts = Contexts.of_log(agent, logged)
    place = torch.arange(len(contexts.x)), contexts.choice
    predicted = _predictions(agent, contexts.x).accuracy[place].double().clamp(0.01, 0.99).logit()
    label = torch.from_numpy(logged.accuracy).float().double()
    choice = contexts.choice
    configurations = agent.configurations
    count = len(configurations)

    def fit(scales: Scales) -> tuple[Tensor, float]:
        prior = prior_covariance(configurations, scales, FREE_LOGIT)
        mode = torch.zeros(count, dtype=torch.float64)
        for _ in range(12):
            p = (predicted + mode[choice]).sigmoid()
            slope = torch.zeros_like(mode).index_add_(0, choice, label - p)
            curvature = torch.zeros_like(mode).index_add_(0, choice, p * (1 - p))
            root = curvature.sqrt()
            factor = torch.linalg.cholesky(
                torch.eye(count, dtype=prior.dtype) + root.outer(root) * prior
            )
            target = curvature * mode + slope
            solved = torch.cholesky_solve((root * (prior @ target)).unsqueeze(1), factor).squeeze(1)
            weight = target - root * solved
            mode = prior @ weight
        logits = predicted + mode[choice]
        fits = -binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return mode, float(fits - 0.5 * weight @ mode - factor.diagonal().log().sum())

    modes, evidence = zip(*map(fit, ACCURACY_SCALES), strict=True)
    return torch.tensor(evidence, dtype=torch.float64).softmax(0) @ torch.stack(modes)


def _with_logits(agent: Agent, logits: Tensor, logged: Logged) -> Agent:
    """Return a copy whose teacher's accuracies have these offsets of their logits, whose heads were
    taught again, and whose static has their mean effect on logged requests."""
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

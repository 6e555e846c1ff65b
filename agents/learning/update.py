"""Update a deployed controller from its log, in two steps:

1. Offsets of ln ms for every configuration, from the times of all requests, as far as the tracker
   did not follow them. They are judged by times alone: each answer counts as accurate as the
   profile expects, so no label can talk this step into harm, and none is needed.
2. Offsets of the accuracies' logits for every configuration, from the labelled requests.

Each step is compared with the best before it on held-out requests. The log is cut into folds, and a
fold judges a controller that learned from the others (cross-fitting, Chernozhukov et al. 2018,
"Double/debiased machine learning", section 3). The controller that may take over learned from the
whole log. A step takes over if its gain is above 0 with the stated confidence, and there are no
objections to the log, see `knobwise.agents.learning.acceptance`. The next step builds on it even if
it did not take over, since a small gain may show only together with others. An update makes two
comparisons, so a useless update takes over with at most twice the chance of a single comparison.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.learning.acceptance import (
    FEW,
    MAX_LOSS,
    ConfigurationLabels,
    labels_by_configuration,
    objections_to_labels,
    objections_to_times,
)
from knobwise.agents.learning.adaptation import (
    MIN_CELLS,
    MIN_NOISE,
    Offsets,
    Scales,
    adapt_latency,
    copy_controller,
    distil_again,
    fit_offsets,
    posterior,
)
from knobwise.agents.learning.faults import objections_to_faults
from knobwise.agents.learning.logged import Logged, of_choices
from knobwise.agents.learning.off_policy import Estimate, decisions, estimate_gain
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.agents.teacher.teacher import NARROWEST
from knobwise.common.errors import InputError

LATENCIES = "latencies"
ACCURACIES = "accuracies"
FOLDS = 4
"""Parts of the log; each is judged by a controller that learned from the others."""
ACCURACY_SCALES = Scales(0.5, 0.3)
"""Prior standard deviations of offsets of logits."""
ROUNDS = 12
"""Rounds of scoring."""
WAITED = 5
"""Rounds in which times of answers that nobody waited for are replaced by what is expected."""
MIN_PRECISION = 0.05
"""Lower bound of the precision of a label, where accuracies are close to 0 or 1."""
SPREADS = NARROWEST, 3.0
"""Bounds of the factor by which an update may scale the predicted spreads."""


class Update(NamedTuple):
    """The result of an update."""

    agent: DeployedController
    """The controller after the last step that took over; if none did, after the last step."""
    better: bool
    """True if a step took over, so that the controller is to serve."""
    steps: dict[str, Estimate]
    """Comparisons of each step with the best before it, in order."""
    objections: dict[str, list[str]]
    """What speaks against each step that is better."""
    loss: float
    """The utility lost by the updates since a person last accepted one, if labels are wrong and the
    profile is right."""


class Candidate(NamedTuple):
    """The controller after a step, on n requests that it did not learn from."""

    agent: DeployedController
    """The controller that learned from the whole log."""
    outcomes: Logged
    """The requests, with the accuracies that count for this step."""
    choices: Tensor
    """int64 [n]: the choices of controllers that learned without each request."""
    expected: Tensor
    """float [n, C]: the utility of every configuration that these expect."""

    def judged(self, old: Tensor, first: int = 0) -> Estimate:
        """Compare with the old choices int64 [n], on the labelled requests from `first` on."""
        rows = self.outcomes.labelled
        rows[:first] = False
        return estimate_gain(
            self.outcomes[rows], self.expected[rows], old[rows], self.choices[rows]
        )


def update(
    agent: DeployedController,
    logged: Logged,
    accept: bool = False,
    loss: float = 0.0,
    attempts: Mapping[str, Counter[bool]] | None = None,
) -> Update:
    """Let a controller learn from a log, latencies first and then accuracies, and judge each step.

    A better step takes over unless something speaks against it; the next is compared with it.

    Args:
        agent: a controller for deadlines with a teacher; it is not changed.
        logged: requests that this controller or earlier versions of it served, in order.
        accept: let a better step take over even if something speaks against it.
        loss: `Update.loss` of the update before.
        attempts: how often each setting gave no answer, of `ReadLog`; None if that is not known.

    Raises:
        InputError: too few requests.
    """
    n = len(logged)
    if n < MIN_CELLS * FOLDS:
        raise InputError(f"update: {n} requests are too few; let the controller serve more")
    best, candidates = _held_out(agent, logged)
    names = configurations_of(agent.decider)
    by_times = candidates[LATENCIES]
    steps: dict[str, Estimate] = {}
    objections: dict[str, list[str]] = {}
    against: list[str] = []
    serving = None
    for name, candidate in candidates.items():
        # is it better than the best so far?
        steps[name] = candidate.judged(best)
        if not steps[name].better:
            continue
        # objections to a step that did not take over hold for the next too
        total = loss
        if name == LATENCIES:
            ratios = _ratios(agent, logged)
            against = objections_to_times(names, agent.configurations, logged.choice, ratios)
            if candidate.judged(best, n // 2).gain <= 0:
                against.append("the later half of the requests shows no gain")
        else:
            total = max(0.0, loss + _loss(by_times.agent, logged, best, candidate.choices))
            rows = logged.labelled
            by_profile = by_times.outcomes.accuracy[rows]
            against = against + objections_to_labels(names, logged[rows], by_profile, total)
        # nothing is learned from requests without an answer, so they are in no estimate of a gain
        by_faults = objections_to_faults(names, attempts or {}, best, candidate.choices)
        objections[name] = against + by_faults
        if objections[name] and not accept:
            continue
        # it takes over
        best = candidate.choices
        serving = candidate.agent
        loss = 0.0 if total > MAX_LOSS else total
        against = []
    return Update(serving or candidate.agent, serving is not None, steps, objections, loss)


@torch.no_grad()
def labels_beside_profile(agent: DeployedController, logged: Logged) -> list[ConfigurationLabels]:
    """Return what the labels of each configuration say, beside what the controller expects."""
    expected = of_choices(_predictions(agent, logged).accuracy, logged.choice).double()
    rows = logged.labelled
    return labels_by_configuration(configurations_of(agent.decider), logged[rows], expected[rows])


@torch.no_grad()
def _loss(agent: DeployedController, logged: Logged, old: Tensor, new: Tensor) -> float:
    """Return the utility lost by new choices [n] instead of old ones, at the accuracies of the
    profile."""
    profile = copy_controller(agent)
    # without what labels have taught it
    profile.teacher.accuracy_logits.zero_()
    utility = _expected_utility(profile, logged)
    return float((of_choices(utility, old) - of_choices(utility, new)).double().mean())


def learn(agent: DeployedController, logged: Logged) -> dict[str, DeployedController]:
    """Let a controller learn from a log; return it after each step that the log allows."""
    after = {
        LATENCIES: adapt_latency(agent, _latency_offsets(agent, logged), _features(agent, logged))
    }
    labelled = logged[logged.seen & logged.labelled]
    if len(labelled) >= FEW:
        after[ACCURACIES] = _with_accuracies(after[LATENCIES], labelled)
    return after


def _held_out(agent: DeployedController, logged: Logged) -> tuple[Tensor, dict[str, Candidate]]:
    """Let the controller learn from everything, and without each fold in turn to decide the fold's
    requests.

    Returns:
        The choices of the old controller, int64 [n], and the candidate of each step.
    """
    n = len(logged)
    old = torch.zeros_like(logged.choice)
    # times alone judge the first step: each answer counts as accurate as the profile expects
    by_profile = logged.clone()
    accuracy = of_choices(_predictions(agent, logged).accuracy, logged.choice)
    by_profile.accuracy = accuracy.double()
    judged_by = {LATENCIES: by_profile, ACCURACIES: _with_abandoned(logged)}
    candidates = {}
    for name, controller in learn(agent, logged).items():
        expected = torch.zeros(n, len(agent.configurations))
        candidates[name] = Candidate(controller, judged_by[name], torch.zeros_like(old), expected)
    fold_of = torch.arange(n) % FOLDS
    for fold in range(FOLDS):
        rows = fold_of == fold
        test = logged[rows]
        in_fold = learn(agent, logged[~rows])
        old[rows] = decisions(agent.decider, test)
        # a step that this fold's log does not allow leaves the controller as it was
        last = agent
        for name, candidate in candidates.items():
            last = in_fold.get(name, last)
            candidate.choices[rows] = decisions(last.decider, test)
            candidate.expected[rows] = _expected_utility(last, test)
    return old, candidates


def _with_abandoned(logged: Logged) -> Logged:
    """Return requests with a label of 0 for as large a share of those that nobody waited for as
    have one of the others: a late answer is worth nothing, whatever it says, and without them only
    what settings answered on time would be compared."""
    logged = logged.clone()
    rows = logged.abandoned.nonzero().squeeze(1)
    answered = ~logged.abandoned
    share = float(logged.labelled[answered].double().mean()) if answered.any() else 0.0
    # spread evenly over the log
    places = torch.arange(len(rows) + 1, dtype=torch.float64) * share
    counted = places[1:].floor() > places[:-1].floor()
    logged.accuracy[rows[counted]] = 0.0
    return logged


# -- the steps -------------------------------------------------------------------------------------


def _features(agent: DeployedController, logged: Logged) -> Tensor:
    """Normalise the logged features as the controller was trained with them, [n, width]."""
    return agent.controller.normaliser(logged.features.to_dict(), len(logged))


def _predictions(agent: DeployedController, logged: Logged) -> Prediction:
    """Return the outcomes that a controller's teacher expects of every configuration."""
    return agent.teacher.moments(_features(agent, logged))


@torch.no_grad()
def _expected_utility(agent: DeployedController, logged: Logged) -> Tensor:
    """Return the expected utility of every configuration for logged requests, float [n, C]."""
    accuracy, log_latency, spread = _predictions(agent, logged)
    wide = spread * logged.scale.float().unsqueeze(1)
    moved = Prediction(accuracy, log_latency + logged.offset, wide)
    return moved.score(logged.limit_ms.float())


@torch.no_grad()
def _ratios(agent: DeployedController, logged: Logged) -> Tensor:
    """Return ln(time of the answer / time that the controller and the tracker expect), float64
    [n]; the least that it can be where nobody waited for the answer."""
    predicted = of_choices(_predictions(agent, logged).log_latency, logged.choice).double()
    static = agent.decider.static
    if static is not None:
        # what decided without features; earlier versions expected other times, which were logged
        by_static = torch.from_numpy(static.log_latency)[logged.choice]
        predicted = predicted.where(logged.seen, by_static)
    return logged.answer_ms.log() - predicted - of_choices(logged.offset, logged.choice)


@torch.no_grad()
def _latency_offsets(agent: DeployedController, logged: Logged) -> Offsets:
    """Estimate offsets of ln ms that neither the controller nor the tracker allowed for.

    The variance is what the predicted spreads lack, or negative if they are too wide. It follows
    from the median of the residuals, on which a stall has little influence.
    """
    least = ratios = _ratios(agent, logged)
    offsets = fit_offsets(agent.configurations, logged.choice, ratios)
    spreads = _predictions(agent, logged).spread
    if logged.abandoned.any():
        for _ in range(WAITED):
            ratios = _waited_for(least, logged, offsets.mean[logged.choice], ratios)
            offsets = fit_offsets(agent.configurations, logged.choice, ratios)
    # residuals in predicted standard deviations
    factor = torch.ones(())
    if logged.seen.any():
        spread = of_choices(spreads, logged.choice) * logged.scale.float()
        z = (ratios - offsets.mean[logged.choice]) / spread
        factor = 1.4826 * z[logged.seen].abs().median()
    narrowest, widest = SPREADS
    missing = factor.clamp(narrowest, widest).square() - 1
    return offsets._replace(variance=missing * spreads.square().mean(0).double())


def _waited_for(least: Tensor, logged: Logged, mean: Tensor, ratios: Tensor) -> Tensor:
    """Return ln(time / expected time) [n], where nobody waited for an answer as it is expected to
    have been: E[r | r > least] of a normal r (Tobin 1958, "Estimation of Relationships for Limited
    Dependent Variables", Econometrica 26). Repeated, with offsets that are fitted anew, this is
    expectation maximisation.

    Args:
        least: what the ratios are at least, [n].
        mean: offsets of the choices, as fitted last, [n].
        ratios: as they were last, [n], for the spread around the offsets.
    """
    spread = float((ratios - mean).square().mean().sqrt().clamp_min(MIN_NOISE))
    z = (least - mean) / spread
    hazard = (-z.square() / 2 - math.log(2 * math.pi) / 2 - torch.special.log_ndtr(-z)).exp()
    return torch.where(logged.abandoned, mean + spread * hazard, least)


@torch.no_grad()
def _accuracy_offsets(agent: DeployedController, logged: Logged) -> Tensor:
    """Estimate offsets δ of the accuracies' logits, float64 [C], from labelled requests.

    They are additive over the knobs and shrunk like those of latencies. This is the most probable δ
    for Bernoulli labels, by Fisher scoring: each round is a normal fit to δ + (label − p)/w, with
    the mean w of p(1 − p) as its precision.
    """
    expected = of_choices(_predictions(agent, logged).accuracy, logged.choice)
    predicted = expected.double().clamp(0.01, 0.99).logit()
    offsets = torch.zeros(len(agent.configurations), dtype=torch.float64)
    for _ in range(ROUNDS):
        before = offsets[logged.choice]
        p = (predicted + before).sigmoid()
        precision = (p * (1 - p)).mean().clamp_min(MIN_PRECISION)
        working = before + (logged.accuracy - p) / precision
        scales = ACCURACY_SCALES._replace(noise=float(precision) ** -0.5)
        offsets = posterior(agent.configurations, logged.choice, working, scales).mean
    return offsets


def _with_accuracies(agent: DeployedController, logged: Logged) -> DeployedController:
    """Return a copy of a controller that allows for offsets of the accuracies' logits.

    Its teacher adds the offsets, its heads are distilled again, and static's accuracies change by
    the mean effect on logged requests.
    """
    logits = _accuracy_offsets(agent, logged)
    agent = copy_controller(agent)
    x = _features(agent, logged)
    before = copy.deepcopy(agent.teacher)
    agent.teacher.accuracy_logits += logits.float()
    effect = agent.teacher.moments(x).accuracy.mean(0) / before.moments(x).accuracy.mean(0)
    agent.calibration.scale_static(np.ones(len(logits)), effect.double().numpy())
    distil_again(agent, before, x)
    return agent

"""Compare two controllers by the log of a third: a doubly robust off-policy estimate.

Both controllers decide anew for every logged request, under its budget and drift. Some choices
could not have been drawn when the log was written, so the log holds no evidence about them. There
the new controller is judged as if it chose what the old one chooses. So it gains nothing by a
choice that no request can confirm.

Importance weights are heavy-tailed. If a log happens to contain none of the rare draws, its sample
variance is too small. So an interval is never narrower than the logged probabilities imply. Let ρ
be the error of the model, reward − expectation. A correction w·ρ that is drawn with probability p
has the second moment p·w²·E ρ². E ρ² is shrunk towards 1/4, the largest variance that a reward
between 0 and 1 can have. Only requests that the controllers decide differently count: where both
decide alike, the log is dense and the model is good, which says little about the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.learning.logged import Logged, of_choices
from knobwise.common.paired import lower_bound

MIN_DIFFERENT = 10
"""Fewest requests with different decisions, as far as the log can tell, that can show a gain."""
RESIDUAL_SQUARE = 0.25
"""The value that E ρ² is shrunk towards."""
COUNTS = 10
"""The number of requests that `RESIDUAL_SQUARE` counts for."""
CLIP = 200.0
"""The largest importance weight."""
CONFIDENCE = 0.95
"""Confidence of the lower bound of a gain."""


class Estimate(NamedTuple):
    """A comparison of a new and an old controller on labelled requests that neither was fitted
    on."""

    requests: int
    """n, the number of requests."""
    different: int
    """Requests that the two decide differently, as far as the log can tell them apart."""
    gain: float
    """The mean utility of the new controller less that of the old one."""
    bound: float
    """The one-sided lower bound of the gain."""
    better: bool
    """True if the bound is above 0 and enough requests differ."""


def doubly_robust(
    expected: Tensor, chosen: Tensor, reward: Tensor, probability: Tensor, clip: float
) -> Tensor:
    """Estimate the reward of every alternative c from the outcome of a single one, a.

    The estimate is q̂(c) + 1[c = a]·min(1/p, clip)·(r − q̂(a)): Dudík, Langford and Li 2011,
    "Doubly Robust Policy Evaluation and Learning", equation 2. The mean over contexts of
    Σ_c π(c)·estimate is the value of a policy π. It is unbiased if either q̂ or the probabilities
    are right, no weight is clipped, and all that π chooses could have been drawn.

    Args:
        expected: q̂, what a model that has not seen the outcomes expects, [n, C].
        chosen: a, int64 [n].
        reward: r, [n].
        probability: p > 0, of a under the policy that drew it, [n].
        clip: the largest weight.

    Returns:
        [n, C].
    """
    column = chosen.unsqueeze(1)
    weight = (1 / probability).clamp_max(clip).unsqueeze(1)
    # what the model got wrong about the chosen one, [n, 1]
    error = reward.unsqueeze(1) - expected.gather(1, column)
    return expected.scatter_add(1, column, weight * error)


def decisions(controller: NumpyController, logged: Logged) -> Tensor:
    """Return a controller's choices for logged requests, under their budgets and drift: int64
    [n]."""
    chosen = torch.empty_like(logged.choice)
    blocks = logged.features.numpy()
    limits = zip(logged.guard_ms.tolist(), logged.limit_ms.tolist(), strict=True)
    for row, (whole, limit) in enumerate(limits):
        features = {name: block[row] for name, block in blocks.items()}
        drift = logged.offset[row].numpy(), float(logged.scale[row])
        # as in serving, the guard is asked before features take their time
        chosen[row] = controller.settled(whole, drift).decide_index(features, limit, drift)
    return chosen


def estimate_gain(logged: Logged, expected: Tensor, old: Tensor, new: Tensor) -> Estimate:
    """Compare the choices of two controllers on n labelled requests of a log.

    Args:
        logged: the requests.
        expected: float [n, C], the utility of every configuration as expected by a model that has
            not seen these outcomes.
        old: int64 [n], the choices of the old controller.
        new: int64 [n], the choices of the new controller.
    """
    # without evidence the new controller is taken to choose as the old one
    chance_of_old = of_choices(logged.propensity, old)
    chance_of_new = of_choices(logged.propensity, new)
    new = new.where(torch.minimum(chance_of_old, chance_of_new) > 0, old)
    differs = old != new
    by_old, by_new = (_evidence(logged, c, differs, expected.double()) for c in (old, new))
    robust, model, _ = by_new - by_old
    gain = float(robust.mean())
    # the variance of the sample, or that of the model with the second moments of the corrections
    noise = (by_old[2] + by_new[2]).mean()
    variance = torch.maximum(robust.var(), model.var() + noise)
    bound = lower_bound(gain, float(variance / len(old)) ** 0.5, CONFIDENCE)
    different = int(differs.sum())
    better = different >= MIN_DIFFERENT and bound > 0
    return Estimate(len(old), different, gain, bound, better)


def _evidence(logged: Logged, choices: Tensor, differs: Tensor, expected: Tensor) -> Tensor:
    """Return the evidence of n logged requests about a policy, float64 [3, n].

    Its rows are the doubly robust values, the values of the model alone, and the second moments of
    the corrections, robust − model. The last are 0 where nothing differs, since corrections of
    equal choices cancel.

    Args:
        logged: n requests.
        choices: [n], the policy's choices.
        differs: bool [n], True where the two compared policies differ.
        expected: [n, C], the utilities that a model expects.
    """
    reward = logged.accuracy * logged.met
    estimate = doubly_robust(expected, logged.choice, reward, logged.probability, CLIP)
    model = of_choices(expected, choices)
    # E ρ², shrunk, over the requests that drew this choice
    drawn = differs & (choices == logged.choice)
    square = (reward - model)[drawn].square().sum() + COUNTS * RESIDUAL_SQUARE
    square /= drawn.sum() + COUNTS
    # p·w², where p is the probability that the logging policy draws this choice
    chance = of_choices(logged.propensity, choices)
    moment = chance * (1 / chance).clamp_max(CLIP).square()
    return torch.stack([of_choices(estimate, choices), model, differs * moment * square])

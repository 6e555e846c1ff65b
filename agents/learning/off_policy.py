"""Compare two controllers by the log of a third: a doubly robust off-policy estimate.

Both controllers decide anew for every logged request, under its budget and drift. Some choices
could not have been drawn when the log was written, so the log holds no evidence about them. There
the new controller is judged as if it chose what the old one chooses. So it gains nothing by a
choice that no request can confirm.

Importance weights are heavy-tailed. If a log happens to contain none of the rare draws, its sample
variance is too small. So an interval is never narrower than the logged probabilities imply. Let ρ
be the error of the model, reward − expectation. A correction w·ρ that is drawn with probability p
has the second moment p·w²·E ρ². E ρ² is shrunk towards 1/4, the largest variance that a reward
between 0 and 1 can have. Where both controllers decide alike, the log is dense and the model is
good. That says little about the other requests, which have an E ρ² of their own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.agents.judging.paired import lower_bound
from knobwise.agents.learning.logged import Logged, of_choices
from knobwise.agents.policy.controller import NumpyController
from knobwise.losses.functional import doubly_robust

LEAST_DIFFERENT = 10
"""Fewest requests with different decisions, as far as the log can tell, that can show a gain."""
RESIDUAL_SQUARE = 0.25
"""The value that E ρ² is shrunk towards."""
COUNTS = 10
"""The number of requests that `RESIDUAL_SQUARE` counts for."""
CLIP = 200.0
"""The largest importance weight."""
CONFIDENCE = 0.95
"""Confidence of the lower bound of a gain."""


class Judgement(NamedTuple):
    """A comparison of a new and an old controller on labelled requests that neither was fitted on.

    Estimates are a mean utility and the ends of its 95 % interval.
    """

    requests: int
    """n, the number of requests."""
    different: int
    """Requests that the two decide differently, as far as the log can tell them apart."""
    unsupported: int
    """Requests where the new controller's different choice has no evidence in the log."""
    doubly_robust: dict[str, tuple[float, float, float]]
    """Estimates for `old`, for `new`, and for their paired `difference`, new − old."""
    clipped: int
    """Requests whose importance weight was clipped."""
    bound: float
    """The one-sided lower bound of the difference."""
    better: bool
    """True if the bound is above 0 and enough requests differ."""

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON, with None for numbers that are not finite."""
        estimates = {
            name: [*map(_finite, estimate)] for name, estimate in self.doubly_robust.items()
        }
        return self._asdict() | {"doubly_robust": estimates, "bound": _finite(self.bound)}


def decisions(controller: NumpyController, logged: Logged) -> Tensor:
    """Return a controller's choices for logged requests, under their budgets and drift: int64
    [n]."""
    chosen = torch.empty_like(logged.choice)
    blocks = logged.features.numpy()
    for row, limit in enumerate(logged.limit_ms.tolist()):
        features = {name: block[row] for name, block in blocks.items()}
        drift = logged.offset[row].numpy(), float(logged.scale[row])
        chosen[row] = controller.decide_index(features, limit, drift)
    return chosen


def judge(logged: Logged, expected: Tensor, old: Tensor, new: Tensor) -> Judgement:
    """Compare the choices of two controllers on n labelled requests of a log.

    Args:
        logged: the requests.
        expected: float [n, C], the utility of every configuration as expected by a model that has
            not seen these outcomes.
        old: int64 [n], the choices of the old controller.
        new: int64 [n], the choices of the new controller.
    """
    # without evidence the new controller is taken to choose as the old one
    chances = of_choices(logged.propensity, old), of_choices(logged.propensity, new)
    supported = torch.minimum(*chances) > 0
    unsupported = int(((old != new) & ~supported).sum())
    new = new.where(supported, old)
    differs = old != new
    different = int(differs.sum())
    # the evidence about each controller, [3, n], and about their difference
    model = expected.double()
    evidence = {
        "old": _evidence(logged, old, differs, model),
        "new": _evidence(logged, new, differs, model),
    }
    difference = evidence["new"] - evidence["old"]
    # where both choose alike nothing is corrected; elsewhere the second moments add up
    difference[2] = differs * (evidence["new"][2] + evidence["old"][2])
    evidence["difference"] = difference
    estimates = {}
    for name, values in evidence.items():
        mean = float(values[0].mean())
        error = _standard_error(*values)
        estimates[name] = mean, mean - 1.96 * error, mean + 1.96 * error
    # mean and error are now those of the difference, the last of the three
    bound = lower_bound(mean, error, CONFIDENCE)
    return Judgement(
        requests=len(old),
        different=different,
        unsupported=unsupported,
        doubly_robust=estimates,
        clipped=int((logged.probability * CLIP < 1).sum()),
        bound=bound,
        better=different >= LEAST_DIFFERENT and bound > 0,
    )


def _evidence(logged: Logged, choices: Tensor, differs: Tensor, expected: Tensor) -> Tensor:
    """Return the evidence of n logged requests about a policy, float64 [3, n].

    Its rows are the doubly robust values, the values of the model alone, and the second moments of
    the corrections, robust − model.

    Args:
        logged: n requests.
        choices: [n], the policy's choices.
        differs: bool [n], True where the two compared policies differ.
        expected: [n, C], the utilities that a model expects.
    """
    reward = logged.accuracy * logged.met
    estimate = doubly_robust(expected, logged.choice, reward, logged.probability, CLIP)
    robust = of_choices(estimate, choices)
    model = of_choices(expected, choices)
    # E ρ², shrunk, over the requests that drew this choice: first where the two policies agree,
    # then where they differ
    drawn = choices == logged.choice
    groups = torch.stack([drawn & ~differs, drawn & differs]).double()
    squares = groups @ (reward - model).square() + COUNTS * RESIDUAL_SQUARE
    squares /= groups.sum(1) + COUNTS
    # p·w², where p is the probability that the logging policy draws this choice
    chance = of_choices(logged.propensity, choices)
    moment = chance * (1 / chance.clamp_min(1e-12)).clamp_max(CLIP).square()
    return torch.stack([robust, model, moment * squares[differs.long()]])


def _standard_error(values: Tensor, model: Tensor, noise: Tensor) -> float:
    """Return the standard error of the mean of values [n].

    The variance is the larger of two: that of the sample, or that of the model's values plus the
    mean second moment of the corrections.
    """
    if len(values) < 2:
        return math.nan
    variance = torch.maximum(values.var(), model.var() + noise.mean())
    return float(variance / len(values)) ** 0.5


def _finite(value: float) -> float | None:
    """Return the value, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None

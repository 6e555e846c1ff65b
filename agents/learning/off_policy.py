"""Compare two controllers by the log of a third: off-policy estimates.

Both controllers decide anew for every logged request, under its budget and drift. Some choices
could not have been drawn when the log was written, so the log holds no evidence about them. There
the new controller is judged as if it chose what the old one chooses: it never takes over for
something that no request can show.

Importance weights are heavy-tailed. If a log happens to contain none of the rare draws, its sample
variance is too small. So an interval is never narrower than the logged probabilities imply: a
correction w·ρ that is drawn with probability p has the second moment p·w²·E ρ², and E ρ² is shrunk
towards that of a reward known to be 0 to 1. Where both controllers decide alike, the log is dense
and the model is good. That says little about the other requests, which have an E ρ² of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.judging.paired import lower_bound
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving.request_log import Logged
from knobwise.losses.functional import doubly_robust, effective_sample_size, self_normalised

LEAST_DIFFERENT = 10
"""Fewest requests with different decisions, as far as the log can tell, that can show a gain."""
RESIDUAL_SQUARE = 0.25
"""The value that E ρ² is shrunk towards."""
COUNTS = 10
"""The number of requests that `RESIDUAL_SQUARE` counts for."""


class Estimate(NamedTuple):
    """A mean utility, or a difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Tensor, model: Tensor, noise: Tensor, around: float = 0.0) -> Estimate:
        """Return the estimate of `around` plus the mean of n independent values.

        Args:
            values: [n], each a model's value plus a correction.
            model: [n], the model's values alone.
            noise: [n], the second moments of the corrections.
            around: a constant to add.
        """
        value = around + _mean(values)
        error = _standard_error(values, model, noise)
        return cls(value, value - 1.96 * error, value + 1.96 * error)


class Judgement(NamedTuple):
    """A comparison of a new and an old controller on labelled requests that neither was fitted on.

    Estimates are given for `old`, for `new`, and for their paired `difference`, new − old.
    """

    requests: int
    """n, the number of requests."""
    different: int
    """Requests that the two decide differently, as far as the log can tell them apart."""
    unsupported: int
    """Requests where the new controller's different choice has no evidence in the log."""
    doubly_robust: dict[str, Estimate]
    """Estimates by the model, corrected by importance weights."""
    direct: dict[str, Estimate]
    """Estimates by the model alone; the intervals do not cover errors of the model."""
    self_normalised: dict[str, Estimate]
    """Estimates by importance weights alone."""
    effective_requests: dict[str, float]
    """Effective number of requests under the importance weights, (Σw)²/Σw²."""
    clip: float
    """The largest importance weight."""
    clipped: int
    """Requests whose weight was clipped."""
    confidence: float
    """Confidence of the bound."""
    bound: float
    """The one-sided lower bound of the doubly robust difference."""
    better: bool
    """True if the bound is above 0 and enough requests differ."""

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON, with None for numbers that are not finite."""
        plain = self._asdict()
        for name in ("doubly_robust", "direct", "self_normalised"):
            estimates = plain[name].items()
            plain[name] = {key: list(map(_finite, estimate)) for key, estimate in estimates}
        return plain | {"bound": _finite(self.bound)}


def decisions(controller: NumpyController, logged: Logged) -> NDArray[np.int64]:
    """Return a controller's choices for logged requests, under their budgets and drift: int64
    [n]."""
    chosen = np.empty(len(logged.ids), np.int64)
    for row, limit in enumerate(logged.limit_ms.tolist()):
        features = {name: block[row] for name, block in logged.features.items()}
        chosen[row] = controller.decide_index(
            features, limit, (logged.offset[row], float(logged.scale[row]))
        )
    return chosen


def judge(
    logged: Logged,
    expected: Tensor,
    old: NDArray[np.int64],
    new: NDArray[np.int64],
    clip: float = 200.0,
    confidence: float = 0.95,
) -> Judgement:
    """Compare the choices of two controllers on n labelled requests of a log.

    Args:
        logged: the requests.
        expected: float [n, C], the utility of every configuration as expected by a model that has
            not seen these outcomes.
        old: int64 [n], the choices of the old controller.
        new: int64 [n], the choices of the new controller.
        clip: the largest importance weight.
        confidence: confidence of the lower bound.
    """
    # without evidence the new controller is taken to choose as the old one
    rows = np.arange(len(old))
    supported = (logged.propensity[rows, old] > 0) & (logged.propensity[rows, new] > 0)
    unsupported = int(((old != new) & ~supported).sum())
    new = np.where(supported, new, old)
    differs = torch.from_numpy(old != new)
    expected = expected.double()
    before = _Side.of_choices(logged, old, differs, expected, clip)
    after = _Side.of_choices(logged, new, differs, expected, clip)
    difference = before.difference_to(after, differs)
    sides = {"old": before, "new": after, "difference": difference}
    zero = torch.zeros(len(old), dtype=torch.float64)
    robust = {}
    direct = {}
    normalised = {}
    for name, side in sides.items():
        robust[name] = Estimate.of_mean(side.robust, side.model, side.noise)
        direct[name] = Estimate.of_mean(side.model, side.model, zero)
        normalised[name] = Estimate.of_mean(side.influence, zero, side.ratio_noise, side.ratio)
    # the one-sided bound of the gain
    error = _standard_error(difference.robust, difference.model, difference.noise)
    bound = lower_bound(_mean(difference.robust), error, confidence)
    return Judgement(
        requests=len(old),
        different=int(differs.sum()),
        unsupported=unsupported,
        doubly_robust=robust,
        direct=direct,
        self_normalised=normalised,
        effective_requests={"old": before.effective, "new": after.effective},
        clip=clip,
        clipped=int((logged.probability * clip < 1).sum()),
        confidence=confidence,
        bound=bound,
        better=int(differs.sum()) >= LEAST_DIFFERENT and bound > 0,
    )


class _Side(NamedTuple):
    """The evidence of n logged requests about one policy, or about the difference of two."""

    robust: Tensor
    """Doubly robust values [n]."""
    model: Tensor
    """The model's values [n]."""
    noise: Tensor
    """Second moments [n] of the corrections, robust − model."""
    ratio: float
    """The mean by importance weights alone."""
    influence: Tensor
    """The influence [n] of each request on `ratio`."""
    ratio_noise: Tensor
    """Second moments [n] of the influences."""
    effective: float
    """Effective number of requests; NaN for a difference."""

    @classmethod
    def of_choices(
        cls,
        logged: Logged,
        choices: NDArray[np.int64],
        differs: Tensor,
        expected: Tensor,
        clip: float,
    ) -> _Side:
        """Return the evidence about a policy.

        Args:
            logged: n requests.
            choices: [n], the policy's choices.
            differs: bool [n], True where the two compared policies differ.
            expected: [n, C], the utilities that a model expects.
            clip: the largest importance weight.
        """
        chosen = torch.from_numpy(logged.choice)
        probability = torch.from_numpy(logged.probability)
        reward = torch.from_numpy(logged.accuracy * logged.met)
        choice = torch.from_numpy(choices).unsqueeze(1)
        chance = torch.from_numpy(logged.propensity).gather(1, choice).squeeze(1)
        drawn = choice.squeeze(1) == chosen
        weight = (1 / probability).clamp_max(clip) * drawn
        value, influence = self_normalised(reward, weight)
        model = expected.gather(1, choice).squeeze(1)
        robust = doubly_robust(expected, chosen, reward, probability, clip)
        # p·w², where p is the probability that the logging policy draws this choice
        moment = chance * (1 / chance.clamp_min(1e-12)).clamp_max(clip).square()
        effective = 0.0
        if drawn.any():
            effective = len(choices) * float(effective_sample_size(weight.log()))
        return cls(
            robust=robust.gather(1, choice).squeeze(1),
            model=model,
            noise=moment * _mean_squares(reward - model, drawn, differs),
            ratio=float(value),
            influence=influence,
            ratio_noise=moment * _mean_squares(reward - value, drawn, differs),
            effective=effective,
        )

    def difference_to(self, other: _Side, differs: Tensor) -> _Side:
        """Return the evidence about another policy minus this one, which differ where bool [n]."""
        return _Side(
            robust=other.robust - self.robust,
            model=other.model - self.model,
            noise=differs * (other.noise + self.noise),
            ratio=other.ratio - self.ratio,
            influence=other.influence - self.influence,
            ratio_noise=differs * (other.ratio_noise + self.ratio_noise),
            effective=float("nan"),
        )


def _mean_squares(residual: Tensor, drawn: Tensor, differs: Tensor) -> Tensor:
    """Return the shrunk E ρ² of each of n requests.

    It is the mean over the requests whose choice was drawn, separately for those where the two
    policies differ and for the others.
    """
    groups = torch.stack([drawn & ~differs, drawn & differs]).double()
    squares = (groups @ residual.square() + COUNTS * RESIDUAL_SQUARE) / (groups.sum(1) + COUNTS)
    return squares[differs.long()]


def _mean(values: Tensor) -> float:
    return float(values.mean())


def _standard_error(values: Tensor, model: Tensor, noise: Tensor) -> float:
    """Return the standard error of the mean of values [n].

    It is the larger of two: from the sample, or from the variance of the model and the moments of
    the corrections.
    """
    n = len(values)
    if n < 2:
        return float("nan")
    return float(torch.maximum(values.var(), model.var() + noise.mean()) / n) ** 0.5


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None

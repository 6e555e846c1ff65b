"""Whether one controller is better than another, judged by the log of a third: off-policy
estimates.

Both decide anew for every logged request, under its budget and drift. Where the log holds no
evidence about a choice, because it could not have been drawn, the new controller is judged as if it
chose what the old one chooses: what no request can show is never a reason to take over.

The weights are heavy, and a log in which no rare draw happened to occur looks as if there were
none. So an interval is never narrower than what the logged probabilities make of squared residuals:
a correction w·ρ that is drawn with probability p has the second moment p·w²·E ρ², and E ρ² is
shrunk towards that of a reward known to be 0 to 1. Where both decide alike, the log is dense and
the model knows it well. That says little about the rest, which has an E ρ² of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving.request_log import Logged
from knobwise.losses.functional import doubly_robust, effective_sample_size, self_normalised

LEAST_DIFFERENT = 10
"""With fewer requests that the two decide differently, and the log can tell apart, nothing is
shown."""


RESIDUAL_SQUARE = 0.25
COUNTS = 10
"""What E ρ² is shrunk towards, and how many requests that counts for."""


class Estimate(NamedTuple):
    """A mean utility, or a difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Tensor, model: Tensor, noise: Tensor, around: float = 0.0) -> Estimate:
        """Of the mean of independent values [n] = model + correction, plus a number; `noise` [n]
        are the second moments of the corrections."""
        value = around + _mean(values)
        error = _standard_error(values, model, noise)
        return cls(value, value - 1.96 * error, value + 1.96 * error)


class Judgement(NamedTuple):
    """A new controller beside an old one, on n labelled requests that neither was fitted on.
    Estimates by name: `old`, `new`, and `difference`, new − old, which is paired."""

    requests: int
    different: int
    """Requests that the two decide differently, as far as the log can tell them apart."""
    unsupported: int
    """Requests that the new one decides differently in a way that the log holds no evidence
    about."""
    doubly_robust: dict[str, Estimate]
    direct: dict[str, Estimate]
    """By the model alone; its intervals do not cover what is wrong with the model."""
    self_normalised: dict[str, Estimate]
    effective_requests: dict[str, float]
    """What the importance weights leave of the requests, (Σw)²/Σw²."""
    clip: float
    clipped: int
    """Requests whose weight was clipped."""
    confidence: float
    bound: float
    """The one-sided lower bound of the difference, doubly robust, at this confidence."""
    better: bool
    """Whether the bound is above 0."""

    def plain(self) -> dict[str, Any]:
        """For JSON; None for what is not a number."""
        plain = self._asdict()
        for name in ("doubly_robust", "direct", "self_normalised"):
            plain[name] = {key: list(map(_finite, each)) for key, each in plain[name].items()}
        return plain | {"bound": _finite(self.bound)}


def decisions(controller: NumpyController, logged: Logged) -> NDArray[np.int64]:
    """What a controller chooses for logged requests under their budgets and drift, int64 [n]."""
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
    """Compare the choices [n] of two controllers on n labelled requests of a log.

    `expected`, float [n, C], is the utility that a model that has not seen these outcomes expects
    of every configuration.
    """
    rows = np.arange(len(old))
    supported = (logged.propensity[rows, old] > 0) & (logged.propensity[rows, new] > 0)
    unsupported = int(((old != new) & ~supported).sum())
    new = np.where(supported, new, old)
    differs = torch.from_numpy(old != new)
    expected = expected.double()
    choices = {"old": old, "new": new}
    sides = {
        name: _Side.of_choices(logged, each, differs, expected, clip)
        for name, each in choices.items()
    }
    before = sides["old"]
    after = sides["new"]
    zero = torch.zeros(len(old), dtype=torch.float64)
    gain = after.robust - before.robust
    model = after.model - before.model
    noise = differs * (after.noise + before.noise)
    ratio_noise = differs * (after.ratio_noise + before.ratio_noise)
    influence = after.influence - before.influence
    ratio = after.ratio - before.ratio
    z = float(torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64)))
    bound = _mean(gain) - z * _standard_error(gain, model, noise)
    return Judgement(
        requests=len(old),
        different=int(differs.sum()),
        unsupported=unsupported,
        doubly_robust={
            name: Estimate.of_mean(side.robust, side.model, side.noise)
            for name, side in sides.items()
        }
        | {"difference": Estimate.of_mean(gain, model, noise)},
        direct={
            name: Estimate.of_mean(side.model, side.model, zero) for name, side in sides.items()
        }
        | {"difference": Estimate.of_mean(model, model, zero)},
        self_normalised={
            name: Estimate.of_mean(side.influence, zero, side.ratio_noise, side.ratio)
            for name, side in sides.items()
        }
        | {"difference": Estimate.of_mean(influence, zero, ratio_noise, ratio)},
        effective_requests={name: side.effective for name, side in sides.items()},
        clip=clip,
        clipped=int((logged.probability * clip < 1).sum()),
        confidence=confidence,
        bound=bound,
        better=int(differs.sum()) >= LEAST_DIFFERENT and bound > 0,
    )


class _Side(NamedTuple):
    """What the log says about one policy, for each of n requests: doubly robust, by the model, the
    second moment of the correction; and the value by weights alone, what each request moves it, and
    the second moment of that."""

    robust: Tensor
    model: Tensor
    noise: Tensor
    ratio: float
    influence: Tensor
    ratio_noise: Tensor
    effective: float

    @classmethod
    def of_choices(
        cls,
        logged: Logged,
        choices: NDArray[np.int64],
        differs: Tensor,
        expected: Tensor,
        clip: float,
    ) -> _Side:
        """From choices [n], where the two policies differ, bool [n], and utilities that a model
        expects [n, C]."""
        chosen = torch.from_numpy(logged.choice)
        probability = torch.from_numpy(logged.probability)
        reward = torch.from_numpy(logged.accuracy * logged.met)
        choice = torch.from_numpy(choices).unsqueeze(1)
        chance = torch.from_numpy(logged.propensity).gather(1, choice).squeeze(1)
        drawn = choice.squeeze(1) == chosen
        weight = (1 / probability).clamp_max(clip) * drawn
        value, influence = self_normalised(reward, weight)
        model = expected.gather(1, choice).squeeze(1)
        moment = chance * (1 / chance.clamp_min(1e-12)).clamp_max(clip).square()
        return cls(
            robust=doubly_robust(expected, chosen, reward, probability, clip)
            .gather(1, choice)
            .squeeze(1),
            model=model,
            noise=moment * _mean_squares(reward - model, drawn, differs),
            ratio=float(value),
            influence=influence,
            ratio_noise=moment * _mean_squares(reward - value, drawn, differs),
            effective=len(choices) * float(effective_sample_size(weight.log()))
            if drawn.any()
            else 0.0,
        )


def _mean_squares(residual: Tensor, drawn: Tensor, differs: Tensor) -> Tensor:
    """E ρ² for each of n requests: of those that were drawn among the ones that differ, or among
    the others; shrunk."""
    groups = torch.stack([drawn & ~differs, drawn & differs]).double()
    squares = (groups @ residual.square() + COUNTS * RESIDUAL_SQUARE) / (groups.sum(1) + COUNTS)
    return squares[differs.long()]


def _mean(values: Tensor) -> float:
    return float(values.mean())


def _standard_error(values: Tensor, model: Tensor, noise: Tensor) -> float:
    """Of the mean of [n], from the sample or from what is known of its parts, whichever is
    larger."""
    n = len(values)
    if n < 2:
        return float("nan")
    return float(torch.maximum(values.var(), model.var() + noise.mean()) / n) ** 0.5


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None

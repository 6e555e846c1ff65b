"""Whether one controller is better than another, judged by the log of a third: off-policy estimates.

Both decide anew for every logged request, under its budget and drift. Where the log holds no evidence about a choice,
because it could not have been drawn, the new controller is judged as if it chose what the old one chooses: what no
request can show is never a reason to take over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.agents.serving.request_log import Logged
from knobwise.losses.functional import doubly_robust, effective_sample_size, self_normalised

LEAST_DIFFERENT = 10
"""With fewer requests that the two decide differently, and the log can tell apart, nothing is shown."""


class Estimate(NamedTuple):
    """A mean utility, or a difference of two, with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Tensor, around: float = 0.0) -> Estimate:
        """Of the mean of independent values [n], plus a number."""
        value, error = _moments(values)
        return cls(around + value, around + value - 1.96 * error, around + value + 1.96 * error)


class Judgement(NamedTuple):
    """A new controller beside an old one, on n labelled requests that neither was fitted on. Estimates by name: `old`,
    `new`, and `difference`, new − old, which is paired."""

    requests: int
    different: int
    """Requests that the two decide differently, as far as the log can tell them apart."""
    unsupported: int
    """Requests that the new one decides differently in a way that the log holds no evidence about."""
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
        chosen[row] = controller.decide_index(features, limit, (logged.offset[row], float(logged.scale[row])))
    return chosen


def judge(
    logged: Logged,
    expected: Tensor,
    old: NDArray[np.int64],
    new: NDArray[np.int64],
    clip: float = 100.0,
    confidence: float = 0.95,
) -> Judgement:
    """Compare the choices [n] of two controllers on n labelled requests of a log.

    `expected`, float [n, C], is the utility that a model that has not seen these outcomes expects of every
    configuration.
    """
    rows = np.arange(len(old))
    supported = logged.support[rows, old] & logged.support[rows, new]
    unsupported = int(((old != new) & ~supported).sum())
    new = np.where(supported, new, old)
    chosen, probability = torch.from_numpy(logged.choice), torch.from_numpy(logged.probability)
    reward = torch.from_numpy(logged.accuracy * logged.met)
    expected = expected.double()
    rewards = doubly_robust(expected, chosen, reward, probability, clip)
    choices = {"old": torch.from_numpy(old).unsqueeze(1), "new": torch.from_numpy(new).unsqueeze(1)}
    robust = {name: rewards.gather(1, choice).squeeze(1) for name, choice in choices.items()}
    model = {name: expected.gather(1, choice).squeeze(1) for name, choice in choices.items()}
    inverse = (1 / probability).clamp_max(clip)
    weights = {name: inverse * (choice.squeeze(1) == chosen) for name, choice in choices.items()}
    normalised = {name: self_normalised(reward, weight) for name, weight in weights.items()}
    value, error = _moments(robust["new"] - robust["old"])
    different = int((old != new).sum())
    z = float(torch.special.ndtri(torch.tensor(confidence, dtype=torch.float64)))
    bound = value - z * error
    ratio = {name: Estimate.of_mean(parts[1], float(parts[0])) for name, parts in normalised.items()}
    (old_value, old_parts), (new_value, new_parts) = normalised["old"], normalised["new"]
    ratio["difference"] = Estimate.of_mean(new_parts - old_parts, float(new_value - old_value))
    return Judgement(
        requests=len(old),
        different=different,
        unsupported=unsupported,
        doubly_robust=_estimates(robust),
        direct=_estimates(model),
        self_normalised=ratio,
        effective_requests={
            name: len(old) * float(effective_sample_size(weight.log())) if weight.any() else 0.0
            for name, weight in weights.items()
        },
        clip=clip,
        clipped=int((1 / probability > clip).sum()),
        confidence=confidence,
        bound=bound,
        better=different >= LEAST_DIFFERENT and bound > 0,
    )


def _estimates(values: dict[str, Tensor]) -> dict[str, Estimate]:
    estimates = {name: Estimate.of_mean(each) for name, each in values.items()}
    return estimates | {"difference": Estimate.of_mean(values["new"] - values["old"])}


def _moments(values: Tensor) -> tuple[float, float]:
    """The mean of [n] and its standard error; NaN of none."""
    n = len(values)
    if not n:
        return float("nan"), float("nan")
    return float(values.mean()), float((values - values.mean()).square().sum() / max(n - 1, 1) / n) ** 0.5


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None

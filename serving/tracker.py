"""A tracker of how far latencies drift from what a controller predicts, from the answers alone.

An answer's residual r = ln(measured ms) − μ, with μ predicted, is modelled as h·x + κ·σ·ε: x holds
a level and an offset of each knob value, h marks those of the configuration, σ is the predicted
spread. A Kalman filter follows x (Kalman 1960, "A New Approach to Linear Filtering and Prediction
Problems"): the level is a random walk (the local level model of Harvey 1989, "Forecasting,
Structural Time Series Models and the Kalman Filter", section 2.3), and the offsets return to 0
within `VALUE_MEMORY` answers, which shrinks them. Only the variances of x are kept, as if its
elements were independent: an update is then some sums of plain numbers, which cost little even when
the caches hold a model. κ² is an exponentially weighted mean of squared residuals, each in units of
its expected spread. Three things keep this robust:

- Residuals are clipped at `CLIP` spreads (Huber 1964, "Robust Estimation of a Location Parameter";
  for the filter Masreliez and Martin 1977, "Robust Bayesian estimation for the linear model"), so
  that one stall moves little.
- The spread grows with clipped residuals, up to `SCALES`, and what is clipped with it.
- `SHIFT_AFTER` clipped residuals in a row on the same side are no stall but a shift of the level:
  its variance is raised until they stop (a run rule, as in Western Electric 1956, "Statistical
  Quality Control Handbook").
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.common.words import spelled

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import KnobValue

FORMAT = "knobwise.LatencyTracker/2"
WANDER = 0.003
"""Standard deviation of the level's step from one answer to the next, in ln ms."""
SPREAD_GAIN = 1 / 50
"""Weight of the newest square in κ²."""
CLIP = 2.0
"""Bound of a residual, in its own spreads."""
SHIFT_AFTER = 6
"""Number of clipped residuals in a row that count as a shift of the level."""
SHIFT_VARIANCE = 4.0
"""Variance added to the level at a shift, in variances of a residual."""
FIRST_SPREAD = 0.5
"""Standard deviation of the level before the first answer, in ln ms."""
VALUE_SPREAD = 0.03
"""Standard deviation of the offset of a knob value before the first answer, in ln ms."""
VALUE_MEMORY = 4000
"""Number of answers within which the offsets return to 0."""
SCALES = 0.25, 3.0
"""Bounds of κ."""
LARGEST = 1e6
"""A number beyond any mean or variance of the filter."""
MIN_SPREAD = 1e-3
"""Lower bound of a predicted spread, in ln ms."""
MAX_OFFSET = math.log(1000)
"""Bound of a residual, in ln ms."""
FORGET_EVERY = 16
"""Answers after which offsets are shrunk; each time would cost more than all the rest."""
KEPT = (1 - 1 / VALUE_MEMORY) ** FORGET_EVERY
"""The part of an offset that is left then."""
CLIPPED_SQUARE = math.erf(CLIP / math.sqrt(2)) * (1 - CLIP**2) + CLIP**2
CLIPPED_SQUARE -= 2 * CLIP * math.exp(-(CLIP**2) / 2) / math.sqrt(2 * math.pi)
"""E[min(z², CLIP²)] of a standard normal z."""

Array = NDArray[np.float64]


class LatencyTracker:
    """The drift of one controller's predictions on one machine.

    An update takes some microseconds. A tracker is not thread-safe.

    Attributes:
        drift: offset of ln ms of each configuration, float32 [C], and the factor κ on its spread,
            as the decisions of `NumpyController` take it; None before the first answer. Replaced by
            each update, never changed in place.
        answers: how many it has learned from.
        ignored: how many it has not learned from, by reason.

    Args:
        configurations: the knob values of each configuration, by name.
        digest: of the controller, to tell its states from those of others.
    """

    def __init__(self, configurations: Sequence[Mapping[str, KnobValue]], digest: str = "") -> None:
        self.digest = digest
        seen: dict[tuple[str, KnobValue], None] = {}
        for values in configurations:
            seen.update(dict.fromkeys(values.items()))
        # a knob with a single value has no offset
        names = [name for name, _ in seen]
        pairs = [(name, value) for name, value in seen if names.count(name) > 1]
        self.names = ["level", *(f"{name}={spelled(value)}" for name, value in pairs)]
        # the level and the values that make up the offset of each configuration, [C, 1 + values]
        rows = []
        for values in configurations:
            marks = [float(values[name] == value) for name, value in pairs]
            rows.append([1.0, *marks])
        self._design = np.array(rows, np.float32)
        self._shares = self._design.mean(0, np.float64).tolist()
        self._elements = [np.flatnonzero(row).tolist() for row in self._design]
        self._begin()

    def _begin(self) -> None:
        values = len(self.names) - 1
        self._mean = [0.0] * (1 + values)
        self._variance = [FIRST_SPREAD**2] + [VALUE_SPREAD**2] * values
        self._scale = 1.0
        self._run = 0
        self.answers = 0
        self.ignored: dict[str, int] = {}
        self.drift: tuple[NDArray[np.float32], float] | None = None

    @property
    def level(self) -> float:
        """The mean offset of ln ms over configurations; 0 before the first answer."""
        return sum(map(operator.mul, self._mean, self._shares))

    def _refresh(self) -> None:
        self.drift = self._design.dot(np.array(self._mean, np.float32)), self._scale

    def update(
        self, configuration: int, log_latency: float, spread: float, measured_ms: float
    ) -> None:
        """Learn from an answer.

        A time that is not positive and finite is ignored and counted.

        Args:
            configuration: its index.
            log_latency: the mean of ln ms, predicted without drift.
            spread: the standard deviation of ln ms, predicted without drift.
            measured_ms: the time that the answer took.
        """
        timed = 0 < measured_ms < math.inf
        if not (timed and -math.inf < log_latency < math.inf and 0 <= spread < math.inf):
            return self.ignore("an answer without a positive, finite time")
        # the part of ln ms that was not predicted, in the units of its spread
        residual = min(max(math.log(measured_ms) - log_latency, -MAX_OFFSET), MAX_OFFSET)
        scale = self._scale
        # a spread of 0 would let a single answer decide everything
        noise = (scale * max(spread, MIN_SPREAD)) ** 2
        z = self._follow(self._elements[configuration], residual, noise)
        # κ² follows the clipped squares of residuals, exponentially weighted
        scale *= math.sqrt(1 + SPREAD_GAIN * (z * z / CLIPPED_SQUARE - 1))
        self._scale = min(max(scale, SCALES[0]), SCALES[1])
        self._refresh()

    def _follow(self, elements: list[int], residual: float, noise: float) -> float:
        """Take one step of the filter, and return the clipped residual in its own spreads.

        Args:
            elements: of x, which belong to the configuration.
            noise: variance of the residual around these.
        """
        self.answers += 1
        if not self.answers % FORGET_EVERY:
            self._forget()
        mean = self._mean
        variance = self._variance
        variance[0] += WANDER**2
        # the residual that is left beside the level and the values, and its variance
        total = noise
        error = residual
        for i in elements:
            total += variance[i]
            error -= mean[i]
        # a run of clipped residuals on the same side is a shift of the level
        if abs(error) <= CLIP * math.sqrt(total):
            self._run = 0
        else:
            side = 1 if error > 0 else -1
            if self._run * side > 0:
                self._run = self._run + side
            else:
                self._run = side
            if abs(self._run) >= SHIFT_AFTER:
                variance[0] += SHIFT_VARIANCE * noise
                total += SHIFT_VARIANCE * noise
        # the step of a Kalman filter with independent elements
        spread = math.sqrt(total)
        z = min(max(error / spread, -CLIP), CLIP)
        for i in elements:
            mean[i] += variance[i] * z / spread
            variance[i] -= variance[i] ** 2 / total
        return z

    def _forget(self) -> None:
        """Shrink the offsets towards 0, and their variances towards the first."""
        for i in range(1, len(self._mean)):
            self._mean[i] *= KEPT
            self._variance[i] += (1 - KEPT**2) * (VALUE_SPREAD**2 - self._variance[i])

    def warm_start(self, configurations: Sequence[int], log_ratios: Sequence[float]) -> None:
        """Begin anew with n timed cells; the level begins at their median.

        Args:
            configurations: their indices.
            log_ratios: ln(time here / time in the profile); NaN is left out.
        """
        self._begin()
        # times that are missing are NaN, and stay NaN
        ratios = np.clip(log_ratios, -MAX_OFFSET, MAX_OFFSET)
        timed = ~np.isnan(ratios)
        if timed.any():
            self._mean[0] = level = float(np.median(ratios[timed]))
            spread = max(1.4826 * float(np.median(np.abs(ratios[timed] - level))), MIN_SPREAD)
            for cell in np.flatnonzero(timed).tolist():
                self._follow(self._elements[configurations[cell]], float(ratios[cell]), spread**2)
            self._refresh()

    def ignore(self, reason: str) -> None:
        """Count an answer that nothing can be learned from, and log the first for each reason."""
        self.ignored[reason] = self.ignored.get(reason, 0) + 1
        if self.ignored[reason] == 1:
            logging.getLogger(__name__).warning(
                "tracker: %s; nothing is learned from such requests, which are counted", reason
            )

    def factors(self) -> dict[str, float]:
        """Return factors on the predicted latency: latency here / latency predicted.

        `level` is the typical one. For each knob value, such as `max_crops=12`, there is the factor
        that comes on top. `spread` is κ.
        """
        values = dict(zip(self.names, np.exp(self._mean).tolist(), strict=True))
        return values | {"level": math.exp(self.level), "spread": self._scale}

    def state(self) -> dict[str, object]:
        """Return everything it has learned, in plain values that JSON keeps exactly."""
        return {
            "format": FORMAT,
            "controller": self.digest,
            "names": list(self.names),
            "mean": list(self._mean),
            "variance": list(self._variance),
            "scale": self._scale,
            "run": self._run,
            "answers": self.answers,
            "ignored": dict(self.ignored),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state saved by `state()`.

        Raises:
            InputError: a state of another controller, or none.
        """
        try:
            if [state["format"], state["controller"]] != [FORMAT, self.digest]:
                raise ValueError("the state belongs to another controller; start without it")
            # [2, 1 + values]: means and variances of level and values
            moments = np.array([state["mean"], state["variance"]], np.float64)
            valid = (np.abs(moments) < LARGEST).all() and (moments[1] >= 0).all()
            valid &= moments.shape == (2, len(self.names)) and state["names"] == self.names
            if not (valid and SCALES[0] <= state["scale"] <= SCALES[1]):
                raise ValueError("wrong names or sizes, or numbers out of range")
            counts = int(state["run"]), int(state["answers"])
            ignored = {str(reason): int(count) for reason, count in state["ignored"].items()}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(
                f"tracker: is not the state of a tracker ({type(error).__name__}: {error})"
            ) from None
        self._mean, self._variance = moments.tolist()
        self._scale = float(state["scale"])
        self._run, self.answers = counts
        self.ignored = ignored
        self.drift = None
        if self.answers:
            self._refresh()

"""The deployed network: features and a limit in, a score for every configuration out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .arrays import LEAST_MS, Array, Arrays, below, log_ms

# an array, because NumPy takes longer with a Python number
_UNIT = np.array(1.0, np.float32)


class Normaliser:
    """Imputes missing values, takes heavy tails logarithmically, standardises and clips. It adds an
    indicator for each column with missing values, and projects all of them onto fewer components
    where there is a projection: [*, d] → [*, width]."""

    def __init__(self, arrays: Arrays, clip: float) -> None:
        self.mean = arrays["mean"]
        self.scale = arrays["scale"]
        self.median = arrays["median"]
        self.heavy = np.flatnonzero(arrays["heavy"])
        self.unit = arrays["unit"][self.heavy]
        self.gappy = np.flatnonzero(arrays["has_missing"])
        self.high = np.full_like(self.mean, clip)
        self.low = -self.high
        self.projection = arrays.get("projection")

    def __call__(self, raw: Array) -> Array:
        """Normalise raw features float32 [*, d]."""
        missing = np.isnan(raw)
        x = np.where(missing, self.median, raw)
        if self.heavy.size:
            tails = x[..., self.heavy]
            x[..., self.heavy] = np.sign(tails) * np.log1p(np.abs(tails) / self.unit)
        x -= self.mean
        # here and not in the weights of the first layer, where large means would cost digits
        x /= self.scale
        np.maximum(x, self.low, out=x)
        np.minimum(x, self.high, out=x)
        if self.gappy.size:
            x = np.concatenate([x, missing[..., self.gappy]], -1, dtype=np.float32)
        if self.projection is None:
            return x
        return x @ self.projection


class Encoding:
    """The standardised logarithm z of a limit, sines and cosines of it; an even width has no z."""

    def __init__(self, arrays: Arrays, width: int) -> None:
        self.mean = arrays["mean"].item()
        self.scale = arrays["scale"].item()
        self.frequencies = arrays["frequencies"].astype(np.float64)
        self.width = width
        self._few = self.frequencies.tolist()

    def single(self, limit: float) -> tuple[float, list[float]]:
        """Return z and the encoding of one number; plain numbers are faster than short arrays."""
        z = (math.log(max(limit, LEAST_MS)) - self.mean) / self.scale
        z = min(max(z, -4.0), 4.0)
        # z itself, its sines, then its cosines
        angles = [z * frequency for frequency in self._few]
        return z, [z, *map(math.sin, angles), *map(math.cos, angles)][-self.width :]

    def many(self, limits: Array) -> tuple[Array, Array]:
        """Return z [n, 1] and the encoding [n, width] of many limits."""
        logs = log_ms(limits.astype(np.float64))
        z = ((logs - self.mean) / self.scale).clip(-4, 4)[:, None]
        angle = z * self.frequencies
        encoded = np.concatenate([z, np.sin(angle), np.cos(angle)], 1, dtype=np.float32)
        return z, encoded[:, -self.width :]


def places_of(configurations: Array) -> Array:
    """Return a matrix that marks the knob values of each configuration, float32 [values, C]."""
    sizes = configurations.max(0) + 1
    rows = configurations + sizes.cumsum() - sizes
    places = np.zeros((int(sizes.sum()), len(configurations)), np.float32)
    places[rows, np.arange(len(configurations))[:, None]] = 1
    return places


class Heads:
    """An MLP with a categorical head for each knob, or one over the configurations, and perhaps a
    head for the utility of whole configurations.

    The score of a configuration is the sum of the logits of its knob values, and of what the
    utility head adds (`knobwise.agents.controller.networks.UtilityHead`). The policy is the softmax
    of the scores of all configurations that may be chosen.

    Right after a model has run, a NumPy call costs microseconds whatever the size of its arrays,
    and the first call of each kind costs several times as much. So a decision makes few calls of
    few kinds.

    The arrays are `layers.<i>.weight` [inputs, outputs] and `.bias` [outputs], of which the heads
    are the last; `encoding.…`; and perhaps `utility.…`. Without `places` (see `places_of`) there is
    one head over the configurations.
    """

    def __init__(self, arrays: Arrays, header: Mapping[str, Any], places: Array | None) -> None:
        self.places = places
        self.encoding = Encoding(below(arrays, "encoding."), header["budget_width"])
        # SiLU(x) = x·sigmoid(x) = (x/2)·(1 + tanh(x/2)): weights of hidden layers are halved
        layers = []
        for i in range(header["layers"] + 1):
            layers.append((arrays[f"layers.{i}.weight"], arrays[f"layers.{i}.bias"].ravel()))
        *hidden, self.last = layers
        self.hidden = [(weight / 2, bias / 2) for weight, bias in hidden]
        self.logits = len(self.last[1])
        self.utility: Utility | None = None
        if "utility.weight" in arrays:
            self.utility = Utility(below(arrays, "utility."), header["sharpness"])
            self.last = self.utility.joined(*self.last)

    def scores(self, x: Array, limits: Array, by_value: Array) -> Array:
        """Return scores [n, C] for normalised features [n, width], limits [n] and a drift [V]."""
        z, encoded = self.encoding.many(limits)
        drift = np.broadcast_to(by_value, (len(x), len(by_value)))
        return self._scores([x, encoded, drift], z)

    def single(self, x: Array, limit: float, by_value: Array) -> int:
        """Return the best configuration for normalised features [width] of one request, under a
        limit in ms and a drift of knob values [V]."""
        z, encoded = self.encoding.single(limit)
        return int(self._scores([x, encoded, by_value], [z]).argmax())

    def _scores(self, inputs: list[Any], z: Any) -> Array:
        """Return scores [*, C] for the parts of the first layer's input and z, [*, …] each."""
        out = np.concatenate(inputs, -1, dtype=np.float32)
        for weight, bias in self.hidden:
            half = out.dot(weight)
            half += bias
            out = np.tanh(half)
            out += _UNIT
            out *= half
        if self.utility is not None:
            out = np.concatenate([out, z], -1, dtype=np.float32)
        weight, bias = self.last
        out = out.dot(weight)
        out += bias
        scores = out[..., : self.logits]
        if self.places is not None:
            scores = scores.dot(self.places)
        if self.utility is not None:
            scores = self.utility.added(scores, out[..., self.logits :])
        return scores


class Utility:
    """The head that expects the utility of whole configurations.

    It adds sharpness · σ(a) · σ(s·(z − l)) to the scores, for logits a of the accuracy, slopes s,
    standardised ln budgets z and ln latencies l. By σ(x) = (1 + tanh(x/2))/2 it takes a single tanh
    of all its outputs, so they are a/2 and s·(z − l)/2 at once. The arrays are `weight`
    [inputs, 2C] and `bias` [2C] of a and l, and `slope` [C].
    """

    def __init__(self, arrays: Arrays, sharpness: float) -> None:
        self.slope = arrays["slope"] / 2
        self.count = len(self.slope)
        factors = np.concatenate([np.full(self.count, 0.5), -self.slope])
        self.weight = arrays["weight"] * factors
        self.bias = arrays["bias"].ravel() * factors
        self._factor = np.array(sharpness / 4, np.float32)

    def joined(self, weight: Array, bias: Array) -> tuple[Array, Array]:
        """Return the last layer with the outputs of both heads; its last input is z, which the
        heads of the knobs do not read."""
        from_z = np.concatenate([np.zeros(len(bias) + self.count), self.slope])
        weights = np.vstack([np.hstack([weight, self.weight]), from_z])
        biases = np.concatenate([bias, self.bias])
        return weights.astype(np.float32), biases.astype(np.float32)

    def added(self, scores: Array, outputs: Array) -> Array:
        """Return the scores [*, C] with what its outputs [*, 2C] add."""
        parts = np.tanh(outputs)
        parts += _UNIT
        worth = parts[..., : self.count] * parts[..., self.count :]
        worth *= self._factor
        return np.add(scores, worth)

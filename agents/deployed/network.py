"""The deployed network: features and a limit in, a score for every configuration out."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from .arrays import MIN_MS, Array, Arrays, below, log_ms

# an array, because NumPy takes longer with a Python number
_UNIT = np.array(1.0, np.float32)


class Normaliser:
    """Imputes missing values, takes heavy tails logarithmically, standardises and clips. It adds an
    indicator for each column with missing values, and projects all of them onto fewer components
    where there is a projection: [n, d] → [n, width]."""

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
        # True where columns are only shifted, scaled and clipped
        self.plain = not (self.heavy.size or self.gappy.size or self.projection is not None)

    def __call__(self, raw: Array) -> Array:
        """Normalise raw features float32 [n, d]."""
        missing = np.isnan(raw)
        x = np.where(missing, self.median, raw)
        if self.heavy.size:
            tails = x[:, self.heavy]
            x[:, self.heavy] = np.sign(tails) * np.log1p(np.abs(tails) / self.unit)
        x -= self.mean
        # here and not in the weights of the first layer, where large means would cost digits
        x /= self.scale
        x.clip(self.low, self.high, out=x)
        if self.gappy.size:
            x = np.concatenate([x, missing[:, self.gappy]], 1, dtype=np.float32)
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
        z = (math.log(max(limit, MIN_MS)) - self.mean) / self.scale
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


def one_hot_of(configurations: Array) -> Array:
    """Return a matrix that marks the knob values of each configuration, float32 [values, C]."""
    sizes = configurations.max(0) + 1
    rows = configurations + sizes.cumsum() - sizes
    one_hot = np.zeros((int(sizes.sum()), len(configurations)), np.float32)
    one_hot[rows, np.arange(len(configurations))[:, None]] = 1
    return one_hot


class Scratch(threading.local):
    """Arrays that a decision on one request writes into. Each thread has its own, so that threads
    need no lock, which a fork could leave locked.

    `arrays` are three parts of the first layer's input (features, limit, drift); the inputs of all
    layers, which end with a 1 for the bias; their outputs; and the outputs of the hidden layers,
    inside the inputs. `last` are three parts of the last output: logits of knob values, and for the
    utility accuracies and chances to be on time."""

    def __init__(self, layers: list[Array], bounds: list[int], logits: int) -> None:
        inputs = [np.ones(len(weight), np.float32) for weight in layers]
        outputs = [np.empty(weight.shape[1], np.float32) for weight in layers]
        # the outputs of a layer fill the beginning of the next one's inputs
        pairs = zip(outputs, inputs[1:], strict=False)
        states = [following[: len(values)] for values, following in pairs]
        x, limit, drift, _ = np.split(inputs[0], bounds)
        self.arrays = x, limit, drift, inputs, outputs, states
        both = outputs[-1][logits:]
        self.last = outputs[-1][:logits], both, *np.split(both, 2)


class Heads:
    """An MLP with a categorical head for each knob, or one over the configurations, and perhaps a
    head for the utility of whole configurations.

    The score of a configuration is the sum of the logits of its knob values, and of what the
    utility head adds (`knobwise.agents.controller.networks.UtilityHead`). The policy is the softmax
    of the scores of all configurations that may be chosen.

    Right after a model has run, a NumPy call costs microseconds whatever the size of its arrays,
    and the first call of each kind costs several times as much. So the decision on one request
    makes few calls of few kinds, and writes into arrays that exist already, see `Scratch`.

    The arrays are `layers.<i>.weight` [inputs, outputs] and `.bias` [outputs], of which the heads
    are the last; `encoding.…`; and perhaps `utility.…`. Without `one_hot` (see `one_hot_of`) there
    is one head over the configurations.
    """

    def __init__(
        self, arrays: Arrays, header: Mapping[str, Any], normaliser: Normaliser, one_hot: Any
    ) -> None:
        self.one_hot = one_hot
        self.normaliser = normaliser
        self.encoding = Encoding(below(arrays, "encoding."), header["budget_width"])
        self.values = header["drift_values"]
        # SiLU(x) = x·sigmoid(x) = (x/2)·(1 + tanh(x/2)): weights of hidden layers are halved
        self.layers = []
        for i in range(header["layers"] + 1):
            weight = np.vstack([arrays[f"layers.{i}.weight"], arrays[f"layers.{i}.bias"]])
            half = 0.5 if i < header["layers"] else 1.0
            self.layers.append((weight * half).astype(np.float32))
        self.logits = self.layers[-1].shape[1]
        self.utility: Utility | None = None
        if "utility.weight" in arrays:
            outcomes = below(arrays, "utility.")
            self.utility = Utility(outcomes, header["sharpness"], self.layers[-1])
            self.layers[-1] = self.utility.layer
        inputs = len(self.layers[0]) - 1
        self.width = inputs - self.encoding.width - self.values
        self._scales = 1 / normaliser.scale
        bounds = [self.width, inputs - self.values, inputs]
        self._scratch = Scratch(self.layers, bounds, self.logits)

    def scores(self, x: Array, limits: Array, by_value: Array | float) -> Array:
        """Return scores [n, C] for normalised features [n, width], limits [n] and a drift [V]."""
        drift = np.broadcast_to(by_value, (len(x), self.values))
        z, encoded = self.encoding.many(limits)
        # the inputs of the first layer, then one layer after the other
        out = np.concatenate([x, encoded, drift], 1, dtype=np.float32)
        for weight in self.layers[:-1]:
            out = out @ weight[:-1] + weight[-1]
            gate = np.tanh(out)
            gate += _UNIT
            out *= gate
        if self.utility is not None:
            out = np.concatenate([out, z], 1, dtype=np.float32)
        last = self.layers[-1]
        out = out @ last[:-1] + last[-1]
        scores = out[:, : self.logits]
        if self.one_hot is not None:
            scores = scores @ self.one_hot
        if self.utility is not None:
            scores = self.utility.added(scores, out[:, self.logits :])
        return scores

    def single(
        self, raw: Array, limit: float, by_value: Array | float, kept: Array | None = None
    ) -> int:
        """Return the best configuration for raw features [d] of one request, under a limit in ms
        and a drift of knob values [V]. `kept` [width] gets a copy of the normalised features."""
        normaliser = self.normaliser
        x, encoded, drift, inputs, outputs, states = self._scratch.arrays
        scores, both, accuracy, on_time = self._scratch.last
        if normaliser.plain:
            np.subtract(raw, normaliser.mean, out=x)
            np.multiply(x, self._scales, out=x)
            np.maximum(x, normaliser.low, out=x)
            np.minimum(x, normaliser.high, out=x)
        else:
            x[:] = normaliser(raw[None])[0]
        if kept is not None:
            kept[:] = x
        z, encoded[:] = self.encoding.single(limit)
        if self.values:
            drift[:] = by_value
        # hidden layers: `half` is x/2, and the next input is SiLU(x), see `__init__`
        for i, state in enumerate(states):
            half = np.dot(inputs[i], self.layers[i], out=outputs[i])
            np.tanh(half, out=state)
            np.add(state, _UNIT, out=state)
            np.multiply(state, half, out=state)
        if self.utility is not None:
            inputs[-1][-2] = z
        np.dot(inputs[-1], self.layers[-1], out=outputs[-1])
        if self.one_hot is not None:
            scores = scores.dot(self.one_hot)
        if self.utility is not None:
            # as `Utility.added`, without the factor, which all scores share
            np.tanh(both, out=both)
            np.add(both, _UNIT, out=both)
            np.multiply(accuracy, on_time, out=accuracy)
            scores = np.add(scores, accuracy)
        best = int(scores.argmax())
        if not math.isnan(scores[best]):
            return best
        # NaN: a feature is missing, which the fast way above cannot impute
        normal = normaliser(raw[None])
        if kept is not None:
            kept[:] = normal[0]
        return int(self.scores(normal, np.array([limit]), by_value).argmax())


class Utility:
    """The head that expects the utility of whole configurations.

    It adds sharpness · σ(a) · σ(s·(z − l)) to the scores, for logits a of the accuracy, slopes s,
    standardised ln budgets z and ln latencies l. By σ(x) = (1 + tanh(x/2))/2 it takes a single tanh
    of all its outputs, so they are a/2 and s·(z − l)/2 at once. The layer leaves the factor
    sharpness/4 out of all scores. The arrays are `weight` [inputs, 2C] and `bias` [2C] of a and l,
    and `slope` [C]. `layer` becomes the last layer with the outputs of both, [inputs + 2, …].
    """

    def __init__(self, arrays: Arrays, sharpness: float, layer: Array) -> None:
        slope = arrays["slope"] / 2
        self.count = len(slope)
        self._factor = np.array(sharpness / 4, np.float32)
        factors = np.concatenate([np.full(self.count, 0.5), -slope])
        weight = np.vstack([arrays["weight"], arrays["bias"]]) * factors
        both = np.hstack([layer / self._factor, weight])
        # the input before the bias is z, which the heads of the knobs do not read
        from_z = np.zeros((1, both.shape[1]))
        from_z[0, -self.count :] = slope
        self.layer = np.vstack([both[:-1], from_z, both[-1:]]).astype(np.float32)

    def added(self, scores: Array, outputs: Array) -> Array:
        """Return the scores [n, C] with what its outputs [n, 2C] add."""
        parts = np.tanh(outputs) + _UNIT
        return self._factor * (scores + parts[:, : self.count] * parts[:, self.count :])

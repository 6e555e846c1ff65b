"""An exported controller that decides with NumPy alone.

This file needs only NumPy: copy it next to the `.npz` that `knobwise export` writes. The data flow is: feature blocks →
`_Normaliser` → `_UtilityNetwork` or `_KnobNetwork`, and experts → expected utility of each configuration → guard → a
configuration. Everything learned or calibrated is in the `.npz`; the rules are here.

On a machine that is not as fast as the profile's, latencies drift: measured ln ms = predicted ln ms + offset, with a
spread that is `scale` times the predicted one. A decision given `drift=(offset, scale)` takes both into account; the
mean of the offsets acts as if the budget were exp(−mean) times itself.

    controller = NumpyController.load("controller.npz")
    controller.decide({"image_features": image, "language_features": language}, budget_ms=25.0)
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import operator
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "knobwise.NumpyController/2"
LEAST_MS, MOST_MS = 1e-9, 1e30
"""Lower bound that budgets are raised to, and upper bound that they must stay below."""
HOPELESS = 0.01
"""If no configuration is more likely than this to be on time, the one expected to be fastest is chosen."""
HOPELESS_Z = -2.3263478740408408
"""Φ(HOPELESS_Z) = HOPELESS."""
MOST_SINGLE = 100.0
"""The highest price of a miss up to which single precision tells accuracies apart."""
GOLDEN = 0.6180339887498949
"""Requests take turns between the sides of a static mix by the multiples of the golden ratio, modulo 1: the shares are
kept as evenly as can be."""
AT_ONCE = 512
"""Number of requests that are decided together."""

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Drift = tuple[Any, float]
"""The offset of ln ms, a number or float [C], and the factor on its spread, a number above 0."""
Expected = tuple[int, float, float]
"""The index of a configuration, and the predicted mean and standard deviation of its ln ms, without drift."""


class NumpyController:
    """Decides for requests by the arrays of an exported file, by name; `header` is JSON.

    Raises:
        ValueError: if `knobwise export` did not write the arrays, or they have changed since. Files of earlier
            versions hold no digest and no shapes; of them it is only seen whether they decide.
    """

    def __init__(self, arrays: Arrays) -> None:
        try:
            head = json.loads(bytes(arrays["header"]).decode())
            known = head["format"] == FORMAT
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise ValueError(f"not an exported controller (expected format {FORMAT})")
        self.header: dict[str, Any] = head
        content = digest_of(arrays)
        if bytes(arrays.get("digest", content)) != content:
            raise ValueError("is damaged (its checksum does not match); export it again")
        if broken := [name for name, array in arrays.items() if array.dtype.kind == "f" and np.isnan(array).any()]:
            raise ValueError(f"{broken[0]} holds NaN; train again")
        self.digest = content.hex()[:16]
        """Of all arrays: controllers with the same digest decide alike."""
        self.knobs: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in head["knobs"]}
        """The values of each knob, by name."""
        self.configurations: Array = arrays["configurations"]
        """int64 [C, K]: for each configuration the index of each knob's value."""
        self._shares = np.full(len(self.configurations), 1 / len(self.configurations))
        self.feature_sizes: dict[str, int] = head["features"]
        self.datasets: list[str] = head.get("datasets", [])
        """The columns of the block `dataset` if that is an input, else []: 1 for the data set of
        the request, all 0 for an unknown one."""
        self.typical: tuple[Array, Array] | None = None
        """Of a controller that predicts no latency: mean and standard deviation of ln ms of each configuration over the
        training samples, float [C] each."""
        named = zip(self.knobs.items(), self.configurations.T.tolist(), strict=True)
        columns = [[(name, values[place]) for place in places] for (name, values), places in named]
        self._named = [dict(pairs) for pairs in zip(*columns, strict=True)]
        self._names, self._widths = tuple(self.feature_sizes), tuple(self.feature_sizes.values())
        self._normal = _Normaliser(_under(arrays, "normaliser."), head["clip"]) if self._widths else None
        network = _under(arrays, "network.")
        self._utility = _UtilityNetwork(network, head) if head["structure"] == "utility" else None
        knobs = head["structure"] == "independent"  # it may be "none", which leaves all to the experts
        self._heads = _KnobNetwork(network, head, self.configurations) if knobs else None
        if self._heads:
            self.typical = arrays["network.typical"][0], arrays["network.typical"][1]
        self._weights = [weight for weight in head["weights"] if weight > 0]
        self._members: list[Callable[[Array, _Deadlines | None], tuple[Array, ...]]] = []
        if self._utility and head["weights"][0] > 0:
            self._members.append(self._utility)
        for number, (weight, kinds) in enumerate(zip(head["weights"][1:], head["experts"], strict=True)):
            if weight > 0:
                self._members.append(_Expert(_under(arrays, f"experts.{number}."), *kinds))
        self._guard = _Guard(_under(arrays, "guard."), _Static(_under(arrays, "static."))) if head["guard"] else None
        self._mean = _MeanBudgets(_under(arrays, "mean.")) if head["mean_budgets"] else None
        self._fast: _Fast | None = None
        if self._utility and self._utility.plain and self._members == [self._utility] and head["stacked"]:
            self._fast = _Fast(self._normal, self._utility, self._guard) if self._normal else None
        self._try()

    @classmethod
    def load(cls, path: str | Path) -> NumpyController:
        """Read a file without executing anything in it.

        Raises:
            ValueError: if `knobwise export` did not write the file.
            OSError: if it cannot be read.
        """
        try:
            # opened here, since np.load leaves a damaged file open
            with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                if file.zip.testzip() is not None:
                    raise ValueError("is damaged (its checksum does not match); export it again")
                arrays = {name: file[name] for name in file.files}
            return cls(arrays)
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:  # zipfile's own name no file
                raise
            words = " ".join(str(error).split()) if isinstance(error, ValueError) else f"is damaged ({error!r})"
            raise ValueError(f"{path}: {words}") from error

    def _try(self) -> None:
        """Decide at each calibrated budget: arrays that do not fit together fail now, not at the first request."""
        budgets = np.exp(self._guard.logs) if self._guard else np.ones(1)
        budgets = budgets if self._mean is None else self._mean.budgets_ms
        blocks = {name: np.zeros((len(budgets), width), np.float32) for name, width in self.feature_sizes.items()}
        with np.errstate(all="ignore"):
            many = self.choose(blocks, budgets).tolist()
            single = [self.decide_index({k: v[0] for k, v in blocks.items()}, budget) for budget in budgets.tolist()]
        for index in many + single:
            self.configuration(index)
        if self._mean is not None:
            self._mean.turns = itertools.count(1)

    def configuration(self, index: int) -> dict[str, Any]:
        """The knob values of configuration `index`, by knob name."""
        return dict(self._named[index])

    def decide(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None = None) -> dict[str, Any]:
        """Knob values by name for one request: blocks [d] and a budget in ms.

        Raises:
            ValueError: if a block is missing or has another shape, the budget is not positive and finite, a mean budget
                is not calibrated, or the drift has another shape, is not finite, or is for a mean budget.
        """
        return self.configuration(self.decide_index(features, budget_ms, drift))

    def decide_index(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None = None) -> int:
        """The same as the index of a configuration."""
        return self._decided(features, budget_ms, drift)[0]

    def decide_expected(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None = None) -> Expected:
        """The same with the predicted mean and standard deviation of the configuration's ln ms, both without drift;
        `typical` ones where the controller predicts none.

        Raises:
            ValueError: as `decide`, and for a mean budget.
        """
        if self.header["priced"]:
            raise ValueError("a controller for mean budgets predicts no spread of latencies")
        return self._decided(features, budget_ms, drift)

    def prospects(
        self, features: Mapping[str, Array] | None, budget_ms: float, drift: Drift | None = None
    ) -> tuple[Array, ...]:
        """What every configuration is expected to give one request: utility, probability of being on time, and mean and
        standard deviation of ln ms without drift, [C] each; without features by what budget-aware static knows.

        Raises:
            ValueError: as `decide_expected`, and for a controller that predicts no outcomes.
        """
        factor, scale = self._checked(drift)
        if features is None and self._guard is not None:
            return self._guard.static.prospects(budget_ms * factor)
        if not self._members or self.header["priced"]:
            raise ValueError("needs a controller for deadlines that predicts outcomes")
        raw = self._joined_blocks(features or {}, budget_ms)[None]
        under = _Deadlines(np.array([budget_ms * factor], np.float32), self._around(drift), scale)
        x = raw if self._normal is None else self._normal(raw)
        score, meets, mean, square = (part[0] for part in self._joined([member(x, under) for member in self._members]))
        return score, meets, mean, np.sqrt(np.maximum(square - mean.astype(np.float64) ** 2, 0))

    def fall_back(self, budget_ms: float, drift: Drift | None = None) -> Expected | None:
        """What `decide_expected` gives where the guard falls back to budget-aware static, or under a mean budget to the
        static mix, for which it needs no features; None where the policy decides."""
        if self._mean is not None:
            return self._mean.fall_back(budget_ms)
        if self._guard is None or self._guard.never_falls_back:
            return None
        limit = budget_ms * self._checked(drift)[0]
        return None if self._guard.single(limit)[1] else self._guard.static.expected(limit)

    def choose(
        self, features: Mapping[str, Array], limits: Array, mask: Array | None = None, drift: Drift | None = None
    ) -> NDArray[np.int64]:
        """Configurations int64 [n] for n requests: blocks [n, d], budgets [n] in ms, mask bool [n, C] of the choices.

        Raises a ValueError as `decide` does, and if the mask has another shape or leaves a request no configuration.
        """
        return self.choose_expected(features, limits, mask, drift)[0]

    def choose_expected(
        self, features: Mapping[str, Array], limits: Array, mask: Array | None = None, drift: Drift | None = None
    ) -> tuple[NDArray[np.int64], Array, Array]:
        """The same with predicted means and standard deviations of ln ms, [n] each; NaN for mean budgets."""
        limits = np.asarray(limits, np.float64)
        if limits.ndim != 1:
            raise ValueError(f"budgets must have shape [n], got {limits.shape}")
        n, wrong = len(limits), limits[~((limits > 0) & (limits < MOST_MS))]
        if len(wrong):
            raise ValueError(f"a budget of {wrong[0]}: must be positive and finite, in ms")
        factor, scale = self._checked(drift)
        limits = limits if self._mean else (limits * factor).astype(np.float32)
        blocks = [np.asarray(features[name], np.float32) for name in self._names if name in features]
        if tuple(block.shape for block in blocks) != tuple((n, width) for width in self._widths):
            raise ValueError(self._wrong(features, n))
        if mask is not None:
            mask = np.asarray(mask, bool)
            if mask.shape != (n, len(self.configurations)):
                raise ValueError(f"the mask must have shape {(n, len(self.configurations))}, got {mask.shape}")
            if not mask.any(1).all():
                raise ValueError("the mask leaves a request without any configuration")
        raw = np.concatenate(blocks, 1) if blocks else np.zeros((n, 0), np.float32)
        if not n:
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        parts = [slice(first, first + AT_ONCE) for first in range(0, n, AT_ONCE)]
        offset = self._around(drift)
        chosen = [self._chosen(raw[p], limits[p], None if mask is None else mask[p], offset, scale) for p in parts]
        index, log_latency, spread = map(np.concatenate, zip(*chosen, strict=True))
        return index.astype(np.int64), log_latency, spread

    def _decided(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None) -> Expected:
        raw = self._joined_blocks(features, budget_ms)
        if (fixed := self.fall_back(budget_ms, drift)) is not None:
            return fixed
        factor, scale = self._checked(drift)
        if self._mean is not None:
            return self._at_worth(raw, self._mean.worths[self._mean.single(budget_ms)]), math.nan, math.nan
        if self._fast is not None and (decided := self._fast(raw, budget_ms, factor, drift)) is not None:
            return decided
        limit = np.array([budget_ms * factor], np.float32)
        index, log_latency, spread = self._chosen(raw[None], limit, None, self._around(drift), scale)
        return int(index[0]), float(log_latency[0]), float(spread[0])

    def _at_worth(self, raw: Array, worth: Any) -> int:
        """The decision for one request, given the worth of a right answer in ms, a float32."""
        index = None if self._fast is None else self._fast.at_worth(raw, worth)
        if index is not None:
            return index
        x = raw[None] if self._normal is None else self._normal(raw[None])
        return int(self._at_prices(x, worth[None], None)[0])

    def _joined_blocks(self, features: Mapping[str, Array], budget_ms: float) -> Array:
        """The features of one request, float32 [d]."""
        if not 0 < budget_ms < MOST_MS:
            raise ValueError(f"a budget of {budget_ms}: must be positive and finite, in ms")
        blocks = [features[name] for name in self._names if name in features]
        if tuple(map(len, blocks)) != self._widths:
            raise ValueError(self._wrong(features))
        raw = np.concatenate(blocks, dtype=np.float32) if blocks else np.zeros(0, np.float32)
        if raw.ndim != 1:
            raise ValueError(self._wrong(features))
        return raw

    def _checked(self, drift: Drift | None) -> tuple[float, float]:
        """The factor on a budget that stands for the mean offset, and the scale."""
        if drift is None:
            return 1.0, 1.0
        offset, scale = drift
        if not getattr(offset, "ndim", 0):
            mean = float(offset)
        else:
            mean = float(offset.dot(self._shares)) if offset.shape == self._shares.shape else math.nan
        if self.header["priced"] or not (math.isfinite(mean) and 0 < scale < math.inf):
            raise ValueError(
                f"a drift of {drift}: must be a finite offset, a number or [{len(self.configurations)}], and a scale "
                "above 0, for a controller under deadlines"
            )
        return math.exp(min(max(-mean, -20.0), 20.0)), scale

    def _around(self, drift: Drift | None) -> Any:
        """The offsets without their mean: a number or float32 [C]."""
        if drift is None or not getattr(drift[0], "ndim", 0):
            return 0.0
        return np.subtract(drift[0], float(drift[0].dot(self._shares)), dtype=np.float32)

    def _wrong(self, features: Mapping[str, Array], n: int | None = None) -> str:
        wanted = {name: (size,) if n is None else (n, size) for name, size in self.feature_sizes.items()}
        shapes = {name: np.shape(block) for name, block in features.items()}
        name = next(name for name in wanted if shapes.get(name) != wanted[name])
        shape = shapes.get(name, "nothing")
        return f"features: block {name!r} must have shape {wanted[name]}, got {shape}; the controller reads {wanted}"

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _chosen(self, raw: Array, limits: Array, mask: Array | None, offset: Any, scale: float) -> tuple[Array, ...]:
        """Configurations, and predicted means and standard deviations of their ln ms, [n] each."""
        x = raw if self._normal is None else self._normal(raw)
        if self._mean is not None:
            group = self._mean.groups(limits)
            chosen = self._at_prices(x, self._mean.worths[group], mask)
            unknown = np.full(len(chosen), np.nan)
            return self._mean.or_mix(chosen, group, mask), unknown, unknown
        if self._heads is not None:
            assert self.typical is not None
            chosen = _best(self._heads(x, limits, mask), mask)
            return chosen, *(values[chosen] for values in self.typical)
        under = _Deadlines(limits, offset, scale)
        if self.header["stacked"]:
            joined = self._joined([member(x, under) for member in self._members])
            score, meets, log_latency, _ = joined
            chosen = self._guarded(score, meets, log_latency, under, mask)
        else:  # a network without guard; several members decide by the mean of their log-probs
            assert self._utility is not None
            parts = self._utility.of_members(x, under)
            score, *_ = parts
            joined = parts
            if self._utility.members > 1:
                score = _log_softmax(self._utility.sharpness * score, mask).mean(0)
                joined = tuple(part.mean(0) for part in parts)
            chosen = _best(score, mask)
        mean, square = (part[np.arange(len(limits)), chosen].astype(np.float64) for part in joined[2:])
        spread = np.sqrt(np.maximum(square - mean * mean, 0))
        if self._guard is not None:
            deployed, static = self._guard.deployed(limits), self._guard.static
            mean = np.where(deployed, mean, static.log_latency[chosen])
            spread = np.where(deployed, spread, static.spread[chosen])
        return chosen, mean, spread

    def _joined(self, members: list[tuple[Array, ...]]) -> tuple[Array, ...]:
        """Σ_k w_k·part_k over the members k."""
        if len(members) == 1:
            return members[0]
        return tuple(sum(map(operator.mul, self._weights, parts)) for parts in zip(*members, strict=True))

    def _at_prices(self, x: Array, worths: Array, mask: Array | None) -> Array:
        """Decisions for worths of a right answer [n], in ms."""
        accuracy, cost = self._joined([member(x, None) for member in self._members])
        cost = cost.astype(np.float64)
        return _pick(accuracy - cost / worths.astype(np.float64)[:, None], cost, mask)

    def _guarded(self, score: Array, meets: Array, log_latency: Array, under: _Deadlines, mask: Array | None) -> Array:
        """Decisions of a stack from what its members expect together, [n, C] each."""
        limits, log_latency = under.limits, log_latency + under.offset
        if len(limits) == 1 and mask is None:
            return np.array([self._single(score[0], meets[0], log_latency[0], float(limits[0]))])
        if mask is not None:
            meets = np.where(mask, meets, 0.0)
        chosen = self._guard(score, meets, limits, mask) if self._guard else _pick(score, log_latency, mask)
        hopeless = meets.max(1) < HOPELESS
        if self._guard:
            hopeless &= self._guard.deployed(limits)
        return np.where(hopeless, _pick(-log_latency, log_latency, mask), chosen)

    def _single(self, score: Array, meets: Array, log_latency: Array, limit: float) -> int:
        """The guarded decision for one request among all configurations, [C] each, with few calls."""
        price, deploy = (0.0, True) if self._guard is None else self._guard.single(limit)
        if self._guard is not None and not deploy:
            return self._guard.static.single(limit)
        if meets.max() < HOPELESS:
            return int(log_latency.argmin())
        if price:  # double because of the highest price
            score = score + price * meets.astype(np.float64)
        return _first(score, log_latency if self._guard is None else -meets)


def digest_of(arrays: Arrays) -> bytes:
    """SHA-256 of the names, types, shapes and bytes of all arrays but `digest`, which holds it."""
    content = hashlib.sha256()
    for name in sorted(set(arrays) - {"digest"}):
        array = np.ascontiguousarray(arrays[name])
        content.update(f"{name} {array.dtype} {arrays[name].shape} ".encode() + array.tobytes())
    return content.digest()


# -- helpers -----------------------------------------------------------------------------------------------------------


class _Deadlines:
    """Budgets float32 [n] in ms, offsets of ln ms, a number or [C], and a factor on its spread."""

    def __init__(self, limits: Array, offset: Any, scale: float) -> None:
        self.limits, self.offset, self.scale = limits, offset, scale

    def met(self, log_latency: Array, spread: Array) -> Array:
        """Φ((ln b − μ − offset)/(scale·σ)) from μ [*, n, C] and σ that expands to it."""
        return _ndtr((_log(self.limits)[:, None] - (log_latency + self.offset)) / (self.scale * spread))


def _under(arrays: Arrays, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


# numbers of Python would cost more time
_ZERO, _HALF, _UNIT, _FARTHEST = (np.array(number, np.float32) for number in (0.0, 0.5, 1.0, 5.5**2))
_ODD = [0.79788494, 0.036333085, -3.2594965e-5, -5.5306199e-5, 3.9647455e-6, -1.3226343e-7, 1.7561737e-9]
_SIXTH, _FIFTH, *_LOWER = [np.array(coefficient, np.float32) for coefficient in reversed(_ODD)]


def _ndtr(z: Array) -> Array:
    """Φ(z), with an error of at most 1e-7, the rounding of float32."""
    p = np.empty_like(z)
    _tanh_of_ndtr(z, p, np.empty_like(z))
    p *= _HALF
    p += _HALF
    return p


def _tanh_of_ndtr(z: Array, out: Array, square: Array) -> None:
    """2Φ(z) − 1 as tanh(z·p(z²)), into `out`; `square` is room for z².

    The polynomial p of degree 6 is fitted to artanh(2Φ(z) − 1)/z for |z| ≤ 5.5 so that the largest error of Φ is least
    (Lawson's iteration), and is constant beyond. Twenty short products are faster than looking places up in a table.
    """
    np.multiply(z, z, out=square)
    np.minimum(square, _FARTHEST, out=square)
    np.multiply(square, _SIXTH, out=out)
    np.add(out, _FIFTH, out=out)
    for coefficient in _LOWER:
        np.multiply(out, square, out=out)
        np.add(out, coefficient, out=out)
    np.multiply(out, z, out=out)
    np.tanh(out, out=out)


def _log_softmax(logits: Array, mask: Array | None = None) -> Array:
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _best(scores: Array, mask: Array | None) -> Array:
    return (scores if mask is None else np.where(mask, scores, -np.inf)).argmax(-1)


def _pick(scores: Array, slow: Array, mask: Array | None) -> Array:
    """The best score inside the mask, among equals the fastest: [n, C] or expandable to it → [n]."""
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    best = scores == scores.max(1, keepdims=True)
    if mask is not None:
        best &= mask
    return np.where(best, slow, np.inf).argmin(1)


def _first(score: Array, slow: Array) -> int:
    """The same for one request, [C] each; the score may be changed."""
    best = int(score.argmax())
    highest, score[best] = score[best], -np.inf
    if score[score.argmax()] < highest:
        return best
    score[best] = highest
    return int(np.where(score == highest, slow, np.inf).argmin())


class _Linear:
    """x·weight + bias with weights [d, o], or [M, d, o] of several members. `halved` outputs are halved, exactly."""

    def __init__(self, weight: Array, bias: Array, halved: slice = slice(0)) -> None:
        self.weight: Array = weight.copy()
        self.bias: Array = bias.copy()
        self.weight[..., halved] *= 0.5
        self.bias[..., halved] *= 0.5
        if weight.ndim == 3 and len(weight) == 1:
            self.weight, self.bias = self.weight[0], self.bias[0, 0]

    def __call__(self, x: Array) -> Array:
        out: Array = x @ self.weight
        out += self.bias
        return out


def _linear(arrays: Arrays, name: str, halved: slice = slice(0)) -> _Linear:
    return _Linear(arrays[f"{name}.weight"], arrays[f"{name}.bias"], halved)


def _silu_of_half(half: Array) -> Array:
    """x·sigmoid(x) from x/2: (x/2)·(1 + tanh(x/2)), which cannot overflow."""
    out = np.tanh(half)
    out *= half
    out += half
    return out


EVERYTHING = slice(None)


# -- the network -------------------------------------------------------------------------------------------------------


class _Normaliser:
    """Imputes missing values, takes heavy tails logarithmically, standardises and clips; adds
    missing indicators; projects all of them onto fewer components under `policy.project`."""

    def __init__(self, arrays: Arrays, clip: float) -> None:
        self.mean, self.scale, self.median = (arrays[name] for name in ("mean", "scale", "median"))
        self.heavy, self.gappy = np.flatnonzero(arrays["heavy"]), np.flatnonzero(arrays["has_missing"])
        self.unit = arrays["unit"][self.heavy]
        self.high = np.full_like(self.mean, clip)
        self.low = -self.high
        self.projection = arrays.get("projection")
        # whether columns are only shifted, scaled and clipped
        self.plain = not (self.heavy.size or self.gappy.size or self.projection is not None)

    def standardised(self, raw: Array) -> Array:
        x = raw - self.mean
        x /= self.scale  # folded into the weights, features with large means would lose digits
        np.maximum(x, self.low, out=x)
        np.minimum(x, self.high, out=x)
        return x

    def __call__(self, raw: Array) -> Array:
        x, missing = raw, None
        flat = raw.reshape(-1)
        if self.gappy.size or math.isnan(np.dot(flat, flat)):  # the product is the cheapest test for NaN
            missing = np.isnan(raw)
            x = np.where(missing, self.median, raw)
        if self.heavy.size:
            x = x.copy()
            tails = x[:, self.heavy]
            x[:, self.heavy] = np.sign(tails) * np.log1p(np.abs(tails) / self.unit)
        x = self.standardised(x)
        if self.gappy.size:
            assert missing is not None
            x = np.concatenate([x, missing[:, self.gappy]], 1, dtype=np.float32)
        return x if self.projection is None else x @ self.projection


class _Encoding:
    """The standardised logarithm of the budget, with sines and cosines of it: [n] → float32 [n, e]."""

    def __init__(self, arrays: Arrays, head: Mapping[str, Any]) -> None:
        self.mean, self.scale = float(arrays["mean"]), float(arrays["scale"])
        # an even width leaves the logarithm itself out
        self.first = 1 - head.get("budget_width", 1) % 2
        self.frequencies = arrays["frequencies"].astype(np.float32)
        self._few = self.frequencies.tolist()

    def single(self, limit: float) -> list[float]:
        z = (math.log(max(limit, LEAST_MS)) - self.mean) / self.scale
        z = min(max(z, -4.0), 4.0)
        angles = [z * f for f in self._few]
        return [z, *map(math.sin, angles), *map(math.cos, angles)][self.first :]

    def __call__(self, limits: Array) -> Array:
        if len(limits) == 1:  # plain numbers are faster than short arrays
            return np.array([self.single(float(limits[0]))], np.float32)
        places = ((_log(limits) - self.mean) / self.scale).clip(-4, 4)[:, None]
        angle = places * self.frequencies
        out = np.concatenate([places, np.sin(angle), np.cos(angle)], 1, dtype=np.float32)
        return out[:, self.first :]


class _UtilityNetwork:
    """Predicts accuracy and log-latency of every configuration, and expected utility under a limit."""

    def __init__(self, arrays: Arrays, head: Mapping[str, Any]) -> None:
        self.members, self.priced = head["members"], head["priced"]
        self.sharpness = float(arrays["sharpness"])
        self.encoding = _Encoding(_under(arrays, "encoding."), head)
        edges = arrays["edges"]
        self.binned, self.low = bool(edges.shape[1]), edges[:-1]
        self.width = np.maximum(np.diff(edges, axis=0), np.float32(1e-6))
        count, hidden = arrays["outcome_head.bias"].shape[-1] // 3, arrays["layers.0.bias"].shape[-1]
        self.count, self.hidden = count, hidden
        self.narrow, self.wide = (np.full(count, bound, np.float32) for bound in (-5, 1.5))
        # what is 0 costs no time; in a student the residual is, and for many features the skip too
        self.skips = any(arrays[f"skip.{part}"].any() for part in ("weight", "bias"))
        # one product for the first layer and the skip, which have the same inputs; accuracy logits are halved for tanh
        parts = ("layers.0", "skip") if self.skips else ("layers.0",)
        weight, bias = (np.concatenate([arrays[f"{p}.{what}"] for p in parts], -1) for what in ("weight", "bias"))
        self.first = _Linear(weight, bias, slice(hidden + count))
        self.layers = [_linear(arrays, f"layers.{n}", EVERYTHING) for n in range(1, head["layers"])]
        self.outcome = _linear(arrays, "outcome_head", slice(count))
        self.residual: _Linear | None = None
        if not self.priced and any(arrays[f"residual.{part}"].any() for part in ("weight", "bias")):
            self.modulation = _Linear(arrays["modulation.weight"], arrays["modulation.bias"] + 1)
            self.residual = _linear(arrays, "residual")
        # whether it is a single network that expects accuracy · probability of being on time, or decides at a price
        self.plain = self.members == 1 and self.residual is None

    def outcomes(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """[n, d] → 2·accuracy − 1, log-latency, spread and hidden vector, [n, ·] or of several members [M, n, ·]; of a
        single one also [d] → [·]."""
        count = self.count
        if self.binned:
            places = ((x[..., None, :] - self.low) / self.width).clip(0, 1)
            x = np.concatenate([x, places.reshape(*x.shape[:-1], -1)], -1)
        out = self.first(x)
        hidden = _silu_of_half(out[..., : self.hidden])
        more = out[..., self.hidden :]
        for layer in self.layers:
            hidden += _silu_of_half(layer(hidden))
        out = self.outcome(hidden)
        both = out[..., : 2 * count]
        if self.skips:
            both += more
        log_latency, spread = both[..., count:], out[..., 2 * count :]
        np.maximum(spread, self.narrow, out=spread)
        np.minimum(spread, self.wide, out=spread)
        np.exp(spread, out=spread)
        return np.tanh(both[..., :count]), log_latency, spread, hidden

    def of_members(self, x: Array, under: _Deadlines | None) -> tuple[Array, ...]:
        """Expected utility, probability of being on time, and of ln ms the mean and the mean square, or at a price
        accuracy and latency in ms: [n, C] each, or [M, n, C] of several members."""
        accuracy, log_latency, spread, hidden = self.outcomes(x)
        accuracy *= _HALF
        accuracy += _HALF
        if under is None:
            return accuracy, np.exp(log_latency + spread * spread / 2)
        meets = under.met(log_latency, spread)
        score = accuracy * meets
        if self.residual is not None:
            hidden *= self.modulation(self.encoding(under.limits))
            score += self.residual(hidden)
        return score, meets, log_latency, _mean_square(log_latency, spread)

    def __call__(self, x: Array, under: _Deadlines | None) -> tuple[Array, ...]:
        """The same, as means over the members, [n, C]."""
        parts = self.of_members(x, under)
        return parts if self.members == 1 else tuple(part.mean(0) for part in parts)


def _mean_square(log_latency: Array, spread: Array) -> Array:
    """μ² + σ², of which the mean over members is that of their mixture; in double because μ² is subtracted later."""
    return log_latency.astype(np.float64) ** 2 + spread.astype(np.float64) ** 2


def log_moments(latencies_ms: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of ln ms over each row of [C, n], ∞ aside, float64 [C]; 0 for a row of ∞."""
    logs = np.log(np.maximum(latencies_ms.astype(np.float64), LEAST_MS))
    measured = np.isfinite(logs)
    count = np.maximum(measured.sum(1), 1)
    mean = np.where(measured, logs, 0.0).sum(1) / count
    return mean, np.sqrt((np.where(measured, logs - mean[:, None], 0.0) ** 2).sum(1) / count)


def _log(limits: Array) -> Array:
    if len(limits) == 1:
        return np.array([math.log(max(float(limits[0]), LEAST_MS))], np.float32)
    return np.log(np.maximum(limits, np.float32(LEAST_MS)))


class _KnobNetwork:
    """An MLP with a categorical for each knob: log-probs of every configuration up to a constant per request."""

    def __init__(self, arrays: Arrays, head: Mapping[str, Any], configurations: Array) -> None:
        self.members, self.encoding = head["members"], _Encoding(_under(arrays, "encoding."), head)
        self.layers = [_linear(arrays, f"layers.{n}", EVERYTHING) for n in range(head["layers"])]
        self.logits = _linear(arrays, "head.logits")
        sizes = configurations.max(0) + 1
        places = configurations + sizes.cumsum() - sizes
        self.places = np.zeros((sizes.sum(), len(configurations)), np.float32)
        self.places[places, np.arange(len(configurations))[:, None]] = 1

    def __call__(self, x: Array, limits: Array, mask: Array | None) -> Array:
        hidden = np.concatenate([x, self.encoding(limits)], 1)
        for layer in self.layers:
            hidden = _silu_of_half(layer(hidden))
        scores = self.logits(hidden) @ self.places
        return scores if self.members == 1 else _log_softmax(scores, mask).mean(0)


class _Fast:
    """One request through a single network that predicts outcomes, inside a guard.

    Right after a model has run, a call costs microseconds whatever the size of its arrays, and the first call of each
    kind several times as much. So these are few and of few kinds, numbers go into arrays that exist already, and a lock
    guards these.
    """

    def __init__(self, normal: _Normaliser, network: _UtilityNetwork, guard: _Guard | None) -> None:
        self._normal, self._guard, self._lock = normal, guard, threading.Lock()
        self._scales = 1 / normal.scale
        hidden, count = network.hidden, network.count
        first, *inner, last = [
            np.vstack([layer.weight, layer.bias]) for layer in (network.first, *network.layers, network.outcome)
        ]
        # so that the last layer gives −μ and −ln σ
        first[:, hidden + count :] *= -1
        last[:, count:] *= -1
        width = network.low.shape[1] if network.binned else len(first) - 1
        self._first, self._layers, self._last = first, inner, last
        # an input that is always 1 adds the bias
        self._x, self._hidden = np.ones(len(first), np.float32), np.ones(hidden + 1, np.float32)
        self._raw, self._state = self._x[:width], self._hidden[:hidden]
        self._places: Array | None = None
        if network.binned:
            self._low, self._per_width = network.low, 1 / network.width
            self._places = self._x[width:-1].reshape(network.low.shape)
        both, out = np.empty(first.shape[1], np.float32), np.empty(3 * count, np.float32)
        self._from_first, self._half, self._skip = both, both[:hidden], both[hidden:]
        self._inner, self._gate = np.empty(hidden, np.float32), np.empty(hidden, np.float32)
        self._out, self._both = out, out[: 2 * count]
        self._accuracy, self._minus_log_latency, self._per_spread = out.reshape(3, count)
        self._narrow, self._wide = -network.narrow, -network.wide
        self._z, self._meets, self._score = (np.empty(count, np.float32) for _ in range(3))
        self._backwards = self._score[::-1]
        self._log_budget, self._per_scale = np.ones((), np.float32), np.ones((), np.float32)
        self._worths: dict[float, Array] = {}

    def __call__(self, raw: Array, budget_ms: float, factor: float, drift: Drift | None) -> Expected | None:
        """Features [d] → decision; None if a feature is missing, which makes all scores NaN. `factor` on the budget
        stands for the mean of the drift's offsets."""
        offset, scale = drift or (0.0, 1.0)
        price = 0.0 if self._guard is None else self._guard.single(budget_ms * factor)[0]
        each = getattr(offset, "ndim", 0)
        with self._lock:
            self._predict(raw)
            z, meets, score = self._z, self._meets, self._score
            self._log_budget[()] = math.log(max(budget_ms if each else budget_ms * factor, LEAST_MS))
            np.add(self._minus_log_latency, self._log_budget, out=z)
            if each:
                np.subtract(z, offset, out=z)
            np.multiply(z, self._per_spread, out=z)
            if scale != 1:
                self._per_scale[()] = 1 / scale
                np.multiply(z, self._per_scale, out=z)
            likely = z[z.argmax()]
            if not likely >= HOPELESS_Z:
                return self._expected(int((self._minus_log_latency - offset).argmax())) if likely < HOPELESS_Z else None
            _tanh_of_ndtr(z, meets, score)
            np.add(meets, _UNIT, out=meets)  # 2Φ(z)
            # twice the accuracy plus the price of a miss, which only double precision can hold if it is high
            if price > MOST_SINGLE:
                best = _first(meets * (self._accuracy.astype(np.float64) + (1 + 2 * price)), -meets)
                return self._expected(best)
            np.add(self._accuracy, self._worth(price), out=score)
            np.multiply(score, meets, out=score)
            best = int(score.argmax())
            if best != len(score) - 1 - int(self._backwards.argmax()):
                best = _first(score, offset - self._minus_log_latency if self._guard is None else -meets)
            return self._expected(best)

    def at_worth(self, raw: Array, worth: Any) -> int | None:
        """Features [d] and the worth of a right answer in ms, a float32 → a configuration; None as above."""
        with self._lock:
            self._predict(raw)
            cost, score = self._meets, self._score
            np.multiply(self._per_spread, self._per_spread, out=cost)
            np.divide(_HALF, cost, out=cost)
            np.subtract(cost, self._minus_log_latency, out=cost)
            np.exp(cost, out=cost)
            np.divide(cost, worth, out=self._z)
            np.multiply(self._accuracy, _HALF, out=score)
            np.subtract(score, self._z, out=score)
            return None if math.isnan(score[score.argmax()]) else _first(score, cost)

    def _worth(self, price: float) -> Array:
        if price not in self._worths:
            self._worths[price] = np.array(1 + 2 * price, np.float32)
        return self._worths[price]

    def _expected(self, index: int) -> Expected:
        return index, -float(self._minus_log_latency[index]), 1 / float(self._per_spread[index])

    def _predict(self, raw: Array) -> None:
        """Fill 2·accuracy − 1, −μ and 1/σ."""
        x, state, half = self._raw, self._state, self._half
        if self._normal.plain:
            np.subtract(raw, self._normal.mean, out=x)
            np.multiply(x, self._scales, out=x)
            np.maximum(x, self._normal.low, out=x)
            np.minimum(x, self._normal.high, out=x)
        else:
            x[:] = self._normal(raw[None])[0]
        if self._places is not None:
            np.subtract(x, self._low, out=self._places)
            np.multiply(self._places, self._per_width, out=self._places)
            np.maximum(self._places, _ZERO, out=self._places)
            np.minimum(self._places, _UNIT, out=self._places)
        np.dot(self._x, self._first, out=self._from_first)
        np.tanh(half, out=state)
        np.add(state, _UNIT, out=state)
        np.multiply(state, half, out=state)
        inner, gate = self._inner, self._gate
        for layer in self._layers:
            np.dot(self._hidden, layer, out=inner)
            np.tanh(inner, out=gate)
            np.add(gate, _UNIT, out=gate)
            np.multiply(gate, inner, out=gate)
            np.add(state, gate, out=state)
        np.dot(self._hidden, self._last, out=self._out)
        if len(self._skip):
            np.add(self._both, self._skip, out=self._both)
        np.minimum(self._per_spread, self._narrow, out=self._per_spread)
        np.maximum(self._per_spread, self._wide, out=self._per_spread)
        np.exp(self._per_spread, out=self._per_spread)
        np.tanh(self._accuracy, out=self._accuracy)


# -- experts -----------------------------------------------------------------------------------------------------------


class _Expert:
    """Predicts accuracy and log-latency of every configuration, by a regressor each."""

    def __init__(self, arrays: Arrays, accuracy: str, log_latency: str) -> None:
        self.accuracy = _REGRESSORS[accuracy](_under(arrays, "accuracy."))
        self.log_latency = _REGRESSORS[log_latency](_under(arrays, "log_latency."))
        self.spread = arrays["spread"]

    def __call__(self, x: Array, under: _Deadlines | None) -> tuple[Array, ...]:
        """See `_UtilityNetwork.of_members`."""
        x = x if x.shape[1] else np.zeros((len(x), 1), np.float32)
        accuracy, log_latency = self.accuracy(x), self.log_latency(x)
        if under is None:
            return accuracy, np.exp(log_latency + self.spread * self.spread / 2)
        meets = under.met(log_latency, self.spread)
        return np.clip(accuracy, 1e-3, 1.0) * meets, meets, log_latency, _mean_square(log_latency, self.spread)


def _kernel(arrays: Arrays, x: Array) -> Array:
    """Σ_i exp(−‖x − points_i‖²/(2·width²))·coefficients_i + bias."""
    factor = np.float32(-1 / (2 * float(arrays["width"]) ** 2))
    return np.exp(_squared_distances(x, arrays) * factor) @ arrays["coefficients"] + arrays["bias"]


def _neighbours(arrays: Arrays, x: Array) -> Array:
    """The mean of the k nearest points."""
    k = min(int(arrays["k"]), len(arrays["points"]))
    nearest = np.argpartition(_squared_distances(x * arrays["weights"], arrays), k - 1, -1)[:, :k]
    return arrays["values"][nearest].mean(1)


def _squared_distances(x: Array, arrays: Arrays) -> Array:
    distance = (x * x).sum(1, keepdims=True) + arrays["squares"] - 2 * (x @ arrays["points"].T)
    return np.maximum(distance, 0)


class _Trees:
    """The sum of the trees' leaves, times the components of their fit, plus bias. A leaf's children are itself."""

    def __init__(self, arrays: Arrays) -> None:
        self.feature, self.roots, self.depth = arrays["feature"], arrays["roots"], int(arrays["depth"])
        self.threshold, self.value, self.bias = arrays["threshold"], arrays["value"], arrays["bias"]
        self.children = np.stack([arrays["right"], arrays["left"]], 1).reshape(-1)
        fit, components = arrays["fit"], arrays["components"]
        self.starts = np.flatnonzero(np.diff(fit, prepend=-1))  # trees of the same fit are adjacent
        self.components = components[fit[self.starts]].reshape(-1, components.shape[-1])

    def __call__(self, x: Array) -> Array:
        node = np.broadcast_to(self.roots, (len(x), len(self.roots)))
        rows = np.arange(len(x))[:, None]
        for _ in range(self.depth):
            goes_left = x[rows, self.feature[node]] <= self.threshold[node]
            node = self.children[2 * node + goes_left]
        sums = np.add.reduceat(self.value[node], self.starts, 1)
        return sums.reshape(len(x), -1) @ self.components + self.bias


_REGRESSORS: dict[str, Callable[[Arrays], Callable[[Array], Array]]] = {
    "Linear": lambda arrays: _Linear(arrays["weight"], arrays["bias"]),
    "Kernel": lambda arrays: partial(_kernel, arrays),
    "Neighbours": lambda arrays: partial(_neighbours, arrays),
    "Trees": _Trees,
}


# -- guard and static choice -------------------------------------------------------------------------------------------


class _Guard:
    """Prices of a miss and fall-backs for the calibrated budgets; a request uses the one nearest in log-ms."""

    def __init__(self, arrays: Arrays, static: _Static) -> None:
        self.static, self.logs = static, np.log(np.maximum(arrays["budgets_ms"], LEAST_MS))
        self.miss, self.deploy = arrays["miss"], arrays["deploy"]
        order = np.argsort(self.logs, kind="stable")
        self.never_falls_back = bool(self.deploy.all())
        self._few = list(zip(self.miss[order].tolist(), self.deploy[order].tolist(), strict=True))
        self._between = np.exp((self.logs[order][1:] + self.logs[order][:-1]) / 2).tolist()

    def single(self, limit: float) -> tuple[float, bool]:
        """The price and whether the policy is deployed."""
        return self._few[bisect.bisect_left(self._between, limit)]

    def _groups(self, limits: Array) -> Array:
        return np.abs(_log(limits)[:, None] - self.logs).argmin(1)

    def deployed(self, limits: Array) -> Array:
        """bool [n]."""
        return np.asarray(self.deploy[self._groups(limits)])

    def __call__(self, score: Array, meets: Array, limits: Array, mask: Array | None) -> Array:
        group = self._groups(limits)
        chosen = _pick(score.astype(np.float64) + self.miss[group][:, None] * meets, -meets, mask)
        return np.where((meets > 0).any(1) & self.deploy[group], chosen, self.static(limits, mask))


class _Static:
    """The best configuration for each budget, the same for every request: a step function of the budget."""

    def __init__(self, arrays: Arrays) -> None:
        self.starts, self.choices = arrays["starts"], arrays["choices"]
        self.latency_ms, self.sorted_ms, self.running = (arrays[k] for k in ("latency_ms", "sorted_ms", "running"))
        # of ln ms over the samples that it was fitted on
        self.log_latency, self.spread = log_moments(self.sorted_ms)
        self._few = self.starts.tolist()

    def single(self, limit: float) -> int:
        return int(self.choices[bisect.bisect_right(self._few, limit) - 1])

    def expected(self, limit: float) -> Expected:
        choice = self.single(limit)
        return choice, float(self.log_latency[choice]), float(self.spread[choice])

    def prospects(self, limit: float) -> tuple[Array, ...]:
        """As `NumpyController.prospects`, as means over the samples that it was fitted on."""
        places = [int(np.searchsorted(column, limit, side="right")) for column in self.sorted_ms]
        utility = np.array([running[place] for running, place in zip(self.running, places, strict=True)])
        meets = np.array(places) / np.maximum(np.isfinite(self.sorted_ms).sum(1), 1)
        return utility, meets, self.log_latency, self.spread

    def __call__(self, limits: Array, mask: Array | None) -> Array:
        limits = limits.astype(np.float64)
        if mask is None:
            return self.choices[np.searchsorted(self.starts, limits, side="right") - 1]
        places = [np.searchsorted(column, limits, side="right") for column in self.sorted_ms]
        utility = np.stack([running[place] for running, place in zip(self.running, places, strict=True)], 1)
        return _pick(utility, self.latency_ms, mask)


class _MeanBudgets:
    """Prices for mean budgets, and the static mix that they fall back to."""

    def __init__(self, arrays: Arrays) -> None:
        self.budgets_ms = arrays["budgets_ms"].astype(np.float64)
        self._few = self.budgets_ms.tolist()
        with np.errstate(divide="ignore"):  # if time costs nothing, the worth of a right answer is infinite
            self.worths = (1 / arrays["prices"]).astype(np.float32)
        self.deployed, self.mix = arrays["deployed"], _under(arrays, "mix.")
        self.turns = itertools.count(1)

    def groups(self, budgets_ms: Array) -> Array:
        """The index of each of these among the calibrated budgets; a ValueError if one is none of them."""
        group = np.abs(budgets_ms[:, None] - self.budgets_ms).argmin(1)
        far = np.abs(budgets_ms - self.budgets_ms[group]) > 1e-3 * self.budgets_ms[group]
        if far.any():
            known = ", ".join(f"{budget:.4g}" for budget in self.budgets_ms.tolist())
            raise ValueError(f"a mean budget of {budgets_ms[far][0]:.4g}: prices were calibrated for {known} only")
        return group

    def single(self, budget_ms: float) -> int:
        """The same for one."""
        group = min(range(len(self._few)), key=lambda place: abs(budget_ms - self._few[place]))
        if abs(budget_ms - self._few[group]) <= 1e-3 * self._few[group]:
            return group
        return int(self.groups(np.array([budget_ms]))[0])

    def fall_back(self, budget_ms: float) -> Expected | None:
        """As of the controller."""
        group = self.single(budget_ms)
        if not self.mix or self.deployed[group]:
            return None
        side = "second" if next(self.turns) * GOLDEN % 1 < self.mix["share"][group] else "first"
        return int(self.mix[side][group]), math.nan, math.nan

    def or_mix(self, chosen: Array, group: Array, mask: Array | None) -> Array:
        """The choices, replaced where the static mix decides, between whose sides requests take turns."""
        if not self.mix or self.deployed[group].all():
            return chosen
        mixed, place = ~self.deployed[group], np.ones(len(group))
        place[mixed] = np.fromiter(itertools.islice(self.turns, int(mixed.sum())), np.float64) * GOLDEN % 1
        first, second = self.mix["first"][group], self.mix["second"][group]
        if mask is not None:
            rows = np.arange(len(group))
            affordable = self.mix["mean_cost"] <= self.mix["budgets"][group][:, None]
            instead = _pick(np.where(affordable, self.mix["mean_accuracy"], -np.inf), self.mix["mean_cost"], mask)
            has_first, has_second = mask[rows, first], mask[rows, second]
            first = np.where(has_first, first, np.where(has_second, second, instead))
            second = np.where(has_second, second, first)
        return np.where(self.deployed[group], chosen, np.where(place < self.mix["share"][group], second, first))

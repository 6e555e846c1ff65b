"""A deployed controller: everything learned or calibrated is in its arrays, the rules are here.

On a machine that is not as fast as the profile's, latencies drift: measured ln ms = expected ln ms
+ offset, with a spread that is `scale` times the expected one. A decision that is given
`drift=(offset, scale)` divides its budget by e^(mean offset).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import (
    MOST_MS,
    Array,
    Arrays,
    below,
    digest_of,
    header_of,
    log_softmax,
    named_values,
    read_arrays,
)
from .guard import Guard
from .mean_budgets import MeanBudgets
from .network import Heads, LatencyModel, Normaliser, places_of
from .static import Static

FORMAT = "knobwise.NumpyController/3"
AT_ONCE = 2048
"""Number of requests that are decided together, so that many need little memory."""

Drift = tuple[Any, float]
"""The offset of ln ms, a number or float [C], and the factor on its spread, above 0."""
Expected = tuple[int, float, float]
"""The index of a configuration, and the expected mean and standard deviation of its ln ms, without
drift; NaN where nothing is expected."""


class NumpyController:
    """Decides for requests by the arrays of an exported file.

    Args:
        arrays: by name; `header` is JSON as bytes.

    Attributes:
        header: what the JSON holds.
        digest: of all arrays; controllers with the same digest decide alike.
        knobs: the values of each knob, by name.
        configurations: int64 [C, K], for each configuration the index of each knob's value.
        feature_sizes: the widths of the feature blocks that it reads, by name.
        datasets: the columns of the block `dataset` if that is an input, else [].
        guard, static: per budget what the policy does, and what it falls back to; or None.
        mean: the calibrated mean budgets, or None under deadlines.

    Raises:
        ValueError: `knobwise export` did not write the arrays, or they have changed since.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.header = header_of(arrays, FORMAT)
        content = digest_of(arrays)
        if bytes(arrays.get("digest", content)) != content:
            raise ValueError("is damaged (its checksum does not match); export it again")
        for name, array in arrays.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise ValueError(f"{name} holds NaN; train again")
        self.digest = content.hex()[:16]
        self.knobs: dict[str, tuple[Any, ...]] = {}
        for name, values in self.header["knobs"]:
            self.knobs[name] = tuple(values)
        self.configurations = arrays["configurations"]
        self.feature_sizes: dict[str, int] = self.header["features"]
        self.datasets: list[str] = self.header["datasets"]
        self._named = named_values(self.knobs, self.configurations)
        self._names = tuple(self.feature_sizes)
        self._widths = tuple(self.feature_sizes.values())
        self._normaliser = Normaliser(below(arrays, "normaliser."), self.header["clip"])
        places = places_of(self.configurations) if self.header["heads"] == "knobs" else None
        network = below(arrays, "network.")
        self._heads = Heads(network, self.header, self._normaliser, places)
        self._values = arrays.get("values")
        self._latency = LatencyModel(below(arrays, "latency."))
        self.guard: Guard | None = None
        self.static: Static | None = None
        if self.header["guard"]:
            self.guard = Guard(below(arrays, "guard."))
            self.static = Static.restored(below(arrays, "static."))
        self.mean = MeanBudgets(below(arrays, "mean.")) if self.header["limit"] == "mean" else None
        self._try()

    @classmethod
    def load(cls, path: str | Path) -> NumpyController:
        """Read a file without executing anything in it.

        Raises:
            ValueError: `knobwise export` did not write the file.
            OSError: it cannot be read.
        """
        try:
            return cls(read_arrays(path))
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:  # zipfile's name no file
                raise
            words = f"is damaged ({error!r})"
            if isinstance(error, ValueError):
                words = " ".join(str(error).split())
            raise ValueError(f"{path}: {words}") from error

    def _try(self) -> None:
        """Decide at each calibrated budget, so that arrays that do not fit together fail now."""
        budgets = np.ones(1)
        if self.guard is not None:
            budgets = self.guard.budgets_ms
        if self.mean is not None:
            budgets = self.mean.budgets_ms
        if self.header["limit"] == "worths":
            budgets = np.ones((1, 2))
        drift = None
        if self.header["limit"] == "budget_ms":
            drift = np.zeros(len(self._named)), 1.0
        for value in (0.0, np.nan):
            blocks = {}
            for name, width in self.feature_sizes.items():
                blocks[name] = np.full((len(budgets), width), value, np.float32)
            chosen = self.choose_expected(blocks, budgets, None, drift)[0].tolist()
            if budgets.ndim == 1:
                row = {name: block[0] for name, block in blocks.items()}
                chosen += [self.decide_index(row, budget, drift) for budget in budgets.tolist()]
            for index in chosen:
                self.configuration(index)
        if self.mean is not None:
            self.mean.turns = itertools.count(1)

    # -- one request -------------------------------------------------------------------------------

    def configuration(self, index: int) -> dict[str, Any]:
        """Return the knob values of configuration `index`, by knob name."""
        return dict(self._named[index])

    def decide(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None = None) -> dict[str, Any]:
        """Return knob values by name for one request: blocks [d] and a budget in ms.

        Raises:
            ValueError: a block is missing or has another shape, the budget is not positive and
                finite, a mean budget is not calibrated, the drift has another shape, is not finite,
                or is for a mean budget, or the controller is for pairs of worths.
        """
        return self.configuration(self.decide_index(features, budget_ms, drift))

    def decide_index(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None = None) -> int:
        """Return the same as the index of a configuration."""
        raw = self._joined(features, budget_ms)
        fixed = self._fixed(budget_ms, drift)
        if fixed is not None:
            return fixed
        return self._heads.single(raw, self._limit(budget_ms, drift), self._by_value(drift))

    def decide_expected(self, features: Mapping[str, Array], budget_ms: float, drift: Drift | None = None) -> Expected:
        """Return the same with the expected mean and standard deviation of its ln ms.

        Raises:
            ValueError: as `decide`, and for a mean budget.
        """
        if self.header["limit"] != "budget_ms":
            raise ValueError("a controller for mean budgets expects no latency of single answers")
        raw = self._joined(features, budget_ms)
        fixed = self.fall_back(budget_ms, drift)
        if fixed is not None:
            return fixed
        limit = self._limit(budget_ms, drift)
        index, x = self._heads.single_and_features(raw, limit, self._by_value(drift))
        return index, *self._latency.single(x, index)

    def expected_of(self, features: Mapping[str, Array] | None, index: int) -> Expected:
        """Return a configuration with the expected mean and standard deviation of its ln ms,
        without features by what static knows."""
        if features is None:
            assert self.static is not None
            return index, float(self.static.log_latency[index]), float(self.static.spread[index])
        raw = self._joined(features, 1.0)
        return index, *self._latency.single(self._normaliser(raw[None])[0], index)

    def near_best(
        self,
        features: Mapping[str, Array] | None,
        budget_ms: float,
        loss: float,
        drift: Drift | None = None,
    ) -> list[int]:
        """Return the configurations that are expected to lose at most `loss` utility.

        The policy was taught softmax(sharpness · utility), so these are those whose log-probability
        is at most sharpness · loss below the highest; without features those that static knows.
        """
        if features is None:
            assert self.static is not None
            limits = np.array([budget_ms * self._factor(drift)])
            worth = self.static.mean_utility(limits)[0]
        else:
            blocks = {name: np.asarray(block)[None] for name, block in features.items()}
            log_probs = self.log_probs(blocks, np.array([budget_ms]), None, drift)[0]
            worth = log_probs / self.header["sharpness"]
        return np.flatnonzero(worth >= worth.max() - loss).tolist()

    def fall_back(self, budget_ms: float, drift: Drift | None = None) -> Expected | None:
        """Return the decision where it needs no features, else None.

        There the guard falls back to budget-aware static, or under a mean budget to the static mix.
        """
        fixed = self._fixed(budget_ms, drift)
        if fixed is None:
            return None
        if self.static is None:
            return fixed, math.nan, math.nan
        return fixed, float(self.static.log_latency[fixed]), float(self.static.spread[fixed])

    def _fixed(self, budget_ms: float, drift: Drift | None) -> int | None:
        """Return the configuration that is chosen whatever the features are, or None."""
        if self.mean is not None:
            self._factor(drift)  # which refuses any
            return self.mean.fall_back(budget_ms)
        if self.guard is None or self.guard.never_falls_back:
            return None
        limit = budget_ms * self._factor(drift)
        if self.guard.single(limit)[1]:
            return None
        assert self.static is not None
        return self.static.single(limit)

    def _limit(self, budget_ms: float, drift: Drift | None) -> float:
        """Return what the network reads: what is planned with of a budget, or a worth, in ms."""
        if self.mean is not None:
            return float(self.mean.worths[self.mean.single(budget_ms)])
        limit = budget_ms * self._factor(drift)
        return limit if self.guard is None else limit * self.guard.single(limit)[0]

    def _factor(self, drift: Drift | None) -> float:
        """Return what a drift multiplies budgets by: e^(−mean offset)."""
        if drift is None:
            return 1.0
        offset, scale = drift
        if getattr(offset, "ndim", 0):
            mean = float(offset.mean()) if offset.shape == (len(self._named),) else math.nan
        else:
            mean = float(offset)
        deadlines = self.header["limit"] == "budget_ms"
        if not (deadlines and math.isfinite(mean) and 0 < scale < math.inf):
            raise ValueError(
                f"a drift of {drift}: must be a finite offset, a number or [{len(self._named)}], "
                "and a scale above 0, for a controller under deadlines"
            )
        return math.exp(min(max(-mean, -20.0), 20.0))

    def _joined(self, features: Mapping[str, Array], budget_ms: float) -> Array:
        """Return the features of one request, float32 [d]."""
        if self.header["limit"] == "worths":
            raise ValueError("a controller for pairs of worths decides many requests, by choose")
        if not 0 < budget_ms < MOST_MS:
            raise ValueError(f"a budget of {budget_ms}: must be positive and finite, in ms")
        blocks = [features[name] for name in self._names if name in features]
        if tuple(map(len, blocks)) != self._widths:
            raise ValueError(self._wrong(features))
        if not blocks:
            return np.zeros(0, np.float32)
        raw = np.concatenate(blocks, dtype=np.float32)
        if raw.ndim != 1:
            raise ValueError(self._wrong(features))
        return raw

    # -- many requests -----------------------------------------------------------------------------

    def choose(
        self,
        features: Mapping[str, Array],
        limits: Array,
        mask: Array | None = None,
        drift: Drift | None = None,
    ) -> NDArray[np.int64]:
        """Return configurations int64 [n] for n requests.

        Args:
            features: blocks [n, d] by name.
            limits: budgets [n] in ms, or under weights pairs of worths [n, 2].
            mask: bool [n, C], what may be chosen; None for everything.
            drift: as in `decide`.

        Raises:
            ValueError: as `decide`, and if the mask has another shape or leaves a request nothing.
        """
        raw, limits, mask = self._checked(features, limits, mask)
        factor = self._factor(drift)
        chosen = np.zeros(len(limits), np.int64)
        for first in range(0, len(limits), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            allowed = None if mask is None else mask[part]
            under = limits[part] * factor
            chosen[part] = self._chosen(raw[part], under, allowed, self._by_value(drift))
        return chosen

    def choose_expected(
        self,
        features: Mapping[str, Array],
        limits: Array,
        mask: Array | None = None,
        drift: Drift | None = None,
    ) -> tuple[NDArray[np.int64], Array, Array]:
        """Return the same with expected means and standard deviations of ln ms, [n] each."""
        chosen = self.choose(features, limits, mask, drift)
        if self.mean is not None:
            unknown = np.full(len(chosen), np.nan)
            return chosen, unknown, unknown
        raw, limits, _ = self._checked(features, limits, None)
        rows = np.arange(len(chosen))
        mean = self._latency.means(self._normaliser(raw))[rows, chosen].astype(np.float64)
        spread = self._latency.spread[chosen].astype(np.float64)
        if self.guard is not None and self.static is not None:
            groups = self.guard.groups(limits * self._factor(drift))
            deployed = self.guard.deploy[groups]
            mean = np.where(deployed, mean, self.static.log_latency[chosen])
            spread = np.where(deployed, spread, self.static.spread[chosen])
        return chosen, mean, spread

    def log_probs(
        self,
        features: Mapping[str, Array],
        limits: Array,
        mask: Array | None = None,
        drift: Drift | None = None,
    ) -> Array:
        """Return the policy's log-probabilities [n, C]; −inf outside the mask.

        They ignore where the guard falls back. Arguments and errors as in `choose`.
        """
        raw, limits, mask = self._checked(features, limits, mask)
        read = self._read(limits * self._factor(drift))
        by_value = self._by_value(drift)
        return log_softmax(self._heads.scores(self._normaliser(raw), read, by_value), mask)

    def reads_features(self, limits: Array) -> Array:
        """Return whether it reads features under each of these limits [n], bool [n]."""
        if self.mean is not None:
            return self.mean.deployed[self.mean.groups(limits)]
        if self.guard is not None:
            return self.guard.deploy[self.guard.groups(limits)]
        return np.ones(len(limits), bool)

    def _by_value(self, drift: Drift | None) -> Array | None:
        """Return the drift of each knob value beyond the level, as the heads read it."""
        if drift is None or self._values is None or not getattr(drift[0], "ndim", 0):
            return None
        return self._values.dot(drift[0])

    def _chosen(self, raw: Array, limits: Array, mask: Array | None, by_value: Array | None) -> Array:
        """Return configurations [n] for requests that were checked."""
        scores = self._heads.scores(self._normaliser(raw), self._read(limits), by_value)
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        chosen = scores.argmax(1)
        if self.mean is not None:
            return self.mean.or_mix(chosen, self.mean.groups(limits), mask)
        if self.guard is None or self.guard.never_falls_back:
            return chosen
        assert self.static is not None
        deployed = self.guard.deploy[self.guard.groups(limits)]
        return np.where(deployed, chosen, self.static.choose({}, limits, mask))

    def _read(self, limits: Array) -> Array:
        """Return what the network reads under these limits, see `_limit`."""
        if self.mean is not None:
            return self.mean.worths[self.mean.groups(limits)]
        if self.guard is None:
            return limits
        return limits * self.guard.margin[self.guard.groups(limits)]

    def _checked(
        self, features: Mapping[str, Array], limits: Array, mask: Array | None
    ) -> tuple[Array, Array, Array | None]:
        """Return features float32 [n, d], limits float64 and the mask, or raise a ValueError."""
        limits = np.asarray(limits, np.float64)
        wanted = (2,) if self.header["limit"] == "worths" else ()
        if limits.shape[1:] != wanted or limits.ndim == 0:
            raise ValueError(f"budgets must have shape {('n', *wanted)}, got {limits.shape}")
        wrong = limits[~((limits > 0) & (limits < MOST_MS))]
        if len(wrong):
            raise ValueError(f"a budget of {wrong[0]}: must be positive and finite, in ms")
        n = len(limits)
        blocks = []
        for name in self._names:
            if name in features:
                blocks.append(np.asarray(features[name], np.float32))
        if [block.shape for block in blocks] != [(n, width) for width in self._widths]:
            raise ValueError(self._wrong(features, n))
        raw = np.concatenate(blocks, 1) if blocks else np.zeros((n, 0), np.float32)
        if mask is not None:
            mask = np.asarray(mask, bool)
            if mask.shape != (n, len(self._named)):
                shape = (n, len(self._named))
                raise ValueError(f"the mask must have shape {shape}, got {mask.shape}")
            if not mask.any(1).all():
                raise ValueError("the mask leaves a request without any configuration")
        return raw, limits, mask

    def _wrong(self, features: Mapping[str, Array], n: int | None = None) -> str:
        """Say which block is wrong."""
        wanted = {}
        for name, size in self.feature_sizes.items():
            wanted[name] = (size,) if n is None else (n, size)
        for name, shape in wanted.items():
            got = np.shape(features[name]) if name in features else "nothing"
            if got != shape:
                break
        return f"features: block {name!r} must have shape {shape}, got {got}; the controller reads {wanted}"

"""A deployed controller: everything learned or calibrated is in its arrays, the rules are here.

On a machine that is not as fast as the profile's, latencies drift: measured ln ms = expected ln ms
+ offset, with a spread that is `scale` times the expected one. A decision that is given
`drift=(offset, scale)` divides its budget by e^(mean offset).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import (
    Array,
    Arrays,
    as_limit,
    as_numbers,
    below,
    check_arrays,
    encode_request,
    read_arrays,
    short,
    with_inner,
)
from .budgets import RequestBudgets, SharedBudgets
from .calibrated import CalibratedMeanBudgets, Guard, Static
from .limits import CostBounds, CostLimits, Limits
from .network import Heads, Normaliser, one_hot_of
from .promise import LatencyModel, Promise, Promised
from .text import TextEncoder, is_text

FORMAT = "knobwise.NumpyController/5"
AT_ONCE = 2048
"""Number of requests that are decided together, so that many need little memory."""
MAX_MS = 1e30
"""Upper bound that budgets must stay below."""
Drift = tuple[Any, float] | None
"""The offset of ln ms, a number or float [C], and the factor on its spread, above 0; or None."""
Expected = tuple[int, float, float]
"""The index of a configuration, and the expected mean and standard deviation of its ln ms, without
drift; NaN where nothing is expected."""


class NumpyController:
    """Decides for requests by the arrays of an exported file, whose `header` is JSON as bytes.
    Raises a ValueError if `knobwise export` did not write them, or they have changed since.

    Attributes:
        header: the content of the JSON.
        digest: of all arrays; controllers with the same digest decide alike.
        unit: of budgets: ms, or that of a cost that is no time, such as USD.
        knobs: the values of each knob, by name.
        configurations: int64 [C, K], for each configuration the index of each knob's value.
        feature_sizes: the widths of the feature blocks that it reads, by name.
        columns: of the block `features` if they have names, else []: the name of each, its texts
            (None for a number), and whether it may be missing.
        datasets: the columns of the block `dataset` if that is an input, else [].
        texts: what makes a feature block of a text, by the name of both. Such a block is NaN if the
            text is unlike those of training; static then decides, where there is a guard, and so it
            does where a block without names lacks a number that no training sample lacked, or,
            with a promise, where a number is outside the range of training.
        guard, promise, static, mean: what was calibrated, each None where there is none.
        whole: int64, which of all columns of all blocks in a row no training sample lacked.
        low, high: float32 [columns], the range of training of each of these columns, widened by a
            margin; ∓∞ where there is none. None without a promise, or in files of earlier versions.
        budgets: what differs between kinds of budget.
        calibrated: `mean`, `promise` or `guard`, or None.
        latency: what answers are expected to take; the tracker compares it with what they take, and
            a promise restricts choices by it.
        limits: on further costs; guard and static were calibrated within those that were declared.
    """

    guard: Guard | None = None
    promise: Promise | None = None
    static: Static | None = None
    mean: CalibratedMeanBudgets | None = None

    def __init__(self, arrays: Arrays) -> None:
        self.header, self.digest = check_arrays(arrays, FORMAT)
        self.unit: str = self.header["unit"]
        self.knobs = {name: tuple(values) for name, values in self.header["knobs"]}
        self.configurations = arrays["configurations"]
        self.feature_sizes: dict[str, int] = self.header["features"]
        self.columns: list[Any] = self.header.get("columns", [])
        self.datasets: list[str] = self.header["datasets"]
        self.texts: dict[str, TextEncoder] = {}
        for number, name in enumerate(self.header.get("texts", [])):
            self.texts[name] = TextEncoder(below(arrays, f"texts.{number}."))
        self._named: list[dict[str, Any]] = []
        for row in self.configurations.tolist():
            pairs = zip(self.knobs.items(), row, strict=True)
            self._named.append({name: values[index] for (name, values), index in pairs})
        self._even = np.full(len(self._named), 1 / len(self._named), np.float32)  # for fast means
        self._widths = tuple(self.feature_sizes.values())
        starts = itertools.accumulate((0, *self._widths))
        begin = dict(zip(self.feature_sizes, starts, strict=False))
        self._tiny = np.full(sum(self._widths), 1e-30, np.float32)  # no product is too large
        self._normaliser = Normaliser(below(arrays, "normaliser."), self.header["clip"])
        whole = np.ones(len(self._tiny), bool)
        whole[self._normaliser.gappy] = False
        for name, width in self.feature_sizes.items():
            columns = slice(begin[name], begin[name] + width)
            if name in self.texts:
                # all of it is NaN, or nothing
                whole[columns] = np.arange(width) == 0
            elif (name == "dataset" and self.datasets) or (name == "features" and self.columns):
                # named values have a rule of their own, see `encode_request`
                whole[columns] = False
        self.whole = np.flatnonzero(whole)
        self.low: Array | None = arrays.get("range.low")
        self.high: Array | None = arrays.get("range.high")
        by_knobs = self.header["heads"] == "knobs"
        one_hot = one_hot_of(self.configurations) if by_knobs else None
        self._heads = Heads(below(arrays, "network."), self.header, self._normaliser, one_hot)
        self._values = arrays.get("values")
        self.latency = LatencyModel(below(arrays, "latency."))
        # what was calibrated on held-out samples
        is_promised = self.header.get("promise", False)
        if self.header["guard"] or is_promised:
            self.static = static = Static(below(arrays, "static."))
            if self.header["guard"]:
                self.guard = Guard(below(arrays, "guard."), static)
            if is_promised:
                self.promise = Promise(below(arrays, "promise."), static)
        self.budgets = RequestBudgets(self.header["limit"] == "budget_ms")
        if self.header["limit"] == "mean":
            self.mean = CalibratedMeanBudgets(below(arrays, "mean."), self.unit)
            self.budgets = SharedBudgets(self.mean)
        self.calibrated = self.mean or self.promise or self.guard
        bounds = None
        if "costs" in self.header and self.budgets.allows_drift:
            bounds = CostBounds(below(arrays, "costs."), self.header["costs"])
        self.limits = Limits(self.header.get("limits", {}), bounds)
        self._try()

    @classmethod
    def load(cls, path: str | Path) -> NumpyController:
        """Read a file without executing anything in it. Raises a ValueError if it is not from
        `knobwise export`, an OSError if it cannot be read."""
        try:
            return cls(read_arrays(path))
        except ValueError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
        except Exception as error:
            # errors of zipfile name no file
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise ValueError(f"{path}: is damaged ({error!r})") from error

    @property
    def trained_ms(self) -> Array | None:
        """All budgets that it was asked to be calibrated for, also where a promise of a smaller one
        goes on; None for a controller that was calibrated for none."""
        if self.promise is not None:
            return self.promise.trained_ms
        return self.calibrated.budgets_ms if self.calibrated else None

    def _try(self) -> None:
        """Decide at each calibrated budget, so that arrays that do not fit together fail now."""
        budgets = self.calibrated.budgets_ms if self.calibrated else np.ones(1)
        drift = (np.zeros(len(self._named)), 1.0) if self.budgets.allows_drift else None
        for index in range(len(self._named)):
            self.latency.expected(index, np.zeros(self._heads.width))
        # all features 0, or as near to it as training; those missing (NaN) that may be, which takes
        # another way through the heads; and all, which static may decide on
        inside = np.zeros(len(self._tiny))
        if self.low is not None:
            inside = np.clip(inside, self.low, self.high)
        some = np.full_like(inside, np.nan)
        some[self.whole] = inside[self.whole]
        borders = np.cumsum(self._widths)[:-1]
        tried = inside, some, np.full_like(some, np.nan)
        for values, budget in itertools.product(tried, budgets.tolist()):
            request = dict(zip(self.feature_sizes, np.split(values, borders), strict=False))
            self.decide_index(request, budget, drift)
            many = {name: block[None] for name, block in request.items()}
            self.choose(many, np.array([budget]), None, drift)
        # the decisions above have used up turns
        self.budgets.start_over()

    def without_turns(self) -> NumpyController:
        """Return the controller whose static mix takes no turns, see `CalibratedMeanBudgets.usual`;
        for deadlines this one."""
        if self.mean is None:
            return self
        usual = copy.copy(self)
        usual.mean = usual.calibrated = self.mean.usual()
        usual.budgets = SharedBudgets(usual.mean)
        return usual

    def configuration(self, index: int) -> dict[str, Any]:
        """Return the knob values of configuration `index`, by knob name."""
        return dict(self._named[index])

    def decide(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
    ) -> dict[str, Any]:
        """Return knob values by name for one request: blocks [d] and a budget in ms, or in `unit`.
        The values of `columns` may be given by name instead of the block `features`, see
        `encode_request`. `limits` are on further costs; warns as `limits_note` says.

        Raises a ValueError if a block is missing, no numbers or has another shape, the budget is no
        number, not positive and finite, or as a mean not calibrated, the drift is not finite or
        not allowed, or a limit is not positive or on a cost that is not predicted."""
        if note := self.limits_note(features, limits):
            warnings.warn(note, stacklevel=2)
        return self.configuration(self.decide_index(features, budget_ms, drift, limits))

    def decide_index(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
    ) -> int:
        """Decide for one request, and return the index of a configuration; see `decide`."""
        if not isinstance(features, dict):
            features = self._blocks(features)
        if self.columns and "features" not in features:
            features = {**features, "features": encode_request(self.columns, features)}
        logs = self.limits.logs(limits)
        fixed, limit, raw = self._planned_for(features, budget_ms, drift, logs)
        return self._decided(raw, fixed, limit, drift, logs)[0]

    def decide_expected(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
        mask: Array | None = None,
    ) -> Expected:
        """Decide for one request, and return the choice with its expected latency.

        `mask`, bool [C], is what may be chosen, at least one configuration; None for everything.
        Raises a ValueError as `decide`."""
        logs = self.limits.logs(limits)
        fixed, limit, raw = self._planned_for(features, budget_ms, drift, logs, mask)
        index, x = self._decided(raw, fixed, limit, drift, logs, mask)
        return self.latency.expected(index, x) if fixed is None else self._by_static(index)

    def static_expected(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
        mask: Array | None = None,
    ) -> Expected:
        """Return what static or the static mix chooses within the limits and inside the mask, bool
        [C], also where the policy decides, with its expected latency; without either what the
        policy chooses."""
        turn = self.budgets.turn(budget_ms, mask)
        if turn is not None:
            return self._by_static(turn)
        if self.static is None:
            return self.decide_expected(features, budget_ms, drift, limits, mask)
        limit = budget_ms * self.factor(drift)
        logs = self.limits.logs(limits)
        index = self._unseen(limit, mask)
        raw = self._read(features, index, logs)
        return self._by_static(self._decided(raw, index, limit, drift, logs, mask)[0])

    def _unseen(self, limit: float, mask: Array | None = None) -> int:
        """Return what decides for a request that cannot be looked at, inside the mask bool [C]:
        with a promise what was most often on time, else static."""
        if self.promise is not None:
            return self.promise.safest(limit, mask)
        assert self.static is not None
        return self.static.single(limit, mask)

    def expected_of(self, features: Arrays, budget_ms: float, drift: Drift, index: int) -> Expected:
        """Return a configuration with its latency, as whoever decides this request expects it."""
        if self.decides_by_static(features, budget_ms, drift):
            return self._by_static(index)
        return self.latency.expected(index, self._normaliser(self._joined(features)[None])[0])

    def promised(self, limit_ms: float, drift: Drift = None) -> Promised | None:
        """Return what is promised of requests with so many ms left; None for a controller that
        makes no promises."""
        if self.promise is None:
            return None
        return self.promise.promised(limit_ms * self.factor(drift))

    def decides_by_static(self, features: Arrays, budget_ms: float, drift: Drift = None) -> bool:
        """Tell whether static or the static mix decides for the features of a request: where the
        guard falls back, and where they are unlike those of training, see `is_unlike`."""
        return self._planned_for(features, budget_ms, drift, None)[0] is not None

    def settled(self, budget_ms: float, drift: Drift = None) -> NumpyController:
        """Return the controller for a request with this budget: its guard has been asked, and says
        the same of whatever is left of the budget.

        A guard is calibrated for whole budgets, while the policy decides for what its decision and
        features leave of them, which may be nearer to the next smaller one. A controller without a
        guard is returned as it is. Raises a ValueError as `decide`."""
        if self.guard is None or self.calibrated is not self.guard:
            return self
        return self._with_guard[self._planned(budget_ms, drift)[0] is None]

    @functools.cached_property
    def _with_guard(self) -> dict[bool, NumpyController]:
        """The controllers that decide at every budget by the policy (True), or by static."""
        assert self.guard is not None
        controllers = {}
        for deployed in (False, True):
            controllers[deployed] = copy.copy(self)
            guard = self.guard.always(deployed)
            controllers[deployed].guard = controllers[deployed].calibrated = guard
        return controllers

    def fall_back(
        self,
        budget_ms: float,
        drift: Drift = None,
        limits: CostLimits = None,
        mask: Array | None = None,
    ) -> Expected | None:
        """Return the decision where the guard falls back to static or to the static mix, inside the
        mask, bool [C], if it needs no features; else None. Within limits static needs them if the
        costs depend on them."""
        fixed, limit = self._planned(budget_ms, drift, mask)
        if fixed is None:
            return None
        logs = self.limits.logs(limits)
        if logs is not None and self.limits.read_features:
            return None
        raw = self._even[:0]
        return self._by_static(self._decided(raw, fixed, limit, drift, logs, mask)[0])

    # -- limits on further costs -------------------------------------------------------------------

    def allowed(
        self, features: Arrays, n: int, limits: CostLimits = None, mask: Array | None = None
    ) -> tuple[Array | None, Array]:
        """Return what limits allow for blocks [n, d] inside the mask, bool [n, C], without limits
        the mask itself; and for which requests some configuration is expected to keep them, bool
        [n]. For the others the cheapest is allowed."""
        logs = self.limits.logs(limits)
        if logs is None:
            return mask, np.ones(n, bool)
        raw = self._checked(self._blocks(features), np.ones(n), None, None)[0]
        return self.limits.bounds.allowed(self._normaliser(raw), logs, mask)

    def limits_note(self, features: Any, limits: CostLimits = None) -> str:
        """Return what is to be said of the limits for a request, blocks [d], or n of them, [n, d]:
        that no configuration is expected to keep them, so that the cheapest is taken; and that
        guard and static were calibrated at others. "" for nothing. Without `features` costs must
        not depend on them."""
        if self.limits.logs(limits) is None:
            return ""
        many: Arrays = {name: np.zeros((1, width)) for name, width in self.feature_sizes.items()}
        if self.limits.read_features:
            blocks = self.with_blocks(self._blocks(features))
            if self.columns and "features" not in blocks:
                blocks = {**blocks, "features": encode_request(self.columns, blocks)}
            many = {name: np.atleast_2d(blocks.get(name, np.nan)) for name in self.feature_sizes}
        n = max(map(len, many.values()), default=1)
        fits = self.allowed(many, n, limits)[1]
        notes = []
        words = self.limits.words(limits)
        if not fits.all():
            which = f" for {(~fits).sum()} of {n} requests" * (n > 1)
            notes.append(
                f"no configuration is expected to keep {words}{which}; the cheapest is taken"
            )
        if self.calibrated is not None and words != self.limits.words():
            nearest = self.limits.words() or "no limits"
            notes.append(f"guard and static were calibrated at {nearest}, not at {words}")
        return "; ".join(notes)

    # -- what is unlike training -------------------------------------------------------------------

    def with_blocks(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return the features of a request with blocks in the place of texts. Raises a ValueError
        for what is neither."""
        blocks = dict(with_inner(features, self.texts))
        for name, encoder in self.texts.items():
            if name in blocks and is_text(blocks[name]):
                try:
                    blocks[name] = encoder(blocks[name])
                except ValueError as error:
                    raise ValueError(f"features: {name!r} {error}") from error
        return blocks

    def is_unlike(self, features: Mapping[str, Any]) -> bool:
        """Tell whether a request that was decided is unlike those of training, by its blocks [d]: a
        text is, or a block without names lacks a number that no training sample lacked, or a number
        is outside the range of training."""
        return bool(features) and self._is_odd(self._joined(features))

    def unlike(self, features: Arrays, n: int) -> NDArray[np.bool_]:
        """Return which of n requests are unlike those of training, by blocks [n, d], bool [n]; see
        `is_unlike`."""
        return self._odd(self._checked(self._blocks(features), np.ones(n), None, None)[0])

    def outside(self, features: Arrays, n: int) -> dict[str, NDArray[np.bool_]]:
        """Return which of n requests are outside the range of training, bool [n], by blocks [n, d]:
        by the names of the features in which any is."""
        if self.low is None or not n:
            return {}
        raw = self._checked(self._blocks(features), np.ones(n), None, None)[0]
        outside = self._outside(raw)
        labels = []
        for name, width in self.feature_sizes.items():
            named = self.columns if name == "features" else []
            # a word has a place for each that is known, and one for all others
            of_block = [column for column, words, _ in named for _ in range(len(words or ()) + 1)]
            labels += of_block or [f"{name}[{place}]" for place in range(width)]
        return {labels[i]: outside[:, i] for i in np.flatnonzero(outside.any(0)).tolist()}

    def _is_odd(self, raw: Array) -> bool:
        """Tell whether features float32 [d] lack what all training samples have, or are outside
        their range."""
        if self.low is not None and np.count_nonzero(self._outside(raw)):
            return True
        # hardly any request lacks a number, and a product shows it quickly
        return math.isnan(raw.dot(self._tiny)) and bool(self._odd(raw))

    def _odd(self, raw: Array) -> Any:
        """Do the same for features [*, d]: bool [*]."""
        odd = np.isnan(raw[..., self.whole]).any(-1)
        return odd if self.low is None else odd | self._outside(raw).any(-1)

    def _outside(self, raw: Array) -> Any:
        # nothing is true of NaN
        return (raw < self.low) | (raw > self.high)

    def _planned_for(
        self,
        features: Arrays,
        budget_ms: float,
        drift: Drift,
        log_limits: Array | None,
        mask: Array | None = None,
    ) -> tuple[int | None, float, Array]:
        """Return what `_planned` does, for a request unlike those of training what static chooses,
        where there is static; and what `_read` does."""
        fixed, limit = self._planned(budget_ms, drift, mask)
        raw = self._read(features, fixed, log_limits)
        if fixed is None and self.static is not None and self._is_odd(raw):
            limit = as_limit(budget_ms) * self.factor(drift)
            fixed = self._unseen(limit, mask)
        return fixed, limit, raw

    def _read(self, features: Arrays, fixed: int | None, log_limits: Array | None) -> Array:
        """Return the features of a request, float32 [d], if the choice depends on them; else none.
        `fixed` and `log_limits` are those of `_decided`."""
        if fixed is None or (log_limits is not None and self.limits.read_features):
            return self._joined(features)
        return self._even[:0]

    # -- what decides ------------------------------------------------------------------------------

    def _decided(
        self,
        raw: Array,
        fixed: int | None,
        limit: float,
        drift: Drift,
        log_limits: Array | None,
        mask: Array | None = None,
    ) -> tuple[int, Array]:
        """Decide for one request inside the mask, bool [C], within limits on further costs and
        within what a promise allows.

        Arguments are what `_read` and `_planned` returned; the drift; and the limits, see
        `Limits.logs`. Returns the index of a
        configuration, and the normalised features if they were read."""
        if fixed is not None and log_limits is None:
            # it is inside the mask, and a promise restricts the policy alone
            return fixed, self._even[:0]
        x = np.empty(self._heads.width, np.float32)
        by_value = self._by_value(drift)
        index = fixed
        if index is None:
            index = self._heads.single(raw, limit, by_value, x)
        allowed = mask
        if log_limits is not None:
            if fixed is not None and self.limits.read_features:
                x = self._normaliser(raw[None])[0]
            allowed = self.limits.bounds.allowed_single(x, log_limits, mask)
        if fixed is None and self.promise is not None:
            needed = self.promise.needed_single(limit)
            allowed_here = allowed is None or allowed[index]
            if allowed_here and self.latency.fits(index, x, limit, needed, drift):
                return index, x
            allowed = self.latency.within(x, limit, needed, allowed, drift)
        # the best of all is the best of those that are allowed, if it is one of them
        if allowed is None or allowed[index]:
            return index, x
        if fixed is None or self.static is None:
            return self._best_of(allowed, x, limit, by_value), x
        return self._unseen(limit, allowed), x

    def _best_of(self, mask: Array, x: Array, limit: float, by_value: Array | float) -> int:
        """Return the configuration with the best score inside the mask, bool [C], for normalised
        features [width], the limit that `_planned` returned, and the drift of knob values."""
        scores = self._heads.scores(x[None], np.array([limit]), by_value)[0]
        return int(np.where(mask, scores, -np.inf).argmax())

    def _by_static(self, index: int) -> Expected:
        """Return a configuration with the latency that static expects of it."""
        if self.static is None:
            return index, math.nan, math.nan
        return self.static.expected(index)

    def _planned(
        self, budget_ms: float, drift: Drift, mask: Array | None = None
    ) -> tuple[int | None, float]:
        """Return the configuration inside the mask, bool [C], that is chosen for any features, or
        None; and the limit in ms that the network reads: the part of a budget that is planned with,
        or 1/price."""
        if type(budget_ms) is not float:
            budget_ms = as_limit(budget_ms)
        if not 0 < budget_ms < MAX_MS:
            raise self._refused(budget_ms)
        limit = budget_ms * self.factor(drift)
        if self.calibrated is None:
            return None, limit
        return self.calibrated.single(limit, mask)

    def factor(self, drift: Drift) -> float:
        """Return the factor of a drift on budgets: e^(−mean offset)."""
        if drift is None:
            return 1.0
        offset, scale = drift
        mean = math.nan
        if not getattr(offset, "ndim", 0):
            mean = float(offset)
        elif offset.shape == self._even.shape:
            mean = float(offset.dot(self._even))
        if not (self.budgets.allows_drift and math.isfinite(mean) and 0 < scale < math.inf):
            raise ValueError(
                f"a drift of {drift}: must be a finite offset, a number or [{len(self._named)}], "
                "and a scale above 0, for a controller under deadlines"
            )
        return math.exp(min(max(-mean, -20.0), 20.0))

    def _joined(self, features: Arrays) -> Array:
        """Return the features of one request, float32 [d]."""
        if self.texts:
            features = self.with_blocks(self._blocks(features))
        try:
            blocks = [features[name] for name in self.feature_sizes if name in features]
            if tuple(map(len, blocks)) == self._widths:
                raw = np.concatenate(blocks or [self._even[:0]], dtype=np.float32)
                # a product is quick, and finite unless a number is infinite or missing
                finite = math.isfinite(raw.dot(self._tiny)) or not np.isinf(raw).any()
                if raw.ndim == 1 and finite:
                    return raw
        except (AttributeError, RuntimeError, TypeError, ValueError):
            # no arrays; tensors with gradients come here too
            pass
        # a request that does not fit is refused in words, as one of many
        many = {}
        for name, block in self._blocks(features).items():
            many[name] = as_numbers(f"features: block {name!r}", block, True)[None]
        return self._checked(many, np.ones(1), None, None)[0][0]

    def choose(
        self,
        features: Arrays,
        limits: Array,
        mask: Array | None = None,
        drift: Drift = None,
        random: np.random.Generator | None = None,
        cost_limits: CostLimits = None,
    ) -> NDArray[np.int64]:
        """Return configurations int64 [n] for blocks [n, d] by name and budgets [n] in ms.

        `mask`, bool [n, C], is what may be chosen; None for everything. `cost_limits` restrict it
        further; where none of it keeps them, the cheapest is taken. With `random` they are
        drawn from the policy, and where the guard falls back they stay what static chooses. Raises
        a ValueError, as in `decide`, also if the mask has another shape or leaves a request
        nothing."""
        raw, limits, mask = self._checked(self._blocks(features), limits, mask, drift)
        logs = self.limits.logs(cost_limits)
        if logs is not None:
            mask, _ = self.limits.bounds.allowed(self._normaliser(raw), logs, mask)
        chosen = np.zeros(len(limits), np.int64)
        for first in range(0, len(limits), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            allowed = None if mask is None else mask[part]
            scores = self._scores(raw[part], limits[part], allowed, drift)
            if random is not None:
                # with this noise the largest score is a draw from their softmax
                scores = scores + random.gumbel(size=scores.shape)
            best = scores.argmax(1)
            if self.calibrated is not None:
                best = self.calibrated.with_fallback(best, limits[part], allowed)
            judged = self.whole.size or self.low is not None
            if judged and self.calibrated is not None and self.static is not None:
                unlike = self._odd(raw[part])
                # a configuration for all requests is that for these, too
                unlike &= self.calibrated.reads_features(limits[part])
                for row in np.flatnonzero(unlike):
                    may = None if allowed is None else allowed[row]
                    best[row] = self._unseen(float(limits[part][row]), may)
            chosen[part] = best
        return chosen

    def log_probs(
        self, features: Arrays, limits: Array, mask: Array | None = None, drift: Drift = None
    ) -> Array:
        """Return the policy's log-probabilities [n, C], −inf outside the mask, also where the guard
        falls back. Arguments and errors as in `choose`."""
        raw, limits, mask = self._checked(features, limits, mask, drift)
        scores = self._scores(raw, limits, mask, drift)
        # the largest score becomes 0, so that no exponential overflows
        scores -= scores.max(1, keepdims=True)
        return scores - np.log(np.exp(scores).sum(1, keepdims=True))

    def reads_features(self, limits: Array) -> Array:
        """Return where it reads features, by limits [n]: bool [n]."""
        limited = self.limits.logs() is not None
        if self.calibrated is None or (limited and self.limits.read_features):
            return np.ones(len(limits), bool)
        return self.calibrated.reads_features(limits)

    def _by_value(self, drift: Drift) -> Array | float:
        """Return the drift of each knob value beyond the level, as the heads read it."""
        if drift is None or self._values is None or not getattr(drift[0], "ndim", 0):
            return 0.0
        return self._values.dot(drift[0])

    def _scores(self, raw: Array, limits: Array, mask: Array | None, drift: Drift) -> Array:
        """Return scores [n, C] for requests that were checked, −inf outside the mask."""
        x = self._normaliser(raw)
        if self.promise is not None:
            needed = self.promise.needed(limits)
            mask = self.latency.within(x, self.promise.planned(limits), needed, mask, drift)
        if self.calibrated is not None:
            limits = self.calibrated.planned(limits)
        scores = self._heads.scores(x, limits, self._by_value(drift))
        return scores if mask is None else np.where(mask, scores, -np.inf)

    def _checked(
        self, features: Arrays, limits: Array, mask: Array | None, drift: Drift
    ) -> tuple[Array, Array, Array | None]:
        """Check a call, and return features float32 [n, d], limits float64 divided by the mean
        drift of the machine, and the mask. Raises a ValueError for impossible shapes and values."""
        limits = as_numbers("budgets", limits).astype(np.float64)
        if limits.ndim != 1:
            raise ValueError(f"budgets must have shape ('n',), got {limits.shape}")
        wrong = limits[~((limits > 0) & (limits < MAX_MS))]
        if len(wrong):
            raise self._refused(wrong[0])
        n = len(limits)
        blocks = [np.zeros((n, 0), np.float32)]
        for name, width in self.feature_sizes.items():
            values = as_numbers(f"features: block {name!r}", features.get(name, np.nan), True)
            # what is too large becomes infinite
            with np.errstate(over="ignore"):
                block = values.astype(np.float32, copy=False)
            if np.isinf(block).any():
                raise ValueError(
                    f"features: block {name!r} holds infinite numbers; write NaN for what is "
                    "missing"
                )
            if block.shape != (n, width):
                raise ValueError(
                    f"features: block {name!r} must have shape {(n, width)}, got "
                    f"{block.shape if name in features else 'nothing'}; the controller reads "
                    f"{self.feature_sizes}"
                )
            blocks.append(block)
        if mask is not None:
            mask = np.asarray(mask, bool)
            shape = (n, len(self._named))
            if mask.shape != shape:
                raise ValueError(f"the mask must have shape {shape}, got {mask.shape}")
            if not mask.any(1).all():
                raise ValueError("the mask leaves a request without any configuration")
        return np.concatenate(blocks, 1), limits * self.factor(drift), mask

    def _blocks(self, features: Any) -> Arrays:
        """Return features as they are if they are named; None where it reads none."""
        if features is None and not self.feature_sizes:
            return {}
        if isinstance(features, Mapping):
            return features
        raise ValueError(
            f"features must be blocks by name, {self.feature_sizes}, not {short(features)}"
        )

    def _refused(self, budget_ms: float) -> ValueError:
        return ValueError(f"a budget of {budget_ms}: must be positive and finite, in {self.unit}")

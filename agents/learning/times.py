"""What the answers of a log took, or cost, setting by setting, beside what was expected of them:
whether a setting became slower, since when, and how many more answers would tell.

An answer that nobody waited for took longer than its row says. Medians count it as endless, and if
one comes out endless, that of the times until clients left is the least that it can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from knobwise.agents.deployed.arrays import Array
from knobwise.agents.learning.acceptance import CHANCE, FEW, MAX_RATIO
from knobwise.common.words import setting

CHANGED = 1.25
"""A setting whose answers take so many times as long as expected, or as short, has changed."""
STEP = 5.0
"""How many standard errors the answers after a moment must differ from those before it, so that the
change began there. It is the largest of many differences."""
KNOWN = 1.1
"""A factor is known if its 95 % interval reaches no further than so many times above and below."""
NORMAL = 1.2533
"""The standard error of a median is so many times that of a mean."""


class SettingTimes(NamedTuple):
    """The times of the answers of a setting, or what they cost."""

    setting: str
    answers: int
    """Those that the other fields are about: all, or since the change."""
    since: float | None
    """When its times changed, in s since 1970; None if they never did in this log."""
    left: int
    """How many of them nobody waited for."""
    at_least: bool
    """True if these are so many that factor and time are only known to be no less."""
    factor: float
    """Median of time / expected time."""
    error: float
    """Standard error of ln factor."""
    took: float
    """Median time, in the unit of the log."""
    more: int
    """How many answers more would make the factor known, see `KNOWN`; 0 where none would."""

    @property
    def off(self) -> bool:
        """True if it takes longer or shorter than expected, perhaps by chance."""
        return self._distance > math.log(CHANGED)

    @property
    def changed(self) -> bool:
        """True if it does by more than chance."""
        return self.off and self._distance > CHANCE * self.error

    @property
    def far(self) -> bool:
        """True if it changed by so much that an update waits for a person."""
        return self.changed and self._distance > math.log(MAX_RATIO)

    @property
    def _distance(self) -> float:
        """How far ln factor is from 0, at least."""
        distance = math.log(self.factor)
        return max(distance, 0.0) if self.at_least else abs(distance)


def times_by_setting(rows: Iterable[Mapping[str, Any]]) -> list[SettingTimes]:
    """Return the times of every setting that has `FEW` answers or more, the most frequent first.

    Args:
        rows: of a log, in time order. Expected is `log_latency` of a row, what the controller that
            decided expects without drift: by the profile and what updates learned since.
    """
    by_setting: dict[str, list[tuple[float, float, float, bool]]] = {}
    for row in rows:
        about = float(row["answer_ms"]), float(row["log_latency"]), float(row.get("time") or 0.0)
        seen = *about, bool(row.get("abandoned"))
        by_setting.setdefault(setting(row["knobs"]), []).append(seen)
    times = []
    for name, values in by_setting.items():
        if len(values) >= FEW:
            took, expected, moments, left = np.array(values).T
            times.append(_times(name, took, np.log(took) - expected, moments, left > 0))
    return sorted(times, key=lambda each: len(by_setting[each.setting]), reverse=True)


def _times(name: str, took: Array, ratios: Array, moments: Array, left: Array) -> SettingTimes:
    """Return the times of one setting: n times, ln(time / expected) and moments, in order, and
    which of them nobody waited for, so that they are no less, bool [n]."""
    # whoever leaves at a deadline says nothing of how times vary
    varying = ratios if left.sum() > len(left) - 2 else ratios[~left]
    spread = 1.4826 * float(np.median(np.abs(np.diff(varying)))) / math.sqrt(2)
    spread = max(spread, 1e-3)
    first = _changed_at(ratios, spread)
    after = slice(first, None)
    count = len(ratios[after])
    factor, at_least = _median(ratios[after], left[after])
    needed = math.ceil((1.96 * NORMAL * spread / math.log(KNOWN)) ** 2)
    return SettingTimes(
        setting=name,
        answers=count,
        since=float(moments[first]) if first else None,
        left=int(left[after].sum()),
        at_least=at_least,
        factor=math.exp(factor),
        error=NORMAL * spread / math.sqrt(count),
        took=_median(took[after], left[after])[0],
        more=0 if at_least else max(0, needed - count),
    )


def _median(values: Array, left: Array) -> tuple[float, bool]:
    """Return the median of values [n], those that are `left`, bool [n], counted as endless; or, if
    it is endless, the least that it can be, and True."""
    median = float(np.median(np.where(left, np.inf, values)))
    if math.isinf(median):
        return float(np.median(values)), True
    return median, False


def _changed_at(ratios: Array, spread: float) -> int:
    """Return the number of the answer from which on the ratios [n] differ most from those before
    it; 0 if that may be chance."""
    n = len(ratios)
    if n < 2 * FEW:
        return 0
    # a stall must not count as a change
    middle = float(np.median(ratios))
    sums = np.cumsum(np.clip(ratios, middle - 20 * spread, middle + 20 * spread))
    before = np.arange(FEW, n - FEW + 1)
    gaps = (sums[-1] - sums[before - 1]) / (n - before) - sums[before - 1] / before
    scores = np.abs(gaps) * np.sqrt(before * (n - before) / n) / spread
    best = int(scores.argmax())
    return int(before[best]) if scores[best] > STEP else 0

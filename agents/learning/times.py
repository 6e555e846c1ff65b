"""What the answers of a log took, or cost, setting by setting, beside what was expected of them:
whether a setting became slower, since when, and how many more answers would tell."""

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
    factor: float
    """Median of time / expected time."""
    error: float
    """Standard error of ln factor."""
    took: float
    """Median time, in the unit of the log."""
    more: int
    """How many answers more would make the factor known; see `KNOWN`."""

    @property
    def off(self) -> bool:
        """True if it takes longer or shorter than expected, perhaps by chance."""
        return abs(math.log(self.factor)) > math.log(CHANGED)

    @property
    def changed(self) -> bool:
        """True if it does by more than chance."""
        return self.off and abs(math.log(self.factor)) > CHANCE * self.error

    @property
    def far(self) -> bool:
        """True if it changed by so much that an update waits for a person."""
        return self.changed and abs(math.log(self.factor)) > math.log(MAX_RATIO)


def times_by_setting(rows: Iterable[Mapping[str, Any]]) -> list[SettingTimes]:
    """Return the times of every setting that has `FEW` answers or more, the most frequent first.

    Args:
        rows: of a log, in time order. Expected is `log_latency` of a row, what the controller that
            decided expects without drift: by the profile and what updates learned since.
    """
    by_setting: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        seen = float(row["answer_ms"]), float(row["log_latency"]), float(row.get("time") or 0.0)
        by_setting.setdefault(setting(row["knobs"]), []).append(seen)
    times = []
    for name, values in by_setting.items():
        if len(values) >= FEW:
            took, expected, moments = np.array(values).T
            times.append(_times(name, took, np.log(took) - expected, moments))
    return sorted(times, key=lambda each: len(by_setting[each.setting]), reverse=True)


def _times(name: str, took: Array, ratios: Array, moments: Array) -> SettingTimes:
    """Return the times of one setting: n times, ln(time / expected) and moments, in order."""
    spread = 1.4826 * float(np.median(np.abs(np.diff(ratios)))) / math.sqrt(2)
    spread = max(spread, 1e-3)
    first = _changed_at(ratios, spread)
    after = ratios[first:]
    count = len(after)
    needed = math.ceil((1.96 * NORMAL * spread / math.log(KNOWN)) ** 2)
    return SettingTimes(
        setting=name,
        answers=count,
        since=float(moments[first]) if first else None,
        factor=math.exp(float(np.median(after))),
        error=NORMAL * spread / math.sqrt(count),
        took=float(np.median(took[first:])),
        more=max(0, needed - count),
    )


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

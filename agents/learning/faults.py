"""How often the settings of a log gave no answer, such as an error of the endpoint.

An update learns nothing from such requests, so a setting that fails often looks as good as its
answers are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.agents.learning.acceptance import FEW, MAX_LOSS
from knobwise.agents.learning.logged import of_choices
from knobwise.common.words import setting


class SettingFaults(NamedTuple):
    """A setting that gave no answer to some of its requests."""

    setting: str
    requests: int
    """Those that it was sent."""
    faults: int
    """Those that it gave no answer to."""

    @property
    def share(self) -> float:
        return self.faults / self.requests

    def __str__(self) -> str:
        return f"{self.setting}: no answer to {self.faults} of {self.requests} requests"


def faults_by_setting(attempts: Mapping[str, Counter[bool]]) -> list[SettingFaults]:
    """Return the settings that failed, those that failed most often first.

    Args:
        attempts: of `ReadLog`.
    """
    failed = [
        SettingFaults(name, counts.total(), counts[True])
        for name, counts in attempts.items()
        if counts[True]
    ]
    return sorted(failed, key=lambda each: (-each.share, -each.requests, each.setting))


def objections_to_faults(
    names: Sequence[Mapping[str, Any]],
    attempts: Mapping[str, Counter[bool]],
    old: Tensor,
    new: Tensor,
) -> list[str]:
    """Return a line for each setting that fails, if new choices would be without an answer more
    often than old ones, by more than what an update may lose; an empty list otherwise.

    Args:
        names: the knob values of each configuration.
        attempts: of `ReadLog`.
        old: int64 [n], the choices of the controller that serves.
        new: int64 [n], those of the one that is to take over.
    """
    counts = [attempts.get(setting(knobs), Counter[bool]()) for knobs in names]
    requests = torch.tensor([each.total() for each in counts], dtype=torch.float64)
    faults = torch.tensor([each[True] for each in counts], dtype=torch.float64)
    # what few requests say of a setting is drawn to the share of all settings
    overall = faults.sum() / requests.sum().clamp_min(1)
    shares = ((faults + FEW * overall) / (requests + FEW)).expand(len(old), -1)
    more = float((of_choices(shares, new) - of_choices(shares, old)).mean())
    if more <= MAX_LOSS:
        return []
    return [
        f"{100 * more:.1f} % more requests would get no answer",
        *map(str, faults_by_setting(attempts)),
    ]

"""Objections to a log, which may be wrong. A step of an update that meets one takes over only if a
person accepts it.

Wrong labels that look just like a real loss of accuracy cannot be told from one. So labels may move
decisions only as far as costs next to nothing if they are wrong and the profile is right. Times
meet an objection where a configuration's differ much from what those of all others imply for it,
and where their gain has passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from knobwise.agents.learning.adaptation import posterior
from knobwise.agents.learning.logged import Logged

MAX_LOSS = 0.005
"""The utility that a change may lose if the profile is right and the labels are wrong."""
FEW = 10
"""Fewer requests than this say nothing about a configuration."""
CONFIGURATIONS = 3
"""The least number of configurations whose labels a change may rest on."""
CHANCE = 3.0
"""Standard errors beyond which labels differ from the profile by more than chance."""
MAX_RATIO = 2.0
"""The largest factor between a configuration's times and what those of others imply for it."""


def objections_to_times(
    names: Sequence[Mapping[str, Any]], configurations: Tensor, choice: Tensor, ratios: Tensor
) -> list[str]:
    """Return a line for each configuration whose times contradict those of the others.

    Args:
        names: the knob values of each configuration.
        configurations: int64 [C, K].
        choice: int64 [n], the configurations of n answers.
        ratios: float [n], ln(time of the answer / time expected).
    """
    reasons = []
    for c in choice.unique().tolist():
        chosen = choice == c
        if chosen.sum() < FEW or chosen.all():
            continue
        implied = posterior(configurations, choice[~chosen], ratios[~chosen])
        gap = float(ratios[chosen].median() - implied.mean[c])
        if abs(gap) > max(math.log(MAX_RATIO), CHANCE * float(implied.variance[c]) ** 0.5):
            reasons.append(
                f"{names[c]}: its {int(chosen.sum())} answers took {math.exp(gap):.2g} times as "
                "long as the other configurations predict"
            )
    return reasons


def objections_to_labels(
    names: Sequence[Mapping[str, Any]], logged: Logged, accuracy: Tensor, loss: float
) -> list[str]:
    """Return why a change that rests on labels is doubtful; an empty list if it is not.

    Args:
        names: the knob values of each configuration.
        logged: labelled requests [n].
        accuracy: float64 [n], what the profile expects of these answers.
        loss: the utility that the change loses if the profile is right.
    """
    reasons = []
    counts = logged.choice.bincount(minlength=len(names))
    enough = int((counts >= FEW).sum())
    if enough < min(CONFIGURATIONS, len(names)):
        reasons.append(f"only {enough} configurations have {FEW} labels or more")
    # exploration draws anything else less often
    unexplored = int((logged.propensity.argmax(1) == logged.choice).sum())
    if unexplored < FEW:
        reasons.append(f"only {unexplored} answers that the controller chose itself have a label")
    if loss <= MAX_LOSS:
        return reasons
    reasons.append(f"if the profile is right, the change loses {100 * loss:.1f} points")
    rows = labels_by_configuration(names, logged, accuracy)
    return reasons + [str(row) for row in rows if row.contradicts]


class ConfigurationLabels(NamedTuple):
    """What the labels of a configuration say, beside what was expected of these answers."""

    knobs: Mapping[str, Any]
    labels: int
    accuracy: float
    """The mean of the labels."""
    expected: float
    contradicts: bool
    """True if the two differ beyond chance."""

    def __str__(self) -> str:
        return (
            f"the {self.labels} labels of {dict(self.knobs)} say accuracy {self.accuracy:.2f}, the "
            f"profile {self.expected:.2f}"
        )


def labels_by_configuration(
    names: Sequence[Mapping[str, Any]], logged: Logged, accuracy: Tensor
) -> list[ConfigurationLabels]:
    """Return what the labels of each configuration say, for those that have any; see
    `objections_to_labels`."""
    rows = []
    for c in logged.choice.unique().tolist():
        chosen = logged.choice == c
        labels = logged.accuracy[chosen]
        expected = accuracy[chosen]
        variance = (expected * (1 - expected)).sum().clamp_min(0.25)
        contradicts = abs(float((labels - expected).sum() / variance.sqrt())) > CHANCE
        rows.append(
            ConfigurationLabels(
                knobs=names[c],
                labels=len(labels),
                accuracy=float(labels.mean()),
                expected=float(expected.mean()),
                contradicts=contradicts,
            )
        )
    return rows

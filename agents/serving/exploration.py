"""Bounded exploration: now and then another configuration that is expected to do nearly as well."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from knobwise.agents.serving.numpy_controller import Arrays, Drift, Expected, NumpyController
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError

ON_TIME = 0.9
"""The least probability to be on time of a configuration that is tried, or that of the best choice if it is lower."""


class Drawn(NamedTuple):
    """How a configuration came to be chosen."""

    probability: float
    """Of the configuration under the policy that drew it, exactly."""
    chances: dict[int, float]
    """The same for every configuration that could have been drawn."""
    best: int
    """The choice without exploration."""


class Exploration:
    """With probability `share`, a configuration drawn uniformly from the set S of those that are expected to be on time
    and to lose at most `loss` utility; otherwise the best choice g. So the probability of c is
    (1 − share)·1[c = g] + share/|S|·1[c ∈ S].

    Args:
        share: ε, 0 to 1.
        loss: utility, in units of accuracy.
        seed: of the draws, None for another each time.

    Raises:
        InputError: a share outside [0, 1], a negative loss.
    """

    def __init__(self, share: float, loss: float, seed: int | None = None) -> None:
        if not 0 <= share <= 1:
            raise InputError(f"runtime: explore={share}: must be 0 to 1")
        at_least("runtime: explore_loss", loss, 0)
        self.share, self.loss, self._random = share, loss, random.Random(seed)

    def turn(self) -> bool:
        """Draw whether a request explores."""
        return self._random.random() < self.share

    def draw(
        self,
        controller: NumpyController,
        features: Arrays | None,
        budget_ms: float,
        drift: Drift | None,
        best: Expected,
        explores: bool,
    ) -> tuple[Expected, Drawn]:
        """The configuration to answer with, and its chances.

        Args:
            features: blocks [d]; None where the guard fell back to static, whose own expectations then count.
            best: the choice without exploration.
            explores: what `turn` drew.
        """
        score, meets, mean, spread = controller.prospects(features, budget_ms, drift)
        bar = min(ON_TIME, float(meets[best[0]]))
        places = np.flatnonzero((meets >= bar) & (score >= score.max() - self.loss)).tolist() or [best[0]]
        chosen = best
        if explores:
            index = self._random.choice(places)
            chosen = index, float(mean[index]), float(spread[index])
        chances = dict.fromkeys(places, self.share / len(places))
        if self.share < 1:
            chances[best[0]] = chances.get(best[0], 0.0) + 1 - self.share
        return chosen, Drawn(chances[chosen[0]], chances, best[0])

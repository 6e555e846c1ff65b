"""Bounded exploration: draws which requests get a random configuration."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from knobwise.agents.policy.arrays import Arrays
from knobwise.agents.policy.controller import Drift, Expected, NumpyController
from knobwise.common import checks


class Drawn(NamedTuple):
    """The chances that a configuration was drawn with."""

    chances: dict[int, float]
    """The probability of every configuration that could have been drawn."""
    best: int
    """The choice of the controller."""


class Exploration:
    """Draws which requests are explored, and their configurations.

    With probability ε the configuration is drawn uniformly from the set S of those that are
    expected to lose at most `loss` utility, by the policy's own probabilities; else the controller
    decides, with the choice g. So the probability of c is (1 − ε)·1[c = g] + ε/|S|·1[c ∈ S].

    Args:
        share: ε, 0 to 1.
        loss: utility, in units of accuracy.
        seed: of the draws, None for another each time.

    Raises:
        InputError: a share outside [0, 1], a negative loss.
    """

    def __init__(self, share: float, loss: float, seed: int | None = None) -> None:
        checks.share("runtime: explore", share)
        checks.at_least("runtime: explore_loss", loss, 0)
        self.share = share
        self.loss = loss
        self._random = random.Random(seed)

    def turn(self) -> bool:
        """Draw whether the next request is explored; nothing is drawn where the share is 0."""
        return self.share > 0 and self._random.random() < self.share

    def draw(
        self,
        controller: NumpyController,
        features: Arrays | None,
        budget_ms: float,
        drift: Drift | None,
        decided: Expected,
        explores: bool,
    ) -> tuple[Expected, Drawn]:
        """Return the configuration to answer with, its expected latency, and its chances.

        The configuration changes only if the request is explored; otherwise this may wait until
        the request is answered.

        Args:
            controller: the one that decided.
            features: blocks [d]; None where the guard fell back to static, whose own expectations
                then count.
            decided: the choice of the controller.
            explores: what `turn` drew.
        """
        best = decided[0]
        close = near_best(controller, features, budget_ms, self.loss, drift) or [best]
        if explores:
            decided = controller.expected_of(features, self._random.choice(close))
        # the terms of the formula above: ε/|S|, then 1 − ε
        chances = dict.fromkeys(close, self.share / len(close))
        chances[best] = chances.get(best, 0.0) + (1 - self.share)
        return decided, Drawn({index: c for index, c in chances.items() if c > 0}, best)


def near_best(
    controller: NumpyController,
    features: Arrays | None,
    budget_ms: float,
    loss: float,
    drift: Drift | None = None,
) -> list[int]:
    """Return the configurations that are expected to lose at most `loss` utility.

    The policy was taught softmax(sharpness · utility), so these are those whose log-probability is
    at most sharpness · loss below the highest; without features those that static knows.
    """
    if features is None:
        assert controller.static is not None
        worth = controller.static.mean_utility(np.array([budget_ms * controller.factor(drift)]))[0]
    else:
        blocks = {name: np.asarray(block)[None] for name, block in features.items()}
        log_probs = controller.log_probs(blocks, np.array([budget_ms]), None, drift)[0]
        # log-probabilities in units of utility
        worth = log_probs / controller.header["sharpness"]
    return np.flatnonzero(worth >= worth.max() - loss).tolist()

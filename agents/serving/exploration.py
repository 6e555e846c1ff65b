"""Bounded exploration, and the trial of a candidate: draws who decides a request."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

import numpy as np

from knobwise.agents.policy.arrays import Arrays
from knobwise.agents.policy.controller import Drift, Expected, NumpyController
from knobwise.common import checks

Turn = Literal["exploit", "explore", "trial"]


class Drawn(NamedTuple):
    """The chances that a configuration was drawn with."""

    probability: float
    """The exact probability of the configuration under the policy that drew it."""
    chances: dict[int, float]
    """The probability of every configuration that could have been drawn."""
    best: int
    """The choice of the controller that serves."""
    tried: int | None = None
    """The choice of the candidate on trial."""


class Exploration:
    """Draws who decides a request.

    With probability τ a candidate h decides, while one is on trial. Else with probability ε the
    configuration is drawn uniformly from the set S of those that are expected to lose at most
    `loss` utility, by the policy's own probabilities. Else the controller that serves, g, decides.
    So the probability of c is

        τ·1[c = h] + (1 − τ)·((1 − ε)·1[c = g] + ε/|S|·1[c ∈ S]).

    S bounds what exploration may lose by what the controller expects. A trial is bounded by τ
    alone: the candidate expects other outcomes than the controller, which is why it is tried.

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

    def turn(self, trial: float = 0.0) -> Turn:
        """Draw who decides a request; `trial` is τ, 0 without a candidate."""
        if trial and self._random.random() < trial:
            return "trial"
        if self._random.random() < self.share:
            return "explore"
        return "exploit"

    def draw(
        self,
        controller: NumpyController,
        features: Arrays | None,
        budget_ms: float,
        drift: Drift | None,
        decided: Expected,
        turn: Turn,
        candidate: NumpyController | None = None,
        trial: float = 0.0,
    ) -> tuple[Expected, Drawn]:
        """Return the configuration to answer with, its expected latency, and its chances.

        Only the turn "explore" changes the configuration; otherwise this may wait until the request
        is answered.

        Args:
            controller: the one that serves.
            features: blocks [d]; None where the guard fell back to static, whose own expectations
                then count.
            decided: the choice of `candidate` in a trial, or else of `controller`.
            turn: what `turn` drew.
            candidate, trial: the controller on trial and τ, if there is one.
        """
        if turn == "trial":
            best = _choice(controller, features, budget_ms, drift, decided[0])
        else:
            best = decided[0]
        close = near_best(controller, features, budget_ms, self.loss, drift) or [best]
        if turn == "explore":
            decided = controller.expected_of(features, self._random.choice(close))
        # the terms of the formula above: ε/|S|, then 1 − ε, then τ
        chances = dict.fromkeys(close, (1 - trial) * self.share / len(close))
        chances[best] = chances.get(best, 0.0) + (1 - trial) * (1 - self.share)
        tried = None
        if candidate is not None:
            if turn == "trial":
                tried = decided[0]
            else:
                tried = _choice(candidate, features, budget_ms, drift, best)
            chances[tried] = chances.get(tried, 0.0) + trial
        likely = {index: chance for index, chance in chances.items() if chance > 0}
        return decided, Drawn(likely[decided[0]], likely, best, tried)


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
        worth = log_probs / controller.header["sharpness"]
    return np.flatnonzero(worth >= worth.max() - loss).tolist()


def _choice(
    controller: NumpyController,
    features: Arrays | None,
    budget_ms: float,
    drift: Drift | None,
    other: int,
) -> int:
    """Return the choice of a controller.

    Without features, which the guard of the other controller left out, its own guard decides, or
    else the choice is that of the other controller.
    """
    if features is not None:
        return controller.decide_index(features, budget_ms, drift)
    fixed = controller.fall_back(budget_ms, drift)
    return other if fixed is None else fixed[0]

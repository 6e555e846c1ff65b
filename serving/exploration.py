"""Bounded exploration: draws which requests get a random configuration."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from knobwise.agents.deployed.arrays import Array, Arrays
from knobwise.agents.deployed.controller import Drift, NumpyController
from knobwise.common import checks


class Exploration:
    """Draws which requests are explored, and their configurations.

    With probability ε the configuration is drawn uniformly from the set S of those that are
    expected to lose at most `loss` utility, by the policy's own probabilities; else the controller
    decides, with the choice g. So the probability of c is (1 − ε)·1[c = g] + ε/|S|·1[c ∈ S].

    Where static decides and knows of nothing else within `loss`, S is its second choice alone, in a
    share q of these requests: such that they lose `loss` on average (`second_best`). Then ε·q takes
    the place of ε.

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
        # seeds of the system: processes that are forked from this one draw differently
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def should_explore(self) -> bool:
        """Decide at random whether to explore the next request; nothing is drawn if the share is
        0."""
        return self.share > 0 and self._random.random() < self.share

    def draw(self, best: int, close: Sequence[int], share: float = 1.0) -> int:
        """Draw the configuration of a request that is explored, from S in this share q of them;
        else it is `best`, g."""
        if share < 1 and self._random.random() >= share:
            return best
        return self._random.choice(close)

    def chances(self, best: int, close: Sequence[int], share: float = 1.0) -> dict[int, float]:
        """Return the probability of every configuration that a request could have got, where `best`
        is g, `close` is S and `share` is q."""
        # the terms of the formula above: ε/|S|, then 1 − ε
        drawn = self.share * share
        chances = dict.fromkeys(close, drawn / len(close))
        chances[best] = chances.get(best, 0.0) + (1 - drawn)
        return {index: chance for index, chance in chances.items() if chance > 0}


def near_best(
    controller: NumpyController,
    features: Arrays,
    limit_ms: float,
    drift: Drift,
    loss: float,
    mask: Array | None = None,
) -> list[int]:
    """Return the configurations that are expected to lose at most `loss` utility.

    The policy was taught softmax(sharpness · utility), so these are those whose log-probability is
    at most sharpness · loss below the highest; where static decides, those that static knows.

    Args:
        controller: the one that decides.
        features: blocks [d].
        limit_ms: what is left of the budget for the answer.
        drift: of latencies here.
        loss: utility, in units of accuracy.
        mask: bool [C], the configurations that may be chosen; None for all.
    """
    limits = np.array([limit_ms])
    if controller.decides_by_static(features, limit_ms, drift):
        assert controller.static is not None
        utility = controller.static.mean_utility(limits * controller.factor(drift), mask)[0]
    else:
        blocks = {name: np.asarray(block)[None] for name, block in features.items()}
        may = None if mask is None else mask[None]
        log_probs = controller.log_probs(blocks, limits, may, drift)[0]
        # log-probabilities in units of utility
        utility = log_probs / controller.header["sharpness"]
    return np.flatnonzero(utility >= utility.max() - loss).tolist()


def second_best(
    controller: NumpyController,
    best: int,
    limit_ms: float,
    drift: Drift,
    loss: float,
    mask: Array | None = None,
) -> tuple[int, float] | None:
    """Return what static would choose without `best`, and the share of the explored requests that
    may get it so that they lose `loss` utility on average; None if there is nothing else.

    Args as in `near_best`; no features, so that the probabilities of a request that is not explored
    are known without them.
    """
    assert controller.static is not None
    limits = np.array([limit_ms]) * controller.factor(drift)
    utility = controller.static.mean_utility(limits, mask)[0]
    others = utility.copy()
    others[best] = -np.inf
    second = int(others.argmax())
    lost = utility[best] - others[second]
    if not (np.isfinite(lost) and loss > 0):
        return None
    return second, float(loss / max(lost, loss))

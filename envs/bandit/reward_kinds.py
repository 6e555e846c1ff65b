"""The kinds of reward, and all that is to be known of each.

A new kind is a formula and an entry in `KINDS`. No other place asks for a kind by its name: the
settings, the command line (`reward=KIND`), its help, the environments, training and the teacher
read this dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # the command line reads this module, and starts without torch
    from torch import Tensor

    from knobwise.envs.bandit.settings import RewardConfig

    Formula = Callable[[Tensor, Tensor, Tensor, Tensor | float, RewardConfig], Tensor]


@dataclass(frozen=True)
class RewardKind:
    """A kind of reward.

    A formula takes accuracy, latency in ms, budget in ms (under a mean budget the value of a right
    answer), complexity in [0, 1], and the settings. Its tensors are float and broadcast; it returns
    the rewards of all decisions, NaN where accuracy or latency is, and changes no argument.
    """

    meaning: str
    """For the help."""
    formula: Formula | None
    """None: code of the user's own rewards, a function (`is_function`, see `RewardFunction`) or a
    rule, see `Rule`."""
    faster: Formula | None = None
    """The same in a form that computes faster, whose rewards are equal to the bit; None if the
    formula is fast enough, as a new one is."""
    reads: tuple[str, ...] = ()
    """The weights of `RewardConfig` that the formula reads."""
    constraint: str = "deadline"
    """The constraint of the budget that it goes with; `own` for rules of the user's own."""
    uses_complexity: bool = False
    """Without, complexity is 0."""
    judged_by: str = "utility"
    """By what the best weights are chosen: `utility`, or the `reward` itself."""
    learned_by_teacher: bool = False
    """Whether the teacher learns it. Otherwise the teacher learns utility, which is where training
    by this reward then starts."""
    is_function: bool = False
    """Whether the settings name a function."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What `reward=KIND` sets beside the kind."""


def utility(
    accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, _: Tensor | float, config: RewardConfig
) -> Tensor:
    """Compute α·accuracy if latency ≤ budget, else −miss."""
    reward = (config.alpha * accuracy).where(latency_ms <= budget_ms, -config.miss)
    return reward.masked_fill((accuracy + latency_ms).isnan(), math.nan)


def priced(
    accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, _: Tensor | float, config: RewardConfig
) -> Tensor:
    """Compute α·accuracy − latency/value; the budget is the value of a right answer, in ms."""
    return config.alpha * accuracy - latency_ms / budget_ms


def shaped(
    accuracy: Tensor,
    latency_ms: Tensor,
    budget_ms: Tensor,
    complexity: Tensor | float,
    config: RewardConfig,
) -> Tensor:
    """Compute α·accuracy − β·sigmoid(10·(latency/budget − 1)) − γ·(max(0, latency −
    budget)/budget)² − ε·complexity + δ·(1 − latency/budget if latency ≤ budget else 0).

    This is the formula of the original controller.
    """
    excess = latency_ms / budget_ms - 1
    return (
        config.alpha * accuracy
        - config.beta * (10 * excess).sigmoid()
        - config.gamma * excess.clamp_min(0).square()
        - config.epsilon * complexity
        - config.delta * excess.clamp_max(0)
    )


# -- the same, faster ------------------------------------------------------------------------------


def _faster_utility(
    accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, _: Tensor | float, config: RewardConfig
) -> Tensor:
    """Compute `utility` by products with 0 and 1, since a mask without a pattern is slow to choose
    by."""
    # 1 where late, however little, else 0; NaN where there is no latency
    late = (latency_ms - budget_ms).clamp_(0, 1).ceil_()
    weighted = _weighted(accuracy, config.alpha)
    reward = weighted.addcmul(weighted, late, value=-1)
    return reward.sub_(late, alpha=config.miss) if config.miss else reward


def _faster_shaped(
    accuracy: Tensor,
    latency_ms: Tensor,
    budget_ms: Tensor,
    complexity: Tensor | float,
    config: RewardConfig,
) -> Tensor:
    """Compute `shaped` in place, because new memory takes longer than the arithmetic."""
    excess = (latency_ms / budget_ms).sub_(1)
    return (
        _weighted(accuracy, config.alpha)
        .sub((10 * excess).sigmoid_().mul_(config.beta))
        .sub_(excess.clamp_min(0).square_().mul_(config.gamma))
        .sub(config.epsilon * complexity)
        .sub_(excess.clamp_max_(0).mul_(config.delta))
    )


def _weighted(accuracy: Tensor, alpha: float) -> Tensor:
    return accuracy if alpha == 1 else alpha * accuracy


KINDS = {
    "shaped": RewardKind(
        "the sum of the five terms below",
        shaped,
        faster=_faster_shaped,
        reads=("alpha", "beta", "gamma", "delta", "epsilon"),
        uses_complexity=True,
    ),
    "utility": RewardKind(
        "α·accuracy if the budget is met, else −`miss`",
        utility,
        faster=_faster_utility,
        reads=("alpha", "miss"),
        learned_by_teacher=True,
        settings={"miss": 0.2},
    ),
    "priced": RewardKind(
        "α·accuracy − λ·latency, under a mean budget only",
        priced,
        reads=("alpha",),
        constraint="mean",
        judged_by="reward",
        learned_by_teacher=True,
    ),
    "function": RewardKind("what `function` returns", None, judged_by="reward", is_function=True),
    "rule": RewardKind(
        "what a rule of your own rewards, under it only",
        None,
        constraint="own",
        learned_by_teacher=True,
    ),
}

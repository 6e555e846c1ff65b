"""The settings of budgets, rewards and contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from knobwise.common.checks import at_least, one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.reward_kinds import KINDS

WEIGHTS = ("alpha", "beta", "gamma", "delta", "epsilon", "miss")
"""The weights of a reward; `RewardKind.reads` says which a kind reads."""
TAKE_VALUES = ("fixed", "spread")
"""The strategies that draw from numbers of the settings."""


def unread_weights(kind: str) -> list[str]:
    """Return the weights that a kind of reward does not read; none of an unknown kind."""
    return [name for name in WEIGHTS if kind in KINDS and name not in KINDS[kind].reads]


def unread_of_budget(constraint: str, strategy: str | None) -> list[str]:
    """Return the settings of how budgets are drawn that nothing reads beside these two."""
    if constraint == "mean":
        return ["strategy", "values_ms"]
    return [] if strategy in TAKE_VALUES else ["values_ms"]


@dataclass
class BudgetConfig:
    """The budgets that a policy is trained on. They are redrawn at every visit of a sample."""

    strategy: str | None = None
    """`quantiles`: uniform in quantile, from the 3 % to the 97 % quantile of all profiled
    latencies; `spread`: half of them so, and half evenly on a log scale between the lowest and the
    highest of `values_ms`, and 15 % beyond; `uniform`: evenly in ms between the two quantiles;
    `relative`: a random profiled latency of the sample itself times 0.8, 1.0 or 1.2, as in the
    original controller; `fixed`: one of `values_ms`. None: `spread` where GRPO starts cold, else
    `quantiles`."""
    values_ms: tuple[float, ...] = ()
    """The budgets for `fixed` and `spread`, in ms. For `spread` none are the judged budgets in a
    training, and the two quantiles elsewhere."""
    constraint: str = "deadline"
    """`deadline`: every request has its own budget; `mean`: the average over the requests must not
    exceed it, by a Lagrangian relaxation: the policy is conditioned on 1/λ in ms. Training draws it
    evenly on a log scale, and rewards accuracy − λ·latency; λ is calibrated on held-out samples to
    meet the mean budget. Or a rule of your own as module:Class (also budget=module:Class), see
    `knobwise.envs.bandit.rules.Rule`."""
    settings: Any = None
    """Numbers of a rule of your own, by name, such as {tau_ms: 5}."""
    limits: Any = None
    """Limits on further costs of the profile beside a deadline, by name, such as {usd: 0.002}. An
    answer above a limit counts as late."""
    limit_probability: float = 0.9
    """Only configurations may be chosen that keep each limit with this probability."""

    @property
    def is_own(self) -> bool:
        """True for a rule of the user's own."""
        return ":" in self.constraint

    def __post_init__(self) -> None:
        if self.settings and not self.is_own:
            raise InputError(
                f"budget.settings={self.settings}: are those of a rule of your own, "
                "budget=module:Class; leave them out"
            )
        if not isinstance(self.settings, Mapping | None):
            raise InputError(
                f"budget.settings={self.settings}: must be values by name, such as {{tau_ms: 5}}"
            )
        if not isinstance(self.limits, Mapping | None):
            raise InputError(f"budget.limits={self.limits}: must be like {{usd: 0.002}}")
        if not 0 < self.limit_probability < 1:
            raise InputError(
                f"budget.limit_probability={self.limit_probability}: must lie between 0 and 1"
            )
        # without a strategy a training may take `spread`; what draws then asks again
        if self.constraint == "mean" or self.strategy is not None:
            self.refuse_unread(self.strategy)

    def refuse_unread(self, strategy: str | None) -> None:
        """Refuse settings that would change nothing where this strategy draws.

        Raises:
            InputError: there are some.
        """
        by = "constraint=mean" if self.constraint == "mean" else f"strategy={strategy}"
        for name in unread_of_budget(self.constraint, strategy):
            value = getattr(self, name)
            if value:
                raise InputError(
                    f"budget.{name}={value}: budget.{by} does not read it; leave it out, or draw "
                    f"deadlines by {' or '.join(TAKE_VALUES)}"
                )


@dataclass
class BalanceConfig:
    """Sampling weights in training; evaluation always weighs samples equally."""

    by: str = "none"
    """`none`: all samples evenly; `dataset` or `question_type`: small groups as often as large
    ones; `configuration`: samples with rarely profiled configurations more often, in proportion to
    the sum of 1/n over them, n the number of samples that have a configuration. Experts, and what
    the heads imitate, are not affected."""

    def __post_init__(self) -> None:
        one_of("balance.by", self.by, ("none", "dataset", "question_type", "configuration"))


@dataclass
class RewardConfig:
    """The training signal. The defaults of `shaped` are those of the original controller."""

    kind: str = field(default="shaped", metadata={"words": KINDS})
    """What a decision is rewarded for."""
    function: str | None = None
    """A Python function as module:name, of accuracy, latency_ms, budget_ms and knobs (see
    `knobwise.envs.bandit.reward.RewardFunction`)."""
    alpha: float = 1.0
    """α, weight of the accuracy."""
    beta: float = 0.5
    """β, weight of the smooth latency penalty sigmoid(10·(latency/budget − 1))."""
    gamma: float = 10.0
    """γ, weight of the squared relative excess over the budget."""
    delta: float = 0.1
    """δ, weight of the bonus for time left: 1 − latency/budget, only inside the budget."""
    epsilon: float = 0.05
    """ε, weight of the complexity penalty: mean of value / largest value over the knobs (0 for
    named ones)."""
    miss: float = 0.0
    """The cost of a missed budget under `utility`."""

    def __post_init__(self) -> None:
        one_of("reward.kind", self.kind, KINDS)
        if KINDS[self.kind].is_function != (self.function is not None):
            raise InputError(
                "reward=function and reward.function=module:name go together; give both or neither"
            )
        for weight in WEIGHTS:
            at_least(f"reward.{weight}", getattr(self, weight), 0)
        # 0 says as much, and words such as reward=utility set what another kind may not read
        for weight in unread_weights(self.kind):
            value = getattr(self, weight)
            usual = {entry.settings.get(weight) for entry in KINDS.values()}
            if value not in {0, getattr(RewardConfig, weight), *usual}:
                raise InputError(
                    f"reward.{weight}={value}: reward.kind={self.kind} does not read it; leave it "
                    "out, or give another kind"
                )


TRAINING_REWARD = RewardConfig(kind="utility", **KINDS["utility"].settings)
"""The default reward of training and of the environments."""
REWARDS = {"deadline": TRAINING_REWARD, "mean": RewardConfig(kind="priced")}
"""The default reward, by the constraint of the budget."""


def reward_of(constraint: str) -> RewardConfig:
    """Return the default reward under a constraint; of a rule of the user's own its own."""
    return REWARDS.get(constraint) or RewardConfig(kind="rule")

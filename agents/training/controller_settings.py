"""What a controller is trained for, and how: the settings of all parts of its training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.bandit.settings import BalanceConfig, BudgetConfig, RewardConfig
from knobwise.losses.settings import LossConfig


@dataclass(frozen=True)
class ControllerSettings:
    """What a controller is trained for, and how.

    Args:
        policy, loss, optimiser: the networks, what they minimise, and in how many steps.
        budget: the limits of training.
        budgets_ms: float [B], the budgets of validation; None for the default budgets. Under a
            mean budget, validation uses values of a right answer instead.
        reward: the reward; under a mean budget it is always `priced`.
        balance: how often each sample is drawn.
        cost_ms: the time that a decision and its features take. Budgets of training are what is
            left for the answer, as a deployed controller is asked; validation charges it.
        init_from: a checkpoint whose heads training starts from, with the statistics that its
            inputs are standardised by (`started_from`); None for fresh weights. Samples that it was
            trained on count as seen.
        fold_seed: seed of the folds; None for that of the training.
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    budgets_ms: Tensor | None = None
    reward: RewardConfig | None = None
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    cost_ms: float = 0.0
    init_from: str | Path | None = None
    fold_seed: int | None = None

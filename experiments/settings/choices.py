"""The choices of the groups whose options are the same for every choice, such as `policy=utility`:
their values, for the command line and for Python alike.

Each choice sets every option of its group. `TrainRun` holds the choice that is trained where none
is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.checks import one_of
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.losses.settings import LossConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
"""The files of Hydra: what each verb chooses, and the experiments."""

INDEPENDENT = PolicyConfig(guard=False)
UTILITY = PolicyConfig(
    teacher=True, fold_networks=5, hidden=0, dropout=0.0, drift=0.3, utility_head=True
)
AUTO = replace(UTILITY, experts=EXPERTS)
GRPO = replace(UTILITY, teacher=False, hidden=96, dropout=None, augment=None)
DISTILLED_OPTIMISER = OptimiserConfig(
    pretrain_lr=3e-3, pretrain_iterations=300, iterations=400, lr=3e-4, patience=2, epochs=2
)
"""The optimiser of heads that are distilled before GRPO.

Imitation and GRPO end where more of them gains nothing that ten seeds show: on the built-in profile
`policy=auto` with 300 iterations of imitation and a patience of 2 (some 70 iterations of GRPO), in
place of 600 and 10 (358), changes test utility by −.0004 (95 % interval −.0027 to .0018), or where
decisions are free by +.0006 (−.0015 to .0028)."""
COLD_OPTIMISER = OptimiserConfig(
    pretrain_iterations=0, iterations=1000, lr=2e-3, minibatch=256, patience=0, keep="last"
)
"""The optimiser of GRPO from a cold start."""
SAMPLED = LossConfig()

CHOICES: dict[str, dict[str, object]] = {
    "policy": {"auto": AUTO, "utility": UTILITY, "grpo": GRPO, "independent": INDEPENDENT},
    "optimiser": {
        "auto": DISTILLED_OPTIMISER,
        "utility": DISTILLED_OPTIMISER,
        "grpo": COLD_OPTIMISER,
        "independent": OptimiserConfig(),
    },
    "loss": {
        "sampled": SAMPLED,
        "exact": replace(SAMPLED, objective="exact"),
        "ppo": replace(SAMPLED, objective="ppo"),
    },
    "budget": {
        "deadline": BudgetConfig(),
        "quantiles": BudgetConfig(strategy="quantiles"),
        "spread": BudgetConfig(strategy="spread"),
        "uniform": BudgetConfig(strategy="uniform"),
        "relative": BudgetConfig(strategy="relative"),
        "fixed": BudgetConfig(strategy="fixed"),
        "mean": BudgetConfig(constraint="mean"),
    },
    "reward": {
        # no instances, as `function` is incomplete without reward.function
        name: asdict(RewardConfig()) | {"kind": name, **kind.settings}
        for name, kind in KINDS.items()
        if kind.constraint == "deadline"  # under a mean budget there is no choice
    },
    "tracking": {
        mode: TrackingSettings(mode=mode) for mode in ("auto", "online", "offline", "disabled")
    },
}
"""Group → its choices by name: an instance of the group's dataclass, or its values."""


BY_USER: dict[str, Callable[[str], object]] = {
    "loss": lambda name: replace(SAMPLED, objective=name),
    "budget": lambda name: BudgetConfig(constraint=name),
}
"""Groups whose choice may be code of the user's own, by its `module:Class`."""


def choice_of(group: str, name: str) -> object:
    """Return a choice of a group by its name, or by the `module:Class` of the user's own.

    Raises:
        InputError: there is no such choice.
    """
    if group in BY_USER and ":" in name:
        return BY_USER[group](name)
    one_of(group, name, (*CHOICES[group], *(["module:Class"] if group in BY_USER else ())))
    return CHOICES[group][name]


def experiments() -> list[str]:
    """Return the names of all experiments."""
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))

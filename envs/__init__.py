"""Profiles in, decisions replayed: tables, readers, budgets, rewards, and the bandit environments."""

# Parts are imported when they are first asked for: reading a profile should not have to wait for TorchRL.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knobwise.envs.bandit import ConfigBandit
    from knobwise.envs.budgets import BudgetConfig, default_budgets
    from knobwise.envs.builtin import builtin_profile
    from knobwise.envs.errors import InputError
    from knobwise.envs.gym_bandit import ConfigBanditEnv, ConfigBanditVectorEnv
    from knobwise.envs.reward import RewardConfig
    from knobwise.envs.table import Knob, ProfileTable, Split

_MODULE_OF = {
    "ConfigBandit": "bandit",
    "BudgetConfig": "budgets",
    "default_budgets": "budgets",
    "builtin_profile": "builtin",
    "InputError": "errors",
    "ConfigBanditEnv": "gym_bandit",
    "ConfigBanditVectorEnv": "gym_bandit",
    "RewardConfig": "reward",
    "Knob": "table",
    "ProfileTable": "table",
    "Split": "table",
}

__all__ = [
    "BudgetConfig",
    "ConfigBandit",
    "ConfigBanditEnv",
    "ConfigBanditVectorEnv",
    "InputError",
    "Knob",
    "ProfileTable",
    "RewardConfig",
    "Split",
    "builtin_profile",
    "default_budgets",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

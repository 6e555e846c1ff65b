"""Profiles in, decisions replayed: tables, readers, budgets, rewards, and the bandit environments."""

from knobwise.envs.bandit import ConfigBandit
from knobwise.envs.budgets import BudgetConfig, default_budgets
from knobwise.envs.builtin import builtin_profile
from knobwise.envs.errors import InputError
from knobwise.envs.gym_bandit import ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.envs.reward import RewardConfig
from knobwise.envs.table import Knob, ProfileTable, Split

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

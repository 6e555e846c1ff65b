"""Environments that replay measured profiles.

Here are their tables and readers, budgets and rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.common.errors import InputError as InputError
    from knobwise.envs.bandit.budgets import default_budgets as default_budgets
    from knobwise.envs.bandit.context_state import ContextState as ContextState
    from knobwise.envs.bandit.gymnasium_env import ConfigBanditEnv as ConfigBanditEnv
    from knobwise.envs.bandit.gymnasium_vector_env import (
        ConfigBanditVectorEnv as ConfigBanditVectorEnv,
    )
    from knobwise.envs.bandit.settings import BudgetConfig as BudgetConfig
    from knobwise.envs.bandit.settings import RewardConfig as RewardConfig
    from knobwise.envs.bandit.stable_baselines3 import StableBaselinesEnv as StableBaselinesEnv
    from knobwise.envs.bandit.torchrl_env import ConfigBandit as ConfigBandit
    from knobwise.envs.demonstrations.beam_files import read_beam_data as read_beam_data
    from knobwise.envs.demonstrations.beam_table import BeamTable as BeamTable
    from knobwise.envs.demonstrations.gymnasium_env import (
        DemonstrationBanditEnv as DemonstrationBanditEnv,
    )
    from knobwise.envs.demonstrations.settings import (
        DemonstrationRewardConfig as DemonstrationRewardConfig,
    )
    from knobwise.envs.demonstrations.settings import GroupConfig as GroupConfig
    from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit as DemonstrationBandit
    from knobwise.envs.readers.joint import join_tables as join_tables
    from knobwise.envs.tables.profile_table import Knob as Knob
    from knobwise.envs.tables.profile_table import ProfileTable as ProfileTable
    from knobwise.envs.tables.splits import Split as Split

MODULES = {
    "ConfigBandit": "bandit.torchrl_env",
    "BudgetConfig": "bandit.budgets",
    "default_budgets": "bandit.budgets",
    "InputError": "knobwise.common.errors",
    "ConfigBanditEnv": "bandit.gymnasium_env",
    "ConfigBanditVectorEnv": "bandit.gymnasium_vector_env",
    "RewardConfig": "bandit.reward",
    "ContextState": "bandit.context_state",
    "join_tables": "readers.joint",
    "Knob": "tables.profile_table",
    "ProfileTable": "tables.profile_table",
    "Split": "tables.splits",
    "BeamTable": "demonstrations.beam_table",
    "read_beam_data": "demonstrations.beam_files",
    "DemonstrationBandit": "demonstrations.torchrl_env",
    "GroupConfig": "demonstrations.torchrl_env",
    "DemonstrationRewardConfig": "demonstrations.reward",
    "DemonstrationBanditEnv": "demonstrations.gymnasium_env",
}
__getattr__ = lazy(__name__, MODULES)
__all__ = list(MODULES)
# needs a library of its own, which `import *` must not ask for
MODULES["StableBaselinesEnv"] = "bandit.stable_baselines3"

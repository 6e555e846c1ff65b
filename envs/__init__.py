"""Profiles in, decisions replayed: tables, readers, budgets, rewards, and the bandit environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knobwise.common.lazy import lazy

if TYPE_CHECKING:
    from knobwise.common.errors import InputError
    from knobwise.envs.configurations.budgets import BudgetConfig, default_budgets
    from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv, ConfigBanditVectorEnv
    from knobwise.envs.configurations.reward import RewardConfig
    from knobwise.envs.configurations.torchrl_env import ConfigBandit
    from knobwise.envs.demonstrations.beam_files import read_beam_data
    from knobwise.envs.demonstrations.beam_table import BeamTable
    from knobwise.envs.demonstrations.gymnasium_env import DemonstrationBanditEnv
    from knobwise.envs.demonstrations.reward import DemonstrationRewardConfig
    from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit, GroupConfig
    from knobwise.envs.readers.builtin import builtin_profile
    from knobwise.envs.readers.joint import join_tables, with_dataset_input
    from knobwise.envs.simulated.calibrated import CalibratedConfig, simulate_calibrated
    from knobwise.envs.simulated.kinds import SimulatedConfig, simulate
    from knobwise.envs.tables.profile_table import Knob, ProfileTable, Split

__getattr__ = lazy(
    __name__,
    {
        "ConfigBandit": "bandit",
        "BudgetConfig": "budgets",
        "default_budgets": "budgets",
        "builtin_profile": "builtin",
        "InputError": "errors",
        "ConfigBanditEnv": "gym_bandit",
        "ConfigBanditVectorEnv": "gym_bandit",
        "RewardConfig": "reward",
        "join_tables": "joint",
        "with_dataset_input": "joint",
        "CalibratedConfig": "calibrated",
        "simulate_calibrated": "calibrated",
        "SimulatedConfig": "simulator",
        "simulate": "simulator",
        "Knob": "table",
        "ProfileTable": "table",
        "Split": "table",
        "BeamTable": "beams",
        "read_beam_data": "beam_files",
        "DemonstrationBandit": "demonstrations",
        "GroupConfig": "demonstrations",
        "DemonstrationRewardConfig": "demonstration_reward",
        "DemonstrationBanditEnv": "gym_demonstrations",
    },
)

__all__ = [
    "BeamTable",
    "BudgetConfig",
    "CalibratedConfig",
    "ConfigBandit",
    "ConfigBanditEnv",
    "ConfigBanditVectorEnv",
    "DemonstrationBandit",
    "DemonstrationBanditEnv",
    "DemonstrationRewardConfig",
    "GroupConfig",
    "InputError",
    "Knob",
    "ProfileTable",
    "RewardConfig",
    "SimulatedConfig",
    "Split",
    "builtin_profile",
    "default_budgets",
    "join_tables",
    "read_beam_data",
    "simulate",
    "simulate_calibrated",
    "with_dataset_input",
]

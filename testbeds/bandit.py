"""What `gymnasium.make("knobwise/ConfigBandit-v0")` makes: without a table, the bandit of the
built-in profile, whose questions and pictures can be drawn again to be looked at."""

from __future__ import annotations

from typing import Any

from knobwise.envs.bandit.gymnasium_env import ConfigBanditEnv
from knobwise.envs.bandit.gymnasium_vector_env import (
    ConfigBanditVectorEnv,
    work_alone_if_forked,
)
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.testbeds.profiles import builtin_profile


def config_bandit(table: ProfileTable | None = None, **options: Any) -> ConfigBanditEnv:
    """Return a `ConfigBanditEnv`, for the built-in profile if there is no table."""
    # before a table is read
    work_alone_if_forked()
    if table is None:
        table = builtin_profile()
    if getattr(table, "name", "") == "builtin":
        # the model that was measured is only needed here
        from knobwise.testbeds.elastic.adapter import builtin_input

        options.setdefault("inputs", builtin_input)
    return ConfigBanditEnv(table, **options)


def config_bandit_vector(
    num_envs: int = 1, table: ProfileTable | None = None, **options: Any
) -> ConfigBanditVectorEnv:
    """Return a `ConfigBanditVectorEnv`, for the built-in profile if there is no table."""
    work_alone_if_forked()
    if table is None:
        table = builtin_profile()
    return ConfigBanditVectorEnv(num_envs, table, **options)


# gymnasium looks here for the ways to render
config_bandit.metadata = ConfigBanditEnv.metadata  # type: ignore[attr-defined]

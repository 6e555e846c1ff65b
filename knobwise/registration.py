"""What `import knobwise` makes known: environments by their ids, and names by their former places.

The environments themselves know no profile that comes with knobwise. Only this file says where the
bandit gets one when it is made without a table.
"""

from __future__ import annotations

import gymnasium

from knobwise import envs

MOVED = dict.fromkeys(("builtin_profile", "SimulatedConfig", "simulate"), "knobwise.testbeds")
"""Names that were once in `knobwise.envs`; programs that look there still find them."""


def register() -> None:
    """Make everything known, without importing it."""
    gymnasium.register(
        id="knobwise/ConfigBandit-v0",
        entry_point="knobwise.testbeds.bandit:config_bandit",
        vector_entry_point="knobwise.testbeds.bandit:config_bandit_vector",
    )
    gymnasium.register(
        id="knobwise/DemonstrationBandit-v0",
        entry_point="knobwise.envs.demonstrations.gymnasium_env:DemonstrationBanditEnv",
    )
    envs.MODULES.update(MOVED)

"""knobwise: learn which setting of a large model's knobs to use for each input under a latency budget.

`import knobwise` is light; it makes `gymnasium.make("knobwise/ConfigBandit-v0")` and, for selectors of demonstrations,
`gymnasium.make("knobwise/DemonstrationBandit-v0", table=…)` known and nothing more. The parts, in
the order in which data passes through them: `knobwise.profiling` measures, `knobwise.envs` reads and replays,
`knobwise.agents` decides and learns, `knobwise.losses` holds what is minimised, `knobwise.experiments` launches,
tracks and reports.
"""

import gymnasium

from knobwise._version import __version__

gymnasium.register(
    id="knobwise/ConfigBandit-v0",
    entry_point="knobwise.envs.configurations.gymnasium_env:ConfigBanditEnv",
    vector_entry_point="knobwise.envs.configurations.gymnasium_env:ConfigBanditVectorEnv",
    kwargs={"inputs": "knobwise.profiling.elastic.adapter:builtin_input"},
)

gymnasium.register(
    id="knobwise/DemonstrationBandit-v0",
    entry_point="knobwise.envs.demonstrations.gymnasium_env:DemonstrationBanditEnv",
)

__all__ = ["__version__"]

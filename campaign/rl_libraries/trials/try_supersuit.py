"""supersuit scales a budget by its bounds, and it stays a budget."""

import gymnasium
import supersuit
from gymnasium.wrappers import FlattenObservation

import knobwise  # noqa: F401  (registers the environment)

env = supersuit.normalize_obs_v0(
    FlattenObservation(gymnasium.make("knobwise/ConfigBandit-v0")), -1, 1
)
seen = [float(env.reset(options={"row": 3, "budget_ms": b})[0][0]) for b in (10.0, 30.0, 60.0)]
assert -1 < seen[0] < seen[1] - 0.1 < seen[2] - 0.2 < 1, seen
print(supersuit.__version__, "10, 30 and 60 ms are", *(f"{number:.2f}" for number in seen))

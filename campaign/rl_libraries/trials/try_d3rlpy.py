"""d3rlpy learns online, with observations that are scaled by their bounds."""

import d3rlpy
import gymnasium
import torch
from gymnasium.wrappers import FlattenObservation

import knobwise  # noqa: F401  (registers the environment)

env = FlattenObservation(gymnasium.make("knobwise/ConfigBandit-v0", action="configuration"))
scaler = d3rlpy.preprocessing.MinMaxObservationScaler()
config = d3rlpy.algos.DQNConfig(observation_scaler=scaler, batch_size=32)
learner = config.create(device="cpu:0")
learner.fit_online(
    env,
    d3rlpy.dataset.create_fifo_replay_buffer(limit=500, env=env),
    n_steps=200,
    n_steps_per_epoch=100,
    update_start_step=50,
    show_progress=False,
    logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
)
observed = [env.reset(options={"row": 3, "budget_ms": b})[0] for b in (10.0, 30.0, 60.0)]
seen = [scaler.transform(torch.tensor(each)[None])[0, 0].item() for each in observed]
assert -1 < seen[0] < seen[1] - 0.1 < seen[2] - 0.2 < 1, seen
print(d3rlpy.__version__, "10, 30 and 60 ms are", *(f"{number:.2f}" for number in seen))

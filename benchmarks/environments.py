"""Decisions per second of the environments on the built-in profile, in CPU time on one thread.

The native environment at several batch sizes, rows and budgets only (`lean`): `step`, a step and the contexts after it
(`step_and_maybe_reset`), and a whole `rollout(1)`. The vector environment of gymnasium, and at 64 environments its
ratio to gymnasium's own `SyncVectorEnv` around the single one. The fastest of 7 interleaved rounds counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict

from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.envs.tables.profile_table import ProfileTable

ROUNDS, SECONDS = 7, 0.1


def per_second(ways: dict[str, Callable[[], object]], decisions: int) -> dict[str, float]:
    """Decisions per CPU-second, each in its fastest of several interleaved rounds."""
    calls, rates = {}, {name: [] for name in ways}
    for name, way in ways.items():
        way()
        start = time.process_time()
        way()
        calls[name] = max(1, round(SECONDS / max(time.process_time() - start, 1e-6)))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.process_time()
            for _ in range(calls[name]):
                way()
            rates[name].append(calls[name] * decisions / (time.process_time() - start))
    return {name: max(values) for name, values in rates.items()}


def native(table: ProfileTable, size: int) -> None:
    env = ConfigBandit(table, batch_size=size, lean=True)
    context = env.rand_action(env.reset())
    keys = ("row", "budget_ms", "action")

    def fresh() -> TensorDict:
        return TensorDict({key: context[key] for key in keys}, [size])

    ways = {
        "step": lambda: env.step(fresh()),
        "step_and_maybe_reset": lambda: env.step_and_maybe_reset(fresh()),
        "rollout(1)": lambda: env.rollout(1),
    }
    rates = per_second(ways, size)
    told = ", ".join(f"{name} {rate / 1e6:.2f} M/s" for name, rate in rates.items())
    print(f"ConfigBandit, batch {size}: {told}", flush=True)


def gymnasiums(table: ProfileTable, size: int, compared: bool) -> None:
    envs: dict[str, VectorEnv] = {"ConfigBanditVectorEnv": ConfigBanditVectorEnv(size, table)}
    if compared:
        single = [lambda: ConfigBanditEnv(table)] * size
        envs["SyncVectorEnv of ConfigBanditEnv"] = SyncVectorEnv(single, autoreset_mode=AutoresetMode.SAME_STEP)
    actions = np.zeros((size, len(table.knobs)), dtype=np.int64)
    for env in envs.values():
        env.reset(seed=0)
    rates = per_second({name: functools.partial(env.step, actions) for name, env in envs.items()}, size)
    told = ", ".join(f"{name} {rate / 1e3:.1f} k/s" for name, rate in rates.items())
    first, *rest = rates.values()
    print(f"{size} environments: {told}" + "".join(f"; ratio {first / other:.1f}" for other in rest), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    TABLE = builtin_profile()
    for batch in (64, 1_024, 16_384):
        native(TABLE, batch)
    for batch in (64, 256, 1_024):
        gymnasiums(TABLE, batch, compared=batch == 64)

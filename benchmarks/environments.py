"""Decisions per second of the environments on the built-in profile, in CPU time on one thread.

For the native environment with rows and budgets only (`lean`), at several batch sizes: `step`, a step and the contexts
after it (`step_and_maybe_reset`), and a whole `rollout(1)`. For gymnasium's vector environment also, at 64
environments, the ratio to gymnasium's own `SyncVectorEnv` around the single one. The fastest of 7 rounds counts.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict
from timing import Functions, calls_of, in_turns

from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.envs.tables.profile_table import ProfileTable

ROUNDS, SECONDS = 7, 0.1


def per_millisecond(title: str, functions: Functions, decisions: int) -> list[float]:
    """Print and return the decisions per CPU ms of each function; a call makes so many decisions."""
    times = in_turns(functions, ROUNDS, calls_of(functions, SECONDS))
    rates = {name: decisions / min(values) for name, values in times.items()}
    print(f"{title}: " + ", ".join(f"{name} {rate:,.1f} k/s" for name, rate in rates.items()), flush=True)
    return list(rates.values())


def native(table: ProfileTable, size: int) -> None:
    env = ConfigBandit(table, batch_size=size, lean=True)
    context = env.rand_action(env.reset())
    keys = ("row", "budget_ms", "action")

    def fresh() -> TensorDict:
        return TensorDict({key: context[key] for key in keys}, [size])

    functions = {
        "step": lambda: env.step(fresh()),
        "step_and_maybe_reset": lambda: env.step_and_maybe_reset(fresh()),
        "rollout(1)": lambda: env.rollout(1),
    }
    per_millisecond(f"ConfigBandit, batch {size}", functions, size)


def gymnasiums(table: ProfileTable, size: int, compared: bool) -> None:
    envs: dict[str, VectorEnv] = {"ConfigBanditVectorEnv": ConfigBanditVectorEnv(size, table)}
    if compared:
        single = [lambda: ConfigBanditEnv(table)] * size
        envs["SyncVectorEnv of ConfigBanditEnv"] = SyncVectorEnv(single, autoreset_mode=AutoresetMode.SAME_STEP)
    actions = np.zeros((size, len(table.knobs)), dtype=np.int64)
    for env in envs.values():
        env.reset(seed=0)
    steps = {name: functools.partial(env.step, actions) for name, env in envs.items()}
    first, *rest = per_millisecond(f"{size} environments", steps, size)
    for other in rest:
        print(f"  ratio {first / other:.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    TABLE = builtin_profile()
    for batch in (64, 1_024, 16_384):
        native(TABLE, batch)
    for batch in (64, 256, 1_024):
        gymnasiums(TABLE, batch, compared=batch == 64)

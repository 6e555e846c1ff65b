"""Speed of the environments, on the built-in profile and one thread.

Decisions per second of the native environment with rows and budgets only (`lean`), at several batch sizes: `step`, a
step and the contexts after it (`step_and_maybe_reset`), and a whole `rollout(1)`. The same for gymnasium's vector
environment, with the ratio to gymnasium's own `SyncVectorEnv` around the single one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch.utils.benchmark import Timer

from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.envs.tables.profile_table import ProfileTable

SECONDS = 1.0
"""For which each is timed; the median counts."""


def decisions_per_s(title: str, step: Callable[[], object], decisions: int) -> float:
    """Print and return them; a step makes so many decisions."""
    rate = decisions / Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=SECONDS).median
    print(f"{title}: {rate / 1e3:,.1f} k decisions a second", flush=True)
    return rate


def native(table: ProfileTable, size: int) -> None:
    env = ConfigBandit(table, batch_size=size, lean=True)
    context = env.rand_action(env.reset())
    keys = ("row", "budget_ms", "action")

    def fresh() -> TensorDict:
        return TensorDict({key: context[key] for key in keys}, [size])

    decisions_per_s(f"ConfigBandit, batch {size}, step", lambda: env.step(fresh()), size)
    decisions_per_s("  step_and_maybe_reset", lambda: env.step_and_maybe_reset(fresh()), size)
    decisions_per_s("  rollout(1)", lambda: env.rollout(1), size)


def gymnasiums(table: ProfileTable, size: int) -> None:
    single = [lambda: ConfigBanditEnv(table)] * size
    rates = []
    for env in (ConfigBanditVectorEnv(size, table), SyncVectorEnv(single, autoreset_mode=AutoresetMode.SAME_STEP)):
        env.reset(seed=0)
        actions = np.zeros((size, len(table.knobs)), dtype=np.int64)
        rates.append(decisions_per_s(f"{size} {type(env).__name__}", functools.partial(env.step, actions), size))
    print(f"  ratio {rates[0] / rates[1]:.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    TABLE = builtin_profile()
    for batch in (64, 1_024, 16_384):
        native(TABLE, batch)
    gymnasiums(TABLE, 64)

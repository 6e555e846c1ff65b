"""Speed of what training repeats, on the built-in profile, in CPU time on one thread; the fastest of 7 rounds counts.

Decisions per second of the native environment with rows and budgets only (`lean`), at several batch sizes: `step`, a
step and the contexts after it (`step_and_maybe_reset`), and a whole `rollout(1)`. The same for gymnasium's vector
environment, at 64 environments with the ratio to gymnasium's own `SyncVectorEnv` around the single one. Then the CPU ms
of a training iteration of the default policy, in both stages.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDict

from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.command_line.compose import GROUPS

ROUNDS, SECONDS, ITERATIONS = 7, 0.1, 4


def milliseconds(function: Callable[[], object], calls: int = 1) -> float:
    """CPU time of one call, as a mean over several."""
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls * 1e3


def per_millisecond(title: str, functions: Mapping[str, Callable[[], object]], decisions: int) -> list[float]:
    """Print and return the decisions per CPU ms of each function; a call makes so many decisions. The functions take
    turns, so that whatever else the machine does meets all alike."""
    calls = {}
    for name, function in functions.items():
        function()  # warms up
        calls[name] = max(1, round(SECONDS * 1e3 / max(milliseconds(function), 1e-3)))
    rounds = [[milliseconds(function, calls[name]) for name, function in functions.items()] for _ in range(ROUNDS)]
    rates = [decisions / min(times) for times in zip(*rounds, strict=True)]
    listed = ", ".join(f"{name} {rate:,.1f} k/s" for name, rate in zip(functions, rates, strict=True))
    print(f"{title}: {listed}", flush=True)
    return rates


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


def training(table: ProfileTable, stage: str) -> None:
    groups = {"policy": GROUPS["policy"]["auto"], "reward": GROUPS["reward"]["utility"]}
    warm_up = 10**6 if stage == "regression" else 0
    settings = replace(GROUPS["optimiser"]["auto"], warmup_iterations=warm_up, iterations=10**6)
    trainer = ControllerTrainer(table, table.split(), optimiser=settings, **groups)
    stream = iter(trainer.collector)

    def iterate() -> None:
        trainer.iterate(stream)
        trainer.iteration += 1

    print(f"training, {stage}: {min(milliseconds(iterate, ITERATIONS) for _ in range(ROUNDS)):.2f} ms an iteration")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    TABLE = builtin_profile()
    for batch in (64, 1_024, 16_384):
        native(TABLE, batch)
    for batch in (64, 256, 1_024):
        gymnasiums(TABLE, batch, compared=batch == 64)
    for each in ("regression", "GRPO"):
        training(TABLE, each)

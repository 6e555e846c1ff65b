"""Environments, policies and losses, wherever TorchRL and gymnasium people use them: every pair of a form of the
environment, a table, an agent, a way of collecting and a transform occurs in some case."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import small_table
from tensordict import TensorDictBase
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from torchrl.envs import (
    CatTensors,
    DTypeCastTransform,
    EnvBase,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.objectives import LossModule
from torchrl.trainers import DefaultOptimizationStepper, ReplayBufferTrainer, Trainer

from knobwise.agents import Controller, PolicyConfig, make_actor
from knobwise.envs import ConfigBandit, ConfigBanditEnv, ConfigBanditVectorEnv, ProfileTable
from knobwise.losses import GRPOLoss

P, FRAMES = 4, 8


class Case(NamedTuple):
    form: str
    table: str
    agent: str
    use: str
    transform: str


TABLES: dict[str, Callable[[], ProfileTable]] = {
    "full": small_table,
    "sparse": lambda: small_table(holes=0.68),
    "no_features": lambda: small_table(features=False),
}
FORMS: dict[str, Callable[[ProfileTable], EnvBase]] = {
    "native": lambda table: ConfigBandit(table, batch_size=P),
    "serial": lambda table: SerialEnv(2, lambda: ConfigBandit(table, batch_size=P)),
    "parallel": lambda table: ParallelEnv(2, lambda: ConfigBandit(table, batch_size=P), mp_start_method="spawn"),
    "wrapper": lambda table: GymWrapper(ConfigBanditEnv(table)),
    "gym_env": lambda table: GymEnv("knobwise/ConfigBandit-v0", table=table),
    **{
        f"vector_{mode.name.lower()}": lambda table, mode=mode: GymWrapper(
            ConfigBanditVectorEnv(P, table, autoreset_mode=mode)
        )
        for mode in AutoresetMode
    },
}
AGENTS = ("random", "policy", "three_keys")
USES = ("collector", "multi_sync", "multi_async", "trainer", "memmap", "priorities")
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "cat_tensors": lambda: CatTensors(in_keys=["budget_ms"], out_key="observation", dim=-1, unsqueeze_if_oor=True),
    "observation_norm": lambda: ObservationNorm(loc=0.0, scale=2.0, in_keys=["budget_ms"], standard_normal=False),
    "reward_sum": RewardSum,
    "step_counter": StepCounter,
    "dtype_cast": lambda: DTypeCastTransform(torch.float32, torch.float64, in_keys=["budget_ms"]),
}


def allowed(case: Case) -> bool:
    """Processes are slow to start, so that few forms meet them; a policy cannot read what a transform took away."""
    started = case.use.startswith("multi") or case.form == "parallel"
    few = case.form in ("native", "wrapper", "vector_same_step") or (case.form == "parallel" and case.use == "collector")
    blind = case.agent != "random" and case.transform == "cat_tensors"
    return (few or not started) and not blind and not (case.agent == "random" and case.use == "trainer")


def cases() -> Iterator[Case]:
    """Greedily, the next case is the first of those that cover most pairs that no case has yet."""
    every = [case for case in itertools.starmap(Case, itertools.product(FORMS, TABLES, AGENTS, USES, TRANSFORMS))]
    pairs = {case: frozenset(itertools.combinations(enumerate(case), 2)) for case in every if allowed(case)}
    missing = frozenset().union(*pairs.values())
    while missing:
        case = max(pairs, key=lambda each: len(pairs[each] & missing))
        missing -= pairs[case]
        yield case


def policy_of(agent: str, table: ProfileTable) -> Any:
    """None for a random agent."""
    if agent == "random":
        return None
    config = PolicyConfig(structure="independent" if agent == "three_keys" else "additive", hidden=8, dropout=0.0)
    controller = Controller.for_table(table, torch.arange(table.num_samples), config).eval()
    return make_actor(controller, separate=agent == "three_keys")


def environment(form: str, table: str, transform: str) -> EnvBase:
    env, change = FORMS[form](TABLES[table]()), TRANSFORMS[transform]()
    return env if change is None else TransformedEnv(env, change)


def collected(case: Case) -> Iterator[TensorDictBase]:
    """Some batches, [..., T], by the collector of this case."""
    table = TABLES[case.table]()
    make = functools.partial(environment, case.form, case.table, case.transform)
    policy, frames = policy_of(case.agent, table), FRAMES * make().batch_size.numel()
    settings = {"frames_per_batch": frames, "total_frames": 2 * frames, "auto_register_policy_transforms": False}
    if case.use.startswith("multi"):
        many = {"multi_sync": MultiSyncCollector, "multi_async": MultiAsyncCollector}[case.use]
        collector = many([make, make], policy, **settings)
    else:
        collector = Collector(make(), policy, **settings)
    yield from collector
    collector.shutdown()

"""Environment, policy and loss wherever people of TorchRL and gymnasium use them: every pair of a
form of the environment, a table, an agent, a way of collecting and a transform is in some case."""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from helpers import close, small_table
from torch.nn.utils import parameters_to_vector
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from torchrl.envs import (
    CatTensors,
    DTypeCastTransform,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.trainers import DefaultOptimizationStepper, Trainer
from torchrl.weight_update import SharedMemWeightSyncScheme

from knobwise.agents import Controller, PolicyConfig, make_actor
from knobwise.envs import ConfigBandit, ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.losses import GRPOLoss

P, FRAMES = 4, 8


def train(case, collector, policy, frames):
    loss_module = GRPOLoss(policy, advantage="unnormalised")
    trainer = Trainer(
        collector=collector,
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss_module,
        optimizer=torch.optim.SGD(loss_module.parameters(), lr=0.1),
        optimization_stepper=DefaultOptimizationStepper(),
        progress_bar=False,
    )
    before = parameters_to_vector(policy.parameters())
    trainer.register_op("batch_process", lambda batch: check(case, batch) or batch.reshape(-1))
    trainer.train()
    assert not torch.equal(parameters_to_vector(policy.parameters()), before)


class Case(NamedTuple):
    form: str
    table: str
    agent: str
    use: str
    transform: str


TABLES = {
    "full": small_table,
    "sparse": lambda: small_table(holes=0.68),
    "no_features": lambda: small_table(features=False),
}


def native(table):
    return functools.partial(ConfigBandit, table, batch_size=P)


def wrapped(env):
    return GymWrapper(env, categorical_action_encoding=True)


FORMS = {
    "native": lambda table: native(table)(),
    "serial": lambda table: SerialEnv(2, native(table)),
    "parallel": lambda table: ParallelEnv(2, native(table), mp_start_method="forkserver"),
    "wrapper": lambda table: wrapped(ConfigBanditEnv(table)),
    "gym_env": lambda table: GymEnv(
        "knobwise/ConfigBandit-v0", table=table, categorical_action_encoding=True
    ),
    "vector_same_step": lambda table: wrapped(ConfigBanditVectorEnv(P, table)),
    "vector_disabled": lambda table: wrapped(
        ConfigBanditVectorEnv(P, table, autoreset_mode="Disabled")
    ),
}
AGENTS = ("random", "policy")
USES = ("collector", "multi_sync", "multi_async", "trainer", "memmap", "priorities")
TRANSFORMS = {
    "none": lambda: None,
    "cat_tensors": lambda: CatTensors(
        in_keys=["budget_ms"], out_key="observation", dim=-1, unsqueeze_if_oor=True
    ),
    "observation_norm": lambda: ObservationNorm(
        loc=0.0, scale=2.0, in_keys=["budget_ms"], standard_normal=False
    ),
    "reward_sum": RewardSum,
    "step_counter": StepCounter,
    "dtype_cast": lambda: DTypeCastTransform(torch.float32, torch.float64, in_keys=["budget_ms"]),
}


def allowed(case):
    """Processes are slow to start, so that few forms meet them; a policy cannot read what a
    transform took away."""
    if case.form == "parallel":
        quick = case.use == "collector" and case.transform in ("none", "step_counter")
    elif case.use.startswith("multi"):
        few = case.form in ("native", "wrapper", "vector_same_step")
        quick = few and case.transform in ("none", "step_counter")
    else:
        quick = True
    impossible = "trainer" if case.agent == "random" else "cat_tensors"
    return quick and impossible not in case


def cases():
    """Greedily, the next case is the first of those that cover most pairs that no case has yet."""
    every = itertools.starmap(Case, itertools.product(FORMS, TABLES, AGENTS, USES, TRANSFORMS))
    pairs = {
        case: frozenset(itertools.combinations(enumerate(case), 2))
        for case in every
        if allowed(case)
    }
    missing = frozenset().union(*pairs.values())
    while missing:
        case = max(pairs, key=lambda each: len(pairs[each] & missing))
        missing -= pairs[case]
        yield case


def policy_of(agent, table):
    """None for a random agent."""
    if agent == "random":
        return None
    config = PolicyConfig(hidden=8, dropout=0.0)
    controller = Controller.for_table(table, torch.arange(table.num_samples), config).eval()
    return make_actor(controller)


def environment(case):
    env, change = FORMS[case.form](TABLES[case.table]()), TRANSFORMS[case.transform]()
    # the wrapper of a vector environment has a transform already
    if isinstance(env, TransformedEnv):
        return env.append_transform(change) if change else env
    return TransformedEnv(env, change)


def check(case, batch):
    """Every decision has an outcome of its own context, and what follows it is the observation of
    this context."""
    after = batch["next"]
    decided = ~batch["done"].squeeze(-1)  # in DISABLED mode a reset stands between two decisions
    rewards = after["reward"][decided]
    assert rewards.numel()
    assert torch.isin(rewards.float(), torch.tensor([-0.2, 0.0, 1.0])).all()
    limit = "observation" if case.transform == "cat_tensors" else "budget_ms"
    close(batch[limit][decided], after[limit][decided])
    if case.agent == "policy" and case.table == "sparse":
        index = TABLES[case.table]().find(batch["action"])
        assert batch["mask"].bool().gather(-1, index.unsqueeze(-1)).all()


def run(case, folder):
    policy, make = policy_of(case.agent, TABLES[case.table]()), functools.partial(environment, case)
    env = make()
    frames = FRAMES * env.batch_size.numel()
    settings = {
        "frames_per_batch": frames,
        "total_frames": 2 * frames,
        "auto_register_policy_transforms": False,
    }
    if case.use.startswith("multi"):
        env.close()
        many = MultiSyncCollector if case.use == "multi_sync" else MultiAsyncCollector
        weights = SharedMemWeightSyncScheme()
        schemes = {"policy": weights} if policy else None
        collector = many([make, make], policy, weight_sync_schemes=schemes, **settings)
    else:
        collector = Collector(env, policy, **settings)
    if case.use == "trainer":
        train(case, collector, policy, 2 * frames)
        return
    buffer = None
    if case.use == "memmap":
        storage = LazyMemmapStorage(2 * frames, scratch_dir=folder)
        buffer = ReplayBuffer(storage=storage, batch_size=8)
    if case.use == "priorities":
        storage = LazyTensorStorage(2 * frames)
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.9, storage=storage, batch_size=8
        )
    for batch in collector:
        check(case, batch)
        if buffer is not None:
            buffer.extend(batch.reshape(-1))
            sample = buffer.sample()
            if case.use == "priorities":
                sample["td_error"] = sample["next", "reward"].flatten().abs() + 0.1
                buffer.update_tensordict_priority(sample)
            assert len(sample["next", "reward"]) == 8
    collector.shutdown()
    if case.use.startswith("multi"):
        # TorchRL leaves it to the end of Python, where its queue would wait for a thread for ever.
        weights.shutdown()


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_everywhere(case, tmp_path):
    run(case, tmp_path)

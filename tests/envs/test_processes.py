"""Workers of TorchRL and gymnasium in processes that are forked or spawned, each time started from a
process of their own that has used threads."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

TORCHRL = """
import functools, sys
import torch
from helpers import small_table
from torch import multiprocessing
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import ParallelEnv
from knobwise.envs import ConfigBandit
from knobwise.envs.bandit.contexts import fresh_seed

workers = int(sys.argv[2])
multiprocessing.set_start_method(sys.argv[1], force=True)
torch.set_num_threads(2)
torch.rand(600, 600) @ torch.rand(600, 600)
table = small_table(30)
make = functools.partial(ConfigBandit, table, batch_size=4)


def check(batch):
    row, action = batch["row"].flatten(), table.find(batch["action"]).flatten()
    late = table.latency_ms[row, action] > batch["budget_ms"].flatten()
    reward = batch["next", "reward"].flatten()
    expected = torch.where(table.accuracy[row, action] > 0, 1.0, 0.0)
    assert torch.equal(reward > 0, (expected > 0) & ~late), batch
    return row.tolist()


assert min(fresh_seed() for _ in range(20)) >= 0
env = ParallelEnv(workers, make)
# forked workers share the state of torch's generator; without a seed, and with one, they differ
for seed in (None, 0):
    if seed is not None:
        env.set_seed(seed)
    rows = check(env.rollout(6, break_when_any_done=False))
    assert len(set(map(tuple, torch.tensor(rows).view(workers, -1).tolist()))) == workers
env.close()
options = {"frames_per_batch": 8 * workers, "total_frames": 16 * workers}
collector = MultiSyncCollector(
    [make] * workers, None, auto_register_policy_transforms=False, **options
)
assert sum(len(check(batch)) for batch in collector) == 16 * workers
collector.shutdown()
"""
GYMNASIUM = """
import gymnasium, knobwise, torch
torch.set_num_threads(2)
env = gymnasium.make_vec(
    "knobwise/ConfigBandit-v0", 2, "async", vector_kwargs={"context": "fork"}
)
env.reset_async(seed=0, options={"row": 3})
observations, _ = env.reset_wait(timeout=60)
assert env.observation_space.contains(observations)
env.step_async(env.action_space.sample())
_, _, ended, _, infos = env.step_wait(timeout=60)
assert ended.all()
assert infos["row"].tolist() == [3, 3]
env.close()
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([TORCHRL, "fork", "2"], id="fork", marks=pytest.mark.campaign),
        # each of its processes imports torch anew
        pytest.param([TORCHRL, "spawn", "1"], id="spawn", marks=pytest.mark.campaign),
        pytest.param([GYMNASIUM], id="gymnasium"),
    ],
)
def test_environments_and_collectors_by_any_way_of_starting_processes(command):
    process = subprocess.Popen(
        [sys.executable, "-c", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        # whatever hangs is an error
        assert process.wait(150) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started

"""TorchRL's workers in processes that are forked or spawned, each started from a process of its own
that has used threads."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import functools, sys
import torch
from helpers import small_table
from torch import multiprocessing
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import ParallelEnv
from knobwise.envs import ConfigBandit

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


env = ParallelEnv(workers, make)
env.set_seed(0)
rows = check(env.rollout(6, break_when_any_done=False))
assert len(set(map(tuple, torch.tensor(rows).view(workers, -1).tolist()))) == workers
env.close()
options = {"frames_per_batch": 8 * workers, "total_frames": 16 * workers}
collector = MultiSyncCollector(
    [make] * workers, None, auto_register_policy_transforms=False, **options
)
print(sum(len(check(batch)) for batch in collector))
collector.shutdown()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked there")
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_parallel_environments_and_collectors_by_any_way_of_starting_processes(method, workers):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, method, str(workers)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        # whatever hangs is an error
        printed, _ = process.communicate(timeout=150)
        assert process.returncode == 0
        assert printed.split() == [str(16 * workers)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started

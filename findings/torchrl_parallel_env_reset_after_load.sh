#!/bin/bash
# One would guess: after `load_state_dict` a `ParallelEnv` of TorchRL resets as before, only from the
# state that was loaded.
# It is: its next `reset` returns what was in memory, the observation of the reset before, because
# that the workers have loaded is taken for the end of their reset. A `SerialEnv` is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install torch==2.14.1 tensordict==0.14.3 torchrl==0.14.1 numpy 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import logging
import sys
import time
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import torch
import torchrl
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv


class Counting(EnvBase):
    """Observes how often it was reset, which takes some time."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(resets=Unbounded((1,)))
        self.action_spec = Categorical(2, (1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Binary(shape=(1,), dtype=torch.bool)
        self.register_buffer("resets", torch.zeros(1))

    def _reset(self, tensordict=None, **options):
        time.sleep(0.2)
        self.resets += 1
        return TensorDict(resets=self.resets.clone(), done=torch.zeros(1, dtype=torch.bool))

    def _step(self, tensordict):
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(resets=self.resets.clone(), reward=torch.ones(1), done=done)

    def _set_seed(self, seed):
        pass


def resets_of(env):
    seen = [env.reset()["resets"].flatten().tolist() for _ in range(2)]
    env.load_state_dict(env.state_dict())
    seen.append(env.reset()["resets"].flatten().tolist())
    env.close()
    return seen


if __name__ == "__main__":
    serial = resets_of(SerialEnv(2, Counting))
    parallel = resets_of(ParallelEnv(2, Counting, mp_start_method="spawn"))
    print("torchrl", torchrl.__version__)
    print("one, two, load, three in a SerialEnv:", serial)
    print("one, two, load, three in a ParallelEnv:", parallel)
    sys.exit(not (serial[2] == [3.0, 3.0] and parallel[2] == [2.0, 2.0]))
P
"$folder/venv/bin/python" run.py

#!/bin/bash
# One would guess: `reg` of AgileRL's contextual bandits, NeuralUCB and NeuralTS, the "loss
# regularization parameter", holds the last layer near where it began: the more, the less it moves.
# It is: the penalty is in the loss that is reported, and its gradient is zero. Weights after training
# are the same for any `reg`, because what they are compared with (`theta_0`) is made of the weights
# themselves, and not detached. Where it is detached, `reg` holds them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# what the two import of all that AgileRL asks for (JAX, games, clouds)
"$folder/venv/bin/pip" -q install --no-deps agilerl==2.58.0 agilerl-arena==1.28.0 2>/dev/null
"$folder/venv/bin/pip" -q install torch==2.14.1 numpy==2.4.6 tensordict==0.13.0 gymnasium==1.4.0 accelerate==1.15.0 \
  pettingzoo==1.26.1 pydantic==2.14.3 dill==0.4.1 fastrand==3.1.0 lazy-loader==0.6 peft==0.21.0 transformers==5.14.1 \
  pillow==13.0.0 wandb==0.31.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import torch
from agilerl.algorithms.neural_ts_bandit import NeuralTS
from agilerl.algorithms.neural_ucb_bandit import NeuralUCB
from gymnasium import spaces
from tensordict import TensorDict


def trained(algorithm, reg, detach=False):
    """Return how far the last layer moved in 200 steps of learning, and the loss that is reported."""
    torch.manual_seed(0)
    agent = algorithm(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), reg=reg)
    if detach:
        agent.theta_0 = agent.theta_0.detach().clone()
    begun = agent.theta_0.detach().clone()
    context = torch.randn(64, 4)
    batch = TensorDict({"obs": context, "reward": 2 * context[:, :1]}, [64])
    for _ in range(200):
        loss = agent.learn(batch)
    last = torch.cat([weights.detach().flatten() for weights in agent.exp_layer.parameters()])
    return (last - begun).norm().item(), loss


print("agilerl", importlib.metadata.version("agilerl"), "torch", torch.__version__)
same = held = True
for algorithm in (NeuralUCB, NeuralTS):
    moved = []
    for reg in (1e-6, 1.0, 1000.0):
        as_it_is, loss = trained(algorithm, reg)
        detached, _ = trained(algorithm, reg, detach=True)
        moved.append((as_it_is, detached))
        print(f"{algorithm.__name__:9} reg {reg:6g}: moved by {as_it_is:.4f} (detached: {detached:.4f}), loss {loss:.2f}")
    same &= all(abs(first - moved[0][0]) < 1e-3 for first, _ in moved)
    held &= moved[2][1] < 0.1 * moved[0][1]
sys.exit(not (same and held))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py 2>/dev/null

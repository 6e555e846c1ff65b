#!/bin/bash
# One would guess: d3rlpy's MinMaxObservationScaler, fitted to an environment one of whose observations
# has no upper bound (Box(0, inf): a time, a budget), refuses it, leaves it as it is, or fills it from
# what it sees.
# It is: it is scaled by an infinite range, so that every finite value becomes −1. The agent never sees
# that observation, learns without an error, and the others are scaled as they should be.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install d3rlpy==2.8.1 torch==2.14.1 numpy 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import d3rlpy
import gymnasium
import numpy as np


class Waiting(gymnasium.Env):
    """Observes a waiting time without a bound, and a share."""

    observation_space = gymnasium.spaces.Box(np.zeros(2, np.float32), np.array([np.inf, 1], np.float32))
    action_space = gymnasium.spaces.Discrete(2)


scaler = d3rlpy.preprocessing.MinMaxObservationScaler()
scaler.fit_with_env(Waiting())
observed = np.array([[10, 0.0], [30, 0.5], [60, 1.0]], np.float32)
scaled = scaler.transform_numpy(observed)
print("d3rlpy", importlib.metadata.version("d3rlpy"))
print("10, 30 and 60 become", scaled[:, 0].tolist(), "| 0, 0.5 and 1 become", scaled[:, 1].tolist())
sys.exit(scaled.tolist() != [[-1, -1], [-1, 0], [-1, 1]])
P
"$folder/venv/bin/python" run.py 2>/dev/null

#!/bin/bash
# One would guess: `evaluateDoublyRobust` of contextualbandits reads the array of reward estimates that it
# is given, so a second call with the same arguments gives the same estimate.
# It is: it writes the corrections into that array (its first column is a view), so each further call
# corrects what was corrected before, without end, and a policy judged after another one, with the same
# column of estimates, is judged by changed ones. Give it a copy each time.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install contextualbandits==0.3.30 numpy==2.4.6 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from contextualbandits.evaluation import evaluateDoublyRobust

draw = np.random.default_rng(0)
contexts = draw.random((10_000, 2))
chosen = draw.integers(2, size=10_000)
rewards = (draw.random(10_000) < np.where(chosen == 1, 0.8, 0.4)).astype(float)
probabilities = np.full(10_000, 0.5)
always = np.ones(10_000, dtype=int)
estimates = np.full((10_000, 2), 0.5)
copies = [
    evaluateDoublyRobust(always, contexts, chosen, rewards, probabilities, estimates.copy()) for _ in range(3)
]
again = [evaluateDoublyRobust(always, contexts, chosen, rewards, probabilities, estimates) for _ in range(3)]
print("contextualbandits", importlib.metadata.version("contextualbandits"))
print("the action that is right in 80 %, three times with a copy: ", [f"{value:.2f}" for value in copies])
print("the action that is right in 80 %, three times with an array:", [f"{value:.2f}" for value in again])
print("estimates afterwards:", *np.unique(estimates[:, 0]))
right = np.ptp(copies) == 0 and abs(copies[0] - 0.8) < 0.02
sys.exit(not (right and again[0] == copies[0] and again[1] - again[0] > 0.2 and again[2] - again[1] > 0.2))
P
"$folder/venv/bin/python" run.py

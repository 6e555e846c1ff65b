#!/bin/bash
# One would guess: intervals by get_interval_estimates of rliable are the same again with the same
# `random_state`, and others with another: "ensures reproducibility", its docstring says.
# It is: `random_state` is handed on to arch's bootstrap, whose draws rliable replaces by its own, from
# numpy's global state. The same `random_state` gives another interval each time, another one gives the
# same interval if np.random.seed was called before; the draws that it should decide are never made.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install arch==7.2.0 absl-py==2.5.1 numpy==2.4.6 scipy==1.17.1 pandas==2.3.3 statsmodels==0.15.0 2>/dev/null
# the intervals need nothing of seaborn
"$folder/venv/bin/pip" -q install --no-deps rliable==1.2.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from arch.bootstrap import IIDBootstrap
from rliable.library import get_interval_estimates

# accuracies of one policy: five seeds, four profiles
scores = np.random.default_rng(0).uniform(0.6, 0.9, (5, 4))


def mean(of):
    return np.array([of.mean()])


def rliable(state):
    return get_interval_estimates({"policy": scores}, mean, reps=500, random_state=state)[1]["policy"][:, 0]


def arch(state):
    return IIDBootstrap(scores, random_state=state).conf_int(mean, reps=500, method="percentile")[:, 0]


print(*(f"{name} {importlib.metadata.version(name)}" for name in ("rliable", "arch")), sep=", ")
print("interval of the mean accuracy     by rliable            by arch, which draws whole rows")
found = []
for seed, before in ((0, 1), (0, 2), (7, 1)):
    found.append([])
    for interval in (rliable, arch):
        np.random.seed(before)
        state = np.random.RandomState(seed)
        low, high = interval(state)
        # whether anything was drawn from it
        used = state.randint(2**31) != np.random.RandomState(seed).randint(2**31)
        found[-1].append((low, high, used))
    row = [f"{low:.5f} to {high:.5f}" + ("" if used else " (unused)") for low, high, used in found[-1]]
    print(f"random_state {seed}, np.random.seed({before})   {row[0]:30} {row[1]}")
(first, arch_first), (same_state, arch_same), (other_state, arch_other) = found
ignored = first == other_state != same_state and not first[2]
obeyed = arch_first == arch_same != arch_other and arch_first[2]
sys.exit(not (ignored and obeyed))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

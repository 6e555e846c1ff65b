#!/bin/bash
# One would guess: two estimators of pybandits bound the large importance weights that make an estimate
# from a log unstable: SwitchDoublyRobust leaves those above `switch_threshold` to the model of rewards,
# and is DoublyRobust by default, at a threshold of infinity; SubGaussianInverseProbabilityWeighting
# shrinks them the more, the larger `shrinkage_factor`.
# It is: SwitchDoublyRobust keeps the weights from the threshold on and drops those below, so with its
# default it is DirectMethod and uses no reward that was logged; `shrinkage_factor` changes nothing, and
# SubGaussianDoublyRobust does not have it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# the estimators alone need no more than these
"$folder/venv/bin/pip" -q install numpy==2.4.6 scipy==1.17.1 pydantic==2.13.5 loguru==0.6.0 2>/dev/null
"$folder/venv/bin/pip" -q install --no-deps pybandits==8.4.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from pybandits.offline_policy_estimator import (
    DoublyRobust,
    SubGaussianDoublyRobust,
    SubGaussianInverseProbabilityWeighting,
    SwitchDoublyRobust,
)

# three samples whose answers were right, under a model that expects 0: what is estimated for each is the
# weight that its reward got
propensity = np.array([1.0, 0.5, 0.025])
log = {
    "action": np.zeros(3, int),
    "reward": np.ones(3, int),
    "propensity_score": propensity,
    "estimated_policy": np.full((3, 2), 0.5),
    "expected_reward": np.zeros((3, 2)),
}
weight = 0.5 / propensity


def by_definition(factor):
    return weight / (1 - factor + factor * weight)


SWITCH, SHRUNK = SwitchDoublyRobust, SubGaussianInverseProbabilityWeighting
CASES = {
    "DoublyRobust": (DoublyRobust(), weight),
    "SwitchDoublyRobust": (SWITCH(), weight),
    "SwitchDoublyRobust, threshold 10": (SWITCH(switch_threshold=10.0), weight * (weight <= 10)),
    "SubGaussian…Weighting, factor .5": (SHRUNK(shrinkage_factor=0.5), by_definition(0.5)),
    "SubGaussian…Weighting, factor .9": (SHRUNK(shrinkage_factor=0.9), by_definition(0.9)),
}
print("pybandits", importlib.metadata.version("pybandits"))
print(f"{'':34}{'weights':24}by the definition")
found = []
for name, (estimator, defined) in CASES.items():
    found.append(estimator.estimate_sample_rewards(**log))
    row = ["  ".join(f"{value:5.2f}" for value in values) for values in (found[-1], defined)]
    print(f"{name:34}{row[0]:24}{row[1]}")
lacks = "shrinkage_factor" not in SubGaussianDoublyRobust.model_fields
print("SubGaussianDoublyRobust has no shrinkage_factor:", lacks)
robust, default, switched, half, most = found
changed = not (
    np.allclose(robust, weight)
    and not default.any()
    and np.allclose(switched, weight * (weight > 10))
    and np.allclose(half, weight)
    and np.allclose(most, weight)
    and lacks
)
sys.exit(changed)
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

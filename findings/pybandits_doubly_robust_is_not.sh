#!/bin/bash
# One would guess: DoublyRobust of pybandits estimates what a policy would get from what another one
# logged, and is right if either the model of rewards or the propensities are: where the model predicts
# every reward exactly, nothing is left to correct.
# It is: from the reward it subtracts not what the model predicts for the action that was logged, but the
# mean of what it predicts under the policy that is estimated. With an exact model and propensities taken
# as uniform, an accuracy of .9 is estimated as 1.025, above 1. With the right propensities it is unbiased,
# but the estimate varies with the log, where by the definition it does not at all.
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
from pybandits.offline_policy_estimator import DirectMethod, DoublyRobust, InverseProbabilityWeighting

ESTIMATORS = {
    "DirectMethod": DirectMethod(),
    "InverseProbabilityWeighting": InverseProbabilityWeighting(),
    "DoublyRobust": DoublyRobust(),
}
# of two kinds of samples, each is answered rightly by one of two settings
kinds = np.random.default_rng(0).integers(0, 2, 2000)
rows = np.arange(len(kinds))
accuracy = np.eye(2)[kinds]  # of each setting, as the model of rewards predicts it, exactly
policy = np.where(accuracy == 1, 0.9, 0.1)
truth = (policy * accuracy).sum(1).mean()
logged_first = np.where(kinds == 0, 0.9, 0.2)


def estimated(seed):
    """Return the estimates from one log: with its propensities, and with uniform ones."""
    action = (np.random.default_rng(seed).random(len(kinds)) >= logged_first).astype(int)
    reward = accuracy[rows, action].astype(int)
    found = []
    for propensity in (np.where(action == 0, logged_first, 1 - logged_first), np.full(len(kinds), 0.5)):
        shared = {
            "action": action,
            "reward": reward,
            "propensity_score": propensity,
            "estimated_policy": policy,
            "expected_reward": accuracy,
        }
        values = [of.estimate_sample_rewards(**shared).mean() for of in ESTIMATORS.values()]
        left = policy[rows, action] / propensity * (reward - accuracy[rows, action])
        found.append([*values, ((policy * accuracy).sum(1) + left).mean()])
    return found


logs = np.array([estimated(seed) for seed in range(50)])
print("pybandits", importlib.metadata.version("pybandits"))
print(f"accuracy of the policy {truth:.3f}, an exact model of rewards, 50 logs of {len(kinds)}")
print(f"{'':30}right propensities   uniform ones")
of = {}
for name, right, wrong in zip([*ESTIMATORS, "doubly robust, by definition"], *logs.transpose(1, 2, 0)):
    of[name] = right, wrong
    print(f"{name:30}{right.mean():.3f} ± {right.std():.4f} {wrong.mean():17.3f}")
ours, exact = of["DoublyRobust"], of["doubly robust, by definition"]
sys.exit(not (np.allclose(exact, truth) and ours[0].std() > 0.001 and ours[1].mean() > 1.02))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

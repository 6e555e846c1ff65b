#!/bin/bash
# One would guess: `predict_expectations` of MABWiser gives the reward that is expected of each arm, so a
# policy that is trained no further gives the same each time, and one may take it for the model of
# rewards of a direct or doubly robust estimate.
# It is: epsilon-greedy and LinGreedy give, as often as they explore, random numbers for all arms, and
# nothing tells these from means; Softmax and Popularity never give means. With epsilon=0 they are the
# means.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install mabwiser==2.7.4 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from mabwiser.mab import MAB, LearningPolicy

ARMS = ["small", "large"]
chosen = ["small"] * 100 + ["large"] * 100
rewards = [1] * 30 + [0] * 70 + [1] * 60 + [0] * 40
contexts = np.ones((200, 1))


def far_from_means(policy, *context):
    """How many of 1,000 calls give a number that is no mean, and the first such."""
    learner = MAB(ARMS, policy, seed=0)
    learner.fit(chosen, rewards, *([contexts] if context else []))
    given = [learner.predict_expectations(*context) for _ in range(1000)]
    off = [abs(one["small"] - 0.3) > 0.01 or abs(one["large"] - 0.6) > 0.01 for one in given]
    example = given[off.index(max(off))]
    return sum(off), {arm: round(float(value), 2) for arm, value in example.items()}


print("mabwiser", importlib.metadata.version("mabwiser"))
print("means: small 0.3, large 0.6")
policies = {
    "EpsilonGreedy(0)": (LearningPolicy.EpsilonGreedy(0),),
    "EpsilonGreedy(0.2)": (LearningPolicy.EpsilonGreedy(0.2),),
    "LinGreedy(0)": (LearningPolicy.LinGreedy(0), [[1.0]]),
    "LinGreedy(0.2)": (LearningPolicy.LinGreedy(0.2), [[1.0]]),
    "Softmax(1)": (LearningPolicy.Softmax(1),),
    "Popularity": (LearningPolicy.Popularity(),),
}
shown = {name: far_from_means(*policy) for name, policy in policies.items()}
for name, (off, example) in shown.items():
    print(f"{name}: {off} of 1000 are no means{', such as ' + str(example) if off else ''}")
off = [off for off, _ in shown.values()]
sys.exit(not (off[0] == off[2] == 0 and all(100 < some < 300 for some in (off[1], off[3])) and min(off[4:]) > 900))
P
"$folder/venv/bin/python" run.py

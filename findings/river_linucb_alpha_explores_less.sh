#!/bin/bash
# One would guess: `alpha` of river's LinUCBDisjoint is the alpha of LinUCB, by which the width of the
# confidence bound is multiplied, so who sees too little exploration raises it.
# It is: the precision of the prior of each arm's regression, and nothing multiplies the width. A larger
# alpha explores less: at 10 the first arm that is tried is the last.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install river==0.26.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import collections
import random
import sys

import river
from river import bandit

RIGHT = [0.3, 0.4, 0.5, 0.6, 0.7]
"""How often each arm is right."""


def pulls(alpha):
    draw = random.Random(0)
    policy = bandit.LinUCBDisjoint(alpha=alpha, seed=1)
    counts = collections.Counter()
    for _ in range(2000):
        context = {"bias": 1.0, "length": draw.random()}
        arm = policy.pull(range(len(RIGHT)), context=context)
        policy.update(arm, context, float(draw.random() < RIGHT[arm]))
        counts[arm] += 1
    return [counts[arm] for arm in range(len(RIGHT))]


print("river", river.__version__)
counts = {alpha: pulls(alpha) for alpha in (0.01, 0.1, 1.0, 10.0)}
for alpha, by_arm in counts.items():
    print(f"alpha {alpha}: pulls of each arm {by_arm}")
tried = {alpha: len(by_arm) - by_arm.count(0) for alpha, by_arm in counts.items()}
sys.exit(not (tried[0.01] == 5 and tried[10.0] <= 2 and max(counts[0.01]) < max(counts[10.0])))
P
"$folder/venv/bin/python" run.py

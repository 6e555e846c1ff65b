#!/bin/bash
# One would guess: Vowpal Wabbit minimises costs, so whoever has rewards (an answer was right: 1) learns
# from cost = -reward, and it makes no difference whether a right answer costs -1 and a wrong one 0, or
# 0 and 1.
# It is: none to SquareCB or epsilon-greedy, but RegCB holds costs to lie in 0…1 (--cb_min_cost and
# --cb_max_cost), and where they lie in -1…0 explores uniformly for ever, without a warning. With the
# bounds that the costs have it finds the best action.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install vowpalwabbit==9.11.9 numpy==2.4.6 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import sys

import numpy as np
import vowpalwabbit

WRONG = [0.9, 0.5, 0.1, 0.5]
"""How often each of four actions is wrong."""


def example(action=None, cost=None, probability=None):
    labels = ["" if number != action else f"{action}:{cost}:{probability} " for number in range(len(WRONG))]
    return ["shared |user u", *(f"{label}|action a={number}" for number, label in enumerate(labels))]


def learned(options, lowest):
    """How often it chooses the best action after 2,000 requests."""
    draw = np.random.default_rng(0)
    learner = vowpalwabbit.Workspace(f"--cb_explore_adf {options} --quiet")
    for _ in range(2000):
        chances = np.array(learner.predict(example()))
        action = draw.choice(len(WRONG), p=chances / chances.sum())
        cost = lowest + (draw.random() < WRONG[action])
        learner.learn(example(action, cost, chances[action]))
    return learner.predict(example())[2]


print("vowpalwabbit", vowpalwabbit.__version__)
best = {}
for lowest in (0, -1):
    for options in ("--squarecb", "--regcb", f"--regcb --cb_min_cost {lowest} --cb_max_cost {lowest + 1}"):
        best[lowest, options] = chance = learned(options, lowest)
        print(f"costs {lowest} and {lowest + 1}, {options}: the best action has probability {chance:.2f}")
uniform = best.pop((-1, "--regcb"))
sys.exit(not (uniform == 0.25 and min(best.values()) > 0.9))
P
"$folder/venv/bin/python" run.py

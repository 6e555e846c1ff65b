#!/bin/bash
# One would guess: what `predict` of a contextual bandit of Vowpal Wabbit returns are the probabilities
# of the actions: none is negative, and they sum to 1. So one draws by them, and logs that of the action
# that was drawn for inverse propensity scores.
# It is: before anything is learned, SquareCB with --elim gives the first of four actions -2 and the
# others 1 each, and RegCB-opt gives each 1; with costs outside its bounds, such as negated rewards,
# RegCB-opt stays there. numpy.random.choice refuses the first, and whoever divides by the sum logs the
# undivided ones. The other explorers of cb_explore_adf give probabilities.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install vowpalwabbit==9.11.9 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import sys

import vowpalwabbit


def example(action=None, cost=None):
    labels = ["" if number != action else f"{action}:{cost}:0.25 " for number in range(4)]
    return ["shared |user u", *(f"{label}|action a={number}" for number, label in enumerate(labels))]


print("vowpalwabbit", vowpalwabbit.__version__)
given = {}
for options in (
    *("--squarecb --elim", "--regcbopt", "--squarecb", "--regcb", "--epsilon 0.2", "--softmax --lambda 5"),
    *("--bag 3", "--cover 3", "--first 2", "--synthcover"),
):
    learner = vowpalwabbit.Workspace(f"--cb_explore_adf {options} --quiet")
    before = learner.predict(example())
    for step in range(400):
        action = step % 4
        learner.learn(example(action, -1 if action == 2 else 0))
    after = learner.predict(example())
    given[options] = [[round(value, 2) for value in values] for values in (before, after)]
    print(f"{options}: at first {given[options][0]}, then {given[options][1]}")
odd = [given.pop("--squarecb --elim")[0], *given.pop("--regcbopt")]
fair = [min(values) >= 0 and abs(sum(values) - 1) < 0.03 for pair in given.values() for values in pair]
sys.exit(not (odd == [[-2, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]] and all(fair)))
P
"$folder/venv/bin/python" run.py

#!/bin/bash
# One would guess: bootstrap_test of deepsig, "paired bootstrap test" in its docstring and README, draws
# samples, and keeps the two scores of each together; so of two settings that were run on the same samples
# it sees a small gain that is there in sample after sample.
# It is: it draws the scores of either setting by themselves, as if they were of other samples, so its
# p-value stays where it is when the rows of one setting are put into another order. Where the second
# setting is right wherever the first is, and in 12 of 200 samples more, p is .10. Drawn in pairs it would
# be .001, as permutation_test of the same library says, which keeps pairs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 joblib==1.6.0 tqdm==4.70.1 dill==0.4.1 psutil==7.2.2 2>/dev/null
"$folder/venv/bin/pip" -q install --no-deps deepsig==1.2.8 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from deepsig import bootstrap_test, permutation_test

samples = 200
small = np.zeros(samples)
small[:120] = 1
large = small.copy()
large[120:132] = 1  # right wherever the small one is, and in 12 samples more
elsewhere = np.random.default_rng(0).permutation(samples)


def of_pairs(better, worse, draws=1000):
    """Return the p-value of the same test, with the two scores of a sample drawn together."""
    gain = better - worse
    drawn = np.random.default_rng(0).integers(0, len(gain), (draws, len(gain)))
    return float((gain[drawn].mean(1) >= 2 * gain.mean()).mean())


print("deepsig", importlib.metadata.version("deepsig"))
print(f"right of {samples} samples: small {small.mean():.0%}, large {large.mean():.0%}")
print(f"{'p-value that the large one is better':38}same samples   rows of one in another order")
found = {}
for name, test in {
    "bootstrap_test, seed 0": lambda a, b: bootstrap_test(a, b, seed=0),
    "bootstrap_test, seed 5000": lambda a, b: bootstrap_test(a, b, seed=5000),
    "permutation_test, seed 0": lambda a, b: permutation_test(a, b, seed=0),
    "the bootstrap test of pairs": of_pairs,
}.items():
    found[name] = test(large, small), test(large, small[elsewhere])
    print(f"{name:38}{found[name][0]:12.4f}   {found[name][1]:12.4f}")
first, again, permuted, paired = found.values()
same = np.isclose(np.mean(first), np.mean(again), atol=0.04)
sys.exit(not (first[0] > 0.05 and again[0] > 0.05 and same and permuted[0] < 0.01 and paired[0] < 0.01))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

#!/bin/bash
# One would guess: autorank, which compares settings over the same samples, tests for two of them whether
# they differ, so its p-value is the same whichever column comes first, and is below .05 in 5 % of cases
# where they do not differ.
# It is: the test is a one-sided Wilcoxon test, in the direction of the medians. Of accuracies that are 0
# or 1, both medians are often 1; then it tests whether the first column is larger. Where the first
# setting is right in 55 % of samples and the second in 85 %, p is 1, "no difference"; with the columns
# the other way round it is 5e-10. Where medians differ, the direction is that of the data, and settings
# that are alike differ "significantly" about twice as often as they should.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install autorank==1.3.0 numpy==2.4.6 pandas==3.0.6 scipy==1.17.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import contextlib
import importlib.metadata
import io
import sys

import numpy as np
import pandas as pd
from autorank import autorank
from scipy.stats import wilcoxon


def p_value(table):
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its table
        result = autorank(table, alpha=0.05, force_mode="nonparametric")  # as it chooses for most of these
    return float(result.pvalue)


rng = np.random.default_rng(0)
right = pd.DataFrame(
    {"small": rng.random(200) < 0.6, "large": rng.random(200) < 0.85}, dtype=float
)
print("autorank", importlib.metadata.version("autorank"))
print(f"right of 200 samples: small {right['small'].mean():.0%}, large {right['large'].mean():.0%}")
first, second = p_value(right[["small", "large"]]), p_value(right[["large", "small"]])
two_sided = wilcoxon(right["small"], right["large"]).pvalue
print(f"p, columns small, large: {first:.2g} | columns large, small: {second:.2g} | two-sided: {two_sided:.2g}")

found, expected, trials = 0, 0, 400
for seed in range(trials):
    rng = np.random.default_rng(seed)
    of_sample = rng.exponential(size=60)
    times = pd.DataFrame({name: of_sample + rng.exponential(size=60) for name in ("a", "b")})
    found += p_value(times) < 0.05
    expected += wilcoxon(times["a"], times["b"]).pvalue < 0.05
print(f"settings with times of one distribution differ, p < .05: {found / trials:.1%} of {trials}, ", end="")
print(f"two-sided: {expected / trials:.1%}")
sys.exit(not (first > 0.99 and second < 1e-6 and found > 1.3 * expected))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

#!/bin/bash
# One would guess: get_proportion_under_quantile of uncertainty-toolbox says which share of times is below a
# predicted quantile, and get_quantile_recalibrator mends quantiles: of times with a long tail, 93 % of which are
# within their 95 % deadlines, about 95 % are within recalibrated ones.
# It is: it looks at prediction minus truth where truth minus prediction is meant, so it counts the times that
# are above the quantile of 5 %, and says 100 %. Quantiles that are recalibrated by it go the wrong way: 85 %
# are within their deadlines. Of errors that are as often early as late, nothing of it is seen.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 matplotlib==3.11.1 2>/dev/null
"$folder/venv/bin/pip" -q install --no-deps uncertainty-toolbox==0.1.1 tqdm==4.70.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from uncertainty_toolbox.metrics_calibration import get_proportion_under_quantile, get_quantile
from uncertainty_toolbox.recalibration import get_quantile_recalibrator

MS = 200.0


def answers(count, errors):
    """Return predicted times in milliseconds, which are right on average, their spread, and the times taken."""
    tokens = rng.uniform(20, 400, count)
    return 5 * tokens + 500, np.full(count, MS), 5 * tokens + 500 + MS * errors(count)


def on_time(taken, deadlines):
    """Return the share of answers within their deadlines."""
    return float(np.mean(taken <= deadlines))


rng = np.random.default_rng(0)
late = {
    "a long tail": lambda count: rng.exponential(size=count) - 1,
    "as often early as late": lambda count: rng.normal(size=count),
}
print("uncertainty-toolbox", importlib.metadata.version("uncertainty-toolbox"))
print(f"{'':24}{'level':>7}{'below: said':>13}{'is':>8}{'mirrored':>10}{'new on time':>13}{'recalibrated':>14}")
found = {}
for name, errors in late.items():
    predicted, spread, taken = answers(4000, errors)
    new, new_spread, new_taken = answers(20000, errors)
    recalibrated = get_quantile_recalibrator(predicted, spread, taken)
    for level in (0.5, 0.9, 0.95):
        found[name, level] = row = (
            get_proportion_under_quantile(predicted, spread, taken, level),
            on_time(taken, get_quantile(predicted, spread, level)),
            float(np.mean(taken >= get_quantile(predicted, spread, 1 - level))),
            on_time(new_taken, get_quantile(new, new_spread, level)),
            on_time(new_taken, recalibrated(new, new_spread, level)),
        )
        said, true, mirrored, before, after = row
        print(f"{name:24}{level:7.0%}{said:13.1%}{true:8.1%}{mirrored:10.1%}{before:13.1%}{after:14.1%}")
said, true, mirrored, before, after = found["a long tail", 0.95]
off = said > 0.99 and true < 0.94 and said == mirrored and before > 0.91 and after < 0.88
fair = found["as often early as late", 0.95]
sys.exit(not (off and abs(fair[0] - fair[1]) < 0.02 and abs(fair[4] - 0.95) < 0.02))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

#!/bin/bash
# One would guess: an interval of nonconformist for signed errors (SignErrorErrFunc) leaves as many answers out
# above as below; at significance 0.1, 5 % take longer than its upper end, which is thus a deadline of 95 %.
# It is: a score is prediction minus truth, but the interval adds scores to the prediction, so it is mirrored:
# of times with a long tail 15 % take longer and none less, and 85 % are within it, not 90 %. Intervals of all
# levels, which it gives without a significance, are others: 5 % take longer, for their upper end is the lower
# one mirrored once more. AbsErrorErrFunc keeps its 90 %. Of errors that are as often early as late, nothing
# of it is seen.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 scikit-learn==1.9.1 2>/dev/null
"$folder/venv/bin/pip" -q install --no-deps nonconformist==2.1.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from nonconformist.icp import IcpRegressor
from nonconformist.nc import AbsErrorErrFunc, NcFactory, SignErrorErrFunc
from sklearn.linear_model import LinearRegression


def answers(count, errors):
    """Return tokens of requests, and times in milliseconds."""
    tokens = rng.uniform(20, 400, count)
    return tokens[:, None], 5 * tokens + 500 + 200 * errors(count)


rng = np.random.default_rng(0)
late = {
    "a long tail": lambda count: rng.exponential(size=count) - 1,
    "as often early as late": lambda count: rng.normal(size=count),
}
print("nonconformist", importlib.metadata.version("nonconformist"))
print(f"{'intervals of 90 %':62}below   above  within")
found = {}
for name, errors in late.items():
    fitted, calibrated, (new, taken) = (answers(count, errors) for count in (1000, 3999, 20000))
    for score in (SignErrorErrFunc, AbsErrorErrFunc):
        model = IcpRegressor(NcFactory.create_nc(LinearRegression(), score()))
        model.fit(*fitted)
        model.calibrate(*calibrated)
        intervals = {"significance=0.1": model.predict(new, significance=0.1)}
        intervals["all levels"] = model.predict(new)[:, :, 9]
        for asked, ends in intervals.items():
            below, above = float(np.mean(taken < ends[:, 0])), float(np.mean(taken > ends[:, 1]))
            found[name, score.__name__, asked] = below, above
            row = f"{name}, {score.__name__}, {asked}"
            print(f"{row:60}{below:7.1%}{above:8.1%}{1 - below - above:8.1%}")
below, above = found["a long tail", "SignErrorErrFunc", "significance=0.1"]
off = below < 0.01 and above > 0.12 and found["a long tail", "SignErrorErrFunc", "all levels"][1] < 0.07
kept = abs(sum(found["a long tail", "AbsErrorErrFunc", "significance=0.1"]) - 0.1) < 0.02
fair = max(abs(end - 0.05) for end in found["as often early as late", "SignErrorErrFunc", "significance=0.1"]) < 0.02
sys.exit(not (off and kept and fair))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

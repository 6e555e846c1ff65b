#!/bin/bash
# One would guess: of asf, the algorithm selection framework, every selector takes `maximize=True` where
# more is better (an accuracy), as its README says: "pass maximize=True to the selector".
# It is: RPCSelector, SATzilla, SUNNY and OSLLinearSelector take it, without a warning, and go on to
# minimise: for each sample they choose what they learned to be the worst. PerformanceModel and
# PairwiseClassifier obey. The same selectors, given 1 − accuracy to minimise, choose well.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install asf==0.1.8 scikit-learn==1.9.1 pandas==3.1.1 numpy==2.4.6 scipy==1.17.1 joblib==1.6.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
import pandas as pd
from asf.selectors import OSLLinearSelector, PairwiseClassifier, PerformanceModel, RPCSelector, SATzilla, SUNNY

SHARED = {"PerformanceModel": PerformanceModel, "PairwiseClassifier": PairwiseClassifier}
IGNORED = {"RPCSelector": RPCSelector, "SATzilla": SATzilla, "SUNNY": SUNNY, "OSLLinearSelector": OSLLinearSelector}
x = np.random.default_rng(0).uniform(-1, 1, (300, 2))
rows = [f"sample {i}" for i in range(len(x))]
features = pd.DataFrame(x, rows, ["first", "second"])
# the accuracies of three settings, of which each is the best of some samples
accuracy = pd.DataFrame(
    {"a": 0.5 + 0.4 * x[:, 0], "b": 0.5 - 0.4 * x[:, 0], "c": 0.5 + 0.4 * x[:, 1]}, rows
)
fitted, tested = rows[:200], rows[200:]


def chosen(selector, performance):
    """Return the mean accuracy of the first setting that is chosen for each sample that was not fitted."""
    selector.fit(features.loc[fitted], performance.loc[fitted])
    schedules = selector.predict(features.loc[tested])
    return float(np.mean([accuracy.loc[row, schedules[row][0][0]] for row in tested]))


at = accuracy.loc[tested]
best, worst = at.max(axis=1).mean(), at.min(axis=1).mean()
print("asf", importlib.metadata.version("asf"))
print(f"accuracy of the best choices {best:.3f}, of any {at.to_numpy().mean():.3f}, of the worst {worst:.3f}")
print(f"{'':20} maximize=True of it   minimised, of 1 - it")
found = {}
for name, of in (SHARED | IGNORED).items():
    found[name] = [chosen(of(budget=1.0, maximize=True), accuracy), chosen(of(budget=1.0), 1 - accuracy)]
    print(f"{name:20} {found[name][0]:18.3f} {found[name][1]:22.3f}")
well = all(value > best - 0.02 for name in SHARED for value in found[name])
badly = all(found[name][0] < worst + 0.02 and found[name][1] > best - 0.02 for name in IGNORED)
sys.exit(not (well and badly))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

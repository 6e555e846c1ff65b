#!/bin/bash
# One would guess: predict_quantiles of conformal-tights changes nothing in the model, so the quantiles of
# times are the same when they are asked for again, whatever was asked for in between.
# It is: what calibrates quantiles is kept, for each tuple of them, and priority="coverage" moves these very
# arrays. From then on the same quantiles with priority="accuracy", the default, are those of "coverage",
# which are meant to be wider. Of four models, two give other deadlines from then on, in one of them by up to
# 1.5 s, and with 94.0 % of answers in time where it was 91.6 %. A model that is fitted anew gives the first
# ones again. So what a process predicts depends on what it was asked before.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 scikit-learn==1.9.1 xgboost-cpu==3.2.0 2>/dev/null
# only its forecaster needs Darts: the module of the regressor is imported without it
"$folder/venv/bin/pip" -q install --no-deps conformal-tights==0.5.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys
from importlib.util import find_spec
from types import ModuleType

import numpy as np

package = ModuleType("conformal_tights")
package.__path__ = find_spec("conformal_tights").submodule_search_locations
sys.modules["conformal_tights"] = package
from conformal_tights._conformal_coherent_quantile_regressor import ConformalCoherentQuantileRegressor

QUANTILES = 0.05, 0.95


def answers(count):
    """Return tokens and load of requests, and times in milliseconds."""
    tokens, load = rng.integers(20, 400, count).astype(float), rng.uniform(0, 1, count)
    return np.column_stack([tokens, load]), 5 * tokens * (1 + 2 * load * rng.exponential(size=count))


rng = np.random.default_rng(5)
features, times = answers(1500)
new, taken = answers(2000)
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("conformal-tights", "xgboost-cpu")), sep=", ")
print("answers within their 95 % deadline, and by how much a deadline differs from the first at most")
found = []
for seed in (0, 1, 3, 4):
    model = ConformalCoherentQuantileRegressor(random_state=seed).fit(features, times)
    asked = {
        "first": model.predict_quantiles(new, quantiles=QUANTILES),
        "again": model.predict_quantiles(new, quantiles=QUANTILES),
        "coverage": model.predict_quantiles(new, quantiles=QUANTILES, priority="coverage"),
        "after it": model.predict_quantiles(new, quantiles=QUANTILES),
    }
    anew = ConformalCoherentQuantileRegressor(random_state=seed).fit(features, times)
    asked["fitted anew"] = anew.predict_quantiles(new, quantiles=QUANTILES)
    moved = {name: np.abs(of[:, 1] - asked["first"][:, 1]).max() for name, of in asked.items()}
    cells = (f"{name} {(taken <= asked[name][:, 1]).mean():.1%}, {moved[name]:.0f} ms" for name in asked)
    print(f"model {seed}: {' | '.join(cells)}")
    same = (asked["after it"] == asked["coverage"]).all() and not moved["again"] and not moved["fitted anew"]
    found.append((same, moved["after it"]))
sys.exit(not (all(same for same, _ in found) and sum(moved > 10 for _, moved in found) >= 2))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

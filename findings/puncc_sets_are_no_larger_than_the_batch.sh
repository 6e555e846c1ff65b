#!/bin/bash
# One would guess: the prediction set that APS and RAPS of puncc give for a request is the same whether it is
# asked for alone, as a router asks, or with others; so 90 % of the sets hold the true class either way.
# It is: no set has more classes than there are requests in the call, because its size is cut at the number of
# rows, not of classes. Of 1000 requests with six classes, whose probabilities are exact, the set holds the true
# class in 91 % if all are asked for at once, in 81 % if three are, and in 40 % one by one. The sets of LAC are
# the same always.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==1.26.4 scipy==1.17.1 pandas==3.0.6 scikit-learn==1.9.1 2>/dev/null
# of what it asks for, matplotlib is left out: it is for plots alone
"$folder/venv/bin/pip" -q install --no-deps puncc==0.9.3 joblib==1.6.0 tqdm==4.70.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

import numpy as np
from deel.puncc.api.prediction import BasePredictor
from deel.puncc.classification import APS, LAC, RAPS

CLASSES = 6


class Exact(BasePredictor):
    """Gives the probabilities from which the classes were drawn: they are the features."""

    def predict(self, X, **_):
        return X


def requests(count):
    """Return probabilities of the classes, and a class drawn from each row of them."""
    probabilities = rng.dirichlet(np.ones(CLASSES), count)
    return probabilities, np.array([rng.choice(CLASSES, p=row) for row in probabilities])


rng = np.random.default_rng(0)
features, classes = requests(2000)
new, true = requests(1000)
methods = {
    "APS": lambda model: APS(model, train=False),
    "APS, rand=False": lambda model: APS(model, train=False, rand=False),
    "RAPS": lambda model: RAPS(model, train=False, lambd=0.01, k_reg=2),
    "LAC": lambda model: LAC(model, train=False),
}
sizes = 1000, 100, 6, 3, 2, 1
print("puncc", importlib.metadata.version("puncc"))
print("of 1000 requests, how many have a set of 90 % that holds the true class, and how large the largest set is")
print(f"{'requests in a call':18}" + "".join(f"{size:12}" for size in sizes))
found = {}
for name, make in methods.items():
    np.random.seed(0)
    method = make(Exact(None, is_trained=True))
    method.fit(X_calib=features, y_calib=classes)
    cells = ""
    for size in sizes:
        sets = []
        for first in range(0, len(new), size):
            sets += list(method.predict(new[first : first + size], alpha=0.1)[1])
        held = np.mean([each in chosen for each, chosen in zip(true, sets)])
        largest = max(len(chosen) for chosen in sets)
        found[name, size] = held, largest
        cells += f"{held:7.1%}, {largest:3}"
    print(f"{name:18}{cells}")
names = [name for name in methods if name != "LAC"]
cut = all(found[name, size][1] <= size for name in names for size in (3, 2, 1))
short = all(found[name, 1000][0] > 0.87 and found[name, 3][0] < 0.87 and found[name, 1][0] < 0.6 for name in names)
sys.exit(not (cut and short and found["LAC", 1] == found["LAC", 1000]))
P
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore run.py

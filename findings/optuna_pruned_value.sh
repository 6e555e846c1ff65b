#!/bin/bash
# One would guess: in `study.trials_dataframe()` of Optuna a trial that was pruned has no `value`, as
# one that failed has none.
# It is: its `value` is the last intermediate one, such as the accuracy after the first of ten steps,
# beside those of whole runs, and its `duration` is that of the part that ran. Only `state` tells.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install optuna==5.0.0 pandas==3.1.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import sys

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    depth = trial.suggest_int("depth", 1, 3)
    for step in range(10):
        trial.report(0.1 * (step + 1), step)
        if depth == 2:
            raise optuna.TrialPruned
        if depth == 3:
            raise RuntimeError("out of memory")
    return 1.0


study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"depth": [1, 2, 3]}))
study.optimize(objective, catch=RuntimeError)
frame = study.trials_dataframe(("params", "value", "state")).sort_values("params_depth")
print("optuna", optuna.__version__)
print(frame.to_string(index=False))
values = frame["value"].tolist()
sys.exit(not (values[0] == 1.0 and values[1] == 0.1 and values[2] != values[2]))
P
"$folder/venv/bin/python" run.py

#!/bin/bash
# One would guess: `ResultGrid.get_dataframe()` of Ray Tune has a row for each trial, and that of a
# trial which failed is empty or has its error, so that means over the rows of a setting show that it
# fails.
# It is: a trial that failed before its first report has no row, and nothing in the frame says so.
# Of a setting that fails on what is hard, the mean of what is left is better than it is.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install "ray[tune]==2.60.0" 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import os
import sys

import ray
from ray import tune

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="fatal")


def trial(config):
    if config["setting"] == "large" and config["sample"] == 1:
        raise RuntimeError("out of memory")
    tune.report({"accuracy": 1.0})


grid = {"sample": tune.grid_search([0, 1]), "setting": tune.grid_search(["small", "large"])}
run = tune.RunConfig(name="run", storage_path=os.path.abspath("results"), verbose=0)
results = tune.Tuner(trial, param_space=grid, run_config=run).fit()
frame = results.get_dataframe()
print("ray", ray.__version__)
print("trials", len(results), "| errors", results.num_errors, "| rows", len(frame))
print(frame.groupby("config/setting")["accuracy"].agg(["size", "mean"]).to_string())
print("columns with the error:", [name for name in frame if "err" in name.lower()])
sys.exit(not (len(results) == 4 and results.num_errors == 1 and len(frame) == 3))
P
"$folder/venv/bin/python" run.py 2>/dev/null

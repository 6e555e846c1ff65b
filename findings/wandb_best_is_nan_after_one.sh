#!/bin/bash
# One would guess: with `define_metric(name, summary="max,min")` W&B keeps the largest and smallest
# number that was logged, and a step whose value is NaN (a mean over no rows, say) is left out, as
# numpy's fmax does and as a plain summary shows it, which the next number replaces.
# It is: after one NaN both stay NaN to the end of the run, whatever follows, so that a sweep that
# ranks runs by the best of a metric has none for this one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install wandb==0.31.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import glob
import json
import math
import os
import subprocess
import sys

os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
import wandb

run = wandb.init(project="one", settings=wandb.Settings(console="off"))
run.define_metric("accuracy", summary="max,min")
for value in (0.4, math.nan, 0.9, 0.2):
    run.log({"accuracy": value, "plain": value})
run.finish()
command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", glob.glob("wandb/offline-run-*")[0]]
records = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
updates = [json.loads(record).get("summary", {}).get("update", {}) for record in records]
shown = [(update["accuracy"], update["plain"]) for update in updates if "accuracy" in update]
print("wandb", wandb.__version__)
for logged, (best, plain) in zip((0.4, math.nan, 0.9, 0.2), shown, strict=True):
    print("logged", logged, "| best", best, "| plain summary", plain)
best = {"max": "NaN", "min": "NaN"}
sys.exit([kept for kept, _ in shown] != [{"max": 0.4, "min": 0.4}, best, best, best] or shown[-1][1] != 0.2)
P
"$folder/venv/bin/python" run.py 2>/dev/null

#!/bin/bash
# One would guess: in SMAC's runhistory.json a run that crashed has the time it took, as `endtime -
# starttime` has it, and every entry is JSON.
# It is: `time` of a crashed run is 0.0, so that means of `time` make a setting faster the more it
# crashes; its cost is written as `Infinity`, which is not JSON (jq reads 1.79e308, others refuse the
# file). `status` (1: success, 2: crashed) tells.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install smac==2.4.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import json
import sys
import time
from pathlib import Path

from ConfigSpace import ConfigurationSpace
from smac import AlgorithmConfigurationFacade, Scenario

space = ConfigurationSpace({"depth": (1, 9)})
scenario = Scenario(
    space, instances=["a", "b"], n_trials=6, deterministic=True, output_directory=Path("out"), seed=1
)


def target(config, instance, seed=0):
    time.sleep(0.2)
    if instance == "b":
        raise RuntimeError("out of memory")
    return 0.5


smac = AlgorithmConfigurationFacade(scenario, target, logging_level=50)
try:
    smac.optimize()
except ValueError:
    pass  # its model takes no infinite cost
smac.runhistory.save("runhistory.json")
text = Path("runhistory.json").read_text()
print("smac", importlib.metadata.version("smac"))
crashed = [row for row in json.loads(text)["data"] if row["status"] == 2]
for row in crashed[:2]:
    print("time", row["time"], "| took", round(row["endtime"] - row["starttime"], 1), "| cost", row["cost"])
print("Infinity in the file:", "Infinity" in text)
sys.exit(not (crashed and all(row["time"] == 0 for row in crashed) and "Infinity" in text))
P
"$folder/venv/bin/python" run.py 2>/dev/null

"""The centre stands alone: a bandit, a policy, GRPO and the loop load nothing else of ours."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from helpers import small_table
from test_layout import ROOT

OUTSIDE = (
    "envs.readers",
    "envs.demonstrations",
    "agents.selector",
    "agents.teacher",
    "agents.calibration",
    "agents.deployed",
    "agents.evaluation",
    "serving",
    "agents.learning",
    "profiling",
    "testbeds",
    "experiments",
)
TRAINING = """
import json, sys
from pathlib import Path

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.controllers import controller_trainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.tables.profile_table import ProfileTable

table = ProfileTable.load("t.safetensors")

class Stops:
    def log(self, metrics, step):
        if step == 2:
            raise KeyboardInterrupt

def trainer(log=None):
    optimiser = OptimiserConfig(
        pretrain_iterations=1, iterations=3, contexts=8, minibatch=8, evaluate_every=1
    )
    settings = {"policy": PolicyConfig(hidden=8), "optimiser": optimiser, "log": log}
    return controller_trainer(table, table.split(), folder=Path("."), **settings)

try:
    trainer(Stops()).run()
except KeyboardInterrupt:
    pass
going_on = trainer()
assert going_on.resume(Path("last.pt"))
assert 0 < going_on.state.iteration < 4
going_on.run()
print(json.dumps({
    name: module.__file__
    for name, module in sys.modules.items()
    if name.split(".")[0] == "knobwise" and getattr(module, "__file__", None)
}))
"""


def test_training_loads_the_centre_alone(tmp_path):
    small_table(30).save(tmp_path / "t.safetensors")
    printed = subprocess.check_output([sys.executable, "-c", TRAINING], cwd=tmp_path, text=True)
    files = json.loads(printed.splitlines()[-1])
    outside = [name for name in files if name.startswith(tuple(f"knobwise.{x}" for x in OUTSIDE))]
    assert not outside
    sources = [Path(file) for file in files.values()]
    # what is imported in a function would come later
    for path in sources:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                imports = [node for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
                assert not [node.module for node in imports if "knobwise" in str(node.module)]


def test_the_reading_path_names_what_is_there():
    section = (ROOT / "docs/concepts.md").read_text().split("## Read the code in an hour")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    files = [re.findall("`([^`]+)`", row) for row in rows if ".py`" in row]
    assert files
    for path, *names in files:
        for name in names:
            tree = ast.parse((ROOT / path).read_text())
            for part in name.split("."):
                (tree,) = [node for node in tree.body if getattr(node, "name", "") == part]

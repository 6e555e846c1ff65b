"""What people wait for: start-up of the command line, `import knobwise`, the report of a run.

Start-up is the CPU time of whole processes; beside it stands what Python and its libraries take by
themselves.

    python benchmarks/commands.py
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

from timing import Bench, run

from knobwise.__main__ import main as knobwise
from knobwise.experiments.report.report import write_report

TINY = "policy.teacher=false baselines=false seeds=[0] tracking.mode=disabled"
TINY += " optimiser.iterations=2 optimiser.pretrain_iterations=2"


def main() -> None:
    """Time start-up, then the report of a short run."""
    bench = Bench()
    for what, words, libraries in (
        ("import knobwise", ("-c", "import knobwise"), "import numpy"),
        ("knobwise train --help", ("-m", "knobwise", "train", "--help"), "import hydra"),
        (
            "knobwise inspect profile=builtin",
            ("-m", "knobwise", "inspect", "profile=builtin"),
            "import torch, polars",
        ),
    ):
        alone = {libraries: functools.partial(run, "-c", libraries)}
        bench.line(what, "s", functools.partial(run, *words), alone.copy)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if knobwise(["train", "experiment=lean", *TINY.split(), "name=tiny"]):
            sys.exit("the short run failed")
        bench.line("report of a run", "s", functools.partial(write_report, Path("runs/lean/tiny")))
        os.chdir("/")


if __name__ == "__main__":
    main()

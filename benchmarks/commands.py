"""What people wait for: start-up of the command line, of a loaded policy and of a server, `import
knobwise`, `make quick`, the report of a run.

Start-up is the CPU time of whole processes; beside it stands what Python and its libraries take by
themselves, and beside a loaded policy that is exported, read by its own package. A server answers
one chat, and ends.

    python benchmarks/commands.py
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from proxy import CHAT, TEXT, answering, measured, served
from timing import Bench, peak_mb, run

from knobwise.__main__ import main as knobwise
from knobwise.experiments.report.report import write_report

TINY = "policy.teacher=false baselines=false seeds=[0] tracking.mode=disabled"
TINY += " optimiser.iterations=2 optimiser.pretrain_iterations=2"
TABLE = "profile=table profile.path=measured.csv profile.features=[prompt_words]"
DECIDED = """
features = {name: np.full(width, 0.1, np.float32) for name, width in policy.SIZES.items()}
policy.decide(features, 20.0)
"""
LOADED = "import numpy as np, knobwise; policy = knobwise.load(RUN)" + DECIDED
PACKAGE = """
import sys
sys.path.insert(0, RUN)
import numpy as np
from policy import NumpyController
policy = NumpyController.load(RUN + "/controller.npz")
"""
EXPORTED = PACKAGE + DECIDED
LIBRARIES = "import aiohttp, numpy, prometheus_client, starlette.applications, uvicorn"


def train(*words: str) -> None:
    """Train in this process, which ends if that fails."""
    if knobwise(["train", *words]):
        sys.exit("the short run failed")


def load_and_decide(bench: Bench, folder: str) -> None:
    """Time `knobwise.load` of a run and one decision, and measure its memory."""
    where = f"RUN = {folder!r}\n"
    ours = "-c", where + LOADED.replace("SIZES", "features")
    exported = "-c", where + EXPORTED.replace("SIZES", "feature_sizes")
    peers = {"the exported policy": functools.partial(run, *exported)}
    what = "a process with `knobwise.load` of a run and a decision"
    bench.line(what, "s", functools.partial(run, *ours), peers.copy, target="≤ 2 ×")
    mine = peak_mb(*ours)
    ratio = "" if bench.ours else f"{mine / peak_mb(*exported):.3g} × the exported policy"
    bench.tell("its peak memory", "MB", mine, ratio, target="≤ 2 ×")


def ask_a_new_server(checkpoint: str, upstream: int) -> None:
    """Start a server in front of an upstream, and wait for one answer and its end."""
    body = {"model": "auto", "stream": True, "budget_ms": 1000, "chunks": 1}
    content = json.dumps(body | {"messages": [{"role": "user", "content": TEXT}]}).encode()
    with served(Path.cwd(), f"http://127.0.0.1:{upstream}/v1", checkpoint) as (port, _):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{CHAT}", content)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            answer.read()


def quick() -> None:
    """Run what `make quick` runs, in a folder of its own."""
    words = "train experiment=lean seeds=[0] baselines=false tracking=offline"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "knobwise", *words.split()]
        subprocess.run(command, check=True, cwd=folder, capture_output=True)


def main() -> None:
    """Time start-up and `make quick`, then what is done with a short run."""
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
    bench.line("make quick", "s", quick)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        train("experiment=lean", *TINY.split(), "name=tiny")
        load_and_decide(bench, "runs/lean/tiny")
        measured().write_csv("measured.csv")
        train("experiment=lean", *TINY.split(), *TABLE.split(), "name=served")
        with answering() as (upstream, _):
            for what, place in (
                ("a file", "runs/lean/served/controller.npz"),
                ("a run", "runs/lean/served"),
            ):
                start = functools.partial(ask_a_new_server, place, upstream)
                alone = {"its libraries": functools.partial(run, "-c", LIBRARIES)}
                bench.line(f"a server of {what}, to its first answer", "s", start, alone.copy)
        bench.line("report of a run", "s", functools.partial(write_report, Path("runs/lean/tiny")))
        os.chdir("/")


if __name__ == "__main__":
    main()

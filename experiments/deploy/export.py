"""Export a trained controller as a file that decides with NumPy alone, compared with it and timed."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, network_of
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.export import Agent, contexts_of, export_numpy, one_by_one, parity
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.common.checks import at_least
from knobwise.common.files import write_text, written_whole
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.evaluate import check_fits
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.settings.options import ExportRun
from knobwise.experiments.settings.profiles import read_profile

CALLS = 300
"""Timed decisions, and samples whose requests are also decided one by one."""


def run(config: ExportRun) -> Path:
    """Write controller.npz, numpy_controller.py and export.json; returns their folder.

    Raises:
        InputError: if there is no such checkpoint, the profile has other configurations or features, the controller
            cannot be exported, or the file makes a different decision.
    """
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    checkpoint = checkpoint_at(config.checkpoint)
    loaded = load_checkpoint(checkpoint)
    agent, out = loaded.controller, Path(config.out)
    table = read_profile(config.profile, loaded)
    check_fits(config.checkpoint, agent, table)
    summary: dict[str, Any] = {"checkpoint": {"path": str(checkpoint), "digest": _digest(checkpoint)}}
    budgets_ms = contexts_of(agent, table)
    summary |= {
        "trained_on": {"name": loaded.profile_name, "digest": loaded.profile_digest},
        "compared_on": {"name": table.name, "digest": table.digest, "budgets_ms": budgets_ms.tolist()},
        "features": network_of(agent).normaliser.sizes,
    }
    # everything is made and compared in a temporary folder, so that no wrong file is left behind
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        with threadpool_limits(config.threads):
            summary |= _make(agent, table, budgets_ms, made / "controller.npz")
        shutil.copy(numpy_controller.__file__, made)
        summary["files"] = {}
        for path in sorted(made.iterdir()):
            summary["files"][path.name] = {"bytes": path.stat().st_size, "digest": _digest(path)}
            with written_whole(out / path.name) as temporary:
                shutil.copyfile(path, temporary)
    write_text(out / "export.json", json.dumps(summary, indent=1))
    header = ["requests", "same decision", "rounding", "of contexts"]
    rows = [
        [name, *(str(summary[key][count]) for count in ("same", "rounding", "contexts"))]
        for name, key in (("together", "parity"), ("one at a time", "parity_one_by_one"))
    ]
    print_table(Console(), header, rows, range(len(header)))
    print_lines(Console(), [f"median decision: {summary['decision_us_p50']:.0f} µs", f"exported: {out}"])
    return out


def _make(agent: Agent, table: ProfileTable, budgets_ms: Tensor, path: Path) -> dict[str, Any]:
    """Write the controller's file; returns how its decisions compare with the controller's, and their median time."""
    controller = export_numpy(agent, path)
    # single requests run other code, and take longer to compare
    alone = f"{path.name}, one request at a time"
    return {
        "parity": parity(agent, controller.choose, table, budgets_ms, path.name),
        "parity_one_by_one": parity(agent, one_by_one(controller), table, budgets_ms, alone, CALLS),
        "decision_us_p50": _median_us(controller, table, budgets_ms),
    }


def _median_us(controller: NumpyController, table: ProfileTable, budgets_ms: Tensor) -> float:
    """The median time of `CALLS` decisions, in µs."""
    micros = []
    for i in range(CALLS):
        row = {name: block[i % table.num_samples].numpy() for name, block in table.features.items()}
        limit = float(budgets_ms[i % len(budgets_ms)])
        start = time.perf_counter_ns()
        controller.decide(row, limit)
        micros.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(micros)


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"

"""Export a trained controller as files that decide without knobwise, compared with it and timed."""

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
from knobwise.agents.serving.onnx_graph import Deployed, OnnxController, quantise, write_onnx
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
GRAPH = "controller.onnx"
GRAPH_OF_8_BITS = "controller.int8.onnx"


def run(config: ExportRun) -> Path:
    """Write controller.npz, numpy_controller.py, export.json and the graphs asked for; returns their folder.

    Raises:
        InputError: if there is no such checkpoint, the profile has other configurations or features, the controller
            cannot be exported, or a file other than that of 8 bits makes a different decision.
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
            summary |= _make(config, agent, table, budgets_ms, made)
        shutil.copy(numpy_controller.__file__, made)
        for name in (GRAPH, GRAPH_OF_8_BITS):  # what is left there may be of another controller
            (out / name).unlink(missing_ok=True)
        summary["files"] = {}
        for path in sorted(made.iterdir()):
            summary["files"][path.name] = {"bytes": path.stat().st_size, "digest": _digest(path)}
            with written_whole(out / path.name) as temporary:
                shutil.copyfile(path, temporary)
    write_text(out / "export.json", json.dumps(summary, indent=1))
    header = ["requests", "same decision", "rounding", "of contexts"]
    compared = {"together": summary["parity"], "one at a time": summary["parity_one_by_one"], **summary["graphs"]}
    rows = [
        [name, *(str(result[count]) for count in ("same", "rounding", "contexts"))] for name, result in compared.items()
    ]
    print_table(Console(), header, rows, range(len(header)))
    times = [f"median decision: {micros:.0f} µs by {name}" for name, micros in summary["decisions_us_p50"].items()]
    print_lines(Console(), [*times, f"exported: {out}"])
    return out


def _make(config: ExportRun, agent: Agent, table: ProfileTable, budgets_ms: Tensor, folder: Path) -> dict[str, Any]:
    """Write the controller's files; returns how their decisions compare with the controller's, and their times."""
    if config.onnx or config.int8:  # first, since some controllers have no graph
        write_onnx(Deployed(agent), folder / GRAPH)
    if config.int8:
        quantise(folder / GRAPH, folder / GRAPH_OF_8_BITS)
    path = folder / "controller.npz"
    controller = export_numpy(agent, path)
    # single requests run other code, and take longer to compare
    alone = f"{path.name}, one request at a time"
    compared: dict[str, Any] = {
        "parity": parity(agent, controller.choose, table, budgets_ms, path.name),
        "parity_one_by_one": parity(agent, one_by_one(controller), table, budgets_ms, alone, CALLS),
        "graphs": {},
    }
    forms: dict[str, Any] = {path.name: controller}
    for path in sorted(folder.glob("*.onnx"), reverse=True):
        graph = forms[path.name] = OnnxController(path, config.threads)
        # of 8 bits some decisions may differ
        about = agent, graph.choose, table, budgets_ms, path.name
        compared["graphs"][path.name] = parity(*about, None, controller.choose, path.name == GRAPH)
    micros = _median_us(forms, table, budgets_ms)
    return compared | {"decision_us_p50": micros["controller.npz"], "decisions_us_p50": micros}


def _median_us(forms: dict[str, Any], table: ProfileTable, budgets_ms: Tensor) -> dict[str, float]:
    """The median time of `CALLS` decisions for each form, in µs. The forms take turns."""
    micros: dict[str, list[float]] = {name: [] for name in forms}
    for i in range(CALLS):
        row = {name: block[i % table.num_samples].numpy() for name, block in table.features.items()}
        limit = float(budgets_ms[i % len(budgets_ms)])
        for name, form in forms.items():
            start = time.perf_counter_ns()
            form.decide_index(row, limit)
            micros[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: statistics.median(times) for name, times in micros.items()}


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"

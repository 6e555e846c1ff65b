"""Export a trained controller as files that decide without knobwise, compared with it and timed."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, network_of
from knobwise.agents.serving import export as forms
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.export import Agent, parity
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.agents.serving.onnx_graph import by_onnx, check_packages, export_onnx, onnx_session, quantise_onnx
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import write_text, written_whole
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.evaluate import check_fits
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.settings.options import ExportRun
from knobwise.experiments.settings.profiles import read_profile

CALLS = 300
"""Timed decisions of each form, and samples whose requests are also decided one by one."""


def run(config: ExportRun) -> Path:
    """Write controller.npz, numpy_controller.py, export.json and what else is chosen; returns their folder.

    Raises:
        InputError: if there is no such checkpoint, the profile has other configurations or features, the controller
            cannot be exported, packages are missing, or a form makes a different decision.
    """
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    checkpoint = checkpoint_at(config.checkpoint)
    loaded = load_checkpoint(checkpoint)
    agent, table, out = loaded.controller, read_profile(config.profile), Path(config.out)
    _check(config, agent, table)
    summary: dict[str, Any] = {"checkpoint": {"path": str(checkpoint), "digest": _digest(checkpoint)}}
    budgets_ms = forms.contexts_of(agent, table)
    summary |= {
        "trained_on": {"name": loaded.profile_name, "digest": loaded.profile_digest},
        "compared_on": {"name": table.name, "digest": table.digest, "budgets_ms": budgets_ms.tolist()},
        "features": network_of(agent).normaliser.sizes,
    }
    # everything is made and compared in a temporary folder, so that no wrong file is left behind
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        with threadpool_limits(config.threads):
            summary["forms"] = _make(config, agent, table, budgets_ms, made)
        shutil.copy(numpy_controller.__file__, made)
        summary["files"] = {}
        for path in sorted(made.iterdir()):
            summary["files"][path.name] = {"bytes": path.stat().st_size, "digest": _digest(path)}
            with written_whole(out / path.name) as temporary:
                shutil.copyfile(path, temporary)
    try:
        before = set(json.loads((out / "export.json").read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        before = set()
    write_text(out / "export.json", json.dumps(summary, indent=1))
    for name in before - set(summary["files"]):  # it belongs to another controller
        if Path(name).name == name:
            (out / name).unlink(missing_ok=True)
    keys = ("same", "contexts", "rounding", "different")
    header = ["form", "same decision", "of contexts", "rounding", "different", "µs, median"]
    rows = [
        [form, *(str(result[key]) for key in keys), f"{result['decision_us_p50']:.0f}"]
        for form, result in summary["forms"].items()
    ]
    print_table(Console(), header, rows, range(len(header)))
    print_lines(Console(), [f"exported: {out}"])
    return out


def _check(config: ExportRun, agent: Agent, table: ProfileTable) -> None:
    """Refuse at once what cannot be exported."""
    if config.onnx or config.int8:
        check_packages()
    check_fits(config.checkpoint, agent, table)
    if network_of(agent).priced and (config.onnx or config.int8):
        raise InputError(f"{config.checkpoint}: a controller for mean budgets has no ONNX form; leave onnx=true out")


def _make(config: ExportRun, agent: Agent, table: ProfileTable, budgets_ms: Tensor, folder: Path) -> dict[str, Any]:
    """The chosen forms, compared with the controller and timed."""
    controller = forms.export_numpy(agent, folder / "controller.npz")
    made = {"NumPy": parity(agent, controller.choose, table, budgets_ms, "controller.npz")}
    # single requests run other code, and take longer to compare
    alone = "controller.npz, one request at a time"
    made["NumPy"]["one_by_one"] = parity(agent, forms.one_by_one(controller), table, budgets_ms, alone, CALLS)
    graph, small_graph, sessions = folder / "controller.onnx", folder / "controller.int8.onnx", {}
    if config.onnx or config.int8:
        export_onnx(agent, graph)
    if config.int8:
        quantise_onnx(graph, small_graph)
        sessions["ONNX int8"] = onnx_session(small_graph, config.threads)
        made["ONNX int8"] = forms.agreement(agent, by_onnx(sessions["ONNX int8"]), table, budgets_ms)
    if config.onnx:
        sessions["ONNX float32"] = onnx_session(graph, config.threads)
        made["ONNX float32"] = parity(agent, by_onnx(sessions["ONNX float32"]), table, budgets_ms, "controller.onnx")
    else:
        graph.unlink(missing_ok=True)
    for form, micros in _timed(controller, sessions, table, budgets_ms).items():
        made[form]["decision_us_p50"] = statistics.median(micros)
    return made


def _timed(
    controller: NumpyController, sessions: Mapping[str, Any], table: ProfileTable, budgets_ms: Tensor
) -> dict[str, list[float]]:
    """Form → how long each of `CALLS` decisions took, in µs."""
    micros: dict[str, list[float]] = {form: [] for form in ("NumPy", *sessions)}
    for i in range(CALLS):
        row = {name: block[i % table.num_samples].numpy() for name, block in table.features.items()}
        limit = float(budgets_ms[i % len(budgets_ms)])
        feed = {name: block[None] for name, block in row.items()} | {"budget_ms": np.array([limit], np.float32)}
        for form, times in micros.items():  # the forms take turns
            start = time.perf_counter_ns()
            if form == "NumPy":
                controller.decide(row, limit)
            else:
                sessions[form].run(None, feed)
            times.append((time.perf_counter_ns() - start) / 1e3)
    return micros


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"

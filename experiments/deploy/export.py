"""Export a trained controller as files that decide without knobwise, compared with it and timed."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.export import (
    Agent,
    agreement,
    by_numpy,
    contexts_of,
    export_numpy,
    network_of,
    one_by_one,
    parity,
)
from knobwise.agents.serving.onnx_graph import by_onnx, check_packages, export_onnx, onnx_session, quantise_onnx
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.settings.options import ExportRun
from knobwise.experiments.settings.profiles import read_profile

CALLS = 300
"""Timed decisions of each form, and samples whose requests are also decided one by one."""


def run(config: ExportRun) -> Path:
    """Write controller.npz, controller.onnx, numpy_controller.py and export.json; returns their folder.

    Raises:
        InputError: if there is no such checkpoint, the profile has other configurations or features, the controller
            cannot be exported, packages are missing, or a form makes a different decision.
    """
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    loaded = load_checkpoint(config.checkpoint)
    agent, table, out = loaded.controller, read_profile(config.profile), Path(config.out)
    _check(config, agent, table)
    summary: dict[str, Any] = {"checkpoint": {"path": config.checkpoint, "digest": _digest(Path(config.checkpoint))}}
    if config.student:
        assert isinstance(agent, StackedController)
        agent, summary["student"] = _student(loaded, agent, table)
    budgets_ms = contexts_of(agent, table)
    summary |= {
        "trained_on": {"name": loaded.profile_name, "digest": loaded.profile_digest},
        "compared_on": {"name": table.name, "digest": table.digest, "budgets_ms": budgets_ms.tolist()},
        "features": network_of(agent).normaliser.sizes,
        "forms": {},
        "files": {},
    }
    # everything is made and compared in a temporary folder, so that no wrong file is left behind
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        with threadpool_limits(config.threads):
            forms = _make(config, agent, table, budgets_ms, made)
        source = Path(numpy_controller.__file__)
        (made / source.name).write_bytes(source.read_bytes())
        if config.student:
            save_checkpoint(made / "student.pt", agent, table, loaded.extra)
        summary["forms"] = forms
        for path in sorted(made.iterdir()):
            summary["files"][path.name] = {"bytes": path.stat().st_size, "digest": _digest(path)}
            with written_whole(out / path.name) as temporary:
                temporary.write_bytes(path.read_bytes())
    try:
        before = set(json.loads((out / "export.json").read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        before = set()
    with written_whole(out / "export.json") as temporary:
        temporary.write_text(json.dumps(summary, indent=1))
    for name in before - set(summary["files"]):  # it belongs to another controller
        if Path(name).name == name:
            (out / name).unlink(missing_ok=True)
    _print(summary, out)
    return out


def _check(config: ExportRun, agent: Agent, table: ProfileTable) -> None:
    """Refuse at once what cannot be exported."""
    if config.onnx or config.int8:
        check_packages()
    network = network_of(agent)
    if table.knobs != network.knobs or not torch.equal(table.configurations, network.configurations):
        raise InputError(
            f"{config.checkpoint}: trained for {len(network.configurations)} configurations of "
            f"{', '.join(k.name for k in network.knobs)}; profile {table.name!r} has others"
        )
    network.features(table.features, table.num_samples)
    if config.student and (not isinstance(agent, StackedController) or agent.priced):
        raise InputError(
            f"{config.checkpoint}: student=true needs a controller of several members under deadlines (policy=auto or "
            "policy=utility); this one is light already, or decides for mean budgets"
        )
    if network.priced and (config.onnx or config.int8):
        raise InputError(f"{config.checkpoint}: a controller for mean budgets has no ONNX form; add onnx=false")


def _student(loaded: Loaded, teacher: StackedController, table: ProfileTable) -> tuple[Controller, dict[str, Any]]:
    """Fit a student on the teacher's samples, and judge both on the teacher's test samples."""
    from knobwise.agents.judging.evaluation import judge
    from knobwise.agents.serving.distillation import student_of

    if loaded.profile_digest != table.digest or "test_rows" not in loaded.extra:
        raise InputError(
            f"student=true: needs the profile that the controller was trained on ({loaded.profile_name!r}), not "
            f"{table.name!r}, and a best.pt, which lists the test samples"
        )
    print("fitting a student to the controller …", file=sys.stderr, flush=True)
    rows, test = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]]), loaded.extra["test_rows"]
    student = student_of(teacher, table, rows, seed=0)
    budgets_ms, rewards = default_budgets(table), RewardTable(table, RewardConfig())
    judged = [judge(policy, table, test, budgets_ms, rewards) for policy in (teacher, student)]
    same = (judged[0].chosen == judged[1].chosen).double().mean()
    about = {"test_samples": len(test), "same_decision_on_test": float(same)}
    for name, outcomes in zip(("teacher", "student"), judged, strict=True):
        metrics = outcomes.metrics()
        about[f"utility_of_{name}"] = metrics["Utility"]
        about[f"satisfaction_feasible_of_{name}"] = metrics["Satisfaction_Feasible"]
    return student, about


def _make(config: ExportRun, agent: Agent, table: ProfileTable, budgets_ms: Tensor, folder: Path) -> dict[str, Any]:
    """The chosen forms, compared with the controller and timed."""
    controller = export_numpy(agent, folder / "controller.npz")
    forms = {"NumPy": parity(agent, by_numpy(controller), table, budgets_ms, "controller.npz")}
    # single requests run other code, and take longer to compare
    forms["NumPy"]["one_by_one"] = parity(
        agent, one_by_one(controller), table, budgets_ms, "controller.npz, one request at a time", CALLS
    )
    blocks = {name: block.numpy() for name, block in table.features.items()}
    rows = [{name: block[row % table.num_samples] for name, block in blocks.items()} for row in range(CALLS)]
    limits = [float(budgets_ms[number % len(budgets_ms)]) for number in range(CALLS)]
    ways: dict[str, Callable[[int], Any]] = {"NumPy": lambda i: controller.decide(rows[i], limits[i])}
    if config.onnx or config.int8:
        feeds = [
            {**{name: block[None] for name, block in row.items()}, "budget_ms": np.array([limit], np.float32)}
            for row, limit in zip(rows, limits, strict=True)
        ]
        graph, small_graph = folder / "controller.onnx", folder / "controller.int8.onnx"
        export_onnx(agent, graph)
        if config.int8:
            quantise_onnx(graph, small_graph)
            session = onnx_session(small_graph, config.threads)
            forms["ONNX int8"] = agreement(agent, by_onnx(session), table, budgets_ms)
            ways["ONNX int8"] = lambda i, session=session: session.run(None, feeds[i])  # type: ignore[misc]
        if config.onnx:
            session = onnx_session(graph, config.threads)
            forms["ONNX float32"] = parity(agent, by_onnx(session), table, budgets_ms)
            ways["ONNX float32"] = lambda i, session=session: session.run(None, feeds[i])  # type: ignore[misc]
        else:
            graph.unlink()
    micros: dict[str, list[float]] = {form: [] for form in ways}
    for i in range(CALLS):
        for form, decide in ways.items():  # the forms take turns
            start = time.perf_counter_ns()
            decide(i)
            micros[form].append((time.perf_counter_ns() - start) / 1e3)
    for form, values in micros.items():
        forms[form]["decision_us_p50"] = statistics.median(values)
    return forms


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _print(summary: dict[str, Any], out: Path) -> None:
    console, table = Console(), Table("form", box=None, pad_edge=False)
    for column in ("same decision", "of contexts", "rounding", "different", "µs, median"):
        table.add_column(column, justify="right")
    for form, result in summary["forms"].items():
        counts = [str(result[key]) for key in ("same", "contexts", "rounding", "different")]
        table.add_row(form, *counts, f"{result['decision_us_p50']:.0f}")
    console.print(table)
    if student := summary.get("student"):
        console.print(
            f"student: decides as its teacher in {student['same_decision_on_test']:.1%} of the test requests; utility "
            f"{student['utility_of_student']:.3f}, teacher {student['utility_of_teacher']:.3f}; on time (feasible) "
            f"{student['satisfaction_feasible_of_student']:.1%}, teacher "
            f"{student['satisfaction_feasible_of_teacher']:.1%}",
            soft_wrap=True,
        )
    console.print(f"exported: {out}", soft_wrap=True)

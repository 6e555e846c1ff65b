"""Export a trained controller: files that decide without knobwise, and what was measured of them."""

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
from knobwise.agents.serving.onnx_graph import by_onnx, check_packages, export_onnx, onnx_session
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.agents.training.settings import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardConfig, RewardTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.settings.options import ExportRun
from knobwise.experiments.settings.profiles import read_profile

CALLS = 300
"""Decisions that are timed of each form, and samples whose requests are decided one by one too."""


def run(config: ExportRun) -> Path:
    """Write controller.npz, controller.onnx, numpy_controller.py and export.json; returns their folder.

    Raises:
        InputError: no such checkpoint, another profile's configurations or features, a controller that cannot be
            exported, missing packages; or a form that decides otherwise than the controller somewhere.
    """
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    loaded = load_checkpoint(config.checkpoint)
    agent, table, out = loaded.controller, read_profile(config.profile), Path(config.out)
    _check(config, agent, table)
    said: dict[str, Any] = {"checkpoint": {"path": config.checkpoint, "digest": _digest(Path(config.checkpoint))}}
    if config.student:
        assert isinstance(agent, StackedController)
        agent, said["student"] = _student(loaded, agent, table)
    budgets_ms = contexts_of(agent, table)
    said |= {
        "trained_on": {"name": loaded.profile_name, "digest": loaded.profile_digest},
        "compared_on": {"name": table.name, "digest": table.digest, "budgets_ms": budgets_ms.tolist()},
        "features": network_of(agent).normaliser.sizes,
        "forms": {},
        "files": {},
    }
    # everything is made and compared in a folder of its own first: what disagrees is never seen
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        with threadpool_limits(config.threads):
            forms = _make(config, agent, table, budgets_ms, made)
        source = Path(numpy_controller.__file__)
        (made / source.name).write_bytes(source.read_bytes())
        if config.student:
            save_checkpoint(made / "student.pt", agent, table, loaded.extra)
        said["forms"] = forms
        for path in sorted(made.iterdir()):
            said["files"][path.name] = {"bytes": path.stat().st_size, "digest": _digest(path)}
            with written_whole(out / path.name) as temporary:
                temporary.write_bytes(path.read_bytes())
    before = _files_before(out)
    with written_whole(out / "export.json") as temporary:
        temporary.write_text(json.dumps(said, indent=1))
    for name in before - set(said["files"]):  # of another controller: it must not be taken for this one
        (out / name).unlink(missing_ok=True)
    _tell(said, out)
    return out


def _files_before(out: Path) -> set[str]:
    """What an earlier export left in this folder."""
    try:
        files = json.loads((out / "export.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {name for name in files if Path(name).name == name}


def _check(config: ExportRun, agent: Agent, table: ProfileTable) -> None:
    """Refuse what cannot be exported before anything takes time."""
    if config.onnx or config.int8:
        check_packages()
    network = network_of(agent)
    if table.knobs != network.knobs or not torch.equal(table.configurations, network.configurations):
        raise InputError(
            f"{config.checkpoint}: was trained for {len(network.configurations)} configurations of "
            f"{', '.join(k.name for k in network.knobs)}; profile {table.name!r} has others"
        )
    network.features(table.features, table.num_samples)
    if config.student and (not isinstance(agent, StackedController) or agent.priced):
        raise InputError(
            f"{config.checkpoint}: student=true is for a controller of several members under deadlines (policy=auto or "
            "policy=utility); this one is light already, or decides for mean budgets"
        )
    if network.priced and (config.onnx or config.int8):
        raise InputError(f"{config.checkpoint}: decides for mean budgets, which has no ONNX form; add onnx=false")


def _student(loaded: Loaded, teacher: StackedController, table: ProfileTable) -> tuple[Controller, dict[str, Any]]:
    """Fit a student where its teacher was fitted, and judge both on the samples kept from the teacher."""
    from knobwise.agents.judging.evaluation import judge
    from knobwise.agents.serving.distillation import student_of

    if loaded.profile_digest != table.digest or "test_rows" not in loaded.extra:
        raise InputError(
            f"student=true: needs the profile that the controller was trained on ({loaded.profile_name!r}), "
            f"and profile {table.name!r} is another; and a best.pt, which says which samples were kept from it"
        )
    print("fitting a light student to the controller …", file=sys.stderr, flush=True)
    rows, test = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]]), loaded.extra["test_rows"]
    student = student_of(teacher, table, rows, seed=0)
    budgets_ms, rewards = default_budgets(table), RewardTable(table, RewardConfig())
    judged = [judge(one, table, test, budgets_ms, rewards) for one in (teacher, student)]
    same = (judged[0].chosen == judged[1].chosen).double().mean()
    about = {"test_samples": len(test), "same_decision_on_test": float(same)}
    for name, one in zip(("teacher", "student"), judged, strict=True):
        metrics = one.metrics()
        about[f"utility_of_{name}"] = metrics["Utility"]
        about[f"satisfaction_feasible_of_{name}"] = metrics["Satisfaction_Feasible"]
    return student, about


def _make(config: ExportRun, agent: Agent, table: ProfileTable, budgets_ms: Tensor, folder: Path) -> dict[str, Any]:
    """Every form wanted, compared with the controller and timed."""
    controller = export_numpy(agent, folder / "controller.npz")
    forms = {"NumPy": parity(agent, by_numpy(controller), table, budgets_ms, "controller.npz")}
    # which goes another way, and takes longer to compare
    alone = parity(agent, one_by_one(controller), table, budgets_ms, "controller.npz, one request at a time", CALLS)
    forms["NumPy"]["one_by_one"] = alone
    blocks = {name: block.numpy() for name, block in table.features.items()}
    rows = [{name: block[row % table.num_samples] for name, block in blocks.items()} for row in range(CALLS)]
    limits = [float(budgets_ms[number % len(budgets_ms)]) for number in range(CALLS)]
    ways: dict[str, Callable[[int], Any]] = {"NumPy": lambda i: controller.decide(rows[i], limits[i])}
    if config.onnx or config.int8:
        feeds = [
            {**{name: block[None] for name, block in row.items()}, "budget_ms": np.array([limit], np.float32)}
            for row, limit in zip(rows, limits, strict=True)
        ]
        for form, name, wanted in (
            ("ONNX float32", "controller.onnx", config.onnx),
            ("ONNX int8", "controller.int8.onnx", config.int8),
        ):
            if not wanted:
                continue
            int8 = form == "ONNX int8"
            export_onnx(agent, folder / name, int8)
            session = onnx_session(folder / name, config.threads)
            compare = agreement if int8 else parity
            forms[form] = compare(agent, by_onnx(session), table, budgets_ms)
            ways[form] = lambda i, session=session: session.run(None, feeds[i])  # type: ignore[misc]
    for form, micros in _timed(ways).items():
        forms[form]["decision_us_p50"] = micros
    return forms


def _timed(ways: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Median µs of one decision by each; they take turns."""
    micros: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(CALLS):
        for name, decide in ways.items():
            start = time.perf_counter_ns()
            decide(i)
            micros[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: statistics.median(values) for name, values in micros.items()}


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _tell(said: dict[str, Any], out: Path) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for column in ("form", "same decision", "of contexts", "rounding", "different", "µs, median"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for form, found in said["forms"].items():
        counts = [str(found[key]) for key in ("same", "contexts", "rounding", "different")]
        table.add_row(form, *counts, f"{found['decision_us_p50']:.0f}")
    console.print(table)
    if student := said.get("student"):
        console.print(
            f"student: decides as its teacher in {student['same_decision_on_test']:.1%} of the test requests; utility "
            f"{student['utility_of_student']:.3f}, teacher {student['utility_of_teacher']:.3f}; budgets met where "
            f"possible {student['satisfaction_feasible_of_student']:.1%}, teacher "
            f"{student['satisfaction_feasible_of_teacher']:.1%}",
            soft_wrap=True,
        )
    console.print(f"exported: {out}", soft_wrap=True)

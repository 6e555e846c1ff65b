"""Export a trained controller as files that decide without knobwise, compared with it and timed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.evaluation.own_cost import Decider, decision_us
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.common.errors import InputError
from knobwise.common.files import write_json, written_whole
from knobwise.common.words import format_count
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.evaluate import fitting_profile
from knobwise.experiments.evidence.exports import CONTROLLER, NOTE, facts_of, facts_of_file
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.report.tables import print_lines
from knobwise.experiments.settings.deployment_options import ExportRun
from knobwise.experiments.train.judging import copy_policy
from knobwise.serving.onnx_graph import (
    Deployed,
    OnnxController,
    agreement,
    quantise,
    write_onnx,
)

GRAPH = "controller.onnx"
GRAPH_OF_8_BITS = "controller.int8.onnx"


def export_controller(config: ExportRun) -> Path:
    """Write controller.npz, the folder policy that reads it, export.json and the requested graphs;
    return the folder.

    Raises:
        InputError: if there is no such checkpoint, the profile has other configurations or
            features, the controller cannot be exported, or a file other than that of 8 bits makes a
            different decision.
    """
    torch.set_num_threads(1)
    checkpoint = checkpoint_at(config.checkpoint)
    loaded = load_checkpoint(checkpoint, config.rule)
    agent = loaded.controller
    out = Path(config.out)
    table = fitting_profile(config, loaded)
    budgets_ms = _budgets_of(agent, table)
    summary = {
        **facts_of(checkpoint, agent),
        "trained_on": {"name": loaded.profile_name, "digest": loaded.profile_digest},
        "compared_on": {
            "name": table.name,
            "digest": table.digest,
            "budgets_ms": budgets_ms.tolist(),
        },
        "features": agent.controller.normaliser.sizes,
    }
    # everything is made and compared in a temporary folder, so that no wrong file is left behind
    with tempfile.TemporaryDirectory() as folder:
        with threadpool_limits(1):
            summary |= _make(config, agent, table, budgets_ms, Path(folder))
        summary["files"] = _publish(Path(folder), out)
    copy_policy(out)
    write_json(out / NOTE, summary)
    _print(summary, out)
    return out


def _publish(made: Path, out: Path) -> dict[str, dict[str, int | str]]:
    """Copy the files that were made to `out`; return the size and digest of each."""
    for name in (GRAPH, GRAPH_OF_8_BITS):  # an earlier graph may be of another controller
        (out / name).unlink(missing_ok=True)
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(made.iterdir()):
        files[path.name] = facts_of_file(path)
        with written_whole(out / path.name) as temporary:
            shutil.copyfile(path, temporary)
    return files


def _print(summary: dict[str, Any], out: Path) -> None:
    """Print how graphs decide beside the controller, and the times of decisions."""
    lines = []
    for name, counts in summary["graphs"].items():
        lines.append(
            f"{name}: {counts['same']:,} of {counts['contexts']:,} decisions match controller.npz; "
            f"{counts['rounding']:,} more differ only in near-ties"
        )
    for name, micros in summary["decisions_us_p50"].items():
        lines.append(f"{name}: {micros:.0f} µs per decision")
    budgets = format_count(len(summary["compared_on"]["budgets_ms"]), "budget")
    lines.append(f"(medians with cold caches, as in front of a model; mean over {budgets})")
    print_lines(Console(), [*lines, f"The files are in the folder {out}"])


def _budgets_of(agent: DeployedController, table: ProfileTable) -> Tensor:
    """Return the budgets to decide at, float32 [B]: those that were calibrated, or the default."""
    trained_ms = agent.decider.trained_ms
    return default_budgets(table) if trained_ms is None else torch.from_numpy(trained_ms).float()


def _make(
    config: ExportRun,
    agent: DeployedController,
    table: ProfileTable,
    budgets_ms: Tensor,
    folder: Path,
) -> dict[str, object]:
    """Write the controller's files; return how graphs decide beside it, and decision times."""
    # graphs come first, since some controllers have none
    if (config.onnx or config.int8) and agent.decider.texts:
        raise InputError(
            f"onnx=true, int8=true: no graph reads a text ({', '.join(agent.decider.texts)}); "
            "leave them out, and use controller.npz"
        )
    if config.onnx or config.int8:
        write_onnx(Deployed(agent), folder / GRAPH)
    if config.int8:
        quantise(folder / GRAPH, folder / GRAPH_OF_8_BITS)
    path = folder / CONTROLLER
    controller = agent.export(path)
    graphs: dict[str, dict[str, int]] = {}
    forms: dict[str, Decider] = {path.name: controller}
    for path in sorted(folder.glob("*.onnx"), reverse=True):
        graph = forms[path.name] = OnnxController(path)
        # with weights of 8 bits some decisions may differ
        exact = path.name == GRAPH
        graphs[path.name] = agreement(controller, graph.choose, table, budgets_ms, path.name, exact)
    # all forms are timed on the same requests
    took = decision_us(list(forms.values()), table, torch.arange(table.num_samples), budgets_ms)
    micros = {name: float(each.mean()) for name, each in zip(forms, took, strict=True)}
    return {"graphs": graphs, "decisions_us_p50": micros}

"""The exported controller in the folder of a run or a version, and the note that tells of which
checkpoint it is. This file needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.agents.deployed.controller import NumpyController
from knobwise.common.files import sha256_of, write_json

if TYPE_CHECKING:
    from knobwise.agents.calibration.deployed_controller import DeployedController

CONTROLLER = "controller.npz"
NOTE = "export.json"
"""Says what was exported from what, as that of `knobwise export` does."""


def facts_of(checkpoint: Path, agent: DeployedController) -> dict[str, Any]:
    """Return what a note says of the checkpoint."""
    return {
        "checkpoint": {"path": str(checkpoint), "digest": f"sha256:{sha256_of(checkpoint)}"},
        "rule": agent.rule.name,
    }


def facts_of_file(path: Path) -> dict[str, int | str]:
    """Return what a note says of a file that was made."""
    return {"bytes": path.stat().st_size, "digest": f"sha256:{sha256_of(path)}"}


def export_beside(checkpoint: Path, agent: DeployedController, folder: Path) -> None:
    """Export the controller of a checkpoint into the folder that it belongs to, with a note.

    A process that is killed in between leaves a note that does not fit, which nobody follows.

    Args:
        checkpoint: inside the folder.
        agent: the content of the checkpoint.
    """
    agent.export(folder / CONTROLLER)
    facts = facts_of(checkpoint, agent)
    facts["checkpoint"]["path"] = str(checkpoint.relative_to(folder))
    write_json(folder / NOTE, facts | {"files": {CONTROLLER: facts_of_file(folder / CONTROLLER)}})


def exported_of(checkpoint: Path, folder: Path) -> NumpyController | None:
    """Return the controller that was exported from a checkpoint; None where there is none, it is of
    another checkpoint or another version of knobwise, or the user's own rule is needed."""
    try:
        note = json.loads((folder / NOTE).read_bytes())
        if ":" in note["rule"]:
            return None
        for path, noted in (
            (checkpoint, note["checkpoint"]),
            (folder / CONTROLLER, note["files"][CONTROLLER]),
        ):
            if noted["digest"] != f"sha256:{sha256_of(path)}":
                return None
        return NumpyController.load(folder / CONTROLLER)
    except (OSError, LookupError, TypeError, ValueError, RecursionError):
        # such a run is read as one without an export
        return None

"""What a server leaves to the next one with the same log: the level of its tracker, and how it kept
its promises.

Each process writes a file of its own, state-….json, when it is told to stop and before it closes
its socket, so that whoever listens next at the port finds it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = "knobwise.ServedState/1"
YOUNG_S = 3600.0
"""Seconds until a state says nothing of the machine any more."""


def leave(folder: Path, tracker: Mapping[str, Any], promises: Mapping[str, Any]) -> None:
    """Write what this process has seen, if anything. Raises OSError, as on a full disk.

    Args:
        folder: of the log.
        tracker: its `state()`.
        promises: of `ServerMetrics.promises()`.
    """
    if not (tracker["answers"] or promises):
        return
    state = {"format": FORMAT, "time": time.time(), "tracker": tracker, "promises": promises}
    handle, name = tempfile.mkstemp(dir=folder, prefix=".state-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(state, file)
        os.replace(name, folder / f"state-{os.getpid()}.json")
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def take_over(folder: Path, controller: str) -> dict[str, Any] | None:
    """Return what the server before left; None for nothing of this controller that is young enough.

    Of several processes that with most answers counts. What is taken, or too old, is removed.

    Args:
        folder: of the log.
        controller: its digest.
    """
    states = []
    for path in folder.glob("state-*.json"):
        try:
            state = json.loads(path.read_text())
            age_s = time.time() - state["time"]
            of_this = (state["format"], state["tracker"]["controller"]) == (FORMAT, controller)
            state["tracker"]["answers"] + 0  # a number
        except (KeyError, OSError, TypeError, ValueError):
            continue
        if of_this and 0 <= age_s < YOUNG_S:
            states.append(state)
        if of_this or age_s >= YOUNG_S:
            path.unlink(missing_ok=True)
    return max(states, key=lambda state: state["tracker"]["answers"], default=None)

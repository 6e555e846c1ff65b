"""The state of each job of a sweep, as JSON files in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from knobwise.common.files import write_text
from knobwise.common.progress import say


@dataclass
class Outcome:
    """The state of a job."""

    state: str
    """running, finished, failed or stopped."""
    folder: str | None = None
    """Of its run, once it has finished."""
    seconds: float = 0.0
    """How long it took, this time."""
    error: str | None = None
    """Why it failed, or how far it got before it was stopped, in a line."""
    crashed: bool = False
    """Whether it failed by an error of the program or a full disk, not by wrong input."""

    def write(self, folder: Path, number: int) -> Outcome:
        """Write it into the folder of the sweep."""
        write_text(folder / f"{number}.json", json.dumps(asdict(self)))
        return self


def read_outcome(folder: Path, number: int) -> Outcome | None:
    """The state of a job; None before it has begun, and where the file is damaged."""
    path = folder / f"{number}.json"
    try:
        if path.exists():
            return Outcome(**json.loads(path.read_bytes()))
        return None
    except (TypeError, ValueError):
        say(f"{path}: is damaged; job {number} begins anew, unless its run is finished")
        return None

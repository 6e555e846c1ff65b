"""How a profile was measured, from the file `profile.json` beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def measured_at_once(path: Any) -> int | None:
    """Return how many requests were sent at once when the profile at this path was measured through
    an endpoint; None if that is not known."""
    at_once = _noted_beside(path, "concurrency")
    return at_once if isinstance(at_once, int) else None


def workers_of(path: Any) -> list[dict[str, object]]:
    """Return the workers that measured the profile at this path; [] where one process did, or
    nobody knows."""
    workers = _noted_beside(path, "workers")
    return workers if isinstance(workers, list) else []


def _noted_beside(path: Any, name: str) -> object:
    if not path or not isinstance(path, str):
        return None
    try:
        return json.loads(Path(path).with_name("profile.json").read_bytes())[name]
    except (OSError, ValueError, KeyError, TypeError):
        # there is no such file, or it is damaged, or holds nothing of this name
        return None

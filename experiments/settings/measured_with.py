"""How a profile was measured, from the file `profile.json` beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from knobwise.profiling.endpoint.settings import LENGTHS, NAME


class EveryRequest(NamedTuple):
    """What every request had when a profile was measured through an endpoint."""

    fields: dict[str, object]
    """Fields beside those of the knobs, such as {"max_tokens": 32}."""
    messages: str | None
    """The function that made its messages, as module:function; None for the question alone."""


def every_request(path: Any) -> EveryRequest | None:
    """Return what every request had when the profile at this path was measured through an endpoint;
    None if it was not, or that is not known."""
    facts = _facts_beside(path)
    if facts.get("model") != NAME:
        return None
    try:
        knobs = {knob["name"] for knob in facts["knobs"]}
        extra = dict(facts.get("extra_body") or {})
        fields = {name: value for name, value in extra.items() if name not in knobs}
        if not {*knobs, *fields}.intersection(LENGTHS):
            fields[LENGTHS[0]] = facts["config"]["max_new_tokens"]
        return EveryRequest(fields, facts.get("messages"))
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


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
    return _facts_beside(path).get(name)


def _facts_beside(path: Any) -> Mapping[str, Any]:
    """Return what the file says; {} where there is none, or it is damaged."""
    if not path or not isinstance(path, str):
        return {}
    try:
        facts = json.loads(Path(path).with_name("profile.json").read_bytes())
    except (OSError, RecursionError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}

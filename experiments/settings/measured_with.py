"""How a profile was measured, from the file `profile.json` beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from knobwise.experiments.settings.words import shell_word, value_for_hydra
from knobwise.profiling.endpoint.settings import LENGTHS, NAME, EndpointOptions
from knobwise.profiling.measuring.settings import VLMProfileConfig


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


def not_sent(
    measured: EveryRequest,
    extra_body: Mapping[str, object] | None,
    messages: str | None,
    instead: str,
    length: int | None = None,
) -> list[str]:
    """Return what every request had in measuring and has not here, so that answers are others than
    those of the profile; and how to send it.

    Args:
        extra_body, messages: those of the requests here.
        instead: what stands here for messages by a function.
        length: what bounds an answer where `extra_body` does not; None for nothing.
    """
    lines = []
    extra = dict(extra_body or {})
    missing = {}
    for name, value in measured.fields.items():
        # either name of the length will do
        names = LENGTHS if name in LENGTHS else (name,)
        sent = [extra[each] for each in names if each in extra]
        if name in LENGTHS and not sent:
            sent = [length]
        if value not in sent:
            missing[name] = value
            extra = {key: value for key, value in extra.items() if key not in names}
    if missing:
        whole = shell_word("extra_body", value_for_hydra({**extra, **missing}))
        lines.append(
            f"the profile was measured with {', '.join(missing)} in every request, and here they "
            f"are sent otherwise or not at all; give {whole}"
        )
    if measured.messages is not None and messages is None:
        lines.append(
            f"the profile was measured with messages by {measured.messages}, and here {instead}; "
            f"give {shell_word('messages', measured.messages)}"
        )
    return lines


def unlike_measuring(
    path: Any, knobs: VLMProfileConfig, options: EndpointOptions | None
) -> list[str]:
    """Return what a model is asked, or its answers are judged by, otherwise than when the profile
    at this path was measured, a line each; and what to give.

    Args:
        options: how models behind an endpoint are asked; None for another model.
    """
    measured = None if options is None else every_request(path)
    names = ["metric", "prompt"]
    if measured is None:
        names.append("max_new_tokens")
    noted = _noted_beside(path, "config")
    lines = []
    for name in names:
        value = getattr(knobs, name)
        before = noted.get(name, value) if isinstance(noted, dict) else value
        if before != value:
            lines.append(
                f"the profile was measured with another knobs.{name} than {value}; give "
                f"{shell_word(f'knobs.{name}', before)}"
            )
    if options is not None and measured is not None:
        sends = options.extra_body, options.messages
        instead = "the question alone is sent"
        lines += not_sent(measured, *sends, instead, length=knobs.max_new_tokens)
    return lines


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

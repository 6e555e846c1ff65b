"""A request to /v1/chat/completions: what is ours in it, and what the client has set itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from knobwise.common.errors import InputError

BUDGET_HEADER = "x-budget-ms"
LIMITS_HEADER = "x-limits"
OURS = ("budget_ms", "limits", "features")
"""Fields of a body that the endpoint does not get to see."""


class ChatRequest(NamedTuple):
    """A request as it was sent."""

    content: bytes
    """The body, byte for byte."""
    body: dict[str, Any]
    """The body without the fields that are ours."""
    is_plain: bool
    """True if none of ours was in it."""
    budget_ms: Any
    """The deadline as it was given; None for none."""
    limits: Any
    """Further limits as they were given; None for none."""
    features: Mapping[str, Any]
    """Features that it brings."""


def parse(content: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Read a request. Its fields go before its headers.

    Args:
        headers: by names in lower case.

    Raises:
        InputError: no JSON object, a header that is none, features that have no names.
    """
    body = json_object(content)
    ours = {name: body.pop(name) for name in OURS if name in body}
    budget_ms = ours.get("budget_ms")
    limits = ours.get("limits")
    if budget_ms is None and BUDGET_HEADER in headers:
        try:
            budget_ms = float(headers[BUDGET_HEADER])
        except ValueError as error:
            raise InputError(f"{BUDGET_HEADER}: must be a number of ms") from error
    if limits is None and LIMITS_HEADER in headers:
        limits = json_object(headers[LIMITS_HEADER].encode(), LIMITS_HEADER)
    if not isinstance(limits, dict | None):
        raise InputError('limits: must be limits by name, such as {"usd": 0.002}')
    features = ours.get("features") or {}
    if not isinstance(features, dict):
        raise InputError("features: must be values by name")
    return ChatRequest(content, body, not ours, budget_ms, limits, features)


def json_object(content: bytes, name: str = "the body") -> dict[str, Any]:
    """Read a JSON object. Raises InputError if it is none."""
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise TypeError(f"{name} must be a JSON object")
        return body
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}") from error


def last_question(body: Mapping[str, Any]) -> tuple[int, str]:
    """Return the index of the user's last message, and its text, parts joined by line breaks; −1
    and "" without one."""
    messages = body.get("messages")
    if isinstance(messages, list):
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if isinstance(message, dict) and message.get("role") == "user":
                return index, text_of(message.get("content"))
    return -1, ""


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))

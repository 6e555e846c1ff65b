"""Requests to /v1/responses in the words of /v1/chat/completions.

A request is decided by what it is as a chat. Where the endpoint has /v1/responses, it is sent as it
came, with the knobs under that route's names. Where the endpoint lacks it, the chat is sent, and
`knobwise.serving.proxy.responses_answer` turns the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATHS = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens",),
    "reasoning_effort": ("reasoning", "effort"),
    "verbosity": ("text", "verbosity"),
}
"""Where a field of a chat stands in a request to /v1/responses, if under another name."""
SAME = frozenset((
    "model", "metadata", "moderation", "parallel_tool_calls", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "stream",
    "temperature", "top_p", "user",
))  # fmt: skip
"""Fields that are the same on both routes."""
STATE = ("previous_response_id", "conversation", "prompt", "context_management")
"""What stands for messages that only the endpoint has."""
DROPPED = frozenset(("store", "include", "stream_options", "truncation", "max_tool_calls"))
"""What changes nothing in an answer that is not kept, or is asked for in vain."""
ITEMS = frozenset(("message", "function_call", "function_call_output"))
"""Kinds of input that a chat has too."""


def is_settable(name: str) -> bool:
    """Return True for a knob that is a field of a request to /v1/responses."""
    return name in PATHS or name in SAME


def as_chat(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the body of a request to /v1/responses as one to /v1/chat/completions, and the names
    of what a chat cannot hold."""
    chat: dict[str, Any] = {}
    lost = [name for name in STATE if body.get(name) is not None]
    if body.get("background"):
        lost.append("background")
    messages = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages += _messages(body.get("input"), lost)
    chat["messages"] = messages
    known = {"input", "instructions", "background", "tools", "tool_choice", "text", "reasoning"}
    known |= {"max_output_tokens", "top_logprobs", *STATE, *DROPPED}
    for name, value in body.items():
        # further fields of a server's own go on
        if name not in known and value is not None:
            chat[name] = value
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": body["top_logprobs"]}
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    text = body.get("text")
    if isinstance(text, dict):
        if text.get("verbosity") is not None:
            chat["verbosity"] = text["verbosity"]
        kind = text.get("format")
        if isinstance(kind, dict) and kind.get("type") == "json_schema":
            schema = {name: value for name, value in kind.items() if name != "type"}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif isinstance(kind, dict) and kind.get("type") != "text":
            chat["response_format"] = kind
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        chat["tools"] = [_tool(tool, lost) for tool in tools]
    if (choice := body.get("tool_choice")) is not None:
        if isinstance(choice, dict):
            choice = _tool(choice, lost)
        chat["tool_choice"] = choice
    return chat, list(dict.fromkeys(lost))


def _messages(items: object, lost: list[str]) -> list[dict[str, Any]]:
    """Return the items of a request as messages."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items if isinstance(items, list) else []:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in ITEMS:
            lost.append(f"input of the type {kind}")
        elif kind == "message":
            # few servers know developers
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _content(item.get("content"), lost)})
        elif kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            # calls at once are one message
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            content = _content(item.get("output"), lost)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            messages.append(message)
    return messages


def _content(content: object, lost: list[str]) -> object:
    """Return the content of a message; of text alone as a text."""
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image" and part.get("image_url"):
            image = {"url": part["image_url"]}
            if part.get("detail"):
                image["detail"] = part["detail"]
            parts.append({"type": "image_url", "image_url": image})
        elif kind in ("refusal", "input_audio"):
            parts.append(part)
        else:
            lost.append(f"content of the type {kind}")
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _tool(tool: object, lost: list[str]) -> object:
    """Return a tool, or the choice of one."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else None
        lost.append(f"tools of the type {kind}")
        return tool
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


def with_changes(
    body: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a request to /v1/responses with what was changed in it as a chat.

    Args:
        body: the request.
        before, after: its fields as those of a chat. Messages stay.
    """
    changed = dict(body)
    for name in before.keys() | after.keys():
        if before.get(name) == after.get(name) or name == "messages":
            continue
        *outer, field = PATHS.get(name, (name,))
        target = changed
        for part in outer:
            inner = target.get(part)
            target[part] = dict(inner) if isinstance(inner, dict) else {}
            target = target[part]
        if name in after:
            target[field] = after[name]
        # the two names of a length are one here
        elif not any(PATHS.get(other) == (field,) for other in after):
            target.pop(field, None)
    return changed

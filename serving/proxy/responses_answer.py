"""The answer to a chat, turned into one to /v1/responses: whole, or event by event."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from knobwise.profiling.endpoint.token_counts import count_tokens

FINISHED = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete, by the finish_reason of a chat."""
PARTS = {"content": ("output_text", "text"), "refusal": ("refusal", "refusal")}
"""Type and field of a part of a message, by its name in a chat."""


class ResponsesAnswer:
    """Turns the answer to a chat.

    Args:
        body: the request to /v1/responses.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._head: dict[str, Any] = {}
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._calls: dict[int, int] = {}
        self._finish: str | None = None
        self._usage: object = None
        self._closed = False

    # a whole answer

    def whole(self, answer: Mapping[str, Any]) -> bytes:
        """Return an answer that came in one piece. Raises what an answer of another form raises:
        AttributeError, LookupError, TypeError or ValueError; so does `events`."""
        self._begin(answer)
        choice = answer["choices"][0]
        message = choice.get("message") or {}
        for kind in ("content", "refusal"):
            if message.get(kind):
                self._output.append(_message(self._name("msg"), kind, message[kind], "completed"))
        for call in message.get("tool_calls") or []:
            self._output.append(_call(self._name("fc"), call))
        self._finish = choice.get("finish_reason")
        self._usage = answer.get("usage")
        return json.dumps(self._response(self._status)).encode()

    def _begin(self, answer: Mapping[str, Any]) -> None:
        self._head = {
            "id": answer.get("id"),
            "object": "response",
            "created_at": answer.get("created") or int(time.time()),
            "model": answer.get("model"),
        }

    def _name(self, kind: str) -> str:
        """Return the id of the next item."""
        return f"{kind}_{self._head['id']}_{len(self._output)}"

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish in FINISHED else "completed"

    def _response(self, status: str, error: object = None) -> dict[str, Any]:
        """Return the answer as it is by now."""
        details = {"reason": FINISHED[str(self._finish)]} if status == "incomplete" else None
        echoed = {
            name: self._body.get(name)
            for name in ("instructions", "max_output_tokens", "previous_response_id", "reasoning",
                         "temperature", "text", "top_p", "truncation", "user")
        }  # fmt: skip
        return {
            **echoed,
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "output": self._output,
            "usage": _usage(self._usage),
            "metadata": self._body.get("metadata") or {},
            "parallel_tool_calls": self._body.get("parallel_tool_calls", True),
            "tool_choice": self._body.get("tool_choice", "auto"),
            "tools": self._body.get("tools") or [],
            "store": False,
        }

    # a stream

    def events(self, events: list[dict[str, Any]], closed: bool = False) -> bytes:
        """Return what the next events of a chat are here.

        Args:
            closed: True after the last one.
        """
        lines: list[bytes] = []
        for event in events:
            if not self._closed:
                lines += self._of_event(event)
        if closed and not self._closed:
            self.close()
            lines += self._last_events()
        return b"".join(lines)

    def close(self) -> None:
        """Say nothing more: neither after the end, nor after an error."""
        self._closed = True

    def _of_event(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        if not self._head:
            self._begin(event)
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress"))
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        if event.get("error"):
            error = event["error"] if isinstance(event["error"], dict) else {}
            error = {"code": "server_error", "message": str(error.get("message", ""))}
            yield self._event("response.failed", response=self._response("failed", error))
            self.close()
            return
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            # one request has one answer here
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            delta = choice.get("delta") or {}
            for kind in ("content", "refusal"):
                if delta.get(kind):
                    yield from self._says(kind, delta[kind])
            for call in delta.get("tool_calls") or []:
                yield from self._calls_tool(call)
            self._finish = choice.get("finish_reason") or self._finish

    def _says(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of text."""
        field = PARTS[kind][1]
        last = self._output[-1] if self._output else {}
        if last.get("type") != "message" or field not in last["content"][0]:
            yield from self._done()
            item = _message(self._name("msg"), kind, "", "in_progress")
            self._output.append(item)
            part = item["content"][0]
            yield self._event("response.output_item.added", item={**item, "content": []})
            yield self._event("response.content_part.added", part=part, **self._place())
        item = self._output[-1]
        item["content"][0][field] += text
        name = "output_text" if kind == "content" else "refusal"
        extra: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        yield self._event(f"response.{name}.delta", delta=text, **extra, **self._place())

    def _calls_tool(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a piece of a call."""
        index = call.get("index", 0)
        if index not in self._calls:
            yield from self._done()
            self._calls[index] = len(self._output)
            item = _call(self._name("fc"), {"id": call.get("id"), "function": {}}, "in_progress")
            self._output.append(item)
            item["name"] = (call.get("function") or {}).get("name")
            yield self._event("response.output_item.added", item=dict(item))
        item = self._output[self._calls[index]]
        if piece := (call.get("function") or {}).get("arguments"):
            item["arguments"] += piece
            place = {"item_id": item["id"], "output_index": self._calls[index]}
            yield self._event("response.function_call_arguments.delta", delta=piece, **place)

    def _done(self) -> Iterator[bytes]:
        """Yield the events that end the last item."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return
        item = self._output[-1]
        item["status"] = "completed"
        place = self._place()
        if item["type"] == "message":
            part = item["content"][0]
            if "text" in part:
                text = {"text": part["text"], "logprobs": []}
                yield self._event("response.output_text.done", **text, **place)
            else:
                yield self._event("response.refusal.done", refusal=part["refusal"], **place)
            yield self._event("response.content_part.done", part=part, **place)
        else:
            del place["content_index"]
            call = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **call, **place)
        yield self._event("response.output_item.done", item=item)

    def _last_events(self) -> Iterator[bytes]:
        """Yield the events that end the answer; none where it has not said why it ended."""
        if self._finish is None:
            return
        yield from self._done()
        status = self._status
        yield self._event(f"response.{status}", response=self._response(status))

    def _place(self) -> dict[str, Any]:
        """Return where the last item is."""
        index = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        if kind.startswith("response.output_item."):
            fields["output_index"] = len(self._output) - 1
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode()


def _message(name: str, kind: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of a message with a text."""
    part_type, field = PARTS[kind]
    part: dict[str, Any] = {"type": part_type, field: text}
    if kind == "content":
        part["annotations"] = []
    item = {"id": name, "type": "message", "role": "assistant", "status": status}
    return {**item, "content": [part]}


def _call(name: str, call: Mapping[str, Any], status: str = "completed") -> dict[str, Any]:
    """Return the item of a call of a function."""
    function = call.get("function") or {}
    item = {"id": name, "type": "function_call", "status": status, "call_id": call.get("id")}
    return {**item, "name": function.get("name"), "arguments": function.get("arguments") or ""}


def _usage(usage: object) -> dict[str, Any] | None:
    """Return the tokens that were counted for a chat; None where nobody can know them."""
    try:
        tokens = count_tokens(usage)
    except ValueError:
        return None
    if tokens is None:
        return None
    details = usage.get("completion_tokens_details") if isinstance(usage, dict) else None
    thought = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return {
        "input_tokens": tokens.read,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.written,
        "output_tokens_details": {"reasoning_tokens": thought if type(thought) is int else 0},
        "total_tokens": tokens.read + tokens.written,
    }

"""What an endpoint's answer is: whether it has begun, whether it is whole, and what it says of
itself.

A status of 200 says little. Gateways commit it before a model runs, and report a failure as an
`error` in the body, or as an event of the stream; servers send comments, or the role alone, while a
model has not begun; a stream that breaks off may look as if it had ended. So an answer is read as
`knobwise profile` reads it: it begins with the first content, a thought or a call of a tool
included, and it is whole once it says why it ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from knobwise.profiling.endpoint.reading import BROKEN_OFF
from knobwise.profiling.endpoint.token_counts import count_tokens

CONTENT = (
    "content", "refusal", "reasoning_content", "reasoning", "tool_calls", "function_call", "audio",
)  # fmt: skip
"""What counts as content in a message, or in a part of one. Some servers send thoughts by the names
with `reasoning`."""
MODEL_ERRORS = frozenset((
    "context_length_exceeded", "exceed_context_size_error", "model_not_found",
    "unsupported_parameter", "unsupported_value",
))  # fmt: skip
"""Codes, or types, of errors that are about the model and not the request: another may answer."""
LONGEST_EVENT = 32_000_000
"""Bytes of an event, from which on it is passed on without being read."""
LAST = b"[DONE]"


class AnswerReader:
    """Reads an answer while it comes.

    Attributes:
        began: True once there is content; or once it says why there is none.
        closed: True once the last event of a stream has come, or nothing more comes.
        fault: why this is no answer; "" for nothing.
        usage: the tokens that were counted, named as in chat completions; None if they were not.
        service_tier: that of the answer; None if it does not say.
        answer_id: its own id; "" for none.
        has_text: True if text has come.
        is_cut: True if it ended because it was as long as it may be.
    """

    def __init__(self) -> None:
        self.began = False
        self.closed = False
        self.fault = ""
        self.usage: Mapping[str, Any] | None = None
        self.service_tier: object = None
        self.answer_id = ""
        self.has_text = False
        self.is_cut = False
        self._parts: list[bytes] = []
        self._waiting = 0
        self._data: list[bytes] = []
        self._size = 0

    @property
    def is_whole(self) -> bool:
        """True once it has said why it ended, and nothing went wrong."""
        raise NotImplementedError

    @property
    def tokens(self) -> float:
        """How many tokens the answer has, those of thinking included; NaN if nobody counted
        them."""
        try:
            counts = count_tokens(self.usage)
        except ValueError:
            return math.nan
        return math.nan if counts is None else counts.written

    def read_whole(self, content: bytes) -> None:
        """Read an answer that is no stream."""
        answer = parsed(content)
        if not isinstance(answer, dict):
            self.fault = "what is no JSON object"
        else:
            self._note(answer)
            if not self.fault:
                self._read_answer(answer)

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """Read the next bytes of a stream of server-sent events; return the events that they end.

        Comments, and events that are no JSON objects, say nothing.
        """
        events = []
        for data in self._ended_by(chunk):
            if data.strip() == LAST:
                self.closed = True
            elif isinstance(event := parsed(data), dict):
                self._note(event)
                self._read_event(event)
                events.append(event)
        return events

    def _ended_by(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end with a chunk."""
        self._parts.append(chunk)
        # counted, since a line may come byte by byte
        self._waiting += len(chunk)
        if b"\n" not in chunk:
            # a line without an end must not take all memory; what is left of it is a comment
            if self._waiting > LONGEST_EVENT:
                self._parts = [b":"]
                self._waiting = 0
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        self._waiting = len(rest)
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._size += len(line)
                if self._size <= LONGEST_EVENT:
                    self._data.append(line[5:])
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
                self._size = 0

    def end(self) -> list[dict[str, Any]]:
        """Note that nothing more comes; return the last event, if it lacked the empty line after
        it."""
        events = self.feed(b"\n\n")
        self.closed = True
        return events

    def _note(self, answer: Mapping[str, Any]) -> None:
        """Note what an answer or an event says beside its content."""
        if answer.get("error"):
            self.fault = "an error"
        name = answer.get("id")
        if not self.answer_id and isinstance(name, str):
            self.answer_id = name
        tier = answer.get("service_tier")
        self.service_tier = tier if isinstance(tier, str) else self.service_tier
        # null in all events of a stream but the last
        usage = answer.get("usage")
        self.usage = self._usage(usage) if isinstance(usage, dict) else self.usage

    def _usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        return usage

    def _read_answer(self, answer: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _read_event(self, event: Mapping[str, Any]) -> None:
        raise NotImplementedError


class ChatReader(AnswerReader):
    """Reads answers to /v1/chat/completions. An answer may have several choices: each must end."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()
        self._ended = False

    @property
    def is_whole(self) -> bool:
        """True once every choice that has begun has its finish_reason."""
        return self._ended and not self._open and not self.fault

    def _read_answer(self, answer: Mapping[str, Any]) -> None:
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            self.fault = "no choices"
            return
        for choice in choices:
            if not isinstance(choice, dict):
                self.fault = "a choice that is none"
            else:
                # not every server says why an answer that is not streamed ended
                finish = choice.get("finish_reason") or "stop"
                self._read_choice({**choice, "finish_reason": finish}, choice.get("message"))

    def _read_event(self, event: Mapping[str, Any]) -> None:
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                self._read_choice(choice, choice.get("delta"))

    def _read_choice(self, choice: Mapping[str, Any], message: object) -> None:
        message = message if isinstance(message, dict) else {}
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        if any(message.get(name) for name in CONTENT):
            self.began = True
            self.has_text = True
            self._open.add(index)
        finish = choice.get("finish_reason")
        if finish in BROKEN_OFF:
            self.fault = f"{finish} as finish_reason"
        elif finish:
            self.began = True
            self._ended = True
            self.is_cut = self.is_cut or finish == "length"
            self._open.discard(index)


class ResponsesReader(AnswerReader):
    """Reads answers to /v1/responses."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = False

    @property
    def is_whole(self) -> bool:
        """True once it is completed, or as long as it may be."""
        return self._ended and not self.fault

    def _usage(self, usage: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "total_tokens": usage.get("total_tokens"),
            "prompt_tokens_details": usage.get("input_tokens_details"),
            "completion_tokens_details": usage.get("output_tokens_details"),
        }

    def _read_answer(self, answer: Mapping[str, Any]) -> None:
        output = answer.get("output")
        if not isinstance(output, list):
            self.fault = "no output"
            return
        status = answer.get("status", "completed")
        if status in ("failed", "cancelled"):
            self.fault = f"the status {status}"
            return
        self.began = True
        # in the background it goes on
        self._ended = status in ("completed", "incomplete")
        self._note_cut(answer)
        self.has_text = bool(output)

    def _read_event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if not isinstance(kind, str):
            return
        response = event.get("response")
        if isinstance(response, dict):
            self._note(response)
            self._note_cut(response)
        if kind == "error":
            self.fault = "an error"
        elif kind in ("response.failed", "response.cancelled"):
            self.fault = kind
        elif kind in ("response.completed", "response.incomplete"):
            self.began = True
            self._ended = True
            self.closed = True
        elif (kind.endswith(".delta") and event.get("delta")) or kind.endswith("_item.done"):
            self.began = True
            self.has_text = True

    def _note_cut(self, response: Mapping[str, Any]) -> None:
        """Note whether an answer was as long as it may be."""
        details = response.get("incomplete_details")
        if isinstance(details, dict):
            self.is_cut = details.get("reason") == "max_output_tokens"


def parsed(content: bytes) -> Any:
    """Return what JSON holds; None for what is none. NaN is taken, which some servers write."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(content)
    except (RecursionError, ValueError):
        return None


def is_about_model(status: int, content: bytes) -> bool:
    """Return True for an error of the client's, by its status, that another model might not
    make."""
    if status != 400:
        return False
    answer = parsed(content)
    error = answer.get("error") if isinstance(answer, dict) else None
    words = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return any(word in MODEL_ERRORS for word in words if isinstance(word, str))

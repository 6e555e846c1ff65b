"""Read what a server sends in answer to a request: a stream of events, or one JSON.

It is read as it came, not as the types of a client library, which make numbers of texts and of
true.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from knobwise.common.errors import InputError
from knobwise.profiling.endpoint.token_counts import count_tokens, names_cached_tokens

NO_ANSWER = "the answer is none of the protocol's"
THOUGHTS = ("reasoning_content", "reasoning")
"""The names by which servers send thoughts."""
BROKEN_OFF = ("abort", "error")
"""What servers give as finish_reason of an answer that they broke off, beside a status of 200: vLLM
and SGLang say abort, gateways error."""


class ImpossibleTokens(InputError):
    """A server counted tokens that cannot be; no further attempt would change that. The answer has
    to be paid, whatever it costs."""


class Cut(ValueError):
    """An answer ended before it was whole."""


@dataclass
class EndpointReply:
    """What came of a request."""

    text: str = ""
    first_ms: float = 0.0
    """Until the first token, or as `total_ms` if none came."""
    total_ms: float = 0.0
    failed: str = ""
    """Why it counts as wrong whatever the text says: `refused` or `timed out`."""
    tokens_in: int = 0
    """0 where the server did not count them."""
    tokens_out: int = 0
    """0 where the server did not count them."""
    chunks: int = 0
    """Those of a stream that had content, which are no more than its tokens."""
    tokens_cached: float = math.nan
    """How many of `tokens_in` the server had in its cache; NaN where it does not say."""
    usage: Mapping[str, Any] | None = None
    """What the server said of the tokens; None if nothing."""
    service_tier: object = None
    """The tier that the server says it answered in."""
    attempts: int = 1
    content: dict[str, Any] = field(default_factory=dict)
    """The whole answer, of a request that is not streamed."""

    @property
    def counted(self) -> bool:
        """Whether the server told the tokens."""
        return self.usage is not None


async def read_stream(lines: AsyncIterable[str], reply: EndpointReply, start: float) -> None:
    """Read a stream of events to its end into a reply.

    Args:
        lines: of the stream, as they come.
        reply: gets text, times and tokens.
        start: of the request, as `time.perf_counter` gives it.

    Raises:
        Cut: it ends before the answer does.
        ImpossibleTokens: it counts tokens that cannot be.
        ValueError: it is no stream of the protocol's, or tells of an error.
    """
    finish = None
    async for chunk in _events(lines):
        _count(chunk, reply)
        choices = chunk.get("choices")
        for choice in map(_fields, choices if isinstance(choices, list) else ()):
            # the first of several answers
            if choice.get("index"):
                continue
            delta = _fields(choice.get("delta"))
            refusal = text_in(delta.get("refusal"))
            text = text_in(delta.get("content")) or refusal
            if text or any(map(delta.get, THOUGHTS)):
                reply.chunks += 1
                reply.first_ms = reply.first_ms or 1e3 * (time.perf_counter() - start)
            reply.text += text
            finish = _finish_of(choice) or finish
            if refusal or finish == "content_filter":
                reply.failed = "refused"
    reply.total_ms = 1e3 * (time.perf_counter() - start)
    reply.first_ms = reply.first_ms or reply.total_ms
    if finish is None and not reply.chunks:
        raise Cut("neither a stream nor JSON came in answer to stream=true")
    if finish is None:
        raise Cut("the stream ended before the answer did")


def read_whole(content: bytes, reply: EndpointReply, start: float) -> None:
    """Read an answer that came in one piece into a reply; see `read_stream`."""
    reply.total_ms = 1e3 * (time.perf_counter() - start)
    reply.first_ms = reply.total_ms
    reply.content = _object(content)
    choices = reply.content.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError(NO_ANSWER)
    _count(reply.content, reply)
    choice = _fields(choices[0])
    # an answer to a plain prompt has its text in the choice
    message = _fields(choice.get("message", choice))
    refusal = text_in(message.get("refusal"))
    reply.text = refusal or text_in(message.get("content")) or text_in(message.get("text"))
    if _finish_of(choice) == "content_filter" or refusal:
        reply.failed = "refused"


def _finish_of(choice: Mapping[str, Any]) -> object:
    """Return why an answer ended, None for not yet. Raises ValueError if it was broken off."""
    finish = choice.get("finish_reason")
    if finish in BROKEN_OFF:
        raise ValueError(f"the server gives {finish} as finish_reason")
    return finish


async def _events(lines: AsyncIterable[str]) -> AsyncIterator[dict[str, Any]]:
    """Yield what the events of a stream hold, up to the one that ends it."""
    data: list[str] = []
    async for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:"))
        elif not line.strip() and data:
            content = "\n".join(data).strip()
            data = []
            if content == "[DONE]":
                return
            yield _object(content)
    # the last event may lack the empty line after it; where the stream was cut, it is no JSON
    last = None
    with suppress(json.JSONDecodeError):
        last = _object("\n".join(data)) if data else None
    if last is not None:
        yield last


def _object(content: str | bytes) -> dict[str, Any]:
    """Read JSON that a server sent. Raises ValueError if it is no object, or tells of an error."""
    try:
        answer = json.loads(content)
    except RecursionError as error:
        raise ValueError(NO_ANSWER) from error
    if not isinstance(answer, dict):
        raise ValueError(NO_ANSWER)
    if problem := answer.get("error"):
        raise ValueError(f"the server says {problem}"[:200])
    return answer


def text_in(content: object) -> str:
    """Return the text of a message's content: a text, or parts of which some have text."""
    if isinstance(content, list):
        return "".join(text_in(_fields(part).get("text")) for part in content)
    return content if isinstance(content, str) else ""


def _fields(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(content: Mapping[str, Any], reply: EndpointReply) -> None:
    """Note the tokens that a server counted, in an answer or a chunk of one, and its tier."""
    reply.service_tier = content.get("service_tier") or reply.service_tier
    usage = content.get("usage")
    try:
        tokens = count_tokens(usage)
    except ValueError as error:
        raise ImpossibleTokens(str(error)) from error
    if tokens is not None and isinstance(usage, Mapping):
        reply.usage = usage
        reply.tokens_in = tokens.read
        reply.tokens_out = tokens.written
        if names_cached_tokens(usage):
            reply.tokens_cached = tokens.cached

"""A request sent with one setting, and the answer to it, held until it has begun."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from knobwise.common.errors import InputError
from knobwise.serving.proxy.answers import (
    AnswerReader,
    ChatReader,
    ResponsesReader,
    is_about_model,
    parsed,
)
from knobwise.serving.proxy.responses import with_changes
from knobwise.serving.proxy.responses_answer import ResponsesAnswer
from knobwise.serving.proxy.upstream import Pairs, media_type, passed_back

if TYPE_CHECKING:
    from starlette.types import Scope

    from knobwise.serving.proxy.chat import ChatRequest
    from knobwise.serving.proxy.proxy import ChatProxy
    from knobwise.serving.proxy.walk import Choice

CHAT = "/chat/completions"
RESPONSES = "/responses"
RETRIED = (404, 408, 429)
"""Statuses below 500 after which another setting is tried: that of another model may do better."""
BUSY = (408, 429)
"""Statuses below 500 with which an endpoint says that it has too much to do."""
NO_ROUTE = (404, 405, 501)
"""Statuses that say that the endpoint has no such route, unless they are about the model."""
EVENTS = "text/event-stream"
HOLD_S = 15.0
"""Seconds of a stream without content after which it is passed on, so that nobody on the way takes
the connection for dead; no other setting is tried then."""
HOLD_BYTES = 1_000_000
"""The same for bytes."""
MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What is raised where an answer has another form than the protocol's."""


class FaultyAnswer(Exception):
    """An answer of the endpoint that counts as none; what it was."""


class Attempt:
    """A request sent with one setting; close it.

    Attributes:
        choice: the setting as it is sent; None for a request as it came.
        began: when the first content came, by the runtime's clock; None before.
        reader: what is known of the answer.
        content: all of it; or what has come of one that is streamed.

    Args:
        proxy: whose endpoint is asked.
        request: as the client sent it.
        choice: the setting; None to send the request as it is.
        scope: of the client's request.
        path: the client's route.
    """

    def __init__(
        self,
        proxy: ChatProxy,
        request: ChatRequest,
        choice: Choice | None,
        scope: Scope,
        path: str,
    ) -> None:
        self._proxy = proxy
        self._walk = proxy.walk
        self._request = request
        self.choice = choice
        self._scope = scope
        self._path = path
        self._chat: dict[str, Any] = {}
        self._response: aiohttp.ClientResponse | None = None
        self._rest: AsyncIterator[bytes] | None = None
        self._turned: ResponsesAnswer | None = None
        self._fault = ""
        self.began: float | None = None
        self.reader: AnswerReader = ChatReader()
        self.content = b""

    @property
    def fault(self) -> str:
        """Why another setting may do better; "" for nothing."""
        return self._fault or self.reader.fault

    @property
    def status(self) -> int:
        """Of the answer."""
        assert self._response is not None
        return self._response.status

    @property
    def is_answer(self) -> bool:
        """True unless it is an error."""
        return not self.fault and 200 <= self.status < 300

    @property
    def is_of_request(self) -> bool:
        """True for an error that says nothing of the endpoint, but of what was asked."""
        return 400 <= self.status < 500 and self.status not in BUSY

    @property
    def is_stream(self) -> bool:
        """True if it comes in chunks."""
        return self._rest is not None

    @property
    def headers(self) -> Pairs:
        """Those of the answer, for the client."""
        assert self._response is not None
        turned = self._turned is not None and self.is_answer
        headers = passed_back(self._response, rewritten=turned)
        if turned and not self.is_stream:
            headers.append((b"content-length", str(len(self.content)).encode()))
        return headers

    def close(self) -> None:
        """Let the connection go; one whose answer was not read to its end breaks off."""
        if self._response is not None:
            self._response.close()

    # -- asking ------------------------------------------------------------------------------------

    async def ask(self) -> None:
        """Send the request, and read the answer until it has begun; one that is no stream until it
        is whole.

        Raises:
            InputError: the endpoint lacks /v1/responses, and no chat can hold the request; or it
                cannot be written again.
            aiohttp.ClientError, TimeoutError, ValueError: no answer came, or it broke off.
        """
        if self._path == CHAT or self._proxy.lacks_responses:
            await self._ask(CHAT)
            return
        await self._ask(RESPONSES)
        if self.status not in NO_ROUTE or is_about_model(400, self.content):
            return
        self.close()
        if self._request.lost:
            raise InputError(no_chat(self._request.lost))
        await self._ask(CHAT)
        # a model that is not there says 404 on both routes
        self._proxy.lacks_responses = self.is_answer

    async def _ask(self, path: str) -> None:
        """Ask on a route of the endpoint."""
        scope = self._scope
        self._fault = ""
        self.reader = ChatReader() if path == CHAT else ResponsesReader()
        if path != self._path:
            self._turned = ResponsesAnswer(self._request.body)
        query = scope["query_string"].decode("latin-1")
        try:
            body = self._body(path)
        except RecursionError as error:
            # what can just be read may be too deep to be written
            raise InputError("the body: has too many brackets within brackets") from error
        upstream = self._proxy.upstream
        self._response = await upstream.send("POST", path, scope["headers"], body, query)
        status = self.status
        if 200 <= status < 300 and media_type(self._response.headers) == EVENTS:
            self._rest = upstream.chunks_of(self._response)
            await self._hold(self._rest)
            return
        self.content = await upstream.content_of(self._response)
        if 200 <= status < 300:
            self.reader.read_whole(self.content)
            if not self.fault and self._turned is not None:
                try:
                    self.content = self._turned.whole(parsed(self.content))
                except MALFORMED:
                    self._fault = "what is no answer of the protocol"
        elif not 400 <= status < 500 or status in RETRIED or is_about_model(status, self.content):
            self._fault = f"status {status}"

    def _body(self, path: str) -> bytes:
        """Return the body as it is sent on to a route."""
        request = self._request
        fields = self._walk.fields
        if self.choice is None:
            chat = fields.with_extra(request.chat)
        else:
            try:
                chat = fields.set(request.chat, self.choice.knobs)
            except Exception as error:
                # the user's own function of the messages
                self._walk.fell_back("messages", error)
                chat = fields.set(request.chat, self.choice.knobs, with_messages=False)
                # what comes is no answer to what was decided
                sent = fields.of_fields(self.choice.knobs)
                self.choice = self.choice.unlearned()._replace(knobs=sent)
        self._chat = chat
        if path == RESPONSES:
            # some servers stream unless they are told not to
            body = {"stream": False, **with_changes(request.body, request.chat, chat)}
        elif self._path == RESPONSES and chat.get("stream"):
            # an answer to /v1/responses always says the tokens
            body = {**chat, "stream_options": {"include_usage": True}}
        else:
            body = chat
        # unchanged to the byte, where nothing is to be changed
        if request.is_plain and body == request.body:
            return request.content
        return json.dumps(body, separators=(",", ":")).encode()

    async def _hold(self, rest: AsyncIterator[bytes]) -> None:
        """Read a stream until it has begun, or has failed; one that ends before that has."""
        since = self._walk.runtime.now()
        while not (self.reader.began or self.fault):
            chunk = await anext(rest, b"")
            self.content += self._read(chunk)
            if not chunk:
                if not self.reader.began:
                    self._fault = self.fault or "a stream without content"
            elif self._walk.runtime.now() - since > HOLD_S or len(self.content) > HOLD_BYTES:
                return

    def _read(self, chunk: bytes) -> bytes:
        """Read the next chunk of a stream, b"" at its end; return what the client gets for it."""
        events = self.reader.feed(chunk) if chunk else self.reader.end()
        if self.reader.began and self.began is None:
            self.began = self._walk.runtime.now()
        if self._turned is None:
            return chunk
        try:
            return self._turned.events(events, self.reader.closed or not chunk)
        except MALFORMED:
            self._fault = "what is no event of the protocol"
            self._turned.close()
            return b""

    # -- the answer --------------------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what the client gets of a stream, from its beginning. Raises what `ask` raises
        where it breaks off."""
        yield self.content
        assert self._rest is not None
        # an iterator of its own, since what was held is read already
        async for chunk in self._rest:
            yield self._read(chunk)
        yield self._read(b"")

    def usd(self) -> float:
        """Return what the answer cost in US dollars; NaN for unknown."""
        if self._walk.prices is None:
            return math.nan
        reader = self.reader
        # what was asked for, where the answer does not say
        tier = reader.service_tier or self._chat.get("service_tier")
        return self._walk.price_of(self._chat.get("model"), reader.usage, tier, reader.has_text)


def no_chat(lost: Sequence[str]) -> str:
    """Return what is said to a request to /v1/responses that no chat can hold."""
    return (
        f"{', '.join(lost)}: is only known to an endpoint's own /v1/responses, and here such "
        "requests are answered by /v1/chat/completions; send the whole conversation as input"
    )

"""One request and its answer: sent on, tried with other settings after faults, and passed back byte
for byte.

    send ─▶ hold until the answer has begun ─▶ pass on ─▶ log before the last byte
     ▲                 │
     └─ next setting ◀─┘ a fault

Nothing is sent to the client before the endpoint's answer has begun, so that until then another
setting can take its place. What an answer is says `knobwise.serving.proxy.answers`.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
from starlette.concurrency import run_in_threadpool
from starlette.types import Scope, Send

from knobwise.common.errors import InputError
from knobwise.serving.proxy.answers import (
    AnswerReader,
    ChatReader,
    ResponsesReader,
    is_about_model,
    parsed,
)
from knobwise.serving.proxy.chat import ChatRequest, budget_header
from knobwise.serving.proxy.guards import refusal
from knobwise.serving.proxy.metrics import label_of
from knobwise.serving.proxy.responses import with_changes
from knobwise.serving.proxy.responses_answer import ResponsesAnswer
from knobwise.serving.proxy.upstream import FAULTS, Pairs, content_of, media_type, passed_back
from knobwise.serving.proxy.walk import Choice

if TYPE_CHECKING:
    from knobwise.serving.proxy.proxy import ChatProxy

CHAT = "/chat/completions"
RESPONSES = "/responses"
RETRIED = (404, 408, 429)
"""Statuses below 500 after which another setting is tried: that of another model may do better."""
NO_ROUTE = (404, 405, 501)
"""Statuses that say that the endpoint has no such route, unless they are about the model."""
EVENTS = "text/event-stream"
HOLD_S = 15.0
"""Seconds of a stream without content after which it is passed on, so that nobody on the way takes
the connection for dead; no other setting is tried then."""
HOLD_BYTES = 1_000_000
"""The same for bytes."""
MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
"""What is raised where an answer has another form than the protocol's."""
NO_RETRY = (b"x-should-retry", b"false")
"""What OpenAI's clients read where another attempt makes no sense."""


class FaultyAnswer(Exception):
    """An answer of the endpoint that counts as none; what it was."""


def fault_of(error: BaseException) -> str:
    """Return what happened in words."""
    if isinstance(error, FaultyAnswer):
        return f"answered with {error}"
    return f"raised {type(error).__name__}"


def no_chat(lost: Sequence[str]) -> str:
    """Return what is said to a request to /v1/responses that no chat can hold."""
    return (
        f"{', '.join(lost)}: is only known to an endpoint's own /v1/responses, and here such "
        "requests are answered by /v1/chat/completions; send the whole conversation as input"
    )


class EndpointAnswer(NamedTuple):
    """An answer that has begun."""

    response: aiohttp.ClientResponse
    reader: AnswerReader
    content: bytes
    """All of it; or what has come of one that is streamed."""
    rest: AsyncIterator[bytes] | None = None
    """The other chunks; None if it is not streamed."""
    fault: str = ""
    """Why another setting may do better; "" for nothing."""

    @property
    def is_answer(self) -> bool:
        """True unless it is an error."""
        return not self.fault and 200 <= self.response.status < 300


class Exchange:
    """One request and its answer.

    Attributes:
        ended: True once its outcome is counted.
        left: True if the client has left.
    """

    def __init__(
        self,
        proxy: ChatProxy,
        chat: ChatRequest,
        choice: Choice | None,
        arrived: float,
        scope: Scope,
        path: str,
        send: Send,
    ) -> None:
        self._proxy = proxy
        self._walk = proxy.walk
        self._metrics = proxy.metrics
        self._chat = chat
        self._choice = choice
        self._arrived = arrived
        self._first: float | None = None
        self._model: object = None
        self._tier: object = None
        self._scope = scope
        self._path = path
        self._send = send
        self._turned: ResponsesAnswer | None = None
        self._gave_up = False
        self._settled = False
        self.ended = False
        self.left = False

    async def run(self) -> None:
        """Send the request on, try other settings after faults, and pass the answer back."""
        self._metrics.overhead.observe(self._walk.runtime.now() - self._arrived)
        while True:
            answer = None
            fault: Exception
            try:
                answer = await self._answer()
                fault = FaultyAnswer(answer.fault)
            except InputError as error:
                # no setting makes it a request that the endpoint takes
                self.end("refused")
                await self._say(400, str(error))
                return
            except FAULTS as error:
                fault = error
            # nothing has been sent yet, so another answer can take its place
            if self._choice is None or (answer is not None and not answer.fault):
                break
            other = self._walk.again(self._choice)
            if other is None:
                # a client's own attempts would only repeat those of here
                self._gave_up = self._choice.attempts > 1
                break
            self._walk.runtime.abandon("the endpoint", fault_of(fault))
            if answer is not None:
                answer.response.close()
            self._choice = other
        # the last of the settings that were tried has the word
        if answer is None:
            await self._refuse(fault)
            return
        try:
            if answer.rest is None:
                await self._pass_whole(answer)
            else:
                await self._pass_chunks(answer, answer.rest)
        finally:
            answer.response.close()

    # -- asking ------------------------------------------------------------------------------------

    async def _answer(self) -> EndpointAnswer:
        """Return the answer to the present choice, once it has begun or is whole.

        Raises:
            InputError: the endpoint lacks /v1/responses, and no chat can hold the request.
        """
        if self._path == CHAT:
            return await self._ask(CHAT)
        if self._proxy.lacks_responses:
            return await self._ask(CHAT)
        answer = await self._ask(RESPONSES)
        missing = answer.response.status in NO_ROUTE and not is_about_model(400, answer.content)
        if not missing:
            return answer
        answer.response.close()
        if self._chat.lost:
            raise InputError(no_chat(self._chat.lost))
        answer = await self._ask(CHAT)
        # a model that is not there says 404 on both routes
        self._proxy.lacks_responses = answer.is_answer
        return answer

    async def _ask(self, path: str) -> EndpointAnswer:
        """Ask on a route of the endpoint, and return the answer once it has begun or is whole."""
        scope = self._scope
        content = self._content(path)
        query = scope["query_string"].decode("latin-1")
        self._first = None
        self._turned = None
        if path != self._path:
            self._turned = ResponsesAnswer(self._chat.body)
        upstream = self._proxy.upstream
        response = await upstream.send("POST", path, scope["headers"], content, query)
        try:
            return await self._begun(response, ChatReader() if path == CHAT else ResponsesReader())
        except BaseException:
            response.close()
            raise

    async def _begun(
        self, response: aiohttp.ClientResponse, reader: AnswerReader
    ) -> EndpointAnswer:
        """Return an answer once it has begun; one that is no stream once it is whole."""
        status = response.status
        if 200 <= status < 300 and media_type(response.headers) == EVENTS:
            rest = response.content.iter_any()
            held = await self._hold(rest, reader)
            return EndpointAnswer(response, reader, held, rest, reader.fault)
        content = await content_of(response)
        fault = ""
        if 200 <= status < 300:
            reader.read_whole(content)
            fault = reader.fault
            if not fault and self._turned is not None:
                try:
                    content = self._turned.whole(parsed(content))
                except MALFORMED:
                    fault = "what is no answer of the protocol"
        elif not 400 <= status < 500 or status in RETRIED or is_about_model(status, content):
            fault = f"status {status}"
        return EndpointAnswer(response, reader, content, None, fault)

    async def _hold(self, rest: AsyncIterator[bytes], reader: AnswerReader) -> bytes:
        """Return what comes of a stream until it has begun, or has failed; a stream that ends
        before that is a fault."""
        held = b""
        since = self._walk.runtime.now()
        while not (reader.began or reader.fault):
            chunk = await anext(rest, b"")
            held += self._read(reader, chunk)
            if not chunk:
                if not (reader.began or reader.fault):
                    reader.fault = "a stream without content"
            elif self._walk.runtime.now() - since > HOLD_S or len(held) > HOLD_BYTES:
                break
        return held

    def _read(self, reader: AnswerReader, chunk: bytes) -> bytes:
        """Read the next chunk of a stream, b"" at its end; return what the client gets for it."""
        events = reader.feed(chunk) if chunk else reader.end()
        if reader.began and self._first is None:
            self._first = self._walk.runtime.now()
        if self._turned is None:
            return chunk
        try:
            return self._turned.events(events, reader.closed or not chunk)
        except MALFORMED:
            reader.fault = "what is no event of the protocol"
            return b""

    def _content(self, path: str) -> bytes:
        """Return the body as it is sent on to a route."""
        request = self._chat
        fields = self._walk.fields
        if self._choice is None:
            chat = fields.with_extra(request.chat)
        else:
            try:
                chat = fields.set(request.chat, self._choice.knobs)
            except Exception as error:
                # the user's own function of the messages
                self._walk.fell_back("messages", error)
                chat = fields.set(request.chat, self._choice.knobs, with_messages=False)
        self._model = chat.get("model")
        self._tier = chat.get("service_tier")
        if path == RESPONSES:
            body = with_changes(request.body, request.chat, chat)
        elif self._path == RESPONSES and chat.get("stream"):
            # an answer to /v1/responses always says the tokens
            body = {**chat, "stream_options": {"include_usage": True}}
        else:
            body = chat
        # unchanged to the byte, where nothing is to be changed
        if request.is_plain and body == request.body:
            return request.content
        return json.dumps(body, separators=(",", ":")).encode()

    # -- passing back ------------------------------------------------------------------------------

    async def _pass_whole(self, answer: EndpointAnswer) -> None:
        """Log a whole answer, then pass it back."""
        self._first = self._walk.runtime.now()
        # errors took no time that tells anything about an answer
        if answer.is_answer:
            await self._finish(answer.reader)
        else:
            fault = answer.fault or f"status {answer.response.status}"
            await self._fail("endpoint_error", FaultyAnswer(fault))
        turned = answer.is_answer and self._turned is not None
        headers = passed_back(answer.response, rewritten=turned)
        if turned:
            headers.append((b"content-length", str(len(answer.content)).encode()))
        await self._begin(answer.response.status, headers)
        await self._send({"type": "http.response.body", "body": answer.content})

    async def _pass_chunks(self, answer: EndpointAnswer, rest: AsyncIterator[bytes]) -> None:
        """Pass chunks back as they come. The row is in the log before the last of them is sent, so
        that whoever has a whole answer finds it there."""
        reader = answer.reader
        headers = passed_back(answer.response, rewritten=self._turned is not None)
        await self._begin(answer.response.status, headers)
        content = answer.content
        chunk = content
        try:
            while True:
                if reader.closed:
                    await self._finish(reader)
                # waits where the client reads more slowly than the endpoint writes
                if content:
                    message = {"type": "http.response.body", "body": content, "more_body": True}
                    await self._send(message)
                chunk = await anext(rest, b"")
                content = self._read(reader, chunk)
                if not chunk:
                    break
        except FAULTS as error:
            # without an end, the server closes the connection, so the client sees the cut too
            await self._finish(reader, error)
            return
        # not every server sends a last event
        await self._finish(reader)
        await self._send({"type": "http.response.body", "body": content})

    async def _refuse(self, fault: Exception) -> None:
        """Say that the endpoint gave no answer."""
        await self._fail("endpoint_error", fault)
        status = 504 if isinstance(fault, TimeoutError) else 502
        await self._say(status, f"the endpoint gave no whole answer ({type(fault).__name__})")

    async def _say(self, status: int, message: str) -> None:
        """Send an error of our own."""
        response = refusal(status, message)
        await self._begin(status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": response.body})

    async def _begin(self, status: int, headers: Pairs) -> None:
        """Send status and headers, with what was chosen."""
        if self._gave_up:
            headers = [pair for pair in headers if pair[0] != NO_RETRY[0]] + [NO_RETRY]
        headers = [*headers, *self._chosen()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _chosen(self) -> Pairs:
        """Return what was chosen, as headers."""
        if self._choice is None:
            return [(b"x-knobwise-unchanged", b"true")]
        decision = self._choice.decision
        log_fields = decision.request.log_fields or {}
        budget = budget_header(decision.request.controller.unit).removeprefix("x-")
        chosen = {
            "request-id": log_fields["id"],
            "knobs": label_of(self._choice.knobs),
            "reason": self._choice.reason,
            "fell-back": str(decision.fell_back).lower(),
            budget: f"{decision.request.budget_ms:g}",
            "attempts": str(self._choice.attempts),
        }
        if decision.promised is not None:
            chosen["promised"] = f"{decision.promised.share:g}"
        if decision.unlike:
            chosen["unlike"] = "true"
        if decision.limits_note:
            chosen["limits-note"] = decision.limits_note
        if "shadow" in log_fields:
            chosen["shadow"] = label_of(log_fields["shadow"])
        return [(f"x-knobwise-{name}".encode(), text.encode()) for name, text in chosen.items()]

    # -- ending ------------------------------------------------------------------------------------

    async def _finish(self, reader: AnswerReader, error: Exception | None = None) -> None:
        """Log an answer that is whole, once; or count it as none.

        Args:
            error: what broke it off.
        """
        if self.ended:
            return
        if reader.fault:
            await self._fail("endpoint_error", FaultyAnswer(reader.fault))
            return
        if self._choice is None and error is None:
            self.end("unchanged")
            return
        if self._choice is None or not reader.is_whole:
            fault = error or FaultyAnswer("a stream that does not say why it ended")
            await self._fail("cut", fault)
            return
        now = self._walk.runtime.now()
        self.end("answered")
        self._metrics.choices.labels(label_of(self._choice.decision.configuration)).inc()
        ended = self._first if self._proxy.first_counts else now
        usd = math.nan
        if self._walk.prices is not None:
            # what was asked for, where the answer does not say
            tier = reader.service_tier or self._tier
            usd = self._walk.price_of(self._model, reader.usage, tier, reader.has_text)
        # a disk may take its time for a row, which other streams do not wait for
        await run_in_threadpool(self._walk.finish, self._choice, ended, usd, reader.answer_id)
        # whoever has its last byte was not broken off
        self.settle()

    def settle(self) -> None:
        """Count the request as under way no longer, once."""
        if not self._settled:
            self._settled = True
            self._proxy.under_way.add(-1)

    async def _fail(self, outcome: str, error: Exception) -> None:
        """Count a request that got no answer, and log it, once."""
        if self.ended:
            return
        self.end(outcome, error)
        if self._choice is not None:
            await run_in_threadpool(self._walk.lose, self._choice, fault_of(error))

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """Count how the request ended, once; nothing is learned where an error ended it."""
        if self.ended:
            return
        self.ended = True
        self._metrics.requests.labels(outcome).inc()
        if outcome == "refused":
            return
        if error is not None:
            who = "the client" if outcome == "client_left" else "the endpoint"
            self._walk.runtime.abandon(who, fault_of(error))
            return
        now = self._walk.runtime.now()
        self._metrics.answer.observe(now - self._arrived)
        if self._first is not None:
            self._metrics.first.observe(self._first - self._arrived)

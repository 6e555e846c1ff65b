"""/v1/chat/completions: a request is decided, sent on, and its answer passed back byte for byte."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.serving.proxy.chat import ChatRequest, budget_header, parse
from knobwise.serving.proxy.guards import Guards, refusal
from knobwise.serving.proxy.metrics import ServerMetrics, label_of
from knobwise.serving.proxy.under_way import UnderWay
from knobwise.serving.proxy.upstream import FAULTS, Pairs, Upstream, media_type, passed_back
from knobwise.serving.proxy.walk import Choice, Walk

PATH = "/chat/completions"
RETRIED = (404, 408, 429)
"""Statuses below 500 after which another setting is tried: that of another model may do better."""
EVENTS = "text/event-stream"
LAST_EVENT = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
OVERLAP = 16
"""Bytes of a chunk that are kept, since the last event may come in two."""
USAGE_BYTES = 8_192
"""Bytes at the end of a stream among which its usage is."""


class FaultyAnswer(Exception):
    """An answer of the endpoint that counts as none; what it was."""


def fault_of(error: BaseException) -> BaseException | str:
    """Return what happened in words, where an error of ours has them."""
    return f"answered with {error}" if isinstance(error, FaultyAnswer) else error


class EndpointAnswer(NamedTuple):
    """An answer that has begun."""

    response: aiohttp.ClientResponse
    first: bytes
    """All of it; or the first chunk of one that is streamed."""
    rest: AsyncIterator[bytes] | None = None
    """The other chunks; None if it is not streamed."""
    fault: str = ""
    """Why another setting may do better; "" for nothing."""


class ChatProxy:
    """The ASGI application of the route.

    Args:
        guards: who may ask.
        walk: decides and finishes.
        upstream: answers.
        metrics: counts.
        first_counts: True if the first chunk, not the whole answer, is to come in time.
        at_once: how many requests were under way in each process, at most, when the profile was
            measured; None if that is not known.
    """

    under_way: UnderWay
    """Set in each process."""
    stopping: Callable[[], bool]
    """Set in each process: returns True once it ends what is under way."""

    def __init__(
        self,
        guards: Guards,
        walk: Walk,
        upstream: Upstream,
        metrics: ServerMetrics,
        first_counts: bool = False,
        at_once: float | None = None,
    ) -> None:
        self.guards = guards
        self.walk = walk
        self.upstream = upstream
        self.metrics = metrics
        self.first_counts = first_counts
        self.at_once = at_once
        self.was_crowded = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        arrived = self.walk.runtime.now()
        request = Request(scope, receive)
        content = await self.guards.read(request)
        try:
            chat = parse(content, request.headers, self.walk.runtime.controller.unit)
            choice = await self.walk.decide(chat, arrived)
        except InputError as error:
            self.metrics.requests.labels("refused").inc()
            await refusal(400, str(error))(scope, receive, send)
            return
        exchange = Exchange(self, chat, choice, arrived, scope, send)
        # counted in a file, so that it is known what a kill breaks off
        self.under_way.add(1)
        self._count_crowded()
        # uvicorn says nothing to whoever sends to a client that has left
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._leaves(receive, exchange, task))
        try:
            await exchange.run()
        except asyncio.CancelledError:
            if not exchange.left:
                raise
            exchange.end("client_left", ConnectionResetError())
        finally:
            watcher.cancel()
            exchange.settle()

    def _count_crowded(self) -> None:
        """Count a request that came while more were under way than when the profile was measured,
        and warn the first time."""
        if self.at_once is None or self.under_way.count <= self.at_once:
            return
        self.metrics.crowded.inc()
        if not self.was_crowded:
            self.was_crowded = True
            say(
                "more requests are under way than the profile was measured with "
                "(concurrency); answers may take longer than predicted"
            )

    async def _leaves(self, receive: Receive, exchange: Exchange, task: asyncio.Task[Any]) -> None:
        """Cancel an exchange when its client has left, so that nothing is generated for nobody."""
        while (await receive())["type"] != "http.disconnect":
            pass
        # at the end of an answer, and of the server, it says the same
        if not (exchange.ended or self.stopping()):
            exchange.left = True
            task.cancel()


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
        self._end = b""
        self._scope = scope
        self._send = send
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
            except FAULTS as error:
                fault = error
            # nothing has been sent yet, so another answer can take its place
            if self._choice is None or (answer is not None and not answer.fault):
                break
            other = self._walk.again(self._choice)
            if other is None:
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
                await self._pass_chunks(answer.response, answer.first, answer.rest)
        finally:
            answer.response.close()

    async def _answer(self) -> EndpointAnswer:
        """Return the answer to the present choice, once it has begun or is whole."""
        headers = self._scope["headers"]
        response = await self._proxy.upstream.send("POST", PATH, headers, self._content())
        try:
            status = response.status
            kind = media_type(response.headers)
            chunks = response.content.iter_any()
            fault = ""
            if status in RETRIED or status >= 500:
                fault = f"status {status}"
            elif status < 400 and kind == EVENTS:
                # a stream that breaks off before its first chunk is a fault like any other
                first = await anext(chunks, b"")
                return EndpointAnswer(response, first, chunks, "" if first else "no event")
            content = await response.read()
            if status < 400 and kind == "application/json" and not _is_json(content):
                fault = "no JSON"
            return EndpointAnswer(response, content, None, fault)
        except BaseException:
            response.close()
            raise

    def _content(self) -> bytes:
        """Return the body as it is sent on."""
        chat = self._chat
        fields = self._walk.fields
        if self._choice is None:
            body = fields.with_extra(chat.body)
        else:
            try:
                body = fields.set(chat.body, self._choice.knobs)
            except Exception as error:
                # the user's own function of the messages
                self._walk.fell_back("messages", error)
                body = fields.set(chat.body, self._choice.knobs, with_messages=False)
        self._model = body.get("model")
        # unchanged to the byte, where nothing is to be changed
        if chat.is_plain and body == chat.body:
            return chat.content
        return json.dumps(body, separators=(",", ":")).encode()

    async def _pass_whole(self, answer: EndpointAnswer) -> None:
        """Log a whole answer, then pass it back."""
        self._first = self._walk.runtime.now()
        # errors took no time that tells anything about an answer
        if answer.fault or answer.response.status >= 400:
            reason = answer.fault or f"status {answer.response.status}"
            self.end("endpoint_error", FaultyAnswer(reason))
        else:
            self._end = answer.first
            await self._finish()
        await self._begin(answer.response.status, passed_back(answer.response))
        await self._send({"type": "http.response.body", "body": answer.first})

    async def _pass_chunks(
        self, response: aiohttp.ClientResponse, chunk: bytes, rest: AsyncIterator[bytes]
    ) -> None:
        """Pass chunks back as they come. The row is in the log before the last of them is sent, so
        that whoever has a whole answer finds it there."""
        self._first = self._walk.runtime.now()
        await self._begin(response.status, passed_back(response))
        kept = b""
        try:
            while chunk:
                if self._walk.prices is not None:
                    self._end = (self._end + chunk)[-USAGE_BYTES:]
                if not self.ended and LAST_EVENT.search(kept + chunk):
                    await self._finish()
                kept = chunk[-OVERLAP:]
                # waits where the client reads more slowly than the endpoint writes
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await anext(rest, b"")
        except FAULTS as error:
            # without an end, the server closes the connection, so the client sees the cut too
            self.end("cut", error)
            return
        # not every server sends a last event
        await self._finish()
        await self._send({"type": "http.response.body", "body": b""})

    async def _refuse(self, fault: Exception) -> None:
        """Say that the endpoint gave no answer."""
        self.end("endpoint_error", fault)
        status = 504 if isinstance(fault, TimeoutError) else 502
        what = f"the endpoint gave no whole answer ({type(fault).__name__})"
        response = refusal(status, what)
        await self._begin(status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": response.body})

    async def _begin(self, status: int, headers: Pairs) -> None:
        """Send status and headers, with what was chosen."""
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

    async def _finish(self) -> None:
        """Log an answer that is whole, once."""
        if self.ended:
            return
        now = self._walk.runtime.now()
        if self._choice is None:
            self.end("unchanged")
            return
        self.end("answered")
        self._metrics.choices.labels(label_of(self._choice.knobs)).inc()
        ended = self._first if self._proxy.first_counts else now
        usd = math.nan
        if self._walk.prices is not None:
            usd = self._walk.price_of(self._model, usage_in(self._end))
        # a disk may take its time for a row, which other streams do not wait for
        await run_in_threadpool(self._walk.finish, self._choice, ended, usd)
        # whoever has its last byte was not broken off
        self.settle()

    def settle(self) -> None:
        """Count the request as under way no longer, once."""
        if not self._settled:
            self._settled = True
            self._proxy.under_way.add(-1)

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """Count how the request ended, once; nothing is learned where an error ended it."""
        if self.ended:
            return
        self.ended = True
        self._metrics.requests.labels(outcome).inc()
        if error is not None:
            who = "the client" if outcome == "client_left" else "the endpoint"
            self._walk.runtime.abandon(who, fault_of(error))
            return
        now = self._walk.runtime.now()
        self._metrics.answer.observe(now - self._arrived)
        if self._first is not None:
            self._metrics.first.observe(self._first - self._arrived)


def usage_in(content: bytes) -> dict[str, Any] | None:
    """Return the tokens that an endpoint counted, in an answer that is JSON or the end of one that
    is a stream of events; None if it did not."""
    lines = [content]
    if not content.startswith(b"{"):
        lines = [line[5:] for line in content.splitlines() if line.startswith(b"data:")]
    for line in reversed(lines):
        if b'"usage"' not in line:
            continue
        try:
            usage = json.loads(line)["usage"]
        except (LookupError, TypeError, ValueError):
            continue
        # of the events of a stream, only the last has it, and null is in others
        if isinstance(usage, dict):
            return usage
    return None


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True

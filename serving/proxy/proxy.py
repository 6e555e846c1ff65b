"""/v1/chat/completions and /v1/responses: requests are decided, and answered by an `Exchange`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.serving.proxy.attempt import RESPONSES, no_chat
from knobwise.serving.proxy.chat import parse
from knobwise.serving.proxy.endpoint_answers import EndpointAnswers
from knobwise.serving.proxy.exchange import Exchange
from knobwise.serving.proxy.guards import Guards, refusal
from knobwise.serving.proxy.metrics import ServerMetrics
from knobwise.serving.proxy.under_way import UnderWay
from knobwise.serving.proxy.upstream import Upstream
from knobwise.serving.proxy.walk import Walk


class ChatProxy:
    """The ASGI application of both routes.

    Args:
        guards: who may ask.
        walk: decides and finishes.
        upstream: answers.
        metrics: counts.
        answers: how the endpoint's last answers were.
        first_counts: True if the first chunk, not the whole answer, is to come in time.
        at_once: how many requests were under way in each process, at most, when the profile was
            measured; None if that is not known.
    """

    lacks_responses: bool
    """True if /v1/responses is answered by chats: where knobs are none of its fields, and once the
    endpoint has said that it has no such route."""
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
        answers: EndpointAnswers,
        first_counts: bool = False,
        at_once: float | None = None,
    ) -> None:
        self.guards = guards
        self.walk = walk
        self.upstream = upstream
        self.metrics = metrics
        self.answers = answers
        self.first_counts = first_counts
        self.at_once = at_once
        self.was_crowded = False
        self.lacks_responses = not walk.fields.are_of_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        arrived = self.walk.runtime.now()
        request = Request(scope, receive)
        content = await self.guards.read(request)
        path = scope["path"].removeprefix("/v1")
        unit = self.walk.runtime.controller.unit
        try:
            chat = parse(content, request.headers, unit, path == RESPONSES)
            if chat.lost and self.lacks_responses:
                raise InputError(no_chat(chat.lost))
            choice = await self.walk.decide(chat, arrived)
        except InputError as error:
            self.metrics.requests.labels("refused").inc()
            await refusal(400, str(error))(scope, receive, send)
            return
        exchange = Exchange(self, chat, choice, arrived, scope, path, send)
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
            await exchange.leave()
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

"""The other routes of the OpenAI protocol: they pass to the endpoint as they came, or are refused.

A client that asks for embeddings, or a gateway that takes a 404 for a dead server, must not lose
its chats for it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import aiohttp
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from knobwise.serving.proxy.answers import parsed
from knobwise.serving.proxy.guards import JSON, Guards
from knobwise.serving.proxy.metrics import ServerMetrics
from knobwise.serving.proxy.upstream import FAULTS, Upstream, passed_back

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
FORM = "multipart/form-data"
PASSED = {
    "embeddings": (JSON,),
    "completions": (JSON,),
    "moderations": (JSON,),
    "rerank": (JSON,),
    "images/generations": (JSON,),
    "images/edits": (FORM, JSON),
    "images/variations": (FORM,),
    "audio/speech": (JSON,),
    "audio/transcriptions": (FORM,),
    "audio/translations": (FORM,),
}
"""What a POST passes to the endpoint, and the kinds of content that it may have."""
MISSING = (404, 405, 501)
"""Statuses of an endpoint that lacks a route, or a model. Of a route that passes, they go on as
400: a gateway takes a 404 for a server that is dead for chats too."""
OURS = "knobwise"
"""The model that leaves the choice to the controller."""


class Passing:
    """Passes requests on as they are.

    Args:
        guards: who may ask.
        upstream: the endpoint.
        metrics: counts.
        models: that the controller chooses among.
        opened: further paths below /v1, with all that is below them.
    """

    def __init__(
        self,
        guards: Guards,
        upstream: Upstream,
        metrics: ServerMetrics,
        models: Sequence[str] = (),
        opened: Collection[str] = (),
    ) -> None:
        self._guards = guards
        self._upstream = upstream
        self._metrics = metrics
        self._models = models
        self._opened = [path.strip("/").split("/") for path in opened]

    async def models(self, request: Request) -> Response:
        """List the endpoint's models, and ours; of an endpoint that does not, those of the
        controller."""
        self._guards.check(request.headers)
        status, content, response = await self._get(request, "/models")
        listing = parsed(content)
        if status in MISSING:
            listing = {"object": "list", "data": [_model(name) for name in self._models]}
        elif status >= 300 or not isinstance(listing, dict):
            return response
        if not isinstance(listing.get("data"), list):
            return response
        try:
            # as it came, NaN and half a character included
            content = json.dumps({**listing, "data": [*listing["data"], _model(OURS)]}).encode()
        except RecursionError:
            return response
        return Response(content, media_type=JSON)

    async def model(self, request: Request) -> Response:
        """Tell of a model."""
        self._guards.check(request.headers)
        name = request.path_params["name"]
        if name == OURS:
            return JSONResponse(_model(name))
        if not name.strip("."):
            raise HTTPException(404, f"{name}: is no model")
        # a name is one segment, whatever is in it
        status, _, response = await self._get(request, f"/models/{quote(name, safe='')}")
        if status in MISSING and name in self._models:
            return JSONResponse(_model(name))
        return response

    async def _get(self, request: Request, path: str) -> tuple[int, bytes, Response]:
        """Return status and content of what the endpoint says, and the response that passes it
        back."""
        query = request.scope["query_string"].decode("latin-1")
        try:
            headers = request.scope["headers"]
            answer = await self._upstream.send("GET", path, headers, b"", query)
            async with answer:
                content = await self._upstream.content_of(answer)
        except FAULTS as error:
            raise no_answer(error) from error
        response = Response(content, answer.status)
        response.raw_headers = passed_back(answer)
        return answer.status, content, response

    async def other(self, request: Request) -> Response:
        """Pass a request on, if its route is a known one, or opened."""
        path = request.path_params["path"]
        segments = path.split("/")
        if request.method == "POST" and path in PASSED:
            route = path
            content = await self._guards.read(request, PASSED[path])
        elif (opened := self._opening(segments)) is not None:
            route = opened
            content = await self._guards.read(request, ())
        else:
            self._guards.check(request.headers)
            raise HTTPException(
                400,
                f"{request.method} /v1/{path}: is none of this server's; it answers "
                f"/v1/chat/completions and /v1/responses, passes on a POST to "
                f"{', '.join(PASSED)}, and what opened=[…] names when it is started",
            )
        quoted = "/".join(quote(segment, safe="") for segment in segments)
        query = request.scope["query_string"].decode("latin-1")
        try:
            answer = await self._upstream.send(
                request.method, f"/{quoted}", request.scope["headers"], content, query
            )
            missing = route in PASSED and answer.status in MISSING
            message = b""
            if missing:
                async with answer:
                    message = await self._upstream.content_of(answer)
        except FAULTS as error:
            self._metrics.passed.labels(route, "none").inc()
            raise no_answer(error) from error
        self._metrics.passed.labels(route, f"{answer.status // 100}xx").inc()
        if missing:
            raise HTTPException(
                400,
                f"POST /v1/{path}: the endpoint of this server answered with status "
                f"{answer.status}: {message[:300].decode(errors='replace')}",
            )
        response = PassedResponse(self._chunks_of(answer), answer.status)
        response.raw_headers = passed_back(answer)
        return response

    async def _chunks_of(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield the chunks of an answer, and close it."""
        try:
            async for chunk in self._upstream.chunks_of(answer):
                yield chunk
        finally:
            answer.close()

    def _opening(self, segments: Sequence[str]) -> str | None:
        """Return the opened path that a path is, or is below; None for none. Nothing leaves it."""
        if not all(segment.strip(".") for segment in segments):
            return None
        for opened in self._opened:
            if list(segments[: len(opened)]) == opened:
                return "/".join(opened)
        return None


class PassedResponse(StreamingResponse):
    """An answer that passes; where it breaks off, it does so for the client too."""

    async def stream_response(self, send: Send) -> None:
        """Send the answer."""
        # without an end, the server closes the connection
        with suppress(*FAULTS):
            await super().stream_response(send)


def no_answer(error: Exception) -> HTTPException:
    """Return what is said where the endpoint gives no answer."""
    status = 504 if isinstance(error, TimeoutError) else 502
    return HTTPException(status, f"no answer of the endpoint: {type(error).__name__}")


def _model(name: str) -> dict[str, Any]:
    """Return a model as a listing has it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": OURS}

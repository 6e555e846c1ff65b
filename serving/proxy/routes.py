"""The routes of the server, as an application for any ASGI server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from knobwise.agents.deployed.arrays import with_inner
from knobwise.common.checks import share
from knobwise.common.errors import InputError
from knobwise.serving.inputs import limits_in_request
from knobwise.serving.proxy.chat import (
    as_limits,
    budget_field,
    json_object,
    refuse_other_units,
)
from knobwise.serving.proxy.endpoint_answers import EndpointAnswers
from knobwise.serving.proxy.guards import Guards, refusal
from knobwise.serving.proxy.metrics import ServerMetrics
from knobwise.serving.proxy.passing import METHODS, Passing
from knobwise.serving.proxy.proxy import ChatProxy
from knobwise.serving.runtime import Runtime

if TYPE_CHECKING:
    from starlette.types import ExceptionHandler

    from knobwise.agents.deployed.controller import NumpyController

NO_ENDPOINT = "this server has no endpoint to ask; start it with endpoint=…"


class Routes:
    """What the server answers beside chats.

    Args:
        guards: who may ask.
        runtime: decides.
        metrics: what is counted.
        broken: requests that servers before this one left unfinished.
        answers: how the endpoint's last answers were; None without one.

    Attributes:
        stopping: set in each process; returns True once it ends what is under way.
    """

    stopping: Callable[[], bool]

    def __init__(
        self,
        guards: Guards,
        runtime: Runtime,
        metrics: ServerMetrics,
        broken: int = 0,
        answers: EndpointAnswers | None = None,
    ) -> None:
        self._guards = guards
        self._runtime = runtime
        self._metrics = metrics
        self._broken = broken
        self._answers = answers

    async def decide(self, request: Request) -> Response:
        """Decide for features and a budget, and do nothing else."""
        body = await self._body(request)
        controller = self._runtime.followed()
        columns = {column[0] for column in controller.columns}
        refuse_other_units(body.keys() - controller.feature_sizes.keys() - columns, controller.unit)
        budget = _number(body, budget_field(controller.unit))
        limits = limits_in_request(as_limits(body.pop("limits", None)))
        try:
            features = features_in(body, controller)
            # a decision takes microseconds, so it may keep other requests waiting
            choice = controller.decide_index(features, budget, limits=limits)
            note = controller.limits_note(features, limits)
        except ValueError as error:
            raise InputError(str(error)) from error
        headers = {"x-knobwise-limits-note": note} if note else {}
        return JSONResponse(controller.configuration(choice), headers=headers)

    async def label(self, request: Request) -> Response:
        """Note the accuracy of an answer; say if no request of this id is in the log's files."""
        body = await self._body(request)
        request_id = body.get("request_id", body.get("id"))
        if not isinstance(request_id, str):
            raise InputError("no 'request_id' of an answer")
        accuracy = _number(body, "accuracy")
        if self._runtime.log is None:
            raise HTTPException(404, "this server keeps no log")
        log = self._runtime.log
        share("accuracy", accuracy)
        known = await asyncio.to_thread(log.knows, request_id)
        if known is False:
            # what every client keeps is the id of the answer itself
            ids = await asyncio.to_thread(log.ids_of_answer, request_id)
            if len(ids) != 1:
                raise HTTPException(
                    409 if ids else 404,
                    f"request_id {request_id!r:.60}: {len(ids) or 'no'} requests here have such an "
                    "id; send the x-knobwise-request-id of an answer, or its own id",
                )
            known = True
            (request_id,) = ids
        if not await asyncio.to_thread(log.label, request_id, accuracy):
            self._metrics.lost_labels.inc()
            # gateways take 503 for a server that answers no chats either
            raise HTTPException(
                507,
                f"request_id {request_id!r:.60}: the log cannot be written, such as on a full "
                "disk; send the label again later",
            )
        # a label may come before the row of its request, or after its file was moved
        return JSONResponse({} if known else {"known": False})

    async def health(self, request: Request) -> Response:
        """Say which controller decides, and what it reads; to strangers only that it is there."""
        self._guards.check_host(request.headers)
        if not self._guards.has_token(request.headers):
            return JSONResponse({})
        controller = self._runtime.followed()
        reads = {"blocks": controller.feature_sizes, "columns": controller.columns}
        budget = {"unit": controller.unit, "mean": not controller.budgets.of_request}
        state = {"controller": controller.digest, "knobs": controller.knobs, **reads, **budget}
        if self._answers is not None:
            state["endpoint"] = self._answers.summary()
        return JSONResponse({**state, "broken_before": self._broken})

    async def ready(self, request: Request) -> Response:
        """Say whether requests should come here: 503 while this process stops, and while the
        endpoint only fails. Everybody may know that."""
        self._guards.check_host(request.headers)
        reason = None
        if self.stopping():
            reason = "stopping"
        elif self._answers is not None and self._answers.is_failing():
            reason = "endpoint"
        if reason is not None:
            return JSONResponse({"ready": False, "reason": reason}, 503)
        return JSONResponse({"ready": True})

    async def metrics(self, request: Request) -> Response:
        """Return what Prometheus reads."""
        self._guards.check(request.headers)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def no_endpoint(self, request: Request) -> Response:
        """Refuse what has nowhere to go."""
        self._guards.check(request.headers)
        raise HTTPException(404, NO_ENDPOINT)

    async def _body(self, request: Request) -> dict[str, Any]:
        return json_object(await self._guards.read(request))


def application(
    routes: Routes,
    chats: ChatProxy | None,
    passing: Passing | None,
    lifespan: AbstractAsyncContextManager[None],
) -> Starlette:
    """Return the application.

    Args:
        chats, passing: what goes to the endpoint; None without one.
        lifespan: is entered in each process that serves.
    """
    listed = [
        Route("/health", routes.health),
        Route("/ready", routes.ready),
        Route("/metrics", routes.metrics),
        Route("/decide", routes.decide, methods=["POST"]),
        Route("/label", routes.label, methods=["POST"]),
        Route("/v1/feedback", routes.label, methods=["POST"]),
    ]
    if chats is None or passing is None:
        listed.append(Route("/v1/{path:path}", routes.no_endpoint, methods=METHODS))
    else:
        listed += [
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/responses", chats, methods=["POST"]),
            Route("/v1/models", passing.models),
            Route("/v1/models/{name:path}", passing.model),
            Route("/v1/{path:path}", passing.other, methods=METHODS),
        ]
    handlers: dict[type[Exception], ExceptionHandler] = {
        InputError: _refuse_input,
        HTTPException: _refuse_http,
        ClientDisconnect: _leave,
        Exception: _refuse_bug,
    }
    return Starlette(routes=listed, exception_handlers=handlers, lifespan=lambda app: lifespan)


def features_in(body: Mapping[str, object], controller: NumpyController) -> dict[str, Any]:
    """Return what a controller reads of a body. JSON has numbers, so nothing else counts as one.

    Raises:
        InputError: a truth value; text, where the controller reads numbers; or an object of all
            features, of which no name is read.
    """
    blocks = controller.feature_sizes.keys() - controller.texts.keys()
    reads = {*controller.feature_sizes, *(column[0] for column in controller.columns)}
    inner = any(name.startswith("features.") for name in reads)
    if isinstance(body.get("features"), dict) and not inner:
        raise InputError("features: send each beside budget_ms, not inside an object")
    features = {name: value for name, value in with_inner(body, reads).items() if name in reads}
    for name, values in features.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, bool) or (isinstance(value, str) and name in blocks):
                raise InputError(f"{name} must be a number, not {value!r:.40}")
    return features


def _number(body: dict[str, Any], name: str) -> float:
    """Take a number out of a body. Raises InputError if it is none."""
    if name not in body:
        raise InputError(f"no {name!r}")
    value = body.pop(name)
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError as error:
        raise InputError(f"{name} is too large") from error
    kind = type(value).__name__
    raise InputError(f"{name} must be a finite number, not {kind} {value!r:.40}")


async def _refuse_input(request: Request, error: Exception) -> Response:
    return refusal(400, str(error))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = refusal(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def _refuse_bug(request: Request, error: Exception) -> Response:
    return refusal(500, f"{type(error).__name__} in this server")


async def _leave(request: Request, error: Exception) -> Response:
    """Answer nobody: the client has left before it had sent everything."""
    return Response(status_code=400)

"""Decisions and answers over HTTP, by an exported controller, without torch.

    pip install 'knobwise[serve]'
    OPENBLAS_NUM_THREADS=1 python examples/serve_http.py runs/latest/controller.npz
    curl localhost:8000/decide -H 'Content-Type: application/json' \
        -d '{"kind": "ocr", "prompt_tokens": 33, "budget_ms": 60}'

A request to /decide is a JSON object with the features, by the names of their columns or as blocks
of numbers, and `budget_ms`. The answer is a value for each knob. /answer takes the same and what
else the model reads, answers with these knobs, and logs the request. /label takes the `id` of such
an answer and its `accuracy`, 0 to 1, once it is known; of several the last counts. A request that
cannot be used gets status 400 and the reason. /health says which controller decides, and what it
reads.

Pages that are open in a browser on this machine can reach the server too, but not use it. It takes
nothing but `application/json`, which a page may not send unasked, nothing from another origin, and
nothing that was sent to another host than `HOSTS`.

The port, the number of worker processes and the folder of the log may follow: 8000 4 served. The
workers are forked once everything is loaded, and one that dies is replaced.
"""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import knobwise
from knobwise.agents import NumpyController
from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with

HOSTS = ["127.0.0.1", "localhost"]
"""The names under which this server is asked."""
MAX_BYTES = 1_000_000
"""The largest body of a request."""


def call(request: dict[str, Any], **knobs: Any) -> str:
    """Answer a request with these knobs; put your model here."""
    time.sleep(0.002)
    return f"the answer to {request.get('question')}"


def check_host(request: Request) -> str:
    """Return the host that a request was sent to; refuse names by which nobody asks this server,
    which somebody may have pointed at it."""
    host = request.headers.get("host", "")
    if host.partition(":")[0].lower() not in HOSTS:
        raise HTTPException(403, f"Host {host}: is not one of {', '.join(HOSTS)}")
    return host


async def read(request: Request) -> bytes:
    """Return the body of a request that no foreign page can have sent."""
    host = check_host(request)
    origin = request.headers.get("origin")
    if origin not in (None, f"http://{host}"):
        raise HTTPException(403, f"Origin {origin}: pages from elsewhere are not served")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "give Content-Type: application/json")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BYTES:,} bytes")
    return bytes(content)


async def body_of(request: Request, number: str) -> tuple[dict[str, Any], float]:
    """Return a JSON object without one of its numbers, and this number."""
    content = await read(request)
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise TypeError(f"give an object with {number}")
        # half of a character could not be sent back
        json.dumps(body, ensure_ascii=False).encode()
        value = body.pop(number)
        if type(value) not in (int, float) or not math.isfinite(value):
            name = type(value).__name__
            raise TypeError(f"{number} must be a finite number, not {name} {value!r:.40}")
        return body, float(value)
    except KeyError as error:
        raise InputError(f"no {error}") from error
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InputError(str(error)) from error


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """Say what is wrong with a request."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    return JSONResponse({"error": str(error)}, 400)


async def leave(request: Request, error: Exception) -> Response:
    """Answer nobody: the client has left before it had sent everything."""
    return Response(status_code=400)


def application(controller: NumpyController, log: str) -> Starlette:
    """Return the server's routes, for any ASGI server."""
    blocks = controller.feature_sizes
    reads = {*blocks, *(column[0] for column in controller.columns)}

    def features_of(body: dict[str, Any]) -> dict[str, Any]:
        """Return what the controller reads; JSON has numbers, so nothing else counts as one."""
        features = {name: value for name, value in body.items() if name in reads}
        for name, values in features.items():
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, bool) or (isinstance(value, str) and name in blocks):
                    raise InputError(f"{name} must be a number, not {value!r:.40}")
        return features

    serve = knobwise.wrap(call, controller, features=features_of, log=log, explore=0.1)

    async def decide(request: Request) -> JSONResponse:
        body, budget_ms = await body_of(request, "budget_ms")
        try:
            # a decision takes microseconds, so it may keep other requests waiting
            return JSONResponse(controller.decide(features_of(body), budget_ms))
        except ValueError as error:
            return await refuse(request, error)

    async def answer(request: Request) -> JSONResponse:
        body, budget_ms = await body_of(request, "budget_ms")
        # a model may not, so it works in a thread
        result = await run_in_threadpool(serve.result, body, budget_ms)
        about = {"knobs": result.configuration, "on_time": result.met, "id": result.request_id}
        return JSONResponse({"answer": result.answer, **about})

    async def label(request: Request) -> JSONResponse:
        body, accuracy = await body_of(request, "accuracy")
        if not isinstance(body.get("id"), str):
            raise InputError("no 'id' of an answer")
        serve.log.label(body["id"], accuracy)
        return JSONResponse({})

    async def health(request: Request) -> JSONResponse:
        check_host(request)
        reads = {"blocks": controller.feature_sizes, "columns": controller.columns}
        return JSONResponse({"controller": controller.digest, "knobs": controller.knobs, **reads})

    routes = [Route("/health", health)]
    for post in (decide, answer, label):
        routes.append(Route(f"/{post.__name__}", post, methods=["POST"]))
    handlers = {InputError: refuse, HTTPException: refuse, ClientDisconnect: leave}
    return Starlette(routes=routes, exception_handlers=handlers)


def work(app: Starlette, listening: socket.socket, parent: int) -> None:
    """Serve until a signal comes, or until the parent process is gone."""
    end_with(parent)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])


def main(
    path: str = "runs/latest/controller.npz",
    port: str = "8000",
    workers: str = "1",
    log: str = "served",
) -> None:
    """Serve on this machine alone until interrupted."""
    app = application(NumpyController.load(path), log)
    listening = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    forked = multiprocessing.get_context("fork")
    # daemons: they are stopped when this process ends
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for _ in range(int(workers) - len(multiprocessing.active_children())):
                forked.Process(target=work, args=(app, listening, os.getpid()), daemon=True).start()
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:5])

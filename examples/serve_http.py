"""Decisions and answers over HTTP, by an exported controller, without torch.

    pip install 'knobwise[serve]'
    OPENBLAS_NUM_THREADS=1 python examples/serve_http.py runs/latest/controller.npz
    curl localhost:8000/decide -d '{"kind": "ocr", "prompt_tokens": 33, "budget_ms": 60}'

A request to /decide is a JSON object with the features, by the names of their columns or as blocks
of numbers, and `budget_ms`. The answer is a value for each knob. /answer takes the same and what
else the model reads, answers with these knobs, and logs the request. /label takes the `id` of such
an answer and its `accuracy`, 0 to 1, once it is known. A request that cannot be used gets status
400 and the reason. /health says which controller decides, and what it reads.

The port, the number of worker processes and the folder of the log may follow: 8000 4 served. The
workers are forked once everything is loaded, and one that dies is replaced.
"""

import contextlib
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
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import knobwise
from knobwise.agents import NumpyController
from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with


def call(request: dict[str, Any], **knobs: Any) -> str:
    """Answer a request with these knobs; put your model here."""
    time.sleep(0.002)
    return f"the answer to {request.get('question')}"


async def body_of(request: Request, number: str) -> tuple[dict[str, Any], float]:
    """Return a JSON object without one of its numbers, and this number."""
    try:
        body = dict(await request.json())
        return body, float(body.pop(number))
    except KeyError as error:
        raise InputError(f"no {error}") from error
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise InputError(str(error)) from error


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """Say what is wrong with a request."""
    return JSONResponse({"error": str(error)}, 400)


def application(controller: NumpyController, log: str) -> Starlette:
    """Return the server's routes, for any ASGI server."""
    reads = {*controller.feature_sizes, *(column[0] for column in controller.columns)}

    def features_of(body: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if name in reads}

    serve = knobwise.wrap(call, controller, features=features_of, log=log, explore=0.1)

    async def decide(request: Request) -> JSONResponse:
        body, budget_ms = await body_of(request, "budget_ms")
        try:
            # a decision takes microseconds, so it may keep other requests waiting
            return JSONResponse(controller.decide(body, budget_ms))
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
        reads = {"blocks": controller.feature_sizes, "columns": controller.columns}
        return JSONResponse({"controller": controller.digest, "knobs": controller.knobs, **reads})

    routes = [Route("/health", health)]
    for post in (decide, answer, label):
        routes.append(Route(f"/{post.__name__}", post, methods=["POST"]))
    return Starlette(routes=routes, exception_handlers={InputError: refuse})


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

"""A simulated language-model server that speaks the OpenAI chat-completions protocol, faults
included: for tests, for load and to try things. Its models are those of `simulated_models`.

    pip install -e '.[serve]'
    python -m knobwise.testbeds.simulated_endpoint 8001
    curl localhost:8001/v1/chat/completions -d '{"model": "small",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}]}'

All times are multiplied by `delay`, the second word of the command line: `8001 0.01` is a hundred
times as fast, and 0 waits for nothing.

It tells of the probabilities of tokens as vLLM does (`simulated_tokens`), and also takes plain
prompts at /v1/completions: demonstrations of the query's own kind make the right answer likelier.

What a request is to suffer follows a model's name, or stands in the header `X-Simulated`:
`small?fault=429&times=1`. `Simulation` lists what there is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from knobwise.common.extras import install_command
from knobwise.testbeds.simulated_models import (
    MODELS,
    REFUSAL,
    SimulatedReply,
    Simulation,
    facts_of,
    reply_to,
)
from knobwise.testbeds.simulated_tokens import turns_of

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"{error.name} is not installed; {install_command('serve')}", file=sys.stderr)
    sys.exit(2)

CREATED = 1_700_000_000


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error as the protocol has it."""
    error = {"message": message, "type": "simulated", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


def _wrong_fields(body: Mapping[str, Any], simulation: Simulation) -> Response | None:
    """Return what is said to a request for probabilities that this server does not take."""
    wanted = [name for name in ("prompt_logprobs", "logprobs") if body.get(name) is not None]
    if wanted and simulation.logprobs == "refused":
        return problem(422, f"Unsupported fields in the request: {wanted}")
    if body.get("stream") and "prompt_logprobs" in wanted:
        return problem(400, "`prompt_logprobs` are not available when `stream=True`.")
    return None


class EndpointState:
    """The server's state and routes.

    Attributes:
        requests: the bodies of the last requests.
        key: the bearer token that requests must have; "" for any.
        open: how many requests are being answered now, and `most_open` ever at once.
    """

    def __init__(self, delay: float = 1.0) -> None:
        self.delay = delay
        self.key = ""
        self.requests: deque[dict[str, Any]] = deque(maxlen=10_000)
        self.open = 0
        self.most_open = 0
        self._met: Counter[str] = Counter()

    def application(self) -> Starlette:
        """Return the routes, for any ASGI server."""
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        """List the models."""
        if wrong := self._wrong_key(request):
            return wrong
        models = [
            {"id": name, "object": "model", "created": CREATED, "owned_by": "simulated"}
            for name in MODELS
        ]
        return JSONResponse({"object": "list", "data": models})

    async def complete(self, request: Request) -> Response:
        """Answer, or fail as the request says."""
        if wrong := self._wrong_key(request):
            return wrong
        content = await request.body()
        try:
            body = json.loads(content)
            name, _, query = body["model"].partition("?")
            if name not in MODELS:
                return problem(404, f"The model {name!r} does not exist; there are {[*MODELS]}")
            simulation = Simulation.parse(query or request.headers.get("x-simulated", ""))
            if wrong := _wrong_fields(body, simulation):
                return wrong
            facts: dict[str, Any] = {}
            streams = body.get("stream") and simulation.stream
            if not streams:
                facts = facts_of(body, name, simulation)
            if "prompt" in body:
                body["messages"] = turns_of(body["prompt"])
            reply = reply_to(body, name, simulation, self.delay)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return problem(400, f"The request cannot be used: {error!r}")
        self.requests.append(body)
        key = hashlib.blake2b(content, digest_size=8).hexdigest()
        fault = simulation.fault
        self._met[key] += 1
        if simulation.times and self._met[key] > simulation.times:
            fault = ""
            reply = reply_to(body, name, Simulation(), self.delay)
        if fault == "429":
            wait_ms = round(1000 * simulation.retry_s)
            headers = {"retry-after": f"{simulation.retry_s:g}", "retry-after-ms": str(wait_ms)}
            return problem(429, "Rate limit reached", headers)
        if fault in ("401", "500"):
            return problem(int(fault), "Incorrect API key" if fault == "401" else "Server error")
        head = {"id": f"chatcmpl-{key}", "created": CREATED, "model": body["model"]}
        if streams:
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            chunks = self._stream(reply, head, fault, usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        whole = self._whole(reply, head, fault, facts, "prompt" in body)
        return StreamingResponse(whole, media_type="application/json")

    async def _whole(
        self,
        reply: SimulatedReply,
        head: Mapping[str, Any],
        fault: str,
        facts: Mapping[str, Any],
        plain: bool,
    ) -> AsyncIterator[bytes]:
        """Yield an answer in one piece, once all of it is there; to a `plain` prompt in the form of
        /v1/completions."""
        self._begin()
        try:
            await asyncio.sleep(reply.first_s + reply.word_s * len(reply.words))
            content = facts.get("text", " ".join(reply.words))
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if fault == "refusal":
                message |= {"content": None, "refusal": REFUSAL}
            choice = {"index": 0, "message": message, "finish_reason": reply.finish}
            whole = {**head, "object": "chat.completion", "choices": [choice]}
            choice["logprobs"] = facts.get("logprobs")
            # vLLM tells of a chat's prompt beside the choices, of a plain one in the choice
            of_prompt = {"prompt_logprobs": facts.get("prompt_logprobs")}
            if plain:
                plain_choice = {"index": 0, "text": content, "finish_reason": reply.finish}
                choice = {**plain_choice, "logprobs": None, **of_prompt}
                whole |= {"object": "text_completion", "choices": [choice]}
            else:
                whole |= of_prompt
            usage = reply._replace(prompt_tokens=facts["tokens"]).usage()
            text = json.dumps(whole | {"usage": usage}).encode()
            if fault in ("cut", "json"):
                text = text[: len(text) // 2]
            yield text
            if fault == "cut":
                raise ConnectionAbortedError("cut, as the request asked for")
        finally:
            self.open -= 1

    async def _stream(
        self, reply: SimulatedReply, head: Mapping[str, Any], fault: str, usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield an answer word by word, as events."""

        def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            return f"data: {json.dumps(chunk)}\n\n".encode()

        self._begin()
        field = "refusal" if fault == "refusal" else "content"
        try:
            await asyncio.sleep(reply.first_s)
            yield event({"role": "assistant", "content": ""})
            for number, word in enumerate(reply.words):
                if number:
                    await asyncio.sleep(reply.word_s)
                if number >= len(reply.words) // 2 and fault == "cut":
                    raise ConnectionAbortedError("cut, as the request asked for")
                if number >= len(reply.words) // 2 and fault == "json":
                    yield b'data: {"id": "chatcmpl-\n\n'
                yield event({field: f" {word}" if number else word})
            yield event({}, reply.finish)
            if usage:
                last = {**head, "object": "chat.completion.chunk", "choices": []}
                yield f"data: {json.dumps(last | {'usage': reply.usage()})}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1

    def _wrong_key(self, request: Request) -> Response | None:
        """Return what is said to a request without the key."""
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return problem(401, "Incorrect API key")

    def _begin(self) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)


class SimulatedEndpoint:
    """The server in a thread, on a free port of this machine, inside a context.

        with SimulatedEndpoint(delay=0) as endpoint:
            openai.OpenAI(base_url=endpoint.url, api_key="none")

    Args:
        delay: multiplies all times.
        state: routes of your own, with a delay of their own; None for those of this module.

    Attributes:
        url: what clients take as their `base_url`.
        state: the `EndpointState`.
    """

    def __init__(self, delay: float = 0.0, state: EndpointState | None = None) -> None:
        self.state = EndpointState(delay) if state is None else state
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        # asyncio does so only for sockets that it made itself; else each chunk waits 40 ms for
        # the one before to be acknowledged
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._server = uvicorn.Server(configuration(self.state))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> SimulatedEndpoint:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.002)
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()
        self._socket.close()


def configuration(endpoint: EndpointState, **options: Any) -> uvicorn.Config:
    """Return the settings of the server; what it is told to do wrong is no news."""
    return uvicorn.Config(endpoint.application(), log_level="critical", **options)


def main(port: str = "8001", delay: str = "1") -> None:
    """Serve on this machine alone until interrupted."""
    print(f"simulated models {', '.join(MODELS)} at http://127.0.0.1:{port}/v1", file=sys.stderr)
    uvicorn.Server(configuration(EndpointState(float(delay)), port=int(port))).run()


if __name__ == "__main__":
    main(*sys.argv[1:3])

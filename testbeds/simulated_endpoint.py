"""A simulated language-model server that speaks the OpenAI chat-completions protocol, faults
included: for tests, for load and to try things. No model is behind it.

    pip install 'knobwise[serve]'
    python -m knobwise.testbeds.simulated_endpoint 8001
    curl localhost:8001/v1/chat/completions -d '{"model": "small",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}]}'

It knows sums and the questions of SmolLM2 that come with knobwise. Whether an answer is right, and
how long it takes, follows from the model (`MODELS`), `max_tokens`, `reasoning_effort` and the
question, so the same request always gets the same bytes. All times are multiplied by `delay`, the
second word of the command line: `8001 0.01` is a hundred times as fast, and 0 waits for nothing.

What a request is to suffer follows a model's name, or stands in the header `X-Simulated`:
`small?fault=429&times=1`. `Simulation` lists what there is.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import polars as pl
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from knobwise.profiling.huggingface.smollm import QUESTIONS_CSV


class SimulatedModel(NamedTuple):
    """A simulated model."""

    skill: float
    """The share of questions that it answers without thinking."""
    first_s: float
    """Seconds to its first token, without thinking."""
    token_s: float
    """Seconds for each token, those of thinking included."""


MODELS = {
    "small": SimulatedModel(0.45, 0.10, 0.004),
    "medium": SimulatedModel(0.60, 0.20, 0.010),
    "large": SimulatedModel(0.75, 0.40, 0.020),
}
THINKING = {"none": 0, "minimal": 5, "low": 20, "medium": 60, "high": 150}
"""The tokens of thought on a question of middling difficulty, by `reasoning_effort`."""
FAULTS = ("401", "429", "500", "cut", "json", "refusal")
CREATED = 1_700_000_000
REFUSAL = "I cannot help with that."
WRONG = "I do not know"


@dataclass(frozen=True)
class Simulation:
    """What a request is to suffer.

    Attributes:
        fault: one of `FAULTS`: an error with this status (429 says when to come again, `retry_s`);
            the connection cut in the middle of the answer; an answer that is no JSON; a refusal.
        times: how many equal requests the fault meets, 0 for all. Later ones are answered.
        retry_s: seconds after which a 429 says to come again.
        first_ms: time to the first byte, whatever `delay` is; negative as the model has it.
        chunks: so many chunks of text, whatever the answer; 0 for one a word.
        chunk_ms: time between two chunks, whatever `delay` is; negative as the model has it.
    """

    fault: str = ""
    times: int = 0
    retry_s: float = 0.02
    first_ms: float = -1.0
    chunks: int = 0
    chunk_ms: float = -1.0

    @classmethod
    def parse(cls, text: str) -> Simulation:
        """Read `fault=429&times=1`. Raises ValueError for anything else."""
        values: dict[str, Any] = {}
        for name, value in parse_qsl(text, strict_parsing=bool(text)):
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"{name} is none of {', '.join(cls.__dataclass_fields__)}")
            values[name] = type(getattr(cls, name))(value)
        simulation = cls(**values)
        if simulation.fault and simulation.fault not in FAULTS:
            raise ValueError(f"fault={simulation.fault} is none of {', '.join(FAULTS)}")
        return simulation


class SimulatedReply(NamedTuple):
    """What a model answers, and how long it takes."""

    words: tuple[str, ...]
    finish: str
    prompt_tokens: int
    thinking: int
    first_s: float
    word_s: float

    def usage(self) -> dict[str, Any]:
        """Return the tokens as the protocol has them."""
        output = self.thinking + len(self.words)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "completion_tokens_details": {"reasoning_tokens": self.thinking},
        }


def hashed(*parts: object) -> float:
    """Return a number in [0, 1) that follows from the parts."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@functools.cache
def known_answers() -> Mapping[str, str]:
    """Return the answers to the questions that come with knobwise."""
    questions = pl.read_csv(QUESTIONS_CSV, infer_schema=False)
    return dict(zip(questions["question"], questions["answer"], strict=True))


def question_of(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last message of the user, without what is no text."""
    for message in reversed(messages):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(content, str):
                return content
            return "\n".join(part["text"] for part in content if part["type"] == "text")
    return ""


def right_answer(text: str) -> str:
    """Return the answer to a sum, or to a known question that is a line of the text."""
    for line in reversed(text.splitlines()):
        if line.strip() in known_answers():
            return known_answers()[line.strip()]
    if terms := re.search(r"(\d{1,9})\s*([-+*])\s*(\d{1,9})", text):
        first, sign, second = terms.groups()
        results = {"+": int(first) + int(second), "-": int(first) - int(second)}
        return str(results.get(sign, int(first) * int(second)))
    return WRONG


def reply_to(
    body: Mapping[str, Any], name: str, simulation: Simulation, delay: float
) -> SimulatedReply:
    """Answer a request; see the module. Raises KeyError or TypeError for a body that lacks what
    the protocol demands."""
    model = MODELS[name]
    text = question_of(body["messages"])
    effort = body.get("reasoning_effort") or "none"
    # the same for all models and efforts, but for a part
    difficulty = 0.75 * hashed(text) + 0.25 * hashed(text, name)
    thinking = round(THINKING[effort] * (0.2 + difficulty))
    words = [WRONG]
    if difficulty < model.skill + 0.15 * (thinking / 150) ** 0.5:
        words = right_answer(text).split()
    finish = "stop"
    if simulation.fault == "refusal":
        words = REFUSAL.split()
        thinking = 0
    if simulation.chunks:
        words = [f"word{i}" for i in range(simulation.chunks)]
    most = body.get("max_completion_tokens") or body.get("max_tokens") or 4096
    if thinking + len(words) > most:
        # thought comes first, so nothing may be left for the answer
        thinking = min(thinking, most)
        words = words[: most - thinking]
        finish = "length"
    first_s = delay * (model.first_s + model.token_s * thinking)
    word_s = delay * model.token_s
    if simulation.first_ms >= 0:
        first_s = simulation.first_ms / 1000
    if simulation.chunk_ms >= 0:
        word_s = simulation.chunk_ms / 1000
    prompt_tokens = len(json.dumps(body["messages"])) // 4
    return SimulatedReply(tuple(words), finish, prompt_tokens, thinking, first_s, word_s)


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error as the protocol has it."""
    about = {"message": message, "type": "simulated", "param": None, "code": None}
    return JSONResponse({"error": about}, status, headers)


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
        about = {"id": f"chatcmpl-{key}", "created": CREATED, "model": body["model"]}
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            chunks = self._stream(reply, about, fault, usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        return StreamingResponse(self._whole(reply, about, fault), media_type="application/json")

    async def _whole(
        self, reply: SimulatedReply, about: Mapping[str, Any], fault: str
    ) -> AsyncIterator[bytes]:
        """Yield an answer in one piece, once all of it is there."""
        self._begin()
        try:
            await asyncio.sleep(reply.first_s + reply.word_s * len(reply.words))
            message: dict[str, Any] = {"role": "assistant", "content": " ".join(reply.words)}
            if fault == "refusal":
                message |= {"content": None, "refusal": REFUSAL}
            choice = {"index": 0, "message": message, "finish_reason": reply.finish}
            whole = {**about, "object": "chat.completion", "choices": [choice]}
            text = json.dumps(whole | {"usage": reply.usage()}).encode()
            if fault in ("cut", "json"):
                text = text[: len(text) // 2]
            yield text
            if fault == "cut":
                raise ConnectionAbortedError("cut, as the request asked for")
        finally:
            self.open -= 1

    async def _stream(
        self, reply: SimulatedReply, about: Mapping[str, Any], fault: str, usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield an answer word by word, as events."""

        def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {**about, "object": "chat.completion.chunk", "choices": [choice]}
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
                last = {**about, "object": "chat.completion.chunk", "choices": []}
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

    Attributes:
        url: what clients take as their `base_url`.
        state: the `EndpointState`.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.state = EndpointState(delay)
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

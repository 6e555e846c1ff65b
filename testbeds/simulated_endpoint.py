"""A simulated language-model server that speaks the OpenAI chat-completions protocol, faults
included: for tests, for load and to try things. No model is behind it.

    pip install -e '.[serve]'
    python -m knobwise.testbeds.simulated_endpoint 8001
    curl localhost:8001/v1/chat/completions -d '{"model": "small",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}]}'

It knows sums and the questions of SmolLM2 that come with knobwise. Whether an answer is right, and
how long it takes, follows from the model (`MODELS`), `max_tokens`, `reasoning_effort` and the
question, so the same request always gets the same bytes. All times are multiplied by `delay`, the
second word of the command line: `8001 0.01` is a hundred times as fast, and 0 waits for nothing.

It tells of the probabilities of tokens as vLLM does (`simulated_tokens`), and also takes plain
prompts at /v1/completions: demonstrations of the query's own kind make the right answer likelier.

What a request is to suffer follows a model's name, or stands in the header `X-Simulated`:
`small?fault=429&times=1`. `Simulation` lists what there is.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import re
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
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
from knobwise.testbeds.simulated_tokens import (
    next_place,
    pieces,
    prompt_logprobs,
    render_messages,
    text_of,
    top_logprobs,
    turns_of,
)


class SimulatedModel(NamedTuple):
    """A simulated model."""

    skill: float
    """The difficulty up to which it is right without thinking."""
    first_s: float
    """Seconds to its first token, without thinking."""
    token_s: float
    """Seconds for each token, those of thinking included."""


MODELS = {
    "small": SimulatedModel(0.44, 0.10, 0.004),
    "medium": SimulatedModel(0.50, 0.20, 0.010),
    "large": SimulatedModel(0.58, 0.40, 0.020),
}
THINKING = {"none": 0, "minimal": 5, "low": 20, "medium": 60, "high": 150}
"""The tokens of thought on a question of middling difficulty, by `reasoning_effort`."""
FAULTS = ("401", "429", "500", "cut", "json", "refusal")
LOGPROBS = ("vllm", "openai", "none", "refused")
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
        stream: 0 for an answer in one piece, also where a stream is asked for.
        logprobs: one of `LOGPROBS`: what is told of the probabilities of tokens. vllm tells of the
            prompt and of the answer; openai of the answer; none ignores such fields, and refused
            refuses them.
    """

    fault: str = ""
    times: int = 0
    retry_s: float = 0.02
    first_ms: float = -1.0
    chunks: int = 0
    chunk_ms: float = -1.0
    stream: int = 1
    logprobs: str = "vllm"

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
        if simulation.logprobs not in LOGPROBS:
            raise ValueError(f"logprobs={simulation.logprobs} is none of {', '.join(LOGPROBS)}")
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


def hash_to_share(*parts: object) -> float:
    """Return a number in [0, 1) that follows from the parts."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class KnownQuestion(NamedTuple):
    """A question that comes with knobwise."""

    answer: str
    kind: str


@functools.cache
def known_questions() -> Mapping[str, KnownQuestion]:
    """Return the questions that come with knobwise, by their text."""
    questions = pl.read_csv(QUESTIONS_CSV, infer_schema=False)
    known = map(KnownQuestion, questions["answer"], questions["question_type"])
    return dict(zip(questions["question"], known, strict=True))


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of the user, without what is no text."""
    for message in reversed(messages):
        if message["role"] == "user":
            return text_of(message)
    return ""


def known_in(text: str) -> KnownQuestion | None:
    """Return the last known question that is a line of the text."""
    lines = [line.strip() for line in reversed(text.splitlines())]
    return next((known_questions()[line] for line in lines if line in known_questions()), None)


def kind_of(text: str) -> str:
    """Return the kind of a question; of a sum, how many digits it has."""
    known = known_in(text)
    return known.kind if known else f"{sum(map(str.isdigit, text))} digits"


def difficulty_of(text: str, model: str) -> float:
    """Return how difficult a question is for a model, from 0 to 1. Most of it follows from the kind
    of question (of a sum, from its length), and every model is better at some kinds."""
    known = known_in(text)
    digits = sum(map(str.isdigit, text))
    kind = kind_of(text)
    of_kind = hash_to_share(kind) if known else min(digits / 12, 1.0)
    for_model = hash_to_share(kind, model)
    of_question = (hash_to_share(text) + hash_to_share(text, model)) / 2
    return 0.2 * of_kind + 0.4 * for_model + 0.4 * of_question


def right_answer(text: str) -> str:
    """Return the answer to a sum, or to a known question that is a line of the text."""
    if known := known_in(text):
        return known.answer
    if terms := re.search(r"(\d{1,9})\s*([-+*])\s*(\d{1,9})", text):
        first, sign, second = terms.groups()
        results = {"+": int(first) + int(second), "-": int(first) - int(second)}
        return str(results.get(sign, int(first) * int(second)))
    return WRONG


def chance_right(messages: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the probability of each token of the right answer to the last question, after the
    questions before it: each of its own kind makes it easier by .3."""
    questions = [text_of(message) for message in messages if message["role"] == "user"]
    if not questions:
        return 0.0
    *shots, question = questions
    alike = sum(kind_of(shot) == kind_of(question) for shot in shots)
    ease = MODELS[name].skill + 0.3 * alike - difficulty_of(question, name)
    return 1 / (1 + math.exp(-8 * ease))


def facts_of(body: Mapping[str, Any], name: str, simulation: Simulation) -> dict[str, Any]:
    """Return what a whole answer tells of the probabilities of tokens: `tokens`, how many the
    prompt has; `text`, the answer, where it follows from them; and the fields `prompt_logprobs` and
    `logprobs` where they are asked for and given."""
    plain = "prompt" in body
    messages = turns_of(body["prompt"]) if plain else list(body["messages"])
    text = body.get("prompt", "")
    if not plain:
        open_ended = bool(body.get("continue_final_message"))
        text = render_messages(messages, body.get("add_generation_prompt", True), open_ended)
    facts: dict[str, Any] = {"tokens": len(pieces(text))}
    right = chance_right(messages, name)
    wanted = right_answer(question_of(messages))
    answer = ""
    if messages and messages[-1]["role"] == "assistant":
        answer = text_of(messages[-1])
        right = right if answer == wanted else (1 - right) / 2
    if simulation.logprobs == "vllm" and body.get("prompt_logprobs") is not None:
        facts["prompt_logprobs"] = prompt_logprobs(text, answer, right, body["prompt_logprobs"])
    if simulation.logprobs in ("vllm", "openai") and body.get("logprobs") and not plain:
        tokens = next_place(wanted, WRONG, right)
        facts["logprobs"] = top_logprobs(tokens, body.get("top_logprobs") or 0)
        # greedy decoding gives the likeliest token
        likeliest = wanted if tokens[0].text == pieces(wanted)[0] else WRONG
        facts["text"] = "".join(pieces(likeliest)[: body.get("max_tokens")])
    return facts


def reply_to(
    body: Mapping[str, Any], name: str, simulation: Simulation, delay: float
) -> SimulatedReply:
    """Answer a request; see the module. Raises KeyError or TypeError for a body that lacks what
    the protocol demands."""
    model = MODELS[name]
    text = question_of(body["messages"])
    effort = body.get("reasoning_effort") or "none"
    difficulty = difficulty_of(text, name)
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

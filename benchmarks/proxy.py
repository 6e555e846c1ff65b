"""What `knobwise serve` adds to streams: 50 requests a second, some 32 of them under way.

An upstream that does nothing else answers each request after 300 ms, in 40 chunks. Requests come at
random moments, whether or not others were answered (an open loop), straight to the upstream and
through the proxy in turn: chats, requests to /v1/responses that the upstream answers itself, and
such that chats answer. The text of every chunk says when the upstream got the request and sent the
chunk, by the clock that all processes of a machine share, so what is on the way is known without
the times that the upstream sleeps. What the proxy adds is the time on the way through it, less the
median straight. Its CPU time for a request with one chunk, and for each further chunk, hardly
depends on what else the machine does.

    python benchmarks/proxy.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

RATE = 50
"""Requests a second."""
FIRST_S = 0.3
"""Until the first chunk."""
CHUNKS = 40
CHUNK_S = 0.0085
"""Between two chunks: an answer takes 0.64 s, so that 32 are under way."""
SECONDS = 20.0
ROUNDS = 3
TARGETS = {"first p50": 3.0, "first p99": 15.0, "chunk p99": 5.0}
"""In ms."""
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
LACKING = "/lacking"
"""Before the paths of an upstream without /v1/responses."""
TEXT = "word " * 30
TIMES = re.compile(rb'"(?:content|delta)": ?"at ([0-9.]+) ([0-9.]+) "')
"""When the upstream got a request and sent a chunk, in the text of the chunk."""
LAST_LINES = b"data: [DONE]", b"event: response.completed"
TICK = os.sysconf("SC_CLK_TCK")


class Sender(asyncio.Protocol):
    """The upstream's side of a connection: answers one request after another."""

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._transport = transport
        self._content = b""

    def data_received(self, data: bytes) -> None:
        """Answer once a request is there."""
        # a request may come in parts
        self._content += data
        head, end, body = self._content.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if not end or len(body) < length:
            return
        self._content = b""
        if head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        path = head.split()[1].decode()
        if path == LACKING + RESPONSES:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
            return
        chunks = json.loads(body)["chunks"]
        stream = self._stream(time.monotonic(), chunks, path == RESPONSES)
        asyncio.get_running_loop().create_task(stream)

    async def _stream(self, got: float, chunks: int, of_responses: bool) -> None:
        await asyncio.sleep(FIRST_S)
        begin = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        self._transport.write(begin + b"Transfer-Encoding: chunked\r\n\r\n")
        for number in range(chunks):
            if number:
                await asyncio.sleep(CHUNK_S)
            text = f"at {got:.7f} {time.monotonic():.7f} "
            self._chunk(response_event("output_text.delta", delta=text, item_id="msg_1")
                        if of_responses else chat_event({"content": text}))  # fmt: skip
        if of_responses:
            usage = {"input_tokens": 30, "output_tokens": chunks, "total_tokens": 30 + chunks}
            answer = {"id": "resp_1", "object": "response", "status": "completed", "usage": usage}
            self._chunk(response_event("completed", response=answer))
        else:
            self._chunk(chat_event({}, "stop"))
            self._chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _chunk(self, content: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(content), content))


def chat_event(delta: dict[str, str], finish: str | None = None) -> bytes:
    """Return an event of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "small"}
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def response_event(kind: str, **fields: object) -> bytes:
    """Return an event of an answer to /v1/responses."""
    event = {"type": f"response.{kind}", **fields}
    return f"event: response.{kind}\ndata: {json.dumps(event)}\n\n".encode()


def upstream(listening: socket.socket) -> None:
    """Answer until killed."""

    async def answer() -> None:
        server = await asyncio.get_running_loop().create_server(Sender, sock=listening)
        await server.serve_forever()

    asyncio.run(answer())


@dataclass
class Times:
    """What was on the way, in ms.

    Attributes:
        first: of each request, there and back with the first chunk.
        chunk: of each later chunk.
        open: how many requests were under way when each began.
        failed: how many requests had no whole answer.
    """

    first: list[float] = field(default_factory=list)
    chunk: list[float] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    failed: int = 0


class Load:
    """Clients of one address, in an open loop.

    Args:
        port: to send to.
        path: of the requests.
        chunks: that each answer has.
    """

    def __init__(self, port: int, path: str = CHAT, chunks: int = CHUNKS) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._open = 0
        self.times = Times()
        body = {"model": "auto", "stream": True, "budget_ms": 1000, "chunks": chunks}
        name = "input" if path.endswith(RESPONSES) else "messages"
        content = json.dumps({**body, name: [{"role": "user", "content": TEXT}]}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._request = head.encode() + content

    async def run(self, seconds: float, seed: int) -> None:
        """Ask at random moments for so many seconds."""
        draw = random.Random(seed)
        moment = time.monotonic()
        last = moment + seconds
        tasks = []
        while (moment := moment + draw.expovariate(RATE)) < last:
            await asyncio.sleep(moment - time.monotonic())
            tasks.append(asyncio.create_task(self._ask()))
        await asyncio.gather(*tasks)
        for _, writer in self._idle:
            writer.close()

    async def _ask(self) -> None:
        self._open += 1
        self.times.open.append(self._open)
        # connections are kept, as every client does
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        sent = time.monotonic()
        writer.write(self._request)
        first = True
        whole = False
        try:
            while line := await reader.readline():
                if line == b"0\r\n":
                    await reader.readline()
                    break
                if line.startswith(LAST_LINES):
                    whole = True
                elif match := TIMES.search(line):
                    now = time.monotonic()
                    got, left = map(float, match.groups())
                    way = now - left
                    if first:
                        self.times.first.append((way + got - sent) * 1e3)
                        first = False
                    else:
                        self.times.chunk.append(way * 1e3)
            self._idle.append((reader, writer))
        except OSError:
            pass
        self.times.failed += not whole
        self._open -= 1


def cpu_s(process: int) -> float:
    """Return the CPU time of a process and of those of its children that live, in s."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = path.read_text().partition(" (")
            fields = rest.rpartition(") ")[2].split()
            if int(number) == process or int(fields[1]) == process:
                total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def measured() -> pl.DataFrame:
    """Return a table of two models, with the number of words of each prompt."""
    draw = np.random.default_rng(0)
    rows = []
    for sample in range(60):
        words = int(draw.integers(1, 60))
        for model, slow, skill in (("small", 640, 0.5), ("large", 900, 0.8)):
            known = {"sample_id": f"q{sample}", "prompt_words": words, "model": model}
            latency = slow * draw.uniform(0.9, 1.1)
            rows.append({**known, "accuracy": draw.random() < skill, "latency_ms": latency})
    return pl.DataFrame(rows)


def export(path: Path) -> None:
    """Write a controller for two models, which reads the number of words of a prompt."""
    import knobwise

    # names with a dot are no keywords
    small = {"policy.hidden": 16, "policy.fold_networks": 2}
    policy = knobwise.fit(
        measured(),
        ["prompt_words"],
        policy="utility",
        optimiser={"teacher_iterations": 5, "pretrain_iterations": 5, "iterations": 5},
        **small,
    )
    policy.agent.export(path)


@contextlib.contextmanager
def served(
    folder: Path, endpoint: str, checkpoint: str = "controller.npz"
) -> Iterator[tuple[int, int]]:
    """Yield the port and the process of a server in front of an endpoint, started in a folder."""
    words = [f"checkpoint={checkpoint}", f"endpoint={endpoint}", "port=0"]
    command = [sys.executable, "-m", "knobwise", "serve", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stderr=pipe, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        yield int(line.partition("/v1")[0].rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        process.wait()


class Way(NamedTuple):
    """A way to the upstream."""

    port: int
    path: str = CHAT
    process: int = 0
    """Of the proxy; 0 for none."""


@contextlib.contextmanager
def answering() -> Iterator[tuple[int, int]]:
    """Yield the port and the process of an upstream."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    # or a chunk would wait for the acknowledgement of the one before
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    forked = multiprocessing.get_context("fork").Process(target=upstream, args=(listening,))
    forked.start()
    try:
        yield listening.getsockname()[1], forked.pid or 0
    finally:
        forked.kill()
        forked.join()


def main(seconds: float = SECONDS, rounds: int = ROUNDS) -> dict[str, float]:
    """Print a row for each figure, and return the added times in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(folder / "controller.npz")
        with answering() as (port, process):
            address = f"http://127.0.0.1:{port}"
            with (
                served(folder, f"{address}/v1") as (proxy, whole),
                served(folder, f"{address}{LACKING}/v1") as (turning, turned),
            ):
                ways = {
                    "straight": Way(port),
                    "through": Way(proxy, process=whole),
                    "/v1/responses": Way(proxy, RESPONSES, whole),
                    "/v1/responses by chats": Way(turning, RESPONSES, turned),
                }
                added = _compared(ways, process, seconds, rounds)
                _print_cpu(ways, seconds / 2, rounds)
    return added


def _compared(
    ways: Mapping[str, Way], answering: int, seconds: float, rounds: int
) -> dict[str, float]:
    """Send load all ways in turn, and print what was seen."""
    loads: dict[str, list[Times]] = {name: [] for name in ways}
    shares = dict.fromkeys(("proxy", "upstream", "load"), 0.0)
    for number in range(rounds):
        for name, way in ways.items():
            # connections and code are warm first
            asyncio.run(Load(way.port, way.path).run(2, -1))
            load = Load(way.port, way.path)
            before = cpu_s(way.process), cpu_s(answering), time.process_time(), time.monotonic()
            asyncio.run(load.run(seconds, number))
            after = cpu_s(way.process), cpu_s(answering), time.process_time(), time.monotonic()
            took = after[3] - before[3]
            if name == "through":
                for i, part in enumerate(shares):
                    shares[part] += (after[i] - before[i]) / took / rounds
            loads[name].append(load.times)
    added = {}
    names = {"first": "the first chunk", "chunk": "a later chunk"}
    for way_name in [name for name in ways if name != "straight"]:
        for what, quantile in (("first", 50), ("first", 99), ("chunk", 50), ("chunk", 99)):
            straight = np.concatenate([getattr(times, what) for times in loads["straight"]])
            through = [np.array(getattr(times, what)) for times in loads[way_name]]
            # each round beside the median straight, to see how they scatter
            each = [np.percentile(times, quantile) - np.median(straight) for times in through]
            label = f"{what} p{quantile}"
            total = float(np.percentile(np.concatenate(through), quantile) - np.median(straight))
            target = f"≤ {TARGETS[label]:g} ms" if label in TARGETS else ""
            alone = np.percentile(straight, quantile) - np.median(straight)
            where = "" if way_name == "through" else f" of {way_name}"
            added[label + where] = total
            rounds_of = ", ".join(f"{value:.2f}" for value in each)
            print(
                f"| added to {names[what]}{where}, p{quantile} | {total:.2f} ms | {target} "
                f"| rounds {rounds_of}; straight {alone:.2f} |"
            )
    times = [each for name, every in loads.items() if name != "straight" for each in every]
    under_way = np.mean(np.concatenate([each.open for each in times]))
    print(f"| requests under way, mean | {under_way:.1f} | | |")
    print(f"| requests without a whole answer | {sum(each.failed for each in times)} | 0 | |")
    for part, share in shares.items():
        print(f"| CPU of the {part} | {share:.0%} of a core | | |")
    return added


def cpu_of(way: Way, chunks: int, seconds: float, seed: int) -> float:
    """Return the CPU time of a proxy for a request whose answer has so many chunks, in ms."""
    load = Load(way.port, way.path, chunks)
    before = cpu_s(way.process)
    asyncio.run(load.run(seconds, seed))
    return (cpu_s(way.process) - before) * 1e3 / len(load.times.open)


def _print_cpu(ways: Mapping[str, Way], seconds: float, rounds: int) -> None:
    """Print what a request with one chunk takes, and each further chunk."""
    for name, way in ways.items():
        if not way.process:
            continue
        single = [cpu_of(way, 1, seconds, number) for number in range(rounds)]
        many = [cpu_of(way, CHUNKS, seconds, number) for number in range(rounds)]
        request = float(np.median(single))
        chunk = (float(np.median(many)) - request) / (CHUNKS - 1)
        where = "a chat" if name == "through" else f"a request to {name}"
        rounds_of = ", ".join(f"{value:.2f}" for value in single)
        print(f"| CPU for {where} with one chunk | {request:.2f} ms | | rounds {rounds_of} |")
        print(f"| CPU for each further chunk | {chunk * 1e3:.0f} µs | | |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    main(**vars(parser.parse_args()))

"""A proxy in a process of its own, in front of a simulated endpoint."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import polars as pl
from commands import VARIABLES, wait_for

import knobwise

SMALL = {
    "policy": "utility",
    "policy.hidden": 16,
    "policy.fold_networks": 2,
    "optimiser": {"teacher_iterations": 200, "pretrain_iterations": 300, "iterations": 1},
}
SAFE = "large?chunks=0"
"""A model that the header X-Simulated does not reach: what its name says goes before."""
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
JSON = {"Content-Type": "application/json"}


def export(path, **settings):
    """Write a controller: the small model is right where `kind` is a, the large one where it is b,
    at 64 tokens."""
    rows = []
    for sample in range(120):
        kind = "ab"[sample % 2]
        features = {"sample_id": f"q{sample}", "prompt_words": sample % 7, "kind": kind}
        for model, slow in (("small", 100), (SAFE, 300)):
            for tokens in (16, 64):
                right = (model == "small") == (kind == "a") and tokens == 64
                latency = slow + tokens + sample % 5
                knobs = {"model": model, "max_tokens": tokens}
                rows.append({**features, **knobs, "accuracy": right, "latency_ms": latency})
    policy = knobwise.fit(pl.DataFrame(rows), ["prompt_words", "kind"], **SMALL | settings)
    return policy.agent.export(path)


class Client:
    """Asks a server."""

    def __init__(self, port):
        self.port = port

    def send(self, path, body=None, method=None, **headers):
        """The connection and the answer that has begun; `body` as it is, or as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, content, JSON | names)
        return connection, connection.getresponse()

    def ask(self, path, body=None, **headers):
        """Status, headers in lower case, and content."""
        connection, answer = self.send(path, body, **headers)
        try:
            content = answer.read()
        finally:
            connection.close()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return SimpleNamespace(status=answer.status, headers=named, content=content)

    def chat(self, headers=None, **fields):
        """The answer to a chat."""
        body = {"messages": MESSAGES, **fields}
        return self.ask("/v1/chat/completions", body, **(headers or {}))

    def json(self, path, body=None, **headers):
        answer = self.ask(path, body, **headers)
        return answer.status, json.loads(answer.content)

    def metric(self, name):
        """A number of /metrics; 0 if it is not there."""
        text = self.ask("/metrics").content.decode()
        values = re.findall(rf"^knobwise_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(values[0]) if values else 0.0


def knobs_of(answer):
    return json.loads(answer.headers["x-knobwise-knobs"])


@contextmanager
def serving(folder, *words, **variables):
    """A server in a folder, which is stopped at last and has raised nothing."""
    with started(folder, *words, **variables) as (client, process):
        yield client
    assert process.returncode == 0, client.said()
    assert "Traceback" not in str(client.said()), client.said()


@contextmanager
def started(folder, *words, **variables):
    """A server and its process; what it has said is in `errors.txt`."""
    command = [sys.executable, "-m", "knobwise", "serve", "port=0", *map(str, words)]
    environment = {**os.environ, **VARIABLES, **variables}
    errors = folder / "errors.txt"
    with errors.open("w") as stderr:
        options = {"cwd": folder, "env": environment, "start_new_session": True}
        process = subprocess.Popen(command, stderr=stderr, **options)
    try:
        wait_for(lambda: errors.read_text().endswith("\n") or process.poll() is not None)
        address = re.match(r"http://[\d.]+:(\d+)", errors.read_text())
        assert address, errors.read_text()
        client = Client(int(address[1]))
        client.said = lambda: errors.read_text().splitlines()
        yield client, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)

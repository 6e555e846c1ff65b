"""What stands between a client and a model: `knobwise serve`, a LiteLLM proxy, `transformers serve`,
llama-cpp-python's server. Each in a process of its own, which ends with its block."""

import json
import secrets
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import polars as pl
from proxied import SMALL, started

import knobwise
from campaign.children import kill, session
from campaign.clients.environments import TRANSFORMERS, python_of, without_ours
from campaign.clients.tiny import CONTEXT, write_folder, write_gguf

MODELS = ("small", "large")
"""The names of all models."""
START_S = 180
"""A server that is not there after this time has failed."""


class StartError(Exception):
    """A server is not there; the end of what it printed."""


@cache
def controller_of(**knobs):
    """The file of a controller: each setting is slower than those before it, and short prompts
    need the first alone."""
    rows = []
    settings = [dict(zip(knobs, values, strict=True)) for values in product(*knobs.values())]
    for sample in range(120):
        for place, setting in enumerate(settings):
            right = sample % 7 < 3 or place == len(settings) - 1
            outcome = {"accuracy": right, "latency_ms": 100 * (place + 1) + sample % 5}
            words = {"sample_id": f"q{sample}", "prompt_words": sample % 7}
            rows.append({**words, **setting, **outcome})
    policy = knobwise.fit(pl.DataFrame(rows), ["prompt_words"], **SMALL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "controller.npz"
        policy.agent.export(path)
        return path.read_bytes()


class Served:
    """A running `knobwise serve`.

    Attributes:
        url: with /v1.
    """

    def __init__(self, client, folder):
        self.url = f"http://127.0.0.1:{client.port}/v1"
        self.said = client.said
        self._ask = client.ask
        self._log = folder / "served"

    def rows_of(self, budget_ms):
        """The rows of the log of answers within this budget, also those that no update learns
        from."""
        rows = []
        for path in self._log.glob("requests-*.jsonl"):
            rows += map(json.loads, path.read_text().splitlines())
        answers = [row for row in rows if "fault" not in row]
        return [row for row in answers if abs(row.get("budget_ms", 0) - budget_ms) < 0.01]

    def labels(self, name):
        """Whether an answer of this name takes a label."""
        label = {"request_id": name, "accuracy": 1}
        return self._ask("/v1/feedback", label).status == 200


@contextmanager
def knobwise_serve(folder, knobs, endpoint, *words):
    """`knobwise serve` in front of an endpoint, with its log in a folder."""
    folder.mkdir()
    checkpoint = folder / "controller.npz"
    checkpoint.write_bytes(controller_of(**knobs))
    words = f"checkpoint={checkpoint}", f"endpoint={endpoint}", "log_prompts=true", *words
    with started(folder, *words) as (client, _):
        yield Served(client, folder)


LITELLM = """
model_list:
  - model_name: knobwise
    litellm_params: {{model: openai/knobwise, api_base: "{url}", api_key: none}}
litellm_settings:
  num_retries: 0
general_settings:
  master_key: {key}
  forward_client_headers_to_llm_api: true
"""


@contextmanager
def litellm_proxy(folder, url):
    """A LiteLLM proxy in front of knobwise; its address, with /v1, and its key."""
    python = python_of("litellm_proxy")
    folder.mkdir()
    config = folder / "litellm.yaml"
    key = f"sk-{secrets.token_hex(16)}"
    config.write_text(LITELLM.format(url=url, key=key))
    port = free_port()
    command = [python.with_name("litellm"), "--config", config, "--host", "127.0.0.1"]
    # its list of prices would come from the network
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with server([*command, "--port", port], folder, port, "/health/liveliness", variables):
        yield f"http://127.0.0.1:{port}/v1", key


@contextmanager
def transformers_serve(folder):
    """`transformers serve` with two tiny models, which it finds in the folder that it is started
    in; its address, with /v1."""
    python = python_of(TRANSFORMERS)
    folder.mkdir()
    for seed, name in enumerate(MODELS):
        write_folder(folder / name, seed)
    port = free_port()
    command = [python, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1"]
    with server([*command, "--port", port], folder, port, "/health"):
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def llama_cpp_server(folder, interrupts=True):
    """The server of llama-cpp-python with two tiny models; its address, with /v1.

    Args:
        interrupts: its default: a request breaks off the stream before it.
    """
    python = python_of("llama_cpp")
    folder.mkdir()
    models = []
    for seed, name in enumerate(MODELS):
        write_gguf(folder / f"{name}.gguf", seed)
        models.append({"model": f"{name}.gguf", "model_alias": name, "n_ctx": CONTEXT})
    port = free_port()
    config = folder / "config.json"
    settings = {"host": "127.0.0.1", "port": port, "interrupt_requests": interrupts}
    config.write_text(json.dumps({**settings, "models": models}))
    command = [python, "-m", "llama_cpp.server", "--config_file", config]
    with server(command, folder, port, "/v1/models"):
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def server(command, folder, port, path, variables=None):
    """A server in a process of its own, once it answers at a path; it prints into a file."""
    environment = without_ours() | {"HF_HUB_OFFLINE": "1", **(variables or {})}
    printed = folder / "printed.txt"
    with printed.open("w") as file:
        options = {"stdout": file, "stderr": file, "cwd": folder, "start_new_session": True}
        process = subprocess.Popen(list(map(str, command)), env=environment, **options)
    try:
        last = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}{path}"):
            if process.poll() is not None or time.monotonic() > last:
                lines = printed.read_text(errors="replace").splitlines()
                raise StartError(" ".join(lines[-3:]))
            time.sleep(0.2)
        yield process
    finally:
        kill(session(process.pid))
        process.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]

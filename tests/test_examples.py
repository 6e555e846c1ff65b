"""The scripts that people copy, each run as it stands there."""

import json
import math
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import polars as pl
import pytest
import torch
from commands import wait_for, words_of
from helpers import small_table
from PIL import Image

import knobwise
from knobwise import envs
from knobwise.agents.learning.logged import read_log
from knobwise.testbeds import builtin_profile

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "policy": "utility",
    "policy.hidden": 16,
    "policy.fold_networks": 2,
    "optimiser": {"teacher_iterations": 5, "pretrain_iterations": 5, "iterations": 5},
}


@pytest.mark.parametrize("name", ["torchrl_loop", "own_model", "ppo"])
def test_an_example_fits_on_a_page(name):
    # lines with code: what explains is free
    code = (ROOT / "examples" / f"{name}.py").read_text().split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60


def test_the_loop_learns():
    torch.manual_seed(1)
    assert example("torchrl_loop").main(warm_up=60, iterations=20) > 0.4


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("train_with_torchrl_trainer", {"iterations": 100}),
        ("ppo", {"iterations": 15, "contexts": 512}),
    ],
)
def test_torchrl_alone_learns(name, settings):
    torch.manual_seed(0)
    before, after = example(name).main(**settings)
    assert after > before + 0.1


def example(name):
    """The module of an example."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py")))


def test_every_example_is_here():
    names = words_of("""
        advantages deploy own_model own_table ppo rewards serve_http step_by_hand torchrl_loop
        train_with_torchrl_trainer
    """)
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == names


def test_step_by_hand(capsys, tmp_path):
    main = example("step_by_hand").main
    picture, film = tmp_path / "picture.png", tmp_path / "film.gif"
    reward = main()
    printed = capsys.readouterr().out
    assert f"reward {reward:+.2f}" in printed
    assert "budget 40.0 ms" in printed
    assert main(str(picture)) == reward
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 300
        assert len(drawn.getcolors(1 << 24)) > 50  # a drawing, not a blank
    rewards = re.findall(r"ms, reward ([+-][\d.]+)", printed)
    assert rewards == ["+1.00", "-0.20", "+1.00"]  # the second is late
    main(str(film))
    with Image.open(film) as frames:
        assert frames.n_frames == 6


@pytest.mark.campaign
def test_the_loop_is_as_good_as_the_heads_of_the_experiments():
    """`knobwise train experiment=heads policy=independent seeds=[0] own_cost=false` gives 0.478;
    this is held to within a point of it, by half of its iterations."""
    torch.manual_seed(1)
    assert example("torchrl_loop").main(warm_up=300, iterations=150) > 0.468


def test_own_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(envs, "builtin_profile", small_table)
    module = example("own_table")
    decisions = module.main(*module.builtin_files(tmp_path), **SMALL)
    printed = capsys.readouterr().out
    assert len(decisions) == 3
    assert all(f"ms: {decision}" in printed for decision in decisions)


def test_deploy(tmp_path, capsys):
    path = str(tmp_path / "policy.pt")
    knobwise.fit(builtin_profile(), **SMALL).save(path)
    on_time = example("deploy").main(path, requests=3)
    printed = capsys.readouterr().out
    assert len(on_time) == printed.count(" ms (") == 3
    assert printed.count("(late)") == 3 - sum(on_time)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a controller that reads a text and a number, in processes of its own: a function
    that asks it, the controller, and the folder of the log."""
    folder = tmp_path_factory.mktemp("served")
    samples = {
        "sample_id": range(30),
        "kind": ["ocr", "form"] * 15,
        "tokens": [i * i // 29 for i in range(30)],
    }
    knobs = pl.DataFrame({"crops": [1, 4], "accuracy": [0, 1], "latency_ms": [2.0, 9.0]})
    frame = pl.DataFrame(samples).join(knobs, how="cross")
    policy = knobwise.fit(frame, "auto", **SMALL | {"policy": "independent"})
    path, log = folder / "controller.npz", folder / "log"
    controller = policy.agent.export(path)
    command = [sys.executable, "examples/serve_http.py", path, "0", "2", log]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=pipe, text=True)
    try:
        # the first line says where it listens
        lines = iter(process.stderr.readline, "")
        (address,) = next(filter(None, (re.findall(r"http://[\d.:]+", line) for line in lines)))
        opener = build_opener(ProxyHandler({}))

        def ask(path, body=None, **headers):
            """Status and answer; `body` as it is, or as JSON."""
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} | headers
            data = content if path != "/health" else None
            request = Request(address + path, data, headers)
            try:
                with opener.open(request, timeout=30) as answer:
                    return answer.status, json.load(answer)
            except HTTPError as error:
                with error:
                    return error.code, json.load(error)

        ask.port = int(address.rpartition(":")[2])
        yield ask, controller, log
    finally:
        process.send_signal(signal.SIGINT)
        # the pipe is closed once the workers have ended too
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors == ""


FORM = {"kind": "form", "tokens": 3, "budget_ms": 5}
WRONG = (True, "1_0e-1", None, [5], math.nan, math.inf)
"""What is no number in JSON."""


def test_serve_http(served):
    ask, controller, _ = served
    status, health = ask("/health")
    assert status == 200
    assert health["controller"] == controller.digest
    assert [column[0] for column in health["columns"]] == ["kind", "tokens"]
    for tokens in (0, 29):
        features = {"kind": "form", "tokens": tokens}
        assert ask("/decide", FORM | features) == (200, controller.decide(features, 5))
    assert ask("/decide", {"features": [1, 0, 0, 3], "budget_ms": 5})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/decide", {"kind": "form", "tokens": 3}, "budget_ms"),
        ("/decide", {"kind": "form", "budget_ms": 5}, "tokens"),
        ("/decide", FORM | {"tokens": "x"}, "tokens"),
        ("/decide", FORM | {"budget_ms": -5}, "-5"),
        ("/decide", FORM | {"budget_ms": "soon"}, "str"),
        *(("/decide", FORM | {"budget_ms": wrong}, "budget_ms") for wrong in WRONG),
        *(("/answer", FORM | {"budget_ms": wrong}, "budget_ms") for wrong in WRONG),
        *(("/label", {"id": "x", "accuracy": wrong}, "accuracy") for wrong in WRONG),
        *(("/decide", FORM | {"tokens": wrong}, "tokens") for wrong in (True, "1_0e-1", [3], {})),
        *(("/answer", {"features": [1, 0, 0, w], "budget_ms": 5}, "features") for w in WRONG[:2]),
        ("/decide", b'{"kind": "form", "tokens": 3, "budget_ms": 1e999}', "budget_ms"),
        ("/decide", b'{"kind": "form", "tokens": 1e999, "budget_ms": 5}', "tokens"),
        ("/answer", b'{"kind": "form", "tokens": 3, "budget_ms": 5, "question": "\\ud800"}', ""),
        ("/decide", [["budget_ms", 5]], "budget_ms"),
        ("/decide", {"features": [1], "budget_ms": 5}, "features"),
        ("/decide", [1], ""),
        ("/decide", None, ""),
        ("/decide", b"{", ""),
        ("/decide", b"[" * 100_000, ""),
        ("/answer", {"kind": "form", "budget_ms": 5}, "tokens"),
        ("/answer", {"kind": "form", "tokens": 3}, "budget_ms"),
        ("/answer", FORM | {"budget_ms": 1e31}, "1e+31"),
        ("/answer", FORM | {"budget_ms": 10**400}, "large"),
        ("/label", {"id": "x"}, "accuracy"),
        ("/label", {"accuracy": 1}, "id"),
        ("/label", [], "accuracy"),
    ],
)
def test_serve_http_refuses_by_name(served, path, body, field):
    status, answer = served[0](path, body)
    assert status == 400
    assert field in answer["error"]


SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
"""What a page may send without asking."""


@pytest.mark.parametrize("path", ["/decide", "/answer", "/label"])
def test_serve_http_refuses_foreign_pages_and_logs_nothing_of_them(served, path):
    ask, _, log = served
    body = FORM | {"id": "x", "accuracy": 1}
    before = [file.read_bytes() for file in sorted(log.iterdir())]
    for kind in SIMPLE:
        assert ask(path, body, **{"Content-Type": kind})[0] == 415
    for origin in ("http://elsewhere.example", "null", f"http://localhost:{ask.port + 1}"):
        assert ask(path, body, Origin=origin)[0] == 403
    for host in (
        "elsewhere.example",
        f"elsewhere.example:{ask.port}",
        "localhost.elsewhere.example",
    ):
        assert ask(path, body, Host=host)[0] == 403
        assert ask("/health", Host=host)[0] == 403
    assert ask(path, b" " * 1_000_001)[0] == 413
    assert [file.read_bytes() for file in sorted(log.iterdir())] == before
    # its own pages may
    own = {"Host": f"localhost:{ask.port}", "Origin": f"http://localhost:{ask.port}"}
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert ask("/decide", FORM, **own, **kind)[0] == 200


def test_serve_http_goes_on_when_clients_leave(served):
    """While they send, and while they wait; the server's fixture sees that it says nothing."""
    ask, _, log = served
    before = len(read_log(log).rows)
    content = json.dumps(FORM | {"budget_ms": 77}).encode()
    head = [
        "POST /answer HTTP/1.1",
        f"Host: localhost:{ask.port}",
        f"Content-Length: {len(content)}",
    ]
    head += ["Content-Type: application/json", "Expect: 100-continue", "", ""]
    for sent in (b"", content[:9], content):
        for reset in (False, True):
            with socket.create_connection(("127.0.0.1", ask.port)) as client:
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall("\r\n".join(head).encode())
                # the server is reading
                assert client.recv(100).startswith(b"HTTP/1.1 100")
                client.sendall(sent)
    # an answer that nobody waits for is logged all the same
    wait_for(lambda: len(read_log(log).rows) >= before + 1)
    assert ask("/decide", FORM)[0] == 200


def test_of_two_labels_the_one_sent_later_counts_by_whichever_worker(served):
    ask, controller, log = served
    _, answer = ask("/answer", FORM)
    for accuracy in (0.0, 1.0, 0.25, 0.75, 0.5):
        assert ask("/label", {"id": answer["id"], "accuracy": accuracy})[0] == 200
    (row,) = (row for row in read_log(log, controller).rows if row["id"] == answer["id"])
    assert row["accuracy"] == 0.5


def test_serve_http_answers_and_takes_labels(served):
    ask, controller, log = served
    accuracies = {}
    for tokens in range(6):
        question = {"tokens": tokens, "question": f"number {tokens}", "budget_ms": 50}
        status, answer = ask("/answer", FORM | question)
        assert status == 200
        assert answer["answer"] == f"the answer to number {tokens}"
        assert answer["on_time"] is True
        label = {"id": answer["id"], "accuracy": tokens / 10}
        accuracies[answer["id"]] = tokens / 10
        assert ask("/label", label) == (200, {})
    assert ask("/label", label | {"accuracy": 100})[0] == 400
    read = read_log(log, controller)
    assert not read.aside
    # requests of other tests may be written late
    new = {row["id"]: row["accuracy"] for row in read.rows if row["id"] in accuracies}
    assert new == accuracies


def test_serve_http_needs_no_torch():
    code = "import sys; sys.path.insert(0, 'examples'); import serve_http; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "uvicorn" in done.stdout.split()
    assert "torch" not in done.stdout.split()

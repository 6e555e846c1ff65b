"""Mistakes in the command, and strangers at the port."""

import json
import socket
from contextlib import contextmanager

import pytest
from commands import refused
from proxied import MESSAGES

CHAT = "/v1/chat/completions"


@contextmanager
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["endpoint=127.0.0.1:8000"], "endpoint"),
        (["endpoint=http://127.0.0.1:1/v1"], "endpoint"),
        (["endpoint=http://no.such.host.invalid/v1"], "endpoint"),
        (["checkpoint=nowhere.npz"], "nowhere.npz"),
        (["checkpoint=nowhere"], "nowhere"),
        (["port=70000"], "port"),
        (["host=203.0.113.9"], "host"),
        (["workers=0"], "workers"),
        (["budget_ms=-1"], "budget_ms"),
        (["explore=2"], "explore"),
        (["timed=soon"], "timed"),
        (["max_body_mb=0"], "max_body_mb"),
        (["watch=nowhere"], "watch"),
        (["features=nowhere"], "features"),
        (["features=nowhere:function"], "nowhere"),
        (["messages=json:nothing"], "nothing"),
        (["shadow=true", "explore=0.1"], "explore"),
        (["default={model: small}"], "default"),
        (["shadow=true", "default={model: small}"], "default"),
        (["shadow=true", "default=3"], "default"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    words, field, exported, endpoint, in_folder, capsys
):
    words = ["serve", f"checkpoint={exported}", f"endpoint={endpoint.url}", "port=0", *words]
    assert field in refused(words, capsys)


def test_a_port_that_is_taken(exported, in_folder, capsys):
    with taken() as port:
        words = ["serve", f"checkpoint={exported}", f"port={port}"]
        assert str(port) in refused(words, capsys)


SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
"""What a page may send without asking."""


@pytest.mark.parametrize("path", [CHAT, "/decide", "/label", "/v1/feedback"])
def test_foreign_pages_are_refused_and_leave_nothing(served, endpoint, path):
    body = {"messages": MESSAGES, "kind": "a", "prompt_words": 2, "budget_ms": 300}
    body |= {"id": f"{16 * 'a'}-0", "accuracy": 1}
    log = sorted(served.log.glob("*.jsonl"))
    before = [file.read_bytes() for file in log]
    for kind in SIMPLE:
        assert served.json(path, body, Content_Type=kind)[0] == 415
    for origin in ("http://elsewhere.example", "null", f"http://localhost:{served.port + 1}"):
        assert served.json(path, body, Origin=origin)[0] == 403
    for host in (
        "elsewhere.example",
        f"elsewhere.example:{served.port}",
        "localhost.elsewhere.example",
    ):
        assert served.json(path, body, Host=host)[0] == 403
        for asked in ("/health", "/metrics", "/v1/models"):
            assert served.json(asked, Host=host)[0] == 403
    status, refusal = served.json(path, b" " * 1_000_001)
    assert (status, refusal["error"]["type"]) == (413, "invalid_request_error")
    assert [file.read_bytes() for file in sorted(served.log.glob("*.jsonl"))] == before
    # its own pages may
    pages = {"Host": f"localhost:{served.port}", "Origin": f"http://localhost:{served.port}"}
    kind = {"Content_Type": "Application/JSON; charset=utf-8"}
    assert served.json(path, body, **pages, **kind)[0] == 200


def test_errors_have_the_shape_of_the_protocol(served):
    for path, body in ((CHAT, b"{"), ("/v1/nothing", None), ("/decide", {}), ("/label", {})):
        _, answer = served.json(path, body)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert json.dumps(answer["error"]["message"])

"""Decisions and labels over HTTP, by several processes."""

import json
import math
import socket
import struct
from pathlib import Path

import pytest
from commands import wait_for
from proxied import MESSAGES, serving

from knobwise.agents.learning.logged import read_log

ROOT = Path(__file__).resolve().parents[3]
CHAT = "/v1/chat/completions"
FORM = {"kind": "a", "prompt_words": 3, "budget_ms": 400}
WRONG = (True, "1_0e-1", None, [5], math.nan, math.inf)
"""What is no number in JSON."""


@pytest.fixture(scope="module")
def workers(exported, endpoint, tmp_path_factory):
    """A server of two processes that explores."""
    folder = tmp_path_factory.mktemp("workers")
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "workers=2", "explore=0.1"
    with serving(folder, *words) as client:
        client.log = folder / "served"
        yield client


def test_a_decision(workers, controller):
    status, health = workers.json("/health")
    assert (status, health["controller"]) == (200, controller.digest)
    assert [column[0] for column in health["columns"]] == ["prompt_words", "kind"]
    for kind in "ab":
        features = {"kind": kind, "prompt_words": 3}
        expected = controller.decide(features, 400)
        assert workers.json("/decide", FORM | features) == (200, expected)
    block = [0.0] * controller.feature_sizes["features"]
    assert workers.json("/decide", {"features": block, "budget_ms": 400})[0] == 200


def test_the_body_in_the_documents_is_decided(workers, controller):
    page = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    section = page.partition("## Decide over HTTP")[2]
    body = json.loads(section.partition("```json")[2].partition("```")[0])
    features = {name: value for name, value in body.items() if name != "budget_ms"}
    expected = controller.decide(features, body["budget_ms"])
    assert workers.json("/decide", body) == (200, expected)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/decide", {"kind": "a", "prompt_words": 3}, "budget_ms"),
        ("/decide", {"kind": "a", "budget_ms": 400}, "prompt_words"),
        ("/decide", FORM | {"prompt_words": "x"}, "prompt_words"),
        ("/decide", FORM | {"limits": {"usd": 1.0}}, "limits"),
        ("/decide", FORM | {"limits": 1.0}, "limits"),
        ("/decide", FORM | {"budget_ms": -5}, "-5"),
        ("/decide", FORM | {"budget_usd": 0.1}, "budget_usd"),
        ("/decide", FORM | {"budget_ms": "soon"}, "str"),
        *(("/decide", FORM | {"budget_ms": wrong}, "budget_ms") for wrong in WRONG),
        *((CHAT, FORM | {"budget_ms": wrong}, "budget_ms") for wrong in WRONG if wrong is not None),
        *(("/label", {"id": "x", "accuracy": wrong}, "accuracy") for wrong in WRONG),
        *(
            ("/decide", FORM | {"prompt_words": wrong}, "prompt_words")
            for wrong in (True, "1_0e-1", [3], {})
        ),
        *(("/decide", {"features": [1, 0, 0, w], "budget_ms": 5}, "features") for w in WRONG[:2]),
        # also where static decides, which reads none
        *(
            ("/decide", {"features": {"kind": "a", "prompt_words": 3}, "budget_ms": b}, "features")
            for b in (1, 400)
        ),
        ("/decide", b'{"kind": "a", "prompt_words": 3, "budget_ms": 1e999}', "budget_ms"),
        ("/decide", b'{"kind": "a", "prompt_words": 1e999, "budget_ms": 5}', "prompt_words"),
        (CHAT, b'{"budget_ms": "\\ud800"}', "budget_ms"),
        ("/decide", b'{"budget_ms": "\\ud800"}', "budget_ms"),
        ("/decide", [["budget_ms", 5]], "object"),
        ("/decide", {"features": [1], "budget_ms": 400}, "features"),
        ("/decide", [1], ""),
        ("/decide", None, ""),
        ("/decide", b"{", ""),
        ("/decide", b"[" * 100_000, ""),
        (CHAT, FORM | {"budget_ms": 1e31}, "1e+31"),
        (CHAT, FORM | {"budget_ms": 10**400}, "budget_ms"),
        ("/decide", FORM | {"budget_ms": 10**400}, "large"),
        ("/label", {"id": "x"}, "accuracy"),
        ("/label", {"accuracy": 1}, "id"),
        ("/label", {"id": "x", "accuracy": 100}, "accuracy"),
        ("/label", [], ""),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(workers, path, body, field):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = workers.json(path, content)
    assert status == 400
    assert field in answer["error"]["message"]


def test_clients_that_leave(workers):
    """While they send, and while they wait; the fixture sees that nothing is raised."""
    before = workers.metric('requests_total{outcome="client_left"}')
    before += workers.metric('requests_total{outcome="answered"}')
    content = json.dumps({"messages": MESSAGES, "model": "small", "budget_ms": 400}).encode()
    head = [
        f"POST {CHAT} HTTP/1.1",
        f"Host: localhost:{workers.port}",
        f"Content-Length: {len(content)}",
        "X-Simulated: first_ms=200",
        "Content-Type: application/json",
        "Expect: 100-continue",
        "",
        "",
    ]
    for sent in (b"", content[:9], content):
        for reset in (False, True):
            with socket.create_connection(("127.0.0.1", workers.port)) as client:
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall("\r\n".join(head).encode())
                # the server is reading
                assert client.recv(100).startswith(b"HTTP/1.1 100")
                client.sendall(sent)
    names = 'requests_total{outcome="client_left"}', 'requests_total{outcome="answered"}'
    wait_for(lambda: sum(map(workers.metric, names)) >= before + 1)
    assert workers.json("/decide", FORM)[0] == 200


def test_of_two_labels_the_one_sent_later_counts_by_whichever_worker(workers, controller):
    answer = workers.chat(features={"kind": "a"}, budget_ms=400)
    name = answer.headers["x-knobwise-request-id"]
    for accuracy in (0.0, 1.0, 0.25, 0.75, 0.5):
        assert workers.json("/label", {"id": name, "accuracy": accuracy}) == (200, {})
    (row,) = (row for row in read_log(workers.log, controller).rows if row["id"] == name)
    assert row["accuracy"] == 0.5


def test_chats_are_logged_with_their_chances(workers, controller):
    for number in range(12):
        features = {"kind": "ab"[number % 2], "prompt_words": number % 7}
        answer = workers.chat(features=features, budget_ms=400, max_tokens=number * 16 + 16)
        assert answer.status == 200
    read = read_log(workers.log, controller)
    known = {
        "decided without features, or answered otherwise than decided",
        "a label of an unknown request",
    }
    assert set(read.aside) <= known
    assert all(sum(row["chances"]) == pytest.approx(1) for row in read.rows)
    # within a cap, exploration too
    capped = [row for row in read.rows if row["knobs"]["max_tokens"] == 16]
    assert capped

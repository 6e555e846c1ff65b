"""`knobwise serve` stopped and started again: nobody is hung or reset, and what was learned stays."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import children_of, in_proc, wait_for
from proxied import JSON, MESSAGES, serving, started
from scripted_endpoint import DONE, ROLE, STOP, WORD, Reply, chat
from starlette.requests import Request

from knobwise.serving.proxy.endpoint_answers import FAILING_S, LAST, EndpointAnswers
from knobwise.serving.proxy.guards import Guards
from knobwise.serving.proxy.restart import YOUNG_S, leave, take_over
from knobwise.serving.proxy.routes import Routes

CHAT = "/v1/chat/completions"
FEATURES = {"features": {"kind": "a", "prompt_words": 3}}
TRACKER = {"controller": "this", "answers": 3}


def outcome(port, stream):
    """How a request on a connection of its own ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except ConnectionRefusedError:
            return "refused"
        body = {"messages": MESSAGES, "model": "small", "stream": stream, **FEATURES}
        # anything that is raised from here on is a reset, or a hang
        connection.request("POST", CHAT, json.dumps(body), JSON | {"X-Simulated": "first_ms=100"})
        answer = connection.getresponse()
        content = answer.read()
        whole = content.endswith(DONE) if stream else json.loads(content)["choices"]
        return "whole" if answer.status == 200 and whole else content


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_while_a_server_stops_are_answered_or_refused(
    exported, endpoint, tmp_path, workers
):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", f"workers={workers}"
    with started(tmp_path, *words) as (client, process), ThreadPoolExecutor(12) as pool:
        asked = []
        for number in range(12):
            asked.append(pool.submit(outcome, client.port, number % 2 == 0))
            if number == 5:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        # as soon as the socket is closed
        wait_for(lambda: outcome(client.port, False) == "refused")
        outcomes = [answer.result() for answer in asked]
        process.wait(60)
    assert set(outcomes) <= {"whole", "refused"}
    assert outcomes[:5] == ["whole"] * 5
    assert process.returncode == 0, client.said()
    assert "Traceback" not in str(client.said())


@in_proc
def test_connections_that_wait_to_be_accepted_are_answered(exported, endpoint, tmp_path):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}"
    with started(tmp_path, *words) as (client, process), ThreadPoolExecutor(8) as pool:
        assert outcome(client.port, False) == "whole"
        (worker,) = children_of(process.pid)
        os.kill(worker, signal.SIGSTOP)
        asked = [pool.submit(outcome, client.port, number % 2 == 0) for number in range(8)]
        wait_for(lambda: waiting_at(client.port) == 8)
        process.send_signal(signal.SIGTERM)
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGCONT)
        assert [answer.result() for answer in asked] == ["whole"] * 8
        process.wait(60)
    assert process.returncode == 0, client.said()


def waiting_at(port):
    """How many connections at a port wait to be accepted, as Linux says."""
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    (row,) = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
    return int(row[4].split(":")[1], 16)


def test_connections_that_are_kept_get_their_answer(exported, scripted, tmp_path):
    seen = threading.Event()

    def slow():
        yield from (ROLE, WORD)
        seen.wait(60)
        yield from (STOP, DONE)

    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "drain_s=60"
    scripted.answer = lambda path, body: Reply(chat())
    with started(tmp_path, *words) as (client, process):
        kept = [http.client.HTTPConnection("127.0.0.1", client.port, timeout=60) for _ in "ab"]
        for connection in kept:
            connection.request("GET", "/ready")
            assert json.load(connection.getresponse()) == {"ready": True}
        scripted.answer = lambda path, body: Reply(slow() if body.get("stream") else chat())
        stream = {"messages": MESSAGES, "stream": True, **FEATURES}
        connection, answer = client.send(CHAT, stream)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not listens(client.port))
        # on connections from before
        kept[0].request("GET", "/ready")
        last = kept[0].getresponse()
        assert (last.status, last.headers["connection"]) == (503, "close")
        assert json.load(last)["reason"] == "stopping"
        kept[1].request("POST", CHAT, json.dumps({"messages": MESSAGES, **FEATURES}), JSON)
        last = kept[1].getresponse()
        assert (last.status, last.headers["connection"]) == (200, "close")
        assert json.load(last) == chat()
        seen.set()
        assert answer.read() == ROLE + WORD + STOP + DONE
        process.wait(60)
        for opened in (connection, *kept):
            opened.close()
    assert process.returncode == 0, client.said()


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("workers", [1, 2])
def test_the_level_of_the_tracker_outlives_a_restart(exported, scripted, tmp_path, workers):
    scripted.answer = lambda path, body: Reply(chat())
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", f"workers={workers}"
    with serving(tmp_path, *words) as client:
        for _ in range(20):
            assert client.chat(**FEATURES).status == 200
        level = client.metric("latency_level")
    assert 0 < level < 1
    states = [json.loads(path.read_text()) for path in (tmp_path / "served").glob("state-*.json")]
    assert len(states) in range(1, workers + 1)
    most = max(states, key=lambda state: state["tracker"]["answers"])
    with serving(tmp_path, *words) as client:
        taken = client.metric("latency_level")
        assert 0 < taken < 1
        if workers == 1:
            assert taken == pytest.approx(level)
        (line,) = [line for line in client.said() if "before this one" in line]
        assert f" {most['tracker']['answers']} answers" in line
        # it is taken once
        assert not list((tmp_path / "served").glob("state-*"))
    # nor is it, where nothing is followed
    with serving(tmp_path, *words, "tracker=false") as client:
        assert client.metric("latency_level") == 0


def test_what_was_left_is_taken_only_while_it_says_something(tmp_path):
    leave(tmp_path, {**TRACKER, "answers": 0}, {})
    assert not list(tmp_path.iterdir())
    assert take_over(tmp_path, "this") is None
    leave(tmp_path, TRACKER, {"80": {"promise": 0.8, "met": [True]}})
    (path,) = tmp_path.iterdir()
    state = json.loads(path.read_text())
    # of another controller it stays for that
    assert take_over(tmp_path, "other") is None
    (tmp_path / "state-1.json").write_text(
        json.dumps({**state, "tracker": TRACKER | {"answers": 2}})
    )
    (tmp_path / "state-2.json").write_text('{"time": 1')
    (tmp_path / "state-3.json").write_text("[]")
    assert take_over(tmp_path, "this") == state
    assert {path.name for path in tmp_path.iterdir()} == {"state-2.json", "state-3.json"}
    path.write_text(json.dumps({**state, "time": state["time"] - YOUNG_S}))
    assert take_over(tmp_path, "this") is None
    assert not path.exists()


def test_what_somebody_has_changed_is_not_taken(exported, controller, endpoint, tmp_path):
    tracker = {**TRACKER, "controller": controller.digest, "mean": "x"}
    (tmp_path / "served").mkdir()
    leave(tmp_path / "served", tracker, {})
    with serving(tmp_path, f"checkpoint={exported}", f"endpoint={endpoint.url}") as client:
        assert client.chat(**FEATURES).status == 200
        assert not any("before this one" in line for line in client.said())


def test_how_the_endpoint_answered_by_hand():
    answers = EndpointAnswers()
    assert answers.summary(now=5.0) == {"answers": 0, "failed": 0, "since_success_s": None}
    answers.add(True, now=100.0)
    answers.add(False, now=101.0)
    assert answers.summary(now=103.5) == {"answers": 2, "failed": 1, "since_success_s": 3.5}
    assert not answers.is_failing(now=101.0 + FAILING_S)  # none since
    answers.add(False, now=100.9 + FAILING_S)
    assert not answers.is_failing(now=100.9 + FAILING_S)
    assert answers.is_failing(now=101.0 + FAILING_S)
    # nobody asks any more, so somebody may try
    assert not answers.is_failing(now=100.9 + 2 * FAILING_S)
    answers.add(True, now=200.0)
    answers.add(False, now=201.0)
    assert not answers.is_failing(now=202.0)
    for _ in range(LAST):
        answers.add(True)
    assert answers.summary()["failed"] == 0
    assert answers.summary()["answers"] == LAST


@pytest.mark.parametrize("ago_s", [0.0, FAILING_S])
def test_a_server_is_not_ready_while_its_endpoint_only_fails(ago_s):
    answers = EndpointAnswers()
    answers.add(False, time.monotonic() - ago_s)
    answers.add(False)
    routes = Routes(Guards({"localhost"}, "token", 1), None, None, answers=answers)
    routes.stopping = lambda: False
    request = Request({"type": "http", "headers": [(b"host", b"localhost")]})
    answer = asyncio.run(routes.ready(request))
    assert answer.status_code == (503 if ago_s else 200)
    assert json.loads(answer.body)["ready"] == (not ago_s)


def test_health_says_how_the_endpoint_answered(exported, scripted, tmp_path):
    scripted.answer = lambda path, body: Reply(chat())
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "workers=2"
    with serving(tmp_path, *words, KNOBWISE_TOKEN="open") as client:
        token = {"Authorization": "Bearer open"}

        def health():
            return client.json("/health", **token)[1]["endpoint"]

        assert health() == {"answers": 0, "failed": 0, "since_success_s": None}
        body = {"messages": MESSAGES, "model": "small", **FEATURES}
        for status, stream in ((200, False), (500, False), (400, False), (200, True)):
            content = [ROLE, WORD] if stream else chat() if status == 200 else {"error": {"a": 1}}
            reply = Reply(content, status)
            scripted.answer = lambda path, body, reply=reply: reply
            assert client.ask(CHAT, {**body, "stream": stream}, **token).status == status
        # 400 is about the request, and the stream was cut; all processes say the same
        for _ in range(5):
            said = health()
            assert (said["answers"], said["failed"]) == (3, 2)
            assert said["since_success_s"] >= 0
        # everybody may know whether it is ready, by its own name
        assert client.json("/ready") == (200, {"ready": True})
        assert client.ask("/ready", Host="elsewhere.example").status == 403

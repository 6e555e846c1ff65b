"""`knobwise serve` in front of an endpoint that fails in many ways."""

import asyncio
import contextlib
import gzip
import http.client
import inspect
import json
import time

import pytest
from commands import wait_for
from proxied import SAFE, knobs_of, serving
from scripted_endpoint import (
    DONE,
    ROLE,
    STOP,
    USAGE,
    WORD,
    Reply,
    chat,
    chunk,
    event,
)
from test_serve import row_of, rows_in
from uvicorn import Config

from knobwise.agents.learning.logged import read_log
from knobwise.serving.proxy import upstream

COMMENT = b": keep-alive\n\n"
ERROR = {"error": {"message": "overloaded", "code": 503}}
GOOD = [ROLE, WORD, STOP, DONE]
KEPT = "timeout_keep_alive"
"""Uvicorn's option: for how many seconds it keeps an idle connection."""
FREE = {"features": {"kind": "a"}, "model": "auto", "budget_ms": 5000}
"""The small model is asked first."""


@pytest.fixture(scope="module")
def served(exported, scripted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "prices.yaml").write_text(
        f"small: {{input: 1, output: 4}}\n'{SAFE}': {{input: 10, output: 40}}\n"
    )
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "tracker=false"
    with serving(folder, *words, "timed=first_chunk", "prices=prices.yaml") as client:
        client.log = folder / "served"
        yield client


def failing(scripted, reply):
    """The small model answers so, the other well."""

    def answer(path, body):
        if body["model"] == "small":
            return reply
        return Reply(GOOD if body.get("stream") else chat())

    scripted.answer = answer


def of_model(code):
    return Reply({"error": {"message": "no", "type": "invalid_request_error", "code": code}}, 400)


@pytest.mark.parametrize(
    ("reply", "stream"),
    [
        (Reply(ERROR), False),
        (Reply(chat(choices=[])), False),
        (Reply(chat(), kind="text/plain", status=302, location="/elsewhere"), False),
        (Reply(b"", 204), False),
        (Reply(b"", 101), False),
        (Reply(chat(), 600), False),
        (Reply(b"<html>", kind="text/html"), False),
        (Reply(b"[" * 100_000), False),
        (Reply(b"not gzip", content_encoding="gzip"), False),
        (Reply([event(ERROR)]), True),
        (Reply([event(ERROR), DONE]), True),
        (Reply([ROLE, None]), True),
        (Reply([COMMENT, COMMENT, None]), True),
        (Reply([ROLE, DONE]), True),
        (Reply([]), True),
        (of_model("context_length_exceeded"), False),
        (of_model("unsupported_value"), True),
    ],
)
def test_another_model_is_tried(served, scripted, reply, stream):
    failing(scripted, reply)
    answer = served.chat(stream=stream, **FREE)
    assert (answer.status, answer.headers["x-knobwise-attempts"]) == (200, "2")
    assert knobs_of(answer)["model"] == SAFE
    assert answer.content == (b"".join(GOOD) if stream else json.dumps(chat()).encode())
    row = row_of(served.log, answer)
    assert (row["knobs"]["model"], row.get("fault")) == (SAFE, None)
    assert [knobs["model"] != SAFE for knobs in row["tried"]] == [True]
    # and where none is left, the last has the word; it is no answer that anybody learns from
    scripted.answer = lambda path, body: reply
    answer = served.chat(stream=stream, **FREE) if None not in parts_of(reply) else None
    if answer is not None and answer.status < 500:
        assert answer.headers["x-should-retry"] == "false"
        row = row_of(served.log, answer)
        assert (row["failed"], row["met"], row["answer_ms"]) == (True, False, None)


def parts_of(reply):
    return reply.content if isinstance(reply.content, list) else []


def test_an_error_about_the_request_is_the_clients(served, scripted):
    scripted.answer = lambda path, body: of_model("invalid_value")
    answer = served.chat(**FREE)
    assert (answer.status, answer.headers["x-knobwise-attempts"]) == (400, "1")
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize(
    ("stream", "outcome"),
    [
        ([ROLE, WORD, DONE], "cut"),
        ([ROLE, WORD], "cut"),
        ([ROLE, WORD, None], "cut"),
        # what is no chunk, such as the page of a gateway
        ([ROLE, WORD, 0.3, "<html>gone</html>", None], "cut"),
        ([ROLE, WORD, event(ERROR), DONE], "endpoint_error"),
        ([ROLE, WORD, chunk({}, "error"), DONE], "endpoint_error"),
    ],
)
def test_a_stream_that_fails_after_its_beginning_is_no_answer(served, scripted, stream, outcome):
    name = f'requests_total{{outcome="{outcome}"}}'
    before, rows = served.metric(name), len(rows_in(served.log))
    scripted.answer = lambda path, body: Reply(stream)
    connection, answer = served.send("/v1/chat/completions", {"messages": [], "stream": True})
    if None in stream:
        # it breaks off for the client too
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
        content = [part for part in stream if isinstance(part, bytes)]
        assert caught.value.partial == b"".join(content)
    else:
        assert answer.read() == b"".join(stream)
    connection.close()
    assert served.metric(name) == before + 1
    row = rows_in(served.log)[-1]
    assert len(rows_in(served.log)) == rows + 1
    assert (row["failed"], row["met"], row["answer_ms"]) == (True, False, None)


def test_the_time_until_the_first_content_counts(served, scripted):
    for waits in ([ROLE, 0.3, WORD, STOP, DONE], [COMMENT, 0.3, ROLE, WORD, STOP, DONE]):
        scripted.answer = lambda path, body, waits=waits: Reply(waits)
        row = row_of(served.log, served.chat(stream=True, features={"kind": "a"}, budget_ms=250))
        assert row["total_ms"] >= 300
        assert not row["met"]


def test_a_client_that_leaves_after_the_first_chunk_tells_its_time(exported, scripted, tmp_path):
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "timed=first_chunk"
    with serving(tmp_path, *words) as client:
        level = client.metric("latency_level")
        for events, budget_ms in (([WORD, 60.0], 50_000), ([ROLE, 0.2, WORD, 60.0], 100)):
            scripted.answer = lambda path, body, events=events: Reply(events)
            body = {"messages": [{"role": "user", "content": "Why?"}], "stream": True}
            body |= FREE | {"model": "small", "budget_ms": budget_ms}
            connection, answer = client.send("/v1/chat/completions", body)
            assert answer.read1(10)
            connection.close()
            answer.close()
        wait_for(lambda: client.metric('requests_total{outcome="client_left"}') == 2)
        wait_for(lambda: len(read_log(tmp_path / "served").rows) == 2)
        assert client.metric("latency_level") != level
        assert client.metric("late_total") == 1
    in_time, late = rows_in(tmp_path / "served")
    assert (in_time["met"], late["met"]) == (True, False)
    assert in_time["answer"] == "chatcmpl-7"
    assert not any("abandoned" in row or row.get("failed") for row in (in_time, late))


def test_a_whole_answer_tells_no_time_until_a_first_chunk(exported, scripted, tmp_path):
    # beyond the deadline, as any whole answer to a long question
    scripted.answer = lambda path, body: time.sleep(0.2) or Reply(chat())
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "timed=first_chunk"
    with serving(tmp_path, *words, "explore=1", "explore_loss=1") as client:
        for _ in range(8):
            answer = client.chat(**{**FREE, "budget_ms": 150})
            row = row_of(tmp_path / "served", answer)
            assert (row["failed"], row["met"]) == (True, False)
        assert client.metric("late_total") == 8
        assert client.metric("latency_level") == 1
        scripted.answer = lambda path, body: Reply(GOOD)
        answer = client.chat(**FREE, stream=True)
        assert "failed" not in row_of(tmp_path / "served", answer)
        assert client.metric("latency_level") != 1


def test_a_stream_without_content_is_held_for_a_while_only(served, scripted):
    comments = [b": " + b"x" * 100_000 + b"\n\n"] * 11
    scripted.answer = lambda path, body: Reply([*comments, *GOOD])
    answer = served.chat(stream=True, **FREE)
    assert answer.content == b"".join([*comments, *GOOD])
    scripted.answer = lambda path, body: Reply([*comments, None])
    connection, answer = served.send("/v1/chat/completions", {"messages": [], "stream": True})
    assert answer.headers["x-knobwise-attempts"] == "1"
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()


def test_what_came_compressed_is_read_and_passed_on_plain(served, scripted):
    content = json.dumps(chat()).encode()
    scripted.answer = lambda path, body: Reply(gzip.compress(content), content_encoding="gzip")
    answer = served.chat(**FREE)
    assert (answer.content, answer.headers.get("content-encoding")) == (content, None)
    assert row_of(served.log, answer)["usd"] == pytest.approx(30e-6)


def test_what_an_answer_cost(served, scripted):
    for fields, usd in (
        ({}, 30e-6),
        # what was thought is counted in the sum alone
        ({"usage": {**USAGE, "total_tokens": 110}}, 410e-6),
        ({"usage": {**USAGE, "prompt_tokens": -5}}, None),
        ({"usage": {**USAGE, "completion_tokens": 10**400}}, None),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}, None),
        ({"usage": None}, None),
    ):
        scripted.answer = lambda path, body, fields=fields: Reply(chat(**fields))
        before = served.metric("usd_total")
        answer = served.chat(**FREE)
        assert row_of(served.log, answer)["usd"] == (usd and pytest.approx(usd))
        assert served.metric("usd_total") == pytest.approx(before + (usd or 0))


def test_a_whole_answer_need_not_say_why_it_ended(served, scripted):
    choice = {"index": 0, "message": {"content": "yes"}, "finish_reason": None}
    scripted.answer = lambda path, body: Reply(chat(choices=[choice]))
    assert "fault" not in row_of(served.log, served.chat(**FREE))


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_brackets_that_can_be_read_and_not_written(served, scripted, path):
    scripted.answer = lambda path, body: Reply(chat())
    statuses = set()
    # which depths these are depends on the calls around them
    for depth in range(920, 1000):
        body = {**FREE, "messages": [], "input": [], "metadata": "DEPTH"}
        content = json.dumps(body).encode().replace(b'"DEPTH"', b"[" * depth + b"]" * depth)
        statuses.add(served.ask(f"/v1/{path}", content).status)
    assert statuses <= {200, 400}


def test_headers_and_query(served, scripted):
    scripted.answer = lambda path, body: Reply(
        chat(),
        x_knobwise_request_id="inner",
        x_knobwise_knobs="{}",
        x_other="kept",
        # no header may hold this
        x_odd="a\x0bb",
    )
    body = {"messages": [], **FREE}
    path = "/v1/chat/completions?api-version=2026-01-01&a=%2Fb"
    answer = served.ask(path, body, x_budget_ms="300", x_limits="{}", x_own="kept")
    assert answer.headers["x-other"] == "kept"
    assert "x-odd" not in answer.headers
    assert row_of(served.log, answer)["id"] == answer.headers["x-knobwise-request-id"] != "inner"
    path, headers, _ = scripted.asked[-1]
    assert path == "/v1/chat/completions?api-version=2026-01-01&a=%2Fb"
    assert headers["x-own"] == "kept"
    assert not {"x-budget-ms", "x-limits"} & headers.keys()


def test_an_answers_own_id_takes_a_label(served, scripted):
    for number in ("first", "second", "twice", "twice"):
        scripted.answer = lambda path, body, number=number: Reply(chat(id=f"chatcmpl-{number}"))
        answer = served.chat(**FREE)
    body = {"id": "chatcmpl-first", "accuracy": 0.5}
    assert served.json("/v1/feedback", body) == (200, {})
    lines = [line for path in served.log.glob("labels-*") for line in path.read_text().splitlines()]
    (row,) = (row for row in rows_in(served.log) if row.get("answer") == "chatcmpl-first")
    assert json.loads(lines[-1])["id"] == row["id"]
    assert served.json("/v1/feedback", {**body, "id": "chatcmpl-twice"})[0] == 409
    assert served.json("/v1/feedback", {**body, "id": "chatcmpl-never"})[0] == 404
    label = {"id": answer.headers["x-knobwise-request-id"], "accuracy": 1}
    assert served.json("/v1/feedback", label) == (200, {})


def test_what_clients_write_names_no_series_of_metrics(served, scripted):
    scripted.answer = lambda path, body: Reply(chat())
    served.chat(**FREE, max_tokens=3)
    before = len(served.ask("/metrics").content.splitlines())
    for number in range(4, 9):
        assert served.chat(**FREE, max_tokens=number).status == 200
    assert len(served.ask("/metrics").content.splitlines()) == before


def test_a_length_below_all_profiled_ones_is_not_drawn(exported, scripted, tmp_path):
    scripted.answer = lambda path, body: Reply(chat())
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "explore=1", "explore_loss=1"
    with serving(tmp_path, *words) as client:
        for _ in range(10):
            answer = client.chat(**FREE, max_tokens=3)
            assert (answer.status, knobs_of(answer)["max_tokens"]) == (200, 3)
            assert row_of(tmp_path / "served", answer)["failed"]


@pytest.mark.parametrize("query", ["", "?api-version=preview"])
def test_an_endpoint_with_a_query(exported, scripted, tmp_path, query):
    scripted.answer = lambda path, body: Reply(chat())
    words = f"checkpoint={exported}", f"endpoint={scripted.url}/{query}"
    with serving(tmp_path, *words) as client:
        assert client.chat(**FREE).status == 200
    assert scripted.asked[-1][0] == f"/v1/chat/completions{query}"


@pytest.mark.parametrize(("idle_s", "connections"), [(None, 1), (1e-9, 2)])
def test_no_request_goes_to_a_connection_that_was_idle_for_long(monkeypatch, idle_s, connections):
    if idle_s is None:
        # before servers close it themselves
        assert 0 < upstream.IDLE_S < inspect.signature(Config).parameters[KEPT].default
    else:
        monkeypatch.setattr(upstream, "IDLE_S", idle_s)
    opened = []

    async def answer(reader, writer):
        opened.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def ask():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        (port,) = {each.getsockname()[1] for each in server.sockets}
        asked = upstream.Upstream(f"http://127.0.0.1:{port}/v1", None, False, 60)
        async with server, asked.connected():
            for _ in range(2):
                response = await asked.send("POST", "/chat/completions", [], b"{}")
                assert await asked.content_of(response) == b"{}"

    asyncio.run(ask())
    assert len(opened) == connections


@pytest.mark.parametrize(("parts", "whole"), [([0.02, WORD] * 40, 6.0), ([WORD, 60.0], 60.0)])
def test_an_answer_that_trickles_or_stops_is_given_up(scripted, monkeypatch, parts, whole):
    monkeypatch.setattr(upstream, "WHOLE_ANSWER", whole)
    scripted.answer = lambda path, body: Reply(parts)

    async def ask():
        asked = upstream.Upstream(scripted.url, None, False, 0.1)
        async with asked.connected():
            response = await asked.send("POST", "/chat/completions", [], b"{}")
            async with response:
                await asked.content_of(response)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    scripted.pause.set()
    scripted.pause.clear()

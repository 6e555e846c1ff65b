"""`knobwise serve` in front of a simulated endpoint."""

import http.client
import http.server
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest
from commands import children_of, in_proc, wait_for
from proxied import MESSAGES, SAFE, SMALL, Client, export, knobs_of, serving, started

import knobwise
from knobwise.agents import NumpyController
from knobwise.agents.deployed.arrays import digest_of
from knobwise.agents.learning.logged import read_log
from knobwise.experiments.deploy.serve import serve_controller as run_serve
from knobwise.experiments.settings.config_file import to_yaml
from knobwise.experiments.settings.measured_with import every_request
from knobwise.serving.proxy import server
from knobwise.serving.proxy.knob_fields import KnobFields
from knobwise.serving.proxy.settings import ServeRun
from knobwise.serving.proxy.under_way import place_of
from knobwise.serving.proxy.walk import Choice, Walk
from knobwise.serving.runtime import Runtime

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def row_of(log, answer):
    """The row of an answer in the log, also one that no update learns from."""
    name = answer.headers["x-knobwise-request-id"]
    (row,) = (row for row in rows_in(log) if row["id"] == name)
    return row


def rows_in(log):
    lines = [line for path in log.glob("requests-*") for line in path.read_text().splitlines()]
    return list(map(json.loads, lines))


def learned_from(log, answer, controller):
    """The row of an answer that updates learn from."""
    rows = {row["id"]: row for row in read_log(log, controller).rows}
    return rows[answer.headers["x-knobwise-request-id"]]


@pytest.mark.parametrize("budget_ms", [150, 370, 1000])
@pytest.mark.parametrize("kind", ["a", "b"])
def test_a_chat_gets_the_knobs_that_the_controller_decides(
    served, controller, endpoint, budget_ms, kind
):
    features = {"prompt_words": 5, "kind": kind}
    ours = {"budget_ms": budget_ms, "features": features}
    answer = served.chat(model="auto", user="somebody", **ours)
    assert answer.status == 200
    assert knobs_of(answer) == controller.decide(features, budget_ms)
    # nothing of ours goes to the endpoint
    sent = {"messages": MESSAGES, "user": "somebody", **knobs_of(answer)}
    assert endpoint.state.requests[-1] == sent
    row = learned_from(served.log, answer, controller)
    assert row["budget_ms"] == budget_ms
    assert row["knobs"] == knobs_of(answer)
    assert "12 + 30" not in json.dumps(row)


def test_a_deadline_by_header(served):
    headers = {"x-budget-ms": "150"}
    answer = served.chat(headers, features={"kind": "a"})
    assert row_of(served.log, answer)["budget_ms"] == 150
    # the body goes before
    answer = served.chat(headers, features={"kind": "a"}, budget_ms=170)
    assert row_of(served.log, answer)["budget_ms"] == 170


def test_limits_on_what_no_policy_predicts_are_refused(served):
    headers = {"x-limits": '{"usd": 0.5}'}
    assert served.chat(headers, features={"prompt_words": 5, "kind": "b"}).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "3 + 4?"}, IMAGE]}]},
        {"messages": [{"role": "user", "content": "Größe? 你好 \ud83d\ude00"}], "stream": True},
    ],
)
def test_bytes_are_passed_through(served, endpoint, fields):
    direct = Client(int(endpoint.url.split(":")[2].split("/")[0]))
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "seed": 3, **fields}
    own = direct.ask(CHAT, body)
    passed = served.ask(CHAT, body, x_budget_ms="1000")
    assert passed.content == own.content
    assert passed.status == own.status
    assert passed.headers["content-type"] == own.headers["content-type"]
    assert endpoint.state.requests[-1] == endpoint.state.requests[-2]
    # and where a body is written anew
    passed = served.ask(CHAT, body | {"model": "auto", "budget_ms": 1000})
    sent = json.dumps(endpoint.state.requests[-1], separators=(",", ":")).encode()
    assert passed.content == direct.ask(CHAT, sent).content


def test_what_a_client_sets_itself_is_kept(served, endpoint):
    features = {"kind": "a"}
    free = knobs_of(served.chat(features=features, budget_ms=1000))
    assert free == {"model": "small", "max_tokens": 64}
    answer = served.chat(features=features, budget_ms=1000, model=SAFE)
    assert knobs_of(answer)["model"] == SAFE
    assert not row_of(served.log, answer).get("failed")
    # both names are one cap, which goes by that of the profile
    lengths = {"max_completion_tokens": 63, "max_tokens": 300}
    answer = served.chat(features=features, budget_ms=1000, **lengths)
    assert knobs_of(answer)["max_tokens"] == 16
    sent = endpoint.state.requests[-1]
    assert (sent["max_tokens"], "max_completion_tokens" in sent) == (16, False)
    # shorter than any configuration: cut, and no update learns from it
    answer = served.chat(features=features, budget_ms=1000, max_tokens=3)
    assert knobs_of(answer)["max_tokens"] == endpoint.state.requests[-1]["max_tokens"] == 3
    assert row_of(served.log, answer)["failed"]
    # a model of which nothing is known
    before = len(rows_in(served.log))
    answer = served.chat(features=features, budget_ms=1000, model="medium")
    assert answer.headers["x-knobwise-unchanged"] == "true"
    assert endpoint.state.requests[-1] == {"messages": MESSAGES, "model": "medium"}
    assert len(rows_in(served.log)) == before


@pytest.fixture(scope="module")
def promised(tmp_path_factory):
    """The file of a controller with a promise."""
    path = tmp_path_factory.mktemp("promised") / "controller.npz"
    export(path, **{"policy.promise": 0.8})
    return path


def test_what_is_promised_stands_in_headers_and_metrics(promised, endpoint, tmp_path):
    controller = NumpyController.load(promised)
    lowest, highest = controller.promise.budgets_ms[[0, -1]]
    words = f"checkpoint={promised}", f"endpoint={endpoint.url}", "tracker=false"
    with serving(tmp_path, *words) as client:
        features = {"kind": "a", "prompt_words": 3}
        for budget_ms, share in ((highest + 100, "0.8"), (lowest / 2, "0")):
            answer = client.chat(features=features, budget_ms=budget_ms)
            assert answer.headers["x-knobwise-promised"] == share
            group = controller.promise.groups(np.array([budget_ms]))[0]
            decides = group >= 0 and controller.promise.fixed[group] < 0
            assert answer.headers["x-knobwise-reason"] == ("policy" if decides else "promise")
        assert client.metric('promised_total{promised="yes"}') == 1
        assert client.metric('promised_total{promised="no"}') == 1
        # what was not promised is not counted
        label = f'{{budget="{highest:.6g}"}}'
        assert client.metric(f"promise_on_time{label}") == 1
        text = client.ask("/metrics").content.decode()
        assert len(re.findall("^knobwise_promise_on_time{", text, re.MULTILINE)) == 1
        broken = re.findall(r"^knobwise_promise_broken{.*} (\S+)$", text, re.MULTILINE)
        assert broken == ["0.0", "0.0"]
        # whoever leaves late was not answered on time; whoever leaves early might have been
        left = 'requests_total{outcome="client_left"}'
        fields = {"features": features, "budget_ms": highest + 100}
        for number, waits_ms in enumerate((50, highest + 200), start=1):
            leave(client, waits_ms / 1e3, **fields)
            wait_for(lambda number=number: client.metric(left) == number)
            assert client.metric(f"promise_on_time{label}") == 1 / number
        # the promise is about what the controller chooses among all settings
        answer = client.chat(**fields, model=SAFE)
        assert knobs_of(answer)["model"] == SAFE
        assert answer.headers["x-knobwise-promised"] == "0"
        assert client.metric(f"promise_on_time{label}") == 1 / 2
        # between two trained budgets a rule of its own decides, and it counts at the smaller one
        answer = client.chat(features=features, budget_ms=0.97 * highest)
        assert answer.headers["x-knobwise-promised"] == "0.8"
        text = client.ask("/metrics").content.decode()
        labels = re.findall('^knobwise_promise_on_time{budget="(.*)"}', text, re.MULTILINE)
        assert {*labels} <= {f"{budget:.6g}" for budget in controller.trained_ms}
        assert len(labels) == 2
    (line,) = (line for line in client.said() if "promised of" in line)
    assert " 2 of 4 " in line
    # the next server goes on counting
    with serving(tmp_path, *words) as client:
        assert client.metric(f"promise_on_time{label}") == 1 / 2
        client.chat(features=features, budget_ms=highest + 100)
        assert client.metric(f"promise_on_time{label}") == 2 / 3


def test_on_a_slower_machine_a_promise_counts_at_the_budget_that_was_asked_for(promised):
    controller = NumpyController.load(promised)
    runtime = Runtime(controller)
    metrics = Mock()
    highest = controller.trained_ms.max()
    walk = Walk(runtime, KnobFields(runtime.configurations), None, metrics, budget=highest)
    expected = controller.static.expected(0)
    for _ in range(30):
        runtime.tracker.update(*expected, 1.2 * math.exp(expected[1]))
    for budget_ms in (highest, 1.05 * highest):
        request = runtime.begin(budget_ms)
        decision = runtime.decide(request, {"kind": "a", "prompt_words": 3})
        assert 0 < decision.promised.budget_ms < highest
        walk.finish(Choice(decision, decision.configuration, {}, allowed=None, learns=True))
    counted = [call.args[:3] for call in metrics.watch_promise.call_args_list]
    assert counted == [(f"{highest:.6g}", 0.8, True)] * 2


def leave(client, waits_s, **fields):
    """Ask, and leave without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=waits_s)
    body = json.dumps({"messages": MESSAGES, **fields})
    headers = {"Content-Type": "application/json", "X-Simulated": "first_ms=30000"}
    connection.request("POST", CHAT, body, headers)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


def test_features_that_fail_get_static(served, controller):
    before = served.metric('fallbacks_total{reason="features"}')
    for features in ({}, {"kind": 3}, {"kind": "a", "prompt_words": "x"}):
        answer = served.chat(features=features, budget_ms=1000)
        assert answer.status == 200
        assert answer.headers["x-knobwise-fell-back"] == "true"
        assert answer.headers["x-knobwise-reason"] == "features"
    assert served.metric('fallbacks_total{reason="features"}') == before + 3


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"budget_ms": "soon"}, "budget_ms"),
        ({"budget_ms": -5}, "-5"),
        ({"budget_ms": True}, "budget_ms"),
        ({"limits": 3}, "limits"),
        ({"limits": {"usd": "x"}}, "usd"),
        ({"features": [1]}, "features"),
    ],
)
def test_a_mistake_of_the_client_is_refused_by_name(served, endpoint, fields, what):
    before = len(endpoint.state.requests)
    answer = served.chat(**fields)
    error = json.loads(answer.content)["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert what in error["message"]
    assert len(endpoint.state.requests) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, b"\xff"])
def test_what_is_no_json_object_is_refused(served, content):
    assert served.json(CHAT, content)[0] == 400


# -- faults of the endpoint ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["429", "500", "cut", "json", "first_ms"])
@pytest.mark.parametrize("stream", [False, True])
def test_another_setting_is_tried_after_a_fault(served, fault, stream):
    simulated = "first_ms=3000" if fault == "first_ms" else f"fault={fault}"
    fields = {"features": {"kind": "a"}, "stream": stream, "model": "auto"}
    whole = {"x-simulated": simulated}, {**fields, "budget_ms": 5000}
    if stream and fault in ("cut", "json"):
        # what has begun cannot be taken back
        return
    answer = served.chat(whole[0], **whole[1])
    assert answer.status == 200
    assert knobs_of(answer)["model"] == SAFE
    assert answer.headers["x-knobwise-attempts"] == "2"
    row = row_of(served.log, answer)
    assert (row["knobs"]["model"], row["attempts"]) == (SAFE, 2)
    if fault == "first_ms":
        # until the time-out
        assert row["total_ms"] > 1000
    # none is tried that would come too late
    answer = served.chat(whole[0], **(whole[1] | {"budget_ms": 200}))
    assert answer.status in (429, 500, 502, 504, 200)
    assert answer.headers["x-knobwise-attempts"] == "1"


@pytest.mark.parametrize(
    ("fault", "status"), [("401", 401), ("429", 429), ("500", 500), ("cut", 502), ("json", 200)]
)
def test_an_error_of_the_endpoint_passes_through(served, controller, endpoint, fault, status):
    direct = Client(int(endpoint.url.split(":")[2].split("/")[0]))
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64}
    answer = served.ask(CHAT, body, x_simulated=f"fault={fault}")
    assert answer.status == status
    if fault != "cut":
        own = direct.ask(CHAT, body, x_simulated=f"fault={fault}")
        assert (answer.content, answer.status) == (own.content, own.status)
        assert answer.headers.get("retry-after") == own.headers.get("retry-after")
    else:
        assert json.loads(answer.content)["error"]["type"] == "server_error"
    assert_nothing_learned(served.log, controller, row_of(served.log, answer))


def assert_nothing_learned(log, controller, row):
    """A request without an answer is in the log, and no update learns from it."""
    assert (row["failed"], row["met"], row["answer_ms"]) == (True, False, None)
    assert row["fault"]
    read = read_log(log, controller)
    assert row["id"] not in {other["id"] for other in read.rows}
    assert read.aside["without an answer"] >= 1


def test_a_stream_that_is_cut_is_cut_for_the_client(served, controller):
    before = served.metric('requests_total{outcome="cut"}')
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "stream": True}
    simulated = "fault=cut&chunks=10&chunk_ms=1"
    connection, answer = served.send(CHAT, body, x_simulated=simulated)
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()
    assert served.metric('requests_total{outcome="cut"}') == before + 1
    assert_nothing_learned(served.log, controller, rows_in(served.log)[-1])


def test_broken_events_are_passed_through(served, endpoint):
    direct = Client(int(endpoint.url.split(":")[2].split("/")[0]))
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "stream": True}
    own = direct.ask(CHAT, body, x_simulated="fault=json")
    assert b'"chatcmpl-\n' in own.content
    assert served.ask(CHAT, body, x_simulated="fault=json").content == own.content


def test_nothing_is_generated_for_a_client_that_has_left(served, endpoint):
    before = served.metric('requests_total{outcome="client_left"}')
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "stream": True}
    for first_ms in (0, 900):
        simulated = f"first_ms={first_ms}&chunks=1000&chunk_ms=20"
        name = "127.0.0.1", served.port
        content = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Simulated: {simulated}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(name) as client:
            client.sendall(head.encode() + content)
            wait_for(lambda: endpoint.state.open == 1)
        wait_for(lambda: endpoint.state.open == 0)
    wait_for(lambda: served.metric('requests_total{outcome="client_left"}') == before + 2)


@pytest.mark.parametrize(("timed", "learns"), [("answer", True), ("first_chunk", False)])
def test_silence_and_clients_that_leave_tell_of_slower_answers(
    exported, endpoint, tmp_path, timed, learns
):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "timeout_s=0.5"
    with serving(tmp_path, *words, f"timed={timed}") as client:
        # some 165 ms are expected
        fields = {"features": {"kind": "a"}, "budget_ms": 300, "model": "small"}
        leave(client, 0.45, **fields)
        wait_for(lambda: client.metric('requests_total{outcome="client_left"}') == 1)
        # nobody sees when an answer that is no stream begins
        level = client.metric("latency_level")
        assert (level > 1.1) == learns
        # until the time-out
        answer = client.chat({"x-simulated": "first_ms=30000"}, **fields)
        assert answer.status == 504
        assert (client.metric("latency_level") > level) == learns
        leave(client, 0.45, stream=True, **fields)
        wait_for(lambda: client.metric('requests_total{outcome="client_left"}') == 2)
        assert client.metric("latency_level") > 1.1
    # whoever leaves at the deadline is late, and an update learns so
    rows = rows_in(tmp_path / "served")
    abandoned = [bool(row.get("abandoned")) for row in rows]
    assert abandoned == ([True, False, True] if learns else [False, True])
    assert [row["met"] for row in rows] == [False] * len(rows)
    read = read_log(tmp_path / "served").rows
    assert [row["id"] for row in read] == [row["id"] for row in rows if row.get("abandoned")]
    assert all(row["answer_ms"] > 250 for row in read)


# -- the other routes ------------------------------------------------------------------------------


def test_models_health_and_metrics(served, controller, endpoint):
    direct = Client(int(endpoint.url.split(":")[2].split("/")[0]))
    own = direct.json("/v1/models")[1]["data"]
    listed = served.json("/v1/models")[1]["data"]
    assert (listed[:-1], listed[-1]["id"]) == (own, "knobwise")
    assert served.json("/v1/models/knobwise")[1] == listed[-1]
    status, health = served.json("/health")
    assert (status, health["controller"]) == (200, controller.digest)
    assert health["broken_before"] == 0
    before = served.metric('requests_total{outcome="answered"}')
    served.chat(features={"kind": "a"})
    assert served.metric('requests_total{outcome="answered"}') == before + 1
    assert served.metric("first_chunk_seconds_count") >= 1
    for path, status in (("/v1/embeddings", 400), ("/decide", 405)):
        answer = served.json(path)
        assert (answer[0], set(answer[1])) == (status, {"error"})


def test_labels_by_request_id(served, controller):
    for path, name in (("/v1/feedback", "request_id"), ("/label", "id")):
        answer = served.chat(features={"kind": "a"}, budget_ms=200)
        label = {name: answer.headers["x-knobwise-request-id"], "accuracy": 0.25}
        assert served.json(path, label) == (200, {})
        assert learned_from(served.log, answer, controller)["accuracy"] == 0.25


def test_a_label_of_no_request_is_refused_where_that_can_be_known(served):
    status, refused = served.json("/v1/feedback", {"request_id": "typed-wrong", "accuracy": 1})
    assert status == 404
    assert "typed-wrong" in refused["error"]["message"]
    # of a process whose files may have been moved
    other = {"request_id": f"{16 * 'a'}-3", "accuracy": 1}
    assert served.json("/v1/feedback", other) == (200, {"known": False})


@in_proc
def test_on_a_full_disk_each_label_that_is_lost_is_said_and_counted(exported, endpoint, tmp_path):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}"
    with started(tmp_path, *words) as (client, process):
        answer = client.chat(features={"kind": "a"}, budget_ms=200)
        label = {"request_id": answer.headers["x-knobwise-request-id"], "accuracy": 1}
        assert client.json("/v1/feedback", label) == (200, {})
        (worker,) = children_of(process.pid)
        # a limit at which the system writes a part of a line, then nothing, as on a full disk
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        answers = [client.json("/v1/feedback", label) for _ in range(50)]
        kept = [status for status, _ in answers].count(200)
        assert 0 < kept < 10
        assert [status for status, _ in answers] == [200] * kept + [507] * (50 - kept)
        assert label["request_id"] in answers[-1][1]["error"]["message"]
        assert client.metric("lost_labels_total") == 50 - kept
        assert client.metric("lost_rows_total") == 0
        (file,) = tmp_path.glob("*/labels-*.jsonl")
        assert len(file.read_text().splitlines()) == 1 + kept
        # once there is room again
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert client.json("/v1/feedback", label) == (200, {})
        assert client.metric("lost_labels_total") == 50 - kept
    assert "Traceback" not in str(client.said())
    assert len([line for line in client.said() if "labels are lost" in line]) == 1


def test_needs_no_torch():
    code = "import sys, knobwise.serving.proxy.server, knobwise.experiments.deploy.serve\n"
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "uvicorn" in done.stdout.split()
    assert "torch" not in done.stdout.split()


# -- servers of their own --------------------------------------------------------------------------


def test_override_sets_knobs_whatever_the_client_has_set(exported, endpoint, tmp_path):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "override=true"
    with serving(tmp_path, *words) as client:
        answer = client.chat(features={"kind": "a"}, budget_ms=1000, model="medium", max_tokens=3)
    sent = {"messages": MESSAGES, "model": "small", "max_tokens": 64}
    assert endpoint.state.requests[-1] == sent
    assert knobs_of(answer) == {"model": "small", "max_tokens": 64}


def test_shadow_logs_the_choice_and_sends_the_default(exported, endpoint, tmp_path):
    default = f"default={{model: '{SAFE}', max_tokens: 16}}"
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "shadow=true", default
    with serving(tmp_path, *words, "log_prompts=true") as client:
        answer = client.chat(features={"kind": "a"}, budget_ms=1000)
        row = row_of(tmp_path / "served", answer)
        # in plain words
        assert client.chat(model="gone").status == 404
        assert "the endpoint answered with status 404" in str(client.said())
    assert knobs_of(answer) == row["knobs"] == {"model": SAFE, "max_tokens": 16}
    assert endpoint.state.requests[-1] == {"messages": MESSAGES, **row["knobs"]}
    assert row["shadow"] == {"model": "small", "max_tokens": 64}
    assert row["prompt"] == "What is 12 + 30?"
    assert answer.headers["x-knobwise-reason"] == "shadow"


def test_functions_of_the_users_own(exported, endpoint, tmp_path):
    (tmp_path / "own.py").write_text(
        "async def features(body):\n"
        "    return {'kind': 'a' if 'sum' in body['messages'][-1]['content'] else 1 / 0}\n"
    )
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "features=own:features"
    with started(tmp_path, *words, "tracker=false") as (client, _):
        assert client.chat(messages=[], features={"kind": "a"}).status == 200
        good = client.chat(messages=[{"role": "user", "content": "a sum"}], budget_ms=1000)
        bad = client.chat(messages=[{"role": "user", "content": "secret"}], budget_ms=1000)
    assert (good.headers["x-knobwise-fell-back"], bad.headers["x-knobwise-fell-back"]) == (
        "false",
        "true",
    )
    # said once, without what was asked
    assert str(client.said()).count("ZeroDivisionError") == 1
    assert "secret" not in str(client.said())


def test_where_the_messages_cannot_be_made_nothing_is_learned(endpoint, tmp_path):
    path = tmp_path / "controller.npz"
    rows = []
    for sample in range(60):
        for model, slow in (("small", 100), ("large", 300)):
            for style in ("brief", "long"):
                latency = slow + 50 * (style == "long") + sample % 5
                knobs = {"model": model, "style": style}
                right = style == "long"
                rows.append({"sample_id": f"q{sample}", **knobs, "accuracy": right})
                rows[-1]["latency_ms"] = latency
    knobwise.fit(pl.DataFrame(rows), **SMALL).agent.export(path)
    (tmp_path / "styled.py").write_text(
        "def messages(question, knobs):\n"
        "    assert len(question) < 20\n"
        "    return [{'role': 'user', 'content': f\"{question}, {knobs['style']}\"}]\n"
    )
    words = f"checkpoint={path}", f"endpoint={endpoint.url}", "messages=styled:messages"
    with started(tmp_path, *words, "tracker=false") as (client, _):
        for question, styled in (("1 + 1?", True), ("What is 12 + 30, please?", False)):
            chat = [{"role": "user", "content": question}]
            answer = client.chat(messages=chat, budget_ms=1000)
            sent = endpoint.state.requests[-1]["messages"][-1]["content"]
            assert (sent == question, "style" in knobs_of(answer)) == (not styled, styled)
    rows = rows_in(tmp_path / "served")
    assert [row.get("failed", False) for row in rows] == [False, True]
    assert read_log(tmp_path / "served").rows[0]["id"] == rows[0]["id"]


def test_a_token_keeps_strangers_out_and_stays_here(exported, endpoint, tmp_path):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}"
    with serving(tmp_path, *words, KNOBWISE_TOKEN="open", OPENAI_API_KEY="key") as client:
        assert client.ask("/health").status == 200
        for path, body in (
            (CHAT, {"messages": MESSAGES}),
            ("/v1/models", None),
            ("/metrics", None),
        ):
            answer = client.ask(path, body)
            assert (answer.status, json.loads(answer.content)["error"]["type"]) == (
                401,
                "authentication_error",
            )
            assert client.ask(path, body, Authorization="Bearer open").status == 200


def test_a_new_controller_takes_over(exported, controller, endpoint, tmp_path):
    current = tmp_path / "controller.npz"
    current.write_bytes(exported.read_bytes())
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", f"watch={current}"
    with serving(tmp_path, *words) as client:
        assert client.chat(budget_ms=200).status == 200
        os.utime(current)
        time.sleep(1.1)
        assert client.chat(budget_ms=200).status == 200
        assert client.json("/health")[1]["controller"] == controller.digest


def test_decisions_without_an_endpoint(exported, controller, tmp_path):
    current = tmp_path / "controller.npz"
    current.write_bytes(exported.read_bytes())
    with serving(tmp_path, f"checkpoint={exported}", "workers=2", f"watch={current}") as client:
        body = {"prompt_words": 3, "kind": "a", "budget_ms": 200}
        features = {"prompt_words": 3, "kind": "a"}
        assert client.json("/decide", body) == (200, controller.decide(features, 200))
        assert client.json(CHAT, {"messages": MESSAGES})[0] == 404
        # a new version decides from the next request on
        arrays = dict(np.load(current))
        bias = next(name for name in arrays if name.endswith("bias"))
        arrays[bias] = arrays[bias] + 1
        arrays["digest"] = np.frombuffer(digest_of(arrays), np.uint8)
        np.savez(tmp_path / "other.npz", **arrays)
        os.replace(tmp_path / "other.npz", current)
        other = NumpyController.load(current).digest
        assert other != controller.digest
        wait_for(lambda: client.json("/health")[1]["controller"] == other)


def test_after_kill_9_open_streams_are_counted_and_whole_answers_are_logged(
    exported, endpoint, tmp_path
):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}"
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "stream": True}
    with started(tmp_path, *words) as (client, process):

        def ask(number):
            """The id of an answer that was whole."""
            slow = "first_ms=1&chunks=1000&chunk_ms=20" if number % 2 else ""
            try:
                answer = client.ask(CHAT, body, x_simulated=slow)
            except (http.client.HTTPException, OSError):
                return None
            assert answer.content.endswith(b"data: [DONE]\n\n")
            return answer.headers["x-knobwise-request-id"]

        with ThreadPoolExecutor(20) as pool:
            asked = [pool.submit(ask, number) for number in range(20)]
            wait_for(lambda: endpoint.state.open == 10)
            wait_for(lambda: sum(answer.done() for answer in asked) == 10)
            os.killpg(process.pid, signal.SIGKILL)
            killed = time.monotonic()
            process.wait()
            whole = {answer.result() for answer in asked} - {None}
        port = client.port
        with started(tmp_path, *words, f"port={port}") as (again, _):
            assert again.port == port
            assert again.json("/health")[1]["broken_before"] == 10
            assert again.metric("broken_total") == 10
            assert again.chat(budget_ms=200).status == 200
        assert again.said()[1].endswith(": 10")
    assert time.monotonic() - killed < 60
    assert len(whole) == 10
    assert whole <= {row["id"] for row in rows_in(tmp_path / "served")}


def test_more_requests_at_once_than_were_measured_are_counted_and_said_once(
    exported, endpoint, tmp_path
):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "concurrency=2"
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "stream": True}
    with started(tmp_path, *words) as (client, _):
        # streams that have begun, and last 20 s
        slow = {"x_simulated": "first_ms=1&chunks=1000&chunk_ms=20"}
        opened = [client.send(CHAT, body, **slow) for _ in range(2)]
        assert client.metric("crowded_total") == 0
        opened += [client.send(CHAT, body, **slow) for _ in range(2)]
        assert client.metric("crowded_total") == 2
        for connection, answer in opened:
            assert answer.status == 200
            answer.close()
            connection.close()
    assert sum("than the profile was measured with" in line for line in client.said()) == 1


@pytest.mark.parametrize("given", [None, 3])
def test_how_many_requests_were_measured_at_once_is_known_from_the_run(
    exported, tmp_path, monkeypatch, given
):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(exported, run)
    profile = {"format": "table", "path": str(tmp_path / "table.parquet")}
    (run / "config.yaml").write_text(to_yaml({"profile": profile}))
    (tmp_path / "profile.json").write_text('{"concurrency": 8}')
    served = []
    monkeypatch.setattr(server, "serve", lambda config, controller: served.append(config))
    run_serve(ServeRun(checkpoint=str(run), concurrency=given))
    assert served[0].concurrency == (given or 8)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["extra_body={top_k: 1, stop: ['a b', null], max_tokens: 32}", "messages=my:own"]),
        ({"extra_body": {"max_completion_tokens": 32, "top_k": 1, "stop": ["a b", None]}}, ["my"]),
        # what serve sends besides is kept
        (
            {"extra_body": {"max_tokens": 9, "top_k": 1, "seed": 3}, "messages": "their:own"},
            ["extra_body={top_k: 1, seed: 3, stop: ['a b', null], max_tokens: 32}"],
        ),
        ({"endpoint": None}, []),
    ],
)
def test_what_the_profile_was_measured_with_and_is_not_sent_is_said(
    exported, tmp_path, monkeypatch, capsys, options, wanted
):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(exported, run)
    profile = {"format": "table", "path": str(tmp_path / "table.parquet")}
    (run / "config.yaml").write_text(to_yaml({"profile": profile}))
    facts = {
        "model": "openai",
        "knobs": [{"name": "model"}, {"name": "think"}],
        "config": {"max_new_tokens": 32},
        "extra_body": {"top_k": 1, "think": False, "stop": ["a b", None]},
        "messages": "my:own",
    }
    monkeypatch.setattr(server, "serve", lambda config, controller: None)
    options = {"endpoint": "http://127.0.0.1:1/v1", **options}
    for change in ({}, {"model": "elastic"}, {"config": None}):
        (tmp_path / "profile.json").write_text(json.dumps(facts | change))
        run_serve(ServeRun(checkpoint=str(run), **options))
        lines = capsys.readouterr().err.splitlines()
        if change:
            assert not lines
            continue
        assert len(lines) == len(wanted)
        for line, words in zip(lines, wanted, strict=True):
            # as a shell takes it
            assert words in " ".join(shlex.split(line))
    # the length is a knob, or one of extra_body
    for change in ({"knobs": [{"name": "max_tokens"}]}, {"extra_body": {"max_tokens": 5}}):
        (tmp_path / "profile.json").write_text(json.dumps(facts | change))
        assert every_request(profile["path"]).fields.get("max_tokens") != 32


def test_a_worker_that_dies_is_replaced_and_what_it_had_open_is_counted(
    exported, endpoint, tmp_path
):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}"
    body = {"messages": MESSAGES, "model": "small", "max_tokens": 64, "stream": True}
    with serving(tmp_path, *words) as client:
        simulated = "first_ms=1&chunks=1000&chunk_ms=20"
        connection, answer = client.send(CHAT, body, x_simulated=simulated)
        assert answer.read(10)
        (path,) = place_of(tmp_path / "served").glob("running-*/open-*.bin")
        os.kill(int(path.name.split("-")[1]), signal.SIGKILL)
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        connection.close()
        # what is killed as it begins to count leaves a file without a size
        (path.parent / "counter_1.db").touch()
        wait_for(lambda: client.metric("broken_total") == 1)
        assert client.chat(budget_ms=200).status == 200


def test_a_server_that_is_stopped_lets_streams_end(exported, endpoint, tmp_path):
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}"
    body = {"messages": MESSAGES, "model": "small", "stream": True, "features": {"kind": "a"}}
    with started(tmp_path, *words) as (client, process):
        simulated = "first_ms=1&chunks=40&chunk_ms=20"
        connection, answer = client.send(CHAT, body, x_simulated=simulated)
        assert answer.read(10)
        process.send_signal(signal.SIGTERM)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        process.wait(60)
    assert process.returncode == 0
    # where it listens, and what requests must bring
    assert len(client.said()) == 2
    assert len(rows_in(tmp_path / "served")) == 1
    # nothing is left there
    place_of(tmp_path / "served").rmdir()


class Recorded(http.server.BaseHTTPRequestHandler):
    """An endpoint that keeps the headers that it gets."""

    headers_of = {}

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        self.headers_of[self.command] = dict(self.headers.items())
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize(
    ("variables", "passed"),
    [
        ({}, "Bearer client"),
        ({"OPENAI_API_KEY": "key"}, "Bearer key"),
        ({"KNOBWISE_TOKEN": "client"}, None),
    ],
)
def test_whose_key_the_endpoint_gets(exported, tmp_path, variables, passed):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        words = f"checkpoint={exported}", f"endpoint=http://127.0.0.1:{server.server_port}/v1"
        with serving(tmp_path, *words, **variables) as client:
            headers = {"Authorization": "Bearer client", "X-Other": "1", "X-Budget-Ms": "300"}
            assert client.chat(headers).status == 200
    finally:
        server.shutdown()
        server.server_close()
    got = {name.lower(): value for name, value in Recorded.headers_of["POST"].items()}
    assert got.get("authorization") == passed
    assert (got["x-other"], "x-budget-ms" in got) == ("1", False)
    assert not list(filter(lambda path: b"Bearer" in path.read_bytes(), files_in(tmp_path)))


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]

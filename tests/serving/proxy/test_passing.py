"""Routes of the protocol that decide nothing."""

import json

import pytest
from proxied import SAFE, serving
from scripted_endpoint import Reply, chat
from test_endpoint_faults import FREE

FORM = "multipart/form-data; boundary=x"


@pytest.fixture(scope="module")
def served(exported, scripted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("passing")
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "opened=[files]"
    with serving(folder, *words, OPENAI_API_KEY="operators") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("embeddings", "application/json"),
        ("completions?a=b", "application/json"),
        ("rerank", "application/json"),
        ("images/generations", "application/json"),
        ("audio/transcriptions", FORM),
    ],
)
def test_what_passes_as_it_came(served, scripted, path, kind):
    scripted.answer = lambda path, body: Reply([b"any", b"thing"], 201, x_knobwise_knobs="{}")
    content = b'{"model":  "x", "budget_ms": 5}' if kind != FORM else b"--x--"
    route = path.partition("?")[0]
    before = served.metric(f'passed_total{{route="{route}",status="2xx"}}')
    answer = served.ask(f"/v1/{path}", content, Content_Type=kind, x_budget_ms="3")
    assert (answer.status, answer.content) == (201, b"anything")
    assert "x-knobwise-knobs" not in answer.headers
    asked, headers, body = scripted.asked[-1]
    assert asked == f"/v1/{path}"
    assert (headers["content-type"], headers["authorization"]) == (kind, "Bearer operators")
    assert "x-budget-ms" not in headers
    assert body == (json.loads(content) if kind != FORM else content)
    assert served.metric(f'passed_total{{route="{route}",status="2xx"}}') == before + 1


def test_other_routes_are_refused_with_a_hint_unless_opened(served, scripted):
    scripted.answer = lambda path, body: Reply({"id": "f"})
    before = len(scripted.asked)
    for path, method in (
        ("batches", "POST"), ("responses/resp_1", "GET"), ("files/../batches", "GET"),
        ("embeddings", "GET"), ("filesystem", "GET"), ("files//", "GET"),
    ):  # fmt: skip
        connection, answer = served.send(f"/v1/{path}", method=method)
        error = json.loads(answer.read())["error"]
        connection.close()
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        assert "/v1/chat/completions" in error["message"]
    assert len(scripted.asked) == before
    for path, method in (("files", "POST"), ("files/f%20/content", "GET"), ("files/f", "DELETE")):
        connection, answer = served.send(f"/v1/{path}", method=method)
        assert (answer.status, answer.read()) == (200, b'{"id": "f"}')
        connection.close()
        assert scripted.asked[-1][0] == f"/v1/{path}"


def test_a_route_that_the_endpoint_lacks_is_a_mistake_of_the_client(served, scripted):
    """A gateway takes a 404 for a server that is dead for chats too."""
    scripted.answer = lambda path, body: Reply({"detail": "Not Found"}, 404)
    answer = served.ask("/v1/embeddings", {"input": "a"})
    assert answer.status == 400
    assert "Not Found" in json.loads(answer.content)["error"]["message"]
    assert served.ask("/v1/files", {}).status == 404


def test_an_answer_that_breaks_off_does_so_for_the_client(served, scripted):
    scripted.answer = lambda path, body: Reply([b"any", None])
    connection, answer = served.send("/v1/embeddings", {"input": "a"})
    with pytest.raises(Exception, match="IncompleteRead"):
        answer.read()
    connection.close()


def test_models(served, scripted):
    listing = {"object": "list", "data": [{"id": "small"}], "more": 1}
    scripted.answer = lambda path, body: Reply(listing)
    _, models = served.json("/v1/models")
    assert [model["id"] for model in models["data"]] == ["small", "knobwise"]
    assert models["more"] == 1
    # a name is one segment
    for name, path in (
        ("small", "small"),
        ("org/name", "org%2Fname"),
        ("a%2F..%2Fb", "a%2F..%2Fb"),
    ):
        served.ask(f"/v1/models/{name}")
        assert scripted.asked[-1][0] == f"/v1/models/{path}"
    before = len(scripted.asked)
    assert served.ask("/v1/models/..").status in (400, 404)
    assert served.ask("/v1/models/knobwise").status == 200
    assert len(scripted.asked) == before
    # an endpoint without such a list
    scripted.answer = lambda path, body: Reply({"detail": "Not Found"}, 404)
    _, models = served.json("/v1/models")
    assert {model["id"] for model in models["data"]} == {"small", SAFE, "knobwise"}
    assert served.ask("/v1/models/small").status == 200
    assert served.ask("/v1/models/other").status == 404


def test_listings_that_json_has_not(served, scripted):
    for odd in (b"NaN", rb'"\ud800"'):
        scripted.answer = lambda path, body, odd=odd: Reply(b'{"data": [{"id": ' + odd + b"}]}")
        answer = served.ask("/v1/models")
        assert odd in answer.content
        assert json.loads(answer.content)["data"][1]["id"] == "knobwise"
    # too deep to be written again, it goes on as it came
    deep = b'{"data": [' + b"[" * 1000 + b"]" * 1000 + b"]}"
    scripted.answer = lambda path, body: Reply(deep)
    assert served.ask("/v1/models").content == deep


def test_strangers_learn_nothing_of_the_controller(exported, scripted, tmp_path):
    scripted.answer = lambda path, body: Reply(chat())
    words = f"checkpoint={exported}", f"endpoint={scripted.url}"
    with serving(tmp_path, *words, KNOBWISE_TOKEN="secret") as client:
        assert client.json("/health") == (200, {})
        for scheme in ("Bearer", "bearer", "BEARER"):
            token = {"Authorization": f"{scheme} secret"}
            assert client.json("/health", **token)[1]["controller"]
            assert client.chat(token, **FREE).status == 200
        for wrong in ("Basic secret", "Bearer other", "secret", "Bearer"):
            assert client.chat({"Authorization": wrong}, **FREE).status == 401

"""/v1/responses: passed on where the endpoint has it, and answered by chats where it does not."""

import json

import openai
import pytest
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
from test_endpoint_faults import ERROR, FREE, of_model
from test_serve import row_of, rows_in

from knobwise.serving.proxy.responses import as_chat, with_changes

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {**TOOL}}
del CHAT_TOOL["function"]["type"]
IMAGE = "data:image/png;base64,AAAA"
NATIVE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "error": None,
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
NO_ROUTE = Reply({"detail": "Not Found"}, 404)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": "Why?"}, {"messages": [{"role": "user", "content": "Why?"}]}),
        (
            {"input": [{"role": "user", "content": "Why?"}], "instructions": "Be short."},
            {
                "messages": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": "Why?"},
                ]
            },
        ),
        (
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "What?"},
                            {"type": "input_image", "image_url": IMAGE, "detail": "low"},
                        ],
                    },
                    {"role": "developer", "content": [{"type": "input_text", "text": "Now."}]},
                ]
            },
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "What?"},
                            {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
                        ],
                    },
                    {"role": "system", "content": "Now."},
                ]
            },
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "[]"},
                    {"type": "function_call_output", "call_id": "c1", "output": "3"},
                ],
                "tools": [TOOL],
                "tool_choice": {"type": "function", "name": "add"},
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": name,
                                "type": "function",
                                "function": {"name": "add", "arguments": arguments},
                            }
                            for name, arguments in (("c1", "{}"), ("c2", "[]"))
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "3"},
                ],
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
            },
        ),
        (
            {
                "input": [],
                "model": "auto",
                "max_output_tokens": 7,
                "reasoning": {"effort": "low", "summary": "auto"},
                "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
                "temperature": 0.5,
                "store": False,
                "truncation": None,
                "top_k": 3,
            },
            {
                "messages": [],
                "model": "auto",
                "max_tokens": 7,
                "reasoning_effort": "low",
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}},
                },
                "temperature": 0.5,
                "top_k": 3,
            },
        ),
    ],
)
def test_a_request_as_a_chat(body, expected):
    assert as_chat(body) == (expected, [])


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [3]}, "None"),
        ({"input": [{"type": ["message"]}]}, "message"),
        ({"input": [{"type": {}}]}, "type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
    ],
)
def test_what_no_chat_can_hold_is_named(body, lost):
    _, names = as_chat(body)
    assert len(names) == 1
    assert lost in names[0]


def test_knobs_under_the_names_of_the_route():
    body = {"input": "a", "max_output_tokens": 9, "reasoning": {"summary": "auto"}, "model": "auto"}
    chat_body, _ = as_chat(body)
    after = {**chat_body, "max_completion_tokens": 5, "reasoning_effort": "low", "model": "s"}
    del after["max_tokens"]
    assert with_changes(body, chat_body, {**after, "top_k": 3}) == {
        "input": "a",
        "max_output_tokens": 5,
        "reasoning": {"summary": "auto", "effort": "low"},
        "model": "s",
        "top_k": 3,
    }
    del after["max_completion_tokens"]
    assert "max_output_tokens" not in with_changes(body, chat_body, after)
    assert body["reasoning"] == {"summary": "auto"}


@pytest.fixture
def served(exported, scripted, tmp_path):
    """A server of its own, since it remembers what its endpoint has."""
    words = f"checkpoint={exported}", f"endpoint={scripted.url}", "tracker=false"
    with serving(tmp_path, *words) as client:
        client.log = tmp_path / "served"
        address = f"http://127.0.0.1:{client.port}/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client.official:
            yield client


OURS = {"features": {"kind": "a"}, "budget_ms": 5000}


def test_an_endpoint_that_has_the_route(served, scripted):
    scripted.answer = lambda path, body: Reply(NATIVE)
    body = {"model": "auto", "input": "Why?", "max_output_tokens": 40, "extra": 1, **OURS}
    answer = served.ask("/v1/responses", body)
    assert json.loads(answer.content) == NATIVE
    assert knobs_of(answer) == {"model": "small", "max_tokens": 16}
    path, _, sent = scripted.asked[-1]
    assert path == "/v1/responses"
    knobs = {"model": "small", "max_output_tokens": 16}
    assert sent == {**knobs, "input": "Why?", "extra": 1, "stream": False}
    row = row_of(served.log, answer)
    assert (row["met"], row["answer"]) == (True, "resp_1")
    # one of the models fails
    scripted.answer = lambda path, body: (
        of_model("context_length_exceeded") if body["model"] == "small" else Reply(NATIVE)
    )
    answer = served.ask("/v1/responses", body)
    assert (answer.status, knobs_of(answer)["model"]) == (200, SAFE)
    # what only the endpoint knows is its own, and what is answered later has no time
    scripted.answer = lambda path, body: Reply({**NATIVE, "status": "queued", "output": []})
    body = {"input": "Why?", "background": True, "previous_response_id": "resp_1", **OURS}
    answer = served.ask("/v1/responses", body)
    assert (answer.status, answer.headers["x-knobwise-unchanged"]) == (200, "true")
    assert "features" not in scripted.asked[-1][2]
    # no endpoint knows our name
    asked = len(scripted.asked)
    answer = served.ask("/v1/responses", {**body, "model": "knobwise"})
    assert (answer.status, b"background" in answer.content) == (400, True)
    assert len(scripted.asked) == asked


def test_a_stream_of_an_endpoint_that_has_the_route(served, scripted):
    created = {"type": "response.created", "response": {"id": "resp_1"}}
    delta = {"type": "response.output_text.delta", "delta": "yes"}
    completed = {"type": "response.completed", "response": NATIVE}
    events = [event(created), event(delta), event(completed)]
    body = {"input": "Why?", "stream": True, **OURS}

    def answer(path, sent):
        if sent["model"] == "small":
            return Reply([event(created), None])
        return Reply(events)

    scripted.answer = answer
    answered = served.ask("/v1/responses", body)
    assert answered.content == b"".join(events)
    assert answered.headers["x-knobwise-attempts"] == "2"
    assert row_of(served.log, answered)["met"]
    # without its last event it is no answer
    scripted.answer = lambda path, body: Reply(events[:2])
    assert row_of(served.log, served.ask("/v1/responses", body))["failed"]


def test_an_endpoint_that_lacks_the_route(served, scripted):
    scripted.answer = lambda path, body: NO_ROUTE if path == "/v1/responses" else Reply(chat())
    client = served.official
    scripted.asked.clear()
    for number in range(2):
        raw = client.responses.with_raw_response.create(
            model="knobwise", input="Why?", instructions="Be short.", extra_body=OURS
        )
        response = raw.parse()
        assert (response.output_text, response.status) == ("yes", "completed")
        assert (response.usage.input_tokens, response.usage.output_tokens) == (10, 5)
        path, _, sent = scripted.asked[-1]
        assert path == "/v1/chat/completions"
        assert sent["messages"][0] == {"role": "system", "content": "Be short."}
        assert (sent["model"], sent["max_tokens"]) == ("small", 64)
        # it was asked for once
        paths = [each[0] for each in scripted.asked]
        assert paths.count("/v1/responses") == 1
        label = {"id": response.id, "accuracy": 1}
        assert served.json("/v1/feedback", label)[0] == (409 if number else 200)
    # what no chat holds is refused with a hint
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="knobwise", input="a", previous_response_id="resp_1")
    # errors are those of the endpoint
    scripted.answer = lambda path, body: Reply(ERROR, 400)
    with pytest.raises(openai.BadRequestError, match="overloaded"):
        client.responses.create(model="knobwise", input="a", extra_body=OURS)


def test_a_refusal_where_the_endpoint_lacks_the_route_and_it_was_not_known(served, scripted):
    scripted.answer = lambda path, body: NO_ROUTE
    status, answer = served.json("/v1/responses", {"input": "a", "conversation": "c"})
    assert status == 400
    assert "conversation" in answer["error"]["message"]
    # a model that is not there is no route that is not there
    missing = {"error": {"message": "no such model", "code": "model_not_found"}}
    scripted.answer = lambda path, body: Reply(missing, 404)
    assert served.ask("/v1/responses", {"input": "a", "model": "small"}).status == 404
    assert scripted.asked[-1][0] == "/v1/responses"


def test_a_stream_of_chats_in_the_words_of_the_route(served, scripted):
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    usage = event({"id": "chatcmpl-7", "choices": [], "usage": USAGE})
    chunks = [ROLE, WORD, chunk({"content": ", but"})]
    chunks += [chunk({"tool_calls": [call]}), chunk({"tool_calls": [rest]}), STOP, usage, DONE]
    scripted.answer = lambda path, body: NO_ROUTE if "resp" in path else Reply(chunks)
    with served.official.responses.stream(
        model="knobwise", input="Why?", extra_body=OURS
    ) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "yes, but"
    assert (final.output[1].name, final.output[1].arguments) == ("add", '{"a": 1}')
    assert (final.status, final.usage.total_tokens) == ("completed", 15)
    assert scripted.asked[-1][2]["stream_options"] == {"include_usage": True}
    # cut short, refused, and failed
    cut = [ROLE, WORD, chunk({}, "length"), DONE]
    scripted.answer = lambda path, body: Reply(cut)
    with served.official.responses.stream(model="knobwise", input="a", extra_body=OURS) as stream:
        kinds = [each.type for each in stream]
    assert kinds[-1] == "response.incomplete"
    scripted.answer = lambda path, body: Reply([ROLE, WORD, event(ERROR), DONE])
    answer = served.ask("/v1/responses", {"input": "a", "stream": True, **OURS})
    assert b"event: response.failed" in answer.content
    assert b"response.completed" not in answer.content
    assert row_of(served.log, answer)["failed"]
    # what has failed is not completed by what comes later
    broken = chunk({"tool_calls": [5]})
    for odd in (event(ERROR), broken):
        scripted.answer = lambda path, body, odd=odd: Reply(
            [ROLE, WORD, 0.1, odd, WORD, STOP, DONE]
        )
        answer = served.ask("/v1/responses", {"input": "a", "stream": True, **OURS})
        assert b"response.completed" not in answer.content
        assert answer.content.count(b"output_text.delta") == 2
        assert row_of(served.log, answer)["failed"]


def test_what_says_that_it_is_complete_is_in_the_log(served, scripted):
    # an endpoint need not send a last event
    scripted.answer = lambda path, body: NO_ROUTE if "resp" in path else Reply([ROLE, WORD, STOP])
    for _ in range(5):
        connection, answer = served.send("/v1/responses", {"input": "a", "stream": True, **OURS})
        while b"response.completed" not in answer.readline():
            pass
        names = [row["id"] for row in rows_in(served.log)]
        assert answer.headers["x-knobwise-request-id"] in names
        connection.close()


def test_tokens_that_cannot_be_are_left_out(served, scripted):
    def said(usage, stream=False):
        events = [ROLE, WORD, STOP, event({"choices": [], "usage": usage}), DONE]
        reply = Reply(events if stream else chat(usage=usage))
        scripted.answer = lambda path, body: NO_ROUTE if "resp" in path else reply
        answer = served.ask("/v1/responses", {"input": "a", "stream": stream, **OURS})
        assert "fault" not in row_of(served.log, answer)
        content = answer.content.split(b"response.completed\ndata: ")[-1]
        return json.loads(content).get("response", json.loads(content))["usage"]

    for stream in (False, True):
        for usage in ([1], {}, {**USAGE, "prompt_tokens": -1}, {"prompt_tokens": "10"}):
            assert said(usage, stream) is None
        odd = {**USAGE, "prompt_tokens_details": [1], "completion_tokens_details": "x"}
        assert said(odd, stream)["total_tokens"] == 15


def test_answers_of_another_form_are_faults(served, scripted):
    wrong = [
        chat(choices=[{"message": {"content": 3, "tool_calls": [5]}}]),
        chat(choices=[{"message": {"tool_calls": {"a": 1}}}]),
        json.dumps(chat(text="DEPTH")).encode().replace(b'"DEPTH"', b"[" * 1000 + b"]" * 1000),
    ]
    for content in wrong:
        scripted.answer = lambda path, body, content=content: (
            NO_ROUTE if "resp" in path else Reply(content if body["model"] == "small" else chat())
        )
        answer = served.ask("/v1/responses", {"input": "a", **FREE})
        assert (answer.status, answer.headers["x-knobwise-attempts"]) == (200, "2")
    scripted.answer = lambda path, body: Reply([WORD, chunk({"tool_calls": [5]}), STOP, DONE])
    answer = served.ask("/v1/responses", {"input": "a", "stream": True, **OURS})
    assert row_of(served.log, answer)["failed"]

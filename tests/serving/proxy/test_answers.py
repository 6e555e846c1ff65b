"""What an answer is, and when it has begun."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_endpoint import DONE, ROLE, STOP, USAGE, WORD, chat, chunk, event

from knobwise.serving.proxy.answers import ChatReader, ResponsesReader, is_about_model

COMMENT = b": keep-alive\n\n"
THOUGHT = chunk({"reasoning_content": "Hm"})
CALL = chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]})
ERROR = event({"error": {"message": "overloaded", "code": 503}})
COUNTED = event({"choices": [], "usage": USAGE, "service_tier": "flex"})


def read(*chunks, reader=ChatReader):
    made = reader()
    for each in chunks:
        made.feed(each)
    made.end()
    return made


@pytest.mark.parametrize("chunks", [(), (COMMENT,), (b"\r\n\r\n",), (ROLE,), (ROLE, DONE), (b"x",)])
def test_what_is_no_content_is_no_beginning(chunks):
    reader = read(*chunks)
    assert (reader.began, reader.is_whole, reader.fault) == (False, False, "")


@pytest.mark.parametrize("first", [WORD, THOUGHT, CALL, chunk({"refusal": "No"}), STOP])
def test_content_of_any_kind_is_one(first):
    reader = read(COMMENT, ROLE, first)
    assert reader.began
    assert reader.is_whole == (first is STOP)
    assert read(ROLE, first, STOP, DONE).is_whole


def test_a_stream_that_does_not_say_why_it_ended_is_not_whole():
    for chunks in ([ROLE, WORD], [ROLE, WORD, DONE], [ROLE, WORD, ERROR, STOP]):
        assert not read(*chunks).is_whole
    assert read(WORD, ERROR).fault
    for finish in ("error", "abort"):
        assert read(WORD, chunk({}, finish)).fault


def test_every_choice_must_end():
    def of(index, delta, finish=None):
        choice = {"index": index, "delta": delta, "finish_reason": finish}
        return event({"choices": [choice]})

    words = [of(0, {"content": "a"}), of(1, {"content": "b"})]
    assert not read(*words, of(0, {}, "stop")).is_whole
    assert read(*words, of(0, {}, "stop"), of(1, {}, "length")).is_whole


def test_what_an_answer_says_of_itself():
    reader = read(ROLE, WORD, STOP, COUNTED, DONE)
    assert (reader.usage, reader.service_tier) == (USAGE, "flex")
    assert (reader.answer_id, reader.closed, reader.has_text) == ("chatcmpl-7", True, True)
    # null in all events but one, which may be of any length
    long = event({"choices": [], "usage": {**USAGE, "details": "x" * 100_000}})
    pieces = [long[i : i + 1000] for i in range(0, len(long), 1000)]
    reader = read(chunk({"content": "a"}, usage=None), *pieces, chunk({}, "stop", usage=None))
    assert reader.usage["completion_tokens"] == 5


def test_a_long_line_may_come_byte_by_byte():
    reader = ChatReader()
    for _ in range(200_000):
        reader.feed(b"x")
    for piece in (b"\n\n", WORD, STOP):
        reader.feed(piece)
    assert reader.is_whole


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[1]",
        b"[" * 100_000,
        b'{"error": {"message": "overloaded"}}',
        b'{"choices": []}',
        b'{"choices": [3]}',
        b'{"choices": {"a": 1}}',
        b'{"choices": [{"finish_reason": "error"}]}',
        b'{"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]}',
    ],
)
def test_what_is_no_answer(content):
    reader = ChatReader()
    reader.read_whole(content)
    assert reader.fault
    assert not reader.is_whole


@pytest.mark.parametrize(
    "fields", [{}, {"error": None}, {"usage": None}, {"logprobs": float("nan")}]
)
def test_a_whole_answer(fields):
    reader = ChatReader()
    reader.read_whole(json.dumps(chat(**fields)).encode())
    assert (reader.fault, reader.is_whole, reader.has_text) == ("", True, True)


def of_responses(kind, **fields):
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


TOKENS = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
CREATED = of_responses("response.created", response={"id": "resp_1", "usage": None, "error": None})
DELTA = of_responses("response.output_text.delta", delta="yes")


def test_answers_to_responses():
    completed = of_responses("response.completed", response={"id": "resp_1", "usage": TOKENS})
    reader = read(CREATED, reader=ResponsesReader)
    assert (reader.began, reader.answer_id) == (False, "resp_1")
    reader = read(CREATED, DELTA, reader=ResponsesReader)
    assert (reader.began, reader.is_whole) == (True, False)
    reader = read(CREATED, DELTA, completed, reader=ResponsesReader)
    assert (reader.is_whole, reader.closed, reader.fault) == (True, True, "")
    assert {**reader.usage, **USAGE} == reader.usage
    for kind in ("response.failed", "error"):
        failed = of_responses(kind, response={"error": {"code": "server_error"}})
        assert read(CREATED, DELTA, failed, reader=ResponsesReader).fault
    for content, whole in (
        ({"output": [], "status": "completed"}, True),
        ({"output": [], "status": "incomplete"}, True),
        ({"output": [], "status": "failed"}, False),
        ({"output": [], "error": {"code": 1}}, False),
        ({"choices": []}, False),
    ):
        reader = ResponsesReader()
        reader.read_whole(json.dumps(content).encode())
        assert (reader.is_whole, not reader.fault) == (whole, whole)


@given(
    st.lists(
        st.sampled_from([COMMENT, ROLE, WORD, STOP, THOUGHT, ERROR, COUNTED, DONE, b"data: {\n\n"])
    ),
    st.lists(st.integers(1, 300), max_size=20),
    st.booleans(),
)
def test_how_a_stream_is_cut_into_chunks_is_no_matter(events, sizes, returns):
    content = b"".join(events)
    content = content.replace(b"\n", b"\r\n") if returns else content
    pieces = []
    for size in sizes:
        pieces.append(content[:size])
        content = content[size:]
    reader = read(*pieces, content)
    whole = read(b"".join(events))
    for name in ("began", "closed", "fault", "usage", "is_whole", "answer_id", "has_text"):
        assert getattr(reader, name) == getattr(whole, name)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["id", "error", "usage", "choices", "delta", "message",
                                       "finish_reason", "index", "type", "response", "output"]),
                      inner, max_size=5)
)))  # fmt: skip
def test_nothing_that_is_json_raises(content):
    text = json.dumps(content).encode()
    for kind in (ChatReader, ResponsesReader):
        kind().read_whole(text)
        kind().feed(b"data: " + text + b"\n\n")


@pytest.mark.parametrize(
    ("status", "code", "about_model"),
    [
        (400, "context_length_exceeded", True),
        (400, "unsupported_value", True),
        (400, "invalid_api_key", False),
        (400, None, False),
        (400, 400, False),
        (422, "context_length_exceeded", False),
    ],
)
def test_errors_that_another_model_might_not_make(status, code, about_model):
    content = json.dumps({"error": {"message": "no", "code": code}}).encode()
    assert is_about_model(status, content) == about_model
    assert not is_about_model(status, b"[" * 5000)


def test_what_was_as_long_as_it_may_be():
    assert not read(ROLE, WORD, STOP, DONE).is_cut
    reader = read(ROLE, WORD, chunk({}, "length"), COUNTED, DONE)
    assert (reader.is_cut, reader.is_whole, reader.tokens) == (True, True, 5)
    assert math.isnan(read(ROLE, WORD, STOP).tokens)
    assert math.isnan(read(WORD, chunk({}, "stop", usage={"prompt_tokens": -1})).tokens)
    for reason, cut in (("max_output_tokens", True), ("content_filter", False), (None, False)):
        details = None if reason is None else {"reason": reason}
        answer = {"output": [], "status": "incomplete", "incomplete_details": details}
        last = of_responses("response.incomplete", response=answer | {"usage": TOKENS})
        reader = read(CREATED, DELTA, last, reader=ResponsesReader)
        assert (reader.is_cut, reader.tokens) == (cut, 5)
        reader = ResponsesReader()
        reader.read_whole(json.dumps(answer).encode())
        assert reader.is_cut == cut

"""Answers that are what they should be: whole and in events, in the words of both routes, with all
that may be said of their tokens."""

from typing import Any, NamedTuple

from campaign.hostile.wire import (
    DONE,
    FAULT,
    NAN,
    RESPONSES,
    UNPRICED,
    Reply,
    chunked,
    dumped,
    event,
    sized,
)


def usages(read, wrote):
    """What an endpoint may say of tokens, in the words of chats, and what can be priced of it."""
    counted = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
    return {
        "counted": (counted, (read, wrote, 0)),
        "missing": (None, UNPRICED),
        "empty": ({}, UNPRICED),
        "negative": ({**counted, "completion_tokens": -wrote}, UNPRICED),
        "huge": ({**counted, "completion_tokens": 10**400}, UNPRICED),
        "beyond floats": ({**counted, "prompt_tokens": float("inf")}, UNPRICED),
        "NaN": ({**counted, "prompt_tokens": NAN}, UNPRICED),
        "zero": (dict.fromkeys(counted, 0), UNPRICED),
        "of the prompt alone": ({"prompt_tokens": read}, UNPRICED),
        "of the text alone": ({"completion_tokens": wrote}, UNPRICED),
        "in the total": ({"prompt_tokens": read, "total_tokens": read + wrote}, (read, wrote, 0)),
        "more in the total": ({**counted, "total_tokens": read + wrote + 7}, (read, wrote + 7, 0)),
        "floats": (
            {"prompt_tokens": float(read), "completion_tokens": float(wrote)},
            (read, wrote, 0),
        ),
        "halves": ({**counted, "completion_tokens": wrote + 0.5}, UNPRICED),
        "texts": ({**counted, "prompt_tokens": str(read)}, UNPRICED),
        "truth values": ({**counted, "prompt_tokens": True}, UNPRICED),
        "cached": ({**counted, "prompt_tokens_details": {"cached_tokens": 5}}, (read, wrote, 5)),
        "more cached": ({**counted, "prompt_tokens_details": {"cached_tokens": 10_000}}, UNPRICED),
        "odd details": (
            {**counted, "prompt_tokens_details": [1], "completion_tokens_details": "x"},
            (read, wrote, 0),
        ),
        "a list": ([read, wrote], UNPRICED),
        "nested": ({**counted, "cost": nested(900)}, (read, wrote, 0)),
    }


def nested(depth):
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def of_responses(usage):
    """The same in the words of /v1/responses."""
    if not isinstance(usage, dict):
        return usage
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    names["prompt_tokens_details"] = "input_tokens_details"
    names["completion_tokens_details"] = "output_tokens_details"
    return {names.get(name, name): value for name, value in usage.items()}


def whole(asked, usage="counted", text="yes", **fields):
    """An answer in one piece, as JSON holds it."""
    counts = usages(*asked.tokens)[usage][0] if isinstance(usage, str) else usage
    if asked.path == RESPONSES:
        content = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        answer = {"id": asked.name, "object": "response", "created_at": 1, "model": "m"}
        answer |= {"status": "completed", "error": None, "output": [{**item, "content": [content]}]}
        answer |= {"usage": of_responses(counts)}
    else:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        answer = {"id": asked.name, "object": "chat.completion", "created": 1, "model": "m"}
        answer |= {"choices": [choice], "usage": counts}
    return {**answer, **fields}


def of_chat(asked, delta, finish=None, **fields):
    """An event of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    first = {"id": asked.name, "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**first, "choices": [choice], **fields})


def of_response(kind, **fields):
    """An event of an answer to /v1/responses."""
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


class Parts(NamedTuple):
    """The events of a stream."""

    begin: bytes
    word: bytes
    stop: bytes
    counts: bytes
    last: bytes

    @property
    def all(self):
        return [part for part in self if part]


def parts(asked, usage="counted", text="yes", **fields):
    counts = usages(*asked.tokens)[usage][0] if isinstance(usage, str) else usage
    if asked.path == RESPONSES:
        answer = whole(asked, counts, text, **fields)
        begin = of_response(
            "response.created", response={"id": answer["id"], "status": "in_progress"}
        )
        word = of_response("response.output_text.delta", delta=text, item_id="msg_1")
        stop = of_response("response.completed", response=answer)
        return Parts(begin, word, stop, b"", b"")
    begin = of_chat(asked, {"role": "assistant", "content": ""}, **fields)
    word = of_chat(asked, {"content": text}, **fields)
    stop = of_chat(asked, {}, "stop", **fields)
    last = (
        b""
        if counts is None
        else event({"id": asked.name, "choices": [], "usage": counts, **fields})
    )
    return Parts(begin, word, stop, last, DONE)


EVENTS = {"kind": "text/event-stream"}


def good(asked, usage="counted", tokens=None, name=None, about=None, **fields):
    """An answer, streamed if it was asked for so, with the tokens by which it is priced."""
    if tokens is None:
        tokens = usages(*asked.tokens)[usage][1]
    name = asked.name if name is None else name
    about = about or {}
    if asked.streams:
        return Reply(chunked(parts(asked, usage, **fields).all, **EVENTS | about), tokens, name)
    return Reply(sized(dumped(whole(asked, usage, **fields)), **about), tokens, name)


def stream(asked, events, tokens=None, **about):
    """A stream, also if none was asked for."""
    tokens = (*asked.tokens, 0) if tokens is None else tokens
    return Reply(chunked(events, **EVENTS | about), tokens, asked.name)


def fault(content, **about):
    return Reply(sized(dumped(content), **about), FAULT)

"""Odd answers of an endpoint, with what each one is, and a server that gives them.

Each is drawn from a table, and says itself whether it is an answer and what tokens it may be priced
by, so that the log of `knobwise serve` can be held against what was sent.
"""

import asyncio
import gzip
import json
import random
import re
import threading
import zlib
from collections import Counter, defaultdict
from typing import Any, NamedTuple

FAULT = "fault"
"""Of what is no answer."""
LEFT = "left"
"""Of what breaks off, so that the client sees that too."""
TEXT = "no text"
"""Of an answer whose text is none, which only passes as it is."""
UNPRICED = "unpriced"
"""Of an answer whose tokens nobody knows."""
CUT = None
"""A piece of content at which the connection breaks."""
NAN = float("nan")
NUMBER = re.compile(r"What is (\d+) \+ 0")
RESPONSES = "/responses"


class Asked(NamedTuple):
    """A request as the endpoint got it."""

    path: str
    body: dict[str, Any]
    number: int
    turn: int
    """How many times it was asked for before."""

    @property
    def streams(self):
        return bool(self.body.get("stream"))

    @property
    def tokens(self):
        """How many tokens it reads and writes."""
        return 10 + self.number % 90, 1 + self.number % 30

    @property
    def name(self):
        """The id of its answer."""
        return f"answer-{self.number}-{self.turn}"


class Sent(NamedTuple):
    """What was sent, and what it is.

    `tokens` is FAULT, LEFT, TEXT, UNPRICED, or how many tokens were read, were written, and were
    cached.
    """

    kind: str
    model: str
    path: str
    tokens: object
    name: object
    """The id of the answer, if it has one of its own."""
    counted: tuple[int, int, int]
    """The tokens of every answer to this request, if they are counted rightly."""


class Reply(NamedTuple):
    """The bytes of an answer: pieces, waits in s between them, or CUT."""

    pieces: list[Any]
    tokens: object
    name: object = ""
    closes: bool = False


def head(status=200, kind="application/json", headers=(), reason="OK"):
    """The beginning of an answer."""
    first = f"HTTP/1.1 {status:03d} {reason}\r\n".encode("latin-1")
    pairs = [("content-type", kind), *headers] if kind else [*headers]
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in pairs]
    return first + b"".join(lines)


def sized(content, size=None, **about):
    """An answer with its length."""
    length = len(content) if size is None else size
    return [head(**about) + f"content-length: {length}\r\n\r\n".encode() + content]


def chunked(parts, **about):
    """An answer in chunks."""
    pieces = [head(**about) + b"transfer-encoding: chunked\r\n\r\n"]
    for part in parts:
        if isinstance(part, bytes):
            pieces.append(b"%x\r\n%s\r\n" % (len(part), part))
        else:
            pieces.append(part)
    return pieces if CUT in pieces else [*pieces, b"0\r\n\r\n"]


def dumped(content):
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def event(content):
    return b"data: " + dumped(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


# -- tokens ----------------------------------------------------------------------------------------


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


# -- answers ---------------------------------------------------------------------------------------


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


ERROR = {"error": {"message": "overloaded", "type": "server_error", "code": 503}}


def status(code, **about):
    return lambda asked: fault(ERROR, status=code, **about)


def about_model(code, kind="invalid_request_error"):
    error = {"error": {"message": "no", "type": kind, "code": code}}
    return lambda asked: fault(error, status=400, reason="Bad Request")


def with_head(*pairs, **about):
    """An answer with further headers."""
    return lambda asked: good(asked, about={"headers": pairs, **about})


def one_by_one(content):
    return [content[i : i + 1] for i in range(len(content))]


def compressed(asked, coding, pack):
    about = {"headers": [("content-encoding", coding)]}
    tokens = (*asked.tokens, 0)
    if asked.streams:
        content = pack(b"".join(parts(asked).all))
        return Reply(chunked([content[:20], content[20:]], **EVENTS | about), tokens, asked.name)
    return Reply(sized(pack(dumped(whole(asked))), **about), tokens, asked.name)


def raw_deflate(content):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


def with_length(difference):
    """The length in the header is wrong by so much."""

    def make(asked):
        content = dumped(whole(asked))
        if difference > 0:
            pieces = [*sized(content, len(content) + difference), CUT]
            return Reply(pieces, FAULT)
        # what is too much belongs to nothing
        return Reply(sized(content, len(content) + difference), FAULT, closes=True)

    return make


def twice_the_length(difference):
    def make(asked):
        content = dumped(whole(asked))
        second = [("content-length", len(content) + difference)]
        return Reply(sized(content, headers=second), FAULT)

    return make


def ended_by_closing(asked):
    content = dumped(whole(asked))
    return Reply([head() + b"\r\n" + content], (*asked.tokens, 0), asked.name, closes=True)


def in_single_bytes(asked):
    if asked.streams:
        return stream(asked, one_by_one(b"".join(parts(asked).all)))
    return Reply(chunked(one_by_one(dumped(whole(asked)))), (*asked.tokens, 0), asked.name)


def slow(asked):
    if not asked.streams:
        content = dumped(whole(asked))
        return Reply(
            [head(), 0.2, *sized(content)[0][len(head()) :].partition(b"{")],
            (*asked.tokens, 0),
            asked.name,
        )
    begin, *others = parts(asked).all
    return stream(asked, [COMMENT, begin, 0.3, *others])


def with_usage(name):
    return lambda asked: good(asked, name)


def with_name(value):
    """An id that is none, or that repeats."""
    return lambda asked: good(asked, name=value if isinstance(value, str) else "", id=value)


def cut_after(count):
    def make(asked):
        return stream(asked, [*parts(asked).all[:count], CUT], FAULT if count < 2 else LEFT)

    return make


def usage_early(asked):
    counts = usages(*asked.tokens)["counted"][0]
    begin, word, stop, _, last = parts(asked)
    if asked.path == RESPONSES:
        return stream(asked, parts(asked).all)
    return stream(
        asked,
        [
            begin,
            event({"choices": [], "usage": counts}),
            word,
            event({"choices": [], "usage": None}),
            stop,
            last,
        ],
    )


def usage_in_all(asked):
    if asked.path == RESPONSES:
        return stream(asked, parts(asked).all)
    read, wrote = asked.tokens
    counts = [
        {"prompt_tokens": read, "completion_tokens": k, "total_tokens": read + k}
        for k in (0, 1, wrote)
    ]
    events = [
        of_chat(asked, {"role": "assistant", "content": ""}, usage=counts[0]),
        of_chat(asked, {"content": "yes"}, usage=counts[1]),
        of_chat(asked, {}, "stop", usage=counts[2]),
        DONE,
    ]
    return stream(asked, events)


def long_event(asked):
    begin, _, stop, counts, last = parts(asked)
    word = parts(asked, text="word " * 400_000).word
    content = b"".join([begin, word, stop, counts, last])
    return stream(asked, [content[i : i + 50_000] for i in range(0, len(content), 50_000)])


def in_one_event(asked):
    """A long event that holds everything."""
    if asked.path == RESPONSES:
        return stream(asked, parts(asked, text="word " * 100_000).all)
    counts = usages(*asked.tokens)["counted"][0]
    text = "word " * 100_000
    return stream(asked, [of_chat(asked, {"content": text}, "stop", usage=counts), DONE])


def changed(change, tokens=None):
    """A stream whose events are changed."""
    return lambda asked: stream(asked, change(parts(asked)), tokens)


def without_lines(events):
    return [b"".join(events.all).replace(b"\n", b"\r\n")]


def no_reason(asked):
    begin, word, *_ = parts(asked)
    return stream(asked, [begin, word, DONE], FAULT)


def no_end(asked):
    """Without a last event."""
    begin, word, stop, counts, _ = parts(asked)
    return stream(asked, [part for part in (begin, word, stop, counts) if part])


def no_empty_line(asked):
    begin, word, stop, counts, _ = parts(asked)
    return stream(
        asked,
        [begin, word, stop + counts.rstrip(b"\n")] if counts else [begin, word, stop.rstrip(b"\n")],
    )


def error_in_stream(*places):
    def make(asked):
        events = parts(asked).all
        error = (
            event(ERROR) if asked.path != RESPONSES else event({"type": "error", "message": "no"})
        )
        return stream(asked, [events[place] if place >= 0 else error for place in places], FAULT)

    return make


def finish_error(asked):
    begin, word, *_ = parts(asked)
    if asked.path == RESPONSES:
        end = of_response("response.failed", response={"id": asked.name, "status": "failed"})
    else:
        end = of_chat(asked, {}, "error")
    return stream(asked, [begin, word, end, DONE], FAULT)


def odd_lines(asked):
    events = [
        COMMENT,
        b"id: 7\nretry: 10\n\n",
        b"data: not json\n\n",
        b"data: [1, 2]\n\n",
        b"data\n\n",
    ]
    return stream(asked, [*events, *parts(asked).all])


def odd_events(asked):
    """Some events hold nothing that the protocol knows."""
    odd = [
        {"choices": None},
        {"choices": [3]},
        {"choices": [{"delta": None}]},
        {"type": 5},
        {"usage": 3},
    ]
    begin, *others = parts(asked).all
    return stream(asked, [begin, *map(event, odd), *others])


def stray_data(asked):
    """Numbers that JSON has not, and brackets without end, beside a whole answer."""
    events = parts(asked).all
    strange = [event({"choices": [], "x": NAN}), b"data: " + b"[" * 50_000 + b"\n\n"]
    return stream(asked, [events[0], *strange, *events[1:]])


def thoughts_alone(asked):
    if asked.path == RESPONSES:
        return good(asked)
    begin, _, stop, counts, last = parts(asked)
    return stream(asked, [begin, of_chat(asked, {"reasoning_content": "hm"}), stop, counts, last])


def two_choices(asked):
    if asked.path == RESPONSES:
        return good(asked)
    begin, word, stop, counts, last = parts(asked)
    second = {"index": 1, "delta": {"content": "no"}, "finish_reason": None}
    end = {"index": 1, "delta": {}, "finish_reason": "length"}
    others = [event({"id": asked.name, "choices": [choice]}) for choice in (second, end)]
    return stream(asked, [begin, word, others[0], stop, others[1], counts, last])


def odd_choices(asked, choices):
    if asked.path == RESPONSES:
        return fault(whole(asked, output=None))
    return fault(whole(asked, choices=choices))


def refused_whole(asked):
    content = whole(asked)
    if asked.path == RESPONSES:
        return fault({**content, "status": "failed"})
    return fault({**content, "choices": [{"index": 0, "message": {}, "finish_reason": "error"}]})


def no_finish(asked):
    """An answer in one piece whose finish_reason is null."""
    content = whole(asked)
    if asked.path != RESPONSES:
        content["choices"][0]["finish_reason"] = None
    return Reply(sized(dumped(content)), (*asked.tokens, 0), asked.name)


def silent(asked):
    return Reply([20.0, CUT], FAULT)


def no_route(asked):
    """The endpoint lacks /v1/responses."""
    if asked.path != RESPONSES:
        return good(asked)
    return fault({"detail": "Not Found"}, status=404, reason="Not Found")


def deep(depth):
    """An answer with brackets so deep, which are whole."""
    return lambda asked: good(asked, own=nested(depth))


def deep_text(asked):
    """Brackets where a text belongs."""
    # no other protocol's text can be made of it
    content = dumped(whole(asked, text="@")).replace(b'"@"', b"[" * 1_000 + b"]" * 1_000)
    return Reply(sized(content), TEXT, asked.name)


PLAIN = {
    "good": good,
    **{f"usage: {name}": with_usage(name) for name in usages(1, 1) if name != "counted"},
    "error with status 200": lambda asked: fault(ERROR),
    "error as a text": lambda asked: fault({"error": "overloaded"}),
    "error: null": lambda asked: good(asked, error=None),
    "no choices": lambda asked: odd_choices(asked, []),
    "choices: null": lambda asked: odd_choices(asked, None),
    "choices of numbers": lambda asked: odd_choices(asked, [1]),
    "failed within": refused_whole,
    "no finish_reason": no_finish,
    "204": lambda asked: Reply([head(204, "", reason="No Content") + b"\r\n"], FAULT),
    "204 with a length": lambda asked: Reply(
        [head(204, "", reason="No Content") + b"content-length: 0\r\n\r\n"], FAULT
    ),
    "304": lambda asked: Reply(
        [head(304, "", reason="Not Modified") + b"content-length: 7\r\n\r\n"], FAULT
    ),
    "302": status(302, headers=[("location", "/elsewhere")]),
    "HTML": lambda asked: fault(b"<html>hello</html>", kind="text/html"),
    "a text": lambda asked: fault(b"ok", kind="text/plain"),
    "nothing": lambda asked: fault(b""),
    "a list": lambda asked: fault([1]),
    "null": lambda asked: fault(b"null"),
    "no content-type": lambda asked: Reply(
        sized(dumped(whole(asked)), kind=""), (*asked.tokens, 0), asked.name
    ),
    "gzip": lambda asked: compressed(asked, "gzip", gzip.compress),
    "deflate": lambda asked: compressed(asked, "deflate", zlib.compress),
    "raw deflate": lambda asked: compressed(asked, "deflate", raw_deflate),
    "identity": lambda asked: compressed(asked, "identity", bytes),
    "no gzip": lambda asked: fault(b"not packed", headers=[("content-encoding", "gzip")]),
    "half a gzip": lambda asked: fault(
        gzip.compress(dumped(whole(asked)))[:30], headers=[("content-encoding", "gzip")]
    ),
    "br": lambda asked: fault(b"not packed", headers=[("content-encoding", "br")]),
    "an unknown coding": lambda asked: fault(b"\x01\x02", headers=[("content-encoding", "x-own")]),
    "brackets without end": lambda asked: fault(b"[" * 100_000),
    "deep brackets": lambda asked: fault(b"[" * 1_500 + b"]" * 1_500),
    "deep within": deep(700),
    "deep where a text belongs": deep_text,
    "NaN": lambda asked: good(asked, own=NAN),
    "half a character": lambda asked: good(asked, own="\ud800"),
    "500": status(500),
    "502 in HTML": lambda asked: fault(b"<html>", status=502, kind="text/html"),
    "503, come again at NaN": status(503, headers=[("retry-after", "NaN")]),
    "503, come again before": status(503, headers=[("retry-after", "-5")]),
    "429, come again never": status(
        429, headers=[("retry-after", "inf"), ("retry-after-ms", "1e400")]
    ),
    "429, come again twice": status(429, headers=[("retry-after", "1"), ("retry-after", "Friday")]),
    "408": status(408),
    "400 about the request": about_model("invalid_value"),
    "400 of a long prompt": about_model("context_length_exceeded"),
    "400 of a value": about_model("unsupported_value"),
    "400 of a model": about_model(None, "model_not_found"),
    "400 with odd codes": about_model(["x"], {"y": 1}),
    "401": status(401),
    "413 without content": lambda asked: fault(b"", status=413),
    "status 600": status(600),
    "status 999": status(999),
    "status 101": lambda asked: Reply(
        [head(101, "", [("connection", "upgrade"), ("upgrade", "x")]) + b"\r\n"], FAULT, closes=True
    ),
    "status 099": lambda asked: Reply(sized(b"{}", status=99), FAULT, closes=True),
    "103 before": lambda asked: Reply(
        [b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n", *good(asked).pieces],
        (*asked.tokens, 0),
        asked.name,
    ),
    "too long a length": with_length(5),
    "too short a length": with_length(-5),
    "the length twice": twice_the_length(0),
    "two lengths": twice_the_length(3),
    "ended by closing": ended_by_closing,
    "single bytes": in_single_bytes,
    "slow": slow,
    "silent": silent,
    "headers twice": with_head(
        ("x-own", "a"), ("x-own", "b"), ("set-cookie", "a=1"), ("set-cookie", "b=2")
    ),
    "headers of knobwise": with_head(
        ("x-knobwise-request-id", "inner"), ("x-knobwise-knobs", "{}"), ("X-Knobwise-Attempts", "9")
    ),
    "a header with odd bytes": with_head(("x-own", "a\x0b\x0cb\x7f\xe9")),
    "an empty header": with_head(("x-own", "")),
    "a header folded": with_head(("x-own", "a\r\n b")),
    "a header's odd name": lambda asked: fault(whole(asked), headers=[("x(own)", "a")]),
    "a long header": with_head(("x-own", "a" * 7_000)),
    "too long a header": lambda asked: fault(whole(asked), headers=[("x-own", "a" * 20_000)]),
    "many headers": with_head(*((f"x-own-{k}", "a") for k in range(60))),
    "a date, a server": with_head(
        ("date", "today"), ("server", "own"), ("connection", "keep-alive, x-own")
    ),
    "a cookie that is none": with_head(("set-cookie", 'a="\\b"; =; \x01')),
    "no HTTP at all": lambda asked: Reply([b"nonsense\r\n\r\n", CUT], FAULT),
    "closed at once": lambda asked: Reply([CUT], FAULT),
    "cut in the head": lambda asked: Reply([head(), CUT], FAULT),
    "id repeats": with_name("answer-again"),
    "id: 7": with_name(7),
    "id: null": with_name(None),
    "id: list": with_name(["x"]),
    "id of half a character": with_name("\udfff"),
    "tier: odd": lambda asked: good(asked, tokens=UNPRICED, service_tier="golden"),
    "tier: default": lambda asked: good(asked, service_tier="default"),
    "tier: list": lambda asked: good(asked, service_tier=["x"]),
    "no route": no_route,
    "events, though none were asked for": lambda asked: stream(asked, parts(asked).all),
}
STREAMED = {
    "stream": good,
    "JSON, though events were asked for": lambda asked: Reply(
        sized(dumped(whole(asked))), (*asked.tokens, 0), asked.name
    ),
    "error first": error_in_stream(-1, -1),
    "error, then an answer": error_in_stream(-1, 0, 1, 2),
    "error after the role": error_in_stream(0, -1),
    "error in the middle": error_in_stream(0, 1, -1, 2),
    "error at the end": finish_error,
    "comments alone": lambda asked: stream(asked, [COMMENT] * 3, FAULT),
    "comments and a role": lambda asked: stream(
        asked, [COMMENT, parts(asked).begin, COMMENT], FAULT
    ),
    "a role, then the end": lambda asked: stream(asked, [parts(asked).begin, DONE], FAULT),
    "no events": lambda asked: stream(asked, [], FAULT),
    "cut at once": cut_after(0),
    "cut after the role": cut_after(1),
    "cut after a word": cut_after(2),
    "the end without a reason": no_reason,
    "no last event": no_end,
    "no empty line": no_empty_line,
    "CRLF": changed(without_lines),
    "no blank after the colon": changed(
        lambda events: [part.replace(b"data: ", b"data:") for part in events.all]
    ),
    "an event in two": changed(
        lambda events: [b"".join(events.all)[:30], 0.02, b"".join(events.all)[30:]]
    ),
    "single bytes streamed": in_single_bytes,
    "slow stream": slow,
    "usage early": usage_early,
    "usage in all events": usage_in_all,
    "a very long event": long_event,
    "all in one event": in_one_event,
    "odd lines": odd_lines,
    "odd events": odd_events,
    "stray data": stray_data,
    "thoughts alone": thoughts_alone,
    "two choices": two_choices,
    "content-type in capitals": lambda asked: stream(
        asked, parts(asked).all, kind="Text/Event-Stream; charset=utf-8"
    ),
    "stream in gzip": lambda asked: compressed(asked, "gzip", gzip.compress),
    "stream with status 500": lambda asked: Reply(
        chunked(parts(asked).all, status=500, **EVENTS), FAULT
    ),
    "stream with status 201": lambda asked: stream(asked, parts(asked).all, status=201),
    **{f"usage in a stream: {name}": with_usage(name) for name in usages(1, 1)},
    "stream, id repeats": with_name("answer-again"),
    "stream, id: 7": with_name(7),
    "stream without a route": no_route,
}
HARMLESS = 0.4
"""The share of good answers."""


class HostileEndpoint:
    """Answers by drawing from the tables; use it as a context.

    Attributes:
        sent: by the number of a request, what it got.
        kinds: how often each kind was drawn.
        others: requests to other routes.
    """

    def __init__(self, seed=0, only=None, harmless=HARMLESS):
        self.sent: dict[int, list[Sent]] = defaultdict(list)
        self.kinds: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._only = only
        self._harmless = harmless

    def __enter__(self):
        began = threading.Event()

        async def serve():
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            began.set()
            await self._ended.wait()
            server.close()

        # which cancels at its end what is still under way
        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self._thread.start()
        began.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _serve(self, reader, writer):
        try:
            while await self._answered(reader, writer):
                pass
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            # it is asked by processes that are killed
            pass
        finally:
            writer.close()

    async def _answered(self, reader, writer):
        """Answer a request; False where the connection ends."""
        text = await reader.readuntil(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").rstrip().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1].partition("?")[0].removeprefix("/v1")
        reply = self._reply(path, content)
        for piece in reply.pieces:
            if piece is CUT:
                return False
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()
        return not reply.closes

    def _reply(self, path, content):
        body = json.loads(content) if content[:1] == b"{" else {}
        match = NUMBER.search(json.dumps(body.get("messages") or body.get("input") or ""))
        if match is None or path not in ("/chat/completions", RESPONSES):
            self.others[path] += 1
            return self._other(path)
        number = int(match[1])
        asked = Asked(path, body, number, len(self.sent[number]))
        kinds = STREAMED if asked.streams else PLAIN
        if self._only is not None:
            kind = self._only(asked)
        elif self._draw.random() < self._harmless:
            kind = next(iter(kinds))
        else:
            kind = self._draw.choice([*kinds])
        reply = kinds[kind](asked)
        self.kinds[kind] += 1
        self.sent[number].append(
            Sent(kind, body.get("model"), path, reply.tokens, reply.name, (*asked.tokens, 0))
        )
        return reply

    def _other(self, path):
        """Answers on other routes are odd too."""
        if self._draw.random() < self._harmless:
            return Reply(sized(dumped({"object": "list", "data": [{"id": "m"}]})), UNPRICED)
        replies = [
            sized(dumped({"object": "list", "data": [{"id": "m"}]})),
            sized(dumped({"object": "list", "data": [{"id": "m", "x": NAN}]})),
            sized(dumped({"object": "list", "data": [{"id": "\ud800"}]})),
            sized(dumped({"object": "list", "data": [{"id": nested(900)}]})),
            sized(dumped({"data": None})),
            sized(b"[" * 2_000),
            sized(b"", status=404),
            sized(b"{}", status=600),
            sized(b"{}", status=99),
            [head(204, "") + b"\r\n"],
            [*chunked([b"{}", CUT])],
            chunked(one_by_one(b'{"data": []}')),
            sized(gzip.compress(b'{"data": []}'), headers=[("content-encoding", "gzip")]),
            sized(b"{}", headers=[("x-own", "a\x0bb")]),
            [CUT],
        ]
        return Reply(self._draw.choice(replies), UNPRICED)

"""Odd answers of an endpoint, with what each one is.

Each says itself whether it is an answer and what tokens it may be priced by, so that the log of
`knobwise serve` can be held against what was sent.
"""

import gzip
import zlib

from campaign.hostile.answers import (
    EVENTS,
    fault,
    good,
    nested,
    of_chat,
    of_response,
    parts,
    stream,
    usages,
    whole,
)
from campaign.hostile.wire import (
    COMMENT,
    CUT,
    DONE,
    FAULT,
    LEFT,
    NAN,
    RESPONSES,
    TEXT,
    UNPRICED,
    Reply,
    chunked,
    dumped,
    event,
    head,
    one_by_one,
    sized,
)

ERROR = {"error": {"message": "overloaded", "type": "server_error", "code": 503}}


def status(code, **about):
    return lambda asked: fault(ERROR, status=code, **about)


def about_model(code, kind="invalid_request_error"):
    error = {"error": {"message": "no", "type": kind, "code": code}}
    return lambda asked: fault(error, status=400, reason="Bad Request")


def with_head(*pairs, **about):
    """An answer with further headers."""
    return lambda asked: good(asked, about={"headers": pairs, **about})


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

"""What the endpoint is asked and what it sends, down to the bytes of an answer."""

import json
import re
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


def one_by_one(content):
    """The bytes of a piece, each as a piece of its own."""
    return [content[i : i + 1] for i in range(len(content))]

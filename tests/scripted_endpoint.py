"""An endpoint on this machine that answers as a test says."""

import json
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import polars as pl

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
HEAD = {"id": "chatcmpl-7", "created": 1, "model": "m"}


def write_questions():
    """Write six questions in q.jsonl, which `profile_words` reads."""
    rows = [{"id": f"q{i}", "question": f"Is it {i}?", "answer": str(i)} for i in range(6)]
    pl.DataFrame(rows).write_ndjson("q.jsonl")


def profile_words(server, values, out="out", **options):
    """The words that measure a server by one request at a time, without a warm-up."""
    options = {"model": "openai", "endpoint": server.url, "data": "q.jsonl", **options}
    options = {"knobs.warm_up": 0, "concurrency": 1, **options}
    return [
        "profile",
        f"knobs.values={values}",
        f"out={out}",
        *(f"{k}={v}" for k, v in options.items()),
    ]


def event(content):
    """An event of a stream."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(delta, finish=None, **fields):
    """An event of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({**HEAD, "object": "chat.completion.chunk", "choices": [choice], **fields})


def chat(text="yes", **fields):
    """A whole answer to a chat."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE, **fields}


ROLE = chunk({"role": "assistant", "content": ""})
WORD = chunk({"content": "yes"})
STOP = chunk({}, "stop")
DONE = b"data: [DONE]\n\n"


class Reply:
    """An answer: a status, headers, and content; or the chunks of a stream.

    A chunk that is a float is a wait in s; None breaks the connection, also as all there is; a text
    is sent without the framing of chunks.
    """

    def __init__(self, content=b"", status=200, kind="application/json", **headers):
        self.status = status
        self.is_stream = isinstance(content, list) or hasattr(content, "__next__")
        if self.is_stream:
            kind = "text/event-stream"
        elif content is not None and not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.content = content
        self.headers = {"content-type": kind}
        self.headers |= {name.replace("_", "-"): value for name, value in headers.items()}


class ScriptedEndpoint:
    """Answers with `answer(path, body)`, a `Reply`, which a test sets; use it as a context.

    Attributes:
        asked: path, headers and body of the last requests.
    """

    def __init__(self):
        self.answer = lambda path, body: Reply(chat())
        self.asked = deque(maxlen=1000)
        self.pause = threading.Event()
        endpoint = self

        class Handler(_Handler):
            server_state = endpoint

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()


class Broken(Exception):
    """Raised by a script: the connection ends here."""


class Turned(Exception):
    """Raised by a script: a status and headers instead of an answer."""

    def __init__(self, status, headers=None, error=None):
        self.status, self.headers, self.error = status, headers or {}, error or {"message": "no"}


class ScriptedChats(ScriptedEndpoint):
    """Answers chats with streams.

    Args:
        script: takes the body of a request, and yields its answer: texts, the chunks of the
            stream, and at the end, if it does, a dictionary of further fields, such as `usage`
            (`USAGE` if there is none). It may raise `Broken` or `Turned`.
        models: what /v1/models says, as JSON holds it; None for status 404.

    Attributes:
        bodies: of the requests so far.
    """

    def __init__(self, script, models=None):
        super().__init__()
        self.script, self.models, self.bodies = script, models, []
        self.answer = self._answer

    def _answer(self, path, body):
        if path.endswith("/models"):
            if self.models is None:
                return Reply({"error": {"message": "no list"}}, 404)
            return Reply(json.dumps(self.models).encode())
        self.bodies.append(body)
        pieces = self.script(body)
        try:
            # what a script does before its first text comes before the head
            first = next(pieces)
        except Turned as turned:
            return Reply({"error": turned.error}, turned.status, **turned.headers)
        except Broken:
            return Reply(None)
        return Reply(_stream(body["model"], first, pieces))


def _stream(model, piece, pieces):
    """The events of the pieces of a script."""
    last = {"usage": USAGE}
    try:
        while not isinstance(piece, dict):
            yield chunk({"content": piece}, model=model)
            piece = next(pieces, {})
    except Broken:
        yield None
        return
    yield chunk({}, "stop", model=model)
    yield event({**HEAD, "model": model, "choices": [], **last, **piece})
    yield DONE


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Say nothing of clients that leave; else print what a script did wrong."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        """Say nothing."""

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            body = json.loads(content)
        except ValueError:
            body = content
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server_state.asked.append((self.path, headers, body))
        self._say(self.server_state.answer(self.path, body))

    do_POST = do_DELETE = do_GET

    def _say(self, reply):
        if reply.content is None:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if not reply.is_stream:
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in reply.content:
            if part is None:
                self.close_connection = True
                return
            if isinstance(part, float):
                self.server_state.pause.wait(part)
            elif isinstance(part, str):
                self.wfile.write(part.encode())
            else:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

"""A small server of chat completions on this machine that answers as a test scripts it."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


class Broken(Exception):
    """Raised by a script: the connection ends here."""


class Turned(Exception):
    """Raised by a script: a status and headers instead of an answer."""

    def __init__(self, status, headers=None, error=None):
        self.status, self.headers, self.error = status, headers or {}, error or {"message": "no"}


class ScriptedEndpoint:
    """A server; use it as a context.

    Args:
        script: takes the body of a request, and yields its answer: texts, the chunks of the
            stream, and at the end, if it does, a dictionary of further fields, such as `usage`
            (`USAGE` if there is none). It may raise `Broken` or `Turned`.
        models: what /v1/models says, as JSON holds it; None for status 404.

    Attributes:
        bodies: of the requests so far.
    """

    def __init__(self, script, models=None):
        self.script, self.models, self.bodies = script, models, []
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
        models = self.server_state.models
        self._say(404 if models is None else 200, models or {"error": {"message": "no list"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server_state.bodies.append(body)
        pieces = self.server_state.script(body)
        try:
            # what a script does before its first text comes before the head
            piece = next(pieces)
        except Turned as turned:
            return self._say(turned.status, {"error": turned.error}, turned.headers)
        except Broken:
            self.close_connection = True
            return None
        return self._stream(body, piece, pieces)

    def _stream(self, body, piece, pieces):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        last = {"usage": USAGE}
        try:
            while not isinstance(piece, dict):
                delta = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
                self._event({**head, "choices": [delta]})
                piece = next(pieces, {})
            last |= piece
        except Broken:
            self.close_connection = True
            return
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        self._event({**head, "choices": [end]})
        self._event({**head, "choices": [], **last})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _event(self, content):
        event = b"data: " + json.dumps(content).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _say(self, status, content, headers=None):
        text = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "content-length": str(len(text))}.items():
            self.send_header(name, value)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(text)

"""An endpoint that answers as each test says."""

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chunk(delta, finish=None, **fields):
    """An event of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**head, "choices": [choice], **fields})


def event(content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


ROLE = chunk({"role": "assistant", "content": ""})
WORD = chunk({"content": "yes"})
STOP = chunk({}, "stop")
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def chat(text="yes", **fields):
    """A whole answer to a chat."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "chatcmpl-7", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": USAGE, **fields}


class Reply:
    """An answer: a status, headers, and content, or the chunks of a stream.

    A chunk that is a number is a wait in s; None breaks the connection.
    """

    def __init__(self, content=b"", status=200, kind="application/json", **headers):
        self.content = (
            content if isinstance(content, bytes | list) else json.dumps(content).encode()
        )
        self.status = status
        if isinstance(content, list):
            kind = "text/event-stream"
        self.headers = {"content-type": kind}
        for name, value in headers.items():
            self.headers[name.replace("_", "-")] = value


class ScriptedEndpoint:
    """Answers with `answer(path, body)`, a `Reply`, which a test sets.

    Attributes:
        asked: path, headers and body of the last requests.
    """

    def __init__(self):
        outer = self
        self.answer = lambda path, body: Reply(chat())
        self.asked = deque(maxlen=1000)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                length = int(self.headers.get("content-length") or 0)
                content = self.rfile.read(length)
                try:
                    body = json.loads(content)
                except ValueError:
                    body = content
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.asked.append((self.path, headers, body))
                self._say(outer.answer(self.path, body))

            do_POST = do_DELETE = do_GET

            def _say(self, reply):
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if isinstance(reply.content, bytes):
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
                        outer.pause.wait(part)
                    else:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")

        self.pause = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

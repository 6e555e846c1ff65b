#!/bin/bash
# One would guess: a server behind LiteLLM's router that has no /v1/embeddings answers 404 to who asks
# for embeddings, and goes on being asked for chats, since a 404 says what the server does not have and
# not that it is down.
# It is: one such 404 puts the server into cooldown, for chats too, and with no other server of that
# name the next chats are refused without being sent (RouterRateLimitError, which LiteLLM's proxy turns
# into 429).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install litellm==1.108.5 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import asyncio
import importlib.metadata
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

asked = []


class ChatAlone(BaseHTTPRequestHandler):
    """A server of chats that has no other route."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        asked.append(self.path)
        if self.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": "hello"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.answer(200, {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]})
        else:
            self.answer(404, {"error": {"message": "Not Found", "code": 404}})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), ChatAlone)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
parameters = {"model": "openai/m", "api_base": address, "api_key": "none"}
router = litellm.Router(model_list=[{"model_name": "m", "litellm_params": parameters}], num_retries=0)


async def outcome(answer):
    try:
        await answer
        return "answered"
    except Exception as error:
        return type(error).__name__


async def main():
    def chat():
        return router.acompletion("m", messages=[{"role": "user", "content": "Hello"}])

    return [
        await outcome(chat()),
        await outcome(router.aembedding("m", input=["Hello"])),
        await outcome(chat()),
    ]


before, embeddings, after = asyncio.run(main())
print("litellm", importlib.metadata.version("litellm"))
print("chat:", before, "| embeddings:", embeddings, "| chat:", after)
print("the server was asked for", asked)
right = (before, embeddings, after) == ("answered", "NotFoundError", "RouterRateLimitError")
sys.exit(not (right and asked == ["/v1/chat/completions", "/v1/embeddings"]))
P
"$folder/venv/bin/python" run.py 2>/dev/null

#!/bin/bash
# One would guess: where a server's stream of a chat ends before any chunk had a `finish_reason` (the
# model's process was stopped, say), LiteLLM raises, or hands the chunks on as they came, so that the
# caller sees that the answer is not whole.
# It is: LiteLLM adds a last chunk with `finish_reason` "stop", as if the model had ended its answer.
# Whoever logs accuracy and time of answers behind it takes half an answer for a whole one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install litellm==1.108.5 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
import openai


class Stopped(BaseHTTPRequestHandler):
    """Sends two pieces of an answer, and no end."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for piece in ("The answer", " is"):
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            chunk = {"id": "1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Stopped)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
question = {"messages": [{"role": "user", "content": "How many?"}], "stream": True}


def read(chunks):
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


client = openai.OpenAI(base_url=address, api_key="none")
straight = read(client.chat.completions.create(model="m", **question))
through = read(litellm.completion("openai/m", api_base=address, api_key="none", **question))
print("litellm", importlib.metadata.version("litellm"), "| openai", openai.__version__)
print("openai's client:", straight)
print("litellm:", through)
sys.exit(not (straight == ("The answer is", None) and through == ("The answer is", "stop")))
P
"$folder/venv/bin/python" run.py 2>/dev/null

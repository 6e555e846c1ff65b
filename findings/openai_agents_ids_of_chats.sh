#!/bin/bash
# One would guess: in a result of OpenAI's Agents SDK over chats (OpenAIChatCompletionsModel), as over
# responses, `raw_responses[i].response_id`, `last_response_id` or the id of the message tells which
# answer of the server it was, so that a label given later finds its request.
# It is: both are None, and every message of every run has the id `__fake_id__`; the server's id is in
# `provider_data` of the message alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install openai-agents==0.24.0 openai==3.57.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

numbers = count(1)


class Chats(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "hello"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = {"id": f"chat-{next(numbers)}", "object": "chat.completion", "created": 1, "model": "m"}
        data = json.dumps(body | {"choices": choices}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Chats)
threading.Thread(target=server.serve_forever, daemon=True).start()
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
agent = Agent(name="one", model=OpenAIChatCompletionsModel("m", client))
print("openai-agents", importlib.metadata.version("openai-agents"))
right = True
for number in (1, 2):
    result = Runner.run_sync(agent, "Hello")
    message = result.new_items[0].raw_item
    ids = result.raw_responses[0].response_id, result.last_response_id, message.id
    print("response_id, last_response_id, message:", ids, "| provider_data:", message.provider_data)
    right &= ids == (None, None, "__fake_id__") and message.provider_data["response_id"] == f"chat-{number}"
sys.exit(not right)
P
"$folder/venv/bin/python" run.py 2>/dev/null

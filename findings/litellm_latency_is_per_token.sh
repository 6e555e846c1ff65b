#!/bin/bash
# One would guess: routing_strategy="latency-based-routing" of LiteLLM's router sends requests to the
# deployment whose answers take the least time.
# It is: where answers are not streamed, the time is divided by the tokens of the answer. A deployment
# that answers in .3 s, with 60 tokens (as one that thinks), is preferred to one that answers the same
# request in .05 s, with 2. Whoever waits for the whole answer waits six times as long.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install litellm==1.110.2 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

TAKES = {"quick": (0.05, 2), "slow": (0.3, 60)}  # seconds and tokens of an answer


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        seconds, tokens = TAKES[asked["model"]]
        time.sleep(seconds)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "a " * tokens},
            "finish_reason": "stop",
        }
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": asked["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens},
        }
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
deployments = [
    {
        "model_name": "any",
        "litellm_params": {"model": f"openai/{name}", "api_base": address, "api_key": "none"},
    }
    for name in TAKES
]
router = litellm.Router(model_list=deployments, routing_strategy="latency-based-routing")
messages = [{"role": "user", "content": "Hello"}]
answered = []
for _ in range(24):
    answered.append(router.completion("any", messages=messages).model.removeprefix("openai/"))
    time.sleep(0.1)  # what was learned is noted in the background
print("litellm", importlib.metadata.version("litellm"))
for name, (seconds, tokens) in TAKES.items():
    print(f"{name}: {seconds} s, {tokens} tokens, {1000 * seconds / tokens:.0f} ms a token")
late = Counter(answered[8:])
print("of the last 16 requests answered by:", dict(late))
sys.exit(late["slow"] != 16)
P
"$folder/venv/bin/python" run.py 2>/dev/null

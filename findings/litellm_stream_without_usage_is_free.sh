#!/bin/bash
# One would guess: LiteLLM logs the same tokens and cost for an answer that was streamed as for one that
# was not; where the server's stream says nothing of usage (no stream_options) it counts with a tokenizer.
# It is: such a stream is logged, and put together by `stream_chunk_builder`, with 0 tokens and at no
# cost, though `token_counter` has a tokenizer for the model. With include_usage the numbers are right.
# 1.110.2 counts again; what was logged before stays at 0.
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
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from litellm.integrations.custom_logger import CustomLogger

USAGE = {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"id": "1", "created": 1, "model": "gpt-4o-mini"}
        self.send_response(200)
        if not asked.get("stream"):
            self.send_header("content-type", "application/json")
            self.end_headers()
            message = {"role": "assistant", "content": "one two three"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"object": "chat.completion", "choices": [choice], "usage": USAGE}
            self.wfile.write(json.dumps(answer | whole).encode())
            return
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        deltas = [{"role": "assistant", "content": "one"}, {"content": " two"}, {"content": " three"}, {}]
        parts = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]}
            for delta in deltas
        ]
        if (asked.get("stream_options") or {}).get("include_usage"):
            parts.append({"choices": [], "usage": USAGE})
        for part in parts:
            part = answer | {"object": "chat.completion.chunk"} | part
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments):
        pass


class Log(CustomLogger):
    entries = queue.Queue()

    def log_success_event(self, kwargs, response_obj, start_time, end_time):
        entry = kwargs["standard_logging_object"]
        self.entries.put((entry["prompt_tokens"], entry["completion_tokens"], entry["response_cost"]))


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
messages = [{"role": "user", "content": "Hello"}]
litellm.callbacks = [Log()]
print("litellm", importlib.metadata.version("litellm"))
logged = []
for name, options in (
    ("not streamed", {}),
    ("streamed", {"stream": True}),
    ("streamed with include_usage", {"stream": True, "stream_options": {"include_usage": True}}),
):
    answer = litellm.completion(
        "openai/gpt-4o-mini", messages=messages, api_base=address, api_key="none", **options
    )
    built = litellm.stream_chunk_builder(list(answer), messages=messages) if options else answer
    logged.append(Log.entries.get(timeout=60))
    usage = (built.usage.prompt_tokens, built.usage.completion_tokens)
    print(f"{name}: tokens {usage}, logged {logged[-1][:2]} for {logged[-1][2]:.8f} $")
counted = litellm.token_counter("gpt-4o-mini", text="one two three")
print("token_counter of the answer:", counted)
paid, free, paid_again = logged
sys.exit(not (free == (0, 0, 0) and paid == paid_again and paid[2] > 0 and counted == 3))
P
"$folder/venv/bin/python" run.py 2>/dev/null

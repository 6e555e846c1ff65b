#!/bin/bash
# One would guess: two `dspy.LM` with another `api_base` are two models, so that DSPy's cache, which is on
# unless one says otherwise, keeps their answers apart; its documentation leaves only "credentials like
# api_key" out of the key.
# It is: the address is left out as well. Two servers that call their model by one name, as local ones do,
# share answers: `dspy.Evaluate` scores the second one by what the first one said, asks it nothing, and it
# seems to take milliseconds. The cache is a folder in the home folder, so a server that was exchanged under
# the same name is not asked later either. `cache=False`, or a name for each server, gives its own answers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install dspy==3.4.1 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["DSPY_CACHEDIR"] = os.path.abspath("cache")
import dspy


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests += 1
        time.sleep(0.2)
        content = f"[[ ## answer ## ]]\n{self.server.answer}\n\n[[ ## completed ## ]]"
        message = {"role": "assistant", "content": content}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": asked["model"]}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer["usage"] = {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class Timed(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict("question -> answer")

    def forward(self, question):
        start = time.perf_counter()
        prediction = self.predict(question=question)
        prediction.seconds = time.perf_counter() - start
        return prediction


def right(example, prediction):
    return float(example.answer == prediction.answer)


def evaluate(name, answer, **options):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.answer, server.requests = answer, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1"
    lm = dspy.LM("openai/local", api_base=address, api_key="none", **options)
    examples = [dspy.Example(question=f"What is {n} + {4 - n}?", answer="4") for n in range(4)]
    examples = [example.with_inputs("question") for example in examples]
    with dspy.context(lm=lm):
        result = dspy.Evaluate(devset=examples, metric=right, num_threads=1)(Timed())
    seconds = sorted(prediction.seconds for _, prediction, _ in result.results)[1]
    print(f"{name}: score {result.score}, requests {server.requests}, seconds {seconds:.3f}")
    return result.score, server.requests, seconds


print("dspy", importlib.metadata.version("dspy"))
first = evaluate("a server that is right", "4")
second = evaluate("a server that is wrong", "5")
alone = evaluate("the same with cache=False", "5", cache=False)
as_shown = first[:2] == (100.0, 4) and second[:2] == (100.0, 0) and alone[:2] == (0.0, 4)
sys.exit(not (as_shown and second[2] < 0.1 < first[2] and alone[2] > 0.1))
P
"$folder/venv/bin/python" run.py 2>/dev/null

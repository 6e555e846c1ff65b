"""`python -m campaign.server 60 0`: `knobwise serve` under load for 60 seconds, seed 0.

64 clients ask, every other one for a stream, and label, and one of 4 workers is killed every second or two. The budget of a
request holds its number, and its features and label follow from it, so the log shows what belongs
to what. The first worker is spared, so that its memory can be seen. At last the process that
replaces workers is killed, and the workers must end by themselves.
"""

import http.client
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers import arrays, small_table
from replayed import untrained

from campaign.children import kill, session
from campaign.load import memory_mb
from knobwise.agents.learning.logged import read_log
from knobwise.agents.learning.request_log import pack_floats
from knobwise.testbeds.simulated_endpoint import SimulatedEndpoint
from knobwise.testbeds.simulated_models import WRONG

SAMPLES = 60
BUDGETS_MS = (10, 25, 60)
STEP_MS = 1e-7
"""What a request's number adds to its budget."""
TORN = "the truncated last line of a file"
UNANSWERED = "without an answer"
BROKEN = "{", "[1]", '{"budget_ms": "soon"}', '{"budget_ms": 5}', '{"accuracy": 2, "id": "x"}'
"""Bodies that must be refused."""
WAIT_S = 60
"""A request, or a start, that takes longer has failed."""
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MESSAGES = """
def messages(question, knobs):
    return [{"role": "user", "content": question}]
"""
"""Knobs that are no field of a request go nowhere."""
GROWTH_MB = 4
"""What the memory of a worker may grow by after the first third of the time."""


def number_of(budget_ms):
    """The number of a request, from its budget."""
    return round(budget_ms % 1 / STEP_MS)


def label_of(number):
    """The accuracy of the answer to a request: no two have the same."""
    return number * 0.6180339887498949 % 1


def text_in(content, streamed):
    """The text of an answer; None if it is not whole."""
    if not streamed:
        return json.loads(content)["choices"][0]["message"]["content"]
    *events, last, _ = content.decode().split("\n\n")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content", "") for delta in deltas) if "[DONE]" in last else None


class Clients:
    """Threads that ask and label until a moment, and what they saw.

    Attributes:
        answered: id and knobs of the requests that were answered, by number.
        labelled: numbers of those whose label was taken.
        cut: how many connections broke, by error.
        wrong: answers that no server should give.
    """

    def __init__(self, port, table, until):
        self.port, self.table, self.until = port, table, until
        self.numbers = itertools.count(1)
        self.answered, self.labelled = {}, set()
        self.cut, self.refused, self.wrong = Counter(), Counter(), []

    def features_of(self, number):
        blocks = arrays(self.table, number % SAMPLES)
        return {name: block.tolist() for name, block in blocks.items()}

    def client(self, draw):
        """Ask and label until the moment has come."""
        unlabelled = []
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        while time.monotonic() < self.until:
            number = next(self.numbers)
            budget = draw.choice(BUDGETS_MS) + number * STEP_MS
            body = {"features": self.features_of(number), "budget_ms": budget, "model": "small"}
            body["messages"] = [{"role": "user", "content": f"What is {number} + 0?"}]
            body["stream"] = number % 2 == 0
            if answer := self._ask(connection, CHAT, json.dumps(body)):
                headers, content = answer
                knobs = json.loads(headers["x-knobwise-knobs"])
                self.answered[number] = headers["x-knobwise-request-id"], knobs
                unlabelled.append(number)
                if text_in(content, body["stream"]) not in (str(number), WRONG):
                    self.wrong.append(f"{number}: {content}")
            # labels come later, in another order; what was not taken is sent again
            if unlabelled and draw.random() < 0.8:
                number = unlabelled.pop(draw.randrange(len(unlabelled)))
                # sometimes another is sent before, which it replaces
                final = draw.random() < 0.8
                accuracy = label_of(number) if final else label_of(number) / 2
                label = {"id": self.answered[number][0], "accuracy": accuracy}
                taken = self._ask(connection, "/label", json.dumps(label)) is not None
                if taken and final:
                    self.labelled.add(number)
                else:
                    unlabelled.append(number)
            if draw.random() < 0.05:
                path = draw.choice(("/decide", CHAT, "/label"))
                self._ask(connection, path, draw.choice(BROKEN), 400)
            if draw.random() < 0.05:
                # the next request may go to another worker
                connection.close()
        connection.close()

    def _ask(self, connection, path, body, expected=200):
        """Return headers and content; None if the connection broke, or it is another status."""
        try:
            connection.request("POST", path, body, JSON)
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            self.cut[type(error).__name__] += 1
            connection.close()
            return None
        if response.status != expected:
            self.wrong.append(f"{path}: {response.status} {content[:200]!r}")
            return None
        self.refused[path] += expected != 200
        return response.headers, content

    def compared(self, rows):
        """Compare what clients saw with the rows of the log: faults, each with its count."""
        faults = Counter()
        by_number = defaultdict(list)
        for row in rows:
            by_number[number_of(row["budget_ms"])].append(row)
        faults["answered requests that are not in the log"] = len({*self.answered} - {*by_number})
        for number, same in by_number.items():
            faults["requests that are in the log twice"] += len(same) > 1
            for row in same:
                faults.update(self._faults(number, row))
        return +faults

    def _faults(self, number, row):
        """What is wrong with the row of a request, each with 1."""
        features = {name: pack_floats(block) for name, block in self.features_of(number).items()}
        answer = row["id"], row["knobs"]
        final = label_of(number)
        return {
            "rows with features of another request": row["features"] != features,
            "rows with another id or other knobs than the answer": (
                self.answered.get(number, answer) != answer
            ),
            "labels on another request": row["accuracy"] not in (None, final, final / 2),
            "labels that were taken and do not count": (
                number in self.labelled and row["accuracy"] != final
            ),
        }


class Server:
    """The server in processes of its own, whose workers are killed and watched.

    Args:
        words: of its command line, beside its controller, log, port and workers.

    Attributes:
        kills: how many workers were killed.
        memory: MB of the worker that is spared, four times a second.
    """

    def __init__(self, folder, workers, words):
        self.workers, self.kills, self.memory = workers, 0, []
        self.errors = folder / "errors.txt"
        words = f"checkpoint=controller.npz log=log port=0 workers={workers} {words}"
        command = [sys.executable, "-m", "knobwise", "serve", *words.split()]
        with self.errors.open("w") as errors:
            options = {"cwd": folder, "stderr": errors, "start_new_session": True}
            self.process = subprocess.Popen(command, **options)
        self.port = int(self._wait_for(self._address).partition("/v1")[0].rpartition(":")[2])
        self.spared = self._wait_for(lambda: len(self.living()) == workers and self.living()[0])

    def _address(self):
        lines = self.errors.read_text().splitlines()
        return next((line for line in lines if line.startswith("http://")), None)

    def _wait_for(self, what):
        last = time.monotonic() + WAIT_S
        while not (value := what()):
            if time.monotonic() > last or self.process.poll() is not None:
                raise RuntimeError(f"the server does not begin: {self.errors.read_text()}")
            time.sleep(0.05)
        return value

    def living(self):
        """Its workers, the eldest first."""
        return sorted(set(session(self.process.pid)) - {self.process.pid})

    def kill_at_random(self, until, seed):
        """Kill a worker every second or two until a moment."""
        draw = random.Random(seed)
        moment = time.monotonic()
        while (now := time.monotonic()) < until:
            if now >= moment:
                moment = now + draw.uniform(1, 2)
                if others := [worker for worker in self.living() if worker != self.spared]:
                    kill([draw.choice(others)])
                    self.kills += 1
            self.memory.append(round(memory_mb(self.spared), 1))
            time.sleep(0.25)

    def end(self):
        """Kill the process that replaces workers; return those that do not end by themselves."""
        kill([self.process.pid])
        self.process.wait()
        last = time.monotonic() + WAIT_S
        while (left := self.living()) and time.monotonic() < last:
            time.sleep(0.1)
        kill(left)
        return left


def load(folder, seconds=60, seed=0, workers=4, clients=64):
    """Serve, ask and kill in a folder. Return what was seen, by name, and the broken promises."""
    table = small_table(SAMPLES)
    controller = untrained(table).export(folder / "controller.npz")
    with SimulatedEndpoint() as endpoint:
        return _under_load(folder, endpoint.url, table, controller, seconds, seed, workers, clients)


def _under_load(folder, endpoint, table, controller, seconds, seed, workers, clients):
    (folder / "own.py").write_text(MESSAGES)
    words = f"endpoint={endpoint} budget_ms=60 explore=0.1 messages=own:messages"
    server = Server(folder, workers, words)
    try:
        until = time.monotonic() + seconds
        asking = Clients(server.port, table, until)
        draws = [random.Random(f"{seed} {client}") for client in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            ended = pool.map(asking.client, draws)
            server.kill_at_random(until, seed)
            list(ended)  # raises what a client raised
    finally:
        left = server.end()
    read = read_log(folder / "log", controller)
    faults = asking.compared(read.rows)
    faults["answers with another status or content"] = len(asking.wrong)
    faults["workers that outlive the server"] = len(left)
    faults["tracebacks"] = server.errors.read_text().count("Traceback")
    # a line that was being written when its worker was killed; a body that the endpoint refused
    allowed = {TORN: server.kills, UNANSWERED: asking.refused[CHAT]}
    for reason, count in read.aside.items():
        faults[f"log: {reason}"] = max(0, count - allowed.get(reason, 0))
    seen = {
        "requests answered": len(asking.answered),
        "labels taken": len(asking.labelled),
        "requests refused": asking.refused.total(),
        "connections broken": dict(asking.cut),
        "rows": len(read.rows),
        "torn lines": read.aside[TORN],
        "workers killed": server.kills,
        "memory of the spared worker, MB": server.memory[:: max(1, len(server.memory) // 6)],
    }
    idle = not (asking.answered and asking.labelled and server.kills)
    faults["nothing answered, labelled or killed"] = idle
    warm = server.memory[len(server.memory) // 3]
    faults["memory that grew"] = server.memory[-1] > warm + GROWTH_MB
    return seen, +faults, asking.wrong


def main(seconds="60", seed="0", workers="4", clients="64"):
    with tempfile.TemporaryDirectory() as folder:
        numbers = map(int, (seconds, seed, workers, clients))
        seen, faults, wrong = load(Path(folder), *numbers)
    for name, value in (seen | faults).items():
        print(f"{name}: {value}")
    for line in wrong[:10]:
        print(line)
    print(f"{faults.total()} not as promised")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))

"""`python -m campaign.hostile 60 0`: `knobwise serve` in front of a hostile endpoint for 60 seconds,
seed 0. `python -m campaign.hostile odd 20000`: as many requests with odd names, all different.

32 clients ask by /v1/chat/completions and /v1/responses, plain and streamed, take embeddings, ask
for routes that there are not, leave, and label by the request's id or by the answer's own; workers
are killed, and the controller is replaced. The endpoint answers from `campaign.hostile_answers`. At
the end every answer that a client saw is in the log once, as what it was, and the log's sum of `usd`
and that of /metrics are those of what was sent.
"""

import http.client
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from proxied import SAFE, export

from campaign.hostile_answers import FAULT, LEFT, TEXT, UNPRICED, HostileEndpoint
from campaign.load import memory_mb
from campaign.server import CHAT, JSON, STEP_MS, WAIT_S, Server, label_of, number_of
from knobwise.agents import NumpyController
from knobwise.agents.learning.request_log import pack_floats
from knobwise.serving.inputs import blocks_of

RESPONSES = "/v1/responses"
BUDGETS_MS = (250, 5_000, 20_000)
PRICES = {"small": (1, 4, 0.5), SAFE: (10, 40, 10)}
"""By model: US dollars for a million tokens that are read, are written, and are cached."""
TIMEOUT_S = 5
OWN_NAME = re.compile(rb'"id": ?"(answer-\d+-\d+)"')
USUAL = re.compile(r"^(http://|requests must bring|tracker: |watch: |policy: |more requests are)")
"""Lines that the server may say."""
QUICK = {"optimiser": {"teacher_iterations": 20, "pretrain_iterations": 20, "iterations": 1}}
"""How controllers are trained, which need not be good."""
LIKE_IT_MB = 6
"""What the memory of a worker may grow by over the requests with odd names."""


class Seen(NamedTuple):
    """What a client saw of a request."""

    path: str
    id: str
    """Of the request; "" where none came."""
    knobs: object
    """None where the client itself cut the answer short."""
    whole: bool
    """True if the answer came to its end."""


class HostileClients:
    """Threads that ask until a moment, and what they saw.

    Attributes:
        seen: by number.
        left: numbers of the requests that clients left.
        labels: by the id of a request, the label that was taken last.
        ended: how requests ended, by path and status.
        wrong: what no server should say.
    """

    def __init__(self, port, until):
        self.port, self.until = port, until
        self.numbers = itertools.count(1)
        self.seen, self.left, self.labels = {}, set(), {}
        self.ended, self.wrong = Counter(), []

    def client(self, draw):
        """Ask until the moment has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        names = []
        while time.monotonic() < self.until:
            try:
                self._do(connection, draw, names)
            except (http.client.HTTPException, OSError) as error:
                self.ended["broken", type(error).__name__] += 1
                connection.close()
            if draw.random() < 0.05:
                # the next request may go to another worker
                connection.close()
        connection.close()

    def _do(self, connection, draw, names):
        what = draw.random()
        if what < 0.75:
            self._ask(connection, draw, names)
        elif what < 0.9:
            self._label(connection, draw, names)
        elif what < 0.95:
            self._other(connection, "POST", "/v1/embeddings", {"input": "a"})
        else:
            method, path = draw.choice([
                ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/v1/unknown"),
                ("DELETE", "/v1/files/x"), ("POST", "/v1/audio/speech"), ("GET", "/metrics"),
                ("GET", "/health"), ("GET", "/"), ("POST", CHAT),
            ])  # fmt: skip
            self._other(connection, method, path, ["no object"] if path == CHAT else {})

    def _ask(self, connection, draw, names):
        """Ask by chat or by /v1/responses."""
        number = next(self.numbers)
        path = draw.choice([CHAT, RESPONSES])
        question = [{"role": "user", "content": f"What is {number} + 0?"}]
        body = {"model": draw.choice(["auto", "knobwise", "small"]), "stream": draw.random() < 0.5}
        body |= {"features": features_of(number)}
        body["messages" if path == CHAT else "input"] = question
        cap = draw.choice([None, None, 3, 40])
        if cap is not None:
            body["max_tokens" if path == CHAT else "max_output_tokens"] = cap
        budget, headers = draw.choice(BUDGETS_MS) + number * STEP_MS, JSON
        if draw.random() < 0.5:
            body["budget_ms"] = budget
        else:
            headers = {**JSON, "X-Budget-Ms": repr(budget)}
        connection.request("POST", path, json.dumps(body), headers)
        if draw.random() < 0.03:
            time.sleep(draw.random() * 0.05)
            self.left.add(number)
            connection.close()
            return
        response = connection.getresponse()
        request_id = response.headers.get("x-knobwise-request-id", "")
        knobs = response.headers.get("x-knobwise-knobs") if cap is None else None
        knobs = knobs and json.loads(knobs)
        self.seen[number] = Seen(path, request_id, knobs, False)
        content = response.read()
        self.seen[number] = Seen(path, request_id, knobs, True)
        self.ended[path, response.status] += 1
        if not request_id and response.status not in (400, 502):
            self.wrong.append(f"{path} {number}: {response.status} {content[:200]!r}")
        if request_id and response.status == 200:
            name = OWN_NAME.search(content)
            names.append((number, request_id, name and name[1].decode()))

    def _label(self, connection, draw, names):
        """Label an answer, by the request's id or by its own."""
        if not names:
            return
        number, request_id, name = names.pop(draw.randrange(len(names)))
        own = name is not None and draw.random() < 0.3
        label = {"id": name if own else request_id, "accuracy": label_of(number)}
        path = draw.choice(["/v1/feedback", "/label"])
        connection.request("POST", path, json.dumps(label), JSON)
        response = connection.getresponse()
        content = response.read()
        self.ended[path, response.status] += 1
        if response.status == 200:
            self.labels[request_id] = label_of(number)
        elif not own or response.status != 404:
            self.wrong.append(f"{path} {label}: {response.status} {content[:200]!r}")
        else:
            # what failed has no id of its own in the log
            self.ended["an own id that is not known", 404] += 1

    def _other(self, connection, method, path, body):
        content = json.dumps(body) if method == "POST" else None
        connection.request(method, path, content, JSON)
        response = connection.getresponse()
        content = response.read()
        self.ended[path, response.status] += 1
        if response.status == 500:
            self.wrong.append(f"{method} {path}: 500 {content[:200]!r}")


def features_of(number):
    return {"prompt_words": number % 1000, "kind": "ab"[number % 2]}


def usd_of(sent):
    """What an answer cost; None if that is not known."""
    if not isinstance(sent.tokens, tuple):
        return None
    read, wrote, cached = sent.tokens
    of_read, of_written, of_cached = PRICES[sent.model]
    return ((read - cached) * of_read + wrote * of_written + cached * of_cached) / 1e6


def lines_in(folder, kind):
    """The rows of a log, and how many lines are torn."""
    rows, torn = [], 0
    for path in folder.glob(f"{kind}-*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
            else:
                torn += 1
    return rows, torn


class Comparison:
    """Holds a log against what was sent and seen.

    Attributes:
        faults: with their counts.
        examples: of them.
        kinds: by kind of answer, how its requests are in the log.
    """

    def __init__(self, rows, sent, clients, controller):
        self.faults, self.examples = Counter(), []
        self.kinds = defaultdict(Counter)
        self._sent, self._clients, self._controller = sent, clients, controller
        self.by_number = defaultdict(list)
        self.expected_usd = []
        for row in rows:
            self.by_number[number_of(row["budget_ms"])].append(row)
        for number, seen in clients.seen.items():
            if seen.whole and seen.id and number not in self.by_number:
                self._note("whole answers that are not in the log", number, seen)
        for number, same in self.by_number.items():
            if len(same) > 1:
                self._note("requests that are in the log twice", number, same)
            for row in same:
                self._compare(number, row)

    def _note(self, fault, *about):
        self.faults[fault] += 1
        self.examples.append(f"{fault}: {about}")

    def last_of(self, number):
        """The last answer that was sent to a request; None where there was none."""
        every = [each for each in self._sent[number] if not without_route(each)]
        return every[-1] if every else None

    def _compare(self, number, row):
        every = [each for each in self._sent[number] if not without_route(each)]
        about = row, [(each.kind, each.tokens, each.model) for each in every]
        seen = self._clients.seen.get(number)
        if row["features"] is not None:
            blocks = blocks_of(features_of(number), self._controller)
            features = {name: pack_floats(block) for name, block in blocks.items()}
            if row["features"] != features:
                self._note("rows with features of another request", *about)
        if seen is not None and seen.id and seen.id != row["id"]:
            self._note("rows with another id than the answer", *about)
        if seen is not None and seen.id and seen.knobs not in (None, row["knobs"]):
            self._note("rows with other knobs than the answer", *about)
        tokens, model, name = FAULT, row["knobs"]["model"], ""
        # an attempt may fail before the endpoint reads it, such as at a connection that it closes
        unread = row.get("attempts", 1) > len(every)
        if every and not (unread and row.get("fault", "").startswith("raised ")):
            tokens, model, name = every[-1].tokens, every[-1].model, every[-1].name
        if model != row["knobs"]["model"]:
            self._note("rows of another model than the answer", *about)
        failed = tokens in (FAULT, LEFT)
        if tokens == TEXT:
            # no text can be made of it, where the answer to a chat is turned
            turned = seen is not None and seen.path == RESPONSES and every[-1].path != "/responses"
            failed = bool(row.get("fault")) if seen is None else turned
            tokens = UNPRICED if failed else every[-1].counted
        kind = every[-1].kind if every else "none was sent"
        self.kinds[kind]["failed" if row.get("fault") else "answered"] += 1
        if bool(row.get("fault")) != failed:
            return self._note("answers that are in the log as what they were not", *about)
        if failed:
            if row.get("usd") is not None or row["answer_ms"] is not None or not row["failed"]:
                self._note("failed requests with a time or a price", *about)
            return None
        usd = usd_of(every[-1]._replace(tokens=tokens))
        self.expected_usd.append(usd or 0.0)
        if (row["usd"] is None) != (usd is None) or not math.isclose(row["usd"] or 0, usd or 0):
            self._note("rows with a wrong price", usd, *about)
        if not 0 < row["answer_ms"] < math.inf:
            self._note("answers without a time", *about)
        if row.get("answer", "") != name:
            self._note("answers with another id of their own", *about)
        return None


def without_route(sent):
    """Whether it only said that there is no /v1/responses."""
    return "route" in sent.kind and sent.path == "/responses"


def replace_at_random(folder, versions, until, seed):
    """Replace the controller now and then until a moment; return how often."""
    draw, swaps = random.Random(seed), 0
    while time.monotonic() < until:
        time.sleep(draw.uniform(1, 3))
        new = folder / "new.npz"
        if draw.random() < 0.2:
            new.write_bytes(b"no controller")
        else:
            shutil.copy(draw.choice(versions), new)
        os.replace(new, folder / "controller.npz")
        swaps += 1
    return swaps


def counters_in(text):
    """The numbers of /metrics by name, labels included."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("knobwise_"): float(value) for name, _, value in lines}


def text_of(port, path="/metrics"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path)
    content = connection.getresponse().read().decode()
    connection.close()
    return content


def prepared(folder):
    """Two controllers and the prices in a folder; the path of each controller."""
    versions = [folder / "first.npz", folder / "second.npz"]
    export(versions[0], **QUICK)
    export(versions[1], **QUICK, **{"policy.hidden": 12})
    (folder / "deployed").mkdir()
    for path in (folder / "controller.npz", folder / "deployed" / "controller.npz"):
        shutil.copy(versions[0], path)
    names = ("input", "output", "cached_input")
    prices = {model: dict(zip(names, price, strict=True)) for model, price in PRICES.items()}
    (folder / "prices.yaml").write_text(json.dumps(prices))
    return versions


def load(folder, seconds=60, seed=0, workers=4, clients=32):
    """Serve, ask, kill and replace in a folder. Return what was seen by name, the faults, examples
    of them, and how the kinds of answers are in the log."""
    versions = prepared(folder)
    with HostileEndpoint(seed) as endpoint:
        words = f"endpoint={endpoint.url} prices=prices.yaml watch=deployed explore=0.1 timeout_s={TIMEOUT_S}"
        server = Server(folder, workers, words)
        try:
            until = time.monotonic() + seconds
            asking = HostileClients(server.port, until)
            draws = [random.Random(f"{seed} {client}") for client in range(clients)]
            with ThreadPoolExecutor(clients + 1) as pool:
                swaps = pool.submit(replace_at_random, folder / "deployed", versions, until, seed)
                ended = pool.map(asking.client, draws)
                server.kill_at_random(until, seed)
                list(ended)  # raises what a client raised
            time.sleep(1)
            counters = counters_in(text_of(server.port))
        finally:
            left = server.end()
    rows, torn = lines_in(folder / "log", "requests")
    compared = Comparison(rows, endpoint.sent, asking, NumpyController.load(versions[0]))
    faults = compared.faults
    labels, torn_labels = lines_in(folder / "log", "labels")
    latest = {
        label["id"]: label["accuracy"]
        for label in sorted(labels, key=lambda label: label["since_boot_s"])
    }
    numbers = {row["id"]: number for number, same in compared.by_number.items() for row in same}
    for name, accuracy in latest.items():
        faults["labels on another request"] += name in numbers and accuracy != label_of(
            numbers[name]
        )
    for name, accuracy in asking.labels.items():
        faults["labels that were taken and do not count"] += latest.get(name) != accuracy
    # sums
    logged_usd = math.fsum(row.get("usd") or 0 for row in rows)
    expected_usd = math.fsum(compared.expected_usd)
    faults["a sum of usd in the log that is wrong"] = not math.isclose(logged_usd, expected_usd)
    missing = [number for number in endpoint.sent if number not in compared.by_number]
    unlogged_usd = math.fsum(usd_of(last) or 0 for last in map(compared.last_of, missing) if last)
    over = counters["usd_total"] - logged_usd
    faults["a sum of usd in /metrics that is wrong"] = not -1e-9 <= over <= unlogged_usd + 1e-9
    broken = counters["broken_total"]
    outcomes = {
        name: value for name, value in counters.items() if name.startswith("requests_total")
    }
    answered = sum("fault" not in row for row in rows)
    counted = outcomes['requests_total{outcome="answered"}']
    faults["answers that /metrics does not count, or counts twice"] = (
        not 0 <= counted - answered <= broken
    )
    failed = len(rows) - answered
    counted = sum(
        value for name, value in outcomes.items() if "endpoint_error" in name or '"cut"' in name
    )
    faults["failures that /metrics does not count, or counts twice"] = (
        not 0 <= counted - failed <= broken
    )
    gone = sum(
        value
        for name, value in outcomes.items()
        if re.search("client_left|refused|unchanged", name)
    )
    faults["requests that are neither in the log nor broken off"] = max(
        0, len(missing) - round(broken + gone)
    )
    faults["counters that are not finite"] = sum(
        not math.isfinite(value) for name, value in counters.items() if "promise" not in name
    )
    # what the server said
    errors = server.errors.read_text()
    faults["tracebacks"] = errors.count("Traceback")
    strange = [line for line in errors.splitlines() if not USUAL.match(line)]
    faults["strange lines on stderr"] = len(strange)
    faults["answers of status 500, or without an id"] = len(asking.wrong)
    faults["workers that outlive the server"] = len(left)
    faults["torn lines beyond those of kills"] = max(0, torn + torn_labels - server.kills)
    idle = not (answered and failed and asking.labels and server.kills)
    faults["nothing answered, failed, labelled or killed"] = idle
    seen = {
        "requests asked": next(asking.numbers) - 1,
        "rows": len(rows),
        "answered": answered,
        "failed": failed,
        "requests without a row": f"{len(missing)} of which the counters know {broken:g} broken off, {gone:g} left or refused",
        "usd in the log, expected, in /metrics": f"{logged_usd:.9f}, {expected_usd:.9f}, {counters['usd_total']:.9f}",
        "labels taken": len(asking.labels),
        "workers killed": server.kills,
        "controllers replaced": swaps.result(),
        "torn lines": torn + torn_labels,
        "answers sent": endpoint.kinds.total(),
        "requests by outcome": {name.split('"')[1]: value for name, value in outcomes.items()},
        "memory of the spared worker, MB": server.memory[:: max(1, len(server.memory) // 6)],
        "how requests ended": dict(sorted(asking.ended.items(), key=str)),
    }
    examples = [*compared.examples, *asking.wrong, *strange]
    kinds = {kind: (count, compared.kinds[kind]) for kind, count in endpoint.kinds.items()}
    return seen, +faults, examples, kinds


def odd(folder, count=20_000, clients=8):
    """Send so many requests with odd names, all different, to one worker. Return what was seen by
    name, and the faults."""
    prepared(folder)
    with HostileEndpoint(harmless=1.0) as endpoint:
        words = f"endpoint={endpoint.url} prices=prices.yaml opened=[files] explore=0.1"
        server = Server(folder, 1, words)
        states, ended, numbers = [], Counter(), itertools.count(1)
        lock = threading.Lock()

        def ask(_):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
            while (number := next(numbers)) <= count:
                connection.request(*odd_request(number))
                response = connection.getresponse()
                response.read()
                with lock:
                    ended[response.status] += 1
                if response.will_close:
                    connection.close()
            connection.close()

        def state():
            # a configuration has a line from its first choice on, however late that is
            lines = text_of(server.port).splitlines()
            lines = sum(not line.startswith("knobwise_choices_total") for line in lines)
            handles = len(os.listdir(f"/proc/{server.spared}/fd"))
            return lines, handles, round(memory_mb(server.spared), 1)

        try:
            states.append((0, *state()))
            total = count
            for part in range(5):
                count = total * (part + 1) // 5
                numbers = itertools.count(total * part // 5 + 1)
                with ThreadPoolExecutor(clients) as pool:
                    list(pool.map(ask, range(clients)))
                # idle connections of clients that are gone
                time.sleep(0.5)
                states.append((count, *state()))
            chosen = text_of(server.port).count("\nknobwise_choices_total")
        finally:
            server.end()
    seen = {"requests by status": dict(ended), "configurations chosen": chosen}
    for number, lines, handles, memory in states:
        seen[f"after {number}"] = (
            f"{lines} other lines of /metrics, {handles} descriptors, {memory} MB"
        )
    configurations = len(NumpyController.load(folder / "controller.npz").configurations)
    first, last = states[1], states[-1]
    # each client may have a connection of its own to the endpoint by then, which is kept
    faults = Counter({
        "lines of /metrics that grew": max(0, last[1] - first[1]),
        "choices that are no configuration": max(0, chosen - configurations),
        "descriptors that grew": max(0, last[2] - first[2] - clients),
        "memory that grew": last[3] > first[3] + LIKE_IT_MB,
        "statuses of 500 and above": sum(times for status, times in ended.items() if status >= 500),
        "tracebacks": server.errors.read_text().count("Traceback"),
    })  # fmt: skip
    return seen, +faults


def odd_request(number):
    """Method, path, content and headers of a request like no other."""
    kind = number % 10
    headers = {**JSON, f"X-Own-{number}": f"value {number}"}
    body = {"model": "auto", "messages": [{"role": "user", "content": f"What is {number} + 0?"}]}
    body |= {"features": features_of(number), f"field_{number}": number}
    match kind:
        case 0:
            body["model"] = f"model-{number}"
        case 1:
            body["max_tokens"] = number
        case 2:
            headers["X-Budget-Ms"] = str(100 + number / 7)
        case 3:
            headers["X-Budget-Ms"] = f"soon {number}"
        case 4:
            return "POST", f"/v1/files/{number}?q={number}", json.dumps(body), headers
        case 5:
            return "GET", f"/v1/models/model-{number}", None, headers
        case 6:
            return "PUT", f"/v1/route-{number}/{number}", "{}", headers
        case 7:
            body["features"] = {"kind": f"kind-{number}", "prompt_words": number}
        case 8:
            body |= {"budget_ms": 50 + number / 3, "temperature": number, "stream": True}
        case 9:
            body |= {"input": body.pop("messages"), "max_output_tokens": number}
            return "POST", RESPONSES, json.dumps(body), headers
    return "POST", CHAT, json.dumps(body), headers


def main(*words):
    with tempfile.TemporaryDirectory() as name:
        folder, examples, kinds = Path(name), [], {}
        if words[:1] == ("odd",):
            seen, faults = odd(folder, *map(int, words[1:]))
        else:
            seen, faults, examples, kinds = load(folder, *map(int, words))
    if kinds:
        print("| answer | sent | logged as answered | as failed |\n|---|---|---|---|")
    for kind, (count, logged) in sorted(kinds.items()):
        print(f"| {kind} | {count} | {logged['answered']} | {logged['failed']} |")
    for what, value in (seen | faults).items():
        print(f"{what}: {value}")
    for line in examples[:30]:
        print(line[:1500])
    print(f"{faults.total()} not as promised")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

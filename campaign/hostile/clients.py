"""Clients that ask, leave and label, and what they saw."""

import http.client
import itertools
import json
import re
import time
from collections import Counter
from typing import NamedTuple

from campaign.server import CHAT, JSON, STEP_MS, WAIT_S, label_of

RESPONSES = "/v1/responses"
BUDGETS_MS = (250, 5_000, 20_000)
OWN_NAME = re.compile(rb'"id": ?"(answer-\d+-\d+)"')


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

"""The rows of 20 scripted requests in the log, by `wrap` and by `knobwise serve`.

Behind `wrap` a clock stands still but where the model answers, so times are known too; behind a
server they are not, and only tell whether they are there.
"""

import json
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from commands import wait_for
from golden.decisions import FOLDER
from golden.tables import number
from proxied import MESSAGES, serving
from replayed import Clock, timed_by
from scripted_endpoint import DONE, ROLE, STOP, WORD, Reply, ScriptedEndpoint, chat

import knobwise
from knobwise.agents import NumpyController

CONTROLLER = FOLDER / "deadline.npz"
REQUESTS = 20
BUDGETS = (50, 90, 160, 400)
LONG = (1000, 2000, 4000)
"""Of chats, so that a busy machine makes none of them late."""
CHANGING = {"id", "at", "controller", "ts", "time", "process", "random"}
"""What names a request, its time or its process."""


def values():
    """Rows by request."""
    made = {}
    for place, row in enumerate(_wrapped()):
        made[f"wrap {place}"] = {key: _rounded(row[key]) for key in sorted(row.keys() - CHANGING)}
    for place, row in enumerate(_served()):
        kept = {key: row[key] for key in sorted(row.keys() - CHANGING)}
        made[f"serve {place}"] = {key: _of_server(key, value) for key, value in kept.items()}
    return made


def _wrapped():
    """Requests to a model that is as slow as it says, that is late now and then, and that fails."""
    clock = Clock(step=0.0)

    def model(request, **knobs):
        clock.go_on((20 + number(request["place"], 1) + knobs["max_tokens"] / 2) / 1e3)
        if request["place"] % 7 == 6:
            raise TimeoutError
        if request["place"] % 7 == 5:
            raise ValueError("no answer")
        return "answer"

    options = {"features": lambda request: request["features"], "log": "wrapped", "seed": 0}
    call = timed_by(
        clock, knobwise.wrap(model, NumpyController.load(CONTROLLER), explore=0.2, **options)
    )
    for place in range(REQUESTS):
        features = {"words": number(place, 2), "kind": "ab"[place % 2]}
        with suppress(TimeoutError, ValueError):
            call({"place": place, "features": features}, BUDGETS[place % 4])
    return rows_in("wrapped")


def _served():
    """Chats, streams and failures of a server, one after the other."""
    asked = [0]

    def answer(path, body):
        place = asked[0] - 1
        if not path.endswith("/chat/completions"):
            return Reply({"data": []})  # asked for before it serves
        if place % 7 == 6:
            return Reply({"error": {"message": "busy"}}, status=429)
        if place % 7 == 5:
            return Reply({"error": {"message": "broken"}}, status=500)
        if place % 7 == 4:
            return Reply([ROLE, WORD, None])  # a stream that is cut
        return Reply([ROLE, WORD, STOP, DONE]) if body.get("stream") else Reply(chat())

    with ScriptedEndpoint() as endpoint:
        endpoint.answer = answer
        words = (
            f"checkpoint={CONTROLLER}",
            f"endpoint={endpoint.url}",
            "tracker=false",
            "log=served",
        )
        with serving(Path.cwd(), *words) as client:
            for place in range(REQUESTS):
                asked[0] += 1
                features = {"words": number(place, 2), "kind": "ab"[place % 2]}
                if place % 5 == 4:
                    features.pop("words")
                fields = {"features": features, "budget_ms": LONG[place % 3]}
                body = {
                    "model": "auto",
                    "messages": MESSAGES,
                    "stream": place % 7 in (1, 4),
                    **fields,
                }
                with suppress(OSError, HTTPException):
                    client.ask("/v1/chat/completions", body)
                wait_for(lambda: len(rows_in("served")) == asked[0])
    return rows_in("served")


def rows_in(folder):
    """The rows of a log in their order."""
    files = sorted(Path(folder).glob("requests-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _of_server(key, value):
    """What is kept of a value: of a time only that there is one."""
    if key.endswith("_ms") and key != "budget_ms" and value is not None:
        return "a time"
    return _rounded(value)

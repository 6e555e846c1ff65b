"""What the scripts of clients share. Each case asks a question of its own, with a budget of its
own, and prints as a line of JSON what came back; `campaign.clients` compares it with what the
endpoint was sent and what knobwise logged."""

import asyncio
import inspect
import itertools
import json
import os
import traceback
from types import SimpleNamespace

URL = os.environ["KNOBWISE_URL"]
"""With /v1."""
KEY = os.environ.get("KNOBWISE_KEY", "none")
MODEL = os.environ.get("KNOBWISE_MODEL", "knobwise")
_numbers = itertools.count(int(os.environ["KNOBWISE_FIRST"]))


def case(sent, question="What is {} + 12?", decides=True):
    """A case, which runs at once: a function of a question and a budget in ms, plain or async. It
    returns what came back: `text`, and `model`, `request_id`, `knobs` and `usage` where this client
    shows them.

    Args:
        sent: what the case sends, in words.
        question: with a place for the number of the case.
        decides: False for a request that passes as it is.
    """

    def run(function):
        number = next(_numbers)
        asked = question.format(number)
        budget_ms = 1000 + number
        line = {"sent": sent, "question": asked, "budget_ms": budget_ms, "decides": decides}
        try:
            seen = function(asked, budget_ms)
            if inspect.iscoroutine(seen):
                seen = asyncio.run(seen)
            line |= seen
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"CASE {json.dumps(line)}", flush=True)

    return run


def watched(client_class):
    """An HTTP client that keeps what the headers of the last answer say, for libraries that do not
    show them: `client`, and `seen`."""
    watch = SimpleNamespace(seen={})

    def note(response):
        watch.seen = shown(response.headers)

    async def note_async(response):
        note(response)

    hook = note_async if "Async" in client_class.__name__ else note
    watch.client = client_class(event_hooks={"response": [hook]})
    return watch


def shown(headers):
    """What the headers of an answer say."""
    return {
        "request_id": headers.get("x-knobwise-request-id"),
        "knobs": headers.get("x-knobwise-knobs"),
    }

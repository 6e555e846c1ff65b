"""Requests that are sent once each: several at once, paid for, and kept in a file."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.profiling.endpoint.client import Declined
from knobwise.profiling.endpoint.paid import PaidClient
from knobwise.profiling.endpoint.reading import EndpointReply
from knobwise.profiling.measuring.measuring import as_they_end, open_log

REPLIES = "replies.jsonl"
"""The file of what the server said, in the state folder."""
Body = dict[str, Any]
"""What is sent, as arguments of the client."""
Read = Callable[[EndpointReply], object]
"""Takes what is needed from a reply, as JSON holds it. Raises ValueError for a reply without it."""


class Replies:
    """What a server said to requests. Close it at the end.

    Args:
        client: the server.
        concurrency: how many requests are sent at once.
    """

    def __init__(self, client: PaidClient, concurrency: int) -> None:
        self.client = client
        self._concurrency = concurrency
        # by the digest of the request
        self._known: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self._open = ExitStack()

    def keep(self, folder: Path) -> None:
        """Keep what is said in a file of this folder, and take what an earlier run kept there.

        Raises InputError for a damaged file, or one that another process writes.
        """
        path = folder / REPLIES
        self._file = self._open.enter_context(open_log(path))
        paid = 0.0
        try:
            for line in path.read_bytes().splitlines():
                kept = orjson.loads(line)
                self._known[kept["request"]] = kept["reply"]
                paid += kept["usd"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: is damaged ({error}); move it away to ask again") from error
        self.client.keep(folder, paid)

    def _write(self, request: str, reply: object, usd: float) -> None:
        """Note what was said to a request, where it is kept."""
        if self._file is not None:
            line = {"request": request, "usd": usd, "reply": reply}
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def __call__(self, bodies: Iterable[Body], read: Read) -> list[Any]:
        """Return what the server says to each request. Equal ones are sent once, and what is known
        is not asked.

        Raises:
            Declined: the server does not take a request, or says something else than what is read.
            InputError: the money is spent, or the server fails. What was said until then is kept.
        """
        keyed = [(_digest(body), body) for body in bodies]
        new = {key: body for key, body in keyed if key not in self._known}
        # reserved one by one, right before each is sent
        affordable = itertools.takewhile(lambda job: self.client.reserve(job[1]), new.items())
        sent = 0
        with progress("requests", len(new), quiet_s=5) as tick:
            for (key, _), (wanted, usd) in as_they_end(
                lambda job: self._answer(job[1], read), affordable, self._concurrency
            ):
                self._known[key] = wanted
                self._write(key, wanted, usd)
                sent += 1
                tick(sent, self.client.progress)
        if sent < len(new):
            raise InputError(
                f"{self.client.limit}: the next request could cost more than is left; what was "
                "answered is kept, and the same command with more goes on"
            )
        return [self._known[key] for key, _ in keyed]

    def _answer(self, body: Body, read: Read) -> tuple[object, float]:
        """Send a request; return what is read from the reply, and the price."""
        reply, usd = self.client.ask(body, whole=True)
        if reply.failed:
            text = json.dumps(body.get("messages") or body["prompt"], ensure_ascii=False)
            raise InputError(
                f"endpoint={self.client.url}: a request is {reply.failed}, which gives no "
                f"log-probability; leave out what ends in …{text[-80:]}"
            )
        try:
            return read(reply), usd
        except ValueError as error:
            raise Declined(f"endpoint={self.client.url}: {error}") from error

    def close(self) -> None:
        """Close the connections and the file."""
        self._open.close()
        self.client.close()


def _digest(body: Mapping[str, object]) -> str:
    """Return what tells a request from others."""
    text = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()

"""A server that draws its answers from the tables of `campaign.hostile.odd_answers`."""

import asyncio
import gzip
import json
import random
import threading
from collections import Counter, defaultdict

from campaign.hostile.answers import nested
from campaign.hostile.odd_answers import PLAIN, STREAMED
from campaign.hostile.wire import (
    CUT,
    NAN,
    NUMBER,
    RESPONSES,
    UNPRICED,
    Asked,
    Reply,
    Sent,
    chunked,
    dumped,
    head,
    one_by_one,
    sized,
)

HARMLESS = 0.4
"""The share of good answers."""


class HostileEndpoint:
    """Answers by drawing from the tables; use it as a context.

    Attributes:
        sent: by the number of a request, what it got.
        kinds: how often each kind was drawn.
        others: requests to other routes.
    """

    def __init__(self, seed=0, only=None, harmless=HARMLESS):
        self.sent: dict[int, list[Sent]] = defaultdict(list)
        self.kinds: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._only = only
        self._harmless = harmless

    def __enter__(self):
        began = threading.Event()

        async def serve():
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            began.set()
            await self._ended.wait()
            server.close()

        # which cancels at its end what is still under way
        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self._thread.start()
        began.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _serve(self, reader, writer):
        try:
            while await self._answered(reader, writer):
                pass
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            # it is asked by processes that are killed
            pass
        finally:
            writer.close()

    async def _answered(self, reader, writer):
        """Answer a request; False where the connection ends."""
        text = await reader.readuntil(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").rstrip().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1].partition("?")[0].removeprefix("/v1")
        reply = self._reply(path, content)
        for piece in reply.pieces:
            if piece is CUT:
                return False
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()
        return not reply.closes

    def _reply(self, path, content):
        body = json.loads(content) if content[:1] == b"{" else {}
        match = NUMBER.search(json.dumps(body.get("messages") or body.get("input") or ""))
        if match is None or path not in ("/chat/completions", RESPONSES):
            self.others[path] += 1
            return self._other(path)
        number = int(match[1])
        asked = Asked(path, body, number, len(self.sent[number]))
        kinds = STREAMED if asked.streams else PLAIN
        if self._only is not None:
            kind = self._only(asked)
        elif self._draw.random() < self._harmless:
            kind = next(iter(kinds))
        else:
            kind = self._draw.choice([*kinds])
        reply = kinds[kind](asked)
        self.kinds[kind] += 1
        self.sent[number].append(
            Sent(kind, body.get("model"), path, reply.tokens, reply.name, (*asked.tokens, 0))
        )
        return reply

    def _other(self, path):
        """Answers on other routes are odd too."""
        if self._draw.random() < self._harmless:
            return Reply(sized(dumped({"object": "list", "data": [{"id": "m"}]})), UNPRICED)
        replies = [
            sized(dumped({"object": "list", "data": [{"id": "m"}]})),
            sized(dumped({"object": "list", "data": [{"id": "m", "x": NAN}]})),
            sized(dumped({"object": "list", "data": [{"id": "\ud800"}]})),
            sized(dumped({"object": "list", "data": [{"id": nested(900)}]})),
            sized(dumped({"data": None})),
            sized(b"[" * 2_000),
            sized(b"", status=404),
            sized(b"{}", status=600),
            sized(b"{}", status=99),
            [head(204, "") + b"\r\n"],
            [*chunked([b"{}", CUT])],
            chunked(one_by_one(b'{"data": []}')),
            sized(gzip.compress(b'{"data": []}'), headers=[("content-encoding", "gzip")]),
            sized(b"{}", headers=[("x-own", "a\x0bb")]),
            [CUT],
        ]
        return Reply(self._draw.choice(replies), UNPRICED)

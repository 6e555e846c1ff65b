"""Ask an OpenAI-compatible server, and take the time of each answer.

Requests are sent by one thread with an event loop; any number of other threads may wait for
answers. Those whose time counts are streamed. An attempt that fails by no fault of the request, as
when the server says that it has too much to do, is made again, and only the attempt that succeeds
counts as time.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai

from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.profiling.endpoint.pauses import Pauses, backoff_s
from knobwise.profiling.endpoint.reading import (
    Cut,
    EndpointReply,
    ImpossibleTokens,
    read_stream,
    read_whole,
)

T = TypeVar("T")
KEY = "OPENAI_API_KEY"
"""The environment variable of the key."""
ATTEMPTS = 5
"""A request that the server fails so often in a row is given up."""
CUTS = 8
"""So many answers that were cut beside others, and more than were not, are looked into."""
AGAIN = (408, 409, 429)
"""Statuses below 500 that say to come again."""
STUMBLES = ("status 500", "status 501")
"""What a server says that is neither busy nor loading, to a request that it cannot deal with."""
EMPTY_PURSE = "insufficient_quota"
"""The code of a 429 after which no waiting helps."""


class Declined(InputError):
    """A server does not take a request, or its answer lacks what was wanted; another form of the
    request may fare better."""


class EndpointClient:
    """A client of one server; close it at the end.

    Args:
        url: the address, up to /v1.
        timeout_s: after which an answer is given up.

    Raises:
        InputError: no address, or one that holds a password, which would be noted with it.
    """

    def __init__(self, url: str | None, timeout_s: float) -> None:
        # the address is noted in files
        parts = urlsplit(url or "")
        if url is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"endpoint={url}: must be the address of a server, such as http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise InputError(
                f"endpoint: must hold no password and no query; the key comes from {KEY}"
            )
        self.url = url
        self.timeout_s = timeout_s
        self._pauses = Pauses(url)
        # how many requests are under way, and were ever sent
        self._open = 0
        self._sent = 0
        # of attempts beside others: how many were answered, and how many answers were cut
        self._whole_beside = 0
        self._cut_beside = 0
        # whether one that was sent alone came to nothing, since the last answer
        self._fails_alone = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._in_loop(self._connected())
        # cleared while a request is tried alone
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._trial = asyncio.Lock()

    async def _connected(self) -> openai.AsyncOpenAI:
        # local servers want none, but the client does
        key = os.environ.get(KEY) or "none"
        # time-outs and further attempts are ours, since both count in the results
        # else a line for each request, where Hydra or a program of the user's logs at INFO
        for library in ("httpx", "httpx2"):
            logging.getLogger(library).setLevel(logging.WARNING)
        return openai.AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=None)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def check(self, connections: int = 1, models: Sequence[str] = ()) -> None:
        """Open so many connections, so that no timed request must, and see that the server answers
        and takes the key. Raises InputError if not. Models that it does not list are told: some
        servers answer under any name, with a model of their own."""
        listing = self._in_loop(self._check(connections))
        if not models:
            return
        names = listed_models(listing)
        if names is None:
            say(f"{self.url}: lists no models, so that nobody knows whether it has those asked for")
            return
        # gateways list what they pass on as openai/*
        unknown = [model for model in models if not any(map(_matches(model), names))]
        if unknown:
            has = ", ".join(names[:8]) + ", …" * (len(names) > 8) or "none"
            say(
                f"{self.url}: does not list {', '.join(unknown)} among its models ({has}); some "
                "servers answer under any name with another model, so see that this one has it"
            )

    async def _check(self, connections: int) -> object:
        """Return what the server says of its models, as JSON holds it; None if nothing."""
        get = self._client.models.with_raw_response.list
        try:
            async with asyncio.timeout(self.timeout_s):
                # one alone, so that nothing is under way if nobody answers
                first = await get()
                await asyncio.gather(*(get() for _ in range(connections)))
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise InputError(f"endpoint={self.url}: does not take the key in {KEY}") from error
        except (openai.APIConnectionError, TimeoutError) as error:
            raise InputError(
                f"endpoint={self.url}: nothing answers there; is the server running?"
            ) from error
        except (openai.APIError, ValueError):
            # a server may list no models
            return None
        try:
            return json.loads(first.content)
        except (ValueError, RecursionError):
            return None

    def ask(
        self,
        body: Mapping[str, object],
        lost: Callable[[], None] = lambda: None,
        whole: bool = False,
    ) -> EndpointReply:
        """Send a request, and wait for its answer.

        Args:
            body: arguments of the client's `chat.completions.create`; with a `prompt` instead of
                messages, of its `completions.create`.
            lost: called for each attempt that may cost money and came to nothing.
            whole: read the answer in one piece, with all that the server says in it. A time-out is
                then a failure as others are, and not the time of an answer.

        Raises:
            InputError: the request is refused as wrong, or the server fails `ATTEMPTS` times.
        """
        return self._in_loop(self._ask(body, lost, whole))

    async def _ask(
        self, body: Mapping[str, object], lost: Callable[[], None], whole: bool
    ) -> EndpointReply:
        failures = 0
        attempts = 0
        while True:
            # one rate limit holds for all
            while not self._may_send.is_set() or self._pauses.left_s > 0:
                await self._may_send.wait()
                await asyncio.sleep(max(self._pauses.left_s, 0))
            attempts += 1
            reply = EndpointReply(attempts=attempts)
            self._open += 1
            self._sent += 1
            alone = self._open == 1
            sent = self._sent
            start = time.perf_counter()
            cut = False
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._read(body, reply, start, whole)
                self._pauses.answered()
                self._fails_alone = False
                self._whole_beside += not (alone and self._sent == sent)
                return reply
            except ImpossibleTokens as error:
                raise ImpossibleTokens(
                    f"endpoint={self.url}: counts tokens that cannot be ({error}), so that neither "
                    "tokens nor prices of its answers are known"
                ) from error
            except TimeoutError:
                if not whole:
                    reply.failed = "timed out"
                    # of a part of the answer
                    reply.usage = None
                    reply.total_ms = 1e3 * self.timeout_s
                    reply.first_ms = reply.first_ms or reply.total_ms
                    return reply
                lost()
                problem = f"no answer within timeout_s={self.timeout_s:g}"
            except openai.APIStatusError as error:
                if _refused(error):
                    reply.failed = "refused"
                    # nothing was read or written
                    reply.usage = {"prompt_tokens": 0, "completion_tokens": 0}
                    reply.total_ms = 1e3 * (time.perf_counter() - start)
                    reply.first_ms = reply.total_ms
                    return reply
                self._refuse_mistake(error)
                if error.status_code == 429:
                    self._pauses.turned_away(error.response.headers, attempts)
                    continue
                problem = f"status {error.status_code}"
            except (openai.APIError, ValueError) as error:
                # a connection that broke, or an answer that is no JSON
                lost()
                cut = isinstance(error, openai.APIConnectionError | Cut)
                problem = f"{type(error).__name__}: {_without_key(error)}"
            finally:
                self._open -= 1
            failures += 1
            if cut and not (alone and self._sent == sent):
                self._cut_beside += 1
                await self._try_apart(body, failures, lost, whole)
            if failures == ATTEMPTS:
                # some servers stumble over fields that they do not know
                kind = Declined if problem in STUMBLES else InputError
                raise kind(f"endpoint={self.url}: failed {ATTEMPTS} times ({problem})")
            await asyncio.sleep(backoff_s(failures))

    async def _read(
        self, body: Mapping[str, object], reply: EndpointReply, start: float, whole: bool
    ) -> None:
        """Send a request, and read the answer into a reply: in one piece, if it is asked for
        `whole` or the server does not stream, else as a stream."""
        # the fields are the knobs, which no type checker knows
        create: Any = self._client.chat.completions.with_streaming_response.create
        more: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
        if whole:
            more = {}
            if "prompt" in body:
                create = self._client.completions.with_streaming_response.create
        async with create(**body, **more) as response:
            try:
                if whole or "json" in response.headers.get("content-type", ""):
                    read_whole(await response.read(), reply, start)
                else:
                    await read_stream(response.iter_lines(), reply, start)
            except ValueError:
                raise
            except Exception as error:  # of the HTTP client's own, which openai wraps elsewhere
                raise Cut(f"a broken answer ({type(error).__name__})") from error

    def _is_suspect(self, failures: int) -> bool:
        """Return True if answers are cut so often that it may be for the others beside them."""
        often = self._cut_beside >= max(CUTS, self._whole_beside + 1)
        # the first failure of a request may be that of a server that starts again
        return not self._fails_alone and ((often and failures > 1) or failures >= ATTEMPTS)

    async def _try_apart(
        self, body: Mapping[str, object], failures: int, lost: Callable[[], None], whole: bool
    ) -> None:
        """If answers are cut often, send a request while no other is under way, and then one that
        another follows. Raise InputError if the first is answered and of the others one is cut:
        then the server ends an answer when another request comes."""
        if not self._is_suspect(failures):
            return
        async with self._trial:
            # others may have waited for the same trial
            if not self._is_suspect(failures):
                return
            # what the three cost, whether or not they are answered
            for _ in range(3):
                lost()
            self._may_send.clear()
            try:
                while self._open or self._pauses.left_s > 0:
                    await asyncio.sleep(max(self._pauses.left_s, 0.01))
                took_s = await self._seconds(body, whole)
                if took_s is None:
                    self._fails_alone = True
                    return
                both = await asyncio.gather(
                    self._seconds(body, whole), self._seconds(body, whole, after_s=took_s / 2)
                )
            finally:
                self._may_send.set()
        cut = self._cut_beside
        self._cut_beside = self._whole_beside = 0
        # if both are answered, the server was broken for a while
        if None in both:
            raise InputError(
                f"endpoint={self.url}: ends an answer when another request comes ({cut} were cut "
                "beside others, and one alone was answered): measure with concurrency=1, or have "
                "the server take several at once"
            )

    async def _seconds(
        self, body: Mapping[str, object], whole: bool, after_s: float = 0.0
    ) -> float | None:
        """Send a request after some time; return how long its answer takes, and None if it comes to
        nothing."""
        await asyncio.sleep(after_s)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._read(body, EndpointReply(), start, whole)
        except (openai.APIError, TimeoutError, ValueError):
            return None
        return time.perf_counter() - start

    def _refuse_mistake(self, error: openai.APIStatusError) -> None:
        """Raise Declined for a status after which another attempt would fare no better."""
        code = error.status_code
        if (code in AGAIN and error.code != EMPTY_PURSE) or code >= 500:
            return
        raise Declined(f"endpoint={self.url}: {_without_key(error)}") from error

    def close(self) -> None:
        """Give up what is being asked, and close the connections."""
        # a second call does nothing
        if self._loop.is_closed():
            return
        self._in_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        # whoever waits for them gets a CancelledError
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()
        await self._loop.shutdown_asyncgens()


def listed_models(listing: object) -> list[str] | None:
    """Return the names in what /v1/models said; None if that is no whole list of models."""
    entries = listing.get("data") if isinstance(listing, dict) else listing
    if not isinstance(entries, list) or (isinstance(listing, dict) and listing.get("has_more")):
        return None
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    named = [name for name in names if isinstance(name, str)]
    return named if len(named) == len(entries) else None


def _matches(model: str) -> Callable[[str], bool]:
    """Return whether a name in a list of models, which may be a pattern, is that of a model."""
    return lambda name: model == name or fnmatch.fnmatchcase(model, name.replace("[", "[[]"))


def _without_key(error: Exception) -> str:
    """Return what an error says, in a line, without the key: a server may say which it does not
    take."""
    message = " ".join(str(error).split())[:200]
    if key := os.environ.get(KEY):
        message = message.replace(key, "…")
    return message


def _refused(error: openai.APIStatusError) -> bool:
    """Return True for an error that says that the model must not answer."""
    return error.status_code == 400 and error.code == "content_filter"

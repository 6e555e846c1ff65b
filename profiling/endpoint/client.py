"""Ask an OpenAI-compatible server, and take the time of each answer.

Requests are sent by one thread with an event loop; any number of other threads may wait for
answers. Those whose time counts are streamed. An attempt that fails by no fault of the request, as
when the server says that it has too much to do, is made again, and only the attempt that succeeds
counts as time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
from openai import BaseModel
from openai.types.chat import ChatCompletion

from knobwise.common.errors import InputError
from knobwise.common.progress import duration, say
from knobwise.profiling.endpoint.token_counts import count_tokens

T = TypeVar("T")
KEY = "OPENAI_API_KEY"
"""The environment variable of the key."""
ATTEMPTS = 5
"""A request that the server fails so often in a row is given up."""
FIRST_WAIT_S = 0.5
"""The wait after a failure, twice as long after each further one."""
LONGEST_WAIT_S = 60.0
LONG_S = 10.0
"""From here on a wait is told."""
AGAIN = (408, 409, 429)
"""Statuses below 500 that say to come again."""
NO_ANSWER = "the answer is none of the protocol's"
EMPTY_PURSE = "insufficient_quota"
"""The code of a 429 after which no waiting helps."""


@dataclass
class EndpointReply:
    """What came of a request."""

    text: str = ""
    first_ms: float = 0.0
    """Until the first token, or as `total_ms` if none came."""
    total_ms: float = 0.0
    failed: str = ""
    """Why it counts as wrong whatever the text says: `refused` or `timed out`."""
    tokens_in: int = 0
    tokens_out: int = 0
    usage: Mapping[str, Any] | None = None
    """What the server said of the tokens; None if nothing."""
    service_tier: str | None = None
    """The tier that the server says it answered in."""
    attempts: int = 1
    content: dict[str, Any] = field(default_factory=dict)
    """The whole answer, of a request that is not streamed."""

    @property
    def counted(self) -> bool:
        """Whether the server told the tokens."""
        return self.usage is not None


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
        self._not_before = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._in_loop(self._connected())

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

    def check(self, connections: int = 1) -> None:
        """Open so many connections, so that no timed request must, and see that the server answers
        and takes the key. Raises InputError if not."""
        self._in_loop(self._check(connections))

    async def _check(self, connections: int) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                # one alone, so that nothing is under way if nobody answers
                await self._client.models.list()
                await asyncio.gather(*(self._client.models.list() for _ in range(connections)))
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise InputError(f"endpoint={self.url}: does not take the key in {KEY}") from error
        except (openai.APIConnectionError, TimeoutError) as error:
            raise InputError(
                f"endpoint={self.url}: nothing answers there; is the server running?"
            ) from error
        except (openai.APIError, ValueError):
            # a server may list no models
            return

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
        read = self._whole if whole else self._streamed
        failures = 0
        attempts = 0
        while True:
            # one rate limit holds for all
            while (wait_s := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            attempts += 1
            reply = EndpointReply(attempts=attempts)
            start = time.perf_counter()
            try:
                async with asyncio.timeout(self.timeout_s):
                    await read(body, reply, start)
                return reply
            except InputError:
                raise
            except TimeoutError:
                if whole:
                    lost()
                    problem = f"no answer within timeout_s={self.timeout_s:g}"
                else:
                    reply.failed = "timed out"
                    # of a part of the answer
                    reply.usage = None
                    reply.total_ms = 1e3 * self.timeout_s
                    reply.first_ms = reply.first_ms or reply.total_ms
                    return reply
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
                    self._wait(error, attempts)
                    continue
                problem = f"status {error.status_code}"
            except (openai.APIError, ValueError) as error:
                # a connection that broke, or an answer that is no JSON
                lost()
                problem = f"{type(error).__name__}: {error}"
            failures += 1
            if failures == ATTEMPTS:
                raise InputError(f"endpoint={self.url}: failed {ATTEMPTS} times ({problem})")
            await asyncio.sleep(_wait_s(failures))

    async def _streamed(
        self, body: Mapping[str, object], reply: EndpointReply, start: float
    ) -> None:
        """Read a stream to its end into a reply; or an answer in one piece, of a server that does
        not stream."""
        usage = {"include_usage": True}
        finish = None
        chunks = 0
        # the fields are the knobs, which no type checker knows
        create: Any = self._client.chat.completions.create
        stream = await create(**body, stream=True, stream_options=usage)
        async with stream:
            if "json" in stream.response.headers.get("content-type", ""):
                try:
                    content = await stream.response.aread()
                except Exception as error:  # of the HTTP client's own, which openai wraps elsewhere
                    raise ValueError(f"a broken answer ({type(error).__name__})") from error
                whole = json.loads(content)
                if not isinstance(whole, dict):
                    raise ValueError(NO_ANSWER)
                self._read(ChatCompletion.construct(**whole), reply, start)
                return
            async for chunk in stream:
                self._count(chunk, reply)
                for choice in chunk.choices:
                    delta = choice.delta
                    refusal = getattr(delta, "refusal", None)
                    # some servers send thoughts by these names
                    thought = getattr(delta, "reasoning_content", None)
                    thought = thought or getattr(delta, "reasoning", None)
                    if delta.content or refusal or thought:
                        chunks += 1
                        reply.first_ms = reply.first_ms or 1e3 * (time.perf_counter() - start)
                    reply.text += delta.content or refusal or ""
                    finish = choice.finish_reason or finish
                    if refusal or choice.finish_reason == "content_filter":
                        reply.failed = "refused"
        reply.total_ms = 1e3 * (time.perf_counter() - start)
        reply.first_ms = reply.first_ms or reply.total_ms
        if finish is None and not chunks:
            raise ValueError("neither a stream nor JSON came in answer to stream=true")
        if finish is None:
            raise ValueError("the stream ended before the answer did")
        if not reply.counted:
            reply.tokens_out = chunks

    async def _whole(self, body: Mapping[str, object], reply: EndpointReply, start: float) -> None:
        """Read an answer in one piece into a reply."""
        create: Any = self._client.chat.completions.create
        if "prompt" in body:
            create = self._client.completions.create
        answer = await create(**body)
        self._read(answer, reply, start)

    def _read(self, answer: Any, reply: EndpointReply, start: float) -> None:
        """Read an answer that came in one piece into a reply. Raises ValueError if it is none."""
        # what is no JSON comes as text
        if not getattr(answer, "choices", None):
            raise ValueError(NO_ANSWER)
        reply.total_ms = 1e3 * (time.perf_counter() - start)
        reply.first_ms = reply.total_ms
        reply.content = answer.to_dict()
        self._count(answer, reply)
        message = getattr(answer.choices[0], "message", answer.choices[0])
        refusal = getattr(message, "refusal", None)
        text = getattr(message, "content", None) or getattr(message, "text", "")
        reply.text = refusal or text or ""
        if refusal or answer.choices[0].finish_reason == "content_filter":
            reply.failed = "refused"

    def _count(self, content: Any, reply: EndpointReply) -> None:
        """Note the tokens that a server counted, in an answer or a chunk of one, and its tier.
        Raises InputError for tokens that cannot be: others would come of no further attempt."""
        reply.service_tier = getattr(content, "service_tier", None) or reply.service_tier
        usage = getattr(content, "usage", None)
        if isinstance(usage, BaseModel):
            usage = usage.to_dict(warnings=False)
        try:
            tokens = count_tokens(usage)
        except ValueError as error:
            raise InputError(
                f"endpoint={self.url}: counts tokens that cannot be ({error}), so neither tokens "
                "nor prices of its answers can be known"
            ) from error
        if tokens is not None:
            reply.usage = usage
            reply.tokens_in = tokens.read
            reply.tokens_out = tokens.written

    def _refuse_mistake(self, error: openai.APIStatusError) -> None:
        """Raise InputError for a status after which another attempt would fare no better."""
        code = error.status_code
        if (code in AGAIN and error.code != EMPTY_PURSE) or code >= 500:
            return
        message = " ".join(str(error).split())[:200]
        # a server may say which key it does not take
        if key := os.environ.get(KEY):
            message = message.replace(key, "…")
        raise InputError(f"endpoint={self.url}: {message}") from error

    def _wait(self, error: openai.APIStatusError, attempts: int) -> None:
        """Send nothing before the time that the server gave with a 429."""
        headers = error.response.headers
        wait_s = _wait_s(attempts)
        for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
            try:
                wait_s = float(headers[name]) * unit
                break
            except (KeyError, ValueError):
                continue
        if wait_s >= LONG_S:
            say(f"{self.url}: too many requests; waits for {duration(wait_s)}")
        self._not_before = max(self._not_before, time.monotonic() + wait_s)

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


def _wait_s(failures: int) -> float:
    """Return how long to wait after so many failures."""
    return min(FIRST_WAIT_S * 2.0 ** min(failures - 1, 10), LONGEST_WAIT_S)


def _refused(error: openai.APIStatusError) -> bool:
    """Return True for an error that says that the model must not answer."""
    return error.status_code == 400 and error.code == "content_filter"

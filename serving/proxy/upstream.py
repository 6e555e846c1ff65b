"""The endpoint that answers: requests go out and answers come back byte for byte.

aiohttp reads streams with half of httpx's CPU time; its errors are those of `FAULTS`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http import HttpProcessingError
from yarl import URL

from knobwise.common.errors import InputError
from knobwise.common.imports import in_a_line

CONNECT_S = 10.0
"""Seconds until an endpoint that cannot be reached is given up."""
FIRST_CONNECT_S = 5.0
"""The same when the server starts."""
IDLE_S = 4.0
"""Seconds that a connection is kept for the next request. Uvicorn, and with it vLLM and others, and
Node close theirs after 5: a request sent at that moment would look like a fault of the model."""
WHOLE_ANSWER = 6.0
"""A whole answer, of however many chunks, may take so many times the seconds that the endpoint may
keep silent."""
LONGEST_ANSWER = 256_000_000
"""Bytes of an answer that is no stream, from which on it counts as a fault."""
HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "trailers", "transfer-encoding", "upgrade",
))  # fmt: skip
"""Headers that end at each connection (RFC 9110, section 7.6.1)."""
NOT_SENT = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect", "origin", "cookie"}
SENDABLE = re.compile(rb"([^\x00\s]+([ \t]+[^\x00\s]+)*)?")
"""The value of a header as it may be sent (RFC 9110, section 5.5)."""
STATUSES = range(200, 600)
"""Statuses of an answer (RFC 9110, section 15)."""
Pairs = list[tuple[bytes, bytes]]


class UnknownStatus(aiohttp.ClientError):
    """An answer whose status is none of HTTP's."""


FAULTS = (aiohttp.ClientError, HttpProcessingError, TimeoutError, ValueError)
"""What an endpoint that gives no whole answer raises; a ValueError for an address that is none, an
HttpProcessingError for what is no HTTP where aiohttp has no compiled parser."""


class Upstream:
    """An endpoint of the OpenAI protocol.

    Args:
        endpoint: its address, with /v1; a query in it, such as ?api-version=…, goes with every
            request.
        key: its key, which takes the place of the client's; None to pass on the client's.
        own_token: True if clients send the token of this server, which stays here.
        timeout_s: how long it may keep silent.
    """

    def __init__(self, endpoint: str, key: str | None, own_token: bool, timeout_s: float) -> None:
        address = URL(endpoint)
        self._query = address.raw_query_string
        self._address = str(address.with_query(None)).rstrip("/")
        self._key = key
        self._own_token = own_token
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep connections within the block, in the process and the loop that it runs in."""
        async with self._new_session(CONNECT_S, self._timeout_s) as session:
            self._session = session
            yield

    def _new_session(self, connect_s: float, silent_s: float) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(connect_s, silent_s), sock_read=silent_s
        )
        return aiohttp.ClientSession(
            # as many connections as there are requests: a queue here would hide in their times
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=timeout,
            skip_auto_headers=("user-agent", "accept", "content-type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            # a proxy of the environment is for what is not on this machine
            trust_env=not _is_local(self._address),
        )

    async def send(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]],
        content: bytes,
        query: str = "",
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the answer when its headers are there; close it.

        Args:
            path: below the endpoint's address, such as /models, quoted.
            headers: of the client.
            query: of the client, as it came.

        Raises:
            aiohttp.ClientError, TimeoutError: it cannot be reached, or breaks off.
            UnknownStatus: it answers with what is no status.
        """
        assert self._session is not None
        response = await self._session.request(
            method,
            self._url(path, query),
            headers=self._headers(headers),
            data=content or None,
            allow_redirects=False,
        )
        if response.status not in STATUSES:
            response.close()
            raise UnknownStatus(f"status {response.status}")
        return response

    async def chunks_of(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield the content of an answer as it comes.

        Raises:
            aiohttp.ClientError: it breaks off, or is silent.
            TimeoutError: the whole takes too long.
        """
        loop = asyncio.get_running_loop()
        last = loop.time() + WHOLE_ANSWER * self._timeout_s
        chunks = response.content.iter_any()
        with _ending_with_connection(response):
            while True:
                # aiohttp's own timer of silence comes first, where it has not stopped it
                until = min(loop.time() + self._timeout_s + 1, last)
                try:
                    async with asyncio.timeout_at(until):
                        chunk = await anext(chunks, None)
                except RuntimeError as error:
                    # what aiohttp raises to whoever waits on a closed connection
                    raise aiohttp.ClientPayloadError(str(error)) from error
                if chunk is None:
                    return
                yield chunk

    async def content_of(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the content of an answer that is no stream.

        Raises:
            aiohttp.ClientError, TimeoutError: it breaks off, see `chunks_of`.
            ValueError: it is longer than any answer.
        """
        content = bytearray()
        async for chunk in self.chunks_of(response):
            content += chunk
            if len(content) > LONGEST_ANSWER:
                raise ValueError(f"an answer of more than {LONGEST_ANSWER:,} bytes")
        return bytes(content)

    def _url(self, path: str, query: str = "") -> URL:
        query = "&".join(filter(None, (self._query, query)))
        # nothing is quoted a second time
        return URL(f"{self._address}{path}{'?' if query else ''}{query}", encoded=True)

    def check(self) -> None:
        """Raise an InputError if the endpoint cannot be reached."""

        async def ask() -> None:
            address = self._url("/models")
            async with (
                self._new_session(FIRST_CONNECT_S, FIRST_CONNECT_S) as session,
                session.get(address, headers=self._headers([])),
            ):
                # whatever it says, it is there
                pass

        try:
            asyncio.run(ask())
        except aiohttp.ServerTimeoutError as error:
            # one that is there may be slow
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise self._unreachable(error) from error
        except FAULTS as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> InputError:
        return InputError(
            f"endpoint={self._address}: cannot be reached ({in_a_line(error)}); start it, or "
            "give another address"
        )

    def _headers(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
        """Return a client's headers as the endpoint gets them."""
        sent = []
        for name, value in headers:
            text = name.lower().decode("latin-1")
            # our own headers, and a token that is only for us, stay here
            ours = text.startswith(("x-knobwise-", "x-budget-")) or text == "x-limits"
            replaced = text == "authorization" and (self._own_token or self._key is not None)
            if text not in NOT_SENT and not ours and not replaced:
                sent.append((text, value.decode("latin-1")))
        if self._key is not None:
            sent.append(("authorization", f"Bearer {self._key}"))
        # what is compressed could not be read here, where an answer ends
        sent.append(("accept-encoding", "identity"))
        return sent


def passed_back(response: aiohttp.ClientResponse, rewritten: bool = False) -> Pairs:
    """Return the headers of an answer for the client.

    Args:
        rewritten: True if the content is not the endpoint's to the byte.
    """
    left_out = HOP_BY_HOP
    # what came compressed, although nobody asked for it, goes on as it was read
    if rewritten or "content-encoding" in response.headers:
        left_out = left_out | {"content-encoding", "content-length"}
    pairs = []
    # in their order, and as often as they came
    for name, value in response.raw_headers:
        lower = name.lower()
        text = lower.decode("latin-1")
        # another knobwise behind this one has headers of the same names
        ours = text.startswith("x-knobwise-")
        if text not in left_out and not ours and SENDABLE.fullmatch(value):
            pairs.append((lower, value))
    return pairs


@contextmanager
def _ending_with_connection(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Let whoever reads an answer in the block learn that its connection is gone.

    aiohttp 3.14 says nothing to the reader, and stops its own timer, where what the endpoint sent
    was no HTTP any more: it closes the connection, and the reader would wait for ever.
    """
    connection = response.connection
    content = response.content
    # an answer that is whole has given its connection back
    if connection is None or connection.protocol is None:
        yield
        return

    def end(closed: asyncio.Future[None] | None) -> None:
        if closed is not None and not closed.cancelled():
            # it has been looked at, so nobody is warned of it
            closed.exception()
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection broke off"))

    closed = connection.protocol.closed
    if closed is None:
        end(None)
        yield
        return
    closed.add_done_callback(end)
    try:
        yield
    finally:
        closed.remove_done_callback(end)


def media_type(headers: Mapping[str, str]) -> str:
    """Return the kind of content, in lower case, without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_local(address: str) -> bool:
    """Return True for an address on this machine."""
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    # a name that is no number may be anywhere
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

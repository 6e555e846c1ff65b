"""The endpoint that answers: requests go out and answers come back byte for byte."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx

from knobwise.common.errors import InputError
from knobwise.common.imports import in_a_line

CONNECT_S = 10.0
"""Seconds until an endpoint that cannot be reached is given up."""
FIRST_CONNECT_S = 5.0
"""The same when the server starts."""
HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "trailers", "transfer-encoding", "upgrade",
))  # fmt: skip
"""Headers that end at each connection (RFC 9110, section 7.6.1)."""
NOT_SENT = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect", "origin", "cookie"}
Pairs = list[tuple[bytes, bytes]]


class Upstream:
    """An endpoint of the OpenAI protocol.

    Args:
        endpoint: its address, with /v1.
        key: its key, which takes the place of the client's; None to pass on the client's.
        own_token: True if clients send the token of this server, which stays here.
        timeout_s: how long it may keep silent.
    """

    def __init__(self, endpoint: str, key: str | None, own_token: bool, timeout_s: float) -> None:
        self._address = endpoint.rstrip("/")
        self._key = key
        self._own_token = own_token
        self._timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None)
        self._client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep connections within the block, in the process and the loop that it runs in."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        # a proxy of the environment is for what is not on this machine
        trust = not _is_local(self._address)
        async with httpx.AsyncClient(
            timeout=self._timeout, limits=limits, trust_env=trust
        ) as client:
            self._client = client
            yield

    async def send(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], content: bytes
    ) -> httpx.Response:
        """Send a request, and return the answer when its headers are there; close it.

        Args:
            path: below the endpoint's address, such as /models.
            headers: of the client.

        Raises:
            httpx.TransportError: it cannot be reached, or breaks off.
        """
        assert self._client is not None
        request = self._client.build_request(
            method, self._address + path, headers=self._headers(headers), content=content
        )
        return await self._client.send(request, stream=True)

    def check(self) -> None:
        """Raise an InputError if the endpoint cannot be reached."""
        try:
            headers = self._headers([])
            trust = not _is_local(self._address)
            with httpx.Client(timeout=FIRST_CONNECT_S, trust_env=trust) as client:
                client.get(f"{self._address}/models", headers=headers)
        except httpx.ReadTimeout:
            # it is there, and slow
            return
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise InputError(
                f"endpoint={self._address}: cannot be reached ({in_a_line(error)}); start it, or "
                "give another address"
            ) from error

    def _headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
        """Return a client's headers as the endpoint gets them."""
        sent = []
        for name, value in headers:
            text = name.lower().decode("latin-1")
            ours = text.startswith("x-knobwise-") or text in ("x-budget-ms", "x-limits")
            replaced = text == "authorization" and (self._own_token or self._key is not None)
            if text not in NOT_SENT and not ours and not replaced:
                sent.append((name, value))
        if self._key is not None:
            sent.append((b"authorization", f"Bearer {self._key}".encode()))
        # what is compressed could not be read here, where an answer ends
        sent.append((b"accept-encoding", b"identity"))
        return sent


def passed_back(response: httpx.Response) -> Pairs:
    """Return the headers of an answer for the client."""
    pairs = []
    for name, value in response.headers.raw:
        lower = name.lower()
        if lower.decode("latin-1") not in HOP_BY_HOP:
            pairs.append((lower, value))
    return pairs


def media_type(headers: Mapping[str, str]) -> str:
    """Return the kind of content, in lower case, without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_local(address: str) -> bool:
    """Return True for an address on this machine."""
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Who may ask: the checks of a request before anything is done with it, and errors in the
protocol's shape."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from knobwise.serving.proxy.upstream import media_type

LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1", "[::1]"))
JSON = "application/json"
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
"""OpenAI's words for statuses; others are invalid requests below 500, and errors of a server from
there on."""


class Guards:
    """Checks that a request may be served.

    Args:
        hosts: the names under which this server is asked; None for any.
        token: what every request must bring as `Authorization: Bearer …`; None for nothing.
        most_bytes: the largest body.
    """

    def __init__(self, hosts: Collection[str] | None, token: str | None, most_bytes: int) -> None:
        self._hosts = hosts
        self._token = token
        self._most_bytes = most_bytes

    def check_host(self, headers: Headers) -> str:
        """Return the host that a request was sent to; refuse names by which nobody asks this
        server, which somebody may have pointed at it."""
        host = headers.get("host", "")
        # without the port, which an IPv6 address in brackets may lack
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self._hosts is not None and name.lower() not in self._hosts:
            raise HTTPException(403, f"Host {host}: is not one of {', '.join(sorted(self._hosts))}")
        return host

    def check(self, headers: Headers) -> None:
        """Refuse a request to another host, of a foreign page, or without the token."""
        host = self.check_host(headers)
        origin = headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            raise HTTPException(403, f"Origin {origin}: pages from elsewhere are not served")
        if not self.has_token(headers):
            raise HTTPException(401, "give the token of this server, KNOBWISE_TOKEN")

    def has_token(self, headers: Headers) -> bool:
        """Return True for a request with the token, if this server has one."""
        if self._token is None:
            return True
        # the scheme may be written in any case (RFC 9110, section 11.1)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._token.encode())
        return scheme.lower() == "bearer" and same

    async def read(self, request: Request, kinds: Collection[str] = (JSON,)) -> bytes:
        """Return the body of a request that no foreign page can have sent.

        Args:
            kinds: of content that are taken; none for any.
        """
        self.check(request.headers)
        if kinds and media_type(request.headers) not in kinds:
            raise HTTPException(415, f"give Content-Type: {' or '.join(kinds)}")
        # what the header says of the length may be wrong, so it is counted
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > self._most_bytes:
                raise HTTPException(413, f"the body has more than {self._most_bytes:,} bytes")
        return bytes(content)


def hosts_of(host: str, names: Collection[str]) -> frozenset[str] | None:
    """Return the names under which a server that listens at a host is asked; None for any."""
    # who listens for others has names that are not known here
    if host in LOOPBACK or names:
        return LOOPBACK | {host.lower()} | {name.lower() for name in names}
    return None


def refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Return an error as the protocol has it."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # half of a character, as a client may have sent it, could not be sent back
    message = message.encode(errors="backslashreplace").decode()
    error = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": error}, status)

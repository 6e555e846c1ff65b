"""Processes that serve at one port: forked once everything is loaded, and replaced when they
die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

    from starlette.applications import Starlette
    from starlette.types import Message, Receive, Scope, Send

PORT_S = 1.5
"""Seconds to wait for a port: the workers of a server that was killed end within half a second."""
LOOK_S = 0.05
"""Seconds between two looks at the workers."""
LAST_S = 1
"""Seconds that requests have, whatever `drain_s` says."""
CLOSE = (b"connection", b"close")
KEPT_S = 1.0
"""Seconds without a request after which a server that stops closes connections that are kept: one
may be on its way."""
AGAIN_S = 1.0
"""Seconds before a worker is replaced that died within as many seconds of its start."""


def listen(host: str, port: int) -> socket.socket:
    """Listen at a port. Raises InputError if another process does, or there is no such address."""
    last = time.monotonic() + PORT_S
    while True:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if time.monotonic() > last or error.errno != errno.EADDRINUSE:
                # asyncio and socket say the address once more
                reason = str(error.strerror).partition(" (")[0]
                raise InputError(
                    f"port={port}: cannot listen at {host} ({reason}); stop what listens "
                    "there, or choose another port=, or host="
                ) from error
        else:
            # connections inherit it; asyncio sets it only where a socket names its protocol, and
            # without it a chunk may wait 40 ms for the acknowledgement of the one before
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listening
        time.sleep(0.05)


class Worker:
    """Serves in a process of its own.

    Args:
        app: the application.
        began: called with the server, in the process, before it serves.
        leaves: called in the process when it is told to stop, before it closes the socket.
        listening: the socket.
        drain_s: seconds that requests under way have to end.
    """

    def __init__(
        self,
        app: Starlette,
        began: Callable[[uvicorn.Server], None],
        leaves: Callable[[], None],
        listening: socket.socket,
        drain_s: float,
    ) -> None:
        self._app = app
        self._began = began
        self._leaves = leaves
        self._listening = listening
        self._drain_s = drain_s

    def __call__(self, parent: int) -> None:
        """Serve until a signal comes, or until the parent process is gone."""
        # a signal may come before the server listens to it
        with contextlib.suppress(KeyboardInterrupt):
            self._serve(parent)

    def close(self) -> None:
        """Close this process' copy of the socket. It goes on listening as long as there is one."""
        self._listening.close()

    def _serve(self, parent: int) -> None:
        end_with(parent)
        # what is loaded stays, and the garbage collector need not walk through it in each pause
        gc.freeze()
        logging.getLogger("uvicorn.error").addFilter(_is_no_cut)
        # date and server are those of the endpoint, which are passed back
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http="h11",
            ws="none",
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=LAST_S,
        )
        self._server = _Server(config, self._leaves, self._drain_s)
        self._began(self._server)
        self._server.run([self._listening])

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a server that stops says that the connection is not kept."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and self._server.should_exit:
                message = {**message, "headers": [*message.get("headers", []), CLOSE]}
            await send(message)

        await self._app(scope, receive, sent)


class _Server(uvicorn.Server):
    """Closes its socket first when it is stopped, and answers whoever had connected before.

    Args:
        leaves: called before the socket is closed.
        drain_s: seconds that requests under way have to end.
    """

    def __init__(self, config: uvicorn.Config, leaves: Callable[[], None], drain_s: float) -> None:
        super().__init__(config)
        self._leaves = leaves
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the socket, let requests end, and then what uvicorn does."""
        last = time.monotonic() + self._drain_s - LAST_S
        self._leaves()
        await self._close(sockets or [])
        quiet = time.monotonic()
        # those that have just come are no connections yet
        await asyncio.sleep(LOOK_S)
        while self.server_state.connections and time.monotonic() < last and not self.force_exit:
            if self.server_state.tasks:
                quiet = time.monotonic()
            elif time.monotonic() > quiet + KEPT_S:
                break
            await asyncio.sleep(LOOK_S)
        await super().shutdown(sockets)

    async def _close(self, sockets: list[socket.socket]) -> None:
        """Close the sockets, and go on with the connections that wait there: they would be reset
        once no process has the socket any more."""
        loop = asyncio.get_running_loop()
        for listening in sockets:
            loop.remove_reader(listening)
        # what asyncio has accepted just now becomes a connection of its server, which must be open
        await asyncio.sleep(0)
        # from here until they are closed nothing else is done: whoever comes then is reset
        waiting = [connection for listening in sockets for connection in _waiting_at(listening)]
        for server in self.servers:
            server.close()
        for listening in sockets:
            listening.close()
        for connection in waiting:
            connection.setblocking(False)
            await loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        """Return what speaks HTTP on a connection."""
        kind = self.config.http_protocol_class
        assert not isinstance(kind, str)
        return kind(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def _waiting_at(listening: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that wait to be accepted."""
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue
        except OSError:
            # there is none, or no descriptor is left for it
            return


def _is_no_cut(record: logging.LogRecord) -> bool:
    """Return False for what uvicorn says where an answer is cut because the endpoint cut it."""
    return "without completing response" not in str(record.msg)


def serve_in_workers(
    worker: Worker, count: int, drain_s: float, gone: Callable[[int], None]
) -> None:
    """Keep as many workers as there should be, until this process is interrupted; then let them
    end.

    Args:
        gone: called with the process id of a worker that died.
    """
    forked = multiprocessing.get_context("fork")
    workers: dict[ForkProcess, float] = {}
    try:
        while True:
            for process in [process for process in workers if not process.is_alive()]:
                assert process.pid is not None
                gone(process.pid)
                # one that cannot start must not take all the time there is
                time.sleep(max(0.0, workers.pop(process) + AGAIN_S - time.monotonic()))
            while len(workers) < count:
                # daemons: they are stopped when this process ends
                process = forked.Process(target=worker, args=(os.getpid(),), daemon=True)
                process.start()
                workers[process] = time.monotonic()
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        # the way to stop it, and no failure
        worker.close()
    finally:
        for process in workers:
            process.terminate()
        # a stream may take as long as it was promised
        last = time.monotonic() + drain_s + 1
        for process in workers:
            process.join(max(0.0, last - time.monotonic()))

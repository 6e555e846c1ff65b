"""Processes that serve at one port: forked once everything is loaded, and replaced when they
die."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

    from starlette.applications import Starlette

PORT_S = 1.5
"""Seconds to wait for a port: the workers of a server that was killed end within half a second."""
LOOK_S = 0.05
"""Seconds between two looks at the workers."""
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
        listening: the socket.
        drain_s: seconds that requests under way have to end.
    """

    def __init__(
        self, app: Starlette, began: Callable[[uvicorn.Server], None], listening: socket.socket,
        drain_s: float,
    ) -> None:  # fmt: skip
        self._app = app
        self._began = began
        self._listening = listening
        self._drain_s = drain_s

    def __call__(self, parent: int) -> None:
        """Serve until a signal comes, or until the parent process is gone."""
        # a signal may come before the server listens to it
        with contextlib.suppress(KeyboardInterrupt):
            self._serve(parent)

    def _serve(self, parent: int) -> None:
        end_with(parent)
        # what is loaded stays, and the garbage collector need not walk through it in each pause
        gc.freeze()
        logging.getLogger("uvicorn.error").addFilter(_is_no_cut)
        # date and server are those of the endpoint, which are passed back
        config = uvicorn.Config(
            self._app,
            http="h11",
            ws="none",
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
        )
        server = uvicorn.Server(config)
        self._began(server)
        server.run([self._listening])


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
        pass
    finally:
        for process in workers:
            process.terminate()
        # a stream may take as long as it was promised
        last = time.monotonic() + drain_s + 1
        for process in workers:
            process.join(max(0.0, last - time.monotonic()))

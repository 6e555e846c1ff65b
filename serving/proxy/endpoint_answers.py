"""How the endpoint's last answers were, for all processes of a server together."""

from __future__ import annotations

import mmap
import struct
import time

LAST = 100
"""How many of the last answers are counted."""
FAILING_S = 30.0
"""Seconds of nothing but failures, the last of them no longer ago, after which this server is not
ready. Where nobody asks for as long it is ready again, since only a request can tell."""
HEAD = struct.Struct("<dddq")
"""When the last success was, when failures began since, when the last one was, by the monotonic
clock, 0 for never; and how many answers there were."""


class EndpointAnswers:
    """The last answers of the endpoint, in memory that forked processes share.

    There is no lock, since a process may be killed while it holds one: of two answers that come at
    the same moment one may not be counted.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, HEAD.size + LAST)

    def add(self, good: bool, now: float | None = None) -> None:
        """Count an answer.

        Args:
            good: False for a failure of the endpoint.
            now: by the monotonic clock, in s; None for now.
        """
        now = time.monotonic() if now is None else now
        succeeded, failing_since, failed, count = HEAD.unpack_from(self._memory)
        if good:
            succeeded, failing_since = now, 0.0
        else:
            failing_since, failed = failing_since or now, now
        self._memory[HEAD.size + count % LAST] = good
        HEAD.pack_into(self._memory, 0, succeeded, failing_since, failed, count + 1)

    def is_failing(self, now: float | None = None) -> bool:
        """Return True while all answers are failures, for `FAILING_S` and until lately."""
        now = time.monotonic() if now is None else now
        _, failing_since, failed, _ = HEAD.unpack_from(self._memory)
        return bool(failing_since) and now - failing_since >= FAILING_S > now - failed

    def summary(self, now: float | None = None) -> dict[str, int | float | None]:
        """Return of how many of the last answers, up to `LAST`, how many failed, and how many s ago
        the last success was, None for never."""
        now = time.monotonic() if now is None else now
        succeeded, _, _, count = HEAD.unpack_from(self._memory)
        last = self._memory[HEAD.size : HEAD.size + min(count, LAST)]
        since = round(now - succeeded, 3) if succeeded else None
        return {"answers": len(last), "failed": last.count(0), "since_success_s": since}

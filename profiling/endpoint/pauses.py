"""When to send requests again to a server that turns them away."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from knobwise.common.errors import InputError
from knobwise.common.progress import duration, say

FIRST_WAIT_S = 0.5
"""The wait after a failure, twice as long after each further one."""
LONGEST_WAIT_S = 60.0
LONG_S = 10.0
"""From here on a wait is told."""
LONGEST_PAUSE_S = 3600.0
"""A server that turns all requests away for so long is given up."""


def backoff_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return min(FIRST_WAIT_S * 2.0 ** min(failures - 1, 10), LONGEST_WAIT_S)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how long a server says to wait, in seconds or until a date; None if it says nothing,
    or nothing that can be waited for: NaN, no finite time, none to come."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(headers[name]) * unit
        except KeyError:
            continue
        except ValueError:
            wait_s = _until_s(headers[name], headers)
        if 0 <= wait_s < math.inf:
            return wait_s
    return None


def _until_s(date: str, headers: Mapping[str, str]) -> float:
    """Return the seconds until a date, by the server's clock where it tells it; NaN for none."""
    try:
        until = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return math.nan
    try:
        now = parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, OverflowError):
        now = time.time()
    return until - now


class Pauses:
    """The pauses that a server demands, which hold for all requests alike.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._not_before = 0.0
        # the first request since the last answer that was turned away
        self._since: float | None = None

    @property
    def left_s(self) -> float:
        """How long nothing may be sent; 0 or less if something may."""
        return self._not_before - time.monotonic()

    def answered(self) -> None:
        """Note that the server answers."""
        self._since = None

    def turned_away(self, headers: Mapping[str, str], attempts: int) -> None:
        """Send nothing before the time that the server gives.

        Args:
            attempts: how often the request was sent. What the server says was wrong for one that it
                turned away before, so that the wait is then no shorter than without a word of it.

        Raises:
            InputError: it is too long since any request was answered, or will be.
        """
        now = time.monotonic()
        wait_s = retry_after_s(headers)
        if wait_s is None:
            wait_s = backoff_s(attempts)
        elif attempts > 1:
            wait_s = max(wait_s, backoff_s(attempts - 1))
        self._since = self._since or now
        if now + wait_s - self._since > LONGEST_PAUSE_S:
            raise InputError(
                f"endpoint={self._url}: turns requests away (429) for {duration(now - self._since)}"
                f", and says to wait for {duration(wait_s)}; the same command goes on later"
            )
        if wait_s >= LONG_S:
            say(f"{self._url}: too many requests; waits for {duration(wait_s)}")
        self._not_before = max(self._not_before, now + wait_s)

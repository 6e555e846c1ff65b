"""Progress with an honest time left: rich bars in a terminal, a plain line now and then elsewhere.

The work must not depend on who watches: when stderr is closed or the terminal is gone, nothing is
shown. A bar is drawn only when the work ticks, by the thread that works: one that redraws itself
would disturb what is measured.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from knobwise.common.bars import Bar

Tick = Callable[..., None]
"""Takes the number of steps done, and optionally a note."""


@contextmanager
def progress(
    title: str, total: int, done: int = 0, every_s: float = 60.0, quiet_s: float = 0.0
) -> Iterator[Tick]:
    """Yield ``tick(done, note)``. The time left counts this session alone: resumed work does not
    flatter it.

    Bars may be nested; an inner bar disappears when it is done. Without a terminal, and in a
    process that works for another one, a line goes to stderr every ``every_s`` seconds and at the
    end.

    Args:
        title: of the work.
        total: the number of steps.
        done: steps done in an earlier session.
        every_s: seconds between plain lines.
        quiet_s: seconds before anything is shown, so that short work stays silent.
    """
    start = latest = time.monotonic()
    ended = False
    bar = Bar() if has_terminal() else None
    first = done

    def tick(done: int, note: str = "") -> None:
        nonlocal latest, ended
        now = time.monotonic()
        # nothing is shown of short work
        if now - start < quiet_s:
            return
        left = _left(now - start, done - first, total - done)
        if bar is not None:
            bar.show(now, title, total=total, completed=done, left=left, note=note)
        # a second tick at the end says nothing
        elif now - latest >= every_s or (done == total and not ended):
            latest = now
            ended = done == total
            say(" · ".join(filter(None, [f"{title}: {done}/{total}, {left}", note])))

    if bar is None:
        yield tick
        return
    tick(done)
    try:
        yield tick
    finally:
        bar.remove()


def say(line: str) -> None:
    """Write a line to stderr, if anybody can read it."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Return a duration in words: `40 s`, `3 min`, `2.5 h`."""
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds > 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"


def has_terminal() -> bool:
    """Return True if stderr is a terminal for bars.

    Forced colours do not make a file a terminal. A process that works for another process leaves
    the terminal to that.
    """
    if multiprocessing.parent_process() is not None:
        return False
    # stderr may be None, closed, or anything with `write`
    with suppress(AttributeError, OSError, ValueError):
        if sys.stderr.isatty():
            # nothing else needs Rich
            from rich.console import Console

            console = Console(stderr=True)
            return console.is_terminal and not console.is_dumb_terminal
    return False


def _left(seconds: float, steps: int, remaining: int) -> str:
    """Return in words how long the remaining steps take, at the speed of those of this session."""
    if remaining <= 0:
        return f"done in {duration(seconds)}"
    if steps <= 0:
        return "time left unknown"
    return (
        f"{duration(max(1.0, seconds / steps * remaining))} left"  # 0 s would mean that it is done
    )

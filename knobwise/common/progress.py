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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

Tick = Callable[..., None]
"""Takes the number of steps done, and optionally a note."""
REDRAW_S = 0.1
"""Seconds between two drawings of a bar."""
NUMBERS = 40
"""Columns of a terminal for title, bar and numbers; the note has the others."""


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
    bar = _Bar() if has_terminal() else None
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
        console = Console(stderr=True)
        return sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
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


class _Bar:
    """A bar in the terminal; nested ones stand below each other, in one display."""

    display: Progress | None = None
    drawn = 0.0
    task: TaskID | None = None

    def show(self, now: float, title: str, **values: Any) -> None:
        with suppress(OSError, ValueError):  # the terminal may be gone
            display = _Bar.display = _Bar.display or _display()
            # the first time
            if self.task is None:
                self.task = display.add_task(title, **values)
                _Bar.drawn = 0.0
                display.start()
            display.update(self.task, **values)
            if now - self.drawn >= REDRAW_S:
                _Bar.drawn = now
                display.refresh()

    def remove(self) -> None:
        """Take the bar away; the last one stays as it is, in the scrollback."""
        display = self.display
        with suppress(OSError, ValueError):
            if display is None or self.task is None:
                return
            if len(display.tasks) > 1:
                display.remove_task(self.task)
                return
            _Bar.display = None
            display.stop()


def _display() -> Progress:
    console = Console(stderr=True)
    # a long note must not break the line
    room = Column(no_wrap=True, max_width=max(8, console.width - NUMBERS))
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[note]}", markup=False, table_column=room),
        console=console,
        auto_refresh=False,
        expand=True,
        # output that goes into a file must not appear in the terminal instead
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )

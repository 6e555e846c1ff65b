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
from threading import RLock
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

Tick = Callable[[int, str], None]
REDRAW_S = 0.1
"""Seconds between two drawings of a bar."""
NUMBERS = 52
"""Columns of a terminal for title, bar and numbers; the note has the others."""


@contextmanager
def progress(
    title: str, total: int, done: int = 0, every_s: float = 60.0, quiet_s: float = 0.0
) -> Iterator[Tick]:
    """Yield ``tick(done, note)``. Rate and time left count this session alone: resumed work does
    not flatter them.

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
    if not has_terminal():
        yield _Lines(title, total, done, quiet_s, every_s).tick
        return
    bar = _Bar(title, total, done, quiet_s)
    bar.tick(done)
    try:
        yield bar.tick
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


class _Pace:
    """The speed of the work and the time left; `first` steps were done before."""

    def __init__(self, title: str, total: int, first: int, quiet_s: float) -> None:
        self.title = title
        self.total = total
        self.first = first
        self.quiet_s = quiet_s
        self.start = time.monotonic()

    def is_short(self) -> bool:
        return time.monotonic() - self.start < self.quiet_s

    def left(self, done: int) -> str:
        seconds = time.monotonic() - self.start
        if done >= self.total:
            return f"done in {duration(seconds)}"
        if done <= self.first:
            return "time left unknown"
        left = seconds / (done - self.first) * (self.total - done)
        return f"{duration(max(1.0, left))} left"  # 0 s would mean that it is done

    def rate(self, done: int) -> str:
        steps = done - self.first
        seconds = time.monotonic() - self.start
        if steps <= 0 or seconds <= 0:
            return "– it/s"
        if steps >= seconds:
            return f"{steps / seconds:.1f} it/s"
        return f"{seconds / steps:.1f} s/it"


class _Lines(_Pace):
    """A plain line now and then."""

    def __init__(self, title: str, total: int, first: int, quiet_s: float, every_s: float) -> None:
        super().__init__(title, total, first, quiet_s)
        self.every_s = every_s
        self.last = self.start
        self.ended = False

    def tick(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        at_end = done == self.total and not self.ended  # a second tick at the end says nothing
        if now - self.last >= self.every_s or (at_end and not self.is_short()):
            self.last = now
            self.ended = at_end or self.ended
            line = f"{self.title}: {done}/{self.total}, {self.left(done)}"
            say(f"{line} · {note}" if note else line)


class _Bar(_Pace):
    """A bar in the terminal; nested ones stand below each other, in one display."""

    display: Progress | None = None
    drawn_s = 0.0
    lock = RLock()
    task: TaskID | None = None

    def tick(self, done: int, note: str = "") -> None:
        if self.task is None and self.is_short():
            return
        values: dict[str, Any] = {"rate": self.rate(done), "left": self.left(done), "note": note}
        with self.lock, suppress(OSError, ValueError):
            display = _Bar.display = _Bar.display or _display()
            now = time.monotonic()
            if self.task is None:
                self.task = display.add_task(self.title, total=self.total, completed=done, **values)
                display.start()
                _Bar.drawn_s = now
                return
            display.update(self.task, completed=done, **values)
            if now - self.drawn_s >= REDRAW_S:
                _Bar.drawn_s = now
                display.refresh()

    def remove(self) -> None:
        """Take the bar away; the last one stays as it is, in the scrollback."""
        with self.lock, suppress(OSError, ValueError):
            if self.display is None or self.task is None:
                return
            if len(self.display.tasks) > 1:
                self.display.remove_task(self.task)
                return
            ended = self.display
            _Bar.display = None
            ended.stop()


def _display() -> Progress:
    console = Console(stderr=True)
    room = Column(no_wrap=True, max_width=max(8, console.width - NUMBERS))
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[rate]} · {task.fields[left]}"),
        TextColumn("{task.fields[note]}", markup=False, table_column=room),
        console=console,
        auto_refresh=False,
        expand=True,
        # output that goes into a file must not appear in the terminal instead
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )

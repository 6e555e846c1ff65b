"""Progress with an honest time left: rich bars in a terminal, a plain line once in a while elsewhere.

Whether anybody looks must not matter to the work: when stderr is closed, or the terminal is gone, nothing is shown. A
bar is drawn only where work ticks, by the thread that works: one that redraws itself would disturb what is measured.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing.context import BaseContext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

Tick = Callable[[int, str], None]
REDRAWN_S = 0.1
"""A bar is drawn anew at most so often."""
SENT_S = 0.2
"""So often another process says how far it is."""


@contextmanager
def progress(title: str, total: int, done: int = 0, every_s: float = 60.0, quiet_s: float = 0.0) -> Iterator[Tick]:
    """Yield ``tick(done, note)``; rate and time left go by this session alone: what was resumed does not flatter them.

    Bars may be nested, the inner one then goes when it is done. Without a terminal a line goes to stderr every
    ``every_s`` seconds and at the end. Nothing is shown in the first ``quiet_s`` seconds: work that may be short then
    says nothing. In a process started by `workers_shown` it is that one's terminal which counts.

    Args:
        title: what is being done.
        total: how many steps there are.
        done: how many were done in an earlier session.
        every_s: seconds between plain lines.
        quiet_s: seconds before anything is shown.
    """
    pace = _Pace(total, done)
    with ExitStack() as shown:
        if _to_parent is not None:
            how: AbstractContextManager[Tick] = _sent(title, pace, every_s, quiet_s)
        elif _has_terminal():
            how = _bar(title, pace, quiet_s)
        else:
            how = _lines(title, pace, every_s, quiet_s)
        yield shown.enter_context(how)


def say(line: str) -> None:
    """A line for whoever is there, on stderr; where that is gone, for nobody."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class _Pace:
    """How fast it goes: `first` steps were done before."""

    def __init__(self, total: int, first: int) -> None:
        self.total, self.first, self.start = total, first, time.monotonic()

    def left(self, done: int, seconds: float) -> str:
        if done >= self.total:
            return f"done in {_seconds(seconds)}"
        if done <= self.first:
            return "time left unknown"
        left = seconds / (done - self.first) * (self.total - done)
        return f"{_seconds(max(1.0, left))} left"  # 0 s would say that it is done

    def rate(self, done: int, seconds: float) -> str:
        steps = done - self.first
        if steps <= 0 or seconds <= 0:
            return "– it/s"
        return f"{steps / seconds:.1f} it/s" if steps >= seconds else f"{seconds / steps:.1f} s/it"


def _seconds(seconds: float) -> str:
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _has_terminal() -> bool:
    """Whether stderr is a terminal that a bar can be drawn in; that colours were asked for does not make it one.

    What works for another process leaves the terminal to that one: its bars would be written over.
    """
    if multiprocessing.parent_process() is not None:
        return False
    with suppress(AttributeError, OSError, ValueError):  # stderr may be None, closed, or anything with `write`
        console = Console(stderr=True)
        return sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
    return False


# -- plain lines -------------------------------------------------------------------------------------------------------


@contextmanager
def _lines(title: str, pace: _Pace, every_s: float, quiet_s: float) -> Iterator[Tick]:
    last, ended = pace.start, False

    def tick(done: int, note: str = "") -> None:
        nonlocal last, ended
        now = time.monotonic()
        ends = done == pace.total and not ended  # who ticks again at the end has said it
        if now - last >= every_s or (ends and now - pace.start >= quiet_s):
            last, ended = now, ends or ended
            line = f"{title}: {done}/{pace.total}, {pace.left(done, now - pace.start)}"
            say(f"{line} · {note}" if note else line)

    yield tick


# -- bars --------------------------------------------------------------------------------------------------------------


class _Bars:
    """The bars in this terminal, one below the other."""

    def __init__(self) -> None:
        self._lock, self._ids, self._drawn = threading.RLock(), set[TaskID](), -math.inf
        self._progress: Progress | None = None

    def add(self, title: str, pace: _Pace) -> TaskID:
        with self._lock, suppress(OSError, ValueError):
            if self._progress is None:
                self._drawn = -math.inf
                times = TextColumn("{task.fields[rate]} · {task.fields[left]}")
                columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
                           TextColumn("{task.completed}/{task.total}"), times,
                           TextColumn("{task.fields[note]}", markup=False))  # fmt: skip
                self._progress = Progress(
                    *columns,
                    console=Console(stderr=True),
                    auto_refresh=False,
                    expand=True,
                    # what goes into a file must not come to the terminal instead
                    redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
                )
            done, rate, left = pace.first, pace.rate(pace.first, 0), pace.left(pace.first, 0)
            task = self._progress.add_task(title, total=pace.total, completed=done, rate=rate, left=left, note="")
            self._ids.add(task)
            self._progress.start()
            return task
        return TaskID(-1)

    def update(self, task: TaskID, now: float, **values: Any) -> None:
        with self._lock, suppress(OSError, ValueError):
            if self._progress is None or task not in self._ids:
                return
            self._progress.update(task, **values)
            if now - self._drawn >= REDRAWN_S:
                self._drawn = now
                self._progress.refresh()

    def remove(self, task: TaskID) -> None:
        """Take a bar away; the last one stays as it is, in the scrollback."""
        with self._lock, suppress(OSError, ValueError):
            if self._progress is None or task not in self._ids:
                return
            self._ids.remove(task)
            if self._ids:
                self._progress.remove_task(task)
                return
            ended, self._progress = self._progress, None
            ended.stop()


_bars = _Bars()


@contextmanager
def _bar(title: str, pace: _Pace, quiet_s: float) -> Iterator[Tick]:
    task: TaskID | None = None if quiet_s else _bars.add(title, pace)
    done, note = pace.first, ""

    def draw(now_done: int, now_note: str = "") -> None:
        nonlocal task, done, note
        done, note, now = now_done, now_note, time.monotonic()
        if task is None:
            if now - pace.start < quiet_s:
                return
            task = _bars.add(title, pace)
        seconds = now - pace.start
        _bars.update(task, now, completed=done, note=note, rate=pace.rate(done, seconds), left=pace.left(done, seconds))

    try:
        yield draw
    finally:
        if task is not None:
            _bars.remove(task)


# -- of several processes ----------------------------------------------------------------------------------------------

_to_parent: Any = None  # the queue of the process that shows what this one does
_numbers = itertools.count()


@contextmanager
def workers_shown(context: BaseContext) -> Iterator[tuple[Any, ...]]:
    """Show the progress of other processes in this one's terminal; without a terminal they say their own lines.

    Yields:
        arguments for `show_in_parent`, which each of the processes calls first.
    """
    if not _has_terminal():
        yield (None,)
        return
    queue = context.SimpleQueue()
    receiver = threading.Thread(target=_receive, args=(queue,), daemon=True)
    receiver.start()
    try:
        yield (queue,)
    finally:
        queue.put(None)
        receiver.join()


def show_in_parent(queue: Any) -> None:
    """From here on what this process does is shown by the one that started it, see `workers_shown`."""
    global _to_parent
    _to_parent = queue


def _receive(queue: Any) -> None:
    shown: dict[Any, tuple[ExitStack, Tick]] = {}
    while (message := queue.get()) is not None:
        key, told = message
        if key not in shown:
            stack = ExitStack()
            shown[key] = stack, stack.enter_context(progress(*told))
        elif told is None:
            shown.pop(key)[0].close()
        else:
            shown[key][1](*told)
    for stack, _ in shown.values():
        stack.close()


@contextmanager
def _sent(title: str, pace: _Pace, every_s: float, quiet_s: float) -> Iterator[Tick]:
    key, last = (os.getpid(), next(_numbers)), pace.start
    _to_parent.put((key, (title, pace.total, pace.first, every_s, quiet_s)))

    def send(done: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SENT_S or done == pace.total:
            last = now
            _to_parent.put((key, (done, note)))

    try:
        yield send
    finally:
        _to_parent.put((key, None))

"""Ctrl-C and the other signals that ask a process to stop, and how long work comes to a good end when one arrives.

SIGINT (Ctrl-C), SIGTERM (schedulers) and SIGHUP (the terminal is gone) all become a `KeyboardInterrupt` with the number
of the signal. Where this process was told to ignore one of them, as by nohup, it stays ignored.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 1.0
"""A signal so many seconds after another one is the same wish: terminals, schedulers and `timeout` signal a whole group
of processes, and whoever started this one passes the signal on."""

LOOKED_S = 0.2
"""So often `as_ended` looks for a signal."""

Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], None]
_latest_s, _arrived = -SAME_S, 0


def _is_new(number: int) -> bool:
    """Note a signal; False for one that only repeats the one before."""
    global _latest_s, _arrived
    before, _latest_s = _latest_s, time.monotonic()
    _arrived = number
    return _latest_s - before >= SAME_S


def arrived() -> int:
    """The number of the last signal that was handled here; 0 as long as none came."""
    return _arrived


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Handle the signals by `handler` within the block; only the main thread can, in another one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None: installed by something else than Python, and not to be put back
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in taken:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block each of the signals raises `KeyboardInterrupt(number)` at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if _is_new(number):
            raise KeyboardInterrupt(number)

    with _handling(stop):
        yield


class Held:
    """The wish to stop, while it is held back."""

    asked: int | None = None
    """The number of the signal that came; None as long as none did."""
    _whole = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A block that not even a second signal breaks: for saving."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def check(self) -> None:
        """Stop here when that was asked for.

        Raises:
            KeyboardInterrupt: with the number of the signal.
        """
        if self.asked is not None:
            raise KeyboardInterrupt(self.asked)


@contextmanager
def held_back(active: bool = True, say: str = "") -> Iterator[Held]:
    """Hold the signals back, so that the block stops where it can go on from: by `check`, which it calls there.

    A second signal, later than `SAME_S` after the first, stops it at once. What is still held back when the block ends
    is raised then.

    Args:
        active: False holds nothing back.
        say: a line for stderr when a signal was held back.
    """
    held = Held()

    def note(number: int, frame: FrameType | None) -> None:
        if not _is_new(number):
            return
        if held.asked is None:
            held.asked = number
            if say:
                with suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr may be gone, or be in use
                    sys.stderr.write(f"\n{say}\n")
        elif not held._whole:
            raise KeyboardInterrupt(number)

    if not active:
        yield held
        return
    with _handling(note):
        yield held
    held.check()


def status_of(stop: KeyboardInterrupt) -> int:
    """The exit status that shells expect of a process stopped by this: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (stop.args[0] if stop.args and isinstance(stop.args[0], int) else signal.SIGINT)


# -- processes that work for this one ----------------------------------------------------------------------------------


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals in this thread; a process that is started in the block begins with them blocked, so that none
    breaks it before `stopped_only_by_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def as_ended(futures: Iterable[Future[Result]]) -> Iterator[Future[Result]]:
    """`concurrent.futures.as_completed` that a signal breaks within `LOOKED_S`: where the system gives the signal to
    another thread, waiting for a lock does not end, and Python handles it only when the main thread does something."""
    pending = set(futures)
    while pending:
        ended, pending = wait(pending, LOOKED_S, FIRST_COMPLETED)
        yield from ended


def stopped_only_by_parent() -> None:
    """In a process that works for another one: leave Ctrl-C and the end of the terminal, which the other one gets too,
    to that one; note its SIGTERM for `arrived`. While it works, `stopped_by_signals` makes that stop it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _is_new(number) and None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

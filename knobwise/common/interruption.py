"""Ctrl-C and the other signals that ask a process to stop: work finishes its step, saves, and stops then.

SIGINT (Ctrl-C), SIGTERM (schedulers) and SIGHUP (the terminal is gone) all become a `KeyboardInterrupt` with the number
of the signal. A signal that this process was told to ignore, as by nohup, stays ignored.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from knobwise.common.progress import say as write

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 1.0
"""A signal within so many seconds of another one is the same wish: terminals, schedulers and `timeout` signal a whole
group of processes, and the parent passes the signal on."""

Handler = Callable[[int, FrameType | None], None]
_latest_s = -SAME_S


def is_new() -> bool:
    """Note that a signal came; False for one that repeats the one before."""
    global _latest_s
    before, _latest_s = _latest_s, time.monotonic()
    return _latest_s - before >= SAME_S


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Handle the signals by `handler` within the block. Only the main thread can; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None: installed by something else than Python, which cannot be put back
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
        if is_new():
            raise KeyboardInterrupt(number)

    with _handling(stop):
        yield


class Held:
    """The wish to stop, while it is held back."""

    number: int | None = None
    """The number of the signal that came; None as long as none did."""
    _saving = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A block that not even a second signal breaks: for saving."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def check(self) -> None:
        """Raise KeyboardInterrupt, with the number of the signal, if a signal came."""
        if self.number is not None:
            raise KeyboardInterrupt(self.number)


@contextmanager
def held_back(active: bool = True, say: str = "") -> Iterator[Held]:
    """Hold signals back, so that the block stops where it can be resumed from: where it calls `check`.

    A second signal, later than `SAME_S` after the first, stops the block at once. A signal that is still held back when
    the block ends is raised then.

    Args:
        active: False holds nothing back.
        say: a line for stderr when a signal comes.
    """
    held = Held()

    def note(number: int, frame: FrameType | None) -> None:
        if not is_new():
            return
        if held.number is None:
            held.number = number
            if say:
                write(f"\n{say}")
        elif not held._saving:
            raise KeyboardInterrupt(number)

    if not active:
        yield held
        return
    with _handling(note):
        yield held
    held.check()


def status_of(stop: KeyboardInterrupt) -> int:
    """The exit status that shells expect after this: 130 for Ctrl-C, 143 for SIGTERM."""
    number = next(iter(stop.args), None)
    return 128 + (number if isinstance(number, int) else signal.SIGINT)

"""Ctrl-C and the other signals that ask a process to stop: work finishes its step, saves, and stops
then.

SIGINT (Ctrl-C), SIGTERM (schedulers) and SIGHUP (the terminal is gone) all become a
`KeyboardInterrupt` with the number of the signal. A signal that this process was told to ignore, as
by nohup, stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from knobwise.common.progress import say as write

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 1.0
"""A signal within so many seconds of another one is the same wish: terminals, schedulers and
`timeout` signal a whole group of processes, and the parent passes the signal on."""
_latest_s = -SAME_S


def is_new() -> bool:
    """Note that a signal came, and return False if it repeats the latest one."""
    global _latest_s
    before = _latest_s
    _latest_s = time.monotonic()
    return _latest_s - before >= SAME_S


@contextmanager
def _handling(react: Callable[[int], None]) -> Iterator[None]:
    """Call `react` with each new signal within the block.

    Only the main thread can handle signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # a whole group of processes is signalled at once
    def handle(number: int, frame: FrameType | None) -> None:
        if is_new():
            react(number)

    # None: installed by something else than Python, which cannot be put back
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in taken:
            signal.signal(number, handle)
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


def _stop(number: int) -> None:
    raise KeyboardInterrupt(number)


def stopped_by_signals() -> AbstractContextManager[None]:
    """Return a block within which each signal raises `KeyboardInterrupt(number)` at once."""
    return _handling(_stop)


class Held:
    """A signal that is held back; `say` is a line for stderr when the first one comes."""

    def __init__(self, say: str = "") -> None:
        self.number: int | None = None
        """The number of the signal that came; None as long as none did."""
        self._say = say
        self._saving = False

    def react(self, number: int) -> None:
        """Keep the first signal; a second one stops at once, except while saving."""
        if self.number is None:
            self.number = number
            if self._say:
                write(f"\n{self._say}")
        elif not self._saving:
            _stop(number)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Protect a block, such as saving, from even a second signal."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def check(self) -> None:
        """Raise KeyboardInterrupt, with the number of the signal, if a signal came."""
        if self.number is not None:
            _stop(self.number)


@contextmanager
def held_back(active: bool = True, say: str = "") -> Iterator[Held]:
    """Hold signals back, so that the block stops only where it calls `check`, to be resumed there.

    A second signal, later than `SAME_S` after the first, stops the block at once. A signal that is
    still held back when the block ends is raised then. If not `active`, nothing is held back.
    """
    # what is held back is raised by `check`, at the latest here
    held = Held(say)
    with _handling(held.react) if active else nullcontext():
        yield held
    held.check()


def status_of(stop: KeyboardInterrupt) -> int:
    """Return the exit status that shells expect: 130 after Ctrl-C, 143 after SIGTERM."""
    number = next(iter(stop.args), None)
    return 128 + (number if isinstance(number, int) else signal.SIGINT)


def end_with(starter: int) -> None:
    """Have this process end soon after its parent, or it would go on writing beside the work that
    resumes.

    Args:
        starter: the id of the parent, which may be gone already.
    """

    # a process gets another parent when its own is gone
    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

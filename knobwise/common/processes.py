"""Work in several processes at once, all of which save and stop when a signal comes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from knobwise.common.interruption import SIGNALS, is_new, status_of, stopped_by_signals
from knobwise.common.progress import progress

POLL_S = 0.2
"""Seconds between chances for a signal to be handled. A signal that the system gives to another
thread does not end the wait for a lock, and Python handles it only when the main thread does
something."""


class _Stopped(NamedTuple):
    """A piece of work that a signal stopped, with its notes on what is saved."""

    number: int
    notes: list[str]


def in_processes(
    title: str,
    work: Callable[..., str],
    pieces: Sequence[tuple[Any, ...]],
    jobs: int,
    done: int = 0,
) -> list[str]:
    """Call `work(*piece)` for every piece, each in a process of its own, `jobs` at the same time.

    Returns the notes of the calls, in the order in which they ended. The first error stops all.

    Args:
        title: of the bar that counts the pieces, of which `done` were finished before.
        work: a function of a module; returns a note for the bar.

    Raises:
        KeyboardInterrupt: a signal came. The processes were stopped by it too; the notes of their
            work are here.
    """
    context = multiprocessing.get_context("spawn")
    notes = list[str]()
    with (
        progress(title, done + len(pieces), done) as tick,
        ProcessPoolExecutor(
            min(jobs, len(pieces) or 1), context, initializer=_start_worker
        ) as pool,
    ):
        started: list[Future[str | _Stopped]] = []
        try:
            with _signals_blocked():
                started += [pool.submit(_work, work, piece) for piece in pieces]
            for count, future in enumerate(_as_ended(started), done + 1):
                result = future.result()
                if isinstance(result, _Stopped):
                    raise KeyboardInterrupt(result.number)
                notes.append(result)
                tick(count, result)
        except BaseException as error:
            for note in _stop(started):
                if isinstance(error, KeyboardInterrupt):
                    error.add_note(note)
            raise
    return notes


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Protect a process that starts in this block from signals until `_start_worker`.

    Windows has no masks, so there nothing is blocked.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_ended(futures: Sequence[Future[str | _Stopped]]) -> Iterator[Future[str | _Stopped]]:
    """Yield futures as they end, like `as_completed`; a signal breaks the wait within `POLL_S`."""
    pending = set(futures)
    while pending:
        ended, pending = wait(pending, POLL_S, FIRST_COMPLETED)
        yield from ended


def _stop(started: Sequence[Future[str | _Stopped]]) -> list[str]:
    """Have the processes save their work, wait, and return their notes.

    A second signal makes them stop at once.
    """
    running = [future for future in started if not future.cancel()]
    while not all(future.done() for future in running):
        for process in multiprocessing.active_children():
            process.terminate()
        with suppress(KeyboardInterrupt):
            list(_as_ended(running))
    notes = []
    for future in running:
        result = future.result() if future.exception() is None else None
        if isinstance(result, _Stopped):
            notes += result.notes
    return notes


# -- in the other processes ------------------------------------------------------------------------

_stopped_by = 0  # the number of a signal that came to this process


def _start_worker() -> None:
    """Leave Ctrl-C and the end of the terminal to the parent, and do not outlive it.

    The parent gets these signals too and sends SIGTERM. Without it the same work may be started
    again, and would find this process in its folder.
    """
    for number in SIGNALS:
        signal.signal(number, _note if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _note(number: int, frame: Any = None) -> None:
    global _stopped_by
    _stopped_by = number
    is_new()


def _work(work: Callable[..., str], piece: tuple[Any, ...]) -> str | _Stopped:
    if _stopped_by:
        return _Stopped(_stopped_by, [])
    try:
        with stopped_by_signals():
            return work(*piece)
    except KeyboardInterrupt as stop:
        _note(status_of(stop) - 128)
        return _Stopped(_stopped_by, getattr(stop, "__notes__", []))

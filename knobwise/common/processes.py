"""Work for several processes at once, which all come to a good end when a signal asks for it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from knobwise.common.interruption import (
    arrived,
    as_ended,
    signals_blocked,
    status_of,
    stopped_by_signals,
    stopped_only_by_parent,
)
from knobwise.common.progress import progress, show_in_parent, workers_shown


class _Stopped(NamedTuple):
    """That a piece of work was stopped by a signal, and what is kept of it."""

    number: int
    notes: list[str]


def in_processes(
    title: str, work: Callable[..., str], pieces: Sequence[tuple[Any, ...]], jobs: int, done: int = 0
) -> list[str]:
    """Call `work(*piece)` for every piece, several at the same time, each in a process of its own; their progress is
    shown here. The first error stops all.

    Args:
        title: of the bar that counts the pieces.
        work: a function of a module; gives a note for the bar.
        pieces: the arguments, one tuple for each call.
        jobs: processes at once.
        done: pieces that were finished before, for the bar.

    Returns:
        the notes, in the order in which the pieces ended.

    Raises:
        KeyboardInterrupt: a signal came; the work that it met has been stopped by the same, and its notes are here.
    """
    context, notes = multiprocessing.get_context("spawn"), list[str]()
    with (
        progress(title, done + len(pieces), done) as tick,
        workers_shown(context) as shown,
        ProcessPoolExecutor(min(jobs, len(pieces) or 1), context, initializer=_worker, initargs=shown) as pool,
    ):
        started: list[Future[str | _Stopped]] = []
        try:
            with signals_blocked():
                started += [pool.submit(_work, work, piece) for piece in pieces]
            for number, future in enumerate(as_ended(started), done + 1):
                if isinstance(found := future.result(), _Stopped):
                    raise KeyboardInterrupt(found.number)
                notes.append(found)
                tick(number, found)
        except BaseException as error:
            for stopped in _stop(started):
                for note in stopped.notes if isinstance(error, KeyboardInterrupt) else ():
                    error.add_note(note)
            raise
    return notes


def _stop(started: Sequence[Future[str | _Stopped]]) -> Iterator[_Stopped]:
    """Have the processes save what they are at, and wait for it; a second signal makes them stop at once."""
    running = [future for future in started if not future.cancel()]
    ended = False
    while not ended:
        for process in multiprocessing.active_children():
            process.terminate()
        with suppress(KeyboardInterrupt):
            ended = len(list(as_ended(running))) == len(running)
    for future in running:
        if future.exception() is None and isinstance(found := future.result(), _Stopped):
            yield found


def _work(work: Callable[..., str], piece: tuple[Any, ...]) -> str | _Stopped:
    if number := arrived():  # while this process was idle, or at another piece
        return _Stopped(number, [])
    try:
        with stopped_by_signals():
            return work(*piece)
    except KeyboardInterrupt as stop:
        return _Stopped(status_of(stop) - 128, getattr(stop, "__notes__", []))


def _worker(shown: Any) -> None:
    """No process outlives the one that started it: that work may be started again, and would meet it in its folder."""
    show_in_parent(shown)
    stopped_only_by_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

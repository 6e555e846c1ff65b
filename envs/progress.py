"""Progress with an honest time left: a rich bar in a terminal, a plain line once in a while elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Tick = Callable[[int, str], None]


@contextmanager
def progress(title: str, total: int, done: int = 0, every_s: float = 60.0, quiet_s: float = 0.0) -> Iterator[Tick]:
    """Yield ``tick(done, note)``; time left goes by this session's own rate: what was resumed does not flatter it.

    Without a terminal a line goes to stderr every ``every_s`` seconds and at the end. Nothing is shown in the first
    ``quiet_s`` seconds: work that may be short then says nothing.
    """
    console = Console(stderr=True)
    first, start = done, time.monotonic()

    def left(now_done: int) -> str:
        if now_done <= first:
            return "time left unknown"
        seconds = (time.monotonic() - start) / (now_done - first) * (total - now_done)
        return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"

    with ExitStack() as shown:
        columns = (TextColumn(title), BarColumn(), TextColumn("{task.completed}/{task.total} · {task.fields[note]}"))
        bar = Progress(*columns, console=console)
        task = bar.add_task(title, total=total, completed=done, note="")
        last = start

        def draw(now_done: int, note: str = "") -> None:
            if not bar.live.is_started:
                if time.monotonic() - start < quiet_s:
                    return
                shown.enter_context(bar)
            bar.update(task, completed=now_done, note=f"{left(now_done)} {note}".strip())

        def say(now_done: int, note: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= every_s or (now_done == total and now - start >= quiet_s):
                last = now
                print(f"{title}: {now_done}/{total}, {left(now_done)} {note}".rstrip(), file=sys.stderr, flush=True)

        yield draw if console.is_terminal else say

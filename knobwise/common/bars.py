"""Bars in a terminal, drawn by Rich, see `knobwise.common.progress`."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REDRAW_S = 0.1
"""Seconds between two drawings of a bar."""
NUMBERS = 40
"""Columns of a terminal for title, bar and numbers; the note has the others."""


class Bar:
    """A bar in the terminal; nested ones stand below each other, in one display."""

    display: Progress | None = None
    drawn = 0.0
    task: TaskID | None = None

    def show(self, now: float, title: str, **values: Any) -> None:
        with suppress(OSError, ValueError):  # the terminal may be gone
            display = Bar.display = Bar.display or _display()
            # the first time
            if self.task is None:
                self.task = display.add_task(title, **values)
                Bar.drawn = 0.0
                display.start()
            display.update(self.task, **values)
            if now - self.drawn >= REDRAW_S:
                Bar.drawn = now
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
            Bar.display = None
            display.stop()


def _display() -> Progress:
    # without a terminal nobody needs Rich
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

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

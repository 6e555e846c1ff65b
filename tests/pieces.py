"""Work for other processes, in a module of its own: importing it takes no torch, which each would
load for seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

from knobwise.common.errors import InputError
from knobwise.common.progress import progress

LONG_S = 60


def work(number: int) -> int:
    with progress(f"worker {number}", total=3) as tick:
        for done in range(1, 4):
            tick(done, f"note {number}")
    return number


def do_piece(folder: Path, what: str) -> str:
    """Leaves a file with its process's number, and does what its name says."""
    (folder / what).write_text(str(os.getpid()))
    if what == "wrong":
        raise InputError("something wrong")
    if what.startswith("long"):
        try:
            time.sleep(LONG_S)
        except KeyboardInterrupt as stop:
            stop.add_note(f"{what} was saved")
            raise
    return f"{what} done"
